"""Jobs from start to end: what is written, what is refused, what comes out again."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import expunge
from tests.helpers.job_folder import NOISE, call, list_files, refuse, run, succeed, write_job

pytestmark = pytest.mark.usefixtures("one_thread")
METHODS: dict[str, dict[str, Any]] = {
    "gradient-clipping": {},
    "model-clipping": {"start_clip": None, "grad_clip": None, "model_clip": 0.5},
    "output-perturbation": dict.fromkeys(["grad_clip", "learning_rate", "weight_decay", "steps"]),
}


def test_retraining_by_a_function_of_ones_own(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    shown = succeed("unlearn", path)
    assert "epsilon = 0, delta = 0, compared to retrained" in shown
    assert "check it with: expunge verify" in shown
    found = expunge.verify(tmp_path / "run", people=["p3", "p7", "p31"]).certificate
    assert (found.forget.count, found.retained.samples) == (3, 47)
    assert found.training is not None
    assert found.training.function == "a function of the operator"
    assert None not in (found.code.build, found.code.data, found.code.train)
    model = expunge.load_model(tmp_path / "run", lambda: torch.nn.Linear(4, 3))
    assert model.weight.shape == (3, 4)
    assert not (tmp_path / ".run.unfinished").exists()
    for name in ("metrics.json", "record.json"):
        assert (tmp_path / "run" / name).stat().st_mode & 0o077 == 0, "private"
    assert (tmp_path / "run" / "report.html").is_file()


def test_what_was_measured(tmp_path: Path) -> None:
    succeed("unlearn", write_job(tmp_path))
    found = json.loads((tmp_path / "run" / "metrics.json").read_text())
    before, after = found["stages"]
    assert (before["stage"], after["stage"]) == ("before", "after training")
    assert after["test"] > before["test"]
    assert (after["retain_count"], after["forget_count"], after["test_count"]) == (47, 3, 10)


def test_the_options_of_training_in_the_job(tmp_path: Path) -> None:
    options = {"function": None, "epochs": 3, "learning_rate": 0.5, "loss": "cross_entropy"}
    path = write_job(tmp_path, training=options, model={"old": None})
    succeed("unlearn", path)
    found = expunge.verify(tmp_path / "run").certificate
    assert found.training is not None
    assert found.training.function == "expunge.Training"
    assert found.training.options["epochs"] == 3
    stages = json.loads((tmp_path / "run" / "metrics.json").read_text())["stages"]
    assert [stage["stage"] for stage in stages] == ["after training"], "there is no old model"


@pytest.mark.parametrize("load", ["load", "load_pairs"])
@pytest.mark.parametrize("method", METHODS)
def test_every_noisy_method_meets_its_target(tmp_path: Path, method: str, load: str) -> None:
    path = write_job(
        tmp_path, NOISE, method={"name": method} | METHODS[method], data={"load": f"own.py:{load}"}
    )
    succeed("unlearn", path)
    found = expunge.verify(tmp_path / "run").certificate
    assert found.method == method
    assert 0.99 < found.epsilon <= 1.0
    assert found.delta == 1e-5
    assert found.releasable


def test_without_parameters_the_recipe_is_planned_around_build(tmp_path: Path) -> None:
    path = write_job(tmp_path, NOISE | {"method": {"name": "model-clipping", "epsilon": 2.0}})
    succeed("unlearn", path)
    found = expunge.verify(tmp_path / "run").certificate
    assert found.method == "model-clipping"
    assert found.epsilon <= 2.0


def test_a_second_noisy_run_of_one_old_model_is_refused_before_it_runs(tmp_path: Path) -> None:
    succeed("unlearn", write_job(tmp_path, NOISE))
    path = write_job(tmp_path, NOISE, output={"dir": "second"})
    for command in ("check", "unlearn"):
        told = refuse(command, path)
        assert "is a noisy run of the same old model" in told
        assert "examples stay" not in told
    assert not (tmp_path / ".second.unfinished").exists()
    path = write_job(tmp_path, NOISE, output={"dir": "second"}, method={"releases": 2})
    succeed("unlearn", path)


def test_seeded_noise_is_not_for_release_and_a_zero_centre_is_the_papers(tmp_path: Path) -> None:
    path = write_job(tmp_path, NOISE, method={"noise_seed": 0, "centre": "zero"})
    shown = succeed("unlearn", path)
    assert "Not for release" in shown
    assert not expunge.verify(tmp_path / "run").certificate.releasable


def test_a_loss_of_ones_own_and_regression(tmp_path: Path) -> None:
    training = {"loss": "mse_loss", "learning_rate": 0.01}
    path = write_job(tmp_path, NOISE, training=training, data={"load": "own.py:load_regression"})
    succeed("unlearn", path)
    stage = json.loads((tmp_path / "run" / "metrics.json").read_text())["stages"][-1]
    assert stage["retain"] is None
    assert stage["retain_loss"] > 0


def test_a_checkpoint_with_two_sets_of_weights_needs_a_key(tmp_path: Path) -> None:
    sets = {name: torch.nn.Linear(4, 3).state_dict() for name in ("model", "ema")}
    path = write_job(tmp_path, NOISE, model={"old": "both.pt"})
    torch.save(sets, tmp_path / "both.pt")
    assert "ema" in refuse("unlearn", path)
    succeed("unlearn", write_job(tmp_path, NOISE, model={"old": "both.pt", "key": "ema"}))


def test_a_second_request_is_chained_to_the_first(tmp_path: Path) -> None:
    succeed("unlearn", write_job(tmp_path, output={"dir": "release-1"}))
    (tmp_path / "second.txt").write_text("p8\n")
    changes = {"data": {"forget": "second.txt"}, "output": {"dir": "release-2"}}
    path = write_job(tmp_path, method={"parent": "release-1"}, **changes)
    told = refuse("unlearn", path)
    assert "'p3'" in told
    assert "whom the parent release forgot" in told
    (tmp_path / "second.txt").write_text("p8\np3\np7\np31\n")
    succeed("unlearn", path)
    assert "not looked at: the parent" in succeed("verify", tmp_path / "release-2")
    release = tmp_path / "release-2"
    assert "the parent" not in succeed("verify", release, "--parent", tmp_path / "release-1")
    other = call("verify", tmp_path / "release-1", "--parent", release)
    assert other.returncode == 1


def test_the_release_is_signed_where_the_job_names_a_key(tmp_path: Path) -> None:
    succeed("keygen", tmp_path / "key.pem")
    succeed("unlearn", write_job(tmp_path, output={"sign": "key.pem"}))
    shown = succeed("verify", tmp_path / "run", "--key", tmp_path / "key.pem.pub")
    assert "signed by the key" in shown


def test_the_caller_may_name_people_folder_and_parent(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    first = expunge.run_job(path, forget=["p1"], out=tmp_path / "one")
    assert first.certificate.forget.count == 1
    second = expunge.run_job(
        path, forget=["p1", "p2"], out=tmp_path / "two", parent=tmp_path / "one"
    )
    assert second.certificate.parent == first.certificate.sha256
    expunge.verify(tmp_path / "two", parent=tmp_path / "one", people=["p1", "p2"])


FAILING: dict[str, tuple[dict[str, Any], str]] = {
    "build": ({"model": {"build": "own.py:fail"}}, "RuntimeError: the disk of the shop is on fire"),
    "no module": ({"model": {"build": "own.py:nothing"}}, "build() returned a int; it must be"),
    "no function": ({"model": {"build": "own.py:biuld"}}, "own.py has no function biuld"),
    "no file": ({"model": {"build": "mine.py:build"}},
     "model.build is 'mine.py:build'; there is no such file in /"),
    "no such module": ({"data": {"load": "shop_of_nobody.data:load"}},
     "ModuleNotFoundError: No module named 'shop_of_nobody'"),
    "too little noise": ({"method": NOISE["method"] | {"noise_std": 0.02}},
     "and epsilon is 1; it needs more noise or smaller clips"),
    "a clip that nothing covers": ({"method": NOISE["method"] | {"start_clip": 1e300}},
     "no value meets epsilon = 1, delta = 1e-05"),
    "a key that is none": ({"output": {"sign": "own.py"}}, "own.py cannot be used"),
    "load": ({"data": {"load": "own.py:fail"}}, "data.load failed: RuntimeError: the disk of the"),
    "no data": ({"data": {"load": "own.py:nothing"}}, "data.load returned a int; it must return"),
    "train": ({"training": {"function": "own.py:train_torn"}},
     "the run failed in the model, its data or its training: ValueError: row 40 is torn"),
    "too few arguments": ({"training": {"function": "own.py:fail"}}, "(model, examples, seed)"),
}  # fmt: skip


@pytest.mark.parametrize("case", FAILING)
def test_code_that_fails_is_one_sentence_and_leaves_nothing(tmp_path: Path, case: str) -> None:
    changes, sentence = FAILING[case]
    path = write_job(tmp_path, **changes)
    before = list_files(tmp_path)
    told = refuse("unlearn", path)
    assert sentence in told
    assert "Traceback" not in told
    assert list_files(tmp_path) == before
    assert not (tmp_path / ".run.unfinished").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    succeed("unlearn", path)
    before = list_files(tmp_path)
    assert "run already holds files; name another one or remove it" in refuse("unlearn", path)
    assert list_files(tmp_path) == before


def test_check_names_every_mistake_at_once_and_writes_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path, NOISE)
    before = list_files(tmp_path)
    shown = succeed("check", path)
    assert "certifies epsilon = " in shown
    assert "one batch: forward and backward" in shown
    (tmp_path / "forget.txt").write_text("nobody\n")
    torch.save(torch.nn.Linear(4, 2).state_dict(), tmp_path / "other.pt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "x").write_text("")
    told = refuse("check", write_job(tmp_path, NOISE, model={"old": "other.pt"}))
    for sentence in ("has 3 mistakes", "run already holds files", "'nobody'", "weight"):
        assert sentence in told
    after = {name: digest for name, digest in list_files(tmp_path).items() if name in before}
    assert after.keys() == before.keys()


def test_an_exact_release_comes_out_again_in_a_fresh_process(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    succeed("unlearn", path)
    for name in ("weights.safetensors", "forget.txt"):
        (tmp_path / name).write_bytes(b"gone")
    done = run("replay", tmp_path / "run", path)
    assert done.returncode == 0, done.stderr
    assert "the same bits again" in done.stdout
    own = tmp_path / "own.py"
    own.write_text(own.read_text().replace("model.parameters(), 0.5", "model.parameters(), 0.4"))
    done = call("replay", tmp_path / "run", path, "--json")
    assert done.returncode == 1
    assert "the source of train is another" in json.loads(done.stdout)["differs"]
    assert "tensors differ" in done.stderr
    assert "it may be: " in done.stderr


def test_noise_is_not_replayed(tmp_path: Path) -> None:
    path = write_job(tmp_path, NOISE)
    succeed("unlearn", path)
    assert "whose noise nobody can draw again" in refuse("replay", tmp_path / "run", path)


def test_the_plan_of_a_job_says_what_each_route_costs(tmp_path: Path) -> None:
    shown = succeed("plan", "--job", write_job(tmp_path))
    for name in ("linear-model", "* retraining", "shards", "noise"):
        assert f"{name}: " in shown
    assert "Noise buys nothing here" in shown
    found = json.loads(succeed("plan", "--job", write_job(tmp_path, NOISE), "--json"))
    assert found["taken"] == "noise"
    assert [route["name"] for route in found["routes"]][-1] == "noise"


def test_json_of_a_run(tmp_path: Path) -> None:
    done = call("unlearn", write_job(tmp_path), "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["certificate"]["epsilon"] == 0
    assert "examples stay" in done.stderr, "progress goes to stderr"


def test_everything_that_cannot_be_loaded_is_named_at_once(tmp_path: Path) -> None:
    changes = {"data": {"load": "own.py:fail"}, "model": {"build": "own.py:biuld"}}
    path = write_job(tmp_path, **changes)
    (tmp_path / "forget.txt").write_text("\n")
    for command in ("check", "unlearn"):
        told = refuse(command, path)
        assert "job.toml has 3 mistakes:" in told
        for sentence in ("names nobody", "no function biuld", "data.load failed"):
            assert sentence in told
