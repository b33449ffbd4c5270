"""The global random state of torch, NumPy and Python: kept, put back, seeded and written down.

The engine never draws from it for noise. Dropout and shuffling loaders do, and what an earlier
training left there is a function of its data: so a run seeds it, and puts it back when it ends.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from expunge.errors import UnlearningError
from expunge.training.holding import find_held

RandomSource = torch.Generator | np.random.BitGenerator | np.random.RandomState | random.Random


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
        state["numpy.rest"] = torch.tensor(
            [position, has_gauss, gauss], dtype=torch.float64, device="cpu"
        )
    version, words, gauss_next = random.getstate()
    state["python.words"] = torch.tensor([version, *words], dtype=torch.int64, device="cpu")
    if gauss_next is not None:
        state["python.gauss"] = torch.tensor(gauss_next, dtype=torch.float64, device="cpu")
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


def choose_generators(held: Iterable[object]) -> list[RandomSource]:
    """The generators of torch, NumPy and Python among the objects that somebody holds.

    >>> len(choose_generators(find_held(DataLoader([1], generator=torch.Generator()))))
    1
    """
    found = (item for item in held if isinstance(item, RandomSource))
    return [item for item in found if not isinstance(item, random.SystemRandom)]


def _dismiss_workers(held: Iterable[object]) -> None:
    """Workers that live on have the data and the seeds of an earlier run."""
    for item in held:
        if isinstance(item, DataLoader) and cast(Any, item).persistent_workers:
            vars(cast(Any, item))["_iterator"] = None


def _swap_state(source: RandomSource, state: Any) -> Any:
    """Give a generator a state of its own kind, or that of a seed; returns the one it had."""
    match source:
        case torch.Generator():
            old = source.get_state()
            source.manual_seed(state) if isinstance(state, int) else source.set_state(state)
        case np.random.RandomState():
            old = source.get_state(legacy=False)
            kind = cast(type[Any], getattr(np.random, cast(Any, old)["bit_generator"]))
            fresh = isinstance(state, int)
            source.set_state(
                np.random.RandomState(kind(state)).get_state(legacy=False) if fresh else state
            )
        case np.random.BitGenerator():
            old = source.state
            source.state = type(source)(state).state if isinstance(state, int) else state
        case _:
            old = source.getstate()
            source.seed(state) if isinstance(state, int) else source.setstate(state)
    return old


@contextmanager
def seeded_random(seed: int, loader: object = None) -> Generator[None]:
    """Inside, the global state and the loader's own generators follow from ``seed`` alone, each
    by a stream of its own, and its workers are new ones.

    >>> with seeded_random(3):
    ...     first = torch.rand(1), np.random.rand(), random.random()
    >>> with seeded_random(3):
    ...     print(first == (torch.rand(1), np.random.rand(), random.random()))
    True
    """
    with untouched_random():
        seed_random(seed)
        held = list(find_held(loader))
        _dismiss_workers(held)
        states = [
            (source, _swap_state(source, derive_seed(f"generator {number} of {seed}")))
            for number, source in enumerate(choose_generators(held))
        ]
        try:
            yield
        finally:
            _dismiss_workers(held)
            for source, state in reversed(states):
                _swap_state(source, state)


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
