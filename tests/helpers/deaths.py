"""Processes that die at a call of the system, and bits that flip."""

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

STEPS = ("fsync", "replace", "unlink", "open", "mkdir", "rename")


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


def flip_bit(start: Path, folder: Path, draw: random.Random) -> Path:
    """A copy of a state with one bit of one file flipped; that file."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(start, folder)
    file = draw.choice(sorted(p for p in folder.rglob("*") if p.is_file() and p.stat().st_size))
    data = bytearray(file.read_bytes())
    at = draw.randrange(len(data) * 8)
    data[at // 8] ^= 1 << at % 8
    file.write_bytes(data)
    return file


def restore_parts(old: Path, folder: Path, groups: list[str], instead: Callable) -> None:
    """Files of an older day, over those of today or, where ``instead`` says so, in their place."""
    for group in groups:
        if instead(group):
            for file in folder.glob(f"{group}.*"):
                file.unlink()
        for file in old.glob(f"{group}.*"):
            shutil.copy(file, folder / file.relative_to(old))
