"""The life of a linear model: learn, forget, release. What it has in common with scikit-learn's
estimators is in their base classes; what it solves is in its subclasses."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, clone
from sklearn.exceptions import NotFittedError
from sklearn.utils.validation import validate_data

from expunge.data.people import check_request, read_people
from expunge.errors import InputError, UnlearningError
from expunge.linear_model.numbers import FixedPoint, Numbers, read_numbers
from expunge.linear_model.released import KIND, load, make_release
from expunge.linear_model.rows import Change, Store, read_owners
from expunge.linear_model.sums import Labels, Sums
from expunge.manifests import read_kind
from expunge.states import State

if TYPE_CHECKING:
    from expunge.certificates.release import Release
    from expunge.linear_model.features import Features

Array = npt.NDArray[Any]


class LinearModel(BaseEstimator):
    """Rows as whole numbers, their exact sums, and coefficients that are a function of both."""

    kind = KIND  # of state
    features: Features | None
    state: str | Path | None
    _store: Store | None = None
    _released = False
    _solved: tuple[object, Any] = None, None  # of what, and the solution
    # What the first rows decided: how many columns, whether y was flat, and so on.
    _facts: Mapping[str, Any] = MappingProxyType({})

    def _read_targets(self, y: Any, fit: bool) -> tuple[Array, Labels | None]:
        """What rows keep of their targets, and the labels among them."""
        raise NotImplementedError

    def _solve(self, store: Store, change: Change | None, sums: Sums) -> Any:
        """Coefficients of the rows that are there, or that ``change`` leaves."""
        raise NotImplementedError

    # Learning.

    def fit(self, X: Any, y: Any = None, ids: Iterable[Any] | None = None) -> Self:
        """Learn these rows and no others. A state that has rows is refused: ``partial_fit`` adds.

        ``ids`` says whose each row is: a name, several, or None for nobody's. Without ``ids`` all
        rows are anonymous: they are learned and can never be forgotten.
        """
        if self._is_stored() and self._open().sums.rows:
            raise InputError.of("state", str(self.state), "empty for fit; partial_fit adds to it")
        for name in ("_store", "_facts", "_released", "_solved"):
            vars(self).pop(name, None)
        self._learn(X, y, ids, reset=True, fit=True)
        self._find_solution()
        return self

    def partial_fit(
        self, X: Any, y: Any = None, ids: Iterable[Any] | None = None, readmit: bool = False
    ) -> Self:
        """Add rows, all or nothing; what is there already is not added again.

        People who were forgotten are refused unless ``readmit`` says that it is on purpose.
        """
        self._learn(X, y, ids, reset=self._store is None, readmit=readmit)
        return self

    def _learn(
        self, X: Any, y: Any, ids: Any, *, reset: bool, fit: bool = False, readmit: bool = False
    ) -> None:
        if hasattr(X, "map_batches"):
            from expunge.linear_model.distributed import read_dataset

            features, targets, labels, owners, sums = read_dataset(self, X, y, ids)
        else:
            features, targets, labels = self._read_rows(X, y, reset, fit)
            owners, sums = read_owners(ids, len(features)), None
        if len(features) == 0:
            raise InputError("X has no rows; learn at least one")
        store = self._prepare(features.shape[1], None if labels is not None else targets.shape[1])
        with store.state.writing():
            if features.shape[1] != store.inputs:
                raise InputError.of("X", features.shape[1], f"{store.inputs} columns wide")
            store.state.check_returned(store.find_marks)
            back = store.state.find_readmitted({one for who in owners for one in who}, readmit)
            change = store.plan_addition(owners, features, targets, labels, sums)
            if change.similar:
                warnings.warn(
                    f"{change.similar} rows are there already but for a unit in the last place, as "
                    "from another machine; they were not added again",
                    stacklevel=3,
                )
            if change.count or back or not store.state.names("rows/"):
                store.state.commit(change.files, readmit=back, settings=self._describe())
                store.remember(change.sums)

    def _read_rows(
        self, X: Any, y: Any, reset: bool, fit: bool = False
    ) -> tuple[Array, Array, Labels | None]:
        """The whole numbers of rows and targets."""
        if self.features is not None:
            if y is None:
                raise InputError.of("y", y, "the targets, one per row")
            single = self._facts.get("evaluation") == "by construction"
            columns = self.features.compute(X, single=single)
            self.n_features_in_ = columns.shape[1]
        else:
            options: Any = {"multi_output": True, "y_numeric": False, "dtype": np.float64}
            options["ensure_all_finite"] = False  # which column it is, FixedPoint says
            try:
                X, y = cast(Any, validate_data(self, X, y, reset=reset, **options))
            except (TypeError, ValueError):
                _name_text(X)
                raise
            named = cast("Sequence[str] | None", getattr(self, "feature_names_in_", None))
            columns = FixedPoint().quantise(X, "X", named)
        targets, labels = self._read_targets(y, fit)
        if len(columns) != len(targets):
            raise InputError.of("y", len(targets), f"as long as X: {len(columns)}")
        return columns, targets, labels

    # The state.

    def _decide(self, **facts: Any) -> None:
        """Keep what the first rows decided."""
        self._facts = {**self._facts, **facts}

    def _get_numbers(self) -> Numbers:
        if self._store is not None:
            return self._store.numbers
        return FixedPoint() if self.features is None else self.features.numbers

    def _is_stored(self) -> bool:
        return self.state is not None and read_kind(self.state) is not None

    def _prepare(self, inputs: int, outputs: int | None) -> Store:
        """The store, made if there is none yet."""
        if self._store is not None or self._is_stored():
            store = self._open()
            if store.outputs != outputs:
                raise InputError.of("y", outputs, f"{store.outputs} targets per row")
            return store
        if self.features is not None:
            self._decide(evaluation=self.features.evaluation)
        self._decide(inputs=inputs, outputs=outputs)
        path = None if self.state is None else Path(self.state).absolute()
        made = State.create(path, KIND, self._describe())
        self._store = Store(made, self._get_numbers(), inputs, outputs)
        return self._store

    def _open(self) -> Store:
        """The store of this model, opened from its folder where need be."""
        if self._store is not None:
            return self._store
        if self.state is None or not self._is_stored():
            if self._released:
                raise InputError("this model was released: it has no rows; forget in its state")
            raise NotFittedError(f"this {type(self).__name__} has learned nothing yet; call fit")
        made = State.open(self.state, KIND)
        ours, theirs = self._describe_given(), made.settings
        if ours["model"] != theirs["model"]:
            raise InputError.of("state", str(self.state), f"of a {ours['model']}")
        if (ours["features"] is None) != (theirs["features"] is None):
            valid = "None" if theirs["features"] is None else "given"
            raise InputError.of("features", self.features, f"{valid}, as in the state {self.state}")
        for part, prefix in (("parameters", ""), ("features", "features.")):
            for name, value in (ours[part] or {}).items():
                if (there := theirs[part].get(name)) != value:
                    valid = f"{there!r}, as in the state {self.state}"
                    raise InputError.of(prefix + name, value, valid)
        self._take_facts(theirs["facts"])
        inputs, outputs = self._facts["inputs"], self._facts["outputs"]
        self._store = Store(made, read_numbers(theirs["numbers"]), inputs, outputs)
        return self._store

    def _take_facts(self, facts: Mapping[str, Any]) -> None:
        self._facts, self.n_features_in_ = facts, facts["inputs"]
        if "columns" in facts:
            self.feature_names_in_ = np.array(facts["columns"], dtype=object)

    def _describe_given(self) -> dict[str, Any]:
        """Everything the constructor was given but where the state is, as plain values."""
        given = sorted(self.get_params(deep=False).items())
        return {
            "model": type(self).__name__,
            "parameters": {n: _to_plain(v) for n, v in given if n not in ("state", "features")},
            "features": None if self.features is None else self.features.describe(),
        }

    def _describe(self) -> dict[str, Any]:
        facts = dict(self._facts)
        if (names := getattr(self, "feature_names_in_", None)) is not None:
            facts["columns"] = [str(name) for name in names]
        return self._describe_given() | {"numbers": self._get_numbers().describe(), "facts": facts}

    # Solving.

    def _find_solution(self) -> Any:
        """Coefficients of what is in the state now, computed once for each of its contents."""
        if self._released:
            return self._solved[1]
        store = self._open()
        store.state.refresh()
        mark = self._mark_solution(store)
        if self._solved[0] != mark:
            with store.state.writing():
                store.state.check_returned(store.find_marks)
                self._check_sums(store.sums)
                self._solved = mark, self._solve(store, None, store.sums)
        return self._solved[1]

    @property
    def _found(self) -> Any:
        """The solution; a model that has learned nothing has no such attribute."""
        if not self.__sklearn_is_fitted__():
            raise AttributeError(f"this {type(self).__name__} is not fitted yet")
        return self._find_solution()

    def _mark_solution(self, store: Store) -> object:
        """What a solution is of; releases that are written change the generation, not the rows."""
        return store.state.manifest.files.get("sums"), self._describe_given()["parameters"]

    def _check_sums(self, sums: Sums) -> None:
        """Refuse what has no solution."""
        if sums.rows == 0:
            raise UnlearningError("no row is left; there is nothing to solve or to release")
        if sums.labels is not None and len(sums.labels) < 2:
            raise UnlearningError("rows of fewer than two classes are left: there is no model")

    def __sklearn_is_fitted__(self) -> bool:
        return self._released or self._store is not None or self._is_stored()

    def __sklearn_clone__(self) -> Self:
        """Unfitted, with the same parameters; a state is never shared."""
        given = self.get_params(deep=False) | {"state": None}
        made = type(self)(**{name: clone(value, safe=False) for name, value in given.items()})
        if (asked := vars(self).get("_metadata_request")) is not None:  # by set_fit_request
            vars(made)["_metadata_request"] = copy.deepcopy(asked)
        return made

    def _expand(self, X: Any) -> Array:
        """The columns of rows to predict."""
        if self.features is not None:
            columns = self.features.compute(X, again=False)
            return self.features.numbers.expand(columns)
        if not hasattr(self, "n_features_in_"):
            self._open()
        return cast(Array, validate_data(self, X, reset=False, dtype=np.float64))

    # People.

    @property
    def generation(self) -> int:
        """Another number, another state."""
        return self._open().state.generation

    @property
    def identity(self) -> str:
        """The same for every copy of this state, and for no other."""
        return self._open().state.identity

    def holds(self, people: Iterable[Any]) -> list[str]:
        """Those of them who have rows."""
        store = self._open()
        store.state.refresh()
        return store.find_people(read_people(people))

    def forgot(self, people: Iterable[Any]) -> list[str]:
        """Those of them who were forgotten."""
        state = self._open().state
        state.refresh()
        return [person for person in read_people(people) if state.is_forgotten(person)]

    def digest(self) -> str:
        """SHA-256 of the sums: equal on every machine."""
        return self._open().digest()

    def forget(self, ids: Iterable[Any]) -> Release:
        """Remove every row of these people and release the model of the rows that remain."""
        names = read_people(ids, "forget")
        store = self._open()
        state = store.state
        with state.writing():
            change, present = store.plan_removal(names), store.find_people(names)
            marks = {state.mark(state.name(name)): name for name in names}
            check_request(names, present, gone=[n for n in names if state.is_forgotten(n)])
            state.check_returned(store.find_marks, leaving=marks)
            before = sum(state.pending.get(mark, 0) for mark in marks)
            refused = solved = None
            try:
                self._check_sums(change.sums)
                solved = self._solve(store, change, change.sums)
            except UnlearningError as error:
                refused = error
            if present:
                state.commit(change.files, forget=change.people, settings=self._describe())
                store.remember(change.sums)
            if refused is not None:
                self._solved = None, None
                raise UnlearningError(f"they are forgotten, but nothing is released: {refused}")
            self._solved = self._mark_solution(store), solved
            return make_release(self, store, names, change.count + before, marks)

    def release(self) -> Release:
        """The model of everything that is in the state, with its certificate."""
        store = self._open()
        with store.state.writing():
            store.state.check_returned(store.find_marks)
            self._find_solution()
            return make_release(self, store, (), 0, {})

    def save(self, path: str | Path) -> Path:
        """Copy the state to a new folder; it is private. ``load`` opens it."""
        self._open().state.copy(path)
        return Path(path)

    @classmethod
    def load(cls, path: str | Path, network: Any = None) -> Self:
        """The model of a state, which goes on there, or a predictor from a release."""
        made = load(path, network)
        if not isinstance(made, cls):
            raise InputError.of("path", str(path), f"of a {cls.__name__}")
        return made


def _name_text(X: Any) -> None:
    """Refuse a table by the name of its first column that is no numbers."""
    for name in getattr(X, "columns", ()):
        valid = "numbers: of text declare the categories, OneHotEncoder(categories=[[…]])"
        refused = InputError.of(f"X, column {name!r},", str(X[name].dtype), valid)
        column = np.asarray(X[name])
        if column.dtype.kind in "mM":  # dates, which would become numbers of some unit
            raise refused
        try:
            column.astype(np.float64)
        except (TypeError, ValueError):
            raise refused from None


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return list(cast(Any, value)) if isinstance(value, tuple | list) else value
