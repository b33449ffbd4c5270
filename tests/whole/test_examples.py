"""The examples go from clone to verified certificate with the commands of the tutorial."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from expunge.certificates.certificate import Certificate
from expunge.cli.jobs import write_template
from expunge.jobs.directory import FILES
from expunge.reports.metrics import parse_metrics
from job_folder import make_environment, run

ROOT = Path(__file__).parents[2]
WORK = ".run.unfinished"


def copy_example(name: str, target: Path) -> Path:
    ignored = shutil.ignore_patterns(
        "run", "*.safetensors", "__pycache__", ".*", "adapter", "trained", "start"
    )
    shutil.copytree(ROOT / "examples" / name, target, ignore=ignored)
    return target


def test_the_example_of_ones_own_model_in_three_commands(tmp_path: Path) -> None:
    folder = copy_example("own_model", tmp_path / "shop")
    trained = subprocess.run(
        [sys.executable, "-m", "shop.train"], cwd=folder, env=make_environment(), check=False
    )
    assert trained.returncode == 0
    done = run("unlearn", "job.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "epsilon = 0, delta = 1e-05" in done.stdout
    assert "1170 samples kept, 30 forgotten" in done.stderr
    verified = run("verify", "run", cwd=folder)
    assert verified.returncode == 0, verified.stderr
    assert {*FILES, "metrics.jsonl"} == {path.name for path in (folder / "run").iterdir()}
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    last = {row["arm"]: row for row in parse_metrics(metrics).model_dump()["stages"]}
    assert last["retraining"]["test"] > 0.95
    assert "neither a state nor public weights" in metrics["why"]
    assert not (folder / WORK).exists()


@pytest.mark.slow
def test_the_example_of_an_adapter_in_three_commands(tmp_path: Path) -> None:
    folder = copy_example("lora", tmp_path / "lora")
    subprocess.run([sys.executable, "own.py"], cwd=folder, env=make_environment(), check=True)
    done = run("unlearn", "job.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "on 1024 parameters: 290 samples kept, 10 forgotten" in done.stderr
    verified = run("verify", "run", cwd=folder)
    assert verified.returncode == 0, verified.stderr
    certificate = Certificate.load(folder / "run" / "certificate.json")
    assert certificate.weights.centre is not None
    public = certificate.weights.public
    assert public is not None
    assert public.compared
    assert "base_model.model.transformer.wte.weight" in public.names
    released = load_file(folder / "run" / "model.safetensors")
    base = load_file(folder / "base.safetensors")
    name = "transformer.wte.weight"
    assert torch.equal(released[f"base_model.model.{name}"], base[name])


@pytest.mark.slow
def test_the_example_of_the_trainer_in_four_commands(tmp_path: Path) -> None:
    folder = copy_example("trainer", tmp_path / "trainer")
    subprocess.run([sys.executable, "own.py"], cwd=folder, env=make_environment(), check=True)
    done = run("unlearn", "job.toml", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "380 samples of 38 people kept, 20 of 2 people forgotten" in done.stderr
    for place in ("run", "run/adapter"):
        verified = run("verify", place, cwd=folder)
        assert verified.returncode == 0, verified.stderr
    certificate = Certificate.load(folder / "run" / "adapter" / "certificate.json")
    assert certificate.weights.adapter is not None
    assert (certificate.data.forget.count, certificate.data.forget.samples) == (2, 20)
    asked = subprocess.run(
        [sys.executable, "evaluate.py"], cwd=folder, env=make_environment(), check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    metrics = json.loads((folder / "run" / "metrics.json").read_text())
    test = parse_metrics(metrics).model_dump()["stages"][-1]["test"]
    assert test > 0.7
    assert f"run/adapter: accuracy {100 * test:.1f} %" in asked.stdout


@pytest.mark.slow
def test_the_example_of_an_adapter_for_each_shard(tmp_path: Path) -> None:
    folder = copy_example("shards", tmp_path / "shards")
    done = subprocess.run(
        [sys.executable, "own.py"], cwd=folder, env=make_environment(), check=True,
        capture_output=True, text=True,
    )  # fmt: skip
    assert "release-2: epsilon = 0" in done.stdout
    assert "118 texts remain" in done.stdout
    assert "have the same bits" in done.stdout


def test_the_example_of_an_adapter_is_what_init_writes(tmp_path: Path) -> None:
    for path in write_template(tmp_path, "lora"):
        assert path.read_bytes() == (ROOT / "examples" / "lora" / path.name).read_bytes(), path
