"""Records and run directories made by hand, so that certificates are tested without an engine."""

import math
from pathlib import Path
from typing import Any

import numpy as np

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.consistency import expand_schedule
from expunge.certificates.hashing import hash_tensors, write_safetensors
from expunge.certificates.identifiers import commit
from expunge.certificates.record import FineTuning, RunRecord, Trace
from expunge.recipes import (
    Execution,
    GradientClipping,
    ModelClipping,
    OutputPerturbation,
    Recipe,
    Retraining,
)

SALT = "5a" * 32
NONCE = "0123456789abcdef" * 4
GRID = 2.0**-30

GRADIENT = GradientClipping(
    start_clip=0.05,
    grad_clip=1.0,
    learning_rate=0.01,
    weight_decay=10.0,
    steps=5,
    noise_std=0.2,
)
SCHEDULED = GradientClipping(
    start_clip=0.05,
    grad_clip=1.0,
    learning_rate=[0.03, 0.02, 0.01, 0.01],
    weight_decay=5.0,
    steps=4,
    noise_std=[0.3, 0.3, 0.2, 0.25],
    start_noise_std=0.1,
    model_clip=0.4,
)
MODEL = ModelClipping(model_clip=0.5, learning_rate=1e-3, weight_decay=10.0, noise_std=0.5, steps=6)
OUTPUT = OutputPerturbation(start_clip=0.01, noise_std=0.0746127)
RECIPES: dict[str, Recipe] = {
    "gradient-clipping": GRADIENT,
    "scheduled": SCHEDULED,
    "model-clipping": MODEL,
    "output-perturbation": OUTPUT,
    "retraining": Retraining(),
}

WEIGHTS = {
    "body.weight": ("F32", (3, 4), np.arange(12, dtype="<f4").tobytes()),
    "body.bias": ("F32", (3,), np.ones(3, "<f4").tobytes()),
    "head.scale": ("BF16", (5,), bytes(range(10))),
    "steps": ("I64", (), (7).to_bytes(8, "little")),
}
PARAMETERS = 20


def hash_of(tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> str:
    return hash_tensors((name, *entry) for name, entry in tensors.items())


def make_trace(recipe: Recipe, parameters: int = PARAMETERS) -> Trace:
    steps = expand_schedule(recipe)
    rates, sigmas = zip(*steps, strict=True) if steps else ((), ())
    T = len(steps)
    wobble = [1 + 0.05 * math.sin(t + 1) for t in range(T)]
    return Trace(
        learning_rate=rates,
        noise_std=sigmas,
        gradient_norm=[2.5 * isinstance(recipe, GradientClipping)] * T,
        clip_factor=[0.39876543] * T,
        model_norm=[0.0051234567] * T,
        noise_norm=[s * math.sqrt(parameters) * w for s, w in zip(sigmas, wobble, strict=True)],
        nonfinite=[False] * T,
    )


def make_record(recipe: Recipe = GRADIENT, **changes: Any) -> RunRecord:
    noisy = not isinstance(recipe, Retraining)
    rounding = 2.01 * GRID * math.sqrt(PARAMETERS) * isinstance(recipe, GradientClipping)
    source = {"source": "system", "generator": "AES-256-CTR", "releasable": True, "seed": None}
    given: dict[str, Any] = {
        "recipe": recipe,
        "parameters": PARAMETERS,
        "grid": GRID if noisy else 0.0,
        "execution": Execution(rounding=rounding, tail_delta=1e-18 if noisy else 0.0),
        "noise": source if noisy else {"source": "none", "releasable": True},
        "noise_keys": 1 if noisy else 0,
        "trace": make_trace(recipe),
        "gradient_evaluations": 640,
        "weights_before": "b" * 64,
        "weights_noisy": "c" * 64,
        "weights_after": hash_of(WEIGHTS),
        "forget": commit(["u1", "u7"], SALT),
        "retain": commit([f"u{n}" for n in (2, 3, 4, 5, 6)], SALT),
        "finetune": FineTuning(
            optimizer="SGD", epochs=2, steps=80, learning_rate=0.05, batch_size=128,
            schedule="one-cycle", gradient_evaluations=10240, data=commit(["u2"], SALT),
            checked=True,
        ),
        "checked": True,
        "start": "model" if noisy else "fresh",
        "device": "cpu",
        "dtype": "float32",
        "created": "2025-11-15T22:00:00+00:00",
        "versions": {"expunge": "0.1.0", "torch": "2.13.0"},
        "nonce": NONCE,
    }  # fmt: skip
    return RunRecord(**(given | changes))


def make_run(
    folder: Path, recipe: Recipe = GRADIENT, *, delta: float = 1e-5, **changes: Any
) -> tuple[Path, Certificate]:
    """A run directory with certificate, weights and record: the path of the certificate, and it."""
    record = make_record(recipe, **changes)
    certificate = certify(record, delta=delta)
    certificate.save(folder / "certificate.json")
    record.save(folder / "record.json")
    metadata = certificate.safetensors_metadata()
    write_safetensors(folder / "model.safetensors", WEIGHTS, metadata)
    return folder / "certificate.json", certificate
