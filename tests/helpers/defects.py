"""Defects, injected into the engine one at a time, and the checks that must catch them."""

import contextlib
import importlib.util
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import expunge.auditing.trials
import expunge.noisy.loop
import expunge.noisy.vector
from engine import NOISY, make_batches, make_mlp
from expunge import GradientClipping, ModelClipping, OutputPerturbation, certify, verify
from expunge.auditing.cells import examine_cells
from expunge.auditing.mechanism import IMPROBABLE, audit_mechanism
from expunge.auditing.trials import StackedModel, StackedVector
from expunge.noisy.loop import Loop
from expunge.noisy.noise import NoiseStream, SeededNoise, StepNoise, SystemNoise
from expunge.noisy.run import unlearn
from expunge.noisy.vector import GridVector, Update
from expunge.processes.weights import save_weights
from expunge.training.batches import Cycle

# Defects


def shrink_noise(patch):
    def draw(self, out, *, step, position, std, draw=NoiseStream.draw):
        draw(self, out, step=step, position=position, std=0.8 * std)

    patch.setattr(NoiseStream, "draw", draw)


def repeat_noise(patch):
    def take(self, number, start, stop, take=StepNoise.take):
        kept = self.__dict__.setdefault("kept", {})
        if (start, stop) not in kept:
            kept[start, stop] = take(self, number, start, stop).copy()
        return kept[start, stop]

    patch.setattr(StepNoise, "take", take)


def draw_half_precision(patch):
    def take(self, number, start, stop, take=StepNoise.take):
        std = self._levels[number]
        halved = (take(self, number, start, stop) / std).astype(np.float16)
        return np.rint(halved.astype(np.float64) * std)

    patch.setattr(StepNoise, "take", take)


def draw_uniform(patch):
    def draw(self, out, *, step, position, std, draw=NoiseStream.draw):
        """The same normal numbers, mapped to uniform ones of the same variance."""
        from scipy.special import ndtr

        draw(self, out, step=step, position=position, std=std)
        if std > 0:
            out[:] = np.rint((ndtr(out / std) - 0.5) * math.sqrt(12) * std)

    patch.setattr(NoiseStream, "draw", draw)


def skip_every_third_coordinate(patch):
    def take(self, number, start, stop, take=StepNoise.take):
        drawn = take(self, number, start, stop).copy()
        drawn[2::3] = 0.0
        return drawn

    patch.setattr(StepNoise, "take", take)


def shift_schedule(patch):
    def take(self, number, start, stop, take=StepNoise.take):
        drawn = take(self, number, start, stop)
        before, now = self._levels[max(number - 1, 0)], self._levels[number]
        return np.rint(drawn * (before / now)) if before > 0 else drawn

    patch.setattr(StepNoise, "take", take)


def fix_key(patch):
    patch.setattr(SystemNoise, "begin", lambda self: NoiseStream(bytes(32)))


def project_after_noise(patch):
    def step(self, gradients, update, step=GridVector.step):
        if update.radius == math.inf:
            return step(self, gradients, update)
        first = step(self, gradients, update._replace(radius=math.inf))
        second = step(self, [], Update(0.0, 0.0, 0.0, update.radius, 0.0, update.number))
        return second._replace(noise=first.noise)

    patch.setattr(GridVector, "step", step)


def double_radius(patch):
    def step(self, gradients, update, step=GridVector.step):
        return step(self, gradients, update._replace(radius=2 * update.radius))

    patch.setattr(GridVector, "step", step)


def forget_start_clip(patch):
    patch.setattr(
        GridVector, "start", lambda self, radius, start=GridVector.start: start(self, math.inf)
    )


def clip_each_tensor(patch):
    bound = [math.inf]

    def start(self, start=Loop._start):
        bound[0] = getattr(self.recipe, "grad_clip", math.inf)
        start(self)

    def compute(model, *rest, compute=expunge.noisy.loop.compute_gradients):
        scaled = []
        for g in compute(model, *rest):
            dims = tuple(range(isinstance(model, StackedModel), g.ndim))
            norm = torch.linalg.vector_norm(g, dim=dims, keepdim=True)
            scaled.append(g * (bound[0] / norm.clamp_min(1e-300)).clamp_max(1.0))
        return scaled

    def measure(self, gradients, measure=GridVector.gradient_norm):
        self.measured = True
        return measure(self, gradients)

    def leave(factor):
        def leave_gradient(self, norm, bound):
            if self.__dict__.pop("measured", False):
                return torch.ones_like(norm) if isinstance(norm, torch.Tensor) else 1.0
            return factor(self, norm, bound)

        return leave_gradient

    patch.setattr(Loop, "_start", start)
    patch.setattr(GridVector, "gradient_norm", measure)
    for kind in (GridVector, StackedVector):
        patch.setattr(kind, "clip_factor", leave(kind.clip_factor))
    patch.setattr(expunge.noisy.loop, "compute_gradients", compute)


def leave_small_norms(patch):
    def factor(norm, bound, size, factor=expunge.noisy.vector.clip_factor):
        return 1.0 if norm < 2 * bound else factor(norm, bound, size)

    patch.setattr(expunge.noisy.vector, "clip_factor", factor)
    patch.setattr(expunge.auditing.trials, "clip_factor", factor)


def ignore_centre_in_decay(patch):
    def step(self, gradients, update, step=GridVector.step):
        if self._centre is not None and update.decay not in (0, 1):
            for chunk in self._chunks:
                chunk.cells.add_(
                    chunk.gather(self._centre), alpha=(1 - 1 / update.decay) / self.grid
                )
        return step(self, gradients, update)

    patch.setattr(GridVector, "step", step)


def flip_decay(patch):
    patch.setattr(
        Update, "decay", property(lambda self: 1.0 + self.learning_rate * self.weight_decay)
    )


def skip_first_step(patch):
    def start(self, start=Loop._start):
        start(self)
        self.done = min(1, max(self.steps - 1, 0))

    patch.setattr(Loop, "_start", start)


def keep_momentum(patch):
    def step(self, gradients, update, step=GridVector.step):
        if not gradients:
            return step(self, gradients, update)
        clip = update.clip
        now = [
            g * (clip.reshape(-1, *[1] * (g.ndim - 1)) if isinstance(clip, torch.Tensor) else clip)
            for g in gradients
        ]
        before = self.__dict__.get("velocity") or [torch.zeros_like(g) for g in now]
        self.velocity = [0.9 * v + g for v, g in zip(before, now, strict=True)]
        one = torch.ones_like(clip) if isinstance(clip, torch.Tensor) else 1.0
        return step(self, self.velocity, update._replace(clip=one))

    patch.setattr(GridVector, "step", step)


def mix_in_forgotten_batch(patch):
    def take(self, take=Cycle.take):
        share = take(self)
        if self.taken % 2 == 1 and share.batch[0].ndim > 1:
            return replace(share, batch=(share.batch[0] + 3.0, share.batch[1]))
        return share

    patch.setattr(Cycle, "take", take)


def carry_buffers_over(patch):
    patch.setattr(expunge.noisy.loop, "reset_statistics", lambda *_: None)


def average_old_model_in(patch):
    def run(self, *rest, run=Loop.run):
        held = [p.detach().clone() for p in self.certified.certified.values()]
        run(self, *rest)
        for p, old in zip(self.certified.certified.values(), held, strict=True):
            p.detach().mul_(0.99).add_(old, alpha=0.01)

    patch.setattr(Loop, "run", run)


def count_gradient_twice(patch):
    patch.setattr(Update, "rate", property(lambda self: 2 * self.learning_rate * self.clip))


def write_sign(coordinate):
    """The sign of an old weight goes into bit 5 of its cell, after the noise."""

    def write(patch):
        def start(self, radius, start=GridVector.start):
            norm = start(self, radius)
            if self.size > coordinate:
                self.sign = (self._cells[..., coordinate] > 0).double()
            return norm

        def finish(self, chunk, update, square, finish=GridVector._finish):
            noise = finish(self, chunk, update, square)
            if chunk.start <= coordinate < chunk.stop:
                cell = chunk.cells[..., coordinate - chunk.start]
                cell += 32 * (self.sign - (cell / 32).floor() % 2)
                self._write(chunk)
            return noise

        patch.setattr(GridVector, "start", start)
        patch.setattr(GridVector, "_finish", finish)

    return write


def stop_after_first_chunk(patch):
    def take(self, number, start, stop, take=StepNoise.take):
        drawn = take(self, number, start, stop)
        return drawn if start < 32_768 else np.zeros_like(drawn)

    patch.setattr(StepNoise, "take", take)


DEFECTS: dict[str, Callable] = {
    "noise 20 % too small": shrink_noise,
    "same noise every step": repeat_noise,
    "noise in half precision": draw_half_precision,
    "uniform noise of the right variance": draw_uniform,
    "no noise on every third coordinate": skip_every_third_coordinate,
    "noise schedule one step late": shift_schedule,
    "noise key is a constant": fix_key,
    "projection after the noise": project_after_noise,
    "projection onto twice the radius": double_radius,
    "start not clipped": forget_start_clip,
    "clip per tensor instead of global": clip_each_tensor,
    "clip skipped up to twice the bound": leave_small_norms,
    "centre ignored in the decay": ignore_centre_in_decay,
    "sign of the decay": flip_decay,
    "one step missing": skip_first_step,
    "momentum left on": keep_momentum,
    "learning rate counted twice": count_gradient_twice,
    "forgotten batch mixed in": mix_in_forgotten_batch,
    "buffer carried over": carry_buffers_over,
    "1 % of the old model averaged in": average_old_model_in,
    "sign of an old weight in one bit of a cell": write_sign(1),
    "the same in a cell far into a long model": write_sign(40_000),
    "no noise beyond the first 32,768 coordinates": stop_after_first_chunk,
}


# Checks


@dataclass(frozen=True)
class Caught:
    """By what; empty where nothing was noticed."""

    audit: str
    contract: str
    verifier: str


AUDITED = {
    "output perturbation": OutputPerturbation(1.0, 0.8),
    "one step": GradientClipping(0.2, 1.0, 1.0, 0.4, 1, 1.0),
    "strong decay": GradientClipping(1.0, 0.05, 0.1, 4.0, 3, 0.1),
    "four steps": GradientClipping(0.2, 1.0, 0.5, 0.0, 4, 0.5),
    "model clipping": ModelClipping(1.0, 0.1, 1.0, 0.8, 2),
    "rising noise": GradientClipping(0.5, 0.2, 0.1, 1.0, 3, [0.1, 0.1, 0.6], model_clip=0.5),
}


def see_only_what_the_loader_gives():
    """Every batch the loss sees is one of the loader's."""
    batches = make_batches()
    given = {x.numpy().tobytes() for x, _ in batches}

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_mlp()

        def forward(self, x):
            assert x.numpy().tobytes() in given, "the model was shown a batch of another source"
            return self.inner(x)

    recipe = NOISY["gradient-clipping"]
    unlearn(Watched(), batches, recipe, loss_fn=cross_entropy, centre="zero")


def load_tests(name):
    """A module of tests/noisy."""
    path = Path(__file__).parents[1] / "noisy" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def list_contracts():
    """The engine's own contract tests, by name; each raises if it is broken."""
    c, u, b = map(load_tests, ("test_contract", "test_run", "test_buffers"))
    for recipe in (NOISY["gradient-clipping"], NOISY["model-clipping"]):
        yield from (
            (test.__name__, lambda test=test, recipe=recipe: test(recipe))
            for test in (
                c.test_system_noise_never_repeats,
                c.test_consecutive_steps_draw_different_noise,
                c.test_realised_noise_matches_its_sigma_and_no_other,
                c.test_noise_in_the_weights_is_what_the_trace_says,
                c.test_huge_models_are_forgotten_up_to_the_clip,
                c.test_start_at_the_centre_never_sees_the_old_model,
            )
        )
    yield "test_weight_decay_pulls_towards_the_centre", u.test_weight_decay_pulls_towards_the_centre
    yield (
        "test_reset_statistics_come_from_retained_data_alone",
        lambda: b.test_reset_statistics_come_from_retained_data_alone(False),
    )
    yield see_only_what_the_loader_gives.__name__, see_only_what_the_loader_gives


def audit_engine() -> str:
    for name, recipe in AUDITED.items():
        found = audit_mechanism(recipe, delta=1e-5, trials=16_000, seed=11)
        if found.contradicts:
            return f"{name}: {found.attack.split('; ')[1].split(' modulo')[0].split(' ')[0]}"
    found = examine_cells(AUDITED["output perturbation"], seed=11)
    return f"long vector: {found.oddest}" if found.p_value < IMPROBABLE else ""


def break_contract() -> str:
    for name, check in list_contracts():
        try:
            check()
        except Exception:
            return name
    return ""


def verify_runs() -> str:
    for name, recipe in NOISY.items():
        given = {"loss_fn": cross_entropy, "noise": SeededNoise(3), "centre": "zero"}
        run = unlearn(make_mlp(), make_batches(), recipe, **given)
        try:
            certificate = certify(run.record, delta=1e-5)
            if name == "gradient-clipping":
                _verify(run, certificate)
        except Exception as error:
            return str(error).split(": ", 1)[-1].split(" at step")[0].split("; ")[0]
    return ""


def _verify(run, certificate):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        certificate.save(folder / "certificate.json")
        run.record.save(folder / "record.json")
        metadata = certificate.safetensors_metadata()
        save_weights(folder / "model.safetensors", run.model.state_dict(), metadata)
        verify(folder / "certificate.json", record=folder / "record.json")


def check_engine() -> Caught:
    """Everything that may notice a defect, on the engine as it is now."""
    return Caught(audit_engine(), break_contract(), verify_runs())


@contextlib.contextmanager
def injected(patch, name: str):
    with patch.context() as inner:
        DEFECTS[name](inner)
        yield
