"""DP-SGD for a forget set of k examples: Poisson sampling, per-example clipping, exact noise.

    B_t  every example independently with probability q
    y_t  = Σ_{i ∈ B_t} clip_C(∇f_i(x_t)) + N(0, (z C)² I)
    x_{t+1} = optimizer step along y_t / divisor

**Empty batches** add noise like any other. **Last batches**: there are none; batches differ in
size, so sums are divided by one public number, never by the size drawn. **n**: by default that
number is the expected batch size q n, which makes n public: the certifying algorithm, which trains
without the k examples, divides by the same. Where n is private, give a ``divisor`` chosen without
it. **Optimizer**: momentum, schedules and weight decay see y_t and x_t alone: post-processing.

**Finite precision.** Each clipped gradient is cut to whole cells of a power-of-two grid, towards
zero, so its norm stays within C; whole numbers are summed exactly in float64, in any order; and
the noise is rounded Gaussians in whole cells (``expunge.noisy.noise``). So y_t is exactly a
rounding of the ideal mechanism, provided that an example's gradient is a function of the example
and of x_t: that it does not change, not in its last digit, with the rest of the batch. The kernels
of a linear layer may round a row differently at another place. So gradients are computed in
batches of one shape, padded if need be, in the first of three ways that passes a test: with one
matrix product for all examples, with a product for each example, or one example at a time, which
has no rest of the batch. The test (made-up examples, so that the choice does not depend on data:
every place, other neighbours, equal bits) is made at x_0 and believed afterwards; the last way is
right by construction. Random numbers are refused, in the model and in ``prepare``: a dropout mask
drawn for a place in the batch would tie one example's gradient to who else is there.

Per-example gradients are ``torch.func.vmap(grad(...))``: any module, no hooks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap  # pyright: ignore[reportPrivateImportUsage]
from torch.nn.functional import cross_entropy

from expunge.accounting.precision import norm_margin
from expunge.certificates.identifiers import Commitment, commit, commit_request
from expunge.certificates.record import Run, RunRecord
from expunge.errors import InputError, UnlearningError
from expunge.noisy.loop import make_trace
from expunge.noisy.model import (
    CertifiedModel,
    HeldState,
    Public,
    check_finite,
    check_unchanged,
    copy_model,
)
from expunge.noisy.noise import Noise, StepNoise, check_noise, describe_noise
from expunge.noisy.vector import CHUNK
from expunge.processes.weights import hash_weights, list_tensors
from expunge.progress import show_progress
from expunge.recipes import Execution, GroupDPSGD, check_value
from expunge.training.losses import LossFunction, check_loss, compute_loss
from expunge.training.randomness import DRAWS, refused_random, seed_random, untouched_random
from expunge.training.settings import (
    InMemory,
    MakeOptimizer,
    OptimizerName,
    Prepare,
    ScheduleName,
    check_choice,
    make_optimizer,
    schedule_factor,
)
from expunge.training.train import read_request, read_retained

_CELLS = 26  # the grid is at most 2⁻²⁶ of the noise
_COLUMNS = 4096
_MOST = 2.0**52  # no sum of clipped gradients exceeds so many cells
_PROBES = 4
_ROUNDING = 1e-2  # gradients that differ by more depend on more than the order of adding


def train_dpsgd(
    model: nn.Module,
    data: InMemory,
    recipe: GroupDPSGD,
    *,
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: ScheduleName = "constant",
    optimizer: MakeOptimizer | OptimizerName | None = None,
    loss_fn: LossFunction = cross_entropy,
    prepare: Prepare | None = None,
    public: Public | None = None,
    noise: Noise | None = None,
    divisor: float | None = None,
    physical_batch: int = 64,
    forget_ids: Iterable[str | int] | None = None,
    ids: Iterable[str | int] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Run:
    """Train a copy of ``model``, a start that saw no data, so that any k examples can be forgotten.

    The released model needs nothing more on request. ``data`` has ``inputs`` and ``targets`` in
    memory; ``prepare(inputs)`` turns them into what the model takes. ``loss_fn`` is the mean over a
    batch, here of one example. Gradients are computed at most ``physical_batch`` at a time, which
    bounds memory. Sampling and noise come from ``noise``; nothing else is random. ``public`` is
    where frozen parameters and buffers come from, as in :func:`expunge.unlearn`. ``forget_ids``,
    once known, are committed to: at most ``group_size`` of the examples that ``ids`` identify
    (default: ``data.ids``).

    >>> from expunge.training.batches import Batches
    >>> data = Batches(torch.eye(4), torch.tensor([0, 0, 1, 1]), batch_size=4)
    >>> recipe = GroupDPSGD(clip=1.0, noise_multiplier=2.0, sampling_rate=0.5, steps=6,
    ...                     group_size=1)
    >>> run = train_dpsgd(nn.Linear(4, 2), data, recipe, learning_rate=0.1)
    >>> len(run.record.trace), run.record.noise["divisor"]
    (6, 2.0)
    """
    count = len(data.targets)
    _check_arguments(recipe, count, physical_batch, learning_rate)
    check_loss(loss_fn)
    check_choice(optimizer, momentum)
    divisor = recipe.sampling_rate * count if divisor is None else divisor
    if not 0 < divisor < math.inf:
        raise InputError.of("divisor", divisor, "a finite number > 0")
    forgotten = read_request(forget_ids)
    known = read_retained(data, ids, None)
    forget, retain = _split_ids(known, forgotten, recipe.group_size)
    source = check_noise(noise)
    with torch.inference_mode(False), torch.enable_grad(), untouched_random():
        seed_random(0)
        certified = copy_model(model, public=public, device=device)
        check_finite(certified.certified)
        before, held = hash_weights(list_tensors(model)), HeldState(certified)
        start = hash_weights({name: p.detach() for name, p in certified.certified.items()})
        parameters = list(certified.certified.values())
        stepping = make_optimizer(optimizer, parameters, learning_rate, momentum, weight_decay)
        mechanism = NoisySum(certified, recipe, loss_fn, source, data, prepare, physical_batch)
        rows = list[tuple[float, ...]]()
        for t in show_progress(range(recipe.steps), recipe.steps, "training", progress):
            held.put_back()
            norm = math.hypot(*(float(p.detach().norm()) for p in parameters))
            length, drawn, whole = mechanism.release(t, divisor)
            stepping.step(schedule_factor(schedule, t, recipe.steps))
            rate = stepping.learning_rate
            rows.append((rate, mechanism.sigma, length, 1.0, norm, drawn, float(not whole)))
        check_unchanged(certified)
        check_finite(certified.certified)
        after = hash_weights(list_tensors(certified.model))
    record = RunRecord(
        recipe=recipe,
        grid=mechanism.grid,
        execution=Execution(),
        noise=mechanism.describe() | {"divisor": divisor},
        noise_keys=1,
        trace=make_trace(rows),
        gradient_evaluations=round(recipe.sampling_rate * count * recipe.steps),  # not the realised
        weights_before=before,
        weights_noisy=after,
        weights_after=after,
        centre=start,
        forget=forget,
        retain=retain,
        checked=forget is not None and retain is not None,
        start="fresh",
        **certified.describe(),
    )
    return Run(certified.model, record, None if forgotten is None else frozenset(forgotten))


def _split_ids(
    known: tuple[str, ...] | None, forgotten: tuple[str, ...] | None, group_size: int
) -> tuple[Commitment | None, Commitment | None]:
    """Commitments to the forgotten and the other examples."""
    if forgotten is None:
        return None, None
    gone = set(forgotten)
    samples = len(forgotten) if known is None else sum(name in gone for name in known)
    unknown = gone - set(known or gone)
    if unknown:
        raise InputError(f"forget_ids holds {min(unknown)!r}, which is not among the data's ids")
    if samples > group_size:
        raise InputError.of("number of forgotten examples", samples, f"at most {group_size}")
    if known is None:
        return commit_request(forgotten, None), None
    rest = commit(name for name in known if name not in gone)
    return commit(forgotten, samples=samples), rest


def _check_arguments(
    recipe: GroupDPSGD, count: int, physical_batch: int, learning_rate: float
) -> None:
    if not isinstance(recipe, GroupDPSGD):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("recipe", recipe, "GroupDPSGD")
    if recipe.group_size >= count:
        raise InputError.of("group_size", recipe.group_size, f"below the {count} examples")
    if physical_batch != int(physical_batch) or physical_batch < 1:
        raise InputError.of("physical_batch", physical_batch, "a whole number >= 1")
    check_value("nonnegative", "learning_rate", learning_rate)


class NoisySum:
    """y = Σ clip_C(∇f_i) + N(0, (z C)² I) over Poisson samples, on a grid; without noise on none.

    Formal guarantee: given x_t, adding or removing one example moves the sum before the noise by
    at most C in exact arithmetic, and the noise is exactly a rounded Gaussian of its own.
    """

    def __init__(
        self,
        certified: CertifiedModel,
        recipe: GroupDPSGD,
        loss_fn: LossFunction,
        noise: Noise,
        data: InMemory,
        prepare: Prepare | None,
        physical_batch: int,
    ) -> None:
        self.certified, self.recipe, self.noise = certified, recipe, noise
        self.data, self.prepare = data, prepare
        self.sigma = recipe.noise_multiplier * recipe.clip
        self.grid = choose_grid(recipe, len(data.targets))
        # 1/grid must be a float of the gradients' dtype.
        self._least = torch.float32 if self.grid == 0 or self.grid > 1e-30 else torch.float64
        stream, self._size = noise.begin(), certified.size
        key = hashlib.sha256(b"expunge/poisson\0" + stream.export_key()).digest()
        self._sampler = PoissonSampler(key, recipe.sampling_rate)
        levels = [self.sigma / self.grid] * recipe.steps if self.grid > 0 else []
        self._noise = StepNoise(stream, levels, min(self._size, CHUNK))
        self._sum = torch.zeros(self._size, dtype=torch.float64, device=certified.device)
        self._choose_way(loss_fn, physical_batch)

    def release(self, step: int, divisor: float) -> tuple[float, float, bool]:
        """Write y/divisor into the parameters' ``grad``; ‖sum‖, ‖noise‖, and if all was finite."""
        chosen = self._sampler.draw(step, len(self.data.targets))
        finite = self.add_up(chosen)
        cell = self.grid or 1.0
        length, drawn = float(self._sum.norm()) * cell, 0.0
        for start in range(0, self._size if self.grid > 0 else 0, CHUNK):
            stop = min(start + CHUNK, self._size)
            cells = self._noise.take(step, start, stop)
            drawn += float(np.dot(cells, cells))
            self._sum[start:stop] += torch.from_numpy(cells).to(self._sum.device)
        place = 0
        for p in self.certified.certified.values():
            part = self._sum[place : place + p.numel()].view(p.shape)
            p.grad = (part * (cell / divisor)).to(p.dtype)
            place += p.numel()
        return length, math.sqrt(drawn) * cell, finite

    def describe(self) -> dict[str, Any]:
        """The noise source and how batches were sampled."""
        source = describe_noise(self.noise, self.grid)
        return source | {"sampling": "Poisson, AES-256-CTR", "physical_batch": self.physical_batch}

    def add_up(self, chosen: npt.NDArray[np.int64]) -> bool:
        """The sum of the clipped gradients of these examples; whether all were finite."""
        self._sum.zero_()
        finite = True
        for start in range(0, len(chosen), self.physical_batch):
            places = torch.from_numpy(chosen[start : start + self.physical_batch])
            x = self.data.inputs.index_select(0, places.to(self.data.inputs.device))
            y = self.data.targets.index_select(0, places.to(self.data.targets.device))
            finite &= self._add(x, y)
        return finite

    def _choose_way(self, loss_fn: LossFunction, physical_batch: int) -> None:
        """The first way in which no example's gradient shows who else is in the batch."""
        for self.physical_batch, apart in (
            (physical_batch, False),
            (physical_batch, True),
            (1, True),
        ):
            self._gradients = differentiate(self.certified, loss_fn, apart=apart)
            worst = self._find_dependence()
            if worst == 0:
                return
            if worst > _ROUNDING:
                break
        raise UnlearningError(
            "the gradient of an example depends on the rest of its batch, or on what was computed "
            "before it, so that nothing bounds what it adds to a sum; a model that treats examples "
            "alone has no such layer and keeps nothing between calls"
        )

    def _find_dependence(self) -> float:
        """The largest relative change of a gradient with its place and its neighbours.

        Some made-up examples, each at every place among its like, then among the others.
        """
        x, y = _make_up(self.data.inputs, integers=2), _make_up(self.data.targets, integers=1)
        places = torch.arange(self.physical_batch)
        alike = [
            self._take_gradients(x[[i] * len(places)], y[[i] * len(places)]) for i in range(_PROBES)
        ]
        worst = 0.0
        for shift in range(_PROBES):
            order = (places + shift) % _PROBES
            mixed = self._take_gradients(x[order], y[order])
            for k, found in enumerate(mixed):
                first = torch.stack([rows[k][0] for rows in alike])[order]
                same = torch.stack([alike[int(i)][k][j] for j, i in enumerate(order)])
                size = first.double().norm(dim=1).nan_to_num() + torch.finfo(first.dtype).tiny
                for other in (found, same):
                    gap = (other.double() - first.double()).norm(dim=1).nan_to_num()
                    worst = max(worst, float((gap / size).max()))
        return worst

    def _take_gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """One row per example, computed in a batch of exactly ``physical_batch``."""
        count, missing = len(y), self.physical_batch - len(y)
        device = self.certified.device
        if missing > 0:
            x = torch.cat([x, x[:1].expand(missing, *x.shape[1:])])
            y = torch.cat([y, y[:1].expand(missing, *y.shape[1:])])
        with refused_random("the gradient of an example"):
            x = x.to(device) if self.prepare is None else self.prepare(x).to(device)
            found = self._gradients(x, y.to(device))
        return [g.reshape(len(g), -1)[:count] for g in found]

    def _add(self, x: Tensor, y: Tensor) -> bool:
        """Add the clipped gradients of a chunk; one that is not finite counts as zero."""
        found = self._take_gradients(x, y)
        found = [g.to(torch.promote_types(g.dtype, self._least)) for g in found]
        norms = bound_norms(found)
        ok = torch.isfinite(norms)
        # The factor and its products are rounded to float32.
        factor = (self.recipe.clip / norms).clamp_(max=1.0) * (1 - 2.0**-22)
        factor = torch.where(ok, factor / (self.grid or 1.0), 0.0)
        place = 0
        for g in found:
            scaled = g.mul_(factor.to(g.dtype)[:, None])
            if not bool(ok.all()):
                scaled[~ok] = 0.0
            if self.grid > 0:
                scaled.trunc_()
            self._sum[place : place + g.shape[1]] += scaled.sum(0, dtype=torch.float64)
            place += g.shape[1]
        return bool(ok.all())


def _make_up(like: Tensor, integers: int) -> Tensor:
    """Examples of the same kind that nobody owns."""
    generator, shape = torch.Generator().manual_seed(0), (_PROBES, *like.shape[1:])
    if like.is_floating_point():
        return torch.rand(shape, generator=generator, dtype=like.dtype)
    return torch.randint(0, integers, shape, generator=generator).to(like.dtype)


def bound_norms(rows: list[Tensor]) -> Tensor:
    """At least the norm of each example's gradient, given as rows of several matrices; float64.

    A norm of n floats of unit roundoff u errs by a relative (n/2 + 2) u at most, in any order, and
    by underflowing squares; float32 rows are taken 4,096 columns at a time, so the bound is 0.025 %
    above the norm at most.

    >>> bound_norms([torch.tensor([[3.0]]), torch.tensor([[4.0]])]).round(decimals=2).tolist()
    [5.0]
    """
    parts: list[Tensor] = []
    for g in rows:
        wide = g.dtype == torch.float64
        for block in g.split(_COLUMNS, dim=1):
            norm = torch.linalg.vector_norm(block, dim=1).to(torch.float64)
            n = block.shape[1]
            unit, lost = (2.0**-53, 1e-150) if wide else (2.0**-24, 1e-18)
            parts.append(norm * (1 + (n / 2 + 8) * unit) + math.sqrt(n) * lost)
    squares = torch.stack(parts).square_().sum(0)
    return squares.sqrt_() * (1 + norm_margin(len(parts)))


class PoissonSampler:
    """Each of n examples with probability q, independently, from an AES-256 stream of its own.

    One 64-bit word per example is compared with ⌊2⁶⁴ q⌋: exactly q for q ≥ 2⁻¹¹, else below it by
    less than 2⁻⁶⁴, which is on the safe side.

    >>> sampler = PoissonSampler(bytes(32), 0.5)
    >>> len(sampler.draw(0, 1000)), len(sampler.draw(1, 1000))
    (505, 487)
    """

    def __init__(self, key: bytes, rate: float) -> None:
        self._key, self._threshold = key, int(Fraction(rate) * 2**64)

    def draw(self, step: int, count: int) -> npt.NDArray[np.int64]:
        """The positions chosen in this step, in order; a pure function of the key and the step."""
        if self._threshold >= 2**64:
            return np.arange(count)
        start = step.to_bytes(8, "big") + bytes(8)
        words = np.frombuffer(
            Cipher(algorithms.AES(self._key), modes.CTR(start))
            .encryptor()
            .update(bytes(8 * count)),
            dtype="<u8",
        )
        return np.flatnonzero(words < np.uint64(self._threshold))


def choose_grid(recipe: GroupDPSGD, count: int) -> float:
    """A power of two, at most σ 2⁻²⁶, on which n clipped gradients sum exactly; 0 without noise.

    >>> choose_grid(GroupDPSGD(clip=1.0, noise_multiplier=1.0, sampling_rate=0.1, steps=1,
    ...                        group_size=1), 50_000) == 2.0**-26
    True
    """
    sigma = recipe.noise_multiplier * recipe.clip
    if sigma == 0:
        return 0.0
    grid = math.ldexp(1.0, math.frexp(sigma)[1] - 1 - _CELLS)
    if count * recipe.clip / grid > _MOST:
        raise InputError.of(
            "noise_multiplier", recipe.noise_multiplier, f"above {count * 2.0**-24:g} for {count}"
        )
    return grid


def differentiate(
    certified: CertifiedModel, loss_fn: LossFunction, *, apart: bool
) -> Callable[[Tensor, Tensor], Iterator[Tensor]]:
    """(x, y) ↦ each certified parameter's gradients, one row per example.

    ``apart`` gives every example the parameters for itself, so that no product has two of them.
    """
    model = certified.model

    def compute_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def forward(inputs: Tensor) -> Any:
            return functional_call(model, parameters, (inputs,))

        return compute_loss(cast(nn.Module, forward), (x[None], y[None]), loss_fn)

    batched = vmap(grad(compute_one), in_dims=(0 if apart else None, 0, 0), randomness="error")

    def compute_all(x: Tensor, y: Tensor) -> Iterator[Tensor]:
        parameters = {name: p.detach() for name, p in certified.certified.items()}
        if apart:
            parameters = {name: p.expand(len(x), *p.shape) for name, p in parameters.items()}
        try:
            found = batched(parameters, x, y)
        except (RuntimeError, ValueError) as error:
            if "randomness" in str(error):
                raise UnlearningError(DRAWS.format("the gradient of an example")) from error
            raise UnlearningError(
                "the gradient of a single example cannot be taken by torch.func.vmap: "
                + str(error).partition("\n")[0]
            ) from error
        return (found[name].detach() for name in certified.certified)

    return compute_all
