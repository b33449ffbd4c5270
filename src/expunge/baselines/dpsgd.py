"""DP-SGD for a forget set of k examples: Poisson sampling, per-example clipping, exact noise.

    B_t  every example independently with probability q
    y_t  = Σ_{i ∈ B_t} clip_C(∇f_i(x_t)) + N(0, (z C)² I)
    x_{t+1} = optimizer step along y_t / divisor

**Empty batches** add noise like any other. **Last batches**: there are none; batches differ in
size, so sums are divided by one public number, never by the size drawn. **n**: by default that
number is the expected batch size q n, which makes n public: the certifying algorithm, which trains
without the k examples, divides by the same. Where n is private, give a ``divisor`` chosen without
it. **Optimizer**: momentum, schedules and weight decay see y_t and x_t alone: post-processing.

Sums, sampling and finite precision: ``expunge.baselines.dpsgd``.

The noisy sum of DP-SGD: per-example gradients, clipped, Poisson sampled, on a grid, with noise.

**Finite precision.** Each clipped gradient is cut to whole cells of a power-of-two grid, towards
zero, so its norm stays within C; whole numbers are summed exactly in float64, in any order; and
the noise is rounded Gaussians in whole cells (``expunge.noisy.noise``). So y_t is exactly a rounding of
the ideal mechanism, provided that an example's gradient is a function of the example and of x_t:
that it does not change, not in its last digit, with the rest of the batch. Kernels differ in the
last digit between shapes, so all gradients are computed in batches of one shape, padded if need be;
that they agree then is checked before the first step, and assumed afterwards.

Per-example gradients are ``torch.func.vmap(grad(...))``: any module, no hooks. Opacus 1.6 is slower
on the paper's CIFAR net (vmap takes 0.8 of its time) and faster by a millisecond a step on the tiny
MNIST net (``make bench``).
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
from expunge.baselines.descent import make_trace
from expunge.certificates.identifiers import commit, read_names
from expunge.certificates.record import NO_NOISE, Run, RunRecord
from expunge.errors import InputError, UnlearningError
from expunge.noisy.model import (
    CertifiedModel,
    check_finite,
    check_unchanged,
    copy_model,
)
from expunge.noisy.noise import Noise, StepNoise, SystemNoise
from expunge.noisy.vector import CHUNK
from expunge.processes.weights import hash_weights
from expunge.progress import show_progress
from expunge.recipes import Execution, GroupDPSGD
from expunge.training.batches import Augment
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.randomness import untouched_random
from expunge.training.train import InMemory, MakeOptimizer, ScheduleName, schedule_factor


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
    divisor = recipe.sampling_rate * count if divisor is None else divisor
    if not 0 < divisor < math.inf:
        raise InputError.of("divisor", divisor, "a finite number > 0")
    known = read_names(getattr(data, "ids", None) if ids is None else ids)
    forgotten, retained = _split_ids(known, read_names(forget_ids), recipe.group_size)
    noise = noise or SystemNoise()
    with torch.inference_mode(False), torch.enable_grad(), untouched_random():
        torch.manual_seed(seed)
        subject = copy_model(model, None, device=device)
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
        check_unchanged(subject)
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
        **subject.describe(),
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


Prepare = Callable[[Tensor], Tensor]
_CELLS = 26  # the grid is at most 2⁻²⁶ of the noise
_COLUMNS = 4096
_MOST = 2.0**52  # no sum of clipped gradients exceeds so many cells


class NoisySum:
    """y = Σ clip_C(∇f_i) + N(0, (z C)² I) over Poisson samples, on a grid; without noise on none.

    Formal guarantee: given x_t, adding or removing one example moves the sum before the noise by
    at most C in exact arithmetic, and the noise is exactly a rounded Gaussian of its own.
    """

    def __init__(
        self,
        subject: CertifiedModel,
        recipe: GroupDPSGD,
        loss_fn: LossFunction,
        noise: Noise,
        count: int,
        physical_batch: int,
    ) -> None:
        self.subject, self.recipe, self.noise = subject, recipe, noise
        self.physical_batch = physical_batch
        self.sigma = recipe.noise_multiplier * recipe.clip
        self.grid = choose_grid(recipe, count)
        self.noise_keys = 1
        # 1/grid must be a float of the gradients' dtype.
        self._least = torch.float32 if self.grid == 0 or self.grid > 1e-30 else torch.float64
        self._count, self._size = count, subject.size
        stream = noise.begin()
        key = hashlib.sha256(b"expunge/poisson\0" + stream.export_key()).digest()
        self._sampler = PoissonSampler(key, recipe.sampling_rate)
        self._drawing: StepNoise | None = None
        if self.grid > 0:
            levels = [self.sigma / self.grid] * recipe.steps
            self._drawing = StepNoise(stream, levels, min(self._size, CHUNK))
        self._gradients = differentiate(subject, loss_fn)
        self._sum = torch.zeros(self._size, dtype=torch.float64, device=subject.device)

    def sample(self, step: int) -> npt.NDArray[np.int64]:
        """The positions of this step's examples."""
        return self._sampler.draw(step, self._count)

    def release(
        self, step: int, batches: Iterable[tuple[Tensor, Tensor]], divisor: float
    ) -> tuple[float, float, bool]:
        """Write y/divisor into the parameters' ``grad``; ‖sum‖, ‖noise‖, and if all was finite."""
        self._sum.zero_()
        finite = True
        for x, y in batches:
            finite &= self._add(x, y)
        cell = self.grid or 1.0
        length, drawn = float(self._sum.norm()) * cell, 0.0
        if self._drawing is not None:
            for start in range(0, self._size, CHUNK):
                stop = min(start + CHUNK, self._size)
                cells = self._drawing.take(step, start, stop)
                drawn += float(np.dot(cells, cells))
                self._sum[start:stop] += torch.from_numpy(cells).to(self._sum.device)
        place = 0
        for p in self.subject.certified.values():
            part = self._sum[place : place + p.numel()].view(p.shape)
            p.grad = (part * (cell / divisor)).to(p.dtype)
            place += p.numel()
        return length, math.sqrt(drawn) * cell, finite

    def describe(self) -> dict[str, Any]:
        """The noise source and how batches were sampled."""
        source = self.noise.describe() if self.grid > 0 else dict(NO_NOISE)
        sampling = {"sampling": "Poisson, AES-256-CTR", "physical_batch": self.physical_batch}
        return source | sampling

    def check_independence(self, data: InMemory, prepare: Prepare | None) -> None:
        """Refuse a model whose gradient of one example shows which others are in the batch.

        The first examples, once in order, once backwards with every second one replaced.
        """
        size, model = self.physical_batch, self.subject.model
        order = np.arange(size) % len(data.targets)
        mixed = np.where(np.arange(size) % 2 == 0, order[::-1], order[0])
        flags = {module: module.training for module in model.modules()}
        model.eval()  # dropout draws anew for every place in a batch
        try:
            rows: list[list[Tensor]] = []
            for places in (order, mixed):
                ((x, y),) = load_chosen(data, places, size, prepare, None, torch.Generator())
                rows.append(self._take_gradients(x, y))
        finally:
            for module, flag in flags.items():
                module.training = flag
        for g, other in zip(*rows, strict=True):
            if not torch.equal(g.nan_to_num().flip(0)[::2], other.nan_to_num()[::2]):
                raise UnlearningError(
                    "the gradient of an example depends on the rest of its batch, so that nothing "
                    "bounds what it adds to a sum; a model that treats examples alone has no such "
                    "layer, and physical_batch=1 leaves no rest"
                )

    def _take_gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """One row per example, computed in a batch of exactly ``physical_batch``."""
        count, missing = len(y), self.physical_batch - len(y)
        device = self.subject.device
        if missing > 0:
            x = torch.cat([x, x[:1].expand(missing, *x.shape[1:])])
            y = torch.cat([y, y[:1].expand(missing, *y.shape[1:])])
        found = self._gradients(x.to(device), y.to(device))
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
    subject: CertifiedModel, loss_fn: LossFunction
) -> Callable[[Tensor, Tensor], Iterator[Tensor]]:
    """(x, y) ↦ each certified parameter's gradients, one row per example."""
    model = subject.model

    def compute_one(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        def forward(inputs: Tensor) -> Any:
            return functional_call(model, parameters, (inputs,))

        return compute_loss(cast(nn.Module, forward), (x[None], y[None]), loss_fn)

    batched = vmap(grad(compute_one), in_dims=(None, 0, 0), randomness="different")

    def compute_all(x: Tensor, y: Tensor) -> Iterator[Tensor]:
        parameters = {name: p.detach() for name, p in subject.certified.items()}
        try:
            found = batched(parameters, x, y)
        except RuntimeError as error:
            raise UnlearningError(
                "the gradient of a single example cannot be taken by torch.func.vmap: "
                + str(error).partition("\n")[0]
            ) from error
        return (found[name].detach() for name in subject.certified)

    return compute_all


def load_chosen(
    data: InMemory,
    chosen: npt.NDArray[np.int64],
    size: int,
    prepare: Prepare | None,
    augment: Augment | None,
    generator: torch.Generator,
) -> Iterator[tuple[Tensor, Tensor]]:
    """The chosen examples in chunks of at most ``size``."""
    for start in range(0, len(chosen), size):
        places = torch.from_numpy(chosen[start : start + size])
        x = data.inputs.index_select(0, places.to(data.inputs.device))
        y = data.targets.index_select(0, places.to(data.targets.device))
        x = x if augment is None else augment(x, generator)
        yield (x if prepare is None else prepare(x)), y
