"""``unlearn``: the paper. From a trained model to a certified one, by noise.

build() ──▶ module ─────────────┐
                                ├─▶ noisy steps ─▶ train(module, data without them, seed) ─▶ Release
old ──▶ vector ─▶ clip, noise ──┘

    x_0     = Π_{C0}(x̂) + N(0, σ0² I)
    x_{t+1} = Π_R(x_t - γ_t (clip(g_t) + λ (x_t - c))) + N(0, σ_t² I)

The module that runs is a new one from ``build()``, and its tensors are the centre c. Of the old
model nothing but the vector x̂ of its named trainable tensors is read, and that passes the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashes import combine_leaves, hash_tensors
from expunge.certificates.record import Code, Record, Weights
from expunge.certificates.record import Noise as NoiseUsed
from expunge.certificates.release import Release
from expunge.data.data import Data
from expunge.errors import InputError, UnlearningError
from expunge.networks.building import call_build
from expunge.networks.checkpoints import read_old, read_tensors
from expunge.networks.randomness import derive_seed, seeded
from expunge.networks.releases import hash_start, make_release
from expunge.networks.tensors import (
    collect_tensors,
    list_tensors,
    list_trainable,
    set_training_mode,
)
from expunge.noisy.choice import choose_recipe
from expunge.noisy.noise import GENERATOR, Noise, check_noise
from expunge.noisy.processes import find_processes
from expunge.noisy.steps import Steps, estimate_statistics
from expunge.noisy.vector import GridVector
from expunge.recipes import ComparedTo, NoisyRecipe
from expunge.training.batches import Batches, Loader
from expunge.training.calling import Train, check_train, describe_environment, run_training
from expunge.training.checkpoints import bind
from expunge.training.losses import Loss, check_loss
from expunge.training.requests import (
    Before,
    check_start,
    describe_code,
    describe_published,
    describe_training,
    identify,
    read_request,
)

Centre = Literal["build", "zero"]
Start = Literal["model", "centre"]


def unlearn(
    old: Any,
    build: Callable[[], nn.Module],
    data: Data,
    *,
    forget: Iterable[Any],
    recipe: NoisyRecipe | Callable[[int], NoisyRecipe] | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    method: str = "gradient-clipping",
    compared_to: ComparedTo = "retrained",
    train: Train | None = None,
    loss: Loss | None = None,
    batch_size: int = 128,
    loader: Loader | None = None,
    centre: Centre = "build",
    noise: Noise | None = None,
    start: Start = "model",
    seed: int = 0,
    parent: Before | None = None,
    releases: int = 1,
    strict: bool = True,
    key: str | None = None,
    unchanged: Collection[str] = (),
    published: str | Path | None = None,
    resume: str | Path | None = None,
    device: torch.device | str | None = None,
    progress: bool = False,
) -> Release:
    """Forget people with noise: (ε, δ), whatever the old model is and however it was trained.

    ``old`` is a module, a state_dict, or anybody's checkpoint on disk (``key`` chooses inside it).
    ``recipe`` says clips, noise and steps; without one it is planned around ``build()`` for
    (``epsilon``, ``delta``) by ``method``. ``loss(output, target)``, or ``loss(model, batch)``, or
    None where batches are mappings and the model returns its loss. Afterwards ``train(model,
    examples, seed)`` may train in any way, as post-processing; without it running statistics are
    estimated on retained data. ``loader(examples, seed)`` makes the batches of a pass instead of
    ``batch_size``. ``centre="zero"`` is the paper's; ``start="centre"`` is the control that never
    sees the old model. ``parent`` is the release before: then ``old`` must be what it released, or
    None. ``releases`` counts the noisy releases from one old model, this one included. Trainable
    names that ``old`` lacks are refused unless ``strict=False``. ``resume`` is a folder for
    checkpoints. Under ``torchrun`` every process calls it, and they do one run together.

    >>> from expunge import GradientClipping
    >>> recipe = GradientClipping(start_clip=1.0, grad_clip=1.0, learning_rate=0.1,
    ...                           weight_decay=1.0, steps=3, noise_std=5.0)
    >>> data = Data((torch.eye(4), torch.tensor([0, 1, 0, 1])), ids=["ann", "bob", "cy", "di"])
    >>> release = unlearn(nn.Linear(4, 2), lambda: nn.Linear(4, 2), data, forget=["ann"],
    ...                   recipe=recipe, loss=nn.functional.cross_entropy)
    >>> len(release.record.trace), release.certificate.noise.source
    (3, 'system')
    >>> round(release.certificate.epsilon, 3)
    0.946
    """
    check_choice("centre", centre, get_args(Centre))
    check_choice("start", start, get_args(Start))
    check_loss(loss)
    source, processes = check_noise(noise), find_processes()
    if train is not None:
        check_train(train)
    with torch.inference_mode(False), torch.enable_grad(), seeded(seed):
        with processes.together():  # every slip is found here, before anything is trained
            request = read_request(data, forget, parent)
            module = call_build(build, seed, device=device)
            set_training_mode(module)
            leaves, parameters = hash_start(module), check_parameters(list_trainable(module))
            begun = combine_leaves(leaves.values())
            x, before = {}, None
            if start == "model":
                given = parent if old is None else old
                x = read_old(given, module, key=key, strict=strict)
                before = hash_old(given, x, request.parent)
                check_start(module, x, unchanged)
            fresh = {name: p.detach().clone() for name, p in parameters.items()}
            recipe, execution, grid = choose_recipe(
                recipe, fresh, epsilon=epsilon, delta=delta, method=method,
                compared_to=compared_to, releases=releases,
            )  # fmt: skip
            batches = Batches(
                request.retained.examples, batch_size=batch_size, seed=derive_seed("noisy", seed),
                collate=request.retained.collate, loader=loader,
            )  # fmt: skip
            record = Record(
                recipe=recipe, execution=execution, grid=grid, seed=seed, start=start,
                origin=centre, parameters=sum(p.numel() for p in fresh.values()), code=Code(),
                weights=Weights(
                    after=begun, start=begun, noisy=begun, old=before,
                    published=describe_published(module, published),
                ),
                training=None if train is None else describe_training(train, request.retained),
                missing=tuple(n for n in parameters if x and n not in x),
                unchanged=tuple(dict.fromkeys(unchanged)), **request.describe(),
            )  # fmt: skip
            code = describe_code(record.salt, build=build, data=data, train=train, loss=loss)
            identity = {} if resume is None and processes.alone else identify(
                request, build=build, train=train, loss=loss, loader=loader, recipe=recipe,
                centre=centre, start=start, noise=source, seed=seed, batch_size=batch_size,
                **{"public start": begun, "old model": before},
            )  # fmt: skip
            if resume is not None and processes.leads:
                bind(resume, identity)
        processes.check_same(identity)

        c = fresh if centre == "build" else {n: torch.zeros_like(t) for n, t in fresh.items()}
        vector = GridVector(
            list(parameters.values()), list(c.values()) if centre == "build" else None, grid
        )
        folder = None if resume is None else Path(resume)
        steps = Steps(module, vector, recipe, batches, loss, source, processes, folder)
        if not steps.load():
            steps.start([x.get(name, c[name]) for name in parameters])  # here the old model enters
        del x, fresh, c
        steps.run(progress=progress)  # here noise is added
        noisy, buffers = hash_tensors(list_tensors(module)), ()
        if train is None:
            buffers = estimate_statistics(module, batches, loss, vector.device)
        del vector
        record = record.model_copy(
            update={
                "code": code,
                "weights": record.weights.model_copy(update={"noisy": noisy}),
                "noise": NoiseUsed(source=source.source, generator=GENERATOR, keys=steps.keys),
                "trace": steps.trace(), "resumed": steps.resumed, "buffers": buffers,
                "environment": describe_environment(module),
            }
        )  # fmt: skip
        del steps
        if train is not None:
            offers = {"resume": resume, "device": device}
            module = run_training(train, module, request.retained, seed, **offers)
        tensors = processes.share_tensors(collect_tensors(module))
    return make_release(
        module, processes.share(record), start=leaves, tensors=tensors, delta=delta,
        compared_to=compared_to, releases=releases, parent=request.parent,
    )  # fmt: skip


def check_choice(field: str, value: object, valid: Collection[str]) -> None:
    """Refuse a word that is none of those there are."""
    if value not in valid:
        raise InputError.of(field, value, " or ".join(map(repr, valid)))


def check_parameters(parameters: Mapping[str, nn.Parameter]) -> Mapping[str, nn.Parameter]:
    """Refuse what has no float64 vector; rows lie in memory one after the other from now on."""
    for name, p in parameters.items():
        if not p.is_floating_point():
            raise InputError.of(f"the dtype of {name}", p.dtype, "of real numbers to be noised")
        p.data = p.data.contiguous()
    devices = sorted({str(p.device) for p in parameters.values()})
    if len(devices) > 1 or devices[0].startswith(("mps", "meta")):
        raise InputError.of(
            "device", ", ".join(devices), "one device that has float64, such as 'cpu' or 'cuda'"
        )
    return parameters


def hash_old(old: Any, x: Mapping[str, Tensor], parent: Certificate | None) -> str:
    """What the record calls the old model: its trainable tensors, or the whole release before.

    A second noisy run from the same old model would not be covered by one certificate: it starts
    from the release before.
    """
    if parent is None:
        return hash_tensors(x)
    found = hash_tensors(read_tensors(old))
    if found != parent.weights.after:
        raise UnlearningError(
            "old is not what the parent released; a later noisy run starts from the release before "
            "(leave old out), or names no parent and counts all releases of old by releases="
        )
    return found
