"""Several certified steps of a small network as one compiled function, whose results are proposals.

Entering compiled code costs as much as a small network's step, so eight steps are compiled as one:
parameters from the grid, forward, backward, clip, descent, rounding, and noise that was drawn
beforehand. For every step it returns the gradient g_t, the factor of the clip, and the cells
k_{t+1} it arrived at, and the run *replays* the step with the arithmetic that the certificate rests
on (:class:`~expunge.noisy.vector.GridVector`): g_t is used as any gradient would be, the factor is taken
where it is no larger than the proved one, and the next gradient is used only if the replay arrived
at exactly the same cells, so that it is a gradient at x_{t+1}. At the first difference the rest of
the proposals is dropped, and the run goes on step by step from where the replay stands.

The noise of a step exists before the gradient that must not know it. That gradients do not is
checked whenever something was compiled: the function is called again with the noise of each step
altered in turn, and no gradient up to that step may change by a bit. The run's first two finite
gradients are compared with uncompiled ones, as in :mod:`expunge.noisy.gradients`.

Whether a gradient was compiled depends on how the steps before it went. Gradient clipping allows
that: its sensitivity is that of any two clipped gradients. Model clipping needs a step that is a
function of x_t alone, and a projection in gradient clipping must contract to its last digit; such
runs are not unrolled.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from expunge.accounting.precision import norm_margin
from expunge.noisy.gradients import Compute
from expunge.noisy.model import Subject
from expunge.noisy.vector import CHUNK, LOST, CertifiedVector, GridVector, Update
from expunge.recipes import GradientClipping, ModelClipping
from expunge.training.batches import Batches
from expunge.training.compiled import (
    SHORT_STEP,
    UNROLLED,
    Batch,
    CheckedCode,
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
from expunge.training.losses import LossFunction
from expunge.training.randomness import capture_random, restore_random

COMPARED = 2
LEAKS = "compiled gradients change with noise that they must not know"
_CHECKED = CheckedCode()


@dataclass(frozen=True)
class Proposal:
    """One step as compiled code took it: its gradient as one vector, and the cells it reached."""

    gradient: Tensor
    clip: float
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
    if not isinstance(recipe, GradientClipping) or recipe.model_clip not in (None, math.inf):
        return None
    if compile == "auto" and not pays(recipe.steps, SHORT_STEP):
        return None
    if any(True for _ in subject.model.buffers()) or find_obstacle(subject.model, loader):
        return None
    unrolled = min(UNROLLED, len(loader.inputs) // loader.batch_size, recipe.steps)
    seconds = estimate_step(subject.model, loader)
    paying = compile is True or pays(recipe.steps, seconds)
    if unrolled == 0 or seconds >= SHORT_STEP or not paying:
        return None
    return UnrolledSteps(subject, recipe.grad_clip, vector, loader, loss_fn, compute, unrolled)


class UnrolledSteps:
    """Proposals for ``unrolled`` steps at a time; ``note`` says why there are none any more."""

    def __init__(
        self,
        subject: Subject,
        bound: float,
        vector: GridVector,
        batches: Batches,
        loss_fn: LossFunction,
        compute: Compute,
        unrolled: int,
    ) -> None:
        self.note, self.unrolled, self.vector = "", unrolled, vector
        self._model, self._batches, self._loss_fn = subject.model, batches, loss_fn
        self._compute, self._names = compute, list(subject.certified)
        self._point = [p.detach() for p in subject.certified.values()]
        self._centre: Tensor | None = None
        if subject.centre is not None:
            parts = [c.detach().reshape(-1).double() for c in subject.centre.values()]
            self._centre = torch.cat(parts)
        # Three margins: never above the factor that the replay proves from its own sum of squares.
        margin, lost = 1 + 3 * norm_margin(vector.size), math.sqrt(vector.size) * LOST
        self._numbers = _list_numbers([vector.grid, bound, margin, lost])
        self._strict = forbid_recompiling()
        self._begun = self._checked = False
        self._compared = 0
        self._random: dict[str, Tensor] | None = None

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

    def accept(self, proposal: Proposal, batch: Batch) -> bool:
        """Whether a gradient may be used: the run's first finite ones if uncompiled are close."""
        if self._random is None or self._compared == COMPARED:
            return True
        self.vector.write()
        found = self._compute(self.make_ready(batch))
        parts = proposal.gradient.split([g.numel() for g in found])
        pairs = zip(found, parts, strict=True)
        if all(is_close(torch.zeros_like(g), g, other.view(g.shape)) for g, other in pairs):
            self._compared += all(bool(torch.isfinite(g).all()) for g in found)
            return True
        self.note = "compiled and uncompiled gradients differ"
        return False

    def _propose(self, batches: Sequence[Batch], updates: Sequence[Update]) -> list[Proposal]:
        """Random numbers are drawn as uncompiled steps draw them; to compare, they do so again."""
        if self.note:
            return []
        assert self.vector.drawing is not None
        noise = torch.from_numpy(self.vector.drawing.preview(updates[0].number, len(updates)))
        checking = not self._checked or self._compared < COMPARED
        before = capture_random() if checking else {}
        found: list[Proposal] = []
        try:
            found = self._call(batches, updates, noise)
            if checking:
                self._random = capture_random()
                if not self._check(found, batches, updates, noise, before):
                    found = []
        except Exception as error:  # whatever cannot be captured runs uncompiled
            self.note = explain(error)
        if checking:
            restore_random(before)
        if not found:
            self._random = None
        return found

    def _check(
        self,
        found: list[Proposal],
        batches: Sequence[Batch],
        updates: Sequence[Update],
        noise: Tensor,
        before: dict[str, Tensor],
    ) -> bool:
        """Whether what was compiled may be used: no gradient knows the noise of its own step or of
        a later one. What did not change since the last check is not checked again.
        """
        if self._checked or _CHECKED.covers():
            self._checked = True
            return True
        if not all(bool(torch.isfinite(proposal.gradient).all()) for proposal in found):
            return False
        for place in range(len(found)):
            altered = noise.clone()
            altered[place] = altered[place].flip(0) + 1
            restore_random(before)
            again = self._call(batches, updates, altered)
            pairs = zip(found[: place + 1], again, strict=False)
            if not all(torch.equal(a.gradient, b.gradient) and a.clip == b.clip for a, b in pairs):
                self.note = LEAKS
                return False
        _CHECKED.extend()
        self._checked = True
        return True

    def _call(
        self, batches: Sequence[Batch], updates: Sequence[Update], noise: Tensor
    ) -> list[Proposal]:
        """Compiled steps; the first time on copies, in case that the batches are changed."""
        first, self._begun = not self._begun, True
        given = [(x.clone(), y) for x, y in batches] if first else list(batches)
        with torch.no_grad(), allow_compiling() if first else self._strict:
            gradients, cells, clips = make_compiled(take_steps)(
                self._model,
                self._names,
                self._point,
                self._centre,
                self.vector.cells,
                noise,
                given,
                _list_numbers([update.learning_rate for update in updates]),
                _list_numbers([update.decay for update in updates]),
                self._numbers,
                self._batches.prepare,
                self._loss_fn,
            )
        if first and not _is_same(given[0][0], batches[0][0]):
            raise ValueError("prepare or the model changes its input")
        rows = zip(gradients, clips.tolist(), cells, strict=True)
        return [Proposal(g, clip, k) for g, clip, k in rows]


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
    prepare: Prepare | None,
    loss_fn: LossFunction,
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """What is compiled: k ← round(ρ k - (γ clip / g) · gradient) + noise, for each batch.

    Returns the gradients, the cells after each step, and the factors of the clips; a factor is
    ``vector.clip_factor`` with a wider margin, NaN for a norm that is not finite.
    """
    grid, bound, margin, lost = numbers.unbind()
    sizes = [p.numel() for p in point]
    k = cells
    gradients: list[Tensor] = []
    rows: list[Tensor] = []
    clips: list[Tensor] = []
    for i, (inputs, targets) in enumerate(batches):
        x = k * grid if centre is None else centre + k * grid
        parts = [
            part.view(p.shape).to(p.dtype) for part, p in zip(x.split(sizes), point, strict=True)
        ]
        ready = inputs if prepare is None else prepare(inputs)
        found, _ = differentiate(model, names, parts, ready, targets, loss_fn)
        g = torch.cat([tensor.reshape(-1).double() for tensor in found])
        largest = torch.sqrt((g * g).sum()) * margin + lost
        within = bound / largest * (1 - 2.0**-50)
        clip = torch.where(largest <= bound, torch.ones_like(largest), within)
        k = torch.round(k * decays[i] - g * (rates[i] * clip / grid)) + noise[i]
        gradients.append(g)
        rows.append(k)
        clips.append(clip)
    return gradients, rows, torch.stack(clips)


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Bit by bit, since no number is equal to itself if it is none."""
    return torch.equal(one.view(torch.uint8), other.contiguous().view(torch.uint8))


def _list_numbers(values: Sequence[float]) -> Tensor:
    return torch.from_numpy(np.array(values, dtype=np.float64))
