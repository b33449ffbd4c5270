"""``retrain``: the model as it would be had it never seen them, because it has not.

build() ──▶ module ──▶ train(module, data without them, seed) ──▶ Release, (0, 0)
"""

from __future__ import annotations

import dataclasses
import secrets
import warnings
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashes import combine_leaves
from expunge.certificates.record import Record, Weights
from expunge.certificates.release import Release
from expunge.data.data import Data
from expunge.networks.building import call_build
from expunge.networks.checkpoints import read_old
from expunge.networks.releases import hash_start, make_release
from expunge.networks.tensors import collect_tensors, list_trainable
from expunge.recipes import Retraining
from expunge.training.calling import Train, check_train, describe_environment, run_training
from expunge.training.checkpoints import bind
from expunge.training.requests import (
    Before,
    check_start,
    describe_code,
    describe_published,
    describe_training,
    identify,
    read_request,
)


def retrain(
    build: Callable[[], nn.Module],
    data: Data,
    *,
    forget: Iterable[Any],
    train: Train,
    seed: int = 0,
    parent: Before | None = None,
    old: Any = None,
    key: str | None = None,
    unchanged: Collection[str] = (),
    published: str | Path | None = None,
    resume: str | Path | None = None,
    device: torch.device | str | None = None,
) -> Release:
    """Forget people exactly: a fresh module, trained your way on everybody else's data.

    ``train(model, examples, seed)`` trains in place, any way you like; it is given ``validation=``
    and ``collate=`` (of the data, without those people), ``resume=`` and ``device=`` where it names
    them. ``parent`` is the release before, or its folder. ``old`` (a module, state_dict or
    checkpoint, ``key`` chooses inside it) is compared with what ``build()`` gives, and nothing
    else: ``unchanged`` names what the old training never touched, ``published`` the file that
    frozen weights come from. ``resume`` is a folder for checkpoints. Under ``torchrun`` every
    process calls it, and all return the release; rank 0 writes.

    >>> data = Data((torch.eye(4), torch.tensor([0, 1, 0, 1])), ids=["ann", "bob", "cy", "di"])
    >>> def train(model, examples, seed):
    ...     inputs, targets = examples
    ...     optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ...     for _ in range(3):
    ...         optimizer.zero_grad()
    ...         nn.functional.cross_entropy(model(inputs), targets).backward()
    ...         optimizer.step()
    >>> release = retrain(lambda: nn.Linear(4, 2), data, forget=["ann"], train=train)
    >>> release.certificate.epsilon, release.certificate.forget.samples
    (0.0, 1)
    """
    check_train(train)
    request = read_request(data, forget, parent)
    module = call_build(build, seed, device=device)
    start = hash_start(module)
    if old is not None:
        check_start(module, read_old(old, module, key=key, strict=False), unchanged)
    root, salt = combine_leaves(start.values()), secrets.token_hex(32)
    named = describe_published(module, published)
    resumed = resume is not None and bind(
        resume, identify(request, build=build, train=train, seed=seed)
    )
    record = Record(
        recipe=Retraining(),
        parameters=sum(p.numel() for p in list_trainable(module).values()),
        seed=seed,
        start="build",
        code=describe_code(salt, build=build, data=data, train=train),
        salt=salt,
        weights=Weights(after=root, start=root, published=named),
        training=describe_training(train, request.retained),
        unchanged=tuple(dict.fromkeys(unchanged)),
        environment=describe_environment(module),
        resumed=int(resumed),
        **request.describe(),
    )
    trained = run_training(train, module, request.retained, seed, resume=resume, device=device)
    tensors = collect_tensors(trained)
    release = make_release(trained, record, start=start, tensors=tensors, parent=request.parent)
    if release.record.weights.after == root:
        warnings.warn(
            "train left every weight as build() gave it; it must train the model that it is given, "
            "or return the module that has the weights",
            stacklevel=2,
        )
    return _share(release)


def _share(release: Release) -> Release:
    """Of several processes all return what rank 0 certified: its salts, its whole tensors."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return release
    shared: list[Any] = [release.certificate.to_bytes(), release.record.to_bytes()]
    torch.distributed.broadcast_object_list(shared)
    certificate, record = Certificate.from_bytes(shared[0]), Record.from_bytes(shared[1])
    return dataclasses.replace(release, certificate=certificate, record=record)
