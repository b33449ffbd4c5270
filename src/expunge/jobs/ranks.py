"""A job under ``torchrun``: what its processes settle before and after the run itself.

Every process reads the job and its data. Rank 0 alone owns the output: the lock, the hidden folder
of the unfinished run, and every file of the finished one. What one process refuses, all refuse.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from expunge.certificates.record import list_versions
from expunge.errors import ExpungeError, InputError, UnlearningError
from expunge.jobs.directory import open_workspace, workspace_of, write_run
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.tables import Job
from expunge.processes.agreement import check_start
from expunge.processes.group import (
    CHECK_EVERY,
    TIMEOUT_SECONDS,
    Processes,
    is_restarted,
    is_sharded,
    joined,
)

CHECKPOINTS = ("checkpoint.safetensors", "checkpoint")  # of one process, and of several


@contextmanager
def join_job(path: str | Path) -> Generator[tuple[JobFile, Processes | None]]:
    """The job, and the processes that do it; None for one process."""
    made, error = None, None
    try:
        made = read_job(path)
    except ExpungeError as raised:
        error = raised
    timeout, every = TIMEOUT_SECONDS, CHECK_EVERY
    if made is not None:
        timeout, every = made.job.processes.timeout_seconds, made.job.processes.check_every
    with joined(timeout, every) as found:
        processes = None if found.alone else found
        with together(processes):
            if error is not None:
                raise error
        assert made is not None
        if processes is not None:
            versions = {"versions": list_versions(), "job file": made.path.read_text("utf-8")}
            check_start(processes, versions)
            _check_sizes(made.job, processes)
        elif made.job.processes.shard:
            raise InputError(
                "processes.shard is true, but this is one process; start the job with torchrun "
                "--nproc-per-node 2 or more, or leave shard out"
            )
        yield made, processes


def together(processes: Processes | None) -> AbstractContextManager[None]:
    """Refused on one process, refused on all; nothing special for one process."""
    return contextlib.nullcontext() if processes is None else processes.together()


@contextmanager
def share_workspace(
    target: Path, resume: bool, identity: Mapping[str, Any], processes: Processes | None
) -> Generator[Path]:
    """The folder of the unfinished run, which rank 0 opens and locks for all."""
    with contextlib.ExitStack() as stack:
        with together(processes):
            if processes is None or processes.leads:
                work = stack.enter_context(open_workspace(target, resume, identity))
                check_kind(work, processes)
        yield workspace_of(target)


def settle_restart(target: Path, resume: bool, processes: Processes | None) -> bool:
    """Whether to resume: a restarted run goes on where it stood, if it had come that far."""
    if processes is None or not is_restarted():
        return resume
    return processes.share(workspace_of(target).is_dir())


def find_finished(target: Path, processes: Processes | None) -> dict[str, Any] | None:
    """The metrics of a run that this very launch completed before one of its processes died."""
    if processes is None or not is_restarted():
        return None
    found: dict[str, Any] | None = None
    if processes.leads:
        try:
            found = json.loads((target / "metrics.json").read_text("utf-8"))
        except (OSError, ValueError):
            found = None
        if found is not None and found.get("launch") != describe_launch():
            found = None
    return processes.share(found)


def describe_launch() -> str | None:
    """What tells this launch of torchrun from others: a hash of its process and start time."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    try:
        born = Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
    return hashlib.sha256(f"{os.getppid()} {born}".encode()).hexdigest()[:16]


def shard_model(model: nn.Module, processes: Processes) -> None:
    """``fully_shard`` every block of the model's lists of blocks, then the model, by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (processes.size,))
    for module in model.modules():
        if isinstance(module, nn.ModuleList | nn.Sequential):
            for block in module:
                if any(True for _ in block.parameters()) and not isinstance(
                    block, nn.ModuleList | nn.Sequential
                ):
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def write_together(
    target: Path, processes: Processes | None, model: nn.Module, **rest: Any
) -> None:
    """``write_run`` by rank 0; the shards of a sharded model come from all."""
    if processes is None:
        write_run(target, model=model, **rest)
        return
    if not is_sharded(model):
        with processes.together():
            if processes.leads:
                write_run(target, model=model, **rest)
        return
    from expunge.processes.weights import hash_together, save_together

    state = model.state_dict()
    if hash_together(state, processes) != rest["record"].weights_after:
        raise UnlearningError("the weights changed after they were recorded; nothing is written")
    with processes.together():
        if processes.leads:
            write_run(
                target,
                model=model,
                save=lambda folder, facts: save_together(folder, state, facts, processes),
                **rest,
            )
        else:
            save_together(None, state, {}, processes)


def check_kind(work: Path, processes: Processes | None) -> None:
    """Refuse to go on with a run that one process began by several, or the other way round."""
    whole, parts = (work / name for name in CHECKPOINTS)
    if processes is None and parts.exists():
        raise InputError(
            f"the unfinished run in {work} is of several processes; go on with torchrun, or remove "
            "that folder to start anew"
        )
    if processes is not None and whole.exists():
        raise InputError(
            f"the unfinished run in {work} is of one process; go on without torchrun, or remove "
            "that folder to start anew"
        )


def _check_sizes(job: Job, processes: Processes) -> None:
    """Refuse batches that the processes do not divide, and what needs a second model."""
    with processes.together():
        sizes = {"method.batch_size": job.method.batch_size}
        if job.finetune is not None:
            sizes["finetune.batch_size"] = job.finetune.batch_size
        for name, size in sizes.items():
            if size % processes.size != 0:
                valid = f"a multiple of {processes.size}, the number of processes"
                raise InputError.of(name, size, valid)
        if job.processes.shard and job.evaluation.control:
            raise InputError(
                "evaluation.control is true; it must be false with processes.shard, which changes "
                "the one model there is"
            )
