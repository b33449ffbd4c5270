"""How well a model does on any loader: mean loss, and accuracy where targets are classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from expunge.batching import LossFunction, compute_loss, count_examples, move_batch
from expunge.errors import InputError
from expunge.randomness import untouched_random


@dataclass(frozen=True)
class Measurement:
    """Over ``count`` examples; ``accuracy`` is None where targets are not one class each."""

    loss: float
    accuracy: float | None
    count: int


def measure(model: nn.Module, loader: Iterable[Any], loss_fn: LossFunction) -> Measurement:
    """Loss and accuracy in eval mode; the module's mode and the random state are put back.

    >>> batches = [(torch.eye(3), torch.tensor([0, 1, 0]))]
    >>> measure(nn.Identity(), batches, cross_entropy).accuracy
    0.6666666666666666
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seen: list[tuple[Any, Any]] = []

    def watch(output: Any, target: Any) -> Tensor:
        seen.append((output, target))
        return loss_fn(output, target)

    flags = {module: module.training for module in model.modules()}
    model.eval()
    total, right, count = 0.0, 0, 0
    try:
        with torch.no_grad(), untouched_random():
            for batch in loader:
                n = count_examples(batch)
                total += n * float(compute_loss(model, move_batch(batch, device), watch))
                hits = count_hits(*seen.pop())
                right, count = (-1 if hits is None or right < 0 else right + hits), count + n
    finally:
        for module, flag in flags.items():
            module.training = flag
    if count == 0:
        raise InputError("there is nothing to measure on; the data set is empty")
    return Measurement(total / count, None if right < 0 else right / count, count)


def count_hits(output: Any, target: Any) -> int | None:
    """How many classes are right; None if this is not a classification of one class each.

    >>> count_hits(torch.eye(2), torch.tensor([0, 0])), count_hits(torch.eye(2), torch.eye(2))
    (1, None)
    """
    if isinstance(target, Mapping):
        output = getattr(output, "logits", None)
        target = cast(Mapping[str, Any], target).get("labels")
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    whole = not target.is_floating_point() and target.dtype is not torch.bool
    if not whole or target.ndim != 1 or output.ndim != 2 or len(output) != len(target):
        return None
    return int((output.argmax(-1) == target).sum())


def take_own_loss(output: Any, batch: Any) -> Tensor:
    """The loss that a model returns itself, as Hugging Face models do when given labels."""
    loss = cast(object, getattr(output, "loss", None))
    if loss is None:
        raise InputError(
            "model.loss is 'model', but the model returns no loss; its batches must be mappings "
            "with labels, or model.loss must name a loss"
        )
    return cast(Tensor, loss)


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
