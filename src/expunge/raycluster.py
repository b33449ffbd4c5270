"""Tasks on Ray: a cluster by its address, or one of our own on this machine while they run.

Only here is Ray imported, and only when it is asked for. A worker that dies is replaced and its
task tried again; what a task raises is its outcome and is not tried again.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from expunge.errors import InputError
from expunge.manyruns import Outcome, Pool, Task, attempt, explain

LOG = logging.getLogger("expunge")
INSTALL = "pip install 'expunge[ray]'"
PORT_SECONDS, ANSWER_SECONDS, GRACE_SECONDS = 3.0, 60.0, 20.0
OBJECT_STORE_BYTES = 80_000_000
QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_worker_niceness": "0",  # Ray's own 15 starves them on a machine that does anything else
}
PROBE = (
    "import sys, ray\n"
    "try:\n"
    "    ray.init(address=sys.argv[1], log_to_driver=False, logging_level='ERROR')\n"
    "except BaseException as error:\n"
    "    print(str(error).strip().split('\\n')[0]); sys.exit(1)\n"
)


def perform_on_ray(
    function: Callable[[Any], Any], tasks: Sequence[Task], pool: Pool
) -> Generator[Outcome]:
    """The outcomes as they come. When it is closed early, what runs is asked to stop."""
    with connected(pool, tasks) as ray:
        options: dict[str, Any] = {"max_retries": 0} | ({"max_calls": 1} if pool.fresh else {})
        remote = ray.remote(**options)(unpack_and_attempt)
        places = [place or str(Path.cwd()) for place in sys.path]
        waiting = deque((task, 1) for task in tasks)
        running: dict[Any, tuple[Task, int]] = {}
        most = len(tasks) if pool.workers is None else pool.workers
        try:
            while waiting or running:
                while waiting and len(running) < most:
                    task, tries = waiting.popleft()
                    sized = remote.options(num_cpus=task.cpus, num_gpus=task.gpus, name=task.name)
                    packed = ray.cloudpickle.dumps((function, task.argument))
                    running[sized.remote(places, packed)] = task, tries
                ready, _ = ray.wait(list(running), timeout=1.0)
                for reference in ready:
                    task, tries = running.pop(reference)
                    outcome = _collect(ray, reference, task, tries)
                    if outcome is None and tries <= pool.retries:
                        LOG.warning("the worker of %s died; it is tried again", task.name)
                        waiting.append((task, tries + 1))
                    else:
                        yield outcome or _give_up(task, tries)
        finally:
            _stop(ray, list(running))


def unpack_and_attempt(places: list[str], packed: bytes) -> tuple[Any, str | None, float]:
    """What a worker runs: it imports from where the caller does, after its own places."""
    sys.path.extend(place for place in places if place not in sys.path)
    function, argument = pickle.loads(packed)
    return attempt(function, argument)


@contextmanager
def connected(pool: Pool, tasks: Sequence[Task]) -> Generator[Any]:
    """Ray's module, connected; a connection that was there already is used and left alone."""
    ray = import_ray()
    if ray.is_initialized():
        yield ray
        return
    handler = signal.getsignal(signal.SIGTERM)
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if pool.address is None:
        options |= {"address": "local", "include_dashboard": False}
        options |= {"object_store_memory": OBJECT_STORE_BYTES}
        if pool.workers is not None:
            options["num_cpus"] = pool.workers * math.ceil(max(task.cpus for task in tasks))
    else:
        check_address(pool.address)
        options["address"] = pool.address
    try:
        ray.init(**options)
    except Exception as error:
        where = "on this machine" if pool.address is None else f"at {pool.address}"
        raise InputError(f"Ray {where} cannot be used: {explain(error)}") from None
    finally:
        _put_back(handler)
    try:
        if pool.address is None:
            _check_resources(ray, tasks)
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
    """Refuse an address that does not answer as Ray, in bounded time.

    Ray itself waits for minutes and may then end the process, so first the port is tried and then
    a process of its own connects.

    >>> check_address("nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: Ray address is 'nowhere'; it must be HOST:PORT of the head node, ...
    """
    if address != "auto":
        _try_port(address)
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROBE, address],
            capture_output=True,
            text=True,
            check=False,
            timeout=ANSWER_SECONDS,
            env=os.environ | QUIET,
        )
    except subprocess.TimeoutExpired:
        raise InputError(
            f"Ray address {address} does not answer as Ray within {ANSWER_SECONDS:g} s; it must be "
            "the address that `ray start --head` prints, of the same version of Ray"
        ) from None
    if done.returncode != 0 and "InvalidAuthToken" in done.stderr:
        raise InputError(
            f"Ray address {address} refuses us: that cluster asks for its token; set "
            "RAY_AUTH_MODE=token here, and give Ray the token as its operator says"
        )
    if done.returncode != 0:
        reason = (done.stdout.strip() or done.stderr.strip() or "no reason given").split("\n")[-1]
        raise InputError(f"Ray address {address} cannot be used: {reason}")


def _try_port(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        valid = "HOST:PORT of the head node, ray://HOST:PORT of a Ray Client server, or auto"
        raise InputError.of("Ray address", address, valid)
    try:
        socket.create_connection((host, int(port)), timeout=PORT_SECONDS).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise InputError(f"Ray address {address} does not answer: {reason.lower()}") from None


def _check_resources(ray: Any, tasks: Sequence[Task]) -> None:
    """A task that asks for more than there is would wait for ever."""
    there = ray.cluster_resources()
    for task in tasks:
        for name, asked in (("CPU", task.cpus), ("GPU", task.gpus)):
            if asked > there.get(name, 0):
                raise InputError(
                    f"{task.name} asks for {asked:g} {name} and Ray has {there.get(name, 0):g} here"
                )


def _collect(ray: Any, reference: Any, task: Task, tries: int) -> Outcome | None:
    """The outcome of a task that has ended; None if its worker died."""
    errors = ray.exceptions
    deaths = (
        errors.WorkerCrashedError,
        errors.NodeDiedError,
        errors.OutOfMemoryError,
        errors.ObjectLostError,
        errors.RaySystemError,
    )
    try:
        value, failure, seconds = ray.get(reference)
    except errors.RayTaskError as error:
        cause: BaseException = getattr(error, "cause", None) or error
        reason = f"{type(cause).__name__}: {str(cause).strip().split(chr(10))[0]}"
        return Outcome(task.name, error=f"its worker cannot run it: {reason}", attempts=tries)
    except deaths:
        return None
    except errors.RayError as error:
        return Outcome(task.name, error=explain(error), attempts=tries)
    return Outcome(task.name, value, failure, tries, seconds)


def _give_up(task: Task, tries: int) -> Outcome:
    times = "once" if tries == 1 else f"{tries} times"
    sentence = f"its worker died {times} (killed, out of memory, or its machine is gone)"
    return Outcome(task.name, error=sentence, attempts=tries)


def _stop(ray: Any, running: list[Any]) -> None:
    """Ask what runs to stop, as Ctrl-C does, and give it time to save; then end it."""
    if not running:
        return
    for reference in running:
        ray.cancel(reference)
    _, late = ray.wait(running, num_returns=len(running), timeout=GRACE_SECONDS)
    for reference in late:
        ray.cancel(reference, force=True)


def _put_back(handler: Any) -> None:
    """Ray sets a handler of its own for SIGTERM."""
    if threading.current_thread() is threading.main_thread() and handler is not None:
        signal.signal(signal.SIGTERM, handler)
