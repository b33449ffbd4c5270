"""Jobs that train again, small and quick, that the tests of routes share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from expunge.jobs.run import Finished, run_job
from expunge.processes.stopping import Stopped, Stopper
from job_folder import JOB, write_job

NONE = dict.fromkeys(JOB["method"])


def write_route(folder: Path, name: str = "retraining", **changes: dict[str, Any]) -> Path:
    """A job of retraining, or of another method without noise; seed 1, since seed 0 is the old."""
    method = NONE | {"name": name, "seed": 1} | changes.pop("method", {})
    return write_job(folder, method=method, **changes)


def save_public(folder: Path, name: str = "public.safetensors", seed: int = 5) -> dict[str, Any]:
    """Public weights beside the job, and the table that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    save_file(dict(torch.nn.Linear(4, 3).state_dict()), folder / name)
    return {"weights": name}


def stop_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """The next run is asked to stop after so many steps."""
    seen = iter(range(steps - 1))

    def check(self: Stopper) -> None:
        if self.patient and next(seen, None) is None:
            raise Stopped(2)

    patch.setattr(Stopper, "check", check)


def begin(job: Path, steps: int = 4, **options: Any) -> None:
    """A run that is stopped on its way."""
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, steps)
        with pytest.raises(Stopped):
            run_job(job, **options)


def hash_run(done: Finished) -> str:
    return done.certificate.weights.after
