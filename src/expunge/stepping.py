"""The steps of one run over its vector: start, noisy steps, checkpoints, and the trace."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from expunge.batching import Cycle, LossFunction, compute_loss, count_examples, move_batch
from expunge.buffers import reset_statistics
from expunge.checkpoint import Progress, load_checkpoint, remove_leftovers, save_checkpoint
from expunge.compiling import Compile
from expunge.drawing import Drawing
from expunge.errors import UnlearningError
from expunge.gradients import plan_gradients
from expunge.noise import Noise
from expunge.precision import NoisyRecipe, choose_precision, list_levels
from expunge.progress import show_progress
from expunge.recipes import GradientClipping, ModelClipping, OutputPerturbation, schedule
from expunge.record import Trace
from expunge.subject import Subject
from expunge.vector import CHUNK, CertifiedVector, FloatVector, GridVector, Norms, Update

if TYPE_CHECKING:
    from expunge.teamwork import Team

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
        self._compiled = plan_gradients(
            compile if team is None else False,
            subject.model,
            list(subject.certified),
            loader,
            loss_fn,
            self.steps,
            lambda batch: compute_gradients(subject, batch, loss_fn),
        )
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
            T = self.steps
            gamma, sigma = (
                schedule(self.recipe.learning_rate, T),
                schedule(self.recipe.noise_std, T),
            )
            self._cycle = Cycle(self.loader, self._place, keep=path is not None)
            for t in show_progress(range(self.done, T), T, "unlearning", progress):
                self._step(self.recipe, self._cycle, t, float(gamma[t]), float(sigma[t]))
                stop = self._tell(on_step)
                due = self.done < T and time.monotonic() - saved >= seconds
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

    def _step(
        self,
        recipe: GradientClipping | ModelClipping,
        cycle: Cycle,
        t: int,
        gamma: float,
        sigma: float,
    ) -> None:
        """x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)."""
        match recipe:
            case GradientClipping(grad_clip=bound, model_clip=R):
                radius = math.inf if R is None else R
            case ModelClipping(model_clip=radius):
                bound = math.inf
        gradients, examples = self._differentiate(cycle.take(), t)
        norm = self.vector.gradient_norm(gradients)
        clip = self.vector.clip_factor(norm, bound)
        update = Update(gamma, recipe.weight_decay, clip, radius, sigma, t + 1)
        norms = self.vector.step(gradients, update)
        self._note(update, norm, norms)
        self.gradient_evaluations += examples
        self.done = t + 1

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


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
