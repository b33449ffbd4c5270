"""The loss of a batch, whatever batches are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from expunge.errors import InputError, UnlearningError
from expunge.training.holding import LIMIT, find_held

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
        if isinstance(item, Tensor | np.ndarray):
            kind = "a tensor" if isinstance(item, Tensor) else "an array"
            raise InputError(
                f"the loss holds {kind} (shape {tuple(cast(Any, item).shape)}): no noise covers "
                "it; write constants as numbers in the function"
            )
        if count == LIMIT:
            raise InputError(
                f"the loss holds more than {LIMIT} objects, too many to look for tensors among "
                "them; write constants as numbers in the function"
            )


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
    match batch:
        case tuple() | list() if loss_fn is not None and len(batch) > 1:
            *inputs, target = cast(Sequence[Any], batch)
            loss = loss_fn(model(*inputs), target)
        case Tensor() if loss_fn is not None:
            loss = loss_fn(model(batch), batch)
        case Mapping():
            output = model(**batch)
            loss = _own_loss(output) if loss_fn is None else loss_fn(output, batch)
        case _ if loss_fn is None:
            raise InputError.of(
                "loss_fn", None, "a function unless batches are mappings and the model returns loss"
            )
        case _:
            raise InputError.of(
                "batch", type(batch).__name__, "a tensor, a tuple (inputs, target) or a mapping"
            )
    return _check_scalar(loss)


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
