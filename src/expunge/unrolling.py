"""Several certified steps of a small network as one compiled function, and none of it believed.

Entering compiled code costs as much as a small network's step, so eight steps are compiled as one:
parameters from the grid, forward, backward, clip, descent, rounding, and noise that was drawn
beforehand. That noise then exists before the gradients it must not influence, and the arithmetic is
a compiler's. So its results are proposals. For every step it returns the gradient g_t, the factors
of the clips, and the cells k_{t+1} it arrived at, and the run *replays* the step with the
arithmetic that the certificate rests on (:class:`~expunge.vector.GridVector`): g_t is used as any
gradient would be, clip factors are taken where they are no larger than the proved ones, and the
next gradient is used only if the replay arrived at exactly the same cells: it is then the gradient
at x_{t+1}, and a function of nothing else. At the first difference the rest of the proposals is
dropped, and the run goes on step by step from where the replay stands.

The run's first two gradients are compared with uncompiled ones, as in :mod:`expunge.gradients`. A
projection in gradient clipping must be the proved one to its last digit
(its contraction is accounted), so such runs are not unrolled; model clipping, whose guarantee needs
only the ball, is.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from expunge.batching import Batches, LossFunction
from expunge.compiling import (
    SHORT_STEP,
    UNROLLED,
    Batch,
    Compile,
    Prepare,
    allow_compiling,
    check_compile,
    differentiate,
    estimate_step,
    explain,
    find_obstacle,
    forbid_recompiling,
    is_close,
    make_compiled,
    pays,
)
from expunge.gradients import Compute
from expunge.precision import norm_margin
from expunge.randomness import capture_random, restore_random
from expunge.recipes import GradientClipping, ModelClipping
from expunge.subject import Subject
from expunge.vector import CHUNK, LOST, CertifiedVector, GridVector, Update


@dataclass(frozen=True)
class Proposal:
    """One step as compiled code took it: its gradient as one vector, and the cells it reached."""

    gradient: Tensor
    clip: float
    shrink: float
    cells: Tensor


def plan_unrolled(
    compile: Compile,
    subject: Subject,
    vector: CertifiedVector,
    recipe: GradientClipping | ModelClipping,
    loader: object,
    loss_fn: LossFunction | None,
    compute: Compute,
) -> UnrolledSteps | None:
    """Unrolled steps for a small network in memory, or None; ``compute`` is the uncompiled way."""
    check_compile(compile)
    if compile is False or loss_fn is None or type(loader) is not Batches:
        return None
    if not isinstance(vector, GridVector) or vector.size > CHUNK or vector.device.type != "cpu":
        return None
    if isinstance(recipe, GradientClipping) and (recipe.model_clip or math.inf) < math.inf:
        return None
    if any(True for _ in subject.model.buffers()) or find_obstacle(subject.model, loader):
        return None
    unrolled = min(UNROLLED, len(loader.inputs) // loader.batch_size, recipe.steps)
    seconds = estimate_step(subject.model, loader)
    if (
        unrolled == 0
        or seconds >= SHORT_STEP
        or not (compile is True or pays(recipe.steps, seconds))
    ):
        return None
    return UnrolledSteps(subject, recipe, vector, loader, loss_fn, compute, unrolled)


class UnrolledSteps:
    """Proposals for ``unrolled`` steps at a time; ``note`` says why there are none any more."""

    def __init__(
        self,
        subject: Subject,
        recipe: GradientClipping | ModelClipping,
        vector: GridVector,
        batches: Batches,
        loss_fn: LossFunction,
        compute: Compute,
        unrolled: int,
    ) -> None:
        self.note, self.unrolled, self._batches = "", unrolled, batches
        self._model, self._loss_fn, self._compute = subject.model, loss_fn, compute
        self._names, self.vector = list(subject.certified), vector
        self._point = [p.detach() for p in subject.certified.values()]
        centre = None if subject.centre is None else [c.detach() for c in subject.centre.values()]
        self._centre = (
            None if centre is None else torch.cat([c.reshape(-1).double() for c in centre])
        )
        bound = recipe.grad_clip if isinstance(recipe, GradientClipping) else math.inf
        radius = recipe.model_clip if isinstance(recipe, ModelClipping) else math.inf
        # Three margins: never above the factor that the replay proves from its own sum of squares.
        margin, lost = 1 + 3 * norm_margin(vector.size), math.sqrt(vector.size) * LOST
        self._numbers = _list_numbers([vector.grid, bound, radius, margin, lost])
        self._projected = radius < math.inf
        self._begun = False
        self._random: dict[str, Tensor] | None = None
        self._settings = contextlib.ExitStack()

    def __enter__(self) -> UnrolledSteps:
        return self

    def __exit__(self, *_: object) -> None:
        self._settings.close()

    @contextlib.contextmanager
    def proposing(
        self, batches: Sequence[Batch], updates: Sequence[Update]
    ) -> Generator[list[Proposal]]:
        """The steps from the vector's present cells; none if they cannot be compiled.

        Replay them inside; the parameters are the vector's again at the end.
        """
        with self.vector.writing_later():
            yield self._propose(batches, updates)
        if self._random is not None:
            restore_random(self._random)
            self._random = None

    def make_ready(self, batch: Batch) -> Batch:
        """A batch as it was taken, as the model takes it."""
        return self._batches.make_ready(batch[0]), batch[1]

    def _propose(self, batches: Sequence[Batch], updates: Sequence[Update]) -> list[Proposal]:
        if self.note:
            return []
        first, self._begun = not self._begun, True
        before = capture_random() if first else {}
        try:
            with allow_compiling() if first else contextlib.nullcontext():
                found = self._call(batches, updates)
        except Exception as error:  # whatever cannot be captured runs uncompiled
            self.note = explain(error)
            return []
        if first:
            self._random = capture_random()
            restore_random(before)
            self._settings.enter_context(forbid_recompiling())
        return found

    def accept(self, proposal: Proposal, batch: Batch, place: int) -> bool:
        """Whether a gradient may be used: the run's first two if uncompiled ones are close."""
        if self._random is None or place > 1:
            return True
        self.vector.write()
        found = self._compute(self.make_ready(batch))
        parts = proposal.gradient.split([g.numel() for g in found])
        pairs = zip(found, parts, strict=True)
        if all(is_close(torch.zeros_like(g), g, other.view(g.shape)) for g, other in pairs):
            return True
        self.note = "compiled and uncompiled gradients differ"
        return False

    def _call(self, batches: Sequence[Batch], updates: Sequence[Update]) -> list[Proposal]:
        drawing = self.vector.drawing
        assert drawing is not None
        noise = torch.from_numpy(drawing.preview(updates[0].number, len(updates)))
        rates = _list_numbers([update.learning_rate for update in updates])
        decays = _list_numbers([update.decay for update in updates])
        with torch.no_grad():
            gradients, cells, factors = make_compiled(take_steps)(
                self._model,
                self._names,
                self._point,
                self._centre,
                self.vector.cells,
                noise,
                list(batches),
                rates,
                decays,
                self._numbers,
                self._projected,
                self._batches.prepare,
                self._loss_fn,
            )
        rows = zip(gradients, factors.tolist(), cells, strict=True)
        return [Proposal(g, clip, shrink, k) for g, (clip, shrink), k in rows]


def take_steps(
    model: nn.Module,
    names: list[str],
    point: list[Tensor],
    centre: Tensor | None,
    cells: Tensor,
    noise: Tensor,
    batches: list[Batch],
    rates: Tensor,
    decays: Tensor,
    numbers: Tensor,
    projected: bool,
    prepare: Prepare | None,
    loss_fn: LossFunction,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What is compiled: k ← Q(Π(ρ k - (γ clip / g) · gradient)) + noise, for each batch.

    Returns the gradients, the cells after each step, and the factors of both clips.
    """
    grid, bound, radius, margin, lost = numbers.unbind()
    sizes = [p.numel() for p in point]
    k, one = cells, torch.ones_like(grid)
    gradients: list[Tensor] = []
    rows: list[Tensor] = []
    factors: list[Tensor] = []
    for i, (inputs, targets) in enumerate(batches):
        x = k * grid if centre is None else centre + k * grid
        parts = [
            part.view(p.shape).to(p.dtype) for part, p in zip(x.split(sizes), point, strict=True)
        ]
        ready = inputs if prepare is None else prepare(inputs)
        found, _ = differentiate(model, names, parts, ready, targets, loss_fn)
        g = torch.cat([tensor.reshape(-1).double() for tensor in found])
        clip, shrink = _clip(torch.sqrt((g * g).sum()), bound, margin, lost), one
        k = k * decays[i] - g * (rates[i] * clip / grid)
        if projected:
            shrink = _clip(torch.sqrt((k * k).sum()) * grid, radius, margin, lost)
            k = torch.trunc(k * shrink)
        else:
            k = torch.round(k)
        k = k + noise[i]
        gradients.append(g)
        rows.append(k)
        factors.append(torch.stack([clip, shrink]))
    return gradients, rows, torch.stack(factors)


def _clip(norm: Tensor, bound: Tensor, margin: Tensor, lost: Tensor) -> Tensor:
    """``vector.clip_factor`` with a wider margin; NaN for a norm that is not finite."""
    largest = norm * margin + lost
    return torch.where(largest <= bound, torch.ones_like(norm), bound / largest * (1 - 2.0**-50))


def _list_numbers(values: Sequence[float]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))
