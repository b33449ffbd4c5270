"""Kills, flipped bits and part-restores of a state folder: each refused by name, or harmless."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from expunge import open_state
from expunge.errors import ExpungeError
from expunge.files import new_folder, write_atomic
from expunge.manifests import Announced, Entry, Manifest
from expunge.states import State
from tests.helpers.deaths import flip_bit, kill_at, restore_parts

PEOPLE = [f"person-{i:02d}" for i in range(12)]


def place(person: str) -> str:
    return f"rows/{PEOPLE.index(person) % 3}"


def read_rows(state: State, name: str) -> list[str]:
    return bytes(state.read(name)).decode().split() if name in state else []


def list_people(state: State) -> list[str]:
    return sorted(person for name in state.names("rows/") for person in read_rows(state, name))


def find(state: State, marks: frozenset[bytes]) -> set[bytes]:
    return marks & {state.mark(state.name(person)) for person in list_people(state)}


def learn(state: State, people: list[str], readmit: bool = False) -> None:
    with state.writing():
        state.check_returned(lambda marks: find(state, marks))
        back = state.find_readmitted(people, readmit)
        names = {place(person) for person in people}
        rows = {name: {*read_rows(state, name), *_only(people, name)} for name in names}
        inside = sorted({*list_people(state), *people})
        state.commit(_encode(rows) | {"sums": " ".join(inside).encode()}, readmit=back)


def forget(state: State, people: list[str], out: Path | None = None) -> None:
    """Take people out of rows and sums, then write a certificate that names who is left."""
    with state.writing():
        marks = {state.mark(state.name(person)): person for person in people}
        state.check_returned(lambda found: find(state, found), marks)
        inside = list_people(state)
        gone = {mark: 1 for mark, person in marks.items() if person in inside}
        names = {place(person) for person in people}
        rows = {name: set(read_rows(state, name)).difference(people) for name in names}
        left = [person for person in inside if person not in people]
        state.commit(_encode(rows) | {"sums": " ".join(left).encode()}, forget=gone)
        if out is not None and not out.exists():
            rows = sum(state.pending.get(mark, 0) for mark in marks)
            text = certify(
                state.parent, len(people), f"{rows}|{bytes(state.read('sums')).decode()}"
            )
            with state.saving(marks)(out, text), new_folder(out) as draft:
                write_atomic(draft / "certificate.json", text)


def certify(parent: bytes | None, count: int, text: str = "") -> bytes:
    digest = None if parent is None else hashlib.sha256(parent).hexdigest()
    return json.dumps({"parent": digest, "forget": {"count": count}, "text": text}).encode()


def release(state: State) -> list[str]:
    """Who is in what a release would be made from: sums and rows must be read and must agree."""
    with state.writing():
        state.check_returned(lambda marks: find(state, marks))
        people = bytes(state.read("sums")).decode().split()
        assert people == list_people(state)
        return people


def _only(people: list[str], name: str) -> list[str]:
    return [person for person in people if place(person) == name]


def _encode(rows: dict[str, set[str]]) -> dict[str, bytes | None]:
    return {name: " ".join(sorted(found)).encode() or None for name, found in rows.items()}


def begin(folder: Path) -> State:
    state = State.create(folder, "example", {})
    learn(state, PEOPLE[:8])
    forget(state, PEOPLE[:2])
    return state


@pytest.mark.parametrize("what", ["learn", "forget"])
def test_kills_at_every_moment_lose_nothing_and_answer_nothing_twice(
    tmp_path: Path, what: str
) -> None:
    begin(tmp_path / "start")
    killed, step = 0, 0
    while True:
        step += 1 if what == "learn" else 2
        folder, out = tmp_path / f"state-{step}", tmp_path / f"run-{step}"
        shutil.copytree(tmp_path / "start", folder)

        def work(folder: Path = folder, out: Path = out) -> None:
            state = State.open(folder)
            if what == "learn":
                learn(state, PEOPLE[8:])
            else:
                forget(state, PEOPLE[2:4], out)

        died = kill_at(step, work)
        seen = list_people(State.open(folder))
        assert seen in (PEOPLE[2:8], PEOPLE[2:] if what == "learn" else PEOPLE[4:8])
        work()  # the same again
        state = State.open(folder)
        assert release(state) == (PEOPLE[2:] if what == "learn" else PEOPLE[4:8])
        if what == "forget":
            text = (out / "certificate.json").read_bytes()
            assert text == certify(None, 2, f"2|{' '.join(PEOPLE[4:8])}")
            assert state.parent == text
            assert not state.pending.keys() & {state.mark(state.name(p)) for p in PEOPLE[2:4]}
        files = {p for p in folder.rglob("*") if p.is_file()}
        named = {folder / file for file in state.manifest.list_files()}
        assert files == named | {folder / "manifest.json", folder / "lock"}
        assert list(tmp_path.glob(".run*")) == []
        killed += died
        if not died:
            break
    assert killed >= 20, killed


def outcome(folder: Path) -> list[str] | str:
    """A release and a request to an attacked state; the sentence where it is refused."""
    try:
        before = release(State.open(folder))
        forget(State.open(folder), [PEOPLE[7]])
        assert release(State.open(folder)) == [p for p in before if p != PEOPLE[7]]
    except ExpungeError as error:
        return str(error)
    return before


def test_two_hundred_flipped_bits(tmp_path: Path) -> None:
    begin(tmp_path / "start")
    draw = random.Random(0)
    for _ in range(200):
        file = flip_bit(tmp_path / "start", tmp_path / "state", draw)
        found = outcome(tmp_path / "state")
        assert isinstance(found, str), file
        assert file.name in found


def test_a_hundred_part_restores(tmp_path: Path) -> None:
    """Any choice of files of any two days, copied over or in place of the others."""
    state = begin(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "day-0")
    learn(state, PEOPLE[8:10])
    shutil.copytree(tmp_path / "state", tmp_path / "day-1")
    forget(state, PEOPLE[2:5])
    learn(state, [PEOPLE[10]])
    shutil.copytree(tmp_path / "state", tmp_path / "day-2")
    now = [*PEOPLE[5:11]]
    days = {tuple(PEOPLE[2:8]): 0, tuple(PEOPLE[2:10]): 1, tuple(now): 2}
    draw, harmless, refused = random.Random(1), 0, 0
    for trial in range(150):
        target, old = tmp_path / "now", tmp_path / f"day-{draw.randrange(2)}"
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(tmp_path / "day-2", target)
        groups = sorted({p.relative_to(old).as_posix().split(".")[0] for p in old.rglob("*")})
        chosen = [group for group in groups if draw.random() < 0.5] or ["manifest"]
        if trial % 3 == 0:
            chosen = groups
        restore_parts(old, target, chosen, lambda g: draw.random() < 0.5 and g != "forgotten")
        found = outcome(target)
        if isinstance(found, str):
            assert "is damaged: " in found or "of the forgotten are in the state" in found
            refused += 1
        else:
            assert days[tuple(found)] == 2, chosen  # nobody comes back under a newer list
            harmless += 1
    assert min(refused, harmless) >= 15


def restore(backup: Path, folder: Path) -> None:
    """Every file of a backup, over what is there: newer lists of the forgotten stay."""
    for file in backup.rglob("*"):
        if file.is_file():
            shutil.copy(file, folder / file.relative_to(backup))


def test_a_whole_older_folder_under_a_newer_list_takes_a_request_again(tmp_path: Path) -> None:
    state = begin(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    forget(state, PEOPLE[2:5])
    restore(tmp_path / "backup", tmp_path / "state")
    state = State.open(tmp_path / "state")
    for work in (release, lambda s: learn(s, [PEOPLE[9]]), lambda s: forget(s, [PEOPLE[6]])):
        with pytest.raises(ExpungeError, match="3 of the forgotten are in the state"):
            work(state)
    forget(state, PEOPLE[2:7])
    assert release(state) == [PEOPLE[7]]


def test_an_announcement_in_a_backup_does_not_outdate_a_newer_list(tmp_path: Path) -> None:
    """Its recovery would write a generation above the list's, and who is in it would be back."""
    state = begin(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    path = tmp_path / "backup" / "manifest.json"
    said = Announced((), str(tmp_path / "nowhere"), "00")
    made = replace(Manifest.from_bytes(path.read_bytes()), announced=said)
    path.write_bytes(made.to_bytes())
    forget(state, PEOPLE[2:5])
    restore(tmp_path / "backup", tmp_path / "state")
    for _ in range(3):
        with pytest.raises(ExpungeError, match="3 of the forgotten are in the state"):
            release(State.open(tmp_path / "state"))
    forget(State.open(tmp_path / "state"), PEOPLE[2:5])
    assert release(State.open(tmp_path / "state")) == PEOPLE[5:8]
    assert State.open(tmp_path / "state").manifest.announced is None


@pytest.mark.parametrize("with_list", [True, False])
def test_a_release_made_before_a_restore_is_not_saved(tmp_path: Path, with_list: bool) -> None:
    """It would say of people that they are gone who are here again."""
    state = begin(tmp_path / "state")
    shutil.copytree(tmp_path / "state", tmp_path / "backup")
    forget(state, PEOPLE[2:5])
    save = state.saving(map(state.mark, map(state.name, PEOPLE[2:5])))
    if not with_list:
        shutil.rmtree(tmp_path / "state")
        shutil.copytree(tmp_path / "backup", tmp_path / "state")
    restore(tmp_path / "backup", tmp_path / "state")
    with (
        pytest.raises(ExpungeError, match="a backup was restored since this release"),
        save(tmp_path / "run", certify(None, 3)),
    ):
        pytest.fail("nothing is written")
    if with_list:
        with pytest.raises(ExpungeError, match="3 of the forgotten are in the state"):
            release(State.open(tmp_path / "state"))


@pytest.mark.parametrize("named", ["../victim", "/{}/victim", "rows/../../victim", "key"])
def test_a_manifest_that_names_files_elsewhere(tmp_path: Path, named: str) -> None:
    """Whoever edits it makes every hash in it right again; a commit would remove the file."""
    begin(tmp_path / "state")
    digest = hashlib.sha256(b"precious").hexdigest()
    name = named.format(str(tmp_path).strip("/"))
    victim = tmp_path / f"victim.{digest[:24]}"
    victim.write_bytes(b"precious")
    path = tmp_path / "state" / "manifest.json"
    made = Manifest.from_bytes(path.read_bytes())
    entry = Entry(f"{name}.{digest[:24]}", digest, 8)
    path.write_bytes(replace(made, files={**made.files, "rows/9": entry}).to_bytes())
    with pytest.raises(ExpungeError, match=r"manifest\.json is not what was written"):
        State.open(tmp_path / "state")
    path.write_bytes(replace(made, files={**made.files, name: entry}).to_bytes())
    with pytest.raises(ExpungeError, match=r"is damaged: "), State.open(path.parent).writing():
        pass
    assert victim.read_bytes() == b"precious"


def test_a_link_to_another_state_removes_nothing_there(tmp_path: Path) -> None:
    begin(tmp_path / "one")
    begin(tmp_path / "other")
    (tmp_path / "one" / "rows.old").symlink_to(tmp_path / "other")
    release(State.open(tmp_path / "one"))
    assert release(State.open(tmp_path / "other")) == PEOPLE[2:8]


def test_an_announcement_of_another_release_is_taken_back(tmp_path: Path) -> None:
    """Nobody stops being pending by a certificate that is not this state's next."""
    state = begin(tmp_path / "state")
    forget(state, PEOPLE[2:4], tmp_path / "first")
    forget(state, PEOPLE[4:5])
    parent, path = state.parent, tmp_path / "state" / "manifest.json"
    for number, fake in enumerate((b"", b"[]", certify(None, 3), certify(parent, 1))):
        out = tmp_path / f"fake-{number}"
        out.mkdir()
        (out / "certificate.json").write_bytes(fake)
        made = Manifest.from_bytes(path.read_bytes())
        said = Announced(tuple(made.pending), str(out), hashlib.sha256(fake).hexdigest())
        path.write_bytes(replace(made, announced=said).to_bytes())
        release(State.open(path.parent))
        found = State.open(path.parent)
        assert (found.parent, len(found.pending)) == (parent, 3)
        assert found.manifest.announced is None


@pytest.mark.parametrize("pending", [{"00" * 16: -3}, {"ann": 1}, {"ab": 1}])
def test_people_who_cannot_be_pending(tmp_path: Path, pending: dict[str, int]) -> None:
    """A certificate would say of fewer examples than there were that they are gone."""
    begin(tmp_path / "state")
    path = tmp_path / "state" / "manifest.json"
    made = Manifest.from_bytes(path.read_bytes())
    path.write_bytes(replace(made, pending=pending).to_bytes())
    with pytest.raises(ExpungeError, match=r"manifest\.json is not what was written"):
        State.open(path.parent)


def test_settings_of_no_shards(tmp_path: Path) -> None:
    State.create(tmp_path / "state", "shards", {"shards": "2", "slices": 2})
    with pytest.raises(ExpungeError, match=r"manifest\.json has settings of no shards"):
        open_state(tmp_path / "state").holds(["ann"])
