"""Retraining and restart as jobs: certified, chained, reported, stopped and resumed."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import expunge
from expunge.errors import InputError, UnlearningError
from expunge.jobs.jobfile import read_job
from expunge.jobs.methods import choose_route
from expunge.jobs.preview import preview_job
from expunge.jobs.ranks import _check_sizes
from expunge.jobs.routes import plan_job
from expunge.jobs.run import run_job
from expunge.processes.group import Processes
from expunge.reports.page import write_report
from head_folder import write_head_job
from job_folder import call, command, list_files, make_environment
from route_folder import begin, hash_run, save_public, write_route

torch.set_num_threads(1)


def test_retraining_is_exact_and_its_files_hold(tmp_path: Path) -> None:
    job = write_route(tmp_path)
    done = run_job(job)
    c = done.certificate
    assert (c.epsilon, c.mu, c.survival_bound, c.start) == (0, 0, 0, "fresh")
    assert c.initialisation == "a module that was built afresh, seed 1"
    assert (c.data.forget.count, c.data.retain.count, c.data.checked) == (3, 47, True)
    assert c.releasable
    assert [row["stage"] for row in done.metrics["stages"]] == ["before", "after training"]
    assert done.metrics["cost"]["gradient evaluations, training"] == 94
    run = tmp_path / "run"
    expunge.verify(run / "certificate.json", record=run / "record.json")
    page = (run / "report.html").read_text()
    assert "trained again without them, from a fresh start" in page
    assert "after training" in write_report(run, public=True).read_text()
    refused = call("audit", run)
    assert (refused.returncode, "adds no noise" in refused.stderr) == (2, True)


def test_a_statement_without_noise_says_nothing_about_noise(tmp_path: Path) -> None:
    statement = run_job(write_route(tmp_path)).certificate.statement()
    assert "Method: retraining; without noise on 15 parameters." in statement
    assert "It holds with delta = 0 too" in statement
    for word in ("noisy", "radius", "clip", "last noise"):
        assert word not in statement.split("Covered:")[1], word


def test_the_old_model_is_no_input(tmp_path: Path) -> None:
    first = run_job(write_route(tmp_path / "a"))
    save = {"weight": torch.full((3, 4), 7.0), "bias": torch.tensor([1.0, 2.0, 9.0])}
    (tmp_path / "b").mkdir()
    save_file(save, tmp_path / "b/weights.safetensors")
    torch.manual_seed(99)  # what earlier code left behind
    second = run_job(write_route(tmp_path / "b"))
    assert hash_run(first) == hash_run(second)
    other = run_job(write_route(tmp_path / "c", method={"seed": 2}))
    assert hash_run(other) != hash_run(first)


def test_a_restart_starts_from_the_public_weights(tmp_path: Path) -> None:
    centre = save_public(tmp_path)
    tuning = {"epochs": 1, "learning_rate": 1e-30, "batch_size": 10}
    done = run_job(write_route(tmp_path, "restart", centre=centre, finetune=tuning))
    c, released = done.certificate, load_file(tmp_path / "run/model.safetensors")
    public = load_file(tmp_path / "public.safetensors")
    assert all(torch.equal(released[name], public[name]) for name in public)
    assert (c.start, c.epsilon) == ("centre", 0)
    assert c.initialisation == "public weights of public.safetensors, seed 1"
    assert c.weights.centre == expunge.processes.weights.hash_weights(public)
    assert "from the same public weights" in c.statement()
    assert f"public weights, {c.weights.centre}" in c.statement()
    run = tmp_path / "run"
    expunge.verify(run / "certificate.json", record=run / "record.json")
    assert "from public weights, and never used" in (run / "report.html").read_text()


def test_what_public_weights_lack_is_as_built(tmp_path: Path) -> None:
    torch.manual_seed(5)
    save = {"weight": torch.nn.Linear(4, 3).weight.detach().clone()}
    save_file(save, tmp_path / "part.safetensors")
    done = run_job(write_route(tmp_path, "restart", centre={"weights": "part.safetensors"}))
    assert "part.safetensors (without bias: as built)" in done.certificate.initialisation


@pytest.mark.parametrize("name", ["retraining", "restart"])
@pytest.mark.parametrize("load", ["load", "load_rows"])
def test_a_stopped_run_ends_in_the_same_weights(tmp_path: Path, name: str, load: str) -> None:
    tuning = {"optimizer": "adamw", "schedule": "one-cycle", "epochs": 3}
    jobs = []
    for folder in ("whole", "parts"):
        centre = save_public(tmp_path / folder) if name == "restart" else {}
        changes = {"centre": centre} if centre else {}
        jobs.append(
            write_route(
                tmp_path / folder, name, finetune=tuning, data={"load": f"own.py:{load}"}, **changes
            )
        )
    whole = run_job(jobs[0])
    begin(jobs[1], steps=4)
    assert not (tmp_path / "parts/run").exists()
    begin(jobs[1], steps=5, resume=True)
    again = run_job(jobs[1], resume=True)
    assert hash_run(again) == hash_run(whole)
    assert (whole.certificate.resumed, again.certificate.resumed) == (0, 2)
    assert again.metrics["curves"] == whole.metrics["curves"]
    run = tmp_path / "parts/run"
    expunge.verify(run / "certificate.json", record=run / "record.json")


@pytest.mark.slow
def test_a_killed_run_ends_in_the_same_weights(tmp_path: Path) -> None:
    whole = run_job(write_route(tmp_path / "whole"))
    job = write_route(tmp_path / "killed", output={"checkpoint_seconds": 0})
    words = command("unlearn", job)
    process = subprocess.Popen(words, env=make_environment(STEP_SECONDS="0.5"))
    saved = tmp_path / "killed/.run.unfinished/training.safetensors"
    while not saved.exists():
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (tmp_path / "killed/run").exists()
    done = subprocess.run([*words, "--resume", "--json"], env=make_environment(), check=True,
                          capture_output=True, text=True)  # fmt: skip
    told = json.loads(done.stdout)["certificate"]
    assert told["weights"]["after"] == hash_run(whole)
    assert told["resumed"] == 1


def test_batch_normalisation_begins_anew(tmp_path: Path) -> None:
    hashes = []
    for folder, mean in (("a", 0.0), ("b", 1e6)):
        job = write_route(tmp_path / folder, model={"build": "own.py:build_norm"})
        torch.manual_seed(4)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
        )
        model[1].running_mean.fill_(mean)
        save_file(dict(model.state_dict()), tmp_path / folder / "weights.safetensors")
        done = run_job(job)
        hashes.append(hash_run(done))
        assert any("began anew" in line for line in done.certificate.scope.covered)
    assert hashes[0] == hashes[1]


def test_a_second_request_is_chained(tmp_path: Path) -> None:
    run_job(write_route(tmp_path), out=tmp_path / "run1")
    (tmp_path / "forget2.txt").write_text("p10\n")
    job = write_route(
        tmp_path,
        model={"weights": "run1/model.safetensors", "parent": "run1/certificate.json"},
        data={"forget": "forget2.txt", "forgotten": ["forget.txt"]},
        method={"seed": 2},
    )
    done = run_job(job, out=tmp_path / "run2")
    assert done.certificate.data.retain.count == 46
    expunge.verify_chain([tmp_path / run / "certificate.json" for run in ("run1", "run2")])


def test_a_preview_tells_route_and_cost_and_writes_nothing(tmp_path: Path) -> None:
    job = write_route(tmp_path, "plan", method={"seed": 1})
    before = list_files(tmp_path)
    found = preview_job(job)
    assert list_files(tmp_path) == before
    assert (found.route, found.steps, found.finetune_gradient_evaluations) == ("retraining", 0, 94)
    assert found.seconds > 0
    assert "neither a state nor public weights" in found.why
    shown = call("unlearn", job, "--dry-run").stdout
    assert "route: retraining." in shown
    assert "The training sees 94 examples" in shown


# --- the plan chooses


def test_the_plan_chooses_by_what_the_job_has(tmp_path: Path) -> None:
    plain = read_job(write_route(tmp_path / "a", "plan")).job
    assert choose_route(plain) == "retraining"
    centre = save_public(tmp_path / "b")
    assert (
        choose_route(read_job(write_route(tmp_path / "b", "plan", centre=centre)).job) == "restart"
    )
    asked = {"choose": "output-perturbation", "seed": None}
    noisy = read_job(write_route(tmp_path / "c", "plan", method=asked)).job
    assert choose_route(noisy) == "output-perturbation"


def test_a_planned_run_says_why(tmp_path: Path) -> None:
    done = run_job(write_route(tmp_path, "plan"))
    assert done.metrics["route"] == "retraining"
    assert done.metrics["why"] in (tmp_path / "run/report.html").read_text()
    assert done.metrics["why"].count(". ") == 1, "two sentences"


def test_a_state_answers_a_planned_job(tmp_path: Path) -> None:
    write_head_job(tmp_path / "head")
    assert call("learn", tmp_path / "head/job.toml", "--out", tmp_path / "state").returncode == 0
    job = write_route(tmp_path / "job", "plan", model={"state": "../state"})
    (tmp_path / "job/forget.txt").write_text("p3\n")
    found = preview_job(job)
    assert (found.route, found.forget) == ("state", 2)
    assert found.seconds is not None
    planned = plan_job(read_job(job)).routes[0]
    assert planned.name == "state"
    assert planned.of_retraining is not None
    done = run_job(job)
    assert done.certificate.epsilon == 0
    assert done.certificate.statistics is not None
    assert "state of a model built to forget" in done.metrics["why"]
    run = tmp_path / "job/run"
    assert call("verify", run, "--store", tmp_path / "state").returncode == 0
    assert done.metrics["why"] in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"finetune": dict.fromkeys(("epochs", "learning_rate", "batch_size"))}, "finetune.epochs"),
        ({"method": {"steps": 4}}, "method.steps is not known to retraining"),
        ({"method": {"batch_size": 10}}, "its training stands in [finetune]"),
        ({"method": {"name": "restart"}}, "centre.weights is missing; a restart begins from"),
        ({"method": {"name": "plan", "scale": 0.1}}, "method.scale is for a noisy method"),
        ({"model": {"state": "nowhere"}}, "model.state is 'nowhere'"),
        (
            {"centre": {"kind": "zero"}},
            "centre.kind is 'zero'; it must be left out with retraining, which has no noise",
        ),
        ({"centre": {"seed": "a"}}, "no noise; the public seed of its start is method.seed"),
        ({"centre": {"weights": "weights.safetensors"}}, "name = 'restart' begins from them"),
        (
            {"method": {"name": "plan"}, "centre": {"kind": "initialisation", "seed": 3}},
            "has 2 mistakes",
        ),
    ],
)
def test_mistakes_are_one_sentence(tmp_path: Path, changes: dict, sentence: str) -> None:
    job = write_route(tmp_path, **changes)
    with pytest.raises(InputError) as caught:
        read_job(job)
    assert sentence in str(caught.value)


def test_a_job_without_training_is_refused(tmp_path: Path) -> None:
    job = write_route(tmp_path)
    text = job.read_text()
    start, end = text.index("[finetune]"), text.index("[output]")
    job.write_text(text[:start] + text[end:])
    with pytest.raises(InputError, match=r"\[finetune\] is missing; retraining trains with"):
        read_job(job)


def test_many_processes_are_refused(tmp_path: Path) -> None:
    job = read_job(write_route(tmp_path, "plan")).job

    class Two(Processes):
        alone, size = False, 2

    with pytest.raises(InputError, match="start the job without torchrun"):
        _check_sizes(job, Two())


def test_a_model_that_is_not_finite_is_not_released(tmp_path: Path) -> None:
    job = write_route(tmp_path, finetune={"epochs": 20, "learning_rate": 3e38, "batch_size": 10})
    with pytest.raises(UnlearningError, match="not finite"):
        run_job(job)
    assert not (tmp_path / "run").exists()


# --- every route of a job


def test_every_route_has_its_cost_beside_retraining(tmp_path: Path) -> None:
    job = write_route(tmp_path, "plan")
    done = call("plan", "--job", job, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    routes = {route["name"]: route for route in found["routes"]}
    assert next(iter(routes)) == "retraining"
    assert routes["retraining"]["of_retraining"] == 1
    assert routes["retraining"]["gradient_evaluations"] == 94
    for name in ("gradient-clipping", "model-clipping", "output-perturbation"):
        assert routes[name]["seconds"] > 0
        assert routes[name]["epochs"] >= 2
    assert (found["route"], found["next"]) == ("retraining", f"expunge unlearn {job}")
    assert found["epsilon"] == 1.0
    assert {"guarantee", "keeps", "asks_for", "costs"} <= routes["shards"].keys()
    assert routes["shards"]["seconds"] > 0
    assert routes["shards"]["epochs"] < 2
    shown = call("plan", "--job", job).stdout
    assert "[finetune]: 2 epochs" in shown
    assert f"next: expunge unlearn {job}" in " ".join(shown.split())


def test_where_no_training_is_named_it_is_assumed_aloud(tmp_path: Path) -> None:
    from job_folder import write_job

    job = write_job(tmp_path)
    text = job.read_text()
    job.write_text(text[: text.index("[finetune]")] + text[text.index("[output]") :])
    found = json.loads(call("plan", "--job", job, "--json").stdout)
    assert "10 epochs" in found["assumption"]
    assert "assumed" in found["assumption"]
    refused = call("plan", "--job", job, "--parameters", "5")
    assert refused.returncode == 2
    assert "--parameters is 5; it must be left out with --job" in refused.stderr
