"""``expunge forget`` and ``verify --store``."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import expunge
from expunge.cli.main import app
from expunge.errors import InputError, VerificationError


def call(*words: object) -> str:
    found = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    if found.exception is not None and not isinstance(found.exception, SystemExit):
        raise found.exception
    assert found.exit_code == 0, found.output
    return found.stdout


def make_state(folder: Path, kind: str) -> Path:
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 5)), np.arange(60) % 3
    make = expunge.StatisticsHead if kind == "statistics" else expunge.ConvexHead
    head = make(expunge.Features(), classes=3, state=folder / "state")
    head.learn((x, y), [f"user-{i}" for i in range(60)])
    head.release()
    return folder / "state"


@pytest.mark.parametrize("kind", ["statistics", "convex"])
def test_two_requests_are_released_chained_and_verified(tmp_path: Path, kind: str) -> None:
    state = make_state(tmp_path, kind)
    for number, name in enumerate(("user-1", "user-2")):
        (tmp_path / "forget.txt").write_text(name + "\n")
        out = tmp_path / f"release-{number}"
        said = call("forget", state, tmp_path / "forget.txt", "--out", out)
        assert f"epsilon = 0, delta = 1e-05; {59 - number} examples remain" in said
        record = out / "record.json"
        call("verify", out, "--store", state, "--record", record)
    first, second = (tmp_path / f"release-{n}/certificate.json" for n in range(2))
    assert json.loads(second.read_text())["parent"] == expunge.verify(first).sha256
    expunge.verify_chain([first, second])
    with pytest.raises(VerificationError, match="the stored rows sum to"):
        call("verify", tmp_path / "release-0", "--store", state)


def test_a_budget_makes_a_noisy_release(tmp_path: Path) -> None:
    state = make_state(tmp_path, "convex")
    (tmp_path / "f.txt").write_text("user-5\n")
    told = call(
        "forget", state, tmp_path / "f.txt", "--out", tmp_path / "r", "--epsilon", 1, "--json"
    )
    certificate = json.loads(told)["certificate"]
    assert 0.99 < certificate["epsilon"] <= 1
    assert certificate["recipe"]["method"] == "convex-head"


def test_bad_requests_change_nothing(tmp_path: Path) -> None:
    state = make_state(tmp_path, "statistics")
    digest = expunge.load(state).digest()
    (tmp_path / "f.txt").write_text("nobody\n")
    with pytest.raises(InputError, match="'nobody', which was never learned"):
        call("forget", state, tmp_path / "f.txt", "--out", tmp_path / "r")
    (tmp_path / "f.txt").write_text("user-5\n")
    with pytest.raises(InputError, match="this forgets exactly"):
        call("forget", state, tmp_path / "f.txt", "--out", tmp_path / "r", "--epsilon", 1)
    with pytest.raises(InputError, match="already holds files"):
        call("forget", state, tmp_path / "f.txt", "--out", tmp_path)
    assert expunge.load(state).digest() == digest
    assert not (tmp_path / "r").exists()
