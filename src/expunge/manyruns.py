"""Many runs of one function: in sequence or on Ray, each result on disk the moment it comes.

What is finished is never done twice: a call after a crash, a Ctrl-C or a failure does what is left.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from expunge.errors import ExpungeError, InputError
from expunge.files import hold_lock, write_atomic
from expunge.runmeter import Meter

LOG = logging.getLogger("expunge")
FORMAT = "expunge-result-1"
NAME = re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9_=,+.-]{0,149}")


@dataclass(frozen=True)
class Outcome:
    """What became of one item: its ``value``, or the sentence why there is none.

    ``attempts`` counts the workers it took; it is more than 1 only if some of them died.
    ``kept`` says that it was finished before this call.
    """

    name: str
    value: Any = None
    error: str | None = None
    attempts: int = 1
    seconds: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class Task:
    """An item on its way: the argument of the function, and what Ray sets aside for it."""

    name: str
    argument: Any
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(frozen=True)
class Pool:
    """Where tasks run on Ray: ``address`` of a cluster, or None for one of our own on this machine.

    At most ``workers`` at once (None: as many as there are CPUs); a task whose worker died is
    tried ``retries`` times more; ``fresh`` gives each task a process of its own.
    """

    address: str | None = None
    workers: int | None = None
    retries: int = 2
    fresh: bool = False

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError.of("workers", self.workers, "a whole number >= 1")
        if self.retries < 0:
            raise InputError.of("retries", self.retries, "a whole number >= 0")


def run_many(
    function: Callable[[Any], Any],
    items: Mapping[str, Any],
    results: str | Path,
    *,
    ray: bool | str = False,
    workers: int | None = None,
    retries: int = 2,
    cpus: float = 1.0,
    gpus: float = 0.0,
    version: Any = None,
    progress: bool = False,
) -> dict[str, Outcome]:
    """``function(argument)`` for each name and argument of ``items``; what is done is kept.

    Arguments and values are plain data (what JSON can hold). Each value is written to
    ``results/NAME.json`` in one rename as soon as it comes, and an item that has its file is not
    run again. A file that cannot be read is made anew; one that was made with another argument or
    another ``version`` (plain data, whatever else the results depend on) is refused before anything
    runs. An exception fails its own item only, and nothing is written for it.

    ``ray=True`` runs on this machine's CPUs, an address such as ``"10.0.0.5:6379"`` on a cluster,
    with ``cpus`` and ``gpus`` for each; an item whose worker died is tried ``retries`` times more.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> found = run_many(abs, {"minus": -2, "text": "no number"}, folder)
    >>> found["minus"].value, found["text"].error
    (2, "TypeError: bad operand type for abs(): 'str'")
    >>> run_many(abs, {"minus": -2}, folder)["minus"].kept
    True
    """
    pool = Pool(ray if isinstance(ray, str) else None, workers, retries) if ray else None
    folder = Path(results)
    identities = {name: _identify(name, argument, version) for name, argument in items.items()}
    if folder.exists() and not folder.is_dir():
        raise InputError(f"results folder {folder} is a file; name a directory")
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / ".lock", f"another process is writing results to {folder}"):
        found = _load_all(folder, identities)
        tasks = [Task(n, a, cpus, gpus) for n, a in items.items() if n not in found]
        with (
            Meter(len(items), kept=len(found), shown=progress) as meter,
            closing(perform(function, tasks, pool)) as outcomes,
        ):
            for outcome in outcomes:
                if outcome.error is None:
                    _save(folder, identities[outcome.name], outcome)
                found[outcome.name] = outcome
                meter.count(done=outcome.error is None, line=describe(outcome))
    return {name: found[name] for name in items}


def perform(
    function: Callable[[Any], Any], tasks: Sequence[Task], pool: Pool | None
) -> Generator[Outcome]:
    """The outcomes as they come: in order without a pool, else as Ray finishes them."""
    if pool is not None and tasks:
        from expunge.raycluster import perform_on_ray

        with closing(perform_on_ray(function, tasks, pool)) as outcomes:
            yield from outcomes
        return
    for task in tasks:
        value, error, seconds = attempt(function, task.argument)
        yield Outcome(task.name, value, error, seconds=seconds)


def attempt(function: Callable[[Any], Any], argument: Any) -> tuple[Any, str | None, float]:
    """Value, error and seconds of one call: what it raises becomes a sentence, and what it returns
    plain data, the same now as when it is read from its file.

    >>> attempt(len, "abc")[:2], attempt(set, "abc")[1]
    ((3, None), 'its result is not plain data: Object of type set is not JSON serializable')
    """
    started = time.monotonic()
    value, failure = None, None
    try:
        value = function(argument)
    except ExpungeError as error:
        failure = str(error)
    except (Exception, SystemExit) as error:
        failure = explain(error)
    try:
        value = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        value, failure = None, f"its result is not plain data: {error}"
    return value, failure, time.monotonic() - started


def explain(error: BaseException) -> str:
    """What was raised and where, in one line."""
    frames = traceback.extract_tb(error.__traceback__)[1:]
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    reason = str(error).strip().split("\n")[0]
    return f"{type(error).__name__}{f': {reason}' if reason else ''}{where}"


def describe(outcome: Outcome) -> str | None:
    """What there is to say about an outcome beside the count; nothing for the usual one."""
    if outcome.error is not None:
        return f"{outcome.name} failed: {outcome.error}"
    if outcome.attempts > 1:
        return f"{outcome.name} took {outcome.attempts} workers: the others died"
    return None


def _identify(name: str, argument: Any, version: Any) -> dict[str, Any]:
    """What must be the same for a result to be kept."""
    if NAME.fullmatch(name) is None:
        raise InputError.of("name of an item", name, "1 to 150 letters, digits and any of _=,+-.")
    try:
        return json.loads(json.dumps({"argument": argument, "version": version}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the argument of item {name} must be plain data: {error}") from None


def _save(folder: Path, identity: Mapping[str, Any], outcome: Outcome) -> None:
    facts = {"value": outcome.value, "attempts": outcome.attempts, "seconds": outcome.seconds}
    made = {"format": FORMAT, "name": outcome.name, **identity, **facts}
    text = json.dumps(made | {"sha256": _digest(made)}, ensure_ascii=False, indent=1)
    write_atomic(folder / f"{outcome.name}.json", (text + "\n").encode("utf-8", "surrogatepass"))


def _load_all(folder: Path, identities: Mapping[str, dict[str, Any]]) -> dict[str, Outcome]:
    """The results that are there; one error names all that belong to something else."""
    found, others = dict[str, Outcome](), list[str]()
    for name, identity in identities.items():
        path = folder / f"{name}.json"
        if not path.exists():
            continue
        saved = _read(path)
        if saved is None or saved.get("name") != name:
            LOG.warning("%s cannot be read as a result; %s is run again", path, name)
        elif _dump({key: saved.get(key) for key in identity}) != _dump(identity):
            others.append(path.name)
        else:
            facts = (saved["value"], None, saved["attempts"], saved["seconds"])
            found[name] = Outcome(name, *facts, kept=True)
    if others:
        raise InputError(
            f"{folder} has results of another argument or version: {', '.join(others)}; "
            "remove them, or name another folder"
        )
    return found


def _read(path: Path) -> dict[str, Any] | None:
    """A result file, if it is whole."""
    try:
        saved = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(saved, dict):
        return None
    made = cast(dict[str, Any], saved)
    digest = made.pop("sha256", None)
    return made if made.get("format") == FORMAT and digest == _digest(made) else None


def _digest(made: Mapping[str, Any]) -> str:
    return hashlib.sha256(_dump(made).encode()).hexdigest()


def _dump(data: Mapping[str, Any]) -> str:
    return json.dumps(data, sort_keys=True)
