"""A store without a past: its bytes, its crashes, its readers."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from expunge.errors import InputError, RunError
from expunge.forgettable import store as stores
from expunge.forgettable.store import Layout, Store, arrange, complete, create_folder, hold

LAYOUT = Layout(inputs=3, dtype="i1", targets=1)
KEY = bytes(range(32))


def make_store(folder: Path | None, buckets: int = 8) -> Store:
    if folder is not None:
        folder.mkdir()
        create_folder(folder)
    return Store(LAYOUT, KEY, folder, buckets)


def make_rows(store: Store, ids: list[str], seed: int = 0):
    rng = np.random.default_rng(seed)
    features = rng.integers(-5, 6, (len(ids), 3))
    return store.make_rows(ids, features, rng.integers(0, 9, (len(ids), 1)))


def add(store: Store, rows) -> int:
    changes, fresh = store.plan_addition(rows)
    store.apply(changes)
    return len(fresh)


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_bytes_are_those_of_a_life_that_never_learned(tmp_path: Path) -> None:
    ids = [f"id-{i % 40}" for i in range(100)]
    forgot, never = make_store(tmp_path / "a"), make_store(tmp_path / "b")
    rows = make_rows(forgot, ids)
    for part in (rows[:30], rows[50:], rows[25:60]):
        add(forgot, part)
    gone = [f"id-{i}" for i in range(7)]
    forgot.apply(forgot.take(gone[:3]).changes)
    forgot.apply(forgot.take(gone[3:]).changes)
    kept = [i for i, name in enumerate(ids) if name not in gone]
    add(never, rows[kept[::-1]])
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")
    assert len(forgot) == len(never) == len(kept)
    memory = make_store(None)
    add(memory, rows[kept])
    held = np.concatenate(list(memory.read_all({})))
    assert held.tobytes() == np.concatenate(list(never.read_all({}))).tobytes()


def test_a_store_that_forgot_everything_is_empty(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a")
    add(store, make_rows(store, ["x", "y"]))
    store.apply(store.take(["x", "y", "z"]).changes)
    assert read_bytes(tmp_path / "a") == {}


def test_a_row_is_held_once() -> None:
    store = make_store(None)
    rows = make_rows(store, ["a", "b", "a", "a"])
    rows[3] = rows[0]
    assert add(store, rows) == 3
    assert add(store, rows) == 0
    assert len(store.take(["a"]).rows) == 2


def test_order_is_by_name_then_content() -> None:
    rows = make_rows(make_store(None), [f"p{i % 5}" for i in range(40)])
    shuffled = rows[np.random.default_rng(1).permutation(40)]
    assert arrange(rows).tobytes() == arrange(shuffled).tobytes()
    keys = [row.tobytes() for row in arrange(rows)]
    assert keys == sorted(keys)
    assert not np.array_equal(arrange(rows)["target"], rows["target"])


def test_a_request_rewrites_its_own_buckets_only(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", buckets=64)
    ids = [f"id-{i}" for i in range(500)]
    add(store, make_rows(store, ids))
    before = {p.name: p.stat().st_ino for p in (tmp_path / "a/rows").iterdir()}
    store.apply(store.take(ids[:2]).changes)
    after = {p.name: p.stat().st_ino for p in (tmp_path / "a/rows").iterdir()}
    assert 1 <= sum(before[name] != after.get(name) for name in before) <= 2


def test_identifiers_are_not_written(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a")
    add(store, make_rows(store, ["Ann Example"]))
    assert all(b"Ann" not in data for data in read_bytes(tmp_path / "a").values())


def test_another_key_is_another_order() -> None:
    one, two = Store(LAYOUT, KEY), Store(LAYOUT, bytes(32))
    assert one.name("a") != two.name("a")
    assert one.name("a") != one.name("a", b"forgotten")


def test_every_place_of_a_crash_leaves_all_or_nothing(tmp_path: Path, monkeypatch) -> None:
    """The process dies right before each system call that changes the folder, in turn."""
    ids = [f"id-{i}" for i in range(30)]
    reference = make_store(tmp_path / "r", buckets=4)
    rows = make_rows(reference, ids)
    add(reference, rows[:20])
    before = read_bytes(tmp_path / "r")
    reference.apply(reference.plan_addition(rows)[0], {"sums": b"new"})
    after = read_bytes(tmp_path / "r")
    seen = set()
    for place in range(60):
        folder = tmp_path / f"crash-{place}"
        store = make_store(folder, buckets=4)
        add(store, rows[:20])
        with monkeypatch.context() as patch:
            died = die_before_call(patch, place)
            with contextlib.suppress(KeyboardInterrupt):
                store.apply(store.plan_addition(rows)[0], {"sums": b"new"})
        complete(folder)
        found = read_bytes(folder)
        assert found in (before, after)
        assert not list((folder / "journal").iterdir())
        seen.add(found == after)
        if not died:
            break
    assert seen == {True, False}
    assert not died


def die_before_call(patch, place: int) -> list[bool]:
    """The call number ``place`` that changes a folder does not happen; the list then holds True."""
    left, died = [place], list[bool]()

    def guard(real):
        def call(*args, **given):
            left[0] -= 1
            if left[0] < 0:
                died.append(True)
                raise KeyboardInterrupt
            return real(*args, **given)

        return call

    patch.setattr(stores.os, "fsync", guard(os.fsync))
    patch.setattr(Path, "replace", guard(Path.replace))
    patch.setattr(Path, "unlink", guard(Path.unlink))
    return died


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch) -> None:
    store = make_store(tmp_path / "a")
    add(store, make_rows(store, ["a", "b"]))
    before = read_bytes(tmp_path / "a")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stores.os, "fsync", full)
    with pytest.raises(RunError, match="No space left on device"):
        add(store, make_rows(store, ["c"], seed=1))
    monkeypatch.undo()
    assert read_bytes(tmp_path / "a") == before


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(InputError, match="a new or empty folder, or a store"):
        create_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["letter.txt"]


def test_a_reader_keeps_what_it_mapped(tmp_path: Path) -> None:
    store = make_store(tmp_path / "a", buckets=1)
    rows = make_rows(store, [f"id-{i}" for i in range(50)])
    add(store, rows)
    mapped = store.read(0)
    copy = mapped.tobytes()
    store.apply(store.take(["id-1"]).changes)
    assert mapped.tobytes() == copy
    assert len(store.read(0)) == 49


def test_one_writes_while_others_wait(tmp_path: Path) -> None:
    make_store(tmp_path / "a")
    code = (
        "import sys; from pathlib import Path; from expunge.forgettable.store import hold\n"
        f"with hold(Path({str(tmp_path / 'a')!r}), writing=True):\n"
        "    print('in', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    assert holder.stdout.readline() == b"in\n"
    signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    with pytest.raises(InterruptedError), hold(tmp_path / "a", writing=True):
        raise AssertionError
    holder.stdin.close()
    holder.wait()
    holder.stdout.close()
    with hold(tmp_path / "a", writing=True):
        pass


def _interrupt(*_):
    raise InterruptedError
