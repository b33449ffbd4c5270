"""Examples of whatever kind people keep them in: how many, which ones, still of that kind.

columns     a tensor or array, or tuples and mappings of them: rows belong together
frame       a pandas DataFrame
table       a Hugging Face ``datasets.Dataset``
list        a list of examples
dataset     any other map-style Dataset: ``len`` and ``[index]``
stream      whatever can only be iterated over: an IterableDataset, a re-iterable object
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import numpy as np

from expunge.errors import InputError

Kind = Literal["columns", "frame", "table", "list", "dataset", "stream"]


def find_kind(examples: Any) -> Kind:
    """What kind of examples these are.

    >>> find_kind(([1.0, 2.0], [0, 1])), find_kind([(1.0, 0), (2.0, 1)])
    ('columns', 'list')
    """
    streams = _class("torch.utils.data", "IterableDataset")
    if streams is not None and isinstance(examples, streams):
        return "stream"
    if hasattr(examples, "select") and hasattr(examples, "column_names"):
        return "table"
    if hasattr(examples, "filter") and hasattr(examples, "column_names"):
        return "stream"
    if hasattr(examples, "iloc") and hasattr(examples, "columns"):
        return "frame"
    if isinstance(examples, list):
        return "list"
    if _is_array(examples) or isinstance(examples, tuple | Mapping) or _is_tensor_dataset(examples):
        return "columns"
    if hasattr(examples, "__getitem__") and hasattr(examples, "__len__"):
        return "dataset"
    if isinstance(examples, Iterator):
        raise InputError(
            "examples can be read only once; give a list, a Dataset, or an IterableDataset that "
            "can be read again"
        )
    if hasattr(examples, "__iter__"):
        return "stream"
    raise InputError.of(
        "examples", type(examples).__name__, "tensors, arrays, a Dataset, a list or a stream"
    )


def count(examples: Any, kind: Kind) -> int:
    """How many examples there are; every column must have as many.

    >>> count(([1.0, 2.0], {"a": [3, 4]}), "columns")
    2
    """
    if kind != "columns":
        return len(examples)
    lengths = {len(column) for column in list_columns(examples)}
    if len(lengths) != 1:
        raise InputError(
            f"examples have columns of {' and '.join(map(str, sorted(lengths)))} rows; "
            "they must all have as many"
            if lengths
            else "examples have no column; they must have at least one"
        )
    return lengths.pop()


def select(examples: Any, kind: Kind, places: Any) -> Any:
    """The examples at these places (whole numbers), of the kind they were.

    >>> select(([1.0, 2.0, 3.0], [0, 1, 0]), "columns", [2, 0])
    ([3.0, 1.0], [0, 0])
    """
    match kind:
        case "columns" if _is_tensor_dataset(examples):
            return type(examples)(*(_take(column, places) for column in examples.tensors))
        case "columns":
            return map_columns(examples, lambda column: _take(column, places))
        case "frame":
            return _take(examples, places)
        case "table":
            return examples.select(places)
        case "list":
            return [examples[place] for place in places]
        case _:
            from torch.utils.data import Subset

            return Subset(examples, list(places))


def list_columns(examples: Any) -> list[Any]:
    """The columns of examples that are columns, in order."""
    found: list[Any] = []
    map_columns(getattr(examples, "tensors", examples), found.append)
    return found


def map_columns(examples: Any, change: Callable[[Any], Any]) -> Any:
    """The same tuples and mappings around changed columns."""
    match examples:
        case tuple():
            changed = [map_columns(part, change) for part in cast(tuple[Any, ...], examples)]
            named = hasattr(cast(Any, examples), "_fields")
            return type(examples)(*changed) if named else tuple(changed)
        case Mapping():
            items = cast(Mapping[str, Any], examples).items()
            return {name: map_columns(part, change) for name, part in items}
        case _:
            return change(examples)


def read_one(examples: Any, kind: Kind, place: int) -> Any:
    """One example: of columns, the rows that belong together.

    >>> read_one(([1.0, 2.0], [0, 1]), "columns", 1)
    (2.0, 1)
    """
    match kind:
        case "frame":
            return examples.iloc[place]
        case "columns":
            columns = getattr(examples, "tensors", examples)
            return map_columns(columns, lambda c: c.iloc[place] if hasattr(c, "iloc") else c[place])
        case _:
            return examples[place]


def join_rows(rows: list[Any]) -> Any:
    """Examples that were read one by one as columns again: the opposite of :func:`read_one`.

    >>> join_rows([(1.0, {"a": 0}), (2.0, {"a": 1})])
    ([1.0, 2.0], {'a': [0, 1]})
    """
    first = rows[0]
    if isinstance(first, tuple):
        return tuple(join_rows([row[k] for row in rows]) for k in range(len(first)))
    if isinstance(first, Mapping):
        return {name: join_rows([row[name] for row in rows]) for name in first}
    if isinstance(first, np.ndarray | np.generic):
        return np.stack(rows)
    if hasattr(first, "new_empty"):
        import torch

        return torch.stack(rows)
    return rows


def _take(column: Any, places: Any) -> Any:
    if hasattr(column, "index_select"):  # a tensor, in a fifth of the time of an index
        torch: Any = sys.modules["torch"]
        return column.index_select(0, torch.as_tensor(places, dtype=torch.int64).to(column.device))
    index = np.asarray(places, np.int64)
    if hasattr(column, "iloc"):
        return column.iloc[index]
    return column[index] if _is_array(column) else [column[place] for place in index.tolist()]


def _is_array(thing: Any) -> bool:
    return hasattr(thing, "shape") and hasattr(thing, "dtype") and hasattr(thing, "__getitem__")


def _is_tensor_dataset(thing: Any) -> bool:
    found = _class("torch.utils.data", "TensorDataset")
    return found is not None and type(thing) is found


def _class(module: str, name: str) -> Any:
    """A class, if its module is loaded at all: else nothing can be an instance of it."""
    return getattr(sys.modules.get(module), name, None)
