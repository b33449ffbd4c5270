"""The steps of one run over its vector: start, noisy steps, checkpoints, and the trace."""

from __future__ import annotations

import copy
import math
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expunge.accounting.precision import NoisyRecipe, choose_precision, list_levels
from expunge.certificates.record import Trace
from expunge.errors import InputError, UnlearningError
from expunge.noisy.checkpoint import Checkpoint, Progress, load_state, save_state
from expunge.noisy.model import (
    CertifiedModel,
    HeldState,
    estimate_statistics,
    list_uncertified,
    reset_statistics,
)
from expunge.noisy.noise import Noise
from expunge.noisy.team import Team
from expunge.noisy.vector import GridVector, Norms, Update
from expunge.progress import show_progress
from expunge.recipes import GradientClipping, ModelClipping, OutputPerturbation, schedule
from expunge.training.batches import Cycle, move_batch
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.randomness import seed_random, seeded_random

OnStep = Callable[[int, nn.Module], object]
_PLACE = "place."


class Loop:
    """One run: its vector, its trace, and how far it has come."""

    def __init__(
        self,
        certified: CertifiedModel,
        recipe: NoisyRecipe,
        loader: Iterable[Any],
        loss_fn: LossFunction | None,
        noise: Noise,
        team: Team,
    ) -> None:
        self.certified, self.recipe, self.loss_fn = certified, recipe, loss_fn
        self.noise, self.team, self.loader = noise, team, loader
        self.precision = choose_precision(recipe, certified.size)
        self.vector = team.make_vector(self.precision.grid)
        self.steps = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
        self.columns = np.zeros((max(self.steps, 1), 7))
        self.done = self.noise_keys = self.resumed = self.gradient_evaluations = 0
        self._cycle: Cycle | None = None
        self._place: dict[str, Tensor] | None = None

    def run(
        self,
        identity: dict[str, Any],
        checkpoint: Checkpoint | None = None,
        on_step: OnStep | None = None,
        progress: bool = False,
    ) -> None:
        """All of it. Afterwards the model is what is released: certified parameters from the
        vector, public tensors as they were given, statistics of the retained data."""
        self.team.begin(identity, self.noise)
        reset_statistics(self.certified)
        self._held = HeldState(self.certified)
        with self._seeded("data"):
            self._loss = _copy_loss(self.loss_fn)
            if not (checkpoint and checkpoint.resume and self._load(checkpoint.place, identity)):
                self._start()
            self._take_steps(checkpoint, identity, on_step, progress and self.team.processes.leads)
        self._put_back()

    def estimate(self) -> None:
        """The statistics that were reset, on retained data: post-processing."""
        with self._seeded("statistics"):
            statistics = estimate_statistics(self.certified, self.loader, self.loss_fn)
        self._put_back()
        for name, tensor in list_uncertified(self.certified.model).items():
            if name in statistics:
                tensor.copy_(statistics[name])

    @contextmanager
    def _seeded(self, purpose: str) -> Generator[None]:
        """Whatever data and loss draw follows from the run's key, not from an earlier training."""
        seed, held = self.team.derive_seed(purpose), (self.loader, self.loss_fn)
        with run_uncompiled(), seeded_random(seed, held):
            yield

    def _start(self) -> None:
        """x_0 = Π_{C0}(x̂) + N(0, σ0² I)."""
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

    def _take_steps(
        self,
        checkpoint: Checkpoint | None,
        identity: dict[str, Any],
        on_step: OnStep | None,
        progress: bool,
    ) -> None:
        """The remaining steps; the state is saved every so many seconds and at the end."""
        path = None if checkpoint is None else checkpoint.place
        every = math.inf if checkpoint is None else checkpoint.every
        saved = time.monotonic()
        if self.steps > 0:
            try:
                self._cycle = Cycle(
                    self.team.share_out(self.loader), self._place, keep=path is not None
                )
            except RuntimeError as error:
                if self._place is None:
                    raise
                raise InputError(f"checkpoint {path} is damaged: {error}") from None
        for t in show_progress(range(self.done, self.steps), self.steps, "unlearning", progress):
            self._step(t)
            stop = self._tell(on_step)
            due = self.done < self.steps and time.monotonic() - saved >= every
            stop, due = self.team.heed(stop, due)
            self._agree()
            if path is not None and (due or stop is not None):
                self._save(path, identity)
                saved = time.monotonic()
            if stop is not None:
                raise stop
        if self.steps == 0:
            self._agree()
        if path is not None:
            self._save(path, identity)

    def _step(self, t: int) -> None:
        """x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)."""
        assert not isinstance(self.recipe, OutputPerturbation)
        assert self._cycle is not None
        self._put_back()
        seed_random(self.team.derive_seed(f"step {t}"))
        share = self._cycle.take()
        batch = move_batch(share.batch, self.certified.device)
        with self.team.computing(f"step {t}"):
            scale = self.team.find_scale(share)
            own = compute_gradients(self.certified, batch, self.loss_fn, scale)
        gradients = self.team.average(own)
        norm = self.vector.gradient_norm(gradients)
        radius = self.recipe.model_clip
        update = Update(
            learning_rate=float(schedule(self.recipe.learning_rate, self.steps)[t]),
            weight_decay=self.recipe.weight_decay,
            clip=self.vector.clip_factor(norm, self._bound),
            radius=math.inf if radius is None else radius,
            noise_std=float(schedule(self.recipe.noise_std, self.steps)[t]),
            number=t + 1,
        )
        norms = self.vector.step(gradients, update)
        self._note(update, norm, norms)
        self.gradient_evaluations += share.total
        self.done = t + 1

    @property
    def _bound(self) -> float:
        """C1."""
        return self.recipe.grad_clip if isinstance(self.recipe, GradientClipping) else math.inf

    def _put_back(self) -> None:
        """The vector alone decides what the model is."""
        self._held.put_back()
        self.loss_fn = copy.deepcopy(self._loss)
        self.vector.write()

    def _tell(self, on_step: OnStep | None) -> KeyboardInterrupt | None:
        """Show a copy of the model after a step; whoever sees it may ask to stop here."""
        if on_step is not None:
            try:
                on_step(self.done, self.certified.show())
            except KeyboardInterrupt as stop:
                return stop
        return None

    def _agree(self) -> None:
        self.team.check(self.done, self.steps, self.columns, self._cycle, self.vector)

    def tell(self) -> Trace:
        """The trace, once every step is done."""
        return make_trace(self.columns.tolist())

    def _note(self, update: Update, norm: float, norms: Norms) -> None:
        gamma, sigma, clip = update.learning_rate, update.noise_std, update.clip
        nonfinite = not math.isfinite(norm)
        shown = 0.0 if nonfinite else norm
        row = (gamma, sigma, shown, clip, norms.model, norms.noise, nonfinite)
        self.columns[update.number - 1] = row

    def _take_key(self) -> None:
        """From here on the vector's noise is that of this run's key."""
        if isinstance(self.vector, GridVector):
            assert self.team.stream is not None
            levels = [sigma / self.vector.grid for sigma in list_levels(self.recipe)]
            self.vector.noise = self.vector.make_noise(self.team.stream, levels)
            self.noise_keys += 1

    def _save(self, path: Path, identity: dict[str, Any]) -> None:
        tensors = {"trace": torch.from_numpy(self.columns)}
        if self._cycle is not None:
            tensors |= {_PLACE + name: t for name, t in self._cycle.place().items()}
        progress = Progress(self.done, self.noise_keys, self.resumed, self.gradient_evaluations)
        save_state(path, self.team.processes, progress, identity, tensors, self.vector)

    def _load(self, path: Path, identity: dict[str, Any]) -> bool:
        """Go on where the checkpoint stands, if there is one, with a key of its own if steps are
        left."""
        found = load_state(path, self.team.processes, identity, self.vector)
        if found is None:
            return False
        progress, tensors = found
        self.done, self.noise_keys = progress.steps, progress.noise_keys
        self.resumed = progress.resumed
        self.gradient_evaluations = progress.gradient_evaluations
        self.columns[:] = tensors["trace"].numpy()
        place = {n.removeprefix(_PLACE): t for n, t in tensors.items() if n.startswith(_PLACE)}
        self._place = place or None
        if self.done < self.steps:
            self.resumed += 1
            self._take_key()
        return True


def make_trace(rows: Sequence[Sequence[float]]) -> Trace:
    """The trace whose columns are those of the rows.

    >>> make_trace([(0.1, 2.0, 1.0, 1.0, 3.0, 4.0, 0.0)]).noise_std
    (2.0,)
    """
    names = [field.name for field in fields(Trace)]
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    return Trace(**dict(zip(names, columns, strict=True)))  # pyright: ignore[reportArgumentType]


def run_uncompiled() -> AbstractContextManager[object]:
    """Whatever was compiled before runs as it is written: compiling may choose another path."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("force_eager")


def compute_gradients(
    certified: CertifiedModel, batch: Any, loss_fn: LossFunction | None, scale: float = 1.0
) -> list[Tensor]:
    """``scale`` times the minibatch gradient, one dense tensor per certified parameter."""
    loss = compute_loss(certified.model, batch, loss_fn)
    if not loss.requires_grad:
        raise UnlearningError("the loss depends on no trainable parameter; it has no gradient")
    (loss if scale == 1 else loss * scale).backward()
    return certified.take_gradients()


def _copy_loss(loss_fn: LossFunction | None) -> LossFunction | None:
    try:
        return copy.deepcopy(loss_fn)
    except (TypeError, RuntimeError) as error:
        raise InputError(f"the loss cannot be copied: {error}; write it as a function") from None
