"""Processes that die at a call of the system."""

import os
from collections.abc import Callable

STEPS = ("fsync", "replace", "unlink", "open", "mkdir")


def kill_at(step: int, work: Callable[[], object]) -> bool:
    """Run ``work`` in a child that dies at its ``step``-th call of the system; whether it did."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    count = 0

    def dying(call: Callable[..., object]) -> Callable[..., object]:
        def run(*given: object, **named: object) -> object:
            nonlocal count
            count += 1
            if count == step:
                os._exit(9)
            return call(*given, **named)

        return run

    try:
        for name in STEPS:
            setattr(os, name, dying(getattr(os, name)))
        work()
    finally:
        os._exit(0)
