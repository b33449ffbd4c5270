"""The global random state of torch, NumPy and Python: seeded inside, restored afterwards.

Noise never comes from here. Dropout, shuffling and initialisation do, so a run seeds it, and what
an earlier training left there is not used.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

from expunge.errors import InputError


def derive_seed(*parts: object) -> int:
    """A seed for one purpose, from whatever decides it: 63 bits of SHA-256.

    >>> derive_seed("pass", 1, 0) == derive_seed("pass", 1, 0) != derive_seed("pass", 1, 1)
    True
    """
    text = "expunge " + " ".join(map(str, parts))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


@contextmanager
def seeded(seed: int) -> Generator[None]:
    """Inside, all three generators follow from ``seed``; afterwards they are as they were.

    >>> with seeded(3):
    ...     first = torch.rand(1).item(), np.random.rand(), random.random()
    >>> with seeded(3):
    ...     print(first == (torch.rand(1).item(), np.random.rand(), random.random()))
    True
    """
    if not isinstance(seed, int) or isinstance(seed, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of("seed", seed, "a whole number")
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    numpy, python = np.random.get_state(), random.getstate()
    with torch.random.fork_rng(devices):
        seed_all(seed)
        try:
            yield
        finally:
            np.random.set_state(numpy)
            random.setstate(python)


def seed_all(seed: int) -> None:
    """Seed torch, NumPy and Python, in microseconds: it is done before every noisy step.

    ``torch.manual_seed`` keeps a stack trace for a CUDA that nobody has started.
    """
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
