"""The global random state of torch, NumPy and Python: kept, put back, seeded and written down.

The engine never draws from it for noise. Dropout and shuffling loaders do, and what an earlier
training left there is a function of its data: so a run seeds it, and puts it back when it ends.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from expunge.errors import UnlearningError


def capture_random(generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """The global state, and that of a loader's own ``generator``, as tensors.

    >>> kept = capture_random()
    >>> first = torch.rand(2)
    >>> restore_random(kept)
    >>> torch.equal(first, torch.rand(2))
    True
    """
    state = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for i, cuda in enumerate(torch.cuda.get_rng_state_all()):
            state[f"cuda.{i}"] = cuda
    name, keys, position, has_gauss, gauss = cast(
        tuple[str, Any, int, int, float], np.random.get_state(legacy=True)
    )
    if name == "MT19937":
        state["numpy.keys"] = torch.from_numpy(np.asarray(keys, np.int64).copy())
        state["numpy.rest"] = torch.tensor([position, has_gauss, gauss], dtype=torch.float64)
    version, words, gauss_next = random.getstate()
    state["python.words"] = torch.tensor([version, *words], dtype=torch.int64)
    if gauss_next is not None:
        state["python.gauss"] = torch.tensor(gauss_next, dtype=torch.float64)
    if generator is not None:
        state["generator"] = generator.get_state()
    return state


def restore_random(state: Mapping[str, Tensor], generator: torch.Generator | None = None) -> None:
    """Put back what ``capture_random`` took."""
    torch.set_rng_state(state["torch"])
    cuda = [tensor for name, tensor in state.items() if name.startswith("cuda.")]
    if cuda and torch.cuda.is_available() and torch.cuda.device_count() >= len(cuda):
        torch.cuda.set_rng_state_all(cuda)
    if "numpy.keys" in state:
        position, has_gauss, gauss = state["numpy.rest"].tolist()
        keys = state["numpy.keys"].numpy().astype(np.uint32)
        np.random.set_state(("MT19937", keys, int(position), int(has_gauss), gauss))
    version, *words = state["python.words"].tolist()
    gauss_next = float(state["python.gauss"]) if "python.gauss" in state else None
    random.setstate((version, tuple(words), gauss_next))
    if generator is not None and "generator" in state:
        generator.set_state(state["generator"])


def derive_seed(purpose: str) -> int:
    """56 bits that tell one purpose from another.

    >>> derive_seed("order 0") == derive_seed("dropout 0")
    False
    """
    digest = hashlib.sha256(b"expunge/seed\0" + purpose.encode())
    return int.from_bytes(digest.digest()[:7], "big")


@contextmanager
def draw_apart(text: str) -> Generator[None]:
    """Inside, torch draws numbers that follow from ``text`` alone; outside, as if none were drawn.

    >>> with draw_apart("a"):
    ...     first = torch.rand(1)
    >>> with draw_apart("a"):
    ...     print(torch.equal(first, torch.rand(1)))
    True
    """
    state = torch.get_rng_state()
    torch.manual_seed(derive_seed(text))
    try:
        yield
    finally:
        torch.set_rng_state(state)


@contextmanager
def untouched_random() -> Generator[None]:
    """Whatever happens inside, the global random state afterwards is the one before.

    >>> before = torch.get_rng_state()
    >>> with untouched_random():
    ...     _ = torch.rand(3), np.random.rand(), random.random()
    >>> torch.equal(before, torch.get_rng_state())
    True
    """
    state = capture_random()
    try:
        yield
    finally:
        restore_random(state)


def find_generators(loader: object) -> list[torch.Generator]:
    """The generators that a loader, its samplers and its data set draw from.

    >>> len(find_generators(torch.utils.data.DataLoader([1], generator=torch.Generator())))
    1
    """
    names = ("sampler", "batch_sampler", "loader", "dataset")
    near = [loader, *(getattr(loader, name, None) for name in names)]
    holders = near + [getattr(holder, name, None) for holder in near for name in names]
    found = [cast(object, getattr(holder, "generator", None)) for holder in holders]
    return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


@contextmanager
def seeded_random(seed: int, loader: object = None) -> Generator[None]:
    """Inside, the global state and the loader's own generators follow from ``seed`` alone, each
    by a stream of its own.

    >>> with seeded_random(3):
    ...     first = torch.rand(1), np.random.rand(), random.random()
    >>> with seeded_random(3):
    ...     print(first == (torch.rand(1), np.random.rand(), random.random()))
    True
    """
    held = [(generator, generator.get_state()) for generator in find_generators(loader)]
    with untouched_random():
        seed_random(seed)
        for number, (generator, _) in enumerate(held):
            generator.manual_seed(derive_seed(f"generator {number} of {seed}"))
        try:
            yield
        finally:
            for generator, state in held:
                generator.set_state(state)


def seed_random(seed: int) -> None:
    """Seed torch, NumPy and Python."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def refused_random(doing: str) -> Generator[None]:
    """Refuse whatever draws from the global state inside.

    >>> with refused_random("a gradient"):
    ...     _ = torch.rand(2)
    Traceback (most recent call last):
    ...
    expunge.errors.UnlearningError: a gradient draws random numbers; ...
    """
    before = _take_state()
    yield
    if _take_state() != before:
        raise UnlearningError(DRAWS.format(doing))


DRAWS = (
    "{} draws random numbers; they would tie examples to their places in a batch, or to an earlier "
    "training: call eval() on what draws them (dropout), and augment nothing"
)


def _take_state() -> tuple[object, ...]:
    _, keys, *rest = cast(tuple[Any, ...], np.random.get_state(legacy=True))
    return torch.get_rng_state().numpy().tobytes(), keys.tobytes(), rest, random.getstate()
