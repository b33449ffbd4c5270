"""The seconds that ``expunge unlearn --dry-run`` tells, and the job's: the larger over the smaller.

The job of ``expunge init``, and the same by a noisy method. Each is a process of its own and is
timed from reading the job to the last file. On idle cores; so that other work does not decide, both
clocks count the seconds of the processor, and threads sleep while they wait for each other
(``OMP_WAIT_POLICY=passive``).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from expunge.cli.jobs import write_template

CASES = (("retraining", 1), ("gradient-clipping", 2))
NOISY = 'name = "plan"\nchoose = "gradient-clipping"'
WEIGHTS = """
from own import build
from safetensors.torch import save_file
save_file(build().state_dict(), "weights.safetensors")
"""
ESTIMATE = """
import sys, time
time.perf_counter = time.process_time
from expunge.jobs.preview import preview_job
print(preview_job(sys.argv[1], out=sys.argv[2]).seconds)
"""
REAL = """
import sys, time
from expunge.jobs.run import run_job
began = time.process_time()
run_job(sys.argv[1], out=sys.argv[2])
print(time.process_time() - began)
"""


def run() -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_template(folder)
        text = (folder / "job.toml").read_text()
        (folder / "retraining.toml").write_text(text)
        noisy = text.replace('name = "plan"', NOISY, 1)
        (folder / "gradient-clipping.toml").write_text(noisy)
        _call(WEIGHTS, folder, 1)
        return [_compare(folder, method, threads) for method, threads in CASES]


def _compare(folder: Path, method: str, threads: int) -> dict[str, Any]:
    words = (f"{method}.toml", f"{method}-{threads}")
    found, real = (float(_call(code, folder, threads, *words)) for code in (ESTIMATE, REAL))
    ratio = max(found / real, real / found)
    name = f"estimate and {method}, {threads} thread{'' if threads == 1 else 's'}"
    facts = {"seconds": round(real, 3), "estimate": round(found, 3)}
    target = {"target": 2, "direction": "at most", "met": ratio <= 2}
    return {"name": name, "ratio": ratio, **facts, **target}


def _call(code: str, folder: Path, threads: int, *words: str) -> str:
    own = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=folder,
        env=os.environ | own,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return done.stdout


if __name__ == "__main__":
    print(*run(), sep="\n")
