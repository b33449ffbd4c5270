"""What an auditor has: the wheel, a run directory, and no torch."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from benchmarks.auditor import make_environment, measure_packages

BEFORE = Path(__file__).parents[1] / "data" / "before"
INPUTS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS[:, :3].argmax(1)
IDS = [f"p{i}" for i in range(40)]


def build() -> nn.Module:
    return nn.Linear(4, 3)


def write(folder: Path, run: expunge.Run, parent: expunge.Certificate | None = None):
    certificate = expunge.certify(run.record, delta=1e-5, parent=parent)
    expunge.write_run(folder, model=run.model, record=run.record, certificate=certificate)
    return certificate


def write_releases(folder: Path) -> None:
    """A noisy run, two heads and an ensemble, each with a request after its first release."""
    batches = expunge.Batches(INPUTS[5:], TARGETS[5:], batch_size=8, ids=IDS[5:])
    recipe = expunge.GradientClipping(1.0, 1.0, 0.1, 1.0, 3, 20.0)
    write(
        folder / "run",
        expunge.unlearn(build(), batches, recipe, loss_fn=cross_entropy, forget_ids=IDS[:5]),
    )
    learners = {
        "statistics": expunge.StatisticsHead(
            expunge.Features(None), classes=3, state=folder / "statistics-state"
        ),
        "convex": expunge.ConvexHead(
            expunge.Features(None), classes=3, state=folder / "convex-state"
        ),
        "shards": expunge.Shards(
            build, shards=2, slices=1, seed="s", epochs=1, learning_rate=0.1,
            state=folder / "shards-state",
        ),
    }  # fmt: skip
    for name, learner in learners.items():
        learner.learn((INPUTS, TARGETS), ids=IDS)
        first = write(folder / f"{name}-1", learner.release())
        write(folder / f"{name}-2", learner.forget(IDS[:2]), first)


WITHOUT = {
    "--version": "numpy",
    f"verify {BEFORE / 'gradient-clipping'} --record {BEFORE / 'gradient-clipping'}": "holds",
    f"verify {BEFORE / 'output-perturbation-signed'}": "signed by sha256:",
    f"show {BEFORE / 'model-clipping'}": "CERTIFICATE OF UNLEARNING",
    "verify run --record run": "run/certificate.json holds",
    "show run": "CERTIFICATE OF UNLEARNING",
    "show run --model-card": "expunge",
    "report run": "run/report.html",
    "report run --public": "run/report-public.html",
    "keygen key.pem": "key.pem.pub",
    "sign run --key key.pem": "run: signed by sha256:",
    "verify run --key key.pem.pub": "the expected key",
    "plan --epsilon 1 --delta 1e-5 --parameters 1000": "target epsilon = 1",
    "account output-perturbation --start-clip 1 --noise-std 4 --delta 1e-5": "certifies",
    "calibrate output-perturbation --start-clip 1 --epsilon 1 --delta 1e-5": "certifies",
    "verify statistics-2 --parent statistics-1 --store statistics-state": "epsilon = 0",
    "verify convex-2 --parent convex-1 --store convex-state": "epsilon = 0",
    "verify shards-2 --parent shards-1": "epsilon = 0",
    "init new": "new/job.toml",
}
LACKING = {
    "unlearn new/job.toml": "torch",
    "learn new/job.toml": "torch",
    "forget statistics-state new/forget.txt --out out": "torch",
    "verify shards-2 --retrain shards-state": "torch",
    "audit run": "torch",
    "demo": "torch",
    "ledger list --ledger sqlite:///ledger.db": "ledger",
    "serve --ledger sqlite:///ledger.db": "ledger",
}


@pytest.mark.slow
def test_an_auditor_needs_no_torch(tmp_path: Path) -> None:
    places = make_environment(tmp_path)
    work = tmp_path / "work"
    work.mkdir()
    write_releases(work)

    def call(words: str) -> subprocess.CompletedProcess[str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        return subprocess.run(
            [places / "expunge", *words.split()],
            cwd=work, capture_output=True, text=True, check=False, env=plain,
        )  # fmt: skip

    packages = measure_packages(places)
    assert not any("torch" in name or "nvidia" in name for name in packages)
    assert sum(packages.values()) < 400, packages
    for words, printed in WITHOUT.items():
        done = call(words)
        assert done.returncode == 0, (words, done.stderr)
        assert printed in done.stdout, words
    for words, extra in LACKING.items():
        done = call(words)
        assert done.returncode == 2, (words, done.stderr)
        assert done.stderr.endswith(f"; pip install 'expunge[{extra}]'\n"), words
        assert done.stderr.count("\n") == 1, words
    certificate = work / "run" / "certificate.json"
    plain = json.loads(certificate.read_text())
    certificate.write_text(json.dumps(plain | {"epsilon": 0.1}))
    assert call("verify run").returncode == 1
