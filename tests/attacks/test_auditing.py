"""Ways to get a wrong certificate or engine past the audit: each must end in exit code 1."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import expunge.auditing.mechanism
from defects import stop_after_first_chunk, write_sign
from expunge.auditing.cells import examine_cells
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import RunRecord
from expunge.cli.main import main
from expunge.recipes import OutputPerturbation
from handmade import GRADIENT, make_run

torch.set_num_threads(1)
WEAK = OutputPerturbation(start_clip=1.0, noise_std=1.0)  # about (9.998, 1e-5)


def audit(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> tuple[int, str]:
    words = ["expunge", "audit", folder, "--trials", 20_000, "--seed", 1, *options]
    monkeypatch.setattr(sys, "argv", list(map(str, words)))
    with pytest.raises(SystemExit) as ended:
        main()
    code = ended.value.code
    assert isinstance(code, int)
    return code, json.loads((folder / "audit.json").read_text())["verdict"]


@pytest.fixture
def few_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the certificate is in doubt: a few long vectors are enough."""
    few = partial(examine_cells, runs=4)
    monkeypatch.setattr(expunge.auditing.mechanism, "examine_cells", few)


def seal(folder: Path, **changes: Any) -> None:
    """The certificate with other content and a digest that fits it."""
    held = Certificate.load(folder / "certificate.json").model_copy(update=changes)
    held = held.model_copy(update={"digest": held.compute_digest()})
    held.save(folder / "certificate.json")


@pytest.mark.usefixtures("few_runs")
@pytest.mark.parametrize("record", [True, False], ids=["record", "no record"])
def test_an_edited_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: bool) -> None:
    _, certificate = make_run(tmp_path, WEAK)
    assert audit(tmp_path, monkeypatch)[0] == 0
    bound = certificate.retrained.model_copy(update={"epsilon": 0.5})
    seal(tmp_path, epsilon=0.5, retrained=bound)
    if not record:
        (tmp_path / "record.json").unlink()
    code, verdict = audit(tmp_path, monkeypatch)
    assert code == 1
    assert "not 0.5" in verdict, "the trials alone refute it"
    assert "retrained.epsilon is 0.5, which is too small" in verdict
    assert ("but the record gives" in verdict) is record


@pytest.mark.usefixtures("few_runs")
def test_forty_times_the_noise_of_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A certificate that follows from its own recipe, which is not the one that ran."""
    make_run(tmp_path, WEAK)
    record = RunRecord.load(tmp_path / "record.json")
    (tmp_path / "other").mkdir()
    _, claimed = make_run(tmp_path / "other", OutputPerturbation(start_clip=1.0, noise_std=40.0))
    claimed.save(tmp_path / "certificate.json")
    seal(tmp_path, record=record.digest())
    code, verdict = audit(tmp_path, monkeypatch)
    assert code == 1
    assert "recipe.noise_std is 40.0, but the record gives 1.0" in verdict


@pytest.mark.usefixtures("few_runs")
def test_the_certificate_of_another_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, GRADIENT)
    record = RunRecord.load(tmp_path / "record.json")
    certify(record, delta=1e-5).save(tmp_path / "certificate.json")
    assert audit(tmp_path, monkeypatch)[0] == 0
    seal(tmp_path, gradient_evaluations=1)
    code, verdict = audit(tmp_path, monkeypatch)
    assert code == 1
    assert "gradient_evaluations is 1, but the record gives 640" in verdict


@pytest.mark.usefixtures("few_runs")
def test_other_weights_beside_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path, GRADIENT)
    save_file({"body.weight": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    code, verdict = audit(tmp_path, monkeypatch)
    assert code == 1
    assert "weights.after" in verdict


@pytest.mark.parametrize("coordinate", [1, 40_000])
def test_the_sign_of_an_old_weight_in_one_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coordinate: int
) -> None:
    make_run(tmp_path, WEAK)
    write_sign(coordinate)(monkeypatch)
    code, verdict = audit(tmp_path, monkeypatch)
    assert code == 1
    assert "bit 5 of coordinate" in verdict


def test_no_noise_beyond_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_run(tmp_path, WEAK)
    stop_after_first_chunk(monkeypatch)
    code, verdict = audit(tmp_path, monkeypatch)
    assert code == 1
    assert "is not of the noise's law" in verdict
