"""Options in a job's tables, each declared by the class that takes it: ``expunge.Training``, a
recipe, an estimator, ``expunge.Shards``, ``expunge.Features``.

A key is tried by itself, among values that fit anything, so that one wrong value does not hide the
next.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from expunge.errors import ExpungeError

Make = Callable[..., Any]
NOT_IN_FILES = (
    "network", "build", "train", "features", "state", "progress", "ray", "kwargs", "loss", "loader",
)  # fmt: skip
HARMLESS = {"seed": "1", "learning_rate": 0.0, "weight_decay": 0.0}  # others: 1


def suggest(name: str, names: Iterable[str]) -> str:
    """The name that was probably meant, or all there are.

    >>> suggest("stepz", ["steps", "noise_std"]), suggest("colour", ["steps", "noise_std"])
    ('did you mean steps?', 'it may have steps, noise_std')
    """
    listed = list(names)
    near = difflib.get_close_matches(name, listed, 1)
    return f"did you mean {near[0]}?" if near else "it may have " + ", ".join(listed)


def list_options(kind: Make) -> dict[str, bool]:
    """The options of a class that a file can hold, and whether each is required.

    >>> from expunge import OutputPerturbation
    >>> list_options(OutputPerturbation)
    {'start_clip': True, 'noise_std': True}
    """
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(kind).parameters.items()
        if name not in NOT_IN_FILES
    }


def find_loss(name: str) -> Make | None:
    """A loss of ``torch.nn.functional`` by its name, hyphens or not; None where it has none.

    >>> find_loss("cross-entropy").__name__, find_loss("perplexity")
    ('cross_entropy', None)
    """
    import torch.nn.functional

    plain = name.replace("-", "_")
    found = None if plain.startswith("_") else getattr(torch.nn.functional, plain, None)
    return found if callable(found) else None


def try_options(
    owner: str, kind: Make, given: tuple[Any, ...], options: Mapping[str, Any], own: Iterable[str]
) -> list[str]:
    """Unknown and missing options, those whose value is refused, and, if there is nothing else,
    what is wrong with all of them together; ``own`` are further keys of the table.

    >>> from expunge import OutputPerturbation
    >>> options = {"start_clip": -1, "noise": 2}
    >>> for mistake in try_options("this", OutputPerturbation, (), options, ["name"]):
    ...     print(mistake)
    noise is not an option of this; did you mean noise_std?
    start_clip is -1; it must be a number >= 0
    """
    declared = list_options(kind)
    unknown = [key for key in options if key not in declared]
    names = [*declared, *own]
    found = [f"{key} is not an option of {owner}; {suggest(key, names)}" for key in unknown]
    needed = [key for key, required in declared.items() if required]
    if not unknown:  # which may be the missing one, misspelt
        found += [f"{key} is missing; {owner} needs it" for key in needed if key not in options]
    harmless = {key: HARMLESS.get(key, 1) for key in needed}
    if type(options.get("steps")) is int and options["steps"] > 0:
        harmless["steps"] = options["steps"]  # a schedule has one value for each
    for key in [key for key in options if key in declared]:
        found += _refuse(kind, given, harmless | {key: options[key]}, [key])
    return found or _refuse(kind, given, options, declared)


def _refuse(
    kind: Make, given: tuple[Any, ...], options: Mapping[str, Any], names: Iterable[str]
) -> list[str]:
    """The sentence in which these options are refused, if it is about one of the names."""
    try:
        kind(*given, **options)
    except ExpungeError as error:
        return [str(error)] if re.match(rf"({'|'.join(names)})\b", str(error)) else []
    return []
