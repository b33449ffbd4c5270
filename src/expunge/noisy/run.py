"""From a trained module to a certified one: the noisy loop.

    x_0     = Π_{C0}(x̂) + N(0, σ0² I)
    x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)

``g_t`` is a minibatch gradient on retained data. Gradient clipping clips it to C1, model clipping
clips the model to R = C2 instead, output perturbation takes no step at all. What ran is returned
as a :class:`~expunge.certificates.record.RunRecord`; what it guarantees follows from that record alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from expunge import recipes
from expunge.accounting.precision import NoisyRecipe
from expunge.certificates.identifiers import Commitment, commit_disjoint
from expunge.certificates.record import Run, RunRecord, list_versions
from expunge.errors import InputError, UnlearningError
from expunge.noisy.loop import Loop, OnStep
from expunge.noisy.model import (
    BufferMode,
    Centre,
    Subject,
    check_finite,
    check_frozen,
    check_unchanged,
    copy_subject,
    estimate_statistics,
    select_tensors,
)
from expunge.noisy.noise import Noise, SystemNoise
from expunge.processes.group import CHECK_EVERY, Processes, find_processes, is_sharded
from expunge.processes.weights import hash_weights
from expunge.recipes import Execution
from expunge.training.batches import move_batch
from expunge.training.compiled import Compile
from expunge.training.losses import LossFunction, compute_loss
from expunge.training.randomness import untouched_random

if TYPE_CHECKING:
    from expunge.noisy.team import Team

Start = Literal["model", "centre"]


def unlearn(
    model: nn.Module,
    retain_loader: Iterable[Any],
    recipe: NoisyRecipe,
    *,
    loss_fn: LossFunction | None = None,
    centre: Centre | None = None,
    noise: Noise | None = None,
    start: Start = "model",
    buffers: BufferMode = "refuse",
    public_buffers: Iterable[str] = (),
    forget_ids: Iterable[str | int] | None = None,
    retain_ids: Iterable[str | int] | None = None,
    releases: int = 1,
    parent: str | None = None,
    device: torch.device | str | None = None,
    compile: Compile = "auto",
    progress: bool = False,
    on_step: OnStep | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = 30.0,
    resume: bool = False,
    distributed: bool | Processes | None = None,
    check_every: int | None = None,
) -> Run:
    """Forget what is not in ``retain_loader``, with a certificate's worth of noise.

    The module passed in and the global random state are untouched; the copy is run in the train or
    eval mode the module is in. ``centre`` is a state_dict of public weights (None: zero), towards
    which clips and weight decay pull. ``start="centre"`` is the control that never sees the old
    model. ``loss_fn(output, target)`` may be None when batches are mappings and the model returns
    its own loss. Gradients that are not finite count as zero and are recorded. ``on_step(done,
    model)`` is called after every step; what it sees is not covered by any certificate. With
    ``checkpoint`` the state is saved every ``checkpoint_seconds``, at the end, and when ``on_step``
    raises KeyboardInterrupt; ``resume`` goes on from there with fresh noise.

    **Several processes.** Where ``torch.distributed`` is initialised with more than one process,
    they do one run together: all must call ``unlearn`` with the same arguments, and do their share
    of every batch. ``distributed=False`` is a run of this process alone, True refuses to be alone.
    A loss must be a mean over examples. Every ``check_every`` steps (default 50) the processes
    compare what they hold, and stop if it differs. A model on which ``fully_shard`` was called is
    changed in place, since it cannot be copied, and ``checkpoint`` is then, as for any run of
    several, a folder that all can reach. All return the same record; ``expunge.processes.group`` has the
    rest.

    >>> from expunge import GradientClipping
    >>> recipe = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1,
    ...                           weight_decay=1.0, steps=3, noise_std=5.0)
    >>> batches = [(torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))]
    >>> run = unlearn(nn.Linear(2, 2), batches, recipe, loss_fn=nn.functional.cross_entropy)
    >>> len(run.record.trace), run.record.parameters, run.record.noise["source"]
    (3, 6, 'system')
    """
    recipe = _check_recipe(recipe, start)
    forget, retain = commit_disjoint(
        forget_ids, getattr(retain_loader, "ids", None) if retain_ids is None else retain_ids
    )
    Execution(releases=releases)
    if parent is not None and not re.fullmatch("[0-9a-f]{64}", parent):
        raise InputError.of("parent", parent, "the 64 hexadecimal digits of a certificate's hash")
    path = None if checkpoint is None else Path(checkpoint)
    if path is not None and path.exists() and not resume:
        raise InputError(f"checkpoint {path} exists already; pass resume=True or another path")
    found = find_processes(distributed, CHECK_EVERY if check_every is None else check_every)
    processes = None if found.alone else found
    with torch.inference_mode(False), torch.enable_grad(), untouched_random():
        subject = copy_subject(
            model, centre, buffers=buffers, public_buffers=public_buffers, device=device
        )
        if start == "model":
            with contextlib.nullcontext() if processes is None else processes.together():
                check_finite(subject.certified)
        team = _find_team(processes, subject)
        loader = retain_loader if team is None else team.share_out(retain_loader)
        source = noise or SystemNoise()
        loop = Loop(subject, recipe, loader, loss_fn, source, compile, team)
        hash_state = hash_weights if team is None else team.hash_state
        before = hash_state(model.state_dict())
        hashes = {
            "weights_before": before,
            "frozen": _hash_named(subject, hash_state),
            "centre": None if subject.centre is None else hash_state(subject.centre),
        }
        identity = hashes | {
            "recipe": recipes.to_dict(recipe),
            "start": start,
            "noise": loop.noise.describe(),
            "buffers": buffers,
        }
        if team is not None:
            counts = {"forget set of": _count(forget), "retained set of": _count(retain)}
            team.begin(identity | counts | {"versions": list_versions()}, loader)
        loop.begin(path if resume else None, identity)
        loop.run(
            path, checkpoint_seconds, identity, on_step, progress and (team is None or team.leads)
        )
        if subject.model is model:
            check_frozen(hashes["frozen"], _hash_named(subject, hash_state))
        else:
            check_unchanged(model, subject)
        noisy = after = hash_state(subject.model.state_dict())
        if subject.buffers.modules:
            _estimate(subject, retain_loader, loss_fn)
            after = hash_weights(subject.model.state_dict())
    plan = subject.buffers
    record = RunRecord(
        recipe=recipe,
        parameters=subject.size,
        grid=loop.vector.grid,
        execution=Execution(rounding=loop.precision.rounding, releases=releases),
        noise=loop.describe_noise(),
        noise_keys=loop.noise_keys,
        trace=loop.tell(),
        gradient_evaluations=loop.gradient_evaluations,
        weights_before=before,
        weights_noisy=noisy,
        weights_after=after,
        device=str(subject.device),
        dtype=subject.dtype,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        frozen=hashes["frozen"],
        frozen_names=subject.frozen,
        centre=hashes["centre"],
        forget=forget,
        retain=retain,
        buffers="reset" if plan.reset else "frozen" if plan.public else "none",
        buffer_names=plan.reset or plan.public,
        start=start,
        resumed=loop.resumed,
        parent=parent,
        processes=None if team is None else team.describe(),
        versions=list_versions(),
    )
    return Run(subject.model, record if processes is None else processes.share(record))


def _check_recipe(recipe: NoisyRecipe, start: Start) -> NoisyRecipe:
    if not isinstance(recipe, NoisyRecipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of(
            "recipe", recipe, "GradientClipping, ModelClipping or OutputPerturbation"
        )
    if start not in ("model", "centre"):
        raise InputError.of("start", start, "'model' or 'centre'")
    return recipe if start == "model" else replace(recipe, start_clip=0.0)


def _hash_named(subject: Subject, hash_state: Callable[[Mapping[str, Tensor]], str]) -> str | None:
    """The hash of the public tensors; None if there are none."""
    public = select_tensors(subject.model, subject.frozen)
    return hash_state(public) if public else None


def _find_team(processes: Processes | None, subject: Subject) -> Team | None:
    """The team of these processes around the model; None for a run of one process."""
    if processes is None:
        if is_sharded(subject.model):
            raise UnlearningError(
                "the model is sharded, and this is a run of one process; it takes all processes "
                "that hold the model (distributed=None)"
            )
        return None
    from expunge.noisy.team import Team  # torch's sharded tensors are slow to import

    return Team(processes, subject)


def _count(commitment: Commitment | None) -> int | None:
    return None if commitment is None else commitment.count


def _estimate(subject: Subject, loader: Iterable[Any], loss_fn: LossFunction | None) -> None:
    def forward(batch: Any) -> object:
        return compute_loss(subject.model, move_batch(batch, subject.device), loss_fn)

    if estimate_statistics(subject.model, subject.buffers, loader, forward) == 0:
        raise UnlearningError("retain_loader yields no batches to re-estimate buffers on")
