"""A release: the model, the tensors as they are written, and the certificate about them."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from expunge.certificates.certificate import (
    Certificate,
    check_clock,
    check_derived,
    check_digest,
    derive_again,
)
from expunge.certificates.hashes import hash_tensors, write_safetensors
from expunge.certificates.people import Commitment, find_members
from expunge.certificates.record import Adapter, Applied, Record
from expunge.display import is_visible
from expunge.errors import ExpungeError, InputError, UnlearningError, VerificationError
from expunge.files import new_folder, write_atomic

Files = Mapping[str, bytes | Mapping[str, Any]]
WEIGHTS, CERTIFICATE, RECORD = "model.safetensors", "certificate.json", "record.json"


@dataclass(frozen=True)
class Contents:
    """What a release is made of: named tensors, files beside them (bytes, or the named tensors of
    another safetensors file), hashes of an adapter."""

    tensors: Mapping[str, Any]
    files: Files = field(default_factory=dict[str, bytes])
    adapter: Adapter | None = None


@dataclass(frozen=True, eq=False)
class Release:
    """What every route returns.

    ``tensors`` are numpy arrays or torch tensors by name, as they are written; ``files`` lie beside
    them (config.json, adapter/adapter_config.json …); ``relist`` lists both again from a model.
    ``saving`` is what a state runs around the writing of a folder, given that and the certificate's
    bytes.
    """

    model: Any
    certificate: Certificate
    record: Record
    tensors: Mapping[str, Any]
    files: Files = field(default_factory=dict[str, bytes])
    relist: Callable[[Any], Contents] = Contents
    saving: Callable[[Path, bytes], AbstractContextManager[None]] | None = None

    def __repr__(self) -> str:
        """Short, and without the private record."""
        c, kind = self.certificate, type(self.model).__name__
        return (
            f"Release({kind}, method={c.method!r}, epsilon={c.epsilon:.6g}, delta={c.delta:g}, "
            f"people={c.forget.count}, samples={c.forget.samples})"
        )

    def save(self, folder: str | Path) -> Path:
        """Write weights, files, certificate and the private record into a new folder, all at once.

        Weights that changed after the certificate are refused: :meth:`apply` is the way. So is a
        second noisy run of one old model beside the first, until ``releases`` counts both.
        """
        target, certificate = Path(folder), self.certificate.to_bytes()
        self._check_weights()
        if self.record.start == "model":
            used, releases = self.record.weights, self.certificate.releases
            check_releases(target, used.old, releases, used.noisy)
        around = nullcontext() if self.saving is None else self.saving(target, certificate)
        with around, new_folder(target) as place:
            for name, data in {WEIGHTS: self.tensors, **self.files}.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                if isinstance(data, bytes):
                    write_atomic(place / name, data)
                else:
                    write_safetensors(place / name, data, {"format": "pt"})
            write_atomic(place / CERTIFICATE, certificate)
            if self.certificate.weights.adapter is not None:  # it may be published by itself
                write_atomic(place / "adapter" / CERTIFICATE, certificate)
            self.record.save(place / RECORD)
        return target

    def _check_weights(self) -> None:
        if hash_tensors(self.tensors) != self.certificate.weights.after:
            raise UnlearningError(
                "the weights changed after they were certified (an evaluation in train mode moves "
                "running statistics, too); Release.apply(function, note) is the way to change a "
                "release that is as it was certified"
            )

    def apply(self, function: Callable[[Any], Any], note: str) -> Release:
        """The release after ``function(model)``, which changes it in place or returns another.

        It must be a function of the released tensors alone (quantising, pruning, merging): then it
        is post-processing, and the guarantee stays. The certificate says that it was applied. It is
        given a copy: this release stays as it is.
        """
        if not isinstance(note, str) or not note.strip() or not is_visible(note):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError.of("note", note, "a few words in one line: what was done")
        self._check_weights()
        own = copy.deepcopy(self.model)
        changed = function(own)
        model = own if changed is None else changed
        contents, before = self.relist(model), self.record.weights
        weights = before.model_copy(update=describe_contents(contents))
        step = Applied(note=note, before=before.after, after=weights.after)
        applied = (*self.record.applied, step)
        record = self.record.model_copy(update={"weights": weights, "applied": applied})
        certificate = derive_again(record, self.certificate)
        made = {"model": model, "certificate": certificate, "record": record}
        return replace(self, **made, tensors=contents.tensors, files=contents.files)


def check_releases(target: Path, old: str | None, releases: int, noisy: str | None = None) -> None:
    """Refuse a noisy run of ``old`` beside others of it that ``releases`` does not count.

    Releases of one noisy run (moved, copied, quantised) count once.
    """
    others = dict[str | None, Path]()
    for place in target.parent.glob(f"*/{RECORD}"):
        try:
            stated = Certificate.load(place.with_name(CERTIFICATE))
        except ExpungeError:
            continue  # nothing that was released
        if stated.start != "model":
            continue
        try:
            check_record(stated, record := Record.load(place), place.parent)
        except ExpungeError as error:
            raise InputError(
                f"{place.parent} is a noisy run and cannot be counted: {error}; move it elsewhere "
                "if it is of another old model"
            ) from None
        if record.weights.old == old and record.weights.noisy != noisy:
            others[record.weights.noisy] = place.parent
    if (count := 1 + len(others)) > releases:
        raise InputError(
            f"{next(iter(others.values()))} is a noisy run of the same old model; together they "
            f"say more than this certificate: give releases={count}, or parent= to start from that "
            "release"
        )


def describe_contents(contents: Contents, after: str | None = None) -> dict[str, Any]:
    """The fields of ``Weights`` that say what is released: after, files, adapter."""
    files = {
        name: hashlib.sha256(data).hexdigest()
        for name, data in contents.files.items()
        if isinstance(data, bytes)
    }
    after = hash_tensors(contents.tensors) if after is None else after
    return {"after": after, "files": files, "adapter": contents.adapter}


@dataclass(frozen=True)
class Parent:
    """The release before: its certificate, and its record where that is at hand."""

    certificate: Certificate
    record: Record | None

    @property
    def requests(self) -> tuple[Commitment, ...]:
        """Commitments to the people of this release and all before: a record's ``earlier``."""
        return () if self.record is None else (*self.record.earlier, self.record.forget)

    def find_returned(self, people: Iterable[str]) -> list[str]:
        """Those of ``people`` whom this release or one before forgot."""
        names = list(people)
        found = {name for request in self.requests for name in find_members(request, names)}
        return [name for name in names if name in found]


def check_record(certificate: Certificate, record: Record | None, where: object) -> None:
    """Refuse a record that is not the one its certificate names."""
    if record is not None and record.sha256 != certificate.record:
        raise VerificationError(
            f"{RECORD} of {where} has the hash {record.sha256}; its certificate names "
            f"{certificate.record}"
        )


def read_parent(parent: Release | Certificate | str | Path | None, created: str) -> Parent | None:
    """The parent of a run that begins now (``created``): a wrong clock, a certificate that
    contradicts itself and another record than its own are refused right away."""
    match parent:
        case None:
            return None
        case Release(certificate=certificate, record=record):
            found = Parent(certificate, record)
        case Certificate():
            found = Parent(parent, None)
        case str() | Path():
            place = Path(parent)
            file = place / CERTIFICATE if place.is_dir() else place
            record = file.with_name(RECORD)
            found = Parent(Certificate.load(file), Record.load(record) if record.exists() else None)
        case _:
            raise InputError.of("parent", parent, "a Release, a run's folder or a Certificate")
    if problems := check_clock(created, found.certificate):
        raise InputError(problems[0])
    if problems := [*check_digest(found.certificate), *check_derived(found.certificate)]:
        raise VerificationError(f"the certificate of the parent does not hold: {problems[0]}")
    check_record(found.certificate, found.record, "the parent")
    return found
