"""How well a model does: mean loss, and accuracy where targets are classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.data.data import Data
from expunge.errors import InputError
from expunge.networks.tensors import evaluating
from expunge.training.batches import Batches, Collate, count_examples, move_batch
from expunge.training.losses import Loss, run_batch


@dataclass(frozen=True)
class Evaluation:
    """Mean loss over ``count`` examples; ``accuracy`` is None where targets are no classes."""

    loss: float
    accuracy: float | None
    count: int


def evaluate(
    model: nn.Module,
    examples: Any,
    *,
    loss: Loss | None = cross_entropy,
    batch_size: int = 1024,
    collate: Collate | None = None,
) -> Evaluation:
    """Mean loss and accuracy in eval mode, of examples or :class:`expunge.Data`.

    >>> evaluate(nn.Identity(), (torch.eye(3), torch.tensor([0, 1, 0]))).accuracy
    0.6666666666666666
    """
    if isinstance(examples, Data):
        collate, examples = collate or examples.collate, examples.examples
    batches = Batches(examples, batch_size=batch_size, seed=0, collate=collate, shuffle=False)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total, right, count, classes = 0.0, 0, 0, True
    with evaluating(model), torch.no_grad():
        for given in batches.read(0):
            batch = move_batch(given, device)
            value, hits = _measure(model, batch, loss)
            size = count_examples(batch)
            total, count = total + size * value, count + size
            classes, right = classes and hits is not None, right + (hits or 0)
    if count == 0:
        raise InputError("there is nothing to evaluate on; the examples are empty")
    return Evaluation(total / count, right / count if classes else None, count)


def _measure(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[float, int | None]:
    """Loss of a batch, and how many of its classes are right."""
    value, output, target = run_batch(model, batch, loss)
    return float(value), count_hits(getattr(output, "logits", output), target)


def count_hits(output: Any, target: Any) -> int | None:
    """How many classes are right; None where targets are not one class each.

    >>> count_hits(torch.eye(2), torch.tensor([0, 0])), count_hits(torch.eye(2), torch.eye(2))
    (1, None)
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    whole = not target.is_floating_point() and target.dtype is not torch.bool
    if not whole or target.ndim != 1 or output.ndim != 2 or len(output) != len(target):
        return None
    return int((output.argmax(-1) == target).sum())
