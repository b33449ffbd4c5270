"""Shards by commands: learn, forget, release, verify, and what is refused."""

import importlib.util
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import expunge
from expunge.jobs import shards as shards_of_jobs
from expunge.jobs.shards import expect_work, train_apart
from job_folder import call, list_files

OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def build():
    return nn.Linear(4, 3)

def build_wide():
    return nn.Linear(4, 4)

def build_fixed():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Linear(4, 3)

def nothing():
    return 3

def train(model, examples, seed):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(examples.inputs), examples.targets).backward()
        optimizer.step()

def load():
    x = torch.randn(80, 4, generator=torch.Generator().manual_seed(0))
    y = x[:, :3].argmax(1)
    ids = [f"p{i // 2}" for i in range(60)]
    test = TensorDataset(x[60:], y[60:])
    return {"train": TensorDataset(x[:60], y[:60]), "ids": ids, "test": test}

def load_pilot():
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    y = x[:, :3].argmax(1)
    ids = [f"apart-{i}" for i in range(40)]
    return {"train": (x[:40], y[:40]), "ids": ids, "test": (x[40:], y[40:])}

def load_overlapping():
    return load_pilot() | {"ids": [f"p{i}" for i in range(40)]}

def load_untested():
    return {name: part for name, part in load_pilot().items() if name != "test"}

def load_nan():
    x, y = load()["train"].tensors
    return load() | {"train": (x * float("nan"), y)}
"""
METHOD = {"name": "shards", "seed": "public", "shards": 2, "slices": 2}
OPTIONS = {"epochs": 4, "learning_rate": 0.5, "batch_size": 8}


class Killed(BaseException):
    """What nothing catches."""


def write_shards_job(folder: Path, **changes: dict) -> Path:
    tables = {
        "model": {"build": "own.py:build"},
        "data": {"load": "own.py:load"},
        "method": METHOD | OPTIONS,
    }
    lines = []
    for table in [*tables, *(changes.keys() - tables.keys())]:
        keys = tables.get(table, {}) | changes.get(table, {})
        lines.append(f"[{table}]")
        lines += [f"{k} = {json.dumps(v)}" for k, v in keys.items() if v is not None]
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "job.toml").write_text("\n".join(lines) + "\n")
    (folder / "own.py").write_text(OWN)
    (folder / "f.txt").write_text("p3\np7\n")
    return folder / "job.toml"


def succeed(*words: str | Path) -> dict:
    done = call(*words, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def import_own(folder: Path):
    found = importlib.util.spec_from_file_location("own_of_shards", folder / "own.py")
    assert found
    assert found.loader
    own = importlib.util.module_from_spec(found)
    found.loader.exec_module(own)
    return own


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("life")
    succeed("learn", write_shards_job(folder), "--release", folder / "release-1")
    return folder


@pytest.fixture
def copy(life: Path, tmp_path: Path) -> Path:
    shutil.copytree(life, tmp_path / "life")
    write_shards_job(tmp_path / "life")
    told = json.dumps({"job": str(tmp_path / "life/job.toml")})
    (tmp_path / "life/state/job.json").write_text(told)
    return tmp_path / "life"


@pytest.mark.parametrize(
    "method",
    [
        {},
        {"optimizer": "adamw", "weight_decay": 0.1},
        {"train": "own.py:train", **dict.fromkeys(OPTIONS)},
    ],
    ids=["sgd", "adamw", "own"],
)
def test_a_life(tmp_path: Path, method: dict) -> None:
    job = write_shards_job(tmp_path, method=method)
    first = succeed("learn", job, "--release", tmp_path / "r1")
    assert (first["new"], first["examples"], first["people"]) == (60, 60, 30)
    assert first["release"]["test"] > 0.5
    told = succeed("forget", tmp_path / "state", tmp_path / "f.txt", "--out", tmp_path / "r2")
    forget = told["certificate"]["data"]["forget"]
    assert (forget["count"], forget["samples"], told["examples"]) == (2, 4, 56)
    expunge.verify_chain([tmp_path / r / "certificate.json" for r in ("r1", "r2")])
    assert call("verify", tmp_path / "r2", "--retrain", tmp_path / "state").returncode == 0
    back = call("learn", job)
    assert "2 of these identifiers were forgotten before and are learned again" in back.stderr
    assert succeed("learn", job)["digest"] == first["digest"]
    other = call("verify", tmp_path / "r2", "--retrain", tmp_path / "state")
    assert other.returncode == 1
    assert "other examples or settings are held" in other.stderr


@pytest.mark.parametrize("place", ["certify", "write_run", "_recover"])
def test_a_release_that_was_cut_short(
    copy: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The same command again says what was trained since the last release that was written."""
    words = ("forget", copy / "state", copy / "f.txt", "--out", copy / "r2")
    calls = {"number": 0}

    def die(*given: object, **more: object) -> None:
        calls["number"] += 1
        if place != "_recover" or calls["number"] > 1:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"expunge.jobs.releases.{place}", die)
        with pytest.raises(Killed):
            call(*words)
    told = succeed(*words)["certificate"]
    assert (told["data"]["forget"]["count"], told["data"]["forget"]["samples"]) == (2, 4)
    assert any(told["shards"]["trained_from"])
    expunge.verify_chain([copy / r / "certificate.json" for r in ("release-1", "r2")])
    assert not (copy / "state/pending.json").exists()


def test_a_release_is_loaded_and_predicts(copy: Path) -> None:
    own = import_own(copy)
    x, y = own.load()["test"].tensors
    model = expunge.load_model(copy / "release-1", network=own.build())
    assert (model(x).argmax(1) == y).double().mean() > 0.5
    with pytest.raises(expunge.InputError, match="of shards, give network="):
        expunge.load_model(copy / "release-1")


def test_a_state_is_loaded_with_build(tmp_path: Path) -> None:
    write_shards_job(tmp_path)
    own, options = import_own(tmp_path), {k: v for k, v in METHOD.items() if k != "name"} | OPTIONS
    x, y = own.load()["train"].tensors
    ensemble = expunge.Shards(own.build, state=tmp_path / "s", **options)
    ensemble.learn((x, y), own.load()["ids"])
    again = expunge.load(tmp_path / "s", build=own.build)
    assert again.digest() == ensemble.digest()
    assert torch.equal(again.release().model(x), ensemble.release().model(x))
    with pytest.raises(expunge.InputError, match="build is"):
        expunge.load(tmp_path / "s", build=own.build_wide)


Prepare = Callable[[Path], object]
LEARN = ("learn", "job.toml", "--out", "new")
AGAIN = ("learn", "job.toml")
FORGET = ("forget", "state", "f.txt", "--out", "r2")


def job(**changes: dict) -> Prepare:
    return lambda folder: write_shards_job(folder, **changes)


def put(name: str, text: str) -> Prepare:
    return lambda folder: (folder / name).write_text(text)


REFUSED: dict[str, tuple[Prepare, tuple[str, ...], str]] = {
    "no seed": (job(method={"seed": None}), LEARN, r"method\.seed is missing"),
    "no build": (job(model={"build": None}), LEARN, r"model\.build is missing"),
    "features of shards": (job(features={"bits": 8}), LEARN, r"\[features\] is not a table"),
    "an unknown key": (job(method={"shard": 3}), LEARN, "did you mean shards"),
    "no shards": (job(method={"shards": 0}), LEARN, "shards is 0; it must be"),
    "no epochs": (job(method={"epochs": None}), LEARN, "epochs is missing; give it, or train="),
    "two ways to train": (job(method={"train": "own.py:train"}), LEARN, "left out: train= trains"),
    "no such loss": (job(model={"loss": "own.py:huber"}), LEARN, "has no function huber"),
    "no network": (job(model={"build": "own.py:nothing"}), LEARN, "it must be a torch module"),
    "a network that is not drawn": (
        job(model={"build": "own.py:build_fixed"}), LEARN, "does not draw weight"
    ),
    "inputs that are no numbers": (job(data={"load": "own.py:load_nan"}), LEARN, "row 0 are not"),
    "a folder of something else": (
        lambda folder: ((folder / "new").mkdir(), put("new/x", "x")(folder)), LEARN, "a new or em"
    ),
    "another seed": (job(method={"seed": "x"}), AGAIN, "seed is 'x'; it must be 'public'"),
    "another network": (job(model={"build": "own.py:build_wide"}), AGAIN, "build is"),
    "another network to forget": (job(model={"build": "own.py:build_wide"}), FORGET, "build is"),
    "nobody known": (put("f.txt", "p3\nnobody\n"), FORGET, "ids holds 'nobody', which was never"),
    "a budget": (job(), (*FORGET, "--epsilon", "1"), "left out: this forgets exactly"),
    "a job that is gone": (
        lambda folder: (folder / "job.toml").rename(folder / "x.toml"), FORGET, "which is gone"
    ),
    "a job that was never told": (
        lambda folder: (folder / "state/job.json").unlink(), FORGET, "does not say by which job"
    ),
    "everybody": (put("f.txt", "\n".join(f"p{i}" for i in range(30))), FORGET, "nothing to relea"),
    "no shards to train": (job(), ("verify", "release-1", "--retrain", "own.py"), "does not say"),
    "workers that cannot import": (job(), (*LEARN, "--workers", "2"), "--workers is 2; it must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_one_sentence_and_changes_nothing(
    copy: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    prepare, words, sentence = REFUSED[case]
    monkeypatch.chdir(copy)
    prepare(copy)
    before = list_files(copy)
    done = call(*words)
    assert done.returncode == 2, done
    said = done.stderr.strip()
    assert said.startswith("expunge: ")
    assert "\n" not in said
    assert re.search(sentence, said), said
    assert list_files(copy) == before


def list_checkpoints(state: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (state / "checkpoints").iterdir()}


def test_a_worker_trains_a_shard_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """Without a cluster: what comes back is what training here writes."""
    from ray import cloudpickle as ray_pickle

    own = import_own(write_shards_job(tmp_path).parent)
    options = {name: value for name, value in METHOD.items() if name != "name"} | OPTIONS
    x, y = own.load()["train"].tensors
    here = expunge.Shards(own.build, state=tmp_path / "here", **options)
    here.learn((x, y), own.load()["ids"])

    def train(plan, settings, folder, shards):
        packed, told = ray_pickle.dumps((plan, dict(settings))), []
        for shard in shards:
            files = shards_of_jobs._read_files(folder, shard, range(2))
            done, made = train_apart([], packed, shard, files)
            told.append(done)
            for name, data in made.items():
                (folder.path / name).write_bytes(data)
        return told

    there = expunge.Shards(own.build, state=tmp_path / "there", workers=train, **options)
    there.learn((x, y), own.load()["ids"])
    assert list_checkpoints(tmp_path / "there") == list_checkpoints(tmp_path / "here")
    assert there.trained == here.trained


@pytest.mark.slow
def test_shards_on_ray(tmp_path: Path) -> None:
    job = write_shards_job(tmp_path)
    here = succeed("learn", job, "--out", tmp_path / "here")
    there = succeed("learn", job, "--out", tmp_path / "there", "--ray", "--workers", "2")
    assert there["digest"] == here["digest"]
    assert list_checkpoints(tmp_path / "there") == list_checkpoints(tmp_path / "here")


def test_what_a_request_costs(copy: Path) -> None:
    """THEORY, section 12: one example (2R+1)/(3RS), ten people 0.61, a hundred 0.995."""
    for S, R in ((8, 4), (4, 1), (3, 7)):
        assert expect_work(S, R, 1) == pytest.approx((2 * R + 1) / (3 * R * S))
    assert round(expect_work(8, 4, 10), 2) in (0.60, 0.61)
    assert round(expect_work(8, 4, 100), 3) == 0.995
    words = ("plan", "--epsilon", "1", "--delta", "1e-5", "--job", copy / "job.toml")
    found = succeed(*words)
    assert {(c["shards"], c["slices"]) for c in found["costs"]} >= {(2, 2), (4, 1), (8, 4)}
    assert {c["people"] for c in found["costs"]} == {1, 3, 10}
    whole = {round(c["seconds"] / c["part"], 6) for c in found["costs"]}
    assert len(whole) == 1, "seconds are parts of one training"
    shown = call(*words).stdout
    assert "part of all training that a request repeats" in shown
    assert "here a request of one person trains for about" in " ".join(shown.split())


def test_a_pilot_measures_the_price_on_people_who_are_never_learned(tmp_path: Path) -> None:
    job = write_shards_job(tmp_path, data={"pilot": "own.py:load_pilot"})
    before = list_files(tmp_path)
    found = succeed("plan", "--job", job, "--pilot")
    assert list_files(tmp_path) == before, "a pilot leaves nothing"
    prices = found["pilot"]["prices"]
    accuracy = {(price["shards"], price["slices"]): price["test"] for price in prices}
    assert list(accuracy) == [(1, 1), (2, 2), (4, 1), (4, 4), (8, 1), (8, 4)]
    assert (found["pilot"]["examples"], found["pilot"]["of"]) == (40, 60)
    assert accuracy[1, 1] > 60
    pilot = import_own(tmp_path).load_pilot()
    own = expunge.Shards(import_own(tmp_path).build, seed="public", shards=2, slices=2, **OPTIONS)
    own.learn(pilot["train"], ids=pilot["ids"])
    x, y = pilot["test"]
    right = (own.release().model(x).argmax(1) == y).double().mean()
    assert accuracy[2, 2] == pytest.approx(100 * float(right))
    told = " ".join(call("plan", "--job", job, "--pilot").stdout.split())
    assert "minus whole" in told
    assert "Whoever is learned was not looked at" in told
    assert "pilot" not in succeed("plan", "--job", job), "only if asked"


@pytest.mark.parametrize(
    ("pilot", "sentence"),
    [
        (None, "data.pilot is missing, which --pilot needs"),
        ("own.py:load_overlapping", "data.pilot returned 'p0' (30 in all), which data.load"),
        ("own.py:load_untested", "data.pilot must return 'test'"),
        ("own.py:nothing", "data.pilot returned a int; it must return a mapping"),
    ],
)
def test_a_pilot_that_sees_whom_the_job_learns_is_refused(
    tmp_path: Path, pilot: str | None, sentence: str
) -> None:
    done = call("plan", "--job", write_shards_job(tmp_path, data={"pilot": pilot}), "--pilot")
    assert (done.returncode, done.stdout) == (2, "")
    assert sentence in " ".join(done.stderr.split())


def test_the_template_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert call("init", "mine", "--shards").returncode == 0
    monkeypatch.chdir(tmp_path / "mine")
    learned = succeed("learn", "job.toml", "--release", "release-1")
    assert learned["release"]["test"] > 0.8
    told = succeed("forget", "state", "forget.txt", "--out", "release-2")
    assert (told["certificate"]["epsilon"], told["examples"]) == (0, 1396)
    done = call("verify", "release-2", "--retrain", "state")
    assert done.returncode == 0, done.stderr
    assert "was compared with nothing: give --parent" in done.stdout
