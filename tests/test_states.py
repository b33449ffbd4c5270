"""State folders: commits, the list of the forgotten, releases, and lives as bytes."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import InputError, RunError, UnlearningError
from expunge.files import new_folder, write_atomic
from expunge.manifests import Manifest, read_kind
from expunge.states import State


@pytest.fixture
def state(tmp_path: Path) -> State:
    made = State.create(tmp_path / "state", "example", {"sizes": (1, 2)})
    with made.writing():
        made.commit({"rows/1": b"ann bob", "rows/2": b"cid", "sums": b"3"})
    return made


def mark(state: State, identifier: str) -> bytes:
    return state.mark(state.name(identifier))


def forget_ann(state: State) -> None:
    with state.writing():
        state.commit({"rows/1": b"bob", "sums": b"2"}, forget={mark(state, "ann"): 2})


def save(state: State, folder: Path, certificate: bytes, named: tuple[bytes, ...] = ()) -> None:
    with state.saving(named)(folder, certificate), new_folder(folder) as draft:
        write_atomic(draft / "certificate.json", certificate)


def test_what_was_committed_is_read(state: State, tmp_path: Path) -> None:
    again = State.open(tmp_path / "state", "example")
    assert again.settings == {"sizes": [1, 2]}
    assert again.names("rows/") == ["rows/1", "rows/2"]
    assert {name: bytes(again.read(name)) for name in again.names("rows/")} == {
        "rows/1": b"ann bob", "rows/2": b"cid"
    }  # fmt: skip
    assert read_kind(tmp_path / "state") == "example"
    assert read_kind(tmp_path) is None
    assert again.name("ann") != State.create(None, "example", {}).name("ann")
    with pytest.raises(InputError, match="must be a state of linear-model; it is one of example"):
        State.open(tmp_path / "state", "linear-model")
    with pytest.raises(InputError, match="must be a folder that holds a state"):
        State.open(tmp_path)
    with pytest.raises(InputError, match="already holds files"):
        State.create(tmp_path / "state", "example", {})
    with pytest.raises(RunError, match=r"inside of its writing\(\) alone"):
        again.commit({})
    for file in (tmp_path / "state").rglob("*"):
        assert file.stat().st_mode & 0o077 == 0


def test_a_reader_sees_what_another_handle_wrote(state: State, tmp_path: Path) -> None:
    reader = State.open(tmp_path / "state")
    old = reader.read("rows/1")
    forget_ann(state)
    assert bytes(old) == b"ann bob"  # a map outlives its file
    assert bytes(reader.read("rows/1")) == b"bob"
    assert reader.is_forgotten("ann")


def test_one_writer_at_a_time(state: State, tmp_path: Path) -> None:
    other = State.open(tmp_path / "state")
    found: list[BaseException] = []

    def enter() -> None:
        try:
            with state.writing():
                pass
        except RunError as error:
            found.append(error)

    with state.writing(), state.writing():
        with pytest.raises(RunError, match="another process is working on the state"):
            other.writing().__enter__()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(found) == 1
    with other.writing():
        pass


def test_who_was_forgotten_is_learned_again_on_purpose_only(state: State) -> None:
    assert state.find_readmitted(["ann"], readmit=False) == frozenset()
    forget_ann(state)
    with pytest.raises(InputError, match=r"1 of these people were forgotten before, such as 'ann'"):
        state.find_readmitted(["dan", "ann"], readmit=False)
    back = state.find_readmitted(["dan", "ann"], readmit=True)
    with state.writing():
        state.commit({"rows/1": b"ann bob"}, readmit=back)
    assert not state.is_forgotten("ann")
    assert state.pending == {}


@pytest.mark.parametrize("memory", [False, True])
def test_a_release_is_the_parent_of_the_next_once_it_is_written(
    state: State, tmp_path: Path, memory: bool
) -> None:
    if memory:
        state = State.create(None, "example", {})
    forget_ann(state)
    ann = mark(state, "ann")
    assert state.pending == {ann: 2}
    first = state.saving([ann])
    second = state.saving([ann])
    with pytest.raises(OSError, match="full"), first(tmp_path / "run", b"1"):
        raise OSError("full")
    assert (state.parent, state.pending) == (None, {ann: 2})
    save(state, tmp_path / "run", b"1", (ann,))
    assert (state.parent, state.pending) == (b"1", {})
    with pytest.raises(UnlearningError, match="another release"), second(tmp_path / "two", b"2"):
        pass
    save(state, tmp_path / "copy", b"1")
    save(state, tmp_path / "next", b"3")
    assert state.parent == b"3"


def test_a_copy_is_the_same_state(state: State, tmp_path: Path) -> None:
    forget_ann(state)
    save(state, tmp_path / "run", b"1")
    copy = state.copy(tmp_path / "copy")
    assert copy.name("x") == state.name("x")
    assert (copy.forgotten, copy.pending) == (state.forgotten, state.pending)
    assert copy.parent == b"1"
    again = State.create(None, "example", {})
    with again.writing():
        again.commit({"rows/1": b"1"}, forget={mark(again, "x"): 1})
    assert bytes(again.copy(tmp_path / "third").read("rows/1")) == b"1"
    assert State.open(tmp_path / "third").is_forgotten("x")


def list_content(folder: Path) -> dict[str, str]:
    """Every file but evidence: the manifest by what it says about content."""
    told = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    files = {p for p in folder.rglob("*") if p.is_file()}
    named = {folder / file for file in told.list_files()}
    assert files == named | {folder / "manifest.json", folder / "lock"}
    return {name: entry.sha256 for name, entry in told.files.items()}


@settings(max_examples=15)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.binary(max_size=3)), max_size=12))
def test_bytes_at_rest_are_a_function_of_what_is_in_the_state(
    tmp_path_factory: pytest.TempPathFactory, life: list[tuple[str, bytes]]
) -> None:
    folder = tmp_path_factory.mktemp("life") / "state"
    state, inside = State.create(folder, "example", {}), dict[str, bytes]()
    for name, data in life:
        gone = {mark(state, name): 1} if not data else {}
        with state.writing():
            state.commit({f"rows/{name}": data or None}, forget=gone)
        inside = {k: v for k, v in {**inside, name: data}.items() if v}
    expected = {f"rows/{name}": hashlib.sha256(v).hexdigest() for name, v in inside.items()}
    expected["key"] = hashlib.sha256(bytes(state.read("key"))).hexdigest()
    with state.writing():
        assert list_content(folder) == expected


def test_a_full_disk_loses_nothing(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = list_content(tmp_path / "state")
    for name in ("sync_files", "write_atomic"):
        with monkeypatch.context() as patch:
            patch.setattr(f"expunge.states.{name}", fail)
            with pytest.raises(RunError, match=r"No space left.*nothing is lost"):
                forget_ann(state)
        with state.writing():
            assert list_content(tmp_path / "state") == before
    forget_ann(state)
    assert bytes(state.read("rows/1")) == b"bob"
