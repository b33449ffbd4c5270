"""Attempts to carry the old model, or the forgotten, into a route without noise."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import expunge
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import RunRecord
from expunge.errors import CertificateError, ExpungeError, InputError, VerificationError
from expunge.forgettable.memory import open_memory
from expunge.jobs.jobfile import read_job
from expunge.jobs.preview import preview_job
from expunge.jobs.run import run_job
from expunge.processes.weights import find_copied
from head_folder import write_head_job
from job_folder import OWN, call
from route_folder import begin, hash_run, save_public, write_route

torch.set_num_threads(1)
OLD = "weights.safetensors"


def refuse(job: Path, sentence: str, **options: Any) -> None:
    """The job is refused by its dry run and by its run, and nothing is written."""
    for attempt in (preview_job, run_job):
        if options and attempt is preview_job:
            continue
        with pytest.raises(ExpungeError) as caught:
            attempt(job, **options)
        assert sentence in str(caught.value)
    assert not (job.parent / "run").exists()


# --- the old weights as public ones


def read_old(folder: Path) -> dict[str, torch.Tensor]:
    write_route(folder)
    return load_file(folder / OLD)


DISGUISES = {
    "renamed": lambda old: old,
    "scaled": lambda old: {name: -3 * t for name, t in old.items()},
    "scaled tensor by tensor": lambda old: {"weight": 2 * old["weight"], "bias": -5 * old["bias"]},
    "half": lambda old: {name: t.half() for name, t in old.items()},
    "half and back": lambda old: {name: t.half().float() for name, t in old.items()},
    "bfloat16 weights alone": lambda old: {"weight": old["weight"].bfloat16()},
    "double": lambda old: {name: t.double() for name, t in old.items()},
    "a breath of noise": lambda old: {n: t + 1e-5 * torch.randn_like(t) for n, t in old.items()},
    "one tensor changed": lambda old: old | {"bias": torch.randn(3)},
    "the other tensor changed": lambda old: old | {"weight": torch.randn(3, 4)},
    "one tensor only": lambda old: {"weight": old["weight"].clone()},
    "a small tensor only": lambda old: {"bias": old["bias"].clone()},
}


@pytest.mark.parametrize("disguise", DISGUISES)
@pytest.mark.parametrize("name", ["restart", "plan"])
def test_the_old_model_is_no_public_weights(tmp_path: Path, disguise: str, name: str) -> None:
    torch.manual_seed(3)
    made = DISGUISES[disguise](read_old(tmp_path))
    save_file({n: t.contiguous() for n, t in made.items()}, tmp_path / "pretrained.safetensors")
    job = write_route(tmp_path, name, centre={"weights": "pretrained.safetensors"})
    refuse(job, "the old model, or a multiple of it within a thousandth")


@pytest.mark.parametrize("kind", ["pt", "nested", "prefixed"])
def test_the_old_model_in_another_format_is_no_public_weights(tmp_path: Path, kind: str) -> None:
    old = read_old(tmp_path)
    given: Any = {"pt": old, "nested": {"state_dict": old, "epoch": 3},
                  "prefixed": {f"module.{name}": t for name, t in old.items()}}[kind]  # fmt: skip
    torch.save(given, tmp_path / "pretrained.pt")
    refuse(write_route(tmp_path, "restart", centre={"weights": "pretrained.pt"}), "old model")


def test_the_old_model_inside_a_larger_file_is_no_public_weights(tmp_path: Path) -> None:
    old = read_old(tmp_path)
    save_file(old | {"decoder.weight": torch.randn(50)}, tmp_path / "large.safetensors")
    refuse(write_route(tmp_path, "restart", centre={"weights": "large.safetensors"}), "decoder")


def test_public_weights_that_are_honest_are_taken(tmp_path: Path) -> None:
    """The control of the above: even where the old model was trained from them."""
    centre = save_public(tmp_path)
    public = load_file(tmp_path / "public.safetensors")
    trained = {name: t + 0.01 * torch.randn_like(t) for name, t in public.items()}
    save_file(trained, tmp_path / OLD)
    assert run_job(write_route(tmp_path, "restart", centre=centre)).certificate.epsilon == 0


# --- a build() that is not fresh


def write_own(job: Path, more: str) -> Path:
    (job.parent / "own.py").write_text(OWN + more)
    return job


LOADING = """
from pathlib import Path
from safetensors.torch import load_file

def build_old():
    model = Slow(4, 3)
    model.load_state_dict(load_file(Path(__file__).with_name("weights.safetensors")))
    return model

def build_part():
    model = build_old()
    nn.init.normal_(model.weight)
    return model

def build_near():
    model = build_old()
    with torch.no_grad():
        model.weight.mul_(1.0005)
        model.bias.mul_(0.9995)
    return model

kept = []

def build_once():
    if not kept:
        kept.append(Slow(4, 3))
    return kept[0]

count = [0]

def build_other():
    count[0] += 1
    torch.manual_seed(count[0])
    return Slow(4, 3)

def build_system():
    torch.manual_seed(int.from_bytes(os.urandom(4)))
    return Slow(4, 3)
"""


@pytest.mark.parametrize("name", ["build_old", "build_part", "build_near", "build_once"])
def test_what_build_loads_is_no_fresh_start(tmp_path: Path, name: str) -> None:
    job = write_route(tmp_path, model={"build": f"own.py:{name}"})
    refuse(
        write_own(job, LOADING),
        "under every seed, or one that is alike, so the old model could be in it",
    )


def test_a_shuffled_old_model_is_no_fresh_start(tmp_path: Path) -> None:
    more = """
def build_shuffled():
    model = build_old()
    with torch.no_grad():
        model.weight.copy_(model.weight.flip(0) + 3)
    return model
"""
    job = write_route(tmp_path, model={"build": "own.py:build_shuffled"})
    refuse(write_own(job, LOADING + more), "the same weight under every seed")


@pytest.mark.parametrize("name", ["build_other", "build_system"])
def test_a_start_that_nobody_can_draw_again_is_refused(tmp_path: Path, name: str) -> None:
    job = write_route(tmp_path, model={"build": f"own.py:{name}"})
    refuse(write_own(job, LOADING), "when it is called again under seed 1")


# --- forgotten people among the retained


def test_a_person_on_many_samples_is_gone_from_all(tmp_path: Path) -> None:
    more = """
def load_repeated():
    x, y = make()
    x, y = torch.cat([x, x[3:4] + 0.5, x[3:4] - 0.5]), torch.cat([y, y[3:4], y[3:4]])
    return {"train": (x, y), "ids": [f"p{i}" for i in range(60)] + ["p3", " p3".strip()]}

def load_without():
    x, y = make()
    kept = [i for i in range(60) if i not in (3, 7, 31)]
    return {"train": (x[kept + [0]], y[kept + [0]]), "ids": [f"p{i}" for i in kept] + ["zz"]}
"""
    hashes = []
    for folder, load in (("a", "load_repeated"), ("b", "load_without")):
        job = write_route(tmp_path / folder, data={"load": f"own.py:{load}"})
        if load == "load_without":
            (tmp_path / folder / "forget.txt").write_text("zz\n")
        hashes.append(hash_run(run_job(write_own(job, more))))
    assert hashes[0] == hashes[1], "as if their samples had never been there"


def test_the_data_are_loaded_once(tmp_path: Path) -> None:
    """A second reading could return what the first one parted."""
    more = """
calls = []

def load_changing():
    calls.append(1)
    if len(calls) > 1:
        raise RuntimeError("read again")
    return load()
"""
    job = write_route(tmp_path, data={"load": "own.py:load_changing"})
    assert run_job(write_own(job, more)).certificate.data.checked


def test_another_seed_left_by_code_changes_nothing(tmp_path: Path) -> None:
    more = """
def load_seeding():
    torch.manual_seed(sum(b"p3 p7 p31"))
    return load()
"""
    first = run_job(write_route(tmp_path / "a"))
    job = write_route(tmp_path / "b", data={"load": "own.py:load_seeding"})
    assert hash_run(run_job(write_own(job, more))) == hash_run(first)


def test_frozen_tensors_that_learned_are_refused(tmp_path: Path) -> None:
    more = """
def build_frozen():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    return model
"""
    job = write_own(
        write_route(tmp_path, model={"build": "own.py:build_frozen", "public": "build"}), more
    )
    torch.manual_seed(8)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3))
    save_file(dict(model.state_dict()), tmp_path / OLD)
    refuse(job, "differs from the public tensors")


def test_a_module_that_hides_a_tensor_is_refused(tmp_path: Path) -> None:
    more = """
from safetensors.torch import load_file
from pathlib import Path

def build_hiding():
    model = Slow(4, 3)
    model.memory = [load_file(Path(__file__).with_name("weights.safetensors"))["weight"]]
    return model
"""
    job = write_route(tmp_path, model={"build": "own.py:build_hiding"})
    refuse(write_own(job, more), "no noise covers it")


# --- a checkpoint of something else


EDITS: dict[str, dict[str, Any]] = {
    "learning rate": {"finetune": {"learning_rate": 0.2}},
    "optimizer": {"finetune": {"optimizer": "adam"}},
    "batches": {"finetune": {"batch_size": 5}},
    "seed": {"method": {"seed": 3}},
    "network": {"model": {"build": "own.py:build_wide"}},
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_job_does_not_go_on(tmp_path: Path, edit: str) -> None:
    more = """
def build_wide():
    torch.rand(1)
    return Slow(4, 3)
"""
    begin(write_own(write_route(tmp_path), more))
    refuse(write_own(write_route(tmp_path, **EDITS[edit]), more), "had another", resume=True)


def test_another_request_does_not_go_on(tmp_path: Path) -> None:
    begin(write_route(tmp_path))
    (tmp_path / "forget.txt").write_text("p3\np7\n")
    refuse(write_route(tmp_path), "had another forget set", resume=True)


def test_other_data_under_the_same_names_do_not_go_on(tmp_path: Path) -> None:
    more = """
def load_shifted():
    x, y = make()
    return {"train": (x[:50] + float(os.environ.get("SHIFT", "0")), y[:50]),
            "ids": [f"p{i}" for i in range(50)]}
"""
    job = write_own(write_route(tmp_path, data={"load": "own.py:load_shifted"}), more)
    begin(job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHIFT", "1")
        refuse(job, "had another retained data", resume=True)


def test_a_checkpoint_of_another_run_put_in_place_is_refused(tmp_path: Path) -> None:
    begin(write_route(tmp_path / "a", finetune={"learning_rate": 0.3}))
    begin(write_route(tmp_path / "b"))
    name = ".run.unfinished/training.safetensors"
    shutil.copy(tmp_path / "a" / name, tmp_path / "b" / name)
    refuse(write_route(tmp_path / "b"), "belongs to another training: its training", resume=True)


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path: Path) -> None:
    begin(write_route(tmp_path))
    path = tmp_path / ".run.unfinished/training.safetensors"
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["model.weight"] = torch.zeros(4, 4)
    save_file(tensors, path, metadata)
    refuse(write_route(tmp_path), "is damaged: weight has the shape (4, 4)", resume=True)
    path.write_bytes(path.read_bytes()[:100])
    refuse(write_route(tmp_path), "cannot be read", resume=True)


def test_public_weights_that_change_on_the_way_do_not_go_on(tmp_path: Path) -> None:
    job = write_route(tmp_path, "restart", centre=save_public(tmp_path))
    begin(job)
    save_public(tmp_path, seed=6)
    refuse(job, "had another start", resume=True)


# --- certificates


def test_a_broken_chain_is_refused(tmp_path: Path) -> None:
    run_job(write_route(tmp_path), out=tmp_path / "run1")
    (tmp_path / "forget2.txt").write_text("p10\n")
    parent = {"parent": "run1/certificate.json"}
    lists = {"forget": "forget2.txt", "forgotten": ["forget.txt"]}
    old = write_route(tmp_path, model=parent, data=lists, method={"seed": 2})
    refuse(old, "is not the certificate of the weights")
    unlearned = {"weights": "run1/model.safetensors"}
    refuse(write_route(tmp_path, model=unlearned, method={"seed": 2}), "was unlearned itself")
    returned = {"forget": "forget2.txt", "forgotten": ["forget2.txt"]}
    job = write_route(tmp_path, model=parent | unlearned, data=returned, method={"seed": 2})
    refuse(job, "none of data.forgotten is the list that the parent")


@pytest.mark.parametrize("name", ["retraining", "restart"])
def test_a_certificate_edited_to_the_other_route_does_not_hold(tmp_path: Path, name: str) -> None:
    centre = {"centre": save_public(tmp_path)} if name == "restart" else {}
    run_job(write_route(tmp_path, name, **centre))
    path, record = tmp_path / "run/certificate.json", tmp_path / "run/record.json"
    kept = RunRecord.load(record)
    other = {"restart": {"start": "fresh", "centre": None},
             "retraining": {"start": "centre", "centre": "ab" * 32}}[name]  # fmt: skip
    told = json.loads(path.read_bytes())
    told["start"], told["weights"]["centre"] = other["start"], other["centre"]
    path.write_text(json.dumps(told))
    with pytest.raises((VerificationError, CertificateError)):
        expunge.verify(path)
    forged = certify(dataclasses.replace(kept, **other), delta=1e-5)
    path.write_bytes(forged.to_bytes())
    with pytest.raises((VerificationError, CertificateError)):
        expunge.verify(path, record=record)


def test_retraining_from_the_old_model_cannot_be_certified(tmp_path: Path) -> None:
    run_job(write_route(tmp_path))
    record = RunRecord.load(tmp_path / "run/record.json")
    for change, sentence in (
        ({"start": "model"}, "start is 'model'"),
        ({"start": "centre"}, "it starts there"),
        ({"centre": "cd" * 32}, "it starts there"),
        ({"start": "centre", "centre": record.weights_before}, "the old model itself"),
    ):
        with pytest.raises(ExpungeError, match=sentence):
            certify(dataclasses.replace(record, **change), delta=1e-5)


def test_a_run_that_checked_nothing_is_not_releasable(tmp_path: Path) -> None:
    run_job(write_route(tmp_path))
    record = RunRecord.load(tmp_path / "run/record.json")
    made: Certificate = certify(dataclasses.replace(record, checked=False), delta=1e-5)
    assert not made.releasable


# --- a state that still holds the person


@pytest.fixture
def planned(tmp_path: Path) -> Path:
    write_head_job(tmp_path / "head")
    assert call("learn", tmp_path / "head/job.toml", "--out", tmp_path / "state").returncode == 0
    job = write_route(tmp_path / "job", "plan", model={"state": "../state"})
    (tmp_path / "job/forget.txt").write_text("p3\n")
    return job


def test_a_state_no_longer_holds_whom_it_forgot(planned: Path) -> None:
    state = planned.parent.parent / "state"
    assert sum(open_memory(state).count_rows(["p3"]).values()) > 0
    run_job(planned)
    assert sum(open_memory(state).count_rows(["p3"]).values()) == 0


def test_a_state_that_never_saw_the_person_answers_nothing(planned: Path) -> None:
    (planned.parent / "forget.txt").write_text("somebody\n")
    refuse(planned, "'somebody', which was never learned")


def test_a_state_that_holds_people_of_an_earlier_request_is_refused(planned: Path) -> None:
    (planned.parent / "earlier.txt").write_text("p5\n")
    lists = {"forgotten": ["earlier.txt"]}
    job = write_route(planned.parent, "plan", model={"state": "../state"}, data=lists)
    refuse(job, "still holds 'p5' of the earlier request earlier.txt")


def test_a_state_put_back_from_a_backup_is_refused(planned: Path) -> None:
    state, backup = planned.parent.parent / "state", planned.parent.parent / "backup"
    shutil.copytree(state, backup)
    run_job(planned, out=planned.parent / "first")
    shutil.rmtree(state / "rows")
    shutil.copytree(backup / "rows", state / "rows")
    (planned.parent / "forget.txt").write_text("p5\n")
    with pytest.raises(ExpungeError):
        run_job(planned)
    assert not (planned.parent / "run").exists()


def test_a_plan_with_a_state_takes_no_other_chain(planned: Path) -> None:
    text = planned.read_text().replace(
        'state = "../state"', 'state = "../state"\nparent = "own.py"'
    )
    planned.write_text(
        text.replace('forget = "forget.txt"', 'forget = "forget.txt"\nforgotten = ["forget.txt"]')
    )
    with pytest.raises(InputError, match="a state keeps the chain"):
        preview_job(planned)


def test_noise_is_never_chosen_where_nobody_asked(tmp_path: Path) -> None:
    for key in ("scale", "steps", "learning_rate", "weight_decay"):
        with pytest.raises(InputError, match=f"method.{key} is for a noisy method"):
            read_job(write_route(tmp_path / key, "plan", method={key: 1}))


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_one_layer_of_the_old_model_cast_there_and_back_is_found(kind: torch.dtype) -> None:
    torch.manual_seed(0)
    old = {"a": torch.randn(8, 8), "b": torch.randn(100, 100), "c": torch.ones(8)}
    new = {name: torch.randn_like(t) for name, t in old.items()}
    assert find_copied(old, new) == ""
    assert "a is bit for bit" in find_copied(old, new | {"a": old["a"].to(kind).float()})
    trained = {name: t + 1e-3 * torch.randn_like(t) for name, t in old.items()}
    assert find_copied(old, new | {"c": old["c"], "a": trained["a"]}) == "", (
        "a constant says nothing"
    )
