"""Releases of every kind, made of numpy arrays in a moment, and ways to write files again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import rfc8785

from expunge import recipes
from expunge.accounting.precision import choose_precision
from expunge.certificates import record as records
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.consistency import list_steps
from expunge.certificates.hashes import combine_leaves, hash_tensors
from expunge.certificates.people import commit
from expunge.certificates.release import Contents, Release, describe_contents
from expunge.recipes import Sharding as ShardingRecipe

CREATED = "2026-11-15T22:00:00+00:00"
SALT, NONCE = "5a" * 32, "0e" * 32
LATER = "2026-11-16T22:00:00+00:00"
NOISY = {
    "output-perturbation": recipes.OutputPerturbation(start_clip=0.01, noise_std=0.0746128),
    "gradient-clipping": recipes.GradientClipping(
        start_clip=0.01, grad_clip=1.0, learning_rate=1e-4, weight_decay=10.0, steps=3,
        noise_std=(0.02, 0.03, 0.03),
    ),
    "model-clipping": recipes.ModelClipping(
        model_clip=0.5, learning_rate=1e-3, weight_decay=1.0, noise_std=0.5, steps=6
    ),
}  # fmt: skip


def make_tensors(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    return {
        "layer.weight": random.standard_normal((3, 4)).astype(np.float32),
        "layer.bias": np.zeros(3, np.float32),
        "norm.running_mean": random.standard_normal(3),
        "norm.count": np.array(7),
    }


def make_trace(recipe: recipes.Recipe, parameters: int) -> records.Trace:
    """Steps as they may have run: noise of norms that its σ gives."""
    rates, sigmas = (tuple(column.tolist()) for column in list_steps(recipe))
    ones, far = [1.0] * len(rates), parameters**0.5
    return records.Trace(
        learning_rate=rates, noise_std=sigmas, gradient_norm=tuple(ones), clip_factor=tuple(ones),
        model_norm=(0.005,) * len(rates),
        noise_norm=tuple(s * (far + 0.1 * i) for i, s in enumerate(sigmas)),
        nonfinite=(False,) * len(rates),
    )  # fmt: skip


def make_record(
    tensors: dict[str, Any], files: dict[str, bytes] | None = None, **given: Any
) -> records.Record:
    contents = describe_contents(Contents(tensors, files or {}))
    plain: dict[str, Any] = {
        "recipe": recipes.Retraining(),
        "parameters": 15,
        "start": "build",
        "forget": commit(["ann", "bob"], 5, salt=SALT, leaves=True),
        "retained": commit(["cy", "di", "ed"], 100, salt=SALT),
        "code": records.Code(build="1" * 64, train="2" * 64),
        "weights": records.Weights(
            start="a" * 64,
            published=records.Tensors(
                names=("norm.count",), hash=hash_tensors({"norm.count": np.array(7)})
            ),
            **contents,
        ),
        "training": records.TrainingRun(
            function="own.py:train_without_ann", options={"epochs": 3}, examples=100
        ),
        "created": CREATED,
        "salt": SALT,
        "nonce": NONCE,
    }
    return records.Record(**(plain | given))


def make_noisy(
    tensors: dict[str, Any], name: str = "gradient-clipping", **given: Any
) -> records.Record:
    recipe = NOISY[name]
    precision = choose_precision(recipe, 15)
    contents = describe_contents(Contents(tensors))
    plain: dict[str, Any] = {
        "recipe": recipe, "start": "model", "origin": "build",
        "weights": records.Weights(start="a" * 64, noisy="d" * 64, old="e" * 64, **contents),
        "grid": precision.grid,
        "execution": recipes.Execution(rounding=precision.rounding, tail_delta=1e-12),
        "noise": records.Noise(source="system", generator="AES-256-CTR", keys=1),
        "trace": make_trace(recipe, 15),
    }  # fmt: skip
    return make_record(tensors, **(plain | given))


def make_shards(seed: int = 0, **given: Any) -> tuple[dict[str, Any], records.Record]:
    parts = [make_tensors(seed + k) for k in range(2)]
    named = [{f"constituents.{k}.{n}": t for n, t in part.items()} for k, part in enumerate(parts)]
    tensors, hashes = named[0] | named[1], map(hash_tensors, named)
    stated = records.Sharding(
        seed="a public string", combination="probabilities", samples=(60, 40, 0),
        hashes=(*hashes, combine_leaves([])), trained_from=(0, 2, 0), digest="5" * 64,
    )  # fmt: skip
    recipe = ShardingRecipe(shards=3, slices=4)
    weights = records.Weights(start="a" * 64, **describe_contents(Contents(tensors)))
    plain = {"recipe": recipe, "sharding": stated, "weights": weights}
    return tensors, make_record(tensors, **(plain | given))


def make_linear(tensors: dict[str, Any], **given: Any) -> records.Record:
    stated = records.Statistics(
        features={"network": None, "seed": "public"}, numbers={"bits": 8},
        model={"loss": "squared", "alpha": 1.0, "weights": None}, samples=100, digest="6" * 64,
    )  # fmt: skip
    weights = records.Weights(**describe_contents(Contents(tensors)))
    plain = {
        "recipe": recipes.LinearModel(),
        "training": None,
        "statistics": stated,
        "weights": weights,
    }
    return make_record(tensors, **(plain | given))


def make_release(record: records.Record, tensors: dict[str, Any], **options: Any) -> Release:
    files = options.pop("files", {})
    certificate = certify(record, **options)
    return Release(tensors, certificate, record, tensors, files, relist=Contents)


def save_release(folder: Path, kind: str = "retraining", **given: Any) -> Release:
    """A release of this kind in a folder."""
    tensors, files = make_tensors(), {"config.json": b'{"hidden": 3}'}
    if kind == "retraining":
        release = make_release(make_record(tensors, files, **given), tensors, files=files)
    elif kind == "linear-model":
        release = make_release(make_linear(tensors, **given), tensors)
    elif kind == "shards":
        tensors, record = make_shards(**given)
        release = make_release(record, tensors)
    else:
        release = make_release(make_noisy(tensors, kind, **given), tensors)
    release.save(folder)
    return release


def save_chain(folder: Path) -> tuple[Release, Release]:
    """Two requests: the second run started from the first release."""
    first = save_release(folder / "first", "gradient-clipping")
    tensors = make_tensors(1)
    contents = describe_contents(Contents(tensors))
    record = make_noisy(
        tensors,
        weights=records.Weights(
            start="a" * 64, noisy="f" * 64, old=first.certificate.weights.after, **contents
        ),
        forget=commit(["cy"], 2, leaves=True),
        parent=first.certificate.sha256,
        earlier=(first.record.forget,),
        created=LATER,
    )
    second = make_release(record, tensors, parent=first.certificate)
    second.save(folder / "second")
    return first, second


def edit_json(path: Path, change: Callable[[dict[str, Any]], object], *, seal: bool = True) -> None:
    """Change a JSON file; with ``seal``, a certificate's digest is made right again."""
    plain = json.loads(path.read_bytes())
    change(plain)
    if seal and "digest" in plain and "signature" in plain:
        body = {k: v for k, v in plain.items() if k not in ("digest", "signature")}
        plain["digest"] = hashlib.sha256(rfc8785.dumps(body)).hexdigest()
    path.write_bytes(rfc8785.dumps(plain))


def load(folder: Path) -> Certificate:
    return Certificate.load(folder / "certificate.json")
