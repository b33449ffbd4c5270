"""Malformed input through the real command: one sentence, exit code 2, and no byte is changed."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.job_folder import EXACT, LINEAR, NOISE, call, list_files, succeed, write_job
from tests.helpers.sample_releases import save_release

pytestmark = pytest.mark.usefixtures("one_thread")
Words = list[str | Path]
Prepare = Callable[[Path], Words]


def job(
    kind: dict[str, Any] = NOISE, replace: tuple[str, str] = ("", ""), **changes: Any
) -> Prepare:
    """The tiny job, with keys or text changed."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, kind, **changes)
        path.write_text(path.read_text().replace(*replace))
        return ["unlearn", path]

    return prepare


def raw(data: bytes) -> Prepare:
    def prepare(folder: Path) -> Words:
        path = write_job(folder)
        path.write_bytes(data)
        return ["unlearn", path]

    return prepare


def listing(data: bytes, name: str = "list.txt", column: str | None = None) -> Prepare:
    """The job with another list."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, data={"forget": name, "column": column})
        (folder / name).write_bytes(data)
        return ["unlearn", path]

    return prepare


def weighing(data: bytes | None, name: str = "weights.safetensors") -> Prepare:
    """The job with other bytes as weights, or with a link to itself."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, NOISE, model={"old": name})
        (folder / name).unlink(missing_ok=True)
        if data is None:
            (folder / name).symlink_to(name)
        else:
            (folder / name).write_bytes(data)
        return ["unlearn", path]

    return prepare


def code(text: str) -> Prepare:
    """The job whose load() returns Data(…) of this."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, EXACT, data={"load": "own.py:other"})
        own = folder / "own.py"
        own.write_text(own.read_text() + f"\n\ndef other():\n    x, y = load().examples\n{text}\n")
        return ["unlearn", path]

    return prepare


def checking(*words: str, cut: int | None = None, data: bytes | None = None) -> Prepare:
    """A command about a release whose certificate is cut, or whose weights are others."""

    def prepare(folder: Path) -> Words:
        save_release(folder / "run")
        (folder / "empty").mkdir()
        if cut is not None:
            file = folder / "run" / "certificate.json"
            file.write_bytes(file.read_bytes()[:cut])
        if data is not None:
            (folder / "run" / "model.safetensors").write_bytes(data)
        return [folder / word[1:] if word.startswith("@") else word for word in words]

    return prepare


def state(*words: str) -> Prepare:
    def prepare(folder: Path) -> Words:
        succeed("learn", write_job(folder, LINEAR))
        (folder / "all.txt").write_text("\n".join(f"p{i}" for i in range(50)))
        (folder / "none.txt").write_text("nobody\n")
        (folder / "broken").mkdir()
        text = (folder / "state" / "manifest.json").read_bytes()
        (folder / "broken" / "manifest.json").write_bytes(text[:-20])
        return [folder / word[1:] if word.startswith("@") else word for word in words]

    return prepare


HEADER = b'{"weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
MALFORMED: dict[str, tuple[Prepare, str]] = {
    "an empty file": (raw(b""), "mistakes"),
    "a binary file": (raw(b"\xff\xfe\x00"), "is not valid TOML"),
    "a number with 400 digits": (job(replace=("steps = 4", "steps = 1" + "0" * 400)), "steps"),
    "a number Python cannot read": (job(replace=("steps = 4", "steps = 1" + "0" * 5000)),
     "is not valid TOML"),
    "a NaN": (job(replace=("epochs = 2", "epochs = nan")), "training.epochs is nan; it must be"),
    "a negative batch": (job(method={"batch_size": -5}), "method.batch_size is -5; it must be"),
    "a negative seed": (job(training={"seed": -1}), "training.seed is -1; it must be"),
    "a list that is a folder": (job(data={"forget": "."}), "cannot be read: Is a directory"),
    "a list that is not UTF-8": (listing(b"p3\n\xe9t\xe9\n"), "can't decode byte 0xe9"),
    "a list with a NUL byte": (listing(b"p3\0\np7\n"), "ids is 'p3\\x00'; it must be"),
    "a list of spaces": (listing(b"\n  \n"), "names nobody; it must name at least 1"),
    "a list of everybody": (listing("\n".join(f"p{i}" for i in range(50)).encode()),
     "names everybody"),
    "a column that is not there": (listing(b"\xef\xbb\xbfperson;row\np3;1\n", "list.csv", "name"),
     "is 'name'; it must be one of ['person', 'row']"),
    "JSON that is no list": (listing(b'"p3"', "list.json"), "is 'a JSON str'; it must be"),
    "empty weights": (weighing(b""), "old"),
    "weights cut short": (weighing(struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 40), "old"),
    "weights with a header of 2^60 bytes": (weighing(struct.pack("<Q", 2**60) + HEADER), "old"),
    "weights that are text": (weighing(b"these are not weights\n", "weights.pt"), "old"),
    "weights that link to themselves": (weighing(None), "model.old is"),
    "too few names": (code("    return expunge.Data((x, y), ids=['a'])"), "number of ids is 1"),
    "names that are none": (code("    return expunge.Data((x, y), ids=[1.5] * 50)"), "ids"),
    "data of nothing": (code("    return expunge.Data([], ids=[])"), "data.load"),
    "a dictionary": (code("    return {'train': x}"), "data.load returned a dict; it must return"),
    "an output in a file": (job(output={"dir": "own.py/run"}), "own.py is a file"),
    "an output that is a file": (job(output={"dir": "own.py"}), "own.py is a file"),
    "an output that cannot be made": (job(output={"dir": "/proc/nowhere/run"}), "/proc/nowhere"),
    "an output with a NUL byte": (job(replace=('dir = "run"', 'dir = "a\\u0000b"')),
     "output.dir is 'a\\x00b'"),
    "a state that is cut short": (state("forget", "@broken", "@forget.txt", "--out", "@out"),
     "is damaged"),
    "a state of nobody": (state("forget", "@state", "@none.txt", "--out", "@out"), "'nobody'"),
    "half a certificate": (checking("verify", "@run", cut=400), "a certificate must be JSON"),
    "an empty certificate": (checking("verify", "@run", cut=0), "a certificate must be JSON"),
    "a folder without one": (checking("verify", "@empty"), "certificate"),
    "a parent without one": (checking("verify", "@run", "--parent", "@empty"), "certificate"),
    "a record that is none": (checking("verify", "@run", "--record", "@run/certificate.json"),
     "record"),
    "weights to verify that are none": (checking("verify", "@run", data=b"\xff" * 20), "model"),
    "a report of nothing": (checking("report", "@empty"), "certificate"),
    "an audit of nothing": (checking("audit", "@empty"), "certificate"),
    "a replay of nothing": (checking("replay", "@empty", "@job.toml"), "the folder of a release"),
    "a plan for too many parameters": (
     lambda _: ["plan", "--epsilon", "1", "--delta", "1e-5", "--parameters", "9" * 400],
     "parameters"),
    "a plan of a folder": (lambda folder: ["plan", "--job", folder.parent],
     "cannot be read: Is a directory"),
    "two templates": (lambda folder: ["init", folder, "--head", "--lora"], "name one of them"),
}  # fmt: skip


def look(folder: Path) -> tuple[dict[str, str], set[str]]:
    """Every file with its hash, and every folder; an empty lock is no change."""
    files = {name: digest for name, digest in list_files(folder).items() if name[-5:] != "/lock"}
    return files, {place for place, _, _ in os.walk(folder)}


@pytest.mark.parametrize("case", MALFORMED)
def test_one_sentence_and_not_a_byte(tmp_path: Path, case: str) -> None:
    prepare, sentence = MALFORMED[case]
    words = prepare(tmp_path / "here")
    before = look(tmp_path)
    done = call(*words)
    assert done.returncode == 2, done.stderr + done.stdout
    assert done.stdout == ""
    assert sentence in done.stderr
    said = [line for line in done.stderr.splitlines() if "examples stay" not in line]
    assert said[0].startswith("expunge: ")
    assert len(said) == 1 or "mistakes" in said[0], done.stderr
    assert look(tmp_path) == before


def test_what_looks_odd_and_is_not(tmp_path: Path) -> None:
    """A byte order mark, semicolons, weights of another dtype."""
    import torch
    from safetensors.torch import save_file

    path = write_job(tmp_path, data={"forget": "list.csv", "column": "person"})
    (tmp_path / "list.csv").write_bytes("\ufeffperson;row\np3;1\np7;2\n".encode())
    save_file(dict(torch.nn.Linear(4, 3).double().state_dict()), tmp_path / "weights.safetensors")
    succeed("check", path)
