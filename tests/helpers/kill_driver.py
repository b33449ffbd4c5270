"""Plays torchrun for a job: starts two ranks, kills one at a random moment, starts both anew.

``kill_driver.py JOB KILLS LAST`` prints one JSON object; the last start has LAST ranks. Ranks are
forked, so that torch is imported once, and get the environment that torchrun gives them; the rank
that is left is told to end, as torchrun does.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

from expunge import verify
from expunge.cli.main import main as run_command
from expunge.jobs import run as jobs
from expunge.noisy import team
from expunge.training import train
from ranks import hold_port

LOADED = (jobs, train, team)  # what ranks would otherwise import again and again


def start(job: Path, attempt: int, count: int, log: Path) -> list[int]:
    port = hold_port()
    ranks = []
    for rank in range(count):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.environ |= {
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": port,
                    "WORLD_SIZE": str(count),
                    "RANK": str(rank),
                    "TORCHELASTIC_RESTART_COUNT": str(attempt),
                    "TORCHELASTIC_RUN_ID": "kill_driver",
                }
                out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
                os.dup2(out, 1)
                os.dup2(out, 2)
                sys.argv = ["expunge", "unlearn", str(job)]
                run_command()
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        ranks.append(pid)
    return ranks


def wait(ranks: list[int], patience: float) -> list[int]:
    """Exit codes of both ranks; one that fails takes the other with it, gently at first."""
    codes: dict[int, int] = {}
    end = time.monotonic() + patience
    asked = None
    while len(codes) < len(ranks):
        for pid in set(ranks) - codes.keys():
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
        left = set(ranks) - codes.keys()
        now = time.monotonic()
        if left and asked is None and (any(codes.values()) or now > end):
            asked = now
            for pid in left:
                os.kill(pid, signal.SIGTERM)
        if left and asked is not None and now > asked + 5:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)
    return [codes[pid] for pid in ranks]


def wait_a_while(state: Path, rng: random.Random) -> None:
    """Any moment: before the first step, at a step, inside a checkpoint, at the end."""
    if rng.random() < 0.3:
        time.sleep(rng.uniform(0.0, 1.5))
        return
    patience = time.monotonic() + 15
    for _ in range(rng.choice([1, 2, 3])):
        before = read_time(state)
        while read_time(state) == before and time.monotonic() < patience:
            time.sleep(0.0005)
    time.sleep(rng.uniform(0.0, 0.05))


def read_time(state: Path) -> int | None:
    try:
        return state.stat().st_mtime_ns
    except OSError:
        return None


def main() -> None:
    job, kills = Path(sys.argv[1]), int(sys.argv[2])
    run, rng = job.parent / "run", random.Random(kills)
    state = job.parent / ".run.unfinished" / "checkpoint" / "state.safetensors"
    report = {"killed": 0, "early": 0, "codes": []}
    for attempt in range(kills + 1):
        count = 2 if attempt < kills else int(sys.argv[3])
        ranks = start(job, attempt, count, job.parent / "log")
        if attempt < kills:
            wait_a_while(state, rng)
            os.kill(rng.choice(ranks), signal.SIGKILL)
        codes = wait(ranks, 600)
        report["codes"].append(codes)
        report["killed"] += -signal.SIGKILL in codes
        if run.exists():
            report["early"] += attempt < kills
            verify(run / "certificate.json")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
