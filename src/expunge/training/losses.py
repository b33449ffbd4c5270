"""The loss of one batch, in the few ways people write it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.errors import InputError, UnlearningError
from expunge.networks.randomness import seeded
from expunge.networks.tensors import Buffers, list_trainable, set_training_mode
from expunge.training.batches import list_batch_tensors, move_batch

Loss = Callable[..., Any]


def check_loss(loss: object) -> None:
    """Refuse what cannot be called, and a class where its instance is meant.

    >>> check_loss(nn.CrossEntropyLoss)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: loss is the class CrossEntropyLoss; it must be an instance: ...
    """
    if isinstance(loss, type):
        name = loss.__name__
        raise InputError(f"loss is the class {name}; it must be an instance: {name}()")
    if loss is not None and not callable(loss):
        raise InputError.of("loss", loss, "a function of (output, target) or (model, batch)")


def compute_loss(model: nn.Module, batch: Any, loss: Loss | None) -> Tensor:
    """The loss of one batch, a scalar.

    ============================  =====================================================
    batch                         loss
    ============================  =====================================================
    any, ``loss(model, batch)``   what it returns
    ``(x, …, y)``                 ``loss(model(x, …), y)``; inputs may be nested
    a tensor ``x``, or ``(x,)``   ``loss(model(x), x)``
    a mapping                     ``loss(model(**batch), batch)``; None or cross_entropy:
                                  the ``loss`` that the model returns
    ============================  =====================================================

    >>> import torch
    >>> model = nn.Linear(2, 1, bias=False)
    >>> compute_loss(model, (torch.zeros(3, 2), torch.ones(3, 1)), nn.functional.mse_loss).item()
    1.0
    """
    try:
        return _check_scalar(_compute(model, batch, loss))
    except RuntimeError as error:
        raise _explain(error, model, batch) from error


def _compute(model: nn.Module, batch: Any, loss: Loss | None) -> object:
    if loss is not None and takes_model(loss):
        return loss(model, batch)
    match batch:
        case tuple() | list() if loss is not None and len(cast(Sequence[Any], batch)) > 0:
            *inputs, target = cast(Sequence[Any], batch)
            return loss(_forward(model, inputs or [target]), target)
        case Mapping():
            output = model(**batch)
            if loss is None or loss is cross_entropy:  # a default, which takes no mapping
                return _find_own(output)
            return loss(output, batch)
        case _ if loss is None:
            raise InputError(
                "loss is None; it must be a function unless batches are mappings and the model "
                "returns its loss"
            )
        case _:
            return loss(model(batch), batch)


def _forward(model: nn.Module, inputs: Sequence[Any]) -> Any:
    """``model(x, …)``; one nested input is spread where ``forward`` takes its parts."""
    match inputs:
        case [Mapping() as named]:
            return model(**cast(Mapping[str, Any], named))
        case [tuple() | list() as parts] if _takes(model, len(cast(Sequence[Any], parts))):
            return model(*cast(Sequence[Any], parts))
        case _:
            return model(*inputs)


def _takes(model: nn.Module, count: int) -> bool:
    kinds = inspect.Parameter
    given = inspect.signature(model.forward).parameters.values()
    if any(p.kind is kinds.VAR_POSITIONAL for p in given):
        return True
    plain = [p for p in given if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    return count > 1 and len(plain) >= count


@functools.lru_cache(maxsize=64)
def _list_names(function: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return ()


def takes_model(loss: Loss) -> bool:
    """Whether a loss is written as ``loss(model, batch)``.

    >>> takes_model(lambda model, batch: 0), takes_model(nn.functional.mse_loss)
    (True, False)
    """
    target = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = _list_names(target)
    except TypeError:  # what cannot be hashed
        names = tuple(inspect.signature(target).parameters)
    return names[:2] == ("model", "batch")


def _find_own(output: Any) -> Any:
    loss = cast(object, getattr(output, "loss", None))
    if loss is None and isinstance(output, Mapping):
        loss = cast(Mapping[str, Any], output).get("loss")
    if loss is None:
        raise InputError(
            "batches are mappings, and the model returns no loss itself; give a loss, or labels in "
            "the batches"
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
    return loss.reshape(())


def _explain(error: RuntimeError, model: nn.Module, batch: Any) -> Exception:
    """Two dtypes that do not go together, in one sentence; else what torch said."""
    found = {t.dtype for t in list_batch_tensors(batch) if t.is_floating_point()}
    own = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if "dtype" not in str(error) or not found or not own or not found.isdisjoint(own):
        return error
    names = [", ".join(sorted(str(kind)[6:] for kind in kinds)) for kinds in (own, found)]
    return InputError(
        f"the model is {names[0]} and its batches are {names[1]}; they must be of one dtype"
    )


def is_repeatable(module: nn.Module, batch: Any, loss: Loss | None) -> bool:
    """Whether one batch, run twice with buffers and generators restored, gives one gradient."""
    parameters = list(list_trainable(module).values())
    placed = move_batch(batch, parameters[0].device)
    buffers, found = Buffers(module), list[list[Any]]()
    set_training_mode(module)
    for _ in range(2):
        with seeded(0):
            value = compute_loss(module, placed, loss)
            grads = torch.autograd.grad(value, parameters, materialize_grads=True)
        buffers.restore()
        found.append([g.to_dense() if g.is_sparse else g for g in grads])
    return all(torch.equal(one, two) for one, two in zip(*found, strict=True))
