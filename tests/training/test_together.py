"""Fine-tuning and measuring by two processes against one, with whole and with sharded models."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRIVER = Path(__file__).with_name("together.py")


@pytest.mark.slow
def test_two_processes_tune_and_measure_as_one():
    path = os.pathsep.join([str(DRIVER.parents[1] / "helpers"), *sys.path])
    done = subprocess.run(
        [sys.executable, str(DRIVER)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(told) == 4
    assert len({row["record"] for row in told}) == 2
    for row in told:
        assert row["apart"] < 1e-6
        assert row["loss"][0] == pytest.approx(row["loss"][1], rel=1e-5)
        assert (row["count"], row["steps"], row["checked"]) == (22, 6, True)
