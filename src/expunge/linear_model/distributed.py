"""Rows of a ``ray.data.Dataset``: integers and sums where its blocks are, added up here.

Each block gives its integers and their sums by Ray Data's own ``map_batches``, which runs a block
again where a worker died. What comes back is learned at once, all or nothing; sums are associative,
so no order and no number of workers shows.
"""

from __future__ import annotations

import functools
import operator
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.base import clone

from expunge.errors import InputError
from expunge.linear_model.rows import Owners, read_owners
from expunge.linear_model.sums import Labels, Sums, add_rows, sort_labels

Array = npt.NDArray[Any]
Read = tuple[Array, Array, Labels | None, list[Owners], Sums]
_BATCH = 8192


def read_dataset(model: Any, dataset: Any, y: Any, ids: Any) -> Read:
    """The integers of all rows; ``y`` and ``ids`` name columns, the others are X."""
    columns: list[str] = list(dataset.columns())
    for name, value in (("y", y), ("ids", ids)):
        if value not in columns and not (name == "ids" and value is None):
            raise InputError.of(name, value, f"a column of the dataset: {', '.join(columns)}")
    names = [column for column in columns if column not in (y, ids)]
    work = _Work(clone(model), names, y, ids)
    found = dataset.map_batches(work, batch_size=_BATCH, batch_format="numpy")
    parts = [pickle.loads(row["part"]) for row in found.iter_rows()]
    if not parts:
        raise InputError("X has no rows; learn at least one")
    features, targets, labels, owners, sums, facts = zip(*parts, strict=True)
    model._decide(**facts[0]["_facts"] | dict(model._facts))
    model.n_features_in_ = facts[0]["n_features_in_"]
    if model.features is None:
        model.feature_names_in_ = np.array(names, dtype=object)
    else:
        tested = any(f["features"].evaluation == "tested" for f in facts)
        model.features = facts[0]["features"]
        model.features.evaluation = "tested" if tested else "by construction"
    total = functools.reduce(operator.add, map(Sums.from_bytes, sums))
    every = None if labels[0] is None else sort_labels({one for part in labels for one in part})
    joined = [who for part in owners for who in part]
    return np.concatenate(features), np.concatenate(targets), every, joined, total


class _Work:
    """One batch of columns as the integers of its rows and their sums, in bytes."""

    def __init__(self, model: Any, names: list[str], y: str, ids: str | None) -> None:
        self.model, self.names, self.y, self.ids = model, names, y, ids

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        model = self.model
        if model.features is None:
            X: Any = np.column_stack([batch[name].astype(np.float64) for name in self.names])
        elif len(self.names) == 1:
            X = np.stack(list(batch[self.names[0]]))
        else:
            X = {name: np.stack(list(batch[name])) for name in self.names}
        features, targets, labels = model._read_rows(X, batch[self.y], True)
        owners = read_owners(None if self.ids is None else batch[self.ids], len(features))
        sums = add_rows(model._get_numbers(), features, targets, labels).to_bytes()
        part = pickle.dumps((features, targets, labels, owners, sums, vars(model)))
        return {"part": np.array([part], dtype=object)}
