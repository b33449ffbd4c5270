"""A strongly convex head, certified by its residual (THEORY, section 11).

    F(W) = (1/n) Σ ℓ(φ_i W/U, t_i) + (m/2)‖W‖²  is m-strongly convex:  ‖W - W*‖ ≤ ‖∇F(W)‖/m.

``forget(ids)`` solves from zero: a deterministic function of the retained rows, (0, 0).
``forget(ids, epsilon=, delta=)`` starts from the weights it has, stops at ‖∇F‖ ≤ τ, rounding error
included, and releases ``W + N(0, σ²I)``: μ = τ/(m σ) against ``N(W*, σ²I)``, which never saw the
forgotten rows. Whether τ is reached from there is a function of forgotten data: if it is not, the
solve from zero takes its place, with the same noise, and nothing published tells.

What a later run may use: after a noisy ``forget`` the weights without noise are gone, in memory and
on disk; the next one starts from the *released* weights. ``release`` returns those, or, after more
was learned, the solve from zero. No solver memory outlives a call, the preconditioner is made from
the retained rows' sums, and rows lie in an order that only those that remain decide.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from expunge.accounting.calibration import calibrate
from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import Commitment, commit
from expunge.certificates.record import NO_NOISE, Run
from expunge.errors import InputError, UnlearningError
from expunge.forgettable.features import Features, check_features
from expunge.forgettable.losses import Loss, check_loss, check_targets
from expunge.forgettable.memory import Memory, Request, Targets
from expunge.forgettable.released import HeadModel, Weights, hash_head, write_record
from expunge.forgettable.ridge import one_thread
from expunge.forgettable.solver import Objective, Solution, solve
from expunge.forgettable.statistics import Compute, compute_rows, describe_statistics, learn_rows
from expunge.forgettable.store import Rows
from expunge.forgettable.sums import Sums
from expunge.noisy.noise import Noise, SystemNoise
from expunge.noisy.solutions import release_solution
from expunge.recipes import ConvexHeadRecipe, Execution

_CURE = "remove that file from the state, and the next release is solved from zero"


class ConvexHead:
    """Softmax, logistic, squared-hinge or Poisson regression with ridge m on public integers.

    >>> rng = np.random.default_rng(0)
    >>> x, y = rng.normal(size=(60, 5)), np.arange(60) % 3
    >>> ids = [f"user-{i}" for i in range(60)]
    >>> head = ConvexHead(Features(), classes=3, weight_decay=1e-3, tolerance=1e-9)
    >>> head.learn((x, y), ids=ids)
    60
    >>> run = head.forget(["user-0"])
    >>> run.record.recipe
    ConvexHeadRecipe(weight_decay=0.001, tolerance=1e-09, noise_std=0.0)
    >>> run = head.forget(["user-1"], epsilon=1.0, delta=1e-5)
    >>> round(run.record.recipe.noise_std, 9)
    3.731e-06
    """

    def __init__(
        self,
        features: Features,
        *,
        classes: int | None = None,
        outputs: int = 0,
        target_scale: float = 1.0,
        weight_decay: float = 1e-5,
        tolerance: float = 1e-9,
        loss: str = "softmax",
        state: str | Path | None = None,
        key: bytes | None = None,
    ) -> None:
        self.features = check_features(features)
        self.loss: Loss = check_loss(loss)
        self.recipe = ConvexHeadRecipe(weight_decay=weight_decay, tolerance=tolerance)
        targets = Targets(classes, outputs, target_scale)
        if (loss == "poisson") != (classes is None):
            valid = "outputs for Poisson regression, classes for the other losses"
            raise InputError.of("classes", classes, valid)
        settings = {"head": "convex-head", "loss": loss, "weight_decay": self.recipe.weight_decay,
                    "tolerance": self.recipe.tolerance}  # fmt: skip
        folder = None if state is None else Path(state).absolute()
        self._memory = Memory(features.describe, features.integers, targets, settings, folder, key)
        self._kept: _Kept | None = None
        self.half_passes = 0

    def __len__(self) -> int:
        """How many examples are held."""
        return self._memory.sums.rows

    def learn(self, data: Any, ids: Iterable[object], compute: Compute | None = None) -> int:
        """Add examples, all or nothing; how many were new (as ``StatisticsHead.learn``)."""

        def find(
            features: Features, targets: Targets, pieces: Iterable[Any], *, only_single: bool
        ) -> tuple[Any, Any, Sums | None]:
            found = (compute or compute_rows)(features, targets, pieces, only_single=only_single)
            check_targets(self.loss, found[1])
            return found

        return learn_rows(self._memory, self.features, data, ids, find)

    def forget(
        self,
        ids: Iterable[object],
        *,
        epsilon: float | None = None,
        delta: float | None = None,
        noise: Noise | None = None,
    ) -> Run:
        """Remove all rows of these identifiers; solve from zero, or, with a budget, from before."""
        if (epsilon is None) != (delta is None):
            raise InputError("give both epsilon and delta, or neither to solve again from zero")
        with self._memory.writing():
            self._read_kept()
            request = self._memory.plan(ids)
            kept = None if request.changes else self._find_answer(epsilon is not None)
            if kept is None and epsilon is not None and delta is not None:
                kept = self._perturb(request, epsilon, delta, noise or SystemNoise())
            kept = kept or self._solve_from_zero(request.changes, request.sums)
            return self._finish(request, kept)

    def release(self) -> Run:
        """What was released last, if nothing was learned since; else a solve from zero."""
        with self._memory.writing():
            self._memory.check_returned()
            self._read_kept()
            if self._kept is None or self._kept.digest != self.digest():
                self._keep(self._solve_from_zero({}, self._memory.sums))
            assert self._kept is not None
            run = self._make_run(self._kept, None, (), 0)
            return replace(run, record=replace(run.record, forget=self._kept.forget))

    def digest(self) -> str:
        """SHA-256 of the sums of the rows that are held."""
        return self._memory.sums.digest()

    def save(self, path: str | Path) -> None:
        """Write the state to a new folder; it is private."""
        self._memory.save(Path(path), {} if self._kept is None else {"kept": self._kept.to_bytes()})

    def add_up(self) -> Sums:
        """The sums of the stored integers, added up again."""
        return self._memory.add_all()

    def measure(self, ids: Iterable[object]) -> dict[str, int]:
        """Half-passes over the data that forgetting ``ids`` would take from each start."""
        request = self._memory.plan(ids)
        left = request.changes, request.sums
        self._read_kept()
        found = {"zero": self._solve(*left, None).half_passes}
        if self._kept is not None:
            name = "released" if self._kept.recipe.noise_std > 0 else "un-noised"
            found[name] = self._solve(*left, self._kept.weights).half_passes
        return found

    def _solve(self, changes: Mapping[int, Rows], sums: Sums, start: Weights | None) -> Solution:
        if sums.rows == 0:
            raise UnlearningError("no example is left; there is nothing to release")
        blocks = list(self._memory.read_blocks(changes))
        gram, m = sums.gram.astype(np.float64), self.recipe.weight_decay
        objective = Objective(self.loss, m, self._memory.unit, blocks, gram)
        zero = np.zeros(sums.cross.shape)
        with one_thread(), np.errstate(over="ignore", invalid="ignore"):
            return solve(objective, zero if start is None else start, self.recipe.tolerance)

    def _solve_from_zero(self, changes: Mapping[int, Rows], sums: Sums) -> _Kept:
        found = self._solve(changes, sums, None)
        self.half_passes = found.half_passes
        if not found.reached:
            raise UnlearningError(
                f"from zero the gradient stays at {found.bound:.1e}, above the tolerance "
                f"{self.recipe.tolerance:.1e}; a larger tolerance or weight_decay can be reached"
            )
        return _Kept(found.weights, self.recipe, sums.digest(), half_passes=found.half_passes)

    def _perturb(self, request: Request, epsilon: float, delta: float, noise: Noise) -> _Kept:
        """W + N(0, σ²I) on the grid, with ‖∇F(W)‖ ≤ τ from wherever it was reached."""
        if type(noise) is not SystemNoise and getattr(noise, "source", None) != "seeded":
            raise InputError.of("noise", noise, "SystemNoise() or SeededNoise(seed)")
        changes, sums = request.changes, request.sums
        recipe = calibrate(
            lambda s: replace(self.recipe, noise_std=s),
            epsilon=epsilon, delta=delta, parameters=sums.cross.size,
        )  # fmt: skip
        start = None if self._kept is None else self._kept.weights
        found = self._solve(changes, sums, start)
        weights = found.weights
        if not found.reached:
            weights = self._solve_from_zero(changes, sums).weights
        self.half_passes = found.half_passes
        made = release_solution(weights, recipe, noise)
        how = Execution(rounding=made.rounding), noise.describe(), made.noise_norm
        return _Kept(made.weights, recipe, sums.digest(), made.grid, *how)

    def _finish(self, request: Request, kept: _Kept) -> Run:
        before = None if self._kept is None else hash_head(self._kept.weights)
        if kept.noise_norm is not None and kept.forget is None:
            kept.forget = commit(request.names, samples=len(self) - request.sums.rows)
        samples = self._memory.forget(request, {"kept": kept.to_bytes()})
        self._kept = kept
        return self._make_run(kept, before, request.names, samples)

    def _find_answer(self, noisy: bool) -> _Kept | None:
        """What was released for these very rows: asked again, it draws no second noise."""
        kept = self._kept
        if kept is None or kept.digest != self.digest() or (kept.recipe.noise_std > 0) > noisy:
            return None
        return kept

    def _keep(self, kept: _Kept) -> None:
        self._memory.write_files({"kept": kept.to_bytes()})
        self._kept = kept

    def _read_kept(self) -> None:
        data = self._memory.read_file("kept")
        if data is not None:
            self._kept = _Kept.from_bytes(data)
            self._compare_kept(self._kept)

    def _compare_kept(self, kept: _Kept) -> None:
        """Of the same rows with the same noise one answer is released: the certified one."""
        folder = self._memory.folder
        if folder is None or not (folder / "certificate.json").exists():
            return
        last = Certificate.load(folder / "certificate.json")
        same = last.statistics is not None and last.statistics.digest == kept.digest
        std = getattr(last.method, "noise_std", None)
        if same and std == kept.recipe.noise_std and last.weights.after != hash_head(kept.weights):
            raise UnlearningError(f"kept is not what {folder}/certificate.json certifies; {_CURE}")

    def _make_run(
        self, kept: _Kept, before: str | None, forgotten: tuple[str, ...], samples: int
    ) -> Run:
        record = write_record(
            kept.weights,
            recipe=kept.recipe,
            statistics=describe_statistics(self._memory, kept.digest, {"loss": self.loss}),
            before=before,
            forgotten=forgotten,
            samples=samples,
            grid=kept.grid,
            execution=kept.execution,
            noise=kept.noise,
            noise_norm=kept.noise_norm,
        )
        memory = self._memory
        record = replace(record, gradient_evaluations=memory.sums.rows * kept.half_passes // 2)
        model = HeadModel(self.features, kept.weights, memory.unit, memory.targets.scale)
        return Run(model.eval(), record, frozenset(forgotten))


class _Kept:
    """The weights a later run may start from: released with noise, or solved from zero.

    ``half_passes`` are those from zero, a function of the rows; those of a noisy release depend on
    where it started, hence on forgotten rows, and are kept nowhere. ``forget`` is the commitment to
    whom the noise is for.
    """

    def __init__(
        self,
        weights: Weights,
        recipe: ConvexHeadRecipe,
        digest: str,
        grid: float = 0.0,
        execution: Execution | None = None,
        noise: Mapping[str, Any] = NO_NOISE,
        noise_norm: float | None = None,
        half_passes: int = 0,
        forget: Commitment | None = None,
    ) -> None:
        self.weights, self.recipe, self.digest = weights, recipe, digest
        self.grid, self.execution = grid, execution or Execution()
        self.noise, self.noise_norm, self.half_passes = noise, noise_norm, half_passes
        self.forget = forget

    def to_bytes(self) -> bytes:
        facts = {
            "shape": self.weights.shape,
            "recipe": [self.recipe.weight_decay, self.recipe.tolerance, self.recipe.noise_std],
            "digest": self.digest,
            "grid": self.grid,
            "rounding": self.execution.rounding,
            "noise": dict(self.noise),
            "noise_norm": self.noise_norm,
            "half_passes": self.half_passes,
            "weights": hash_head(self.weights),
            "forget": None if self.forget is None else asdict(self.forget),
        }
        head = json.dumps(facts, sort_keys=True).encode()
        return head + b"\n" + self.weights.astype("<f8", copy=False).tobytes()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Kept:
        head, _, raw = data.partition(b"\n")
        try:
            facts = json.loads(head)
            weights = np.frombuffer(raw, "<f8").reshape(facts["shape"]).astype(np.float64)
            same = facts["weights"] == hash_head(weights)
        except (ValueError, KeyError, TypeError):
            facts, weights, same = dict[str, Any](), np.empty(0), False
        if not same:
            raise UnlearningError(f"kept is not what was released last; {_CURE}")
        recipe = ConvexHeadRecipe(*facts["recipe"])
        execution = Execution(rounding=facts["rounding"])
        taken, told = facts.get("half_passes", 0), facts.get("forget")
        whom = None if told is None else Commitment(**told)
        rest = (facts["grid"], execution, facts["noise"], facts["noise_norm"], taken, whom)
        return cls(weights, recipe, facts["digest"], *rest)
