"""The noisy steps of one run over its vector, and the trace of them.

    x_0     = Π_{C0}(x̂) + N(0, σ0² I)
    x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)

``g_t`` is a minibatch gradient on retained data. Gradient clipping clips it to C1, model clipping
clips the model to R = C2 instead, output perturbation takes no step at all. A step is a function of
the vector, of retained data and of fresh randomness: buffers are ``build()``'s before each, the
generators are seeded from the run, and every parameter is written from the vector after it.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # pyright: ignore[reportPrivateUsage]

from expunge.accounting.precision import LARGEST_CELL
from expunge.certificates.consistency import NOISE_DEVIATIONS
from expunge.certificates.hashes import hash_tensor
from expunge.certificates.record import Trace
from expunge.errors import InputError, UnlearningError
from expunge.networks.randomness import seed_all
from expunge.networks.tensors import Buffers, evaluating, list_tensors, list_trainable
from expunge.noisy.noise import Noise, NoiseStream
from expunge.noisy.processes import CHECK_EVERY, Processes
from expunge.noisy.vector import GridVector, Norms, Update
from expunge.progress import show_progress
from expunge.recipes import GradientClipping, NoisyRecipe, OutputPerturbation, schedule
from expunge.training.batches import Batches, copy_batch, move_batch, split_batch
from expunge.training.checkpoints import read_checkpoint, write_checkpoint
from expunge.training.losses import Loss, compute_gradients, compute_loss, run_twice

FILE = "noisy.pt"
SAVE_EVERY = 30.0  # seconds
_COLUMNS = len(Trace.model_fields)


class Steps:
    """One run: its vector, its trace, and how far it has come.

    ``folder`` keeps its state: the vector as it is, and the trace so far; never a noise key. A step
    whose noise was drawn but whose state was not saved is done again with fresh noise: that draw
    was never released.
    """

    def __init__(
        self,
        module: nn.Module,
        vector: GridVector,
        recipe: NoisyRecipe,
        batches: Batches,
        loss: Loss | None,
        noise: Noise,
        processes: Processes,
        folder: Path | None = None,
    ) -> None:
        self.file = None if folder is None else folder / FILE
        self.module, self.vector, self.recipe, self.loss = module, vector, recipe, loss
        self.batches, self.noise, self.processes = batches, noise, processes
        self.parameters = list(list_trainable(module).values())
        self.buffers = Buffers(module)
        self.count = 0 if isinstance(recipe, OutputPerturbation) else recipe.steps
        self.columns = np.zeros((max(self.count, 1), _COLUMNS))
        self.done = self.keys = self.resumed = 0
        self._stream: NoiseStream | None = None
        self._rates, self._levels = list[float](), list[float]()
        if not isinstance(recipe, OutputPerturbation):
            self._rates = schedule(recipe.learning_rate, self.count).tolist()
            self._levels = schedule(recipe.noise_std, self.count).tolist()
        self._checked = False
        # What is gathered from memory is a copy already.
        plain = batches.collate is None and batches.loader is None
        self._move = move_batch if plain and batches.kind == "columns" else copy_batch

    def start(self, old: Sequence[Tensor]) -> None:
        """x_0 = Π_{C0}(x̂) + N(0, σ0² I)."""
        self._take_key()
        recipe, radius = self.recipe, self.recipe.start_clip
        self.vector.start(math.inf if radius is None else radius, old)
        if isinstance(recipe, OutputPerturbation):
            norms = self.vector.perturb(0, recipe.noise_std)
            self._note(Update(0.0, 0.0, 1.0, math.inf, recipe.noise_std, 1), 0.0, norms)
        elif recipe.start_noise_std > 0:
            self.vector.perturb(0, recipe.start_noise_std)

    def run(self, *, progress: bool = False) -> None:
        """The steps that remain; the state is saved now and then, at the end and at Ctrl-C."""
        saved = time.monotonic()
        batches = self.batches.repeat(self.done)
        remaining = range(self.done, self.count)
        shown = progress and self.processes.leads
        try:
            for t in show_progress(remaining, self.count, "unlearning", shown):
                self._step(t, batches, nullcontext() if self.file is None else uninterrupted())
                if self.done % CHECK_EVERY == 0:
                    self._compare()
                if time.monotonic() - saved >= SAVE_EVERY:
                    self.save()
                    saved = time.monotonic()
        except KeyboardInterrupt:
            self.save()
            raise
        self.buffers.restore()
        self._compare()
        self.save()

    def _step(self, t: int, batches: Iterator[Any], whole: AbstractContextManager[object]) -> None:
        """x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)."""
        recipe, vector = self.recipe, self.vector
        assert not isinstance(recipe, OutputPerturbation)
        g, norm = self._compute(t, batches)
        bound = recipe.grad_clip if isinstance(recipe, GradientClipping) else math.inf
        update = Update(
            learning_rate=self._rates[t],
            weight_decay=recipe.weight_decay,
            clip=vector.clip_factor(norm, bound),
            radius=math.inf if recipe.model_clip is None else recipe.model_clip,
            noise_std=self._levels[t],
            number=t + 1,
        )
        with whole:
            self._note(update, norm, vector.step(g, update))
            self.done = t + 1

    def _compute(self, t: int, batches: Iterator[Any]) -> tuple[list[Tensor], float]:
        """The gradient of step t, averaged over the processes, and its norm."""
        assert self._stream is not None
        seed_all(self._stream.derive_seed(f"data {t}"))
        batch, weight = split_batch(next(batches), self.processes.rank, self.processes.size)
        seed = self._stream.derive_seed(f"step {t} of rank {self.processes.rank}")
        if self._checked:
            gradients = self._differentiate(batch, weight, seed, self._move)
        else:
            with self.processes.together():
                gradients = self._check_forward(batch, weight, seed)
        gradients = self.processes.sum(gradients)
        return gradients, self.vector.gradient_norm(gradients)

    def _differentiate(self, batch: Any, weight: float, seed: int, move: Any) -> list[Tensor]:
        """``weight`` times the gradient of one batch, buffers as ``build()`` gave them."""
        self.buffers.restore()
        seed_all(seed)
        if batch is None:
            return [torch.zeros_like(p) for p in self.parameters]
        batch = move(batch, self.vector.device)
        return compute_gradients(self.module, self.parameters, batch, self.loss, weight)

    def _check_forward(self, batch: Any, weight: float, seed: int) -> list[Tensor]:
        """The gradient of the first step, if one batch gives one and the same."""
        gradients, same = run_twice(lambda: self._differentiate(batch, weight, seed, copy_batch))
        if not same:
            kind = type(self.module).__name__
            raise UnlearningError(
                "one batch gives two gradients, with buffers and random generators restored in "
                f"between: forward() keeps something from one call to the next ({kind}), which a "
                "noisy run may not; keep it in a registered buffer, or start it anew at every call"
            )
        self._checked = True
        return gradients

    def _compare(self) -> None:
        """All processes have the same vector, after the same steps."""
        if not self.processes.alone:
            facts = {
                "step": self.done,
                "vector": hash_tensor(self.vector.cells).hex(),
                "trace": hash_tensor(self.columns).hex(),
            }
            self.processes.check_same(facts, f" after step {self.done}")

    def _note(self, update: Update, norm: float, norms: Norms) -> None:
        wrong = not math.isfinite(norm)
        row = (update.learning_rate, update.noise_std, 0.0 if wrong else norm, update.clip)
        self.columns[update.number - 1] = (*row, norms.model, norms.noise, wrong)

    def _take_key(self) -> None:
        """From here on the noise is that of a new key."""
        self.vector.noise = self._stream = self.processes.begin(self.noise)
        self.keys += 1

    def trace(self) -> Trace:
        columns: dict[str, Any] = {
            name: tuple(column)
            for name, column in zip(Trace.model_fields, self.columns.T.tolist(), strict=True)
        }
        return Trace(**columns | {"nonfinite": tuple(map(bool, columns["nonfinite"]))})

    def save(self) -> None:
        """Write the state, if it is kept; of several processes rank 0 does: all have the same."""
        if self.file is not None and self.processes.leads:
            counts = {"done": self.done, "keys": self.keys, "resumed": self.resumed}
            write_checkpoint(self.file, counts | self._list_tensors())

    def load(self) -> bool:
        """Go on from the state that was saved, if one was, with a key of its own if steps are
        left."""
        found, own = None, self._list_tensors()
        with self.processes.together():
            if self.file is not None and self.processes.leads:
                found = read_checkpoint(self.file)
            if found is not None:
                self.done, self.keys, self.resumed = (
                    found[name] for name in ("done", "keys", "resumed")
                )
                fits = all(tensor.shape == found[name].shape for name, tensor in own.items())
                if not fits or self.done not in range(self.count + 1):
                    raise self._refuse("its vector or its trace has another length")
                for name, tensor in own.items():
                    tensor.copy_(found[name])
                self._check_norms()
        counts = (self.done, self.keys, self.resumed) if found is not None else None
        counts = self.processes.share(counts)
        if counts is None:
            return False
        self.done, self.keys, self.resumed = counts
        self.processes.share_tensors(own)
        self.vector.write()
        if self.done < self.count:
            self.resumed += 1
            self._take_key()
        return True

    def _check_norms(self) -> None:
        """Refuse a vector that the recipe cannot have led to: every ‖x - c‖ of the trace is within
        its clips, and the last one and its noise are those of the vector, so

            ‖m + ξ‖² = ‖m‖² + ‖ξ‖² + 2 ‖m‖ σ z,   z standard normal: |z| ≤ 12 as for ‖ξ‖.

        A direction is not seen: whoever can write here is trusted like the process itself.
        """
        recipe, root = self.recipe, math.sqrt(self.vector.size)
        slack = self.vector.grid * root
        norms, noises = self.columns[: max(self.done, 1), 4:6].T
        if isinstance(recipe, OutputPerturbation):
            std, limits = recipe.noise_std, np.array([recipe.start_clip])
        elif self.done > 0:
            std, limits = self._levels[self.done - 1], self._list_limits(norms + noises + slack)
        elif recipe.start_clip is None:
            return
        else:  # the start has no row
            std, limits = recipe.start_noise_std, np.array([recipe.start_clip])
            norms, noises = limits, np.array([std * (root + NOISE_DEVIATIONS)])
        if not np.all(norms <= limits * (1 + 1e-9) + slack):
            raise self._refuse("a norm of its trace is beyond the clips of the recipe")
        m, noise = float(norms[-1]), float(noises[-1])
        square, found = m * m + noise * noise, float(self.vector.cells.norm()) * self.vector.grid
        allowed = 2 * NOISE_DEVIATIONS * std * m + 4 * slack * (m + noise + slack) + 1e-9 * square
        # The start may be nearer than its clip; a projection onto the grid's box shortens.
        free = norms is limits or float(self.vector.cells.abs().max()) >= LARGEST_CELL
        least = 0.0 if free else square - allowed
        if not least <= found * found <= square + allowed:
            raise self._refuse(f"its vector has the norm {found:g}, to which no step led")

    def _list_limits(self, ends: Any) -> Any:
        """The largest ‖x - c‖ before the noise of every step that is done, of which ``ends`` says
        the largest after it."""
        recipe, limits = self.recipe, np.full(self.done, math.inf)
        assert not isinstance(recipe, OutputPerturbation)
        if isinstance(recipe, GradientClipping):
            rates = np.array(self._rates[: self.done])
            root = math.sqrt(self.vector.size)
            first = recipe.start_clip + recipe.start_noise_std * (root + NOISE_DEVIATIONS)
            before = np.array([first, *ends[:-1]])
            limits = np.abs(1 - rates * recipe.weight_decay) * before + rates * recipe.grad_clip
        return limits if recipe.model_clip is None else np.minimum(limits, recipe.model_clip)

    def _list_tensors(self) -> dict[str, Tensor]:
        return {"cells": self.vector.cells, "trace": torch.from_numpy(self.columns)}

    def _refuse(self, why: str) -> InputError:
        return InputError(
            f"checkpoint {self.file} is not one of this run: {why}; remove the folder to start anew"
        )


def estimate_statistics(
    module: nn.Module, batches: Batches, loss: Loss | None, device: torch.device
) -> tuple[str, ...]:
    """Set running statistics of normalisations to the plain average over one pass of retained data;
    returns the buffers' names.

    The weights are noisy by now, and everything else is in eval mode: this is post-processing.

    >>> norm = nn.BatchNorm1d(1)
    >>> data = Batches((torch.tensor([[1.0], [3.0]]), torch.zeros(2)), batch_size=2, seed=0)
    >>> model, cpu = nn.DataParallel(norm), torch.device("cpu")  # names are those of the release
    >>> estimate_statistics(model, data, lambda output, target: output.sum(), cpu)
    ('running_mean', 'running_var', 'num_batches_tracked')
    >>> norm.running_mean
    tensor([2.])
    """
    found: dict[str, Any] = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, _NormBase) and part.training and part.track_running_stats
    }
    momenta = {name: part.momentum for name, part in found.items()}
    with evaluating(module), torch.no_grad():
        for part in found.values():
            part.training = True
            part.reset_running_stats()
            part.momentum = None
        for batch in batches.read(0) if found else ():
            compute_loss(module, move_batch(batch, device), loss)
    for name, part in found.items():
        part.momentum = momenta[name]
    own = {buffer.data_ptr() for part in found.values() for buffer in part.buffers(recurse=False)}
    return tuple(name for name, tensor in list_tensors(module).items() if tensor.data_ptr() in own)


@contextmanager
def uninterrupted() -> Generator[None]:
    """Ctrl-C and termination wait until the end: a vector that is half a step on is no state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[tuple[int, Any]] = []
    before: dict[int, Any] = {}
    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda *given: asked.append(given))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if asked:
            signal.raise_signal(asked[0][0])
