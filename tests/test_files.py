"""Files and folders that are complete or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from time import sleep

import pytest

from expunge.errors import CertificateError, InputError, RunError
from expunge.files import lock, new_folder, open_regular, read_limited, refuse_twice, write_atomic


def test_a_failed_write_leaves_what_was_there(tmp_path: Path) -> None:
    write_atomic(tmp_path / "x", b"one")

    def parts():
        yield b"tw"
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "x", parts())
    assert [(p.name, p.read_bytes()) for p in tmp_path.iterdir()] == [("x", b"one")]
    write_atomic(tmp_path / "secret", b"k", private=True)
    assert (tmp_path / "secret").stat().st_mode & 0o077 == 0


def test_a_folder_is_there_as_a_whole(tmp_path: Path) -> None:
    def write(fail: bool) -> None:
        with new_folder(tmp_path / "a" / "run") as draft:
            (draft / "adapter").mkdir()
            write_atomic(draft / "adapter" / "x", b"1")
            assert not (tmp_path / "a" / "run").exists()
            if fail:
                raise OSError(28, "No space left on device")

    with pytest.raises(RunError, match=r"could not be written \(No space left"):
        write(fail=True)
    assert list((tmp_path / "a").iterdir()) == []
    write(fail=False)
    assert (tmp_path / "a" / "run" / "adapter" / "x").read_bytes() == b"1"
    with pytest.raises(InputError, match="already holds files"):
        write(fail=False)
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(InputError, match="is a file"), new_folder(place):
            pass


def test_a_killed_run_leaves_a_draft_that_the_next_removes(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom expunge.files import new_folder\n"
        "with new_folder(sys.argv[1]) as draft:\n"
        "    (draft / 'half').write_bytes(b'x')\n    os._exit(9)\n"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path / "run[1]"], check=False)
    assert len(list(tmp_path.glob(".run*.tmp"))) == 1
    with new_folder(tmp_path / "run[1]") as draft, new_folder(tmp_path / "run[1]2") as other:
        assert sorted(tmp_path.iterdir()) == sorted([draft, other])  # the living keep theirs
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run[1]", "run[1]2"]


def _take(path: Path) -> None:
    with lock(path, "taken"):
        (path.parent / "ready").touch()
        sleep(60)


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    other = get_context("fork").Process(target=_take, args=(tmp_path / "lock",))
    other.start()
    while not (tmp_path / "ready").exists():
        sleep(0.01)
    with pytest.raises(RunError, match="taken"), lock(tmp_path / "lock", "taken"):
        pass
    other.kill()
    other.join()
    with lock(tmp_path / "lock", "taken"):
        pass


def test_reads_that_cannot_run_away(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "big").write_bytes(b"12345")
    with pytest.raises(CertificateError, match="not a regular file"):
        open_regular(tmp_path / "pipe", "record")
    with pytest.raises(CertificateError, match="larger than 4 bytes"):
        read_limited(tmp_path / "big", 4, "record")
    assert read_limited(tmp_path / "big", 5, "record") == b"12345"
    with pytest.raises(CertificateError, match="is a directory"):
        read_limited(tmp_path, 5, "record")
    with pytest.raises(ValueError, match="'a' twice"):
        json.loads('{"b": {"a": 1, "a": 1}}', object_pairs_hook=refuse_twice)
