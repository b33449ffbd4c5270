"""A state of a few lines that keeps expunge's protocol, and writes real certificates.

Names lie in it in clear, and nothing is learned: what the ledger does with a state is tested with
it, thousands of times; ``test_real.py`` does the same once with every kind that expunge has.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

import numpy as np

import expunge
from expunge.certificates.certificate import certify
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.people import commit
from expunge.certificates.record import Code, Record, TrainingRun, Weights
from expunge.certificates.release import Release

FILE = "stand-in.json"


class StandIn:
    def __init__(self, path: Path) -> None:
        self.path, self.kind = path, "stand-in"
        try:
            self.facts: dict[str, Any] = json.loads((path / FILE).read_text())
            assert self.facts["count"] == len(self.facts["people"])
        except (OSError, ValueError, KeyError, AssertionError) as error:
            raise expunge.CertificateError(f"state {path} is damaged: {error!r}") from None
        if (last := Path(self.facts.get("saving", "")) / "certificate.json").is_file():
            self.facts["parent"] = last.read_text()  # killed before it could say so

    @property
    def identity(self) -> str:
        return self.facts["identity"]

    @property
    def generation(self) -> str:
        return self.facts["generation"]

    def holds(self, people: list[str]) -> list[str]:
        return [name for name in people if name in self.facts["people"]]

    def forgot(self, people: list[str]) -> list[str]:
        return [name for name in people if name in self.facts["forgotten"]]

    def forget(self, people: list[str]) -> Saving:
        unknown = [n for n in people if n not in self.facts["people"] + self.facts["forgotten"]]
        if unknown:
            raise expunge.InputError(f"forget names {unknown[0]!r}, who is not in the state")
        left = [name for name in self.facts["people"] if name not in people]
        self.facts["forgotten"] = sorted({*self.facts["forgotten"], *people})
        self.facts |= {"people": left, "count": len(left)}
        self.write()
        return self.release(people)

    def release(self, people: list[str]) -> Saving:
        tensors = {"weight": np.arange(4, dtype=np.float32) + len(self.facts["people"])}
        before = self.facts["parent"]
        parent = None if before is None else expunge.Certificate.from_bytes(before.encode())
        record = Record(
            recipe=expunge.Retraining(), parameters=4, start="build",
            forget=commit(people, len(people)),
            retained=commit(self.facts["people"], len(self.facts["people"])), code=Code(),
            weights=Weights(after=hash_tensors(tensors), start="a" * 64),
            training=TrainingRun(function="expunge.Training", examples=self.facts["count"]),
            parent=None if parent is None else parent.sha256,
        )  # fmt: skip
        return Saving(self, Release(None, certify(record, parent=parent), record, tensors))

    def write(self) -> None:
        self.facts["generation"] = secrets.token_hex(8)
        temporary = self.path / f".{FILE}.{secrets.token_hex(4)}"
        temporary.write_text(json.dumps(self.facts))
        temporary.replace(self.path / FILE)


class Saving:
    def __init__(self, state: StandIn, release: Release) -> None:
        self.state, self.release = state, release
        self.certificate = release.certificate

    def save(self, folder: Path) -> None:
        self.state.facts["saving"] = str(folder)
        self.state.write()
        self.release.save(folder)
        self.state.facts["parent"] = (folder / "certificate.json").read_text()
        self.state.write()


def make_state(folder: Path, *, people: int = 30, start: int = 0) -> Path:
    folder.mkdir(parents=True)
    names = [f"person-{i}" for i in range(start, start + people)]
    facts = {"identity": secrets.token_hex(16), "people": names, "count": people, "forgotten": []}
    (folder / FILE).write_text(json.dumps(facts | {"generation": "0", "parent": None}))
    return folder


def learn_again(folder: Path, *names: str) -> None:
    state = StandIn(folder)
    state.facts["people"] += names
    state.facts["count"] += len(names)
    state.write()


def open_state(path: Path, *given: Any, **more: Any) -> Any:
    """Of a stand-in; anything else is expunge's own."""
    if Path(path).is_dir() and (Path(path) / FILE).exists():
        return StandIn(Path(path))
    if Path(path).is_dir() and not any(Path(path).iterdir()):
        raise expunge.CertificateError(f"state {path} is damaged: it is empty")
    from expunge.jobs.opening import open_state as real

    return real(path, *given, **more)


def install() -> None:
    """Make expunge open stand-ins too."""
    expunge.open_state = open_state  # type: ignore[assignment]
