"""Ridge regression on exact sums: a head that forgets bit for bit (THEORY, section 10).

    W = (G + n λ U² I)⁻¹ B U        scores = (φ/U) W

from the integers every time, never updated: W is a fixed function of S, and S(D) - S(F) is
S(D \\ F), so after a request the head is that of a life that never saw it. (0, 0), no randomness.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from expunge.certificates.record import Run, Statistics
from expunge.errors import InputError, UnlearningError
from expunge.forgettable.features import Features, check_features
from expunge.forgettable.memory import Memory, Targets
from expunge.forgettable.released import HeadModel, Weights, check_inputs, hash_head, write_record
from expunge.forgettable.ridge import solve_ridge
from expunge.forgettable.sums import Sums
from expunge.recipes import ExactStatistics

Whole = npt.NDArray[Any]


class Compute(Protocol):
    """From pieces (inputs, targets) to the integers and targets to store, and maybe their sums."""

    def __call__(
        self,
        features: Features,
        targets: Targets,
        pieces: Iterable[tuple[Any, Any]],
        *,
        only_single: bool,
    ) -> tuple[Whole, Whole, Sums | None]: ...


class StatisticsHead:
    """A linear head on public integer features, learned and forgotten as sums of whole numbers.

    ``regularisation`` λ is a number, or a sequence of candidates among which generalised
    cross-validation chooses, from the sums alone. ``classes`` for labels; ``outputs`` and a public
    ``target_scale`` for regression. ``state`` is a folder that holds everything from the first row
    on, through crashes; it is private.

    Formal guarantee: after ``forget(ids)`` digest, weights and the bytes of rows and sums are those
    of a head that was never given these identifiers' rows. A folder gains two files by a request,
    and no weight is computed from them: ``forgotten`` (keyed hashes of the names, to answer
    "already forgotten" and to notice rows from a backup) and ``released`` (the hash of the weights
    of the last release).

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(60, 5)), np.arange(60) % 3
    >>> ids = [f"user-{i}" for i in range(60)]
    >>> head, never = StatisticsHead(Features(), classes=3), StatisticsHead(Features(), classes=3)
    >>> head.learn((x, y), ids=ids)
    60
    >>> never.learn((x[2:], y[2:]), ids=ids[2:])
    58
    >>> run = head.forget(["user-0", "user-1"])
    >>> head.digest() == never.digest(), run.model(x[:2]).shape
    (True, torch.Size([2, 3]))
    """

    def __init__(
        self,
        features: Features,
        *,
        classes: int | None = None,
        outputs: int = 0,
        target_scale: float = 1.0,
        regularisation: float | Sequence[float] = 1e-4,
        state: str | Path | None = None,
        key: bytes | None = None,
    ) -> None:
        self.features = check_features(features)
        self.candidates = _check_candidates(regularisation)
        settings = {"head": "exact-statistics", "regularisation": list(self.candidates)}
        targets = Targets(classes, outputs, target_scale)
        folder = None if state is None else Path(state).absolute()
        self._memory = Memory(features.describe, features.integers, targets, settings, folder, key)
        self._released: bytes | None = None

    def __len__(self) -> int:
        """How many examples are held."""
        return self._memory.sums.rows

    def learn(self, data: Any, ids: Iterable[object], compute: Compute | None = None) -> int:
        """Add examples, all or nothing; returns how many were new.

        A row with an identifier and content that are already held is the same row: repeating a
        call that was cut short counts nothing twice. ``compute`` finds the integers elsewhere.
        """
        return learn_rows(self._memory, self.features, data, ids, compute)

    def forget(self, ids: Iterable[object]) -> Run:
        """Remove every row of these identifiers and release the head of those that remain."""
        with self._memory.writing():
            request = self._memory.plan(ids)
            solved = self.solve(request.sums)
            before = self._memory.read_file("released") or self._released
            self._released = hash_head(solved[0]).encode()
            samples = self._memory.forget(request, {"released": self._released})
            return self._make_run(*solved, before, request.names, samples)

    def release(self) -> Run:
        """The head of everything that is held now."""
        with self._memory.writing():
            self._memory.check_returned()
            solved = self.solve(self._memory.sums)
            before = self._memory.read_file("released") or self._released
            self._released = hash_head(solved[0]).encode()
            self._memory.write_files({"released": self._released})
            return self._make_run(*solved, before, (), 0)

    def digest(self) -> str:
        """SHA-256 of the sums: the same on every machine."""
        return self._memory.sums.digest()

    def save(self, path: str | Path) -> None:
        """Write the state to a new folder; it is private."""
        self._memory.save(Path(path), {})

    def add_up(self) -> Sums:
        """The sums of the stored integers, added up again."""
        return self._memory.add_all()

    def solve(self, sums: Sums) -> tuple[Weights, float]:
        """W and λ: a fixed function of the sums."""
        if sums.rows == 0:
            raise UnlearningError("no example is left; there is nothing to release")
        return solve_ridge(sums, self.candidates, self._memory.unit)

    def _make_run(
        self,
        weights: Weights,
        regularisation: float,
        before: bytes | None,
        forgotten: tuple[str, ...],
        samples: int,
    ) -> Run:
        memory, head = self._memory, {"loss": "squared", "regularisation": regularisation}
        record = write_record(
            weights,
            recipe=ExactStatistics(),
            statistics=describe_statistics(memory, self.digest(), head),
            before=None if before is None else before.decode(),
            forgotten=forgotten,
            samples=samples,
        )
        model = HeadModel(self.features, weights, memory.unit, memory.targets.scale)
        return Run(model.eval(), record, frozenset(forgotten))


def learn_rows(
    memory: Memory,
    features: Features,
    data: Any,
    ids: Iterable[object],
    compute: Compute | None = None,
) -> int:
    """Integers of new examples into a memory; nothing is written where anything is refused."""
    pieces, names = check_inputs(data, ids)
    if len(names) == 0:
        return 0
    first = next(pieces)
    if memory.store is None:
        memory.evaluation = features.choose_evaluation(first[0])
    single = memory.evaluation == "by construction"
    found = (compute or compute_rows)(
        features, memory.targets, itertools.chain([first], pieces), only_single=single
    )
    return memory.learn(found[0], found[1], names, found[2])


def compute_rows(
    features: Features,
    targets: Targets,
    pieces: Iterable[tuple[Any, Any]],
    *,
    only_single: bool,
) -> tuple[Whole, Whole, None]:
    """The integers and targets to store, here and one piece after the other."""
    integers, encoded = list[Whole](), list[Whole]()
    for inputs, given in pieces:
        encoded.append(targets.encode(given))
        integers.append(features.compute(inputs, only_single=only_single))
    return np.concatenate(integers), np.concatenate(encoded), None


def describe_statistics(memory: Memory, digest: str, head: dict[str, Any]) -> Statistics:
    """What the record and the certificate say of where the weights come from."""
    features = dict(memory.describe()) | {"evaluation": memory.evaluation}
    targets = memory.targets
    shape = {"outputs": targets.width, "classification": targets.classes is not None}
    scale = {} if targets.classes is not None else {"target_scale": targets.scale}
    return Statistics(features, head | shape | scale, memory.sums.rows, digest)


def _check_candidates(regularisation: float | Sequence[float]) -> tuple[float, ...]:
    given = regularisation if isinstance(regularisation, Sequence) else (regularisation,)
    for value in given:
        if isinstance(value, bool) or not 0 < value < math.inf:
            raise InputError.of("regularisation", value, "a finite number > 0, or several")
    if not given:
        raise InputError.of("regularisation", given, "a finite number > 0, or several")
    return tuple(float(value) for value in given)
