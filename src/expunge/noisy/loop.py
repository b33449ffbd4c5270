"""The steps of one run over its vector: start, noisy steps, checkpoints, and the trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from expunge.accounting.precision import NoisyRecipe, choose_precision, list_levels
from expunge.certificates.record import Trace
from expunge.errors import UnlearningError
from expunge.noisy.checkpoint import Progress, load_checkpoint, remove_leftovers, save_checkpoint
from expunge.noisy.gradients import CompiledGradients, plan_gradients
from expunge.noisy.model import Subject, reset_statistics
from expunge.noisy.noise import Drawing, Noise
from expunge.noisy.unrolling import Proposal, UnrolledSteps, plan_unrolled
from expunge.noisy.vector import (
    CHUNK,
    CertifiedVector,
    FloatVector,
    GridVector,
    Norms,
    Update,
    lower,
)
from expunge.progress import show_progress
from expunge.recipes import GradientClipping, ModelClipping, OutputPerturbation, schedule
from expunge.training.batches import Cycle, count_examples, move_batch
from expunge.training.compiled import Compile
from expunge.training.losses import LossFunction, compute_loss

if TYPE_CHECKING:
    from expunge.noisy.team import Team

OnStep = Callable[[int, nn.Module], object]


class Loop:
    """One run: its vector, its trace, and how far it has come."""

    def __init__(
        self,
        subject: Subject,
        recipe: NoisyRecipe,
        loader: Iterable[Any],
        loss_fn: LossFunction | None,
        noise: Noise,
        compile: Compile = False,
        team: Team | None = None,
    ) -> None:
        self.subject, self.recipe, self.loader, self.loss_fn = subject, recipe, loader, loss_fn
        self.noise, self.team = noise, team
        self.precision = choose_precision(recipe, subject.size)
        parameters = list(subject.certified.values())
        centre = None if subject.centre is None else list(subject.centre.values())
        self.vector: CertifiedVector
        noisy = any(sigma > 0 for sigma in list_levels(recipe))
        if team is not None:
            self.vector = team.make_vector(self.precision.grid, noisy)
        elif noisy:
            self.vector = GridVector(parameters, centre, self.precision.grid)
        else:
            self.vector = FloatVector(parameters, centre)
        self.steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
        self.columns = np.zeros((max(self.steps, 1), 7))
        self.done = self.noise_keys = self.resumed = self.gradient_evaluations = 0
        self._cycle: Cycle | None = None
        self._compile: Compile = compile if team is None else False
        self._compiled: CompiledGradients | None = None
        self._place: dict[str, Tensor] | None = None

    def begin(self, path: Path | None, identity: dict[str, Any]) -> None:
        """x_0 = Π_{C0}(x̂) + N(0, σ0² I), or the state of the checkpoint."""
        reset_statistics(self.subject.model, self.subject.buffers)
        if path is not None and self._load(path, identity):
            return
        self._take_key()
        match self.recipe:
            case OutputPerturbation(start_clip=radius, noise_std=sigma):
                self.vector.start(radius)
                norms = self.vector.perturb(0, sigma)
                self.columns[0] = (0.0, sigma, 0.0, 1.0, norms.model, norms.noise, 0.0)
            case GradientClipping(start_noise_std=sigma) | ModelClipping(start_noise_std=sigma):
                radius = self.recipe.start_clip
                self.vector.start(math.inf if radius is None else radius)
                if sigma > 0:
                    self.vector.perturb(0, sigma)

    def run(
        self,
        path: Path | None,
        seconds: float,
        identity: dict[str, Any],
        on_step: OnStep | None,
        progress: bool,
    ) -> None:
        """All remaining steps; the state goes to ``path`` every so many seconds and at the end."""
        saved = time.monotonic()
        if not isinstance(self.recipe, OutputPerturbation):
            self._cycle = Cycle(self.loader, self._place, keep=path is not None)
            for _ in self._take_steps(self.recipe, self._cycle, on_step is None, progress):
                stop = self._tell(on_step)
                due = self.done < self.steps and time.monotonic() - saved >= seconds
                if self.team is not None:
                    stop, due = self.team.heed(stop, due)
                    self._agree()
                if path is not None and (due or stop is not None):
                    self._save(path, identity)
                    saved = time.monotonic()
                if stop is not None:
                    raise stop
        elif self.team is not None:
            self._agree()
        if path is not None:
            self._save(path, identity)

    def _take_steps(
        self,
        recipe: GradientClipping | ModelClipping,
        cycle: Cycle,
        alone: bool,
        progress: bool,
    ) -> Iterator[None]:
        """The remaining steps, by one or, where nobody looks in between, by several."""
        gamma = schedule(recipe.learning_rate, self.steps)
        sigma = schedule(recipe.noise_std, self.steps)
        unrolled = self._plan(recipe, alone=alone)
        count = 1 if unrolled is None else unrolled.unrolled
        remaining = range(self.done, self.steps)
        for t in show_progress(remaining, self.steps, "unlearning", progress):
            if t < self.done:
                continue
            updates = _list_updates(recipe, gamma[t : t + count], sigma[t : t + count], t)
            if unrolled is not None and len(updates) == count:
                self._advance(unrolled, cycle, updates)
            else:
                self._step(cycle.take(), updates[0])
            yield

    def _tell(self, on_step: OnStep | None) -> KeyboardInterrupt | None:
        """Tell of a step that is done; whoever is told may ask to stop here."""
        if on_step is not None:
            try:
                on_step(self.done, self.subject.model)
            except KeyboardInterrupt as stop:
                return stop
        return None

    def _agree(self) -> None:
        if self.team is not None and self.team.is_due(self.done, self.steps):
            self.team.check(self.done, self.columns, self._cycle, self.vector)

    def tell(self) -> Trace:
        """The trace, once every step is done."""
        columns = [tuple(cast(list[float], column.tolist())) for column in self.columns.T]
        names = [field.name for field in fields(Trace)]
        return Trace(**dict(zip(names, columns, strict=True)))  # pyright: ignore[reportArgumentType]

    def describe_noise(self) -> dict[str, Any]:
        """The noise source; "none" for a run without noise."""
        if isinstance(self.vector, GridVector):
            return self.noise.describe()
        return {"source": "none", "generator": None, "releasable": False, "seed": None}

    def _plan(
        self, recipe: GradientClipping | ModelClipping, *, alone: bool
    ) -> UnrolledSteps | None:
        """Several steps as one where nobody looks in between; else compiled gradients, or none."""
        subject, loss_fn = self.subject, self.loss_fn

        def compute(batch: Any) -> list[Tensor]:
            return compute_gradients(subject, batch, loss_fn)

        planned = None
        if alone:
            planned = plan_unrolled(
                self._compile, subject, self.vector, recipe, self.loader, loss_fn, compute
            )
        if planned is None:
            names = list(subject.certified)
            self._compiled = plan_gradients(
                self._compile, subject.model, names, self.loader, loss_fn, self.steps, compute
            )
        return planned

    def _step(self, taken: Any, update: Update) -> None:
        """x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)."""
        gradients, examples = self._differentiate(taken, update.number - 1)
        self._descend(gradients, examples, update)

    @property
    def _bound(self) -> float:
        """C1."""
        return self.recipe.grad_clip if isinstance(self.recipe, GradientClipping) else math.inf

    def _descend(
        self,
        gradients: Sequence[Tensor],
        examples: int,
        update: Update,
        proposal: Proposal | None = None,
    ) -> None:
        """The step with this gradient; a proposal may have a smaller factor than the clip has."""
        norm = self.vector.gradient_norm(gradients)
        clip = self.vector.clip_factor(norm, self._bound)
        clip = clip if proposal is None else lower(clip, proposal.clip)
        update = update._replace(clip=clip)
        norms = self.vector.step(gradients, update)
        self._note(update, norm, norms)
        self.gradient_evaluations += examples
        self.done = update.number

    def _advance(self, unrolled: UnrolledSteps, cycle: Cycle, updates: Sequence[Update]) -> None:
        """Several steps: proposed by compiled code, replayed here as far as both agree."""
        batches = cycle.take_several(len(updates))
        if not batches:
            self._step(cycle.take(), updates[0])
            return
        with unrolled.proposing(batches, updates) as proposals:
            for batch, update, proposal in zip(batches, updates, proposals, strict=False):
                if not unrolled.accept(proposal, batch):
                    break
                self._descend([proposal.gradient], len(batch[0]), update, proposal)
                if not torch.equal(unrolled.vector.cells, proposal.cells):
                    break
        agreed = self.done + 1 - updates[0].number
        for batch, update in zip(batches[agreed:], updates[agreed:], strict=True):
            self._step(unrolled.make_ready(batch), update)

    def _differentiate(self, taken: Any, t: int) -> tuple[list[Tensor], int]:
        """The mean gradient of a batch, and its number of examples, in all processes together."""
        if self.team is not None:
            batch = move_batch(taken.batch, self.subject.device)
            scale = self.team.find_scale(taken)
            with self.team.computing(t):
                gradients = compute_gradients(self.subject, batch, self.loss_fn, scale)
            return self.team.average(gradients), taken.total
        batch = move_batch(taken, self.subject.device)
        if self._compiled is None:
            return compute_gradients(self.subject, batch, self.loss_fn), count_examples(batch)
        return self._compiled.compute(batch), count_examples(batch)

    def _note(self, update: Update, norm: float, norms: Norms) -> None:
        gamma, sigma, clip = update.learning_rate, update.noise_std, update.clip
        nonfinite = not math.isfinite(norm)
        shown = 0.0 if nonfinite else norm
        row = (gamma, sigma, shown, clip, norms.model, norms.noise, nonfinite)
        self.columns[update.number - 1] = row

    def _take_key(self) -> None:
        if isinstance(self.vector, GridVector):
            levels = [sigma / self.vector.grid for sigma in list_levels(self.recipe)]
            size = self.vector.size
            if self.team is None:
                self.vector.drawing = Drawing(self.noise.begin(), levels, size, min(size, CHUNK))
            else:
                self.vector.drawing = self.team.make_drawing(self.noise, levels, self.vector)
            self.noise_keys += 1

    def _save(self, path: Path, identity: dict[str, Any]) -> None:
        tensors = {"trace": torch.from_numpy(self.columns)}
        if self._cycle is not None:
            tensors |= {f"place.{name}": t for name, t in self._cycle.place().items()}
        progress = Progress(self.done, self.noise_keys, self.resumed, self.gradient_evaluations)
        if self.team is not None:
            self.team.save(path, progress, identity, tensors, self.vector)
            return
        tensors |= {f"vector.{name}": t for name, t in self.vector.state().items()}
        save_checkpoint(path, progress, identity, tensors)

    def _load(self, path: Path, identity: dict[str, Any]) -> bool:
        """Go on where the checkpoint stands, if there is one, with a key of its own if steps are
        left."""
        if self.team is not None:
            found = self.team.load(path, identity, self.vector)
            if found is None:
                return False
            progress, tensors = found
        else:
            remove_leftovers(path)
            if not path.exists():
                return False
            progress, tensors = load_checkpoint(path, identity)
            self.vector.load(_under("vector.", tensors))
        self.done, self.noise_keys = progress.steps, progress.noise_keys
        self.resumed = progress.resumed
        self.gradient_evaluations = progress.gradient_evaluations
        self.columns[:] = tensors["trace"].numpy()
        self._place = _under("place.", tensors) or None
        if self.done < self.steps:
            self.resumed += 1
            self._take_key()
        return True


def compute_gradients(
    subject: Subject, batch: Any, loss_fn: LossFunction | None, scale: float = 1.0
) -> list[Tensor]:
    """``scale`` times the minibatch gradient, one dense tensor per certified parameter."""
    loss = compute_loss(subject.model, batch, loss_fn)
    if not loss.requires_grad:
        raise UnlearningError("the loss depends on no trainable parameter; it has no gradient")
    (loss if scale == 1 else loss * scale).backward()
    gradients: list[Tensor] = []
    for p in subject.certified.values():
        g = p.grad
        p.grad = None
        if g is None:
            g = torch.zeros_like(p)
        gradients.append(g if g.layout is torch.strided else g.to_dense())
    return gradients


def _list_updates(
    recipe: GradientClipping | ModelClipping,
    gamma: NDArray[np.float64],
    sigma: NDArray[np.float64],
    t: int,
) -> list[Update]:
    """The steps from t on as the vector sees them, but for the clips of their gradients."""
    radius = math.inf if recipe.model_clip is None else recipe.model_clip
    return [
        Update(rate, recipe.weight_decay, 1.0, radius, std, t + 1 + i)
        for i, (rate, std) in enumerate(zip(gamma.tolist(), sigma.tolist(), strict=True))
    ]


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
