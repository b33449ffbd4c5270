"""Jobs from job.toml to a verified directory, and what they measure and tell on the way."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import opens
from expunge.certificates.record import RunRecord
from expunge.certificates.signing import generate_key_pair
from expunge.certificates.verification import verify
from expunge.errors import ExpungeError, InputError, UnlearningError
from expunge.jobs.preview import preview_job
from expunge.jobs.run import run_job
from expunge.reports.metrics import parse_metrics
from job_folder import call, list_files, run, write_job


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_a_run_is_complete_and_says_what_it_did(tmp_path: Path) -> None:
    done, folder = run_job(write_job(tmp_path)), tmp_path / "run"
    certificate = verify(folder / "certificate.json", record=folder / "record.json")
    assert certificate == done.certificate
    assert 0.99 < certificate.epsilon <= 1.0
    assert certificate.releasable
    record = RunRecord.load(folder / "record.json")
    kept = [f"p{i}" for i in range(50) if i not in (3, 7, 31)]
    assert opens(record.forget, ["p3", "p7", "p31"])
    assert opens(record.retain, kept)
    assert opens(record.finetune.data, kept)
    assert record.gradient_evaluations == 40
    metrics = parse_metrics(json.loads((folder / "metrics.json").read_text()))
    assert [row.stage for row in metrics.stages] == ["before", "after noise", "after fine-tuning"]
    assert metrics.cost["gradient evaluations, noisy steps"] == 40
    assert (folder / "metrics.jsonl").stat().st_mode & 0o077 == 0, "as private as the record"
    assert metrics.cost["gradient evaluations, fine-tuning"] == 94
    assert metrics.curves[0].x[-1] == 2.0
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    kinds = [json.loads(line)["event"] for line in lines]
    assert kinds[:2] == ["start", "evaluation"]
    assert kinds[-1] == "end"
    assert {"step", "fine-tuning"} <= set(kinds)
    assert not (tmp_path / ".run.unfinished").exists()


def test_the_old_model_is_measured_as_it_is(tmp_path: Path) -> None:
    done = run_job(write_job(tmp_path))
    weights = load_file(tmp_path / "weights.safetensors")
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(7))
    right = ((x @ weights["weight"].T + weights["bias"]).argmax(1) == x[:, :3].argmax(1)).double()
    before = done.metrics["stages"][0]
    gone = [3, 7, 31]
    assert before["forget"] == pytest.approx(right[gone].mean().item())
    assert before["test"] == pytest.approx(right[50:].mean().item())
    assert before["retain"] == pytest.approx((right[:50].sum() - right[gone].sum()).item() / 47)


@pytest.mark.parametrize("load", ["load_pair", "load_rows"])
def test_every_kind_of_data_set_gives_the_same_run(tmp_path: Path, load: str) -> None:
    seeded = {"method": {"seed": 5}}
    one = run_job(write_job(tmp_path / "one", **seeded))
    other = run_job(write_job(tmp_path / "other", data={"load": f"own.py:{load}"}, **seeded))
    if load == "load_pair":
        assert one.certificate.weights.after == other.certificate.weights.after
    assert one.certificate.gradient_evaluations == other.certificate.gradient_evaluations
    assert one.metrics["stages"][0] == pytest.approx(other.metrics["stages"][0])


def test_a_seed_is_for_experiments(tmp_path: Path) -> None:
    seeded = {"method": {"seed": 5}}
    first = run_job(write_job(tmp_path, **seeded), out=tmp_path / "first")
    again = call("unlearn", write_job(tmp_path, **seeded), "--out", tmp_path / "again")
    assert again.returncode == 0
    assert "can subtract it" in again.stdout
    assert not first.certificate.releasable
    second = Certificate.load(tmp_path / "again" / "certificate.json")
    assert first.certificate.weights.after == second.weights.after
    other = run_job(write_job(tmp_path), out=tmp_path / "other")
    assert other.certificate.weights.after != second.weights.after


def test_a_regression_is_measured_by_its_loss(tmp_path: Path) -> None:
    (tmp_path / "forget.txt").write_text("3\n7\n")
    path = write_job(tmp_path, data={"load": "own.py:load_regression"}, model={"loss": "mse"})
    rows = run_job(path).metrics["stages"]
    assert rows[0]["retain"] is None
    assert rows[1]["retain_loss"] > rows[-1]["retain_loss"] > 0
    assert "test" not in rows[0]


def test_a_model_that_diverged_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forget.txt").write_text("3\n7\n")
    wild = {"learning_rate": 1e30, "epochs": 5}
    path = write_job(
        tmp_path, data={"load": "own.py:load_regression"}, model={"loss": "mse"}, finetune=wild
    )
    with pytest.raises(UnlearningError, match="weight is not finite after fine-tuning"):
        run_job(path)
    assert not (tmp_path / "run").exists()


def test_the_control_and_the_cost_of_training_again_are_told(tmp_path: Path) -> None:
    path = write_job(tmp_path, evaluation={"control": True, "retraining_epochs": 30, "most": 20})
    metrics = run_job(path).metrics
    arms = {arm["arm"]: arm for arm in metrics["arms"]}
    assert list(arms) == ["gradient-clipping", "centre", "retraining"]
    evaluations = [arm["gradient_evaluations"] for arm in arms.values()]
    assert evaluations == [40 + 94, 40 + 94, 30 * 47]
    assert len(metrics["stages"]) == 5


def test_a_signed_run_verifies_with_its_key_only(tmp_path: Path) -> None:
    private, public = generate_key_pair()
    (tmp_path / "key.pem").write_bytes(private)
    (tmp_path / "public.pem").write_bytes(public)
    (tmp_path / "other.pem").write_bytes(generate_key_pair()[1])
    run_job(write_job(tmp_path, output={"sign": "key.pem"}))
    certificate = tmp_path / "run" / "certificate.json"
    assert verify(certificate, public_key=tmp_path / "public.pem").signature is not None
    with pytest.raises(ExpungeError, match="it is signed by the key"):
        verify(certificate, public_key=tmp_path / "other.pem")


def test_a_second_request_is_chained_and_keeps_the_first_one_out(tmp_path: Path) -> None:
    run_job(write_job(tmp_path))
    (tmp_path / "forget2.txt").write_text("p11\np12\n")
    model = {"weights": "run/model.safetensors", "parent": "run/certificate.json"}
    data = {"forget": "forget2.txt", "forgotten": ["forget.txt"]}
    done = run_job(write_job(tmp_path, model=model, data=data, output={"dir": "run2"}))
    certificate = tmp_path / "run2" / "certificate.json"
    assert verify(certificate, parent=tmp_path / "run" / "certificate.json") == done.certificate
    kept = [f"p{i}" for i in range(50) if i not in (3, 7, 31, 11, 12)]
    assert opens(RunRecord.load(tmp_path / "run2" / "record.json").retain, kept)
    third = {"weights": "run2/model.safetensors", "parent": "run2/certificate.json"}
    (tmp_path / "forget3.txt").write_text("p40\n")
    data |= {"forget": "forget3.txt", "forgotten": ["forget2.txt"]}
    with pytest.raises(InputError, match=r"the data are not what the parent .* retained"):
        run_job(write_job(tmp_path, model=third, data=data, output={"dir": "run3"}))
    data["forgotten"] = ["forget.txt", "forget2.txt"]
    run_job(write_job(tmp_path, model=third, data=data, output={"dir": "third"}))
    (tmp_path / "else.txt").write_text("p20\n")
    data["forgotten"] = ["else.txt"]
    with pytest.raises(InputError, match=r"none of data\.forgotten is the list that the parent"):
        run_job(write_job(tmp_path, model=model, data=data, output={"dir": "run3"}))
    wrong = {"parent": "run/certificate.json"}
    data["forgotten"] = ["forget.txt"]
    with pytest.raises(InputError, match="not the certificate of the weights"):
        run_job(write_job(tmp_path, model=wrong, data=data, output={"dir": "run3"}))
    assert not (tmp_path / "run3").exists()


def test_buffers_that_remember_are_refused_or_reset(tmp_path: Path) -> None:
    torch.manual_seed(0)
    nn = torch.nn
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    save_file(dict(model.state_dict()), tmp_path / "weights.safetensors")
    with pytest.raises(UnlearningError, match=r"1\.running_mean"):
        run_job(write_job(tmp_path, model={"build": "own.py:build_norm"}))
    path = write_job(tmp_path, model={"build": "own.py:build_norm", "buffers": "reset"})
    assert run_job(path).certificate.buffers.policy == "reset"


def test_a_public_centre_is_used_and_the_old_model_is_none(tmp_path: Path) -> None:
    path = write_job(tmp_path, centre={"weights": "weights.safetensors"})
    with pytest.raises(InputError, match="centre is the old model"):
        run_job(path)
    torch.manual_seed(1)
    torch.save({"state_dict": torch.nn.Linear(4, 3).state_dict()}, tmp_path / "public.pt")
    done = run_job(write_job(tmp_path, centre={"weights": "public.pt"}))
    assert done.certificate.weights.centre is not None


def test_a_dry_run_promises_what_the_run_keeps_and_writes_nothing(tmp_path: Path) -> None:
    path = write_job(tmp_path)
    before = list_files(tmp_path)
    shown = call("unlearn", path, "--dry-run", "--json")
    assert shown.returncode == 0, shown.stderr
    assert list_files(tmp_path) == before
    promised = json.loads(shown.stdout)
    assert promised["parameters"] == 15
    assert (promised["retain"], promised["forget"]) == (47, 3)
    assert promised["gradient_evaluations"] == 40
    assert promised["finetune_gradient_evaluations"] == 94
    assert promised["seconds"] > 0
    kept = run_job(path).certificate
    assert kept.epsilon == promised["epsilon"]
    assert kept.recipe.noise_std == promised["noise_std"]
    with pytest.raises(InputError, match="already holds files"):
        preview_job(path)


def test_a_callback_hears_of_everything_and_may_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_job(tmp_path, output={"callback": "own.py:track"})
    monkeypatch.setenv("TRACKED", str(tmp_path / "heard.txt"))
    run_job(path, out=tmp_path / "one")
    lines = (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()
    told = [json.loads(line)["event"] for line in lines]
    assert (tmp_path / "heard.txt").read_text().split("\n")[:-1] == told
    monkeypatch.setenv("TRACKED", "/nowhere/heard.txt")
    monkeypatch.setattr("expunge.jobs.tracking.LOG.propagate", True)
    run_job(path, out=tmp_path / "two")
    assert caplog.text.count("output.callback failed and is not called again") == 1
    verify(tmp_path / "two" / "certificate.json")


def test_doctor_and_version_tell_what_matters() -> None:
    shown = call("--version").stdout
    assert shown.startswith("expunge ")
    assert f"torch {version('torch')}" in shown
    found = json.loads(call("doctor", "--json").stdout)
    assert found["good"] is True
    assert found["versions"]["torch"] == version("torch")
    assert found["findings"].keys() >= {"system", "versions", "noise", "disk"}


def test_the_shell_completes_commands() -> None:
    done = run(_EXPUNGE_COMPLETE="complete_bash", COMP_WORDS="expunge un", COMP_CWORD="1")
    assert "unlearn" in done.stdout.split()
