"""The loss of a batch, whatever batches are made of."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, dtype, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parameter import is_lazy

from expunge.errors import InputError, UnlearningError
from expunge.processes.group import is_sharded
from expunge.processes.weights import check_module
from expunge.training.batches import find_tensors
from expunge.training.holding import LIMIT, find_held, is_array

LossFunction = Callable[[Any, Any], Tensor]


def check_loss(loss_fn: LossFunction | None) -> None:
    """Refuse a loss that holds a tensor or an array: what it was computed from, nobody can tell.

    >>> import torch
    >>> check_loss(nn.CrossEntropyLoss(label_smoothing=0.1))
    >>> check_loss(nn.CrossEntropyLoss(weight=torch.ones(2)))
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: the loss holds a tensor (shape (2,)): no noise covers it; ...
    """
    for count, item in enumerate(find_held(loss_fn), 1):
        if is_array(item):
            kind = "a tensor" if isinstance(item, Tensor) else "an array"
            shape = getattr(item, "shape", None)
            told = type(item).__name__ if shape is None else f"shape {tuple(shape)}"
            raise InputError(
                f"the loss holds {kind} ({told}): no noise covers it; write constants as numbers "
                "in the function"
            )
        if count == LIMIT:
            raise InputError(
                f"the loss holds more than {LIMIT} objects, too many to look for tensors among "
                "them; write constants as numbers in the function"
            )


def check_data(model: nn.Module, data: object) -> None:
    """Refuse data that hold a trained tensor of the old model, to make labels or inputs with it.

    >>> model = nn.Linear(8, 3)
    >>> check_data(model, [torch.ones(2, 8)])
    >>> check_data(model, [torch.ones(2, 8), model])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: the retained data hold weight of the old model: what it says about...
    """
    check_module(model)
    if is_sharded(model):
        return
    named = model.named_parameters()
    trained = {name: p for name, p in named if p.requires_grad and not is_lazy(p)}
    for item in find_held(data):
        for name, p in trained.items():
            if _holds(item, p) and len(p.unique()) >= 8:  # fewer may be a constant, or chance
                raise InputError(
                    f"the retained data hold {name} of the old model: what it says about them, as "
                    "labels, inputs or order, would carry it into the new one"
                )


def _holds(item: object, p: Tensor) -> bool:
    """Whether a tensor, array, storage or buffer has the numbers of ``p``, whatever its order."""
    if isinstance(item, torch.UntypedStorage):
        if item.nbytes() != p.numel() * p.element_size() or item.device.type == "meta":
            return False
        found = torch.empty(0, dtype=p.dtype, device=item.device).set_(item)
    elif isinstance(item, bytearray | array):
        data = bytearray(item)
        if len(data) != p.numel() * p.element_size():
            return False
        found = torch.frombuffer(data, dtype=p.dtype)
    elif isinstance(item, np.ndarray):
        if item.size != p.numel() or item.dtype.kind not in "iuf":
            return False
        found = torch.from_numpy(item.astype(np.float64))
    elif not isinstance(item, Tensor) or item.is_meta or item.layout is not torch.strided:
        return False
    else:
        found = item.detach()
    if found.numel() != p.numel() or found.is_complex() or p.is_complex():
        return False
    one, other = (t.flatten().double().cpu().sort().values for t in (found, p.detach()))
    return torch.equal(one, other)


def compute_loss(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> Tensor:
    """The loss of one batch, a scalar.

    ============================  =====================================================
    batch                         loss
    ============================  =====================================================
    ``(x, …, y)``                 ``loss_fn(model(x, …), y)``
    a tensor ``x``                ``loss_fn(model(x), x)``
    a mapping                     ``loss_fn(model(**batch), batch)``, or without
                                  ``loss_fn`` the ``loss`` that the model returns
    ============================  =====================================================

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> compute_loss(model, (torch.zeros(3, 2), torch.ones(3, 1)), nn.functional.mse_loss).item()
    1.0
    """
    try:
        return _check_scalar(_compute(model, batch, loss_fn))
    except RuntimeError as error:
        if "dtype" not in str(error) or not isinstance(cast(object, model), nn.Module):
            raise
        kinds = {t.dtype for t in find_tensors(batch) if t.is_floating_point()}
        own = {p.dtype for p in model.parameters() if p.is_floating_point()}
        if kinds and own and kinds.isdisjoint(own):
            raise InputError(
                f"the model is {_say(own)} and its batches are {_say(kinds)}; they must be of one "
                "dtype: model.float(), or inputs of the model's own"
            ) from error
        raise


def _say(kinds: set[dtype]) -> str:
    return ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


def _compute(model: nn.Module, batch: Any, loss_fn: LossFunction | None) -> object:
    match batch:
        case tuple() | list() if loss_fn is not None and len(batch) > 1:
            *inputs, target = cast(Sequence[Any], batch)
            return loss_fn(model(*inputs), target)
        case Tensor() if loss_fn is not None:
            return loss_fn(model(batch), batch)
        case Mapping():
            output = model(**batch)
            return _own_loss(output) if loss_fn is None else loss_fn(output, batch)
        case _ if loss_fn is None:
            raise InputError.of(
                "loss_fn", None, "a function unless batches are mappings and the model returns loss"
            )
        case _:
            raise InputError.of(
                "batch", type(batch).__name__, "a tensor, a tuple (inputs, target) or a mapping"
            )


def _own_loss(output: Any) -> Any:
    loss = cast(object, getattr(output, "loss", None))
    if loss is None and isinstance(output, Mapping):
        loss = cast(Mapping[str, Any], output).get("loss")
    if loss is None:
        raise InputError(
            "the model returns no loss itself; give loss_fn (in a job: model.loss), or batches "
            "that are mappings with labels"
        )
    return loss


def _check_scalar(loss: object) -> Tensor:
    if not isinstance(loss, Tensor):
        raise UnlearningError(
            f"the loss is a {type(loss).__name__}; it must be a tensor with one number"
        )
    if loss.numel() != 1:
        raise UnlearningError(
            f"the loss has shape {tuple(loss.shape)}; it must be one number (take its mean)"
        )
    if not loss.is_floating_point():
        raise UnlearningError(f"the loss is of dtype {loss.dtype}; it must be a real number")
    return loss.reshape(())


def take_own_loss(output: Any, batch: Any) -> Tensor:
    """The loss that a model returns itself, as Hugging Face models do when given labels."""
    return _own_loss(output)


def find_loss(name: str | None, sample: Any) -> LossFunction | None:
    """The loss of this name; None for a function of the user's own, which the caller loads.

    Without a name: the model's own loss where samples are mappings, cross-entropy elsewhere.
    """
    losses: Mapping[str, Callable[[Any, Any], Tensor]] = {
        "cross-entropy": cross_entropy,
        "mse": mse_loss,
        "model": take_own_loss,
    }
    if name is None:
        name = "model" if isinstance(sample, Mapping) else "cross-entropy"
    return losses.get(name)
