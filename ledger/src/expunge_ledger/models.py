"""A model as the ledger sees it: who is in it, and a release without them.

The only place where ``expunge`` itself is asked: a state (:func:`expunge.open_state`), or a job for
anything else (:func:`expunge.run_job`). What cannot be read is an error: it must never become the
answer that somebody is not in it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tomllib
import unicodedata
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import expunge
from expunge import CertificateError, ExpungeError, VerificationError
from expunge_ledger.keys import hash_bytes

Sign = Callable[[str], str]  # the keyed tag of a certificate's SHA-256


class Model:
    """A state or a job, opened when it is first asked."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.kind = "job" if self.path.is_file() else "state"

    @functools.cached_property
    def opened(self) -> Any:
        """What expunge gives for it, with everything there that its manifest names: who is not
        found in a state that lost rows may have been in those."""
        try:
            named = json.loads(self._manifest)["files"] if self._manifest else {}
            for one in named.values():
                if (self.path / one["file"]).stat().st_size != one["size"]:
                    raise ValueError(f"{one['file']} is not what was written")  # noqa: TRY301
            return expunge.open_state(self.path)
        except ExpungeError:
            raise
        except (OSError, ValueError, KeyError) as error:
            raise CertificateError(f"{self.kind} {self.path} is damaged: {error}") from None

    @property
    def _manifest(self) -> bytes:
        manifest = self.path / "manifest.json"
        return manifest.read_bytes() if manifest.is_file() else b""

    @property
    def identity(self) -> str:
        """What a copy has in common with it; of a job that is its kind alone."""
        own = "job" if self.kind == "job" else f"state {self.opened.identity}"
        return hash_bytes(own.encode())

    @property
    def generation(self) -> str | None:
        """What changes whenever somebody is learned or forgotten, and is not the same again after
        a backup was restored; None of a job."""
        if self.kind == "job":
            return None
        return hash_bytes(f"{self.opened.generation} ".encode() + self._manifest)

    @property
    def everybody(self) -> frozenset[str]:
        """All who are in the data of a job."""
        return frozenset(self.opened.people)

    def find(self, people: Collection[str]) -> frozenset[str]:
        """Those of the people who are in it."""
        return frozenset(self.opened.holds(sorted(people))) if people else frozenset()

    def find_forgotten(self, people: Collection[str]) -> frozenset[str]:
        """Those of the people whom a state remembers as forgotten, whoever asked for that."""
        asked = sorted(people) if self.kind == "state" else []
        return frozenset(self.opened.forgot(asked)) if asked else frozenset()

    def find_similar(self, people: Collection[str]) -> frozenset[str]:
        """Those of the people, none of whom is in it, of whom another spelling is: a job has all
        names, a state is asked for the usual ones."""
        if self.kind == "job":
            folded = {fold(name) for name in self.everybody}
            return frozenset(name for name in people if fold(name) in folded)
        there = self.find({other for name in people for other in spell(name)})
        return frozenset(name for name in people if there.intersection(spell(name)))

    def forget(
        self, people: Sequence[str], directory: Path, parent: Path | None, sign: Sign
    ) -> str:
        """Write the release without some people; returns the SHA-256 of its certificate.

        Beside it lies what only the ledger's key can ``sign``, written before the folder has its
        name: one that is there is not written again, and one that nobody signed is refused.
        """
        if is_written(directory):
            return check_mark(directory, sign)
        directory.parent.mkdir(parents=True, exist_ok=True)
        if self.kind == "state":
            release = self.opened.forget(people)
            add_mark(directory, sign(release.certificate.sha256))
            release.save(directory)
            return release.certificate.sha256
        # Nobody but this run knows the draft's name before it is there; a kill leaves only that.
        with TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as place:
            draft = Path(place) / "release"
            release = expunge.run_job(self.path, forget=people, out=draft, parent=parent)
            add_mark(directory, sign(release.certificate.sha256))
            if is_written(directory):
                return check_mark(directory, sign)  # another worker was faster
            draft.replace(directory)
        sync_folder(directory.parent)
        return release.certificate.sha256

    def hash_weights(self) -> str:
        """SHA-256 of the old weights of a job: a file, or all files of a folder."""
        given = tomllib.loads(self.path.read_text("utf-8-sig")).get("model", {}).get("old")
        place, digest = self.path.parent / str(given), hashlib.sha256()
        for file in (sorted(place.rglob("*")) or [place]) if given else []:
            if file.is_file():
                digest.update(hash_bytes(file.read_bytes()).encode())
        return digest.hexdigest()


def fold(name: str) -> str:
    """What two spellings have in common that differ in case or width alone."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


def spell(name: str) -> set[str]:
    """Spellings of a name that people take for the same, its own left out.

    >>> sorted(spell("Ann"))
    ['ANN', 'ann']
    """
    plain = unicodedata.normalize("NFKC", name)
    forms = (str, str.lower, str.upper, str.title)
    return {form(text) for text in (name, plain) for form in forms} - {name}


def is_written(directory: Path) -> bool:
    """Whether a release is there; it appears as a whole or not at all."""
    return (directory / "certificate.json").is_file()


def is_touched(directory: Path) -> bool:
    """Whether anything of a release is there, finished or not."""
    here = (f"{directory.name}*", f".{directory.name}*")
    return any(path for name in here for path in directory.parent.glob(name))


def add_mark(directory: Path, signed: str) -> None:
    """Say that the ledger's own run made a release; slow workers may have made several."""
    mark = directory.with_name(f".{directory.name}.mark")
    with open(mark, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
        file.write(f"{signed}\n".encode())
        file.flush()
        os.fsync(file.fileno())
    sync_folder(directory.parent)


def check_mark(directory: Path, sign: Sign) -> str:
    """The SHA-256 of a release's certificate, if the ledger's own run made it."""
    sha256 = hash_bytes(read_certificate(directory))
    mark = directory.with_name(f".{directory.name}.mark")
    if not mark.is_file() or sign(sha256).encode() not in mark.read_bytes().split():
        raise VerificationError(
            f"{directory} was not written by a run of this ledger; remove it, and work again"
        )
    return sha256


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable, where the system lets a folder be opened."""
    if hasattr(os, "O_DIRECTORY"):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(handle)
        os.close(handle)


def read_certificate(directory: Path, sha256: str | None = None) -> bytes:
    """The certificate's bytes, if they are those of this SHA-256."""
    path = directory / "certificate.json"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{path} cannot be read: {error.strerror}") from None
    if sha256 is not None and hash_bytes(data) != sha256:
        raise VerificationError(f"{path} is not the certificate that the ledger knows")
    return data


def check_release(
    directory: Path, people: Iterable[str], sha256: str | None = None, last: bool = True
) -> expunge.Certificate:
    """The certificate, if everything holds: by the weights, by the record, for just these people.
    Only the ``last`` release of a model must still have its weights and the files beside them."""
    data = read_certificate(directory, sha256)
    certificate = expunge.verify(directory, people=sorted(set(people))).certificate
    names = ["model.safetensors", *certificate.weights.files]
    if certificate.weights.adapter is not None:
        names.append("adapter/adapter_model.safetensors")
    for name in names if last else ():
        if not (directory / name).is_file():
            raise VerificationError(f"{directory} has no {name} any more")
    if not certificate.releasable:
        said = "; ".join(certificate.warnings)
        raise VerificationError(f"{directory} is not for release: {said}")
    if read_certificate(directory) != data:
        raise VerificationError(f"{directory} was exchanged while it was read")
    return certificate
