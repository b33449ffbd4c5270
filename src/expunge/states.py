"""A state folder: what a model built to forget is made from, in files that know when they are not
themselves.

    state/manifest.json            format, kind, generation, settings, and the SHA-256 of every file
    state/NAME.<sha256 prefix>     content: never overwritten, a new version is a new file
    state/forgotten.<generation>.<sha256 prefix>     keyed hashes of the forgotten: evidence
    state/lock                     one process changes a state at a time; readers need no lock

*A change* (:meth:`State.commit`) writes new content, makes it durable, then the list of the
forgotten if it changes, then the manifest by one rename, and removes what is no longer named. A
kill at any moment leaves the state before or after it; whoever opens it for writing next removes
what a killed process left. The manifest holds its own SHA-256.

*A flipped bit or a restored part* is refused by name when it is read: small files whenever the
state is opened for writing, large ones when a request reads them. A list of the forgotten that is
newer than the manifest says that an older folder was restored: whoever is in that list and in the
state again (:meth:`State.check_returned`) stops everything but a request to forget them.

*Release N exists.* A commit that removes people makes them ``pending`` in the same rename. When the
release is saved, :meth:`State.saving` records which certificate is about to be written where, the
folder is written by one rename, and the certificate becomes the state's last: the parent of the
next. After a kill between any two of these the next writer looks whether the folder is there. The
same request again finds its people pending, with the rows that they had.

At rest the bytes are a function of what is in the state and of its key, but for the generation
number, the list of the forgotten, and the last certificate with who is pending.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import re
import secrets
import threading
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from expunge.errors import InputError, RunError, UnlearningError
from expunge.files import lock, new_folder, open_private, sync_files, sync_folder, write_atomic
from expunge.manifests import Announced, Entry, Manifest, damaged, read_manifest

HASH_BYTES = 16
_SMALL = 65_536
_LEFT = re.compile(r".+\.[0-9a-f]{24}|\..+\.tmp")
_LIST = re.compile(r"forgotten\.([0-9]{12})\.[0-9a-f]{24}")
Change = bytes | memoryview | None


class State:
    """A state in ``path``, or in memory where that is None.

    >>> state = State.create(None, "example", {"width": 2})
    >>> with state.writing():
    ...     state.commit({"rows/a": b"12", "rows/b": b"3"})
    ...     state.commit({"rows/a": b"1"}, forget={state.mark(state.name("ann")): 1})
    >>> [(name, bytes(state.read(name))) for name in state.names("rows/")]
    [('rows/a', b'1'), ('rows/b', b'3')]
    >>> state.is_forgotten("ann"), state.is_forgotten("bob"), len(state.pending)
    (True, False, 1)
    """

    def __init__(self, path: Path | None, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.unsettled: frozenset[bytes] = frozenset()
        self._memory: dict[str, bytes] = {}
        self._checked: dict[str, tuple[int, ...]] = {}
        self._listed: frozenset[bytes] = frozenset()
        self._newest, self._writer = manifest.generation, 0

    @classmethod
    def create(cls, path: str | Path | None, kind: str, settings: Mapping[str, Any]) -> State:
        """A new, empty state with a key of its own; ``path`` must be free."""
        key = secrets.token_bytes(32)
        manifest = Manifest(kind, 1, _to_json(settings), {"key": Entry("", "", len(key))})
        made = cls(None, manifest)
        made._memory["key"] = key
        return made if path is None else made.copy(path)

    @classmethod
    def open(cls, path: str | Path, kind: str | None = None) -> State:
        """The state in a folder; one of another ``kind`` is refused."""
        folder = Path(path).absolute()
        made = cls(folder, read_manifest(folder))
        if kind is not None and made.manifest.kind != kind:
            valid = f"a state of {kind}; it is one of {made.manifest.kind}"
            raise InputError.of("state", str(path), valid)
        made.refresh()
        return made

    @property
    def generation(self) -> int:
        """How often the state was changed; another number, another state."""
        return self.manifest.generation

    @property
    def identity(self) -> str:
        """What tells this state from every other, wherever it lies: a hash of its key."""
        return self.hash(b"", b"identity").hex()

    @property
    def settings(self) -> Mapping[str, Any]:
        """What the state's owner wrote about it: plain values."""
        return self.manifest.settings

    @property
    def pending(self) -> dict[bytes, int]:
        """Rows by mark of those who are gone and named by no written certificate."""
        return {bytes.fromhex(mark): rows for mark, rows in self.manifest.pending.items()}

    @property
    def forgotten(self) -> frozenset[bytes]:
        """Marks of everybody who was forgotten and not learned again on purpose."""
        return self._listed | self.unsettled

    @property
    def parent(self) -> bytes | None:
        """The last written certificate."""
        return bytes(self.read("certificate.json")) if "certificate.json" in self else None

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.files

    def names(self, prefix: str = "") -> list[str]:
        """The names of contents that begin so, in order."""
        return sorted(name for name in self.manifest.files if name.startswith(prefix))

    @functools.cached_property
    def _key(self) -> bytes:
        return bytes(self.read("key"))

    def name(self, identifier: str) -> bytes:
        """The keyed hash that stands for an identifier: no identifier is written."""
        return self.hash(identifier.encode("utf-8", "surrogatepass"), b"person")

    def mark(self, name: bytes) -> bytes:
        """The keyed hash that stands for a name in the list of the forgotten."""
        return self.hash(name, b"forgotten")

    def hash(self, data: bytes, purpose: bytes) -> bytes:
        """A keyed hash; the key is the state's own, so the same data look otherwise elsewhere."""
        return hashlib.blake2b(data, digest_size=HASH_BYTES, key=self._key, person=purpose).digest()

    def is_forgotten(self, identifier: str) -> bool:
        """Whether somebody is in the list of the forgotten."""
        return self.mark(self.name(identifier)) in self.forgotten

    def find_readmitted(self, identifiers: Iterable[str], readmit: bool) -> frozenset[bytes]:
        """Marks of those who were forgotten and are learned again: refused unless on purpose."""
        marks = {self.mark(self.name(i)): i for i in identifiers} if self.forgotten else {}
        back = self.forgotten.intersection(marks)
        if back and not readmit:
            shown = ", ".join(sorted(repr(marks[mark]) for mark in back)[:3])
            raise InputError(
                f"{len(back)} of these people were forgotten before, such as {shown}; leave them "
                "out, or pass readmit=True to learn them again on purpose"
            )
        return back

    def check_returned(
        self, find: Callable[[frozenset[bytes]], Collection[bytes]], leaving: Iterable[bytes] = ()
    ) -> None:
        """Refuse while people of a newer list are in the state, but for those ``leaving``.

        ``find(marks)`` returns those of the marks who are in the state. It is asked only where the
        list of the forgotten is newer than the state.
        """
        again = set(find(self.unsettled)) - set(leaving) if self.unsettled else set[bytes]()
        if again:
            raise UnlearningError(
                f"{len(again)} of the forgotten are in the state {self.path} again, as after a "
                "backup was restored or a request was killed; forget them again, all in one "
                "request, before anything else"
            )

    def read(self, name: str) -> memoryview:
        """A content, as a read-only map of its file, which was compared with the manifest."""
        if self.path is None:
            return memoryview(self._memory[name])
        try:
            return self._read(self.path, self.manifest.files[name])
        except FileNotFoundError as error:
            self._check_replaced(self.path, error)
            self.refresh()
            return self.read(name)

    def refresh(self) -> None:
        """Read the manifest again: another process may have changed the state."""
        while self.path is not None:
            self.manifest = read_manifest(self.path)
            try:
                self._read_lists(self.path)
                break
            except FileNotFoundError as error:
                self._check_replaced(self.path, error)

    def _check_replaced(self, folder: Path, error: FileNotFoundError) -> None:
        """A file that is gone was replaced by another process, or it is missing."""
        if read_manifest(folder).generation == self.generation:
            raise damaged(folder, Path(error.filename).name, "is missing") from None

    def _read(self, folder: Path, entry: Entry) -> memoryview:
        with (folder / entry.file).open("rb") as file:
            found = os.fstat(file.fileno())
            size = found.st_size
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        stamp = found.st_ino, found.st_mtime_ns, found.st_ctime_ns, size
        if self._checked.get(entry.file) != stamp:
            if size != entry.size or hashlib.sha256(data).hexdigest() != entry.sha256:
                raise damaged(folder, entry.file, "is not what was written")
            self._checked[entry.file] = stamp
        return memoryview(data)

    def _read_lists(self, folder: Path) -> None:
        """The manifest's list of the forgotten, and newer ones: then an older folder is here."""
        entry = self.manifest.forgotten
        self._listed = _split_marks(b"" if entry is None else bytes(self._read(folder, entry)))
        newer, self._newest = set[bytes](), self.generation
        for file in _find_newer(folder, self.generation):
            data = file.read_bytes()
            if not file.name.endswith(hashlib.sha256(data).hexdigest()[:24]):
                raise damaged(folder, file.name, "is not what was written")
            newer |= _split_marks(data)
            self._newest = max(self._newest, int(file.name.split(".")[1]))
        self.unsettled = frozenset(newer - self._listed)

    @contextmanager
    def writing(self) -> Generator[None]:
        """The lock, with the newest manifest, small files checked, what a kill left completed."""
        if self.path is None or self._writer == threading.get_ident():
            yield
            return
        taken = f"another process is working on the state {self.path}; try again when it is done"
        if not self.path.is_dir():
            raise InputError.of("state", str(self.path), "a folder that holds a state")
        with lock(self.path / "lock", taken):
            self.refresh()
            self._check_files(self.path)
            self._writer = threading.get_ident()
            try:
                self._remove_leftovers(self.path)
                self._recover()
                yield
            finally:
                self._writer = 0

    def commit(
        self,
        changes: Mapping[str, Change],
        *,
        forget: Mapping[bytes, int] | None = None,
        readmit: Iterable[bytes] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """Replace contents, all or nothing; None removes one.

        ``forget`` are the marks of those who go and how many rows they had: they enter the list of
        the forgotten and are pending. ``readmit`` are those who leave that list.
        """
        gone = dict(forget or {})
        listed = (self.forgotten | gone.keys()) - set(readmit)
        people = self.pending | {mark: self.pending.get(mark, 0) + gone[mark] for mark in gone}
        kept = {mark.hex(): rows for mark, rows in people.items() if mark in listed}
        own = self.settings if settings is None else _to_json(settings)
        self._write(changes, listed, settings=own, pending=kept)

    def _write(
        self, changes: Mapping[str, Change], listed: frozenset[bytes] | None = None, **fields: Any
    ) -> None:
        """A manifest after ``changes``, with this list of the forgotten and these ``fields``."""
        listed = self._listed if listed is None else listed
        files = {n: e for n, e in self.manifest.files.items() if n not in changes}
        given = [(name, data) for name, data in sorted(changes.items()) if data is not None]
        generation, entry = max(self.generation, self._newest) + 1, self.manifest.forgotten
        if self.path is None:
            self._memory = {name: self._memory[name] for name in files}
            for name, data in given:
                self._memory[name] = bytes(data)
                files[name] = Entry("", str(generation), len(data))
            self.manifest = replace(self.manifest, files=files, generation=generation, **fields)
            self._listed = listed
            return
        if self._writer != threading.get_ident():
            raise RunError(f"the state {self.path} is changed inside of its writing() alone")
        before, folder = self.manifest.list_files(), self.path
        try:
            for name, data in given:
                files[name] = _write_content(folder, name, data, before)
            if listed != self._listed or self.unsettled:
                entry = _write_list(folder, generation, listed)
            made = replace(
                self.manifest, files=files, generation=generation, forgotten=entry, **fields
            )
            places = [folder / file for file in made.list_files() - before]
            sync_files(places)
            for place in {place.parent for place in places}:
                sync_folder(place)
            write_atomic(folder / "manifest.json", made.to_bytes(), private=True)
        except OSError as error:
            for file in _find_newer(folder, generation - 1):
                file.unlink()
            raise RunError(
                f"the state {folder} could not be written ({error.strerror}); nothing is lost: "
                "make room and call again"
            ) from None
        newer = {file.name for file in _find_newer(folder, self.generation)}
        self.manifest, self._newest = made, generation
        self._listed, self.unsettled = listed, frozenset()
        for file in before - made.list_files() | newer:
            if entry is None or file != entry.file:
                (folder / file).unlink(missing_ok=True)
                self._checked.pop(file, None)

    def _check_files(self, folder: Path) -> None:
        """Everything the manifest names is there; small files are also what was written."""
        for entry in self.manifest.files.values():
            try:
                if entry.size <= _SMALL:
                    self._read(folder, entry)
                elif (folder / entry.file).stat().st_size != entry.size:
                    raise damaged(folder, entry.file, "is not what was written")
            except FileNotFoundError as error:
                self._check_replaced(folder, error)

    def _remove_leftovers(self, folder: Path) -> None:
        """What a killed process left, or somebody restored, and the manifest does not name."""
        named = {folder / file for file in self.manifest.list_files()}
        kept = named.union(_find_newer(folder, self.generation))
        for file in {*folder.glob("*"), *folder.glob("*/*")} - kept:
            linked = file.is_symlink() or (file.parent != folder and file.parent.is_symlink())
            if _LEFT.fullmatch(file.name) and file.is_file() and not linked:
                file.unlink()  # what lies behind a link is not this state's

    def copy(self, target: str | Path) -> State:
        """The same state in a new folder, with its key, its list and its last certificate."""
        with new_folder(target) as draft:
            draft.chmod(0o700)
            files = {name: _write_content(draft, name, self.read(name)) for name in self.names()}
            entry = _write_list(draft, self.generation, self.forgotten) if self.forgotten else None
            made = replace(self.manifest, files=files, forgotten=entry)
            write_atomic(draft / "manifest.json", made.to_bytes(), private=True)
        return State.open(target)

    def saving(
        self, named: Iterable[bytes] = ()
    ) -> Callable[[Path, bytes], AbstractContextManager[None]]:
        """What a release runs around writing its folder, given that and certificate.json's bytes.

        ``named`` are the marks of those whom the certificate names. A release that another one
        overtook is refused: two certificates would have one parent. So is one that was made before
        an older folder was restored: those whom it says to be gone are here again.
        """
        marks, parent = tuple(sorted(mark.hex() for mark in named)), self.parent
        made = self.generation

        @contextmanager
        def save(folder: Path, certificate: bytes) -> Generator[None]:
            with self.writing():
                if self.parent == certificate:
                    yield  # a second copy
                    return
                restored = self.unsettled or self.generation < made
                if restored or self.parent != parent:
                    what = "a backup was restored" if restored else "another release was written"
                    raise UnlearningError(
                        f"{what} since this release of the state {self.path} was made; call "
                        "release() again and save that"
                    )
                out, digest = str(Path(folder).absolute()), hashlib.sha256(certificate).hexdigest()
                self._write({}, announced=Announced(marks, out, digest))
                yield
                self._finish(certificate)

        return save

    def _finish(self, certificate: bytes) -> None:
        assert self.manifest.announced is not None
        named = self.manifest.announced.named
        left = {mark: rows for mark, rows in self.manifest.pending.items() if mark not in named}
        self._write({"certificate.json": certificate}, pending=left, announced=None)

    def _recover(self) -> None:
        """Finish a release whose folder is there; take back the announcement of one that is not.

        Not under a newer list of the forgotten, which the next generation would outdate: that waits
        for the request that settles it.
        """
        if (announced := self.manifest.announced) is not None and not self.unsettled:
            if (certificate := announced.read(self.parent)) is not None:
                self._finish(certificate)
            else:
                self._write({}, announced=None)


def _write_content(
    folder: Path, name: str, data: bytes | memoryview, present: Collection[str] = ()
) -> Entry:
    """A content under the name of its hash, not yet durable; what is ``present`` stays."""
    digest = hashlib.sha256(data).hexdigest()
    entry = Entry(f"{name}.{digest[:24]}", digest, len(data))
    place = folder / entry.file
    place.parent.mkdir(exist_ok=True, mode=0o700)
    if entry.file not in present:
        with open(place, "wb", opener=open_private) as file:
            file.write(data)
    return entry


def _write_list(folder: Path, generation: int, marks: Collection[bytes]) -> Entry:
    """The list of the forgotten: complete or not there, since it is believed without a manifest."""
    data = b"".join(sorted(marks))
    digest = hashlib.sha256(data).hexdigest()
    entry = Entry(f"forgotten.{generation:012d}.{digest[:24]}", digest, len(data))
    write_atomic(folder / entry.file, data, private=True)
    return entry


def _find_newer(folder: Path, generation: int) -> list[Path]:
    """Lists of the forgotten that are newer than a generation."""
    found = ((file, _LIST.fullmatch(file.name)) for file in sorted(folder.glob("forgotten.*")))
    return [file for file, match in found if match and int(match[1]) > generation]


def _split_marks(data: bytes) -> frozenset[bytes]:
    return frozenset(data[at : at + HASH_BYTES] for at in range(0, len(data), HASH_BYTES))


def _to_json(settings: Mapping[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(dict(settings), allow_nan=False))
