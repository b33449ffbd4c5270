"""The experiments' own scripts, tiny, and that what is committed is what they print."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expunge import VerificationError, verify

ROOT = Path(__file__).parents[2]


def test_table_noise(tmp_path: Path) -> None:
    script = ROOT / "experiments" / "table_noise.py"
    for options, folder in ((["--smoke"], "smoke"), ([], "full")):
        command = [sys.executable, str(script), *options, "--out", str(tmp_path / folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "| gradient clipping mnist | 1 | 2 | 6.573 | 5.276 |" in done.stdout
    committed = ROOT / "experiments" / "results" / "noise.md"
    assert committed.read_text() == (tmp_path / "full" / "noise.md").read_text()


def run_script(name: str, *options: str) -> str:
    command = [sys.executable, str(ROOT / "experiments" / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real scripts, tiny, sharing one folder of results as they do in earnest."""
    out = tmp_path_factory.mktemp("results")
    for name in (
        "figure_budget",
        "table_target_accuracy",
        "figure_epsilon",
        "figure_convergence",
        "figure_transfer",
        "table_variations",
        "search",
        "table_heads",
    ):
        run_script(name, "--smoke", "--out", str(out))
    return out


def read_runs(folder: Path, task: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / f"{task}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_no_run_is_run_twice(smoke: Path) -> None:
    keys = [entry["key"] for entry in read_runs(smoke, "digits")]
    assert len(keys) == len(set(keys)) > 60
    before = (smoke / "runs" / "digits.jsonl").read_bytes()
    run_script("figure_budget", "--smoke", "--out", str(smoke))
    assert (smoke / "runs" / "digits.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_crash_costs_one_run(smoke: Path, tmp_path: Path) -> None:
    copied = tmp_path / "results"
    shutil.copytree(smoke, copied)
    file = copied / "runs" / "digits.jsonl"
    whole = file.read_text(encoding="utf-8")
    cut = whole[: whole.rstrip("\n").rindex("\n") + 40]
    file.write_text(cut, encoding="utf-8")
    run_script("search", "--smoke", "--out", str(copied))
    ended = json.loads(file.read_text(encoding="utf-8").splitlines()[-1])
    lost = json.loads(whole.splitlines()[-1])
    assert ended["key"] == lost["key"]
    assert ended["test"] == lost["test"]


@pytest.mark.slow
def test_the_same_runs_on_ray(smoke: Path, tmp_path: Path) -> None:
    options = ["--smoke", "--budgets", "1", "--seeds", "1", "--ray", "--out", str(tmp_path)]
    shutil.copytree(smoke / "models", tmp_path / "models")
    run_script("table_variations", *options)
    found = {entry["key"]: entry["test"] for entry in read_runs(tmp_path, "digits")}
    plain = {entry["key"]: entry["test"] for entry in read_runs(smoke, "digits")}
    assert len(found) == 9
    assert found == {key: plain[key] for key in found}


@pytest.mark.slow
def test_every_figure_and_table_is_drawn(smoke: Path) -> None:
    for name in ("figure_budget_digits", "figure_epsilon_digits", "figure_convergence_digits"):
        assert (smoke / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
        assert "| retrain, own |" in (smoke / f"{name}.md").read_text(encoding="utf-8")
    assert "> 2" in (smoke / "table_target_accuracy_digits.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_certified_runs_carry_certificates_that_hold(smoke: Path) -> None:
    folder = smoke / "certificates" / "digits"
    kept = sorted(folder.glob("*.safetensors"))
    assert len(kept) >= 3
    for weights in kept:
        found = verify(weights.with_suffix(".json"), weights)
        assert not found.releasable
    wrong = kept[0].with_suffix(".json")
    with pytest.raises(VerificationError):
        verify(wrong, kept[1])


@pytest.mark.slow
def test_versions_are_what_they_say(smoke: Path) -> None:
    entries = read_runs(smoke, "digits")
    clipped = [e for e in entries if e["method"] == "gradient-clipping" and e["epsilon"] == 1]
    printed = {e["true_epsilon"] for e in clipped if e["version"] == "printed"}
    certified = {e["true_epsilon"] for e in clipped if e["version"] == "certified"}
    assert all(6.57 < epsilon < 6.58 for epsilon in printed)
    assert all(0.99 < epsilon <= 1.0 for epsilon in certified)
    noise = {
        version: {e["recipe"]["noise_std"] for e in clipped if e["version"] == version}
        for version in ("printed", "certified", "centre")
    }
    assert noise["printed"] == noise["certified"] == noise["centre"]


@pytest.mark.slow
def test_the_results_page_is_what_the_results_say() -> None:
    assert "up to date" in run_script("results_page", "--check")


@pytest.mark.parametrize("task", ["mnist", "cifar10", "transfer_cifar10", "transfer_cifar100"])
def test_committed_certificates_are_those_of_the_committed_runs(task: str) -> None:
    folder = ROOT / "experiments" / "results"
    for entry in read_runs(folder, task):
        if entry["version"] == "certified" and "certificate" in entry:
            path = folder / "certificates" / task / entry["certificate"]
            certificate = json.loads(path.read_text(encoding="utf-8"))
            assert certificate["epsilon"] == entry["certified_epsilon"]
            assert certificate["epsilon"] <= entry["epsilon"] * (1 + 1e-9)
    kept = sorted((folder / "certificates" / task).glob("*.safetensors"))
    assert kept
    for weights in kept:
        verify(weights.with_suffix(".json"), weights)
