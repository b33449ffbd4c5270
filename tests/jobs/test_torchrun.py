"""Jobs under torchrun: every process runs, the first writes and prints."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import expunge
from tests.helpers.job_folder import EXACT, NOISE, make_environment, write_job


def run_ranks(*arguments: str | Path) -> list[tuple[int, str, str]]:
    """Two processes as torchrun starts them: exit code, stdout and stderr of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "expunge", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=make_environment(
                RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        shown = [rank.communicate(timeout=300) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *text) for rank, text in zip(ranks, shown, strict=True)]


@pytest.mark.parametrize("kind", ["retraining", "noise"])
def test_two_processes_do_one_run(tmp_path: Path, kind: str) -> None:
    job = NOISE if kind == "noise" else EXACT | {"training": NOISE["training"]}
    path = write_job(tmp_path, job)
    (code, shown, told), (other, quiet, silent) = run_ranks("unlearn", path, "--json")
    assert (code, other) == (0, 0), told + silent
    assert json.loads(shown)["certificate"]["environment"]["processes"] == 2
    assert quiet == ""
    expunge.verify(tmp_path / "run")
    assert not (tmp_path / ".run.unfinished").exists()


def test_a_refusal_is_said_once(tmp_path: Path) -> None:
    path = write_job(tmp_path, NOISE)
    (tmp_path / "forget.txt").write_text("nobody\n")
    (code, shown, told), (other, quiet, silent) = run_ranks("unlearn", path)
    assert (code, other) == (2, 2)
    assert shown == quiet == ""
    assert "'nobody'" in told
    assert "nobody" not in silent
    assert not (tmp_path / "run").exists()
