"""Malformed input through the real command: one sentence, exit code 2, and no byte is changed."""

import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from handmade import make_run
from head_folder import write_head_job
from job_folder import call, list_files, write_job

Words = list[str | Path]
Prepare = Callable[[Path], Words]


def job(text: str | None = None, replace: tuple[str, str] = ("", ""), **changes: dict) -> Prepare:
    """The tiny job, with keys or text changed."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, **changes)
        path.write_text(path.read_text().replace(*replace) if text is None else text)
        return ["unlearn", path]

    return prepare


def raw(data: bytes) -> Prepare:
    def prepare(folder: Path) -> Words:
        path = write_job(folder)
        path.write_bytes(data)
        return ["unlearn", path]

    return prepare


def forgetting(data: bytes, name: str = "list.txt", column: str | None = None) -> Prepare:
    """The job with another list."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, data={"forget": name, "column": column})
        (folder / name).write_bytes(data)
        return ["unlearn", path]

    return prepare


def weighing(data: bytes, name: str = "weights.safetensors") -> Prepare:
    """The job with other bytes as weights."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, model={"weights": name})
        (folder / name).write_bytes(data)
        return ["unlearn", path]

    return prepare


def loop(name: str, **changes: dict) -> Prepare:
    """The job, one of whose files is a link to itself."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, **changes)
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(name)
        return ["unlearn", path]

    return prepare


def place(name: str, **changes: dict) -> Prepare:
    """The job, one of whose files is a directory."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, **changes)
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()
        return ["unlearn", path]

    return prepare


def code(line: str) -> Prepare:
    """The job whose data are loaded by another function."""

    def prepare(folder: Path) -> Words:
        path = write_job(folder, data={"load": "own.py:load_odd"})
        with (folder / "own.py").open("a") as own:
            own.write(f"\n\ndef load_odd():\n    return load() | {{{line}}}\n")
        return ["unlearn", path]

    return prepare


def signing(data: bytes) -> Prepare:
    def prepare(folder: Path) -> Words:
        path = write_job(folder, output={"sign": "key.pem"})
        (folder / "key.pem").write_bytes(data)
        return ["unlearn", path]

    return prepare


def head(*words: str, **changes: dict) -> Prepare:
    """Learn a head, then call the command."""

    def prepare(folder: Path) -> Words:
        path = write_head_job(folder)
        done = call("learn", path, "--out", folder / "state")
        assert done.returncode == 0, done.stderr
        (folder / "one.txt").write_text("p3\n")
        (folder / "all.txt").write_text("".join(f"p{i}\n" for i in range(30)))
        (folder / "state2").mkdir()
        (folder / "broken").mkdir()
        (folder / "broken" / "meta.json").write_text('{"format": ')
        write_head_job(folder, **changes)
        return [folder / word[1:] if word.startswith("@") else word for word in words]

    return prepare


def checking(*words: str, cut: int | None = None, data: bytes | None = None) -> Prepare:
    """A run that holds, part of whose certificate is gone, or whose weights are others."""

    def prepare(folder: Path) -> Words:
        (folder / "run").mkdir(parents=True)
        path, _ = make_run(folder / "run")
        (folder / "empty").mkdir()
        if cut is not None:
            path.write_bytes(path.read_bytes()[:cut])
        if data is not None:
            (folder / "run" / "model.safetensors").write_bytes(data)
        return [folder / word[1:] if word.startswith("@") else word for word in words]

    return prepare


HEADER = b'{"weight":{"dtype":"F32","shape":[3,4],"data_offsets":[0,48]}}'
MALFORMED: dict[str, tuple[Prepare, str]] = {
    "a job that is a directory": (place("job.toml"), "job.toml holds no jobs; they must be named"),
    "a job that is a link to itself": (loop("job.toml"), "cannot be read: Too many levels"),
    "a job with a NUL byte": (raw(b"[model]\0\n"), "is not valid TOML"),
    "a job that is not UTF-8": (raw(b'[model]\nbuild = "\xff"\n'), "is not valid TOML"),
    "a job in UTF-16": (raw("[model]\n".encode("utf-16")), "is not valid TOML"),
    "a job without a model": (
        job(replace=('[model]\nbuild = "own.py:build"\nweights = "weights.safetensors"\n', "")),
        "[model] is missing; a job needs it",
    ),
    "a list for a number": (job(target={"epsilon": [1.0]}), "target.epsilon is [1.0]; it must be"),
    "a table for a text": (
        job(replace=('forget = "forget.txt"', "forget = {a = 1}")),
        "data.forget is {'a': 1}; it must be",
    ),
    "a truth for a number": (job(target={"epsilon": True}), "target.epsilon is True; it must be"),
    "a date for a number": (
        job(replace=("epsilon = 1.0", "epsilon = 2026-11-17")),
        "target.epsilon is datetime.date(2026, 11, 17); it must be",
    ),
    "a number beyond floats": (job(replace=("epsilon = 1.0", "epsilon = 1e999")), "is inf; it"),
    "an endless whole number": (
        job(replace=("steps = 4", "steps = 1" + "0" * 400)),
        "method.steps is 1000",
    ),
    "a number Python cannot read": (
        job(replace=("steps = 4", "steps = 1" + "0" * 5000)),
        "is not valid TOML",
    ),
    "a NaN": (job(replace=("epochs = 2", "epochs = nan")), "finetune.epochs is nan; it must be"),
    "a negative batch": (job(method={"batch_size": -5}), "method.batch_size is -5; it must be"),
    "negative workers": (job(data={"workers": -1}), "data.workers is -1; it must be"),
    "a seed beyond torch's": (job(method={"seed": 2**70}), "method.seed is 1180591620717411303424"),
    "a negative seed": (job(method={"seed": -1}), "method.seed is -1; it must be"),
    "a list that is a directory": (
        place("forget.txt"),
        "data.forget is 'forget.txt'; there is no such file",
    ),
    "a list that is a link to itself": (loop("forget.txt"), "there is no such file in"),
    "a list that is not UTF-8": (forgetting(b"p3\n\xe9t\xe9\n"), "can't decode byte 0xe9"),
    "a list in UTF-16": (forgetting("p3\n".encode("utf-16")), "can't decode byte 0xff"),
    "a list with a NUL byte": (
        forgetting(b"p3\0\np7\n"),
        "ids is 'p3\\x00'; it must be",
    ),
    "a list of nobody": (forgetting(b"\n  \n\xef\xbb\xbf\n"), "it must be visible text"),
    "a list of spaces": (forgetting(b"\n  \n"), "names no identifier; it must name at least 1"),
    "a list of everybody": (
        forgetting("\n".join(f"p{i}" for i in range(50)).encode()),
        "names 50 of the 50 samples",
    ),
    "a column that is not there": (
        forgetting(b"\xef\xbb\xbfperson;row\np3;1\n", "list.csv", "name"),
        "is 'name'; it must be one of ['person', 'row']",
    ),
    "a table without a column": (forgetting(b"p3\n", "list.csv"), "data.column is missing"),
    "an empty table": (forgetting(b"", "list.csv", "person"), "is 'person'; it must be one of []"),
    "JSON that is no list": (forgetting(b'"p3"', "list.json"), "is 'a JSON str'; it must be"),
    "empty weights": (weighing(b""), "which cannot be read"),
    "weights cut short": (
        weighing(struct.pack("<Q", len(HEADER)) + HEADER + b"\0" * 40),
        "model.weights is",
    ),
    "weights with a header of 2^60 bytes": (weighing(struct.pack("<Q", 2**60) + HEADER), "which"),
    "weights that are text": (weighing(b"these are not weights\n", "weights.pt"), "which cannot"),
    "weights that are a directory": (place("weights.safetensors"), "model.weights is"),
    "weights that link to themselves": (loop("weights.safetensors"), "model.weights is"),
    "too few identifiers": (code('"ids": ["a", "b"]'), "the number of ids is 2; it must be 50"),
    "identifiers that are none": (code('"ids": [None] * 50'), "ids"),
    "identifiers in lists": (code('"ids": [["a"]] * 50'), "ids"),
    "data without samples": (code('"train": [], "ids": []'), "data.load"),
    "a misspelt key": (code('"idz": 3'), "idz"),
    "a key cut short": (signing(b"-----BEGIN PRIVATE KEY-----\nMC4CAQAw"), "private key"),
    "an output in a file": (job(output={"dir": "own.py/run"}), "own.py is a file"),
    "an output that is a file": (job(output={"dir": "own.py"}), "own.py is a file"),
    "an output that cannot be made": (job(output={"dir": "/proc/nowhere/run"}), "/proc/nowhere"),
    "an output with a NUL byte": (
        job(replace=('dir = "run"', 'dir = "a\\u0000b"')),
        "output.dir is 'a\\x00b'",
    ),
    "a release in its state": (
        head("forget", "@state", "@one.txt", "--out", "@state/out"),
        "outside of the state",
    ),
    "a state that is empty": (head("forget", "@state2", "@one.txt", "--out", "@out"), "state2"),
    "a state that is a file": (head("forget", "@own.py", "@one.txt", "--out", "@out"), "own.py"),
    "a state that is cut short": (
        head("forget", "@broken", "@one.txt", "--out", "@out"),
        "broken",
    ),
    "a head of nobody": (
        head("forget", "@state", "@all.txt", "--out", "@out"),
        "no example is left",
    ),
    "a state in a file": (head("learn", "@job.toml", "--out", "@own.py/state"), "own.py"),
    "features of 99 bits": (
        head("learn", "@job.toml", "--out", "@new", features={"bits": 99}),
        "bits is 99; it must be a whole number from 4 to 12",
    ),
    "other features for a state": (
        head("learn", "@job.toml", "--out", "@state", features={"lift": 7}),
        "lift",
    ),
    "a store that is not there": (checking("verify", "@run", "--store", "@nowhere"), "statistics"),
    "half a certificate": (checking("verify", "@run", cut=400), "a certificate must be JSON"),
    "an empty certificate": (checking("verify", "@run", cut=0), "a certificate must be JSON"),
    "a directory without one": (checking("verify", "@empty"), "No such file".lower()),
    "a parent without one": (checking("verify", "@run", "--parent", "@empty"), "no such file"),
    "a record that is a certificate": (
        checking("verify", "@run", "--record", "@run/certificate.json"),
        "record",
    ),
    "weights to verify that are none": (checking("verify", "@run", data=b"\xff" * 20), "model"),
    "weights to verify that are a place": (
        checking("verify", "@run", "--weights", "@empty"),
        "empty/model.safetensors is not a file",
    ),
    "a report of nothing": (checking("report", "@empty"), "has no record.json"),
    "an audit of nothing": (checking("audit", "@empty"), "certificate"),
    "a plan for too many parameters": (
        lambda _: ["plan", "--epsilon", "1", "--delta", "1e-5", "--parameters", "9" * 400],
        "parameters",
    ),
    "a plan with NaN": (
        lambda _: ["plan", "--epsilon", "nan", "--delta", "1e-5", "--parameters", "9"],
        "epsilon is nan; it must be",
    ),
    "a plan of a directory": (
        lambda folder: ["plan", "--epsilon", "1", "--delta", "1e-5", "--job", folder],
        "cannot be read: Is a directory",
    ),
}


def look(folder: Path) -> tuple[dict[str, str], set[str]]:
    """Every file with its hash, and every directory; an empty lock is no change."""
    files = {name: digest for name, digest in list_files(folder).items() if name[-8:] != "/working"}
    return files, {place for place, _, _ in os.walk(folder)}


@pytest.mark.parametrize("case", MALFORMED)
def test_one_sentence_and_not_a_byte(tmp_path: Path, case: str) -> None:
    prepare, sentence = MALFORMED[case]
    words = prepare(tmp_path / "here")
    (tmp_path / "here").mkdir(exist_ok=True)
    before = look(tmp_path)
    done = call(*words)
    assert done.returncode == 2, done.stderr + done.stdout
    assert done.stdout == ""
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("expunge: ")
    assert look(tmp_path) == before


def test_what_looks_odd_and_is_not(tmp_path: Path) -> None:
    """A byte order mark, a number for an identifier's text, weights of another dtype."""
    path = write_job(tmp_path, data={"forget": "list.csv", "column": "person"})
    (tmp_path / "list.csv").write_bytes("\ufeffperson;row\np3;1\np7;2\n".encode())
    linear = torch.nn.Linear(4, 3).double()
    save_file(dict(linear.state_dict()), tmp_path / "weights.safetensors")
    done = call("unlearn", path, "--dry-run")
    assert done.returncode == 0, done.stderr
