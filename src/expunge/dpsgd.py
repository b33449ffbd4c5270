"""DP-SGD for a forget set of k examples: Poisson sampling, per-example clipping, exact noise.

    B_t  every example independently with probability q
    y_t  = Σ_{i ∈ B_t} clip_C(∇f_i(x_t)) + N(0, (z C)² I)
    x_{t+1} = optimizer step along y_t / divisor

**Empty batches** add noise like any other. **Last batches**: there are none; batches differ in
size, so sums are divided by one public number, never by the size drawn. **n**: by default that
number is the expected batch size q n, which makes n public: the certifying algorithm, which trains
without the k examples, divides by the same. Where n is private, give a ``divisor`` chosen without
it. **Optimizer**: momentum, schedules and weight decay see y_t and x_t alone: post-processing.

Sums, sampling and finite precision: ``expunge.noisy_sum``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from expunge.accounting import Execution
from expunge.batching import Augment, LossFunction
from expunge.circumstances import describe_subject, read_names
from expunge.descent import make_trace
from expunge.errors import InputError
from expunge.noise import Noise, SystemNoise
from expunge.noisy_sum import NoisySum, Prepare, load_chosen
from expunge.progress import show_progress
from expunge.randomness import untouched_random
from expunge.recipes import GroupDPSGD
from expunge.record import RunRecord, commit
from expunge.subject import check_finite, check_unchanged, copy_subject
from expunge.training import InMemory, MakeOptimizer, ScheduleName, schedule_factor
from expunge.unlearning import Run
from expunge.weights import hash_weights


def train_dpsgd(
    model: nn.Module,
    data: InMemory,
    recipe: GroupDPSGD,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: ScheduleName = "constant",
    optimizer: MakeOptimizer | None = None,
    loss_fn: LossFunction = cross_entropy,
    prepare: Prepare | None = None,
    augment: Augment | None = None,
    noise: Noise | None = None,
    divisor: float | None = None,
    physical_batch: int = 64,
    forget_ids: Iterable[str | int] | None = None,
    ids: Iterable[str | int] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    progress: bool = False,
) -> Run:
    """Train a copy of ``model``, a start that saw no data, so that any k examples can be forgotten.

    The released model needs nothing more on request. ``data`` has ``inputs`` and ``targets`` in
    memory; ``augment(inputs, generator)`` and ``prepare(inputs)`` must treat each example alone.
    ``loss_fn`` is the mean over a batch, here of one example. Gradients are computed
    ``physical_batch`` at a time, which bounds memory. ``seed`` draws augmentation and dropout;
    sampling and noise come from ``noise``. ``forget_ids``, once known, are committed to: at most
    ``group_size`` of ``ids`` (default: ``data.ids``).

    >>> from expunge.batching import Batches
    >>> data = Batches(torch.eye(4), torch.tensor([0, 0, 1, 1]), batch_size=4)
    >>> recipe = GroupDPSGD(clip=1.0, noise_multiplier=2.0, sampling_rate=0.5, steps=6,
    ...                     group_size=1)
    >>> run = train_dpsgd(nn.Linear(4, 2), data, recipe, learning_rate=0.1)
    >>> len(run.record.trace), run.record.noise["divisor"]
    (6, 2.0)
    """
    count = len(data.targets)
    _check_arguments(recipe, count, physical_batch, learning_rate)
    divisor = recipe.sampling_rate * count if divisor is None else divisor
    if not 0 < divisor < math.inf:
        raise InputError.of("divisor", divisor, "a finite number > 0")
    known = read_names(getattr(data, "ids", None) if ids is None else ids)
    forgotten, retained = _split_ids(known, read_names(forget_ids), recipe.group_size)
    noise = noise or SystemNoise()
    with torch.inference_mode(False), torch.enable_grad(), untouched_random():
        torch.manual_seed(seed)
        subject = copy_subject(model, None, device=device)
        check_finite(subject.certified)
        parameters = list(subject.certified.values())
        stepping = (
            torch.optim.SGD(parameters, learning_rate, momentum, weight_decay=weight_decay)
            if optimizer is None
            else optimizer(parameters)
        )
        base = [float(group["lr"]) for group in stepping.param_groups]
        mechanism = NoisySum(subject, recipe, loss_fn, noise, count, physical_batch)
        mechanism.check_independence(data, prepare)
        generator = torch.Generator().manual_seed(seed)
        rows, seen = list[tuple[float, ...]](), 0
        for t in show_progress(range(recipe.steps), recipe.steps, "training", progress):
            for group, rate in zip(stepping.param_groups, base, strict=True):
                group["lr"] = rate * schedule_factor(schedule, t, recipe.steps)
            chosen = mechanism.sample(t)
            batches = load_chosen(data, chosen, physical_batch, prepare, augment, generator)
            norm = math.hypot(*(float(p.detach().norm()) for p in parameters))
            length, drawn, whole = mechanism.release(t, batches, divisor)
            stepping.step()  # pyright: ignore[reportUnknownMemberType]
            rate = float(stepping.param_groups[0]["lr"])
            rows.append((rate, mechanism.sigma, length, 1.0, norm, drawn, float(not whole)))
            seen += len(chosen)
        stepping.zero_grad(set_to_none=True)
        check_unchanged(model, subject)
    after = hash_weights(subject.model.state_dict())
    start = {name: p.detach() for name, p in model.named_parameters() if name in subject.certified}
    record = RunRecord(
        recipe=recipe,
        grid=mechanism.grid,
        execution=Execution(),
        noise=mechanism.describe() | {"divisor": divisor},
        noise_keys=mechanism.noise_keys,
        trace=make_trace(rows),
        gradient_evaluations=seen,
        weights_before=hash_weights(model.state_dict()),
        weights_noisy=after,
        weights_after=after,
        centre=hash_weights(start),
        forget=forgotten,
        retain=retained,
        start="fresh",
        **describe_subject(subject),
    )
    return Run(subject.model, record)


def _split_ids(
    known: tuple[str, ...] | None, forgotten: tuple[str, ...] | None, group_size: int
) -> tuple[Any, Any]:
    """Commitments to the forgotten and the other examples."""
    if forgotten is None:
        return None, None
    if len(forgotten) > group_size:
        raise InputError.of("number of forget_ids", len(forgotten), f"at most {group_size}")
    if known is None:
        return commit(forgotten), None
    unknown = set(forgotten) - set(known)
    if unknown:
        raise InputError(f"forget_ids holds {min(unknown)!r}, which is not among the data's ids")
    gone = set(forgotten)
    return commit(forgotten), commit(name for name in known if name not in gone)


def _check_arguments(
    recipe: GroupDPSGD, count: int, physical_batch: int, learning_rate: float
) -> None:
    if not isinstance(recipe, GroupDPSGD):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("recipe", recipe, "GroupDPSGD")
    if recipe.group_size >= count:
        raise InputError.of("group_size", recipe.group_size, f"below the {count} examples")
    if physical_batch != int(physical_batch) or physical_batch < 1:
        raise InputError.of("physical_batch", physical_batch, "a whole number >= 1")
    if not 0 <= learning_rate < math.inf:
        raise InputError.of("learning_rate", learning_rate, "a finite number >= 0")
