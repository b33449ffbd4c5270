"""From a trained module to a certified one: the noisy loop.

    x_0     = Π_{C0}(x̂) + N(0, σ0² I)
    x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)

``g_t`` is a minibatch gradient on retained data. Gradient clipping clips it to C1, model clipping
clips the model to R = C2 instead, output perturbation takes no step at all. What ran is returned
as a :class:`~expunge.certificates.record.RunRecord`; what it guarantees follows from that record
alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from expunge import recipes
from expunge.accounting.precision import NoisyRecipe
from expunge.certificates.identifiers import commit_disjoint, read_names
from expunge.certificates.record import Run, RunRecord, list_versions
from expunge.errors import InputError, UnlearningError
from expunge.noisy.centre import Centre, find_centre
from expunge.noisy.checkpoint import Checkpoint
from expunge.noisy.loop import Loop, OnStep
from expunge.noisy.model import (
    BufferMode,
    Public,
    check_finite,
    check_kept,
    check_source,
    copy_model,
)
from expunge.noisy.noise import Noise, check_noise, describe_noise
from expunge.noisy.team import Team
from expunge.processes.adapters import describe_adapter
from expunge.processes.group import Processes, find_processes
from expunge.processes.weights import find_nonfinite, hash_weights, list_tensors, view_bytes
from expunge.recipes import Execution
from expunge.training.batches import count_samples, find_ids, find_tensors, gives_all
from expunge.training.losses import LossFunction, check_data, check_loss
from expunge.training.randomness import untouched_random
from expunge.training.train import read_retained

Start = Literal["model", "centre"]


def unlearn(
    model: nn.Module,
    retain_loader: Iterable[Any],
    recipe: NoisyRecipe,
    *,
    loss_fn: LossFunction | None = None,
    centre: Centre = "initialisation",
    public: Public | None = None,
    noise: Noise | None = None,
    start: Start = "model",
    buffers: BufferMode = "refuse",
    forget_ids: Iterable[str | int] | None = None,
    retain_ids: Iterable[str | int] | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
    on_step: OnStep | None = None,
    checkpoint: Checkpoint | None = None,
    distributed: bool | Processes | None = None,
) -> Run:
    """Forget what is not in ``retain_loader``, with a certificate's worth of noise.

    The module passed in and the global random state are untouched; the copy is run in the train or
    eval mode the module is in. ``centre`` is the public point towards which clips and weight decay
    pull: "initialisation" is a fresh one of every module, under a seed that stands in the
    certificate; an :class:`expunge.Initialisation` names another seed, or a function that builds a
    fresh network; a state_dict holds public weights; "zero" is the paper's. ``public`` is where all
    tensors that are not trained come from: a state_dict, module or file that they are compared
    with, or a list of names and patterns that you declare public; ``buffers="reset"`` estimates
    running statistics anew instead.
    ``start="centre"`` is the control that never sees the old model. ``loss_fn(output, target)`` may
    be None when batches are mappings and the model returns its own loss. Gradients that are not
    finite count as zero and are recorded. ``on_step(done, model)`` sees a copy after every step,
    which no certificate covers; if it raises KeyboardInterrupt the run stops there. ``checkpoint``
    says where the state is saved, and whether to go on from there, with fresh noise.

    An identifier names a person and may stand on many samples: none of them may be in
    ``retain_loader``. ``forget_ids`` has one for each forgotten sample; or each person once, and
    then their samples are not counted. ``retain_ids`` (default: the ``ids`` of the loader or its
    data set) has one for each retained sample.

    The order of the data and dropout are drawn from the run's own noise source: what the original
    training left in the global generators, or in those of the loader, is not used.

    **Several processes.** Where ``torch.distributed`` is initialised with more than one process,
    they do one run together: all must call ``unlearn`` with the same arguments, and do their share
    of every batch. ``distributed=False`` is a run of this process alone, True refuses to be alone,
    and ``find_processes(True, check_every=10)`` says how often they compare what they hold. A loss
    must be a mean over examples. A model on which ``fully_shard`` was called is changed in place,
    since it cannot be copied. For several processes ``checkpoint.path`` is a folder that all can
    reach. All return the same record; ``expunge.processes.group`` has the rest.

    >>> from expunge import GradientClipping
    >>> recipe = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1,
    ...                           weight_decay=1.0, steps=3, noise_std=5.0)
    >>> batches = [(torch.ones(4, 2), torch.tensor([0, 1, 1, 0]))]
    >>> run = unlearn(nn.Linear(2, 2), batches, recipe, loss_fn=nn.functional.cross_entropy)
    >>> len(run.record.trace), run.record.parameters, run.record.noise["source"]
    (3, 6, 'system')
    """
    recipe, source = _check_recipe(recipe, start), check_noise(noise)
    check_loss(loss_fn)
    forgotten = read_names(forget_ids)
    retained = read_names(
        find_ids(retain_loader) if retain_ids is None else retain_ids, ordered=True
    )
    forget, retain = commit_disjoint(forgotten, retained)
    read_retained(retain_loader, retained, forgotten)
    check_data(model, retain_loader)
    if checkpoint is not None and not isinstance(checkpoint, Checkpoint):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("checkpoint", checkpoint, "a Checkpoint(path, every, resume) or None")
    if checkpoint is not None and checkpoint.place.exists() and not checkpoint.resume:
        raise InputError(
            f"checkpoint {checkpoint.path} exists already; say Checkpoint(..., resume=True) or "
            "give another path"
        )
    if checkpoint is not None:
        check_told(retain_loader, retained)
    processes = find_processes(distributed)
    with torch.inference_mode(False), torch.enable_grad(), untouched_random():
        certified = copy_model(
            model, public=public, buffers=buffers, device=device, processes=processes
        )
        around = find_centre(certified, centre, processes)
        certified = replace(certified, centre=around.tensors)
        with processes.together():
            if start == "model":
                check_finite(certified.certified)
            if certified.public is not None:
                check_source(model, public, processes)
        team = Team(processes, certified)
        loop = Loop(certified, recipe, retain_loader, loss_fn, source, team)
        before = hash_weights(list_tensors(model), processes)
        held = None if certified.centre is None else hash_weights(certified.centre, processes)
        identity = {
            "versions": list_versions(),
            "old weights": before,
            "public tensors": None if certified.public is None else certified.public.hash,
            "centre": held,
            "centre's origin": asdict(around.origin),
            "recipe": recipes.to_dict(recipe),
            "start": start,
            "noise": source.describe(),
            "buffers": buffers,
            "forget set": None if forgotten is None else _digest(sorted(set(forgotten))),
            "retained set": None if retained is None else _digest(retained),
            "retained data": None if checkpoint is None else describe_data(retain_loader),
        }
        loop.run(identity, checkpoint, on_step, progress)
        check_kept(certified, processes)
        noisy = after = hash_weights(list_tensors(certified.model), processes)
        if certified.reset:
            loop.estimate()
            after = hash_weights(list_tensors(certified.model), processes)
        with processes.together():
            public = () if certified.public is None else certified.public.names
            wrong = find_nonfinite(list_tensors(certified.model), public)
            if wrong is not None:
                raise UnlearningError(f"{wrong} is not finite after the run; nothing is released")
    record = RunRecord(
        recipe=recipe,
        grid=loop.vector.grid,
        execution=Execution(rounding=loop.precision.rounding),
        noise=describe_noise(source, loop.vector.grid),
        noise_keys=loop.noise_keys,
        trace=loop.tell(),
        gradient_evaluations=loop.gradient_evaluations,
        weights_before=before,
        weights_noisy=noisy,
        weights_after=after,
        centre=held,
        origin=around.origin,
        forget=forget,
        retain=retain,
        checked=None not in (forgotten, retained, count_samples(retain_loader)),
        start=start,
        resumed=loop.resumed,
        processes=team.describe(),
        adapter=describe_adapter(certified.model, certified.public),
        **certified.describe(),
    )
    names = None if forgotten is None else frozenset(forgotten)
    return Run(certified.model, processes.share(record), names)


def check_told(loader: object, ids: Sequence[str] | None) -> None:
    """Refuse data that a checkpoint could not tell from others, such as those of another request.

    >>> check_told(iter([torch.zeros(2)]), None)
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: retain_ids is None; it must be given with a checkpoint, for ...
    """
    listed = isinstance(loader, list | tuple) or not isinstance(loader, Iterable)
    if ids is None and not ((listed or gives_all(loader)) and _find_bytes(loader)):
        raise InputError.of(
            "retain_ids",
            None,
            "given with a checkpoint, for data that are not all tensors in memory: it must not be "
            "taken for one of other data",
        )


def _find_bytes(loader: object) -> list[Tensor]:
    """The tensors in memory that a loader reads."""
    held: list[object] = [getattr(loader, name, None) for name in ("inputs", "targets")]
    held += getattr(getattr(loader, "dataset", None), "tensors", ())
    if isinstance(loader, list | tuple):
        held += cast(Sequence[object], loader)
    return find_tensors(held)


def describe_data(loader: Iterable[Any]) -> dict[str, Any]:
    """What tells the retained data of a run from others without reading them all twice.

    Sizes always; of what lies in memory, the bytes.

    >>> describe_data([torch.zeros(2)]) == describe_data([torch.ones(2)])
    False
    """
    length = len(cast(Any, loader)) if hasattr(loader, "__len__") else None
    size = getattr(loader, "batch_size", None)
    digest = hashlib.sha256()
    for tensor in _find_bytes(loader):
        digest.update(str((tensor.shape, tensor.dtype)).encode())
        digest.update(view_bytes(tensor))
    return {
        "kind": type(loader).__name__,
        "batches": length,
        "batch size": size if isinstance(size, int) else None,
        "samples": count_samples(loader),
        "bytes": digest.hexdigest(),
    }


def _check_recipe(recipe: NoisyRecipe, start: Start) -> NoisyRecipe:
    if not isinstance(recipe, NoisyRecipe):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of(
            "recipe", recipe, "GradientClipping, ModelClipping or OutputPerturbation"
        )
    if start not in ("model", "centre"):
        raise InputError.of("start", start, "'model' or 'centre'")
    return recipe if start == "model" else replace(recipe, start_clip=0.0)


def _digest(names: Iterable[str]) -> str:
    """One hash for identifiers; it goes into checkpoints, which are private."""
    digest = hashlib.sha256()
    for name in names:
        data = name.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.hexdigest()
