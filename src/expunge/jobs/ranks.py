"""A job under ``torchrun``: what its processes settle before and after the run itself.

Every process reads the job and its data. Rank 0 alone owns the output: the lock, the hidden folder
of the unfinished run, and every file of the finished one. What one process refuses, all refuse. A
run of one process is a group of one.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from expunge.certificates.record import list_versions
from expunge.errors import ExpungeError, InputError
from expunge.jobs.directory import open_workspace, workspace_of
from expunge.jobs.jobfile import JobFile, read_job
from expunge.jobs.methods import choose_route
from expunge.jobs.tables import EXACT, Job
from expunge.processes.agreement import check_start
from expunge.processes.group import CHECK_EVERY, TIMEOUT_SECONDS, Processes, joined

CHECKPOINTS = ("checkpoint.safetensors", "checkpoint")  # of one process, and of several


@contextmanager
def join_job(path: str | Path) -> Generator[tuple[JobFile, Processes]]:
    """The job, and the processes that do it."""
    made, error = None, None
    timeout, every = TIMEOUT_SECONDS, CHECK_EVERY
    try:
        made = read_job(path)
        timeout, every = made.job.processes.timeout_seconds, made.job.processes.check_every
    except ExpungeError as raised:
        error = raised
    with joined(timeout, every) as processes:
        with processes.together():
            if error is not None:
                raise error
        assert made is not None
        versions = {"versions": list_versions(), "job file": made.path.read_text("utf-8")}
        check_start(processes, versions)
        with processes.together():
            _check_sizes(made.job, processes)
        yield made, processes


@contextmanager
def share_workspace(
    target: Path, resume: bool, identity: Mapping[str, Any], processes: Processes
) -> Generator[Path]:
    """The folder of the unfinished run, which rank 0 opens and locks for all."""
    with ExitStack() as stack:
        with processes.together():
            if processes.leads:
                work = stack.enter_context(open_workspace(target, resume, identity))
                check_kind(work, processes)
        yield workspace_of(target)


def check_kind(work: Path, processes: Processes) -> None:
    """Refuse to go on with a run that one process began by several, or the other way round."""
    whole, parts = (work / name for name in CHECKPOINTS)
    if (parts if processes.alone else whole).exists():
        began, again = ("several processes", "with torchrun")
        if not processes.alone:
            began, again = ("one process", "without torchrun")
        raise InputError(
            f"the unfinished run in {work} is of {began}; go on {again}, or remove that folder to "
            "start anew"
        )


def shard_model(model: nn.Module, processes: Processes) -> None:
    """``fully_shard`` every block of the model's lists of blocks, then the model, by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (processes.size,))
    lists = (nn.ModuleList, nn.Sequential)
    for module in model.modules():
        for block in module if isinstance(module, lists) else ():
            if any(True for _ in block.parameters()) and not isinstance(block, lists):
                fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _check_sizes(job: Job, processes: Processes) -> None:
    """Refuse batches that the processes do not divide, and what needs a second model or one
    process."""
    if not processes.alone and (route := choose_route(job)) in (*EXACT, "state"):
        raise InputError(
            f"method.name is {job.method.name!r}, and {'a' if route == 'state' else 'its'} {route} "
            "is of one process; start the job without torchrun, or name a noisy method"
        )
    if job.processes.shard and processes.alone:
        raise InputError(
            "processes.shard is true, but this is one process; start the job with torchrun "
            "--nproc-per-node 2 or more, or leave shard out"
        )
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
