"""The loss of one batch, in the few ways people write it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.errors import InputError, UnlearningError
from expunge.networks.randomness import seeded
from expunge.networks.tensors import Buffers, list_trainable, set_training_mode
from expunge.training.batches import copy_batch

Loss = Callable[..., Any]
_PIECE = 1 << 17
_UNITS = 16  # in the last place: by so much two runs of one batch may differ on some kernels


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

    >>> model = nn.Linear(2, 1, bias=False)
    >>> compute_loss(model, (torch.zeros(3, 2), torch.ones(3, 1)), nn.functional.mse_loss).item()
    1.0
    """
    return run_batch(model, batch, loss)[0]


def run_batch(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[Tensor, Any, Any]:
    """The loss of one batch, the output and the target (None where only the loss knows them)."""
    if loss is not None and takes_model(loss):
        return _check_scalar(loss(model, batch)), None, None
    match batch:
        case tuple() | list() if loss is not None and len(cast(Sequence[Any], batch)) > 0:
            *inputs, target = cast(Sequence[Any], batch)
            output = _forward(model, inputs or [target])
        case Mapping():
            target, output = cast(Mapping[str, Any], batch), model(**batch)
            if loss is None or loss is cross_entropy:  # a default, which takes no mapping
                return _check_scalar(_find_own(output)), output, target.get("labels")
        case _ if loss is None:
            raise InputError(
                "loss is None; it must be a function unless batches are mappings and the model "
                "returns its loss"
            )
        case _:
            target, output = batch, model(batch)
    if loss is cross_entropy:
        _check_classes(getattr(output, "logits", output), target)
    return _check_scalar(loss(output, target)), output, target


def _check_classes(output: Any, target: Any) -> None:
    """Cross-entropy is of classes or their probabilities, not of other real numbers."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return
    one = output.shape[1:] in ((), (1,))
    if target.is_floating_point() and (one or output.shape != target.shape):
        raise InputError(
            "loss is cross_entropy, and the targets are real numbers; it must be one that fits "
            "them, such as torch.nn.functional.mse_loss"
        )


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


def compute_gradients(
    module: nn.Module,
    parameters: Sequence[nn.Parameter],
    batch: Any,
    loss: Loss | None,
    weight: float = 1.0,
) -> list[Tensor]:
    """``weight`` times the gradient of a batch, one dense tensor per parameter; none stays behind.

    >>> layer = nn.Linear(2, 1, bias=False)
    >>> batch = torch.ones(1, 2), torch.zeros(1, 1)
    >>> compute_gradients(layer, [layer.weight], batch, lambda output, target: output.sum())
    [tensor([[1., 1.]])]
    """
    value = compute_loss(module, batch, loss)
    if not value.requires_grad:
        raise UnlearningError("the loss depends on no trainable parameter; it has no gradient")
    (value if weight == 1 else value * weight).backward()
    found: list[Tensor] = []
    for p in parameters:
        g, p.grad = p.grad, None
        if g is None:
            g = torch.zeros_like(p)
        found.append((g if g.layout is torch.strided else g.to_dense()).contiguous())
    return found


def run_twice(differentiate: Callable[[], list[Tensor]]) -> tuple[list[Tensor], bool]:
    """A gradient, and whether it comes out again, up to the order in which kernels add.

    A ``forward`` that keeps something from one call to the next gives two gradients of one batch.
    """
    first = _summarise(differentiate())
    gradients = differentiate()
    unit = max(torch.finfo(g.dtype).eps for g in gradients)
    square = float(first[1].sum())
    sums = [math.sqrt(square * g.numel()) for g in gradients]
    allowed = _UNITS * unit * torch.tensor([sums, [square] * len(sums)])
    same = bool(((first - _summarise(gradients)).abs() <= allowed).all())
    return gradients, same or not math.isfinite(square)


def _summarise(gradients: Sequence[Tensor]) -> Tensor:
    """(Σ g_i, ‖g‖²) of every tensor, in float64: two gradients with the same are the same.

    Added up in pieces that fit in a cache: torch's own sums of one type in another take three times
    as long.
    """
    found: list[Tensor] = []
    for gradient in gradients:
        pieces = (piece.double() for piece in gradient.view(-1).split(_PIECE))
        sums = [torch.stack([g.sum(), g.dot(g)]) for g in pieces]
        found.append(torch.stack(sums).sum(0))
    return torch.stack(found, 1).cpu()


def is_repeatable(module: nn.Module, batch: Any, loss: Loss | None) -> bool:
    """Whether one batch, run twice with buffers and generators restored, gives one gradient."""
    parameters, buffers = list(list_trainable(module).values()), Buffers(module)
    set_training_mode(module)

    def differentiate() -> list[Tensor]:
        buffers.restore()
        with seeded(0):
            placed = copy_batch(batch, parameters[0].device)
            return compute_gradients(module, parameters, placed, loss)

    same = run_twice(differentiate)[1]
    buffers.restore()
    return same
