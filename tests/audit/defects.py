"""Defects, injected into the engine one at a time, and the audit that must catch them."""

import math
from collections.abc import Callable

import numpy as np
from scipy.special import ndtr

import expunge.noisy.vector
from expunge.audit.mechanism import audit_mechanism
from expunge.noisy.noise import NoiseStream, SystemNoise
from expunge.noisy.steps import Steps
from expunge.noisy.vector import GridVector, Update
from expunge.recipes import GradientClipping, ModelClipping, OutputPerturbation
from tests.audit.cells import examine_cells

IMPROBABLE = 1e-9


def change_draws(change: Callable) -> Callable:
    """Whatever is drawn, changed: ``change(out, std, position)``."""

    def inject(patch):
        def draw(self, out, *, step, position, std, draw=NoiseStream.draw):
            draw(self, out, step=step, position=position, std=std)
            if std > 0:
                out[:] = change(out, std, position)

        patch.setattr(NoiseStream, "draw", draw)

    return inject


def scale_noise(factor: float) -> Callable:
    return change_draws(lambda out, std, position: np.rint(factor * out))


def repeat_noise(patch):
    def draw(self, out, *, step, position, std, draw=NoiseStream.draw):
        draw(NoiseStream(self.export_key()), out, step=0, position=position, std=std)

    patch.setattr(NoiseStream, "draw", draw)


def change_steps(change: Callable) -> Callable:
    """Every step of the vector, with another update."""

    def inject(patch):
        def step(self, gradients, update, step=GridVector.step):
            return step(self, gradients, change(update))

        patch.setattr(GridVector, "step", step)

    return inject


def project_after_noise(patch):
    def step(self, gradients, update, step=GridVector.step):
        first = step(self, gradients, update._replace(radius=math.inf))
        if update.radius < math.inf:
            step(self, [], Update(0.0, 0.0, 0.0, update.radius, 0.0, update.number))
        return first

    patch.setattr(GridVector, "step", step)


def forget_start_clip(patch):
    def start(self, radius, old=None, start=GridVector.start):
        return start(self, math.inf, old)

    patch.setattr(GridVector, "start", start)


def forget_gradient_clip(patch):
    def factor(norm, bound, size, factor=expunge.noisy.vector.clip_factor):
        return 1.0 if norm < 2 * bound else factor(norm, bound, size)

    patch.setattr(expunge.noisy.vector, "clip_factor", factor)


def skip_first_step(patch):
    def start(self, old, start=Steps.start):
        start(self, old)
        self.done = min(1, max(self.count - 1, 0))

    patch.setattr(Steps, "start", start)


def write_sign(coordinate: int) -> Callable:
    """The sign of an old weight goes into bit 5 of its cell, after the noise."""

    def inject(patch):
        def start(self, radius, old=None, start=GridVector.start):
            norm = start(self, radius, old)
            if self.size > coordinate:
                self.sign = float(self.cells[coordinate] > 0)
            return norm

        def finish(self, chunk, update, square, finish=GridVector._finish):
            noise = finish(self, chunk, update, square)
            if chunk.start <= coordinate < chunk.stop:
                cell = chunk.cells[coordinate - chunk.start]
                cell += 32 * (self.sign - (cell / 32).floor() % 2)
                chunk.write(self.grid)
            return noise

        patch.setattr(GridVector, "start", start)
        patch.setattr(GridVector, "_finish", finish)

    return inject


def fix_key(patch):
    patch.setattr(SystemNoise, "begin", lambda self: NoiseStream(bytes(32)))


DEFECTS: dict[str, Callable] = {
    "half the noise": scale_noise(0.5),
    "noise 20 % too small": scale_noise(0.8),
    "same noise every step": repeat_noise,
    "noise in half precision": change_draws(
        lambda out, std, _: np.rint((out / std).astype(np.float16).astype(float) * std)
    ),
    "uniform noise of the right variance": change_draws(
        lambda out, std, _: np.rint((ndtr(out / std) - 0.5) * math.sqrt(12) * std)
    ),
    "no noise on every third coordinate": change_draws(
        lambda out, std, position: np.where((position + np.arange(len(out))) % 3 == 2, 0.0, out)
    ),
    "noise key is a constant": fix_key,
    "projection after the noise": project_after_noise,
    "projection onto twice the radius": change_steps(lambda u: u._replace(radius=2 * u.radius)),
    "start not clipped": forget_start_clip,
    "clip skipped up to twice the bound": forget_gradient_clip,
    "sign of the decay": change_steps(lambda u: u._replace(weight_decay=-u.weight_decay)),
    "one step missing": skip_first_step,
    "sign of an old weight in one bit of a cell": write_sign(1),
    "the same in a cell far into a long model": write_sign(40_000),
    "no noise beyond the first 32,768 coordinates": change_draws(
        lambda out, std, position: np.where(position + np.arange(len(out)) < 32_768, out, 0.0)
    ),
}

AUDITED = {
    "output perturbation": OutputPerturbation(1.0, 0.8),
    "one step": GradientClipping(0.2, 1.0, 1.0, 0.4, 1, 1.0),
    "four steps": GradientClipping(0.2, 1.0, 0.5, 0.0, 4, 0.5),
    "model clipping": ModelClipping(1.0, 0.1, 1.0, 0.8, 2),
    "rising noise": GradientClipping(0.5, 0.2, 0.1, 1.0, 3, [0.1, 0.1, 0.6], model_clip=0.5),
}


def audit_engine() -> str:
    """What the audit notices first; empty where it notices nothing."""
    for name, recipe in AUDITED.items():
        found = audit_mechanism(recipe, delta=1e-5, trials=16_000, seed=11)
        if found.problems:
            return f"{name}: other bits than the equation's"
        if found.contradicts:
            return f"{name}: {found.attack.split(' modulo')[0]}"
    found = examine_cells(AUDITED["output perturbation"])
    return f"long vector: {found.oddest}" if found.p_value < IMPROBABLE else ""
