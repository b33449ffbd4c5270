"""Many runs of one function: in sequence or on Ray, each result on disk the moment it comes.

What is finished is never done twice: a call after a crash, a Ctrl-C or a failure does what is left.

Ray is a cluster by its address, or one of our own on this machine while the items run. Only here is
it imported, and only when it is asked for. A worker that dies is replaced by Ray and its item tried
again; what an item raises is its outcome and is not tried again.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import math
import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expunge.errors import ExpungeError, InputError, describe_error
from expunge.files import hold_lock, write_atomic
from expunge.progress import Bar

LOG = logging.getLogger("expunge")
FORMAT = "expunge-result-1"
NAME = re.compile(r"[A-Za-z0-9_=,+-][A-Za-z0-9_=,+.-]{0,149}")
INSTALL = "pip install 'expunge[ray]'"
PORT_SECONDS, GRACE_SECONDS = 3.0, 20.0
OBJECT_STORE_BYTES = 80_000_000
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's own 15 starves them on a machine that does anything else
}


@dataclass(frozen=True)
class Outcome:
    """What became of one item: its ``value``, or the sentence why there is none.

    ``kept`` says that it was finished before this call.
    """

    name: str
    value: Any = None
    error: str | None = None
    seconds: float = 0.0
    kept: bool = False


@dataclass(frozen=True)
class Item:
    """One run on its way: the argument of the function, and what Ray sets aside for it."""

    name: str
    argument: Any
    cpus: float = 1.0
    gpus: float = 0.0


@dataclass(frozen=True)
class Pool:
    """Where items run on Ray: ``address`` of a cluster, or None for one of our own on this machine.

    At most ``workers`` at once (None: as many as there are CPUs); an item whose worker died is
    tried ``retries`` times more; ``fresh`` gives each item a process of its own.
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
        left = [Item(n, a, cpus, gpus) for n, a in items.items() if n not in found]
        run = perform(function, left, pool, kept=len(found), progress=progress)
        with closing(run):
            for outcome, _ in run:
                if outcome.error is None:
                    _save(folder, identities[outcome.name], outcome)
                found[outcome.name] = outcome
    return {name: found[name] for name in items}


def perform(
    function: Callable[[Any], Any],
    items: Sequence[Item],
    pool: Pool | None,
    *,
    kept: int = 0,
    progress: bool = False,
) -> Generator[tuple[Outcome, Bar]]:
    """The outcomes as they come: in order without a pool, else as Ray finishes them.

    With each comes the bar that shows how far all have come, ``kept`` of them from before.
    """
    total, done, failed = len(items) + kept, kept, 0
    run = _run_on_ray(function, items, pool) if pool and items else _run_in_turn(function, items)
    title = describe_counts(total, done, failed)
    with Bar(total, title, wanted=progress, lines=True) as bar, closing(run):
        for outcome in run:
            yield outcome, bar
            if outcome.error is None:
                done += 1
            else:
                failed += 1
                bar.tell(f"{outcome.name} failed: {outcome.error}")
            bar.update(done + failed, describe_counts(total, done, failed))


def describe_counts(total: int, done: int, failed: int) -> str:
    """How many are done.

    >>> describe_counts(3, done=2, failed=0), describe_counts(3, done=2, failed=1)
    ('2 of 3 done, 1 left', '2 of 3 done, 1 failed, 0 left')
    """
    lost = f", {failed} failed" if failed else ""
    return f"{done} of {total} done{lost}, {total - done - failed} left"


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
        failure = describe_error(error, own=1)
    try:
        value = json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        value, failure = None, f"its result is not plain data: {error}"
    return value, failure, time.monotonic() - started


def _run_in_turn(function: Callable[[Any], Any], items: Sequence[Item]) -> Generator[Outcome]:
    for item in items:
        yield Outcome(item.name, *attempt(function, item.argument))


def _identify(name: str, argument: Any, version: Any) -> dict[str, Any]:
    """What must be the same for a result to be kept."""
    if NAME.fullmatch(name) is None:
        raise InputError.of("name of an item", name, "1 to 150 letters, digits and any of _=,+-.")
    try:
        return json.loads(json.dumps({"argument": argument, "version": version}))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the argument of item {name} must be plain data: {error}") from None


def _save(folder: Path, identity: Mapping[str, Any], outcome: Outcome) -> None:
    facts = {"value": outcome.value, "seconds": outcome.seconds}
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
        saved = _read(path, name)
        if saved is None:
            LOG.warning("%s cannot be read as a result; %s is run again", path, name)
        elif _digest({key: saved.get(key) for key in identity}) != _digest(identity):
            others.append(path.name)
        else:
            found[name] = Outcome(name, saved["value"], None, saved["seconds"], kept=True)
    if others:
        raise InputError(
            f"{folder} has results of another argument or version: {', '.join(others)}; "
            "remove them, or name another folder"
        )
    return found


def _read(path: Path, name: str) -> dict[str, Any] | None:
    """A result file, if it is whole and the result of this item."""
    try:
        saved = json.loads(path.read_bytes())
        digest = saved.pop("sha256", None)
    except (OSError, ValueError, RecursionError, AttributeError, TypeError):
        return None
    whole = digest == _digest(saved) and saved.get("format") == FORMAT
    return saved if whole and saved.get("name") == name else None


def _digest(made: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()


def _run_on_ray(
    function: Callable[[Any], Any], items: Sequence[Item], pool: Pool
) -> Generator[Outcome]:
    """The outcomes as they come. When it is closed early, what runs is asked to stop."""
    with connected(pool, items) as ray:
        options: dict[str, Any] = {"max_calls": 1} if pool.fresh else {}
        remote = ray.remote(max_retries=pool.retries, **options)(unpack_and_attempt)
        places = [place or str(Path.cwd()) for place in sys.path]
        waiting, running = deque(items), dict[Any, Item]()
        most = len(items) if pool.workers is None else pool.workers
        try:
            with _hearing() as pass_on:
                while waiting or running:
                    while waiting and len(running) < most:
                        item = waiting.popleft()
                        sized = remote.options(
                            num_cpus=item.cpus, num_gpus=item.gpus, name=item.name
                        )
                        packed = ray.cloudpickle.dumps((function, item.argument))
                        running[sized.remote(places, packed)] = item
                    for reference in ray.wait(list(running), timeout=1.0)[0]:
                        yield _collect(ray, reference, running.pop(reference), pool.retries)
                    pass_on()
        finally:
            _stop(ray, list(running))


@contextmanager
def _hearing() -> Generator[Callable[[], None]]:
    """Signals are noted while Ray's code runs, which may swallow what a handler raises; what is
    yielded calls the handlers that were there."""
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    heard, before = list[int](), dict[int, Any]()

    def pass_on() -> None:
        while heard:
            number = heard.pop()
            if callable(before[number]):
                before[number](number, None)
            elif before[number] == signal.SIG_DFL:
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        before[number] = signal.signal(number, lambda number, _: heard.append(number))
    try:
        yield pass_on
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def unpack_and_attempt(places: list[str], packed: bytes) -> tuple[Any, str | None, float]:
    """What a worker runs: it imports from where the caller does, after its own places.

    It can be asked to stop, also where all is started behind ``&``, with the interrupt ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.path.extend(place for place in places if place not in sys.path)
    function, argument = pickle.loads(packed)
    return attempt(function, argument)


@contextmanager
def connected(pool: Pool, items: Sequence[Item]) -> Generator[Any]:
    """Ray's module, connected; a connection that was there already is used and left alone."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if pool.address is None:
        options |= {"address": "local", "include_dashboard": False}
        options |= {"object_store_memory": OBJECT_STORE_BYTES}
        if pool.workers is not None:
            options["num_cpus"] = pool.workers * math.ceil(max(item.cpus for item in items))
    else:
        check_address(pool.address)
        options["address"] = pool.address
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**options)
    except Exception as error:
        raise InputError(f"Ray cannot be used: {describe_error(error)}") from None
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)  # Ray sets one of its own
    try:
        if pool.address is None:
            _check_resources(ray, items)
        yield ray
    finally:
        ray.shutdown()


def import_ray() -> Any:
    """Ray's module, with its usage statistics off."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise InputError(f"Ray is not installed; install it with {INSTALL}") from None


def check_address(address: str) -> None:
    """Refuse at once an address where nothing listens: Ray itself tries for many minutes.

    >>> check_address("nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: Ray address is 'nowhere'; it must be HOST:PORT of the head node, ...
    """
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65536):
        valid = "HOST:PORT of the head node, ray://HOST:PORT of a Ray Client server, or auto"
        raise InputError.of("Ray address", address, valid)
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PORT_SECONDS).close()
    except OSError as error:
        reason = (error.strerror or str(error) or type(error).__name__).lower()
        raise InputError(f"Ray address {address} does not answer: {reason}") from None


def _check_resources(ray: Any, items: Sequence[Item]) -> None:
    """An item that asks for more than there is would wait for ever."""
    there = ray.cluster_resources()
    for item in items:
        for name, asked in (("CPU", item.cpus), ("GPU", item.gpus)):
            if asked > there.get(name, 0):
                raise InputError(
                    f"{item.name} asks for {asked:g} {name} and Ray has {there.get(name, 0):g} here"
                )


def _collect(ray: Any, reference: Any, item: Item, retries: int) -> Outcome:
    """The outcome of an item that has ended, and whose worker Ray tried often enough."""
    errors = ray.exceptions
    try:
        return Outcome(item.name, *ray.get(reference))
    except (errors.WorkerCrashedError, errors.NodeDiedError, errors.OutOfMemoryError):
        times = "once" if retries == 0 else f"{retries + 1} times"
        said = f"its worker died {times} (killed, out of memory, or its machine is gone)"
    except errors.RayError as error:
        said = f"its worker cannot run it: {describe_error(getattr(error, 'cause', None) or error)}"
    return Outcome(item.name, error=said)


def _stop(ray: Any, running: list[Any]) -> None:
    """Ask what runs to stop, as Ctrl-C does, and give it time to save; then end it."""
    for reference in running:
        ray.cancel(reference)
    late = running and ray.wait(running, num_returns=len(running), timeout=GRACE_SECONDS)[1]
    for reference in late:
        ray.cancel(reference, force=True)
