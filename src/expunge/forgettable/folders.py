"""The state folder of shards: its slices, its checkpoints, who was forgotten, what was released."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Generator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors

from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.forgettable.slices import NAME_BYTES, Assignment, Examples, arrange, join

if sys.platform != "win32":
    import fcntl

FORMAT = "expunge-shards-1"


@dataclass(frozen=True)
class Held:
    """One slice: the SHA-256 of its file, and how many examples it holds."""

    digest: bytes
    samples: int


_EMPTY = Held(hashlib.sha256(b"").digest(), 0)


@dataclass(frozen=True)
class Folder:
    """Where the slices and checkpoints of an ensemble lie."""

    path: Path

    def slice_name(self, shard: int, part: int) -> str:
        return f"rows/{shard:03x}-{part:03x}"

    def checkpoint_name(self, shard: int, part: int) -> str:
        return f"checkpoints/{shard:03x}-{part:03x}"

    def read_slice(self, shard: int, part: int) -> Examples | None:
        """The examples of a slice; None for an empty one."""
        file = self.path / self.slice_name(shard, part)
        return Examples.from_bytes(file.read_bytes()) if file.exists() else None

    def read_slices(self, shard: int, stages: int) -> Examples:
        """The examples of the first slices of a shard, one after the other."""
        parts = [self.read_slice(shard, part) for part in range(stages)]
        return join(part for part in parts if part is not None)

    def check_files(self, assignment: Assignment) -> None:
        """Nothing lies beside the slices and checkpoints: it would outlive a request."""
        places = [(k, j) for k in range(assignment.shards) for j in range(assignment.slices)]
        known = {make(*at) for at in places for make in (self.slice_name, self.checkpoint_name)}
        for part in ("rows", "checkpoints"):
            for file in sorted((self.path / part).iterdir()):
                if file in self._list_unfinished():
                    continue
                if f"{part}/{file.name}" not in known or file.is_symlink():
                    raise InputError.of("state", str(file), "a slice or checkpoint of this state")

    def _list_unfinished(self) -> list[Path]:
        """Checkpoints that a killed process was writing."""
        return list((self.path / "checkpoints").glob(".*.tmp"))

    @contextmanager
    def changing(self) -> Generator[None]:
        """While slices change: no worker of a killed process trains, and none left anything."""
        with hold_training(self.path, changing=True):
            for file in self._list_unfinished():
                file.unlink()
            yield

    def clear(self) -> None:
        """Remove a state in which nothing was ever learned."""
        for name in ("meta.json", "training"):
            (self.path / name).unlink(missing_ok=True)
        for name in ("rows", "journal", "checkpoints"):
            shutil.rmtree(self.path / name, ignore_errors=True)

    def find_example(self, assignment: Assignment) -> Examples | None:
        """One example that is held."""
        for shard in range(assignment.shards):
            for part in range(assignment.slices):
                held = self.read_slice(shard, part)
                if held is not None:
                    return held.take([0])
        return None

    def read_forgotten(self) -> set[bytes]:
        """The names of those who were forgotten."""
        file = self.path / "forgotten"
        marks = file.read_bytes() if file.exists() else b""
        return {marks[at : at + NAME_BYTES] for at in range(0, len(marks), NAME_BYTES)}

    def read_counts(self) -> dict[str, int]:
        """How many examples the forgotten had."""
        file = self.path / "counts.json"
        return json.loads(file.read_bytes()) if file.exists() else {}

    def mark(self, marks: Set[bytes], gone: Mapping[bytes, int]) -> dict[str, bytes]:
        """Who was forgotten, and how many examples they had; nothing else is computed from it."""
        counts = self.read_counts() | {mark.hex(): count for mark, count in gone.items()}
        kept = {mark: count for mark, count in counts.items() if bytes.fromhex(mark) in marks}
        text = json.dumps(kept, sort_keys=True).encode()
        return {"forgotten": b"".join(sorted(marks)), "counts.json": text}

    def list_releases(self) -> list[dict[str, Any]]:
        """What was released, oldest first: the ensemble's hash and its lineages."""
        file = self.path / "released"
        return json.loads(file.read_bytes()) if file.exists() else []

    def scan(self, assignment: Assignment, shard: int, part: int) -> Held:
        """What a slice holds; its file is read again only if it is another one.

        An example that does not belong there is refused: forgetting would not find it.
        """
        file = self.path / self.slice_name(shard, part)
        try:
            found = file.stat()
        except FileNotFoundError:
            return _EMPTY
        stamp = found.st_ino, found.st_mtime_ns, found.st_ctime_ns, found.st_size
        return _scan(file, assignment, (shard, part), stamp)


@functools.lru_cache(maxsize=65_536)
def _scan(
    file: Path, assignment: Assignment, place: tuple[int, int], stamp: tuple[int, ...]
) -> Held:
    raw = file.read_bytes()
    try:
        examples = Examples.from_bytes(raw)
        places, plain = assignment.find_places(examples.names), arrange(examples).to_bytes()
    except (safetensors.SafetensorError, KeyError, ValueError):
        raise UnlearningError(f"{file} is damaged; restore the state as a whole") from None
    if (places != place).any():
        raise UnlearningError(
            f"{file} holds examples that do not belong there; restore the state as a whole"
        )
    if raw != plain:
        raise UnlearningError(f"{file} is not as it was written; restore the state as a whole")
    return Held(hashlib.sha256(raw).digest(), len(examples))


@contextmanager
def hold_training(folder: Path, *, changing: bool) -> Generator[None]:
    """The lock of those who train, together, or of the one who changes slices, alone."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder / "training", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if changing else fcntl.LOCK_SH)
        yield
    finally:
        os.close(handle)


def holds_shards(state: Path) -> bool:
    """Whether a folder is the state of shards."""
    try:
        return json.loads((state / "meta.json").read_text()).get("format") == FORMAT
    except (OSError, ValueError, AttributeError):
        return False


def read_shards_meta(file: Path) -> dict[str, Any]:
    """What a state folder says about itself: its settings, and what training did."""
    try:
        meta = json.loads(file.read_text())
    except (OSError, ValueError):
        raise InputError.of("state", str(file.parent), "a folder that Shards wrote") from None
    if not isinstance(meta, dict) or cast(dict[str, Any], meta).get("format") != FORMAT:
        raise CertificateError(f"{file.parent} is not a state of {FORMAT!r}")
    return cast(dict[str, Any], meta)
