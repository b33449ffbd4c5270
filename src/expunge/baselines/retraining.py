"""Retraining: a fresh network of the same kind, trained on retained data only.

It starts from weights that saw no data, or (a *restart*) from public weights that never saw what is
forgotten, so it is (0, 0) whatever else it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from expunge.certificates.identifiers import commit
from expunge.certificates.record import NO_NOISE, Run, RunRecord, Trace
from expunge.errors import InputError
from expunge.noisy.centre import match_centre
from expunge.noisy.fresh import check_fresh, find_fixed, reset_modules, take_weights, wipe
from expunge.noisy.model import (
    BufferMode,
    CertifiedModel,
    Public,
    check_source,
    check_unchanged,
    copy_model,
    list_uncertified,
    reset_statistics,
)
from expunge.noisy.run import check_told, describe_data
from expunge.processes.adapters import describe_adapter
from expunge.processes.group import Processes
from expunge.processes.weights import find_copied, hash_weights, list_tensors
from expunge.recipes import Execution, Retraining
from expunge.training.losses import check_data, check_loss
from expunge.training.randomness import derive_seed, seeded_random
from expunge.training.resuming import Keeper
from expunge.training.settings import InMemory, Options, spell_out
from expunge.training.train import OnPass, check_trained, describe_training, read_sets, train


@dataclass(frozen=True)
class GaussianInitialisation:
    """Every trainable parameter drawn from N(0, std²): a start chosen without any data.

    >>> GaussianInitialisation(0.05)
    GaussianInitialisation(std=0.05)
    """

    std: float

    def __post_init__(self) -> None:
        if not 0 <= self.std < math.inf:
            raise InputError.of("std", self.std, "a finite number >= 0")


@dataclass(frozen=True, eq=False)
class PublicStart:
    """Public weights for every trainable parameter, and where they were published: a restart.

    >>> batches, base = [(torch.eye(2), torch.tensor([0, 1]))], nn.Linear(2, 2).state_dict()
    >>> run = retrain(nn.Linear(2, 2), batches, initialise=PublicStart(base, "base.safetensors"),
    ...               epochs=3, learning_rate=0.5)
    >>> run.record.start, run.record.initialisation
    ('centre', 'public weights of base.safetensors, seed 0')
    """

    weights: Mapping[str, Tensor]
    source: str = "a state_dict"

    def __post_init__(self) -> None:
        if not (0 < len(self.source) <= 1000 and self.source.isprintable()):
            raise InputError.of("source", self.source, "a text of one line: where they are from")


@dataclass(frozen=True, eq=False)
class DrawnStart:
    """What a job's ``build()`` drew under its seed, compared with what it draws under another."""

    weights: Mapping[str, Tensor]


Initialise = GaussianInitialisation | PublicStart | DrawnStart | Callable[[], nn.Module]
_NO_SALT = "00" * 32  # for a file that is private anyway
_ANOTHER = derive_seed("another start, to compare with")
_ADVICE = "give initialise=GaussianInitialisation(std) or a function that builds the network"


@spell_out(Options)
def retrain(
    model: nn.Module,
    retain_loader: InMemory | Iterable[Any],
    recipe: Retraining | None = None,
    *,
    initialise: Initialise | None = None,
    public: Public | None = None,
    buffers: BufferMode = "reset",
    forget_ids: Iterable[str | int] | None = None,
    retain_ids: Iterable[str | int] | None = None,
    device: torch.device | str | None = None,
    on_pass: OnPass | None = None,
    on_step: Callable[[int], object] | None = None,
    keeper: Keeper | None = None,
    progress: bool = False,
    **options: Unpack[Options],
) -> Run:
    """Train a fresh network of ``model``'s kind on the retained data: the (0, 0) baseline.

    ``initialise`` is where it starts: None calls ``reset_parameters()`` of every module that has
    trainable parameters; a :class:`GaussianInitialisation` draws them all; a callable builds a
    fresh module (``lambda: networks.digits_net(generator=g)``), whose weights are taken if another
    seed gives others; a
    :class:`PublicStart` restarts from public weights, and the certificate has their hash. Nothing
    of ``model`` is used but its code and its ``public`` tensors, as in :func:`expunge.unlearn`,
    where identifiers are told too; a trainable parameter that the initialisation leaves alone is
    refused by name, and so is a start that is the old model. The options of training are those of
    :func:`expunge.train`; ``seed`` draws the start, the order of the data and dropout. ``on_pass``,
    ``on_step`` and ``keeper`` are those of :func:`expunge.train`: a training that was stopped goes
    on where it stood.

    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> run = retrain(nn.Linear(2, 2), batches, epochs=3, learning_rate=0.5)
    >>> run.record.initialisation, run.record.finetune.steps
    ('reset_parameters of every module, seed 0', 3)
    """
    if recipe is not None and not isinstance(recipe, Retraining):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("recipe", recipe, "Retraining() or nothing")
    check_loss(options.get("loss_fn"))
    sets = read_sets(retain_loader, forget_ids, retain_ids)
    check_data(model, (retain_loader, options.get("augment"), options.get("prepare")))
    seed, given = options.get("seed", 0), (retain_loader, options)
    with torch.inference_mode(False), torch.enable_grad(), seeded_random(seed, given):
        before = hash_weights(list_tensors(model))
        certified = copy_model(model, public=public, buffers=buffers, device=device)
        if certified.public is not None:
            check_source(model, public, Processes())
        reset_statistics(certified)
        told = start_afresh(model, certified, initialise)
        fresh = hash_weights(list_tensors(certified.model))
        public_start = isinstance(initialise, PublicStart)
        held = hash_weights(certified.certified) if public_start else None
        if keeper is not None:
            check_told(retain_loader, sets.retained)
            keeper.bind(
                start=fresh,
                forgotten=None if not sets.forgotten else commit(sets.forgotten, _NO_SALT).root,
                people=None if sets.retained is None else commit(sets.retained, _NO_SALT).root,
                data=describe_data(cast(Iterable[Any], retain_loader)),
                options={k: v for k, v in options.items() if isinstance(v, str | float | int)},
            )
        watching: dict[str, Any] = {"on_pass": on_pass, "on_step": on_step, "keeper": keeper}
        log = train(certified.model, retain_loader, progress=progress, **watching, **options)
        check_unchanged(certified)
        public_names = () if certified.public is None else certified.public.names
        check_trained(certified.model, log, "retraining", public_names)
    record = RunRecord(
        recipe=Retraining(),
        grid=0.0,
        execution=Execution(),
        noise=NO_NOISE,
        noise_keys=0,
        trace=Trace(),
        gradient_evaluations=0,
        weights_before=before,
        weights_noisy=fresh,
        weights_after=hash_weights(list_tensors(certified.model)),
        finetune=describe_training(log, sets.retain, sets.checked),
        centre=held,
        start="centre" if public_start else "fresh",
        initialisation=f"{told}, seed {seed}",
        adapter=describe_adapter(certified.model, certified.public),
        resumed=0 if keeper is None else keeper.resumed,
        **sets.describe(),
        **certified.describe(),
    )
    return Run(certified.model, record, sets.forgotten)


def start_afresh(model: nn.Module, certified: CertifiedModel, initialise: Initialise | None) -> str:
    """Give every certified parameter a value that does not depend on the old one.

    All of them are NaN first: a parameter that the initialisation forgets, or only rescales, is
    still NaN afterwards, and is refused.
    """
    with torch.no_grad():
        wipe(certified.certified)
        match initialise:
            case None:
                told = "reset_parameters of every module"
                with seeded_random(_ANOTHER):
                    reset_modules(certified.model, _ADVICE)
                check_fresh(certified.certified, _ADVICE)
                other = {name: p.detach().clone() for name, p in certified.certified.items()}
                wipe(certified.certified)
                reset_modules(certified.model, _ADVICE)
                _check_drawn(certified.certified, other)
            case GaussianInitialisation(std=std):
                told = f"N(0, {std!r}² I)"
                for p in certified.certified.values():
                    p.normal_(0.0, std)
            case PublicStart(weights=weights, source=source):
                told = f"public weights of {source}"
                found = match_centre(certified, weights, "start")
                _put(model, certified, found, told)
            case DrawnStart(weights=weights):
                told = "a module that was built afresh"
                _put(model, certified, weights, "initialise()")
            case _:
                told = "a module that was built afresh"
                if not callable(initialise):
                    raise InputError.of(
                        "initialise",
                        initialise,
                        "None, GaussianInitialisation(std), PublicStart(weights) or a function "
                        "without arguments",
                    )
                found = take_weights(certified.certified, initialise, "initialise", _ADVICE)
                with seeded_random(_ANOTHER):
                    other = take_weights(certified.certified, initialise, "initialise", _ADVICE)
                _put(model, certified, found, "initialise()")
                _check_drawn(found, other)
        now = list_uncertified(certified.model)
        for name, tensor in certified.kept.items():
            now[name].copy_(tensor)
    check_fresh(certified.certified, _ADVICE)
    return told


def _check_drawn(drawn: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> None:
    """Refuse what two seeds have in common: weights of an earlier training could be in there."""
    if fixed := find_fixed(drawn, other):
        raise InputError(
            f"initialise: {', '.join(fixed[:3])} {'is' if len(fixed) == 1 else 'are'} the same, or "
            "alike, under another seed, so the old model could be in there; draw them from torch's "
            "global generator, or restart from public weights with PublicStart"
        )


def _put(
    model: nn.Module, certified: CertifiedModel, start: Mapping[str, Tensor], told: str
) -> None:
    """The start, unless it is the old model or a part of it."""
    old = {name: p.detach() for name, p in model.named_parameters() if name in start}
    if copied := find_copied(old, start):
        raise InputError(
            f"{told}: {copied} the old model, or a multiple of it within a thousandth; the start "
            "must be fresh or public, and never have seen the forget data (a parameter that was "
            "never trained is frozen: requires_grad=False)"
        )
    for name, p in certified.certified.items():
        p.copy_(start[name])
