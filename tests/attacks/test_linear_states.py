"""A linear model's state after a flipped bit or a part of it restored: refused by name, or
harmless. Never a wrong certificate, never "nobody", never a forgotten person back."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expunge import load_model, open_state
from expunge.certificates.certificate import complete
from expunge.certificates.verification import verify
from expunge.errors import ExpungeError
from expunge.linear_model import RidgeClassifier, load, replay
from expunge.manifests import Entry, Manifest
from expunge.states import State

ROWS = 120


def make_data():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(ROWS, 3)), np.array(["a", "b"])[np.arange(ROWS) % 2]
    return X, y, [f"user-{i}" for i in range(ROWS)]


def learn_without(gone: set[int]) -> str:
    X, y, ids = make_data()
    kept = [i for i in range(ROWS) if i not in gone]
    return RidgeClassifier().fit(X[kept], y[kept], ids=[ids[i] for i in kept]).digest()


def list_files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != "lock")


@pytest.fixture(scope="module")
def days(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A state on three days: with everybody, without user-1, without user-2 too."""
    place = tmp_path_factory.mktemp("days")
    X, y, ids = make_data()
    model = RidgeClassifier(state=place / "now").fit(X, y, ids=ids)
    model.release().save(place / "run0")
    found = []
    for day, gone in enumerate((None, "user-1", "user-2")):
        if gone is not None:
            model.forget([gone]).save(place / f"run{day}")
        found.append(Path(shutil.copytree(place / "now", place / f"day{day}")))
    return found


@pytest.fixture
def folder(days: list[Path], tmp_path: Path) -> Path:
    """A copy of the last day."""
    return Path(shutil.copytree(days[2], tmp_path / "state"))


def use(folder: Path, out: Path, present: set[int]) -> str:
    """Ask for a person, forget another, release: what came of it must be true, or refused."""
    model = load(folder)
    assert model.holds(["user-7"]) == ["user-7"]
    release = model.forget(["user-9"])
    release.save(out)
    assert verify(out).holds
    gone = {1, 2, 9}.difference(present)
    told = release.certificate.statistics
    assert told is not None
    assert told.digest == learn_without(gone)
    assert model.forgot(["user-9"]) == ["user-9"]
    return told.digest


def try_use(folder: Path, out: Path, present: set[int]) -> bool:
    """True if it went well; False if it was refused in one sentence."""
    said = ""
    try:
        use(folder, out, present)
    except ExpungeError as error:
        said = str(error)
    assert "\n" not in said
    return not said


@pytest.mark.parametrize("seed", range(4))
def test_flipped_bits(days: list[Path], tmp_path: Path, seed: int) -> None:
    """Fifty places each: every file has its turn, then any byte of all of them."""
    chosen = random.Random(seed)
    refused = 0
    for number in range(50):
        folder = tmp_path / f"{number}"
        shutil.copytree(days[2], folder / "state")
        files = list_files(folder / "state")
        file = files[number % len(files)]
        data = bytearray(file.read_bytes())
        if data:
            data[chosen.randrange(len(data))] ^= 1 << chosen.randrange(8)
        file.write_bytes(bytes(data))
        refused += not try_use(folder / "state", folder / "run", set())
        shutil.rmtree(folder)
    assert refused >= 45  # all but what nothing is computed from


@pytest.mark.parametrize("seed", range(4))
def test_parts_of_other_days(days: list[Path], tmp_path: Path, seed: int) -> None:
    """Twenty-five mixtures each of today's folder and files of an earlier one."""
    chosen = random.Random(seed)
    for number in range(25):
        folder = tmp_path / f"{number}"
        old, new = days[chosen.randrange(2)], days[2]
        shutil.copytree(new, folder / "state")
        files = [path.relative_to(old) for path in list_files(old)]
        for name in chosen.sample(files, chosen.randrange(1, len(files))):
            (folder / "state" / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(old / name, folder / "state" / name)
        for path in list_files(folder / "state"):
            if chosen.random() < 0.2 and not (old / path.relative_to(folder / "state")).exists():
                path.unlink()  # as where the backup is of another folder
        went_well = try_use(folder / "state", folder / "run", set())
        if went_well:
            assert load(folder / "state").holds(["user-1", "user-2"]) == []
        shutil.rmtree(folder)


def test_a_whole_old_folder_under_todays_list(days: list[Path], tmp_path: Path) -> None:
    """A backup restored over today's folder: who was forgotten since must be forgotten first."""
    folder = tmp_path / "state"
    shutil.copytree(days[2], folder)
    for path in list_files(days[0]):
        shutil.copyfile(path, folder / path.relative_to(days[0]))
    model = load(folder)
    with pytest.raises(ExpungeError, match="again"):
        model.release()
    with pytest.raises(ExpungeError, match="again"):
        model.forget(["user-9"])
    X, y, _ = make_data()
    with pytest.raises(ExpungeError, match="again"):
        model.partial_fit(X[:1], y[:1], ids=["new"])
    model.forget(["user-1", "user-2"]).save(tmp_path / "run")
    assert model.digest() == learn_without({1, 2})


def test_another_key_doubles_nobody(days: list[Path], tmp_path: Path) -> None:
    X, y, ids = make_data()
    shutil.copytree(days[2], tmp_path / "state")
    key = next((tmp_path / "state").glob("key.*"))
    key.write_bytes(bytes(32))
    with pytest.raises(ExpungeError, match="key"):
        load(tmp_path / "state").partial_fit(X[5:], y[5:], ids=ids[5:])


def edit_settings(folder: Path, **changes: object) -> None:
    path = folder / "manifest.json"
    made = Manifest.from_bytes(path.read_bytes())
    path.write_bytes(replace(made, settings={**made.settings, **changes}).to_bytes())


def test_a_state_in_the_folder_of_a_release_is_not_loaded(days: list[Path], tmp_path: Path) -> None:
    X, y, _ = make_data()
    honest = load(days[0].parent / "run2").predict(X)
    shutil.copytree(days[0].parent / "run2", tmp_path / "run")
    planted = RidgeClassifier(state=tmp_path / "planted").fit(X, y[::-1], ids=range(ROWS))
    shutil.copytree(tmp_path / "planted", tmp_path / "run", dirs_exist_ok=True)
    assert (planted.predict(X) != honest).any()
    assert (load_model(tmp_path / "run").predict(X) == honest).all()


@pytest.mark.parametrize("edit", ["labels", "twice", "missing", "forged"])
def test_an_edited_estimator_is_not_loaded(days: list[Path], tmp_path: Path, edit: str) -> None:
    run = shutil.copytree(days[0].parent / "run2", tmp_path / "run")
    path = run / "estimator.json"
    text = path.read_text()
    path.write_text(text.replace('"a",\n  "b"', '"b",\n  "a"'))
    if edit == "twice":
        path.write_text(text.replace('"alpha"', '"alpha": 5.0, "alpha"', 1))
    if edit == "missing":
        path.unlink()
    assert not path.exists() or path.read_text() != text
    if edit == "forged":
        plain = json.loads((run / "certificate.json").read_bytes())
        plain["weights"]["files"] = {}
        complete(plain).save(run / "certificate.json")
    for work in (load, lambda place: replay(place, days[2])):
        with pytest.raises(ExpungeError, match=r"estimator\.json is not"):
            work(run)


@pytest.mark.parametrize(
    "changes",
    [{"model": "os.system"}, {"parameters": None}, {"facts": {}}, {"numbers": {"kind": "x"}}],
)
def test_settings_of_no_linear_model(
    days: list[Path], tmp_path: Path, changes: dict[str, object]
) -> None:
    shutil.copytree(days[2], tmp_path / "state")
    edit_settings(tmp_path / "state", **changes)
    with pytest.raises(ExpungeError, match=r"manifest\.json has settings of no linear model"):
        open_state(tmp_path / "state")


def edit_file(folder: Path, name: str, edit: Callable[[bytes], bytes]) -> None:
    """A file of the state edited, and every hash made right again."""
    made = Manifest.from_bytes((folder / "manifest.json").read_bytes())
    place = folder / made.files[name].file
    data = edit(place.read_bytes())
    place.unlink()
    digest = hashlib.sha256(data).hexdigest()
    entry = Entry(f"{name}.{digest[:24]}", digest, len(data))
    (folder / entry.file).write_bytes(data)
    made = replace(made, files={**made.files, name: entry})
    (folder / "manifest.json").write_bytes(made.to_bytes())


def drop_person(people: bytes, name: bytes, more: int = 0) -> bytes:
    entries = [people[at : at + 36] for at in range(0, len(people) - 8, 36)]
    count = int.from_bytes(people[-8:], "little") + more
    return b"".join(e for e in entries if e[:16] != name) + count.to_bytes(8, "little")


def test_rows_under_another_name_are_not_certified_as_gone(days: list[Path], folder: Path) -> None:
    name = State.open(folder).name("user-3")
    edit_file(folder, "rows/00", lambda rows: rows.replace(name, b"\xff" * 16))
    with pytest.raises(ExpungeError, match=r"people .* rows"):
        load(folder).forget(["user-3"])
    with pytest.raises(ExpungeError, match=r"people .* rows"):
        replay(days[2].parent / "run2", folder)


@pytest.mark.parametrize("more", [0, 1])
def test_a_person_missing_from_the_index(days: list[Path], folder: Path, more: int) -> None:
    """With one more of nobody the count is right, too: a request and a replay see it."""
    name = State.open(folder).name("user-3")
    edit_file(folder, "people", lambda people: drop_person(people, name, more))
    seen = [lambda: load(folder).holds(["user-3"]), lambda: load(folder).release()]
    called = [lambda: load(folder).forget(["user-3"])]
    for work in (
        *(called if more else seen),
        lambda: load(folder).forget(["user-4"]),
        lambda: replay(days[2].parent / "run2", folder),
    ):
        with pytest.raises(ExpungeError, match="people does not say whose all rows are"):
            work()


def test_columns_that_the_rows_do_not_have(folder: Path) -> None:
    facts = State.open(folder).settings["facts"]
    edit_settings(folder, facts={**facts, "inputs": 2})
    with pytest.raises(ExpungeError, match="is damaged"):
        load(folder).forget(["user-4"])


@pytest.mark.parametrize(("name", "value"), [("alpha", None), ("alpha", "x"), ("classes", 1)])
def test_parameters_that_no_model_has(folder: Path, name: str, value: object) -> None:
    parameters = State.open(folder).settings["parameters"]
    edit_settings(folder, parameters={**parameters, name: value})
    with pytest.raises(ExpungeError, match=f"{name} is {value!r}; it must be"):
        open_state(folder).forget(["user-4"])
