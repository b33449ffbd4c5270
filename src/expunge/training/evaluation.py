"""How well a model does on any loader: mean loss, and accuracy where targets are classes."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge.errors import InputError
from expunge.processes.group import Processes, reshard
from expunge.training.batches import Batches, move_batch
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.randomness import untouched_random
from expunge.training.shares import Shares

EVALUATED = 2**20


@dataclass(frozen=True)
class Evaluation:
    """Accuracy and mean loss over ``count`` examples."""

    accuracy: float
    loss: float
    count: int

    def interval(self, confidence: float = 0.99) -> tuple[float, float]:
        """Where the accuracy lies with this confidence (Wilson).

        ``(p + z²/2n ± z √(p(1-p)/n + z²/4n²)) / (1 + z²/n)``

        >>> low, high = Evaluation(accuracy=0.96, loss=0.2, count=300).interval()
        >>> round(low, 3), round(high, 3)
        (0.92, 0.981)
        """
        if not 0 < confidence < 1:
            raise InputError.of("confidence", confidence, "a number between 0 and 1, both excluded")
        p, n, z = self.accuracy, self.count, NormalDist().inv_cdf((1 + confidence) / 2)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        middle, whole = p + z * z / (2 * n), 1 + z * z / n
        return max(0.0, (middle - half) / whole), min(1.0, (middle + half) / whole)


@dataclass(frozen=True)
class Measurement:
    """Over ``count`` examples; ``accuracy`` is None where targets are not one class each."""

    loss: float
    accuracy: float | None
    count: int


def evaluate(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    *,
    batch_size: int | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    loss_fn: LossFunction = cross_entropy,
) -> Evaluation:
    """Accuracy and mean loss of a classifier in eval mode; the module's own mode is put back.

    Batches hold about a million numbers unless told: activations of larger ones leave the cache.

    >>> evaluate(nn.Identity(), torch.eye(3), torch.tensor([0, 1, 0])).accuracy
    0.6666666666666666
    """
    if len(inputs) == 0:
        raise InputError.of("number of inputs", 0, "at least 1")
    if batch_size is None:
        batch_size = min(max(EVALUATED // max(inputs[:1].numel(), 1), 64), 4096)
    found = measure(
        model, Batches(inputs, targets, batch_size=batch_size, prepare=prepare), loss_fn
    )
    if found.accuracy is None:
        raise InputError.of("targets", tuple(targets.shape), "one class for each output")
    return Evaluation(found.accuracy, found.loss, found.count)


def measure(
    model: nn.Module,
    loader: Iterable[Any],
    loss_fn: LossFunction,
    processes: Processes | None = None,
) -> Measurement:
    """Loss and accuracy in eval mode; the module's mode and the random state are put back.

    Of several processes each measures its share, and every one returns the whole.

    >>> batches = [(torch.eye(3), torch.tensor([0, 1, 0]))]
    >>> measure(nn.Identity(), batches, cross_entropy).accuracy
    0.6666666666666666
    """
    processes = processes or Processes()
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seen: list[tuple[Any, Any]] = []

    def watch(output: Any, target: Any) -> Tensor:
        seen.append((output, target))
        return loss_fn(output, target)

    total = right = count = 0.0
    known = True
    with torch.no_grad(), untouched_random(), in_eval_mode(model), processes.listening("measuring"):
        for share in Shares(loader, processes, even=False):
            loss = compute_loss(model, move_batch(share.batch, device), watch)
            hits = count_hits(*seen.pop())
            if share.count > 0:
                known = known and hits is not None
                total, count = total + share.count * float(loss), count + share.count
                right += hits or 0
        reshard(model)
    total, right, count, unknown = processes.sum([total, right, count, not known])
    if count == 0:
        raise InputError("there is nothing to measure on; the data set is empty")
    return Measurement(total / count, None if unknown else right / count, int(count))


@contextmanager
def in_eval_mode(model: nn.Module) -> Generator[None]:
    """The modes of all modules are put back."""
    flags = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in flags.items():
            module.training = flag


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
