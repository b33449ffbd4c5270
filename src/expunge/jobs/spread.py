"""Features and partial sums of new examples on Ray: whole numbers do not care who adds them.

    S(D) = S(D_1) + … + S(D_k)        pieces by tasks, and their sums by tasks, in pairs

The integers come back, and one process writes the store. A worker that dies is replaced by Ray and
its piece is computed again: what comes of a piece is a function of the piece alone, so nothing
counts twice. Workers run torch on as many threads as this process does, since a network may give
other last digits on others; so integers and digest are those of one process on such a machine.
"""

from __future__ import annotations

import pickle
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from expunge.errors import ExpungeError, InputError, RunError, describe_error
from expunge.forgettable.features import Features
from expunge.forgettable.memory import Targets
from expunge.forgettable.sums import Sums, add_rows
from expunge.jobs.many import Item, Pool, connected
from expunge.progress import Bar

ROWS = 8_192
Whole = npt.NDArray[Any]


def compute_on_ray(
    features: Features,
    targets: Targets,
    pieces: Iterable[tuple[Any, Any]],
    *,
    only_single: bool,
    pool: Pool,
    rows: int = ROWS,
    count: int = 0,
) -> tuple[Whole, Whole, Sums]:
    """The integers and targets to store of ``pieces`` (inputs, targets), in order, and their sums.

    A task computes ``rows`` of them. ``only_single`` is as in :meth:`Features.compute`; a worker
    whose own self-test fails evaluates single examples in any case. With their ``count`` there is a
    bar, where the features want one.
    """
    import torch

    encoded, integers, sums = list[Whole](), dict[int, Whole](), deque[Any]()
    running: dict[Any, tuple[int, Any]] = {}
    cut = (piece for inputs, given in pieces for piece in _cut(inputs, given, rows))
    with connected(pool, [Item("features", None)]) as ray, _draw(features, count) as bar:
        places = [place or str(Path.cwd()) for place in sys.path]
        settings = features, targets, only_single, torch.get_num_threads()
        shared = ray.put(ray.cloudpickle.dumps(settings))
        compute = ray.remote(max_retries=pool.retries, num_returns=2)(compute_piece)
        add = ray.remote(max_retries=pool.retries)(add_pair)
        most = pool.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

        def collect() -> None:
            for reference in ray.wait(list(running))[0]:
                place, part = running.pop(reference)
                integers[place] = np.array(_get(ray, reference, pool))
                bar.update(sum(map(len, integers.values())))
                sums.append(part)
            while len(sums) > 1:
                sums.append(add.remote(sums.popleft(), sums.popleft()))

        for inputs, given in cut:
            encoded.append(targets.encode(given))
            reference, part = compute.remote(places, shared, inputs, encoded[-1])
            running[reference] = len(encoded) - 1, part
            if len(running) >= most:
                collect()
        while running:
            collect()
        if not sums:
            raise InputError("data is empty; there is nothing to compute")
        total = Sums.from_bytes(_get(ray, sums.pop(), pool))
    stored = np.concatenate([integers[place] for place in range(len(encoded))])
    return stored, np.concatenate(encoded), total


def _draw(features: Features, count: int) -> Bar:
    return Bar(count, "features on Ray", wanted=features.progress and count > 0)


def _cut(inputs: Any, targets: Any, rows: int) -> Iterator[tuple[Any, Any]]:
    for start in range(0, len(inputs), rows):
        yield inputs[start : start + rows], targets[start : start + rows]


def compute_piece(
    places: list[str], packed: bytes, inputs: Any, encoded: Whole
) -> tuple[Whole, bytes]:
    """What a worker runs: the integers of a piece, and the bytes of their sums."""
    import torch

    sys.path.extend(place for place in places if place not in sys.path)
    features, targets, only_single, threads = pickle.loads(packed)
    torch.set_num_threads(threads)
    stored = features.compute(inputs, only_single=only_single)
    phi, t = features.integers.expand(stored), targets.expand(encoded)
    return stored, add_rows(phi, t, features.integers.largest).to_bytes()


def add_pair(first: bytes, second: bytes) -> bytes:
    """Two sums as one.

    >>> one = Sums.empty(2, 1).to_bytes()
    >>> add_pair(one, one) == one
    True
    """
    return (Sums.from_bytes(first) + Sums.from_bytes(second)).to_bytes()


def _get(ray: Any, reference: Any, pool: Pool) -> Any:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause
        if isinstance(cause, ExpungeError):
            raise cause from None
        raise RunError(f"a worker could not compute features: {describe_error(cause)}") from None
    except ray.exceptions.RayError as error:
        raise RunError(
            f"features could not be computed, the worker died {pool.retries + 1} times "
            f"({type(error).__name__}); nothing was learned"
        ) from None
