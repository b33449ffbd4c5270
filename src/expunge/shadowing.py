"""Shadow runs for the model audit: the whole story again and again, with fair coins for members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.membership import Signals
from expunge.progress import show_progress

ORIGINAL = "original"
FEWEST_SHADOWS = 4
_BATCH = 4096


@dataclass(frozen=True, eq=False)
class Shadow:
    """One run: ``original`` was trained on the retained data and on the candidates in ``members``.

    ``seed`` is for whatever the arms draw; it differs from run to run.
    """

    number: int
    seed: int
    members: Tensor
    original: nn.Module


def run_shadows(
    train: Callable[[Tensor, int], nn.Module],
    arms: Mapping[str, Callable[[Shadow], nn.Module]],
    inputs: Tensor,
    targets: Tensor,
    *,
    shadows: int = 16,
    seed: int = 0,
    progress: bool = False,
) -> Signals:
    """Train, run every arm, and read all candidates off each model, ``shadows`` times.

    ``train(members, seed)`` trains on the retained data and on the candidates where ``members`` is
    true. ``arms`` turn a shadow into a released model: ``"unlearned"`` by the run that is audited
    (its fine-tuning included), ``"retrained"`` and ``"centre"`` by the controls.

    >>> def train(members, seed):
    ...     model = nn.Linear(2, 2)
    ...     model.weight.data = torch.tensor([[0.0, 0.0], [float(members[0]), 0.0]])
    ...     return model
    >>> signals = run_shadows(train, {}, torch.eye(2), torch.tensor([1, 0]), shadows=6)
    >>> signals.members.shape, list(signals.odds)
    ((6, 2), ['original'])
    """
    if shadows < FEWEST_SHADOWS:
        raise InputError.of("shadows", shadows, f"at least {FEWEST_SHADOWS}")
    if ORIGINAL in arms:
        raise InputError.of("arms", ORIGINAL, "names other than 'original', which is always there")
    if len(inputs) != len(targets) or len(inputs) == 0:
        raise InputError.of("number of targets", len(targets), f"{len(inputs)}, one per input")
    rng = np.random.default_rng(seed)
    members = rng.random((shadows, len(inputs))) < 0.5
    seeds = rng.integers(2**31, size=shadows).tolist()
    shape = (3, shadows, len(inputs))
    found = {name: np.empty(shape) for name in (ORIGINAL, *arms)}
    for k in show_progress(range(shadows), shadows, "shadow runs", progress):
        chosen = torch.from_numpy(members[k])
        shadow = Shadow(k, seeds[k], chosen, train(chosen, seeds[k]))
        found[ORIGINAL][:, k] = read_signals(shadow.original, inputs, targets)
        for name, arm in arms.items():
            found[name][:, k] = read_signals(arm(shadow), inputs, targets)
    odds, losses, confidences = (
        {name: values[place] for name, values in found.items()} for place in range(3)
    )
    return Signals(members, odds, losses, confidences)


def read_signals(model: nn.Module, inputs: Tensor, targets: Tensor) -> np.ndarray[Any, Any]:
    """Rows: log-odds of the true class, cross-entropy, largest probability; in ``eval`` mode.

    >>> model = nn.Linear(2, 2, bias=False)
    >>> model.weight.data = torch.eye(2)
    >>> read_signals(model, torch.tensor([[3.0, 1.0]]), torch.tensor([0])).round(3).tolist()
    [[2.0], [0.127], [0.881]]
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    training = model.training
    rows: list[Tensor] = []
    try:
        model.eval()
        with torch.no_grad():
            for x, y in zip(inputs.split(_BATCH), targets.split(_BATCH), strict=True):
                rows.append(_read_batch(model(x.to(device)), y.to(device)))
    finally:
        model.train(training)
    return torch.cat(rows, dim=1).numpy()


def _read_batch(output: Any, targets: Tensor) -> Tensor:
    logits = cast(object, getattr(output, "logits", output))
    valid = "logits: a row per example, a column per class, all finite"
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        raise InputError.of("the model's output", type(logits).__name__, valid)
    if logits.ndim != 2 or len(logits) != len(targets) or logits.shape[1] < 2:
        raise InputError.of("the shape of the model's output", tuple(logits.shape), valid)
    if not bool(torch.isfinite(logits).all()):
        raise InputError("the model's output is not finite; it must be " + valid)
    if targets.ndim != 1 or targets.is_floating_point() or int(targets.max()) >= logits.shape[1]:
        raise InputError("targets must be one class number per example, below the output's columns")
    z = logits.double()
    own = z.gather(1, targets[:, None].long())
    rest = z.scatter(1, targets[:, None].long(), -torch.inf).logsumexp(dim=1)
    whole = z.logsumexp(dim=1)
    own = own[:, 0]
    return torch.stack([own - rest, whole - own, (z.amax(dim=1) - whole).exp()]).cpu()
