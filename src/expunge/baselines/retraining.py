"""Retraining: a fresh network of the same kind, trained on retained data only.

It starts from weights that saw no data, so it is (0, 0) whatever else it does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from expunge.certificates.record import NO_NOISE, Run, RunRecord, Trace
from expunge.errors import InputError, UnlearningError
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
from expunge.processes.group import Processes
from expunge.processes.weights import hash_weights, is_multiple, list_tensors
from expunge.recipes import Execution, Retraining
from expunge.training.losses import check_loss
from expunge.training.randomness import seeded_random
from expunge.training.settings import InMemory, Options, spell_out
from expunge.training.train import check_trained, describe_training, read_sets, train


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


Initialise = GaussianInitialisation | Callable[[], nn.Module]


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
    progress: bool = False,
    **options: Unpack[Options],
) -> Run:
    """Train a fresh network of ``model``'s kind on the retained data: the (0, 0) baseline.

    ``initialise`` is where it starts: None calls ``reset_parameters()`` of every module that has
    trainable parameters; a :class:`GaussianInitialisation` draws them all; a callable builds a
    fresh module (``lambda: networks.digits_net(generator=g)``), whose weights are taken. Nothing of
    ``model`` is used but its code and its ``public`` tensors, as in :func:`expunge.unlearn`; a
    trainable parameter that the initialisation leaves alone is refused by name. The options of
    training are those of :func:`expunge.train`; ``seed`` draws the start, the order of the data
    and dropout.

    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> run = retrain(nn.Linear(2, 2), batches, epochs=3, learning_rate=0.5)
    >>> run.record.initialisation, run.record.finetune.steps
    ('reset_parameters of every module, seed 0', 3)
    """
    if recipe is not None and not isinstance(recipe, Retraining):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("recipe", recipe, "Retraining() or nothing")
    check_loss(options.get("loss_fn"))
    sets, seed = read_sets(retain_loader, forget_ids, retain_ids), options.get("seed", 0)
    with torch.inference_mode(False), torch.enable_grad(), seeded_random(seed, retain_loader):
        before = hash_weights(list_tensors(model))
        certified = copy_model(model, public=public, buffers=buffers, device=device)
        if certified.public is not None:
            check_source(model, public, Processes())
        reset_statistics(certified)
        told = _start_afresh(model, certified, initialise)
        fresh = hash_weights(list_tensors(certified.model))
        log = train(certified.model, retain_loader, progress=progress, **options)
        check_unchanged(certified)
        check_trained(certified.model, log, "retraining")
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
        start="fresh",
        initialisation=f"{told}, seed {seed}",
        **sets.describe(),
        **certified.describe(),
    )
    return Run(certified.model, record, sets.forgotten)


def _start_afresh(
    model: nn.Module, certified: CertifiedModel, initialise: Initialise | None
) -> str:
    """Give every certified parameter a value that does not depend on the old one.

    All of them are NaN first: a parameter that the initialisation forgets, or only rescales, is
    still NaN afterwards, and is refused.
    """
    with torch.no_grad():
        for p in certified.certified.values():
            p.fill_(math.nan)
        match initialise:
            case None:
                told = "reset_parameters of every module"
                _reset_modules(certified.model)
            case GaussianInitialisation(std=std):
                told = f"N(0, {std!r}² I)"
                for p in certified.certified.values():
                    p.normal_(0.0, std)
            case _:
                told = "a module that was built afresh"
                _take_weights(model, certified, initialise)
        now = list_uncertified(certified.model)
        for name, tensor in certified.kept.items():
            now[name].copy_(tensor)
    for name, p in certified.certified.items():
        if not bool(torch.isfinite(p).all()):
            raise UnlearningError(
                f"parameter {name} was not initialised afresh, so it would carry the old model; "
                "give initialise=GaussianInitialisation(std) or a function that builds the network"
            )
    return told


def _reset_modules(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if not any(p.requires_grad for p in module.parameters(recurse=False)):
            continue
        reset = cast(
            object,
            getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None)),
        )
        if not callable(reset):
            raise UnlearningError(
                f"module {path or 'itself'} ({type(module).__name__}) has trainable parameters but "
                "no reset_parameters(); give initialise=GaussianInitialisation(std) or a function "
                "that builds the network"
            )
        reset()


def _take_weights(model: nn.Module, certified: CertifiedModel, build: Callable[[], object]) -> None:
    """The trainable parameters of the module that ``build()`` returns, by name."""
    if not callable(build):
        raise InputError.of(
            "initialise", build, "None, GaussianInitialisation(std) or a function without arguments"
        )
    built = build()
    if not isinstance(built, nn.Module):
        raise InputError.of("initialise()", type(built).__name__, "a torch module")
    theirs, found = dict(built.named_parameters()), dict[str, Tensor]()
    for name, p in certified.certified.items():
        shape = tuple(theirs[name].shape) if name in theirs else None
        if shape != tuple(p.shape):
            raise InputError.of(f"shape of {name} in initialise()", shape, f"{tuple(p.shape)}")
        found[name] = theirs[name].detach().to(p.device)
    old = dict(model.named_parameters())
    if is_multiple([old[name].detach().to(p.device) for name, p in found.items()], found.values()):
        raise InputError(
            "initialise() returns the old model, or a multiple of it within a thousandth; it must "
            "build a fresh one, or be a GaussianInitialisation(std)"
        )
    for name, p in certified.certified.items():
        p.copy_(found[name])
