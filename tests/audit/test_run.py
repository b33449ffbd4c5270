"""``audit_run`` and ``expunge audit``: what they read, write, refuse and return."""

import json

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from typer.testing import CliRunner

from expunge import CertificateError, Data, GradientClipping, InputError, ModelClipping, unlearn
from expunge.audit.mechanism import audit_run
from expunge.certificates.consistency import find_contradictions
from expunge.cli.main import app
from tests.audit.defects import scale_noise
from tests.helpers.sample_releases import save_release

pytestmark = pytest.mark.usefixtures("one_thread")
GRADIENT = GradientClipping(0.1, 1.0, 0.1, 1.0, 3, 0.5)
MODEL = ModelClipping(0.1, 0.1, 1.0, 0.2, 3)


def make_run(folder, recipe):
    torch.manual_seed(0)
    data = Data((torch.randn(8, 40), torch.arange(8) % 4), ids=[f"p{i}" for i in range(8)])
    options = {"recipe": recipe, "loss": cross_entropy, "centre": "zero", "batch_size": 4}
    release = unlearn(nn.Linear(40, 4), lambda: nn.Linear(40, 4), data, forget=["p3"], **options)
    release.save(folder)
    return release


@pytest.mark.parametrize("recipe", [GRADIENT, MODEL])
def test_a_run_is_audited_and_what_was_found_is_written(recipe, tmp_path):
    release = make_run(tmp_path / "run", recipe)
    found = audit_run(tmp_path / "run", trials=5000, seed=1)
    assert not found.contradicts, found.verdict
    saved = json.loads((tmp_path / "run" / "audit.json").read_text())
    epsilon = saved["claims"][0]
    assert (epsilon["kind"], epsilon["value"]) == ("epsilon", release.certificate.epsilon)
    assert epsilon["proved"] == found.proved("epsilon") <= release.certificate.epsilon
    assert (saved["confidence"], saved["trials"], saved["problems"]) == (0.999, 5000, [])


def test_short_noise_in_a_record(tmp_path):
    record = make_run(tmp_path / "run", GRADIENT).record
    short = tuple(0.7 * norm for norm in record.trace.noise_norm)
    trace = record.trace.model_copy(update={"noise_norm": short})
    assert find_contradictions(record) == []
    (said,) = find_contradictions(record.model_copy(update={"trace": trace}))
    assert said == "the noise of all steps together is too short or too long for its noise_std"


def test_an_edited_record_and_none(tmp_path):
    record = make_run(tmp_path / "run", GRADIENT).record
    place = tmp_path / "run" / "record.json"
    record.model_copy(update={"nonce": "ab" * 32}).save(place)
    found = audit_run(tmp_path / "run", trials=5000, seed=1)
    assert found.contradicts
    assert "but the record's hash is" in found.verdict
    place.unlink()
    found = audit_run(tmp_path / "run", trials=5000, seed=1)
    assert not found.contradicts


def test_unusable_folders_are_refused(tmp_path):
    with pytest.raises(CertificateError, match=r"certificate.json is not a file"):
        audit_run(tmp_path)
    save_release(tmp_path / "exact")
    with pytest.raises(InputError, match="method is 'retraining': it adds no noise"):
        audit_run(tmp_path / "exact")
    assert not (tmp_path / "exact" / "audit.json").exists()


def test_the_command(tmp_path, monkeypatch):
    def run(*words):
        return CliRunner().invoke(app, ["audit", str(tmp_path / "run"), *map(str, words)])

    make_run(tmp_path / "run", GRADIENT)
    found = run("--trials", 5000, "--seed", 1, "--json")
    assert found.exit_code == 0
    assert {"claims", "contradicts", "confidence"} <= json.loads(found.stdout).keys()
    found = run("--trials", 5000, "--seed", 1)
    assert found.stdout.startswith("No contradiction: the attacks prove epsilon at delta = 1e-05")
    scale_noise(0.5)(monkeypatch)
    found = run("--trials", 20_000)
    assert found.exit_code == 1
    assert "contradicts the claim" in found.stdout
    assert json.loads((tmp_path / "run" / "audit.json").read_text())["contradicts"] is True
