"""``audit_run`` and ``expunge audit``: what they read, write, refuse and return."""

import json
import math
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

import expunge.auditing.mechanism
from defects import shrink_noise
from expunge import CertificateError, InputError, OutputPerturbation, Retraining, certify
from expunge.auditing.cells import examine_cells
from expunge.auditing.mechanism import audit_run
from expunge.cli.main import main
from handmade import GRADIENT, MODEL, make_record, make_run

torch.set_num_threads(1)
DELTA = 1e-5


def test_audit_run_writes_what_it_found(tmp_path):
    _, certificate = make_run(tmp_path, GRADIENT)
    found = audit_run(tmp_path, trials=5000, seed=1)
    saved = json.loads((tmp_path / "audit.json").read_text())
    assert saved["epsilon_certified"] == certificate.epsilon == found.epsilon_certified
    assert saved["epsilon_lower"] == found.epsilon_lower <= certificate.epsilon
    assert saved["mu_certified"] == certificate.mu
    assert (saved["confidence"], saved["trials"], saved["contradicts"]) == (0.999, 5000, False)
    assert saved["run"]["problems"] == []
    assert 0 < saved["run"]["noise_p_value"] <= 1
    assert 1e-9 < saved["run"]["cells"]["p_value"] <= 1


@pytest.fixture(autouse=True)
def few_runs(monkeypatch):
    """The bits of a long vector have tests of their own; here a few runs are enough."""
    few = partial(examine_cells, runs=4)
    monkeypatch.setattr(expunge.auditing.mechanism, "examine_cells", few)


def test_audit_run_reads_the_record_too(tmp_path):
    record = make_record(GRADIENT, parameters=100_000)
    wobble = (0.9899, 0.9901, 0.99, 0.9902, 0.9898)
    norms = [w * 0.2 * math.sqrt(100_000) for w in wobble]
    record = replace(record, trace=replace(record.trace, noise_norm=norms))
    record = replace(record, execution=replace(record.execution, rounding=1e-6))
    certify(record, delta=DELTA).save(tmp_path / "certificate.json")
    record.save(tmp_path / "record.json")
    found = audit_run(tmp_path, trials=5000, seed=1)
    assert found.contradicts
    assert found.run.noise_p_value < 1e-9
    assert "realised noise" in found.verdict
    replace(record, nonce="ab" * 32).save(tmp_path / "record.json")
    assert "but the record's hash is" in audit_run(tmp_path, trials=5000, seed=1).verdict


def test_audit_run_needs_no_record(tmp_path):
    make_run(tmp_path, MODEL)
    (tmp_path / "record.json").unlink()
    found = audit_run(tmp_path, trials=5000, seed=1)
    assert found.run.noise_p_value is None
    assert found.run.problems == ()
    assert not found.contradicts


def test_unusable_directories_are_refused(tmp_path):
    with pytest.raises(CertificateError, match=r"certificate .*certificate\.json is not a file"):
        audit_run(tmp_path)
    make_run(tmp_path, Retraining())
    with pytest.raises(InputError, match="method is 'retraining': it adds no noise"):
        audit_run(tmp_path)
    assert not (tmp_path / "audit.json").exists()


def test_the_command_prints_json_and_one_sentence_for_bad_input(tmp_path, monkeypatch, capsys):
    def run(*words):
        monkeypatch.setattr(sys, "argv", ["expunge", "audit", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code, *capsys.readouterr()

    make_run(tmp_path, GRADIENT)
    code, out, _ = run(tmp_path, "--trials", 5000, "--seed", 1, "--json")
    assert code == 0
    assert {"epsilon_lower", "epsilon_certified", "confidence"} <= json.loads(out).keys()
    code, out, _ = run(tmp_path, "--trials", 5000, "--seed", 1)
    assert code == 0
    assert out.startswith("No contradiction: the attacks prove epsilon at least")
    code, out, err = run(tmp_path, "--trials", 10)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "trials is 10" in err
    code, out, err = run(tmp_path, "--seed", -1)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "seed is -1; it must be a whole number from 0 to" in err
    code, out, err = run(tmp_path / "nothing")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "certificate" in err


def test_the_command_fails_where_the_certificate_is_refuted(tmp_path, monkeypatch, capsys):
    shrink_noise(monkeypatch)
    make_run(tmp_path, OutputPerturbation(1.0, 0.8))
    monkeypatch.setattr(sys, "argv", ["expunge", "audit", str(tmp_path), "--trials", "20000"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "contradicts the claim" in capsys.readouterr().out
    assert json.loads((tmp_path / "audit.json").read_text())["contradicts"] is True
