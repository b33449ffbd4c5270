"""From the files of a run directory to a page: complete or one sentence, nothing lost."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import RunRecord
from expunge.certificates.wording import METHOD_WORDS
from expunge.errors import ExpungeError, InputError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.statistics import StatisticsHead
from expunge.reports.page import render_report, write_report
from handmade import make_record, make_run
from pages import METRICS, Page


def test_the_commands_on_the_page_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, certificate = make_run(tmp_path)
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    monkeypatch.chdir(tmp_path)
    exec(page.codes["verify-python"], {})
    printed = subprocess.run(
        ["sha256sum", "certificate.json"], capture_output=True, text=True, check=True
    )
    assert printed.stdout.split()[0] == certificate.sha256
    assert certificate.sha256 in page.text


def test_writing_replaces_the_page_and_leaves_nothing_else(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "report.html").write_text("old")
    before = {path.name for path in tmp_path.iterdir()}
    assert write_report(str(tmp_path)) == tmp_path / "report.html"
    assert {path.name for path in tmp_path.iterdir()} == before
    assert (tmp_path / "report.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    (tmp_path / "record.json").unlink()
    (tmp_path / "metrics.json").unlink()
    assert write_report(tmp_path, public=True) == tmp_path / "report-public.html"


def break_file(name: str, content: bytes | None) -> Any:
    def change(folder: Path) -> None:
        (folder / name).unlink() if content is None else (folder / name).write_bytes(content)

    return change


def swap_record(folder: Path) -> None:
    make_record(nonce="ef" * 32).save(folder / "record.json")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (break_file("record.json", None), "has no record.json; a report is made from"),
        (break_file("certificate.json", None), "has no certificate.json"),
        (break_file("metrics.json", None), "has no metrics.json"),
        (break_file("record.json", b"{"), "record.json is not JSON"),
        (break_file("record.json", b"[]"), "record.json does not hold a JSON object"),
        (break_file("record.json", b"{}"), "record.json cannot be used: format is None"),
        (break_file("certificate.json", b"\xff"), "certificate.json cannot be used: a certificate"),
        (break_file("certificate.json", b"{}"), "cannot be used: schema_version is None"),
        (break_file("metrics.json", b"{'a': 1}"), "metrics.json is not JSON"),
        (break_file("metrics.json", b"3"), "metrics.json does not hold a JSON object"),
        (break_file("metrics.json", b'{"cost": NaN}'), "NaN is not a number in JSON"),
        (break_file("metrics.json", b"[" * 100_000), "metrics.json is not JSON"),
        (break_file("metrics.json", b'{"stages": 3}'), "metrics.stages is 3"),
        (break_file("metrics.json", b'{"stages": [{}]}'), "metrics.stages.0.stage is {}"),
        (break_file("metrics.json", b'{"stages": [{"stage": "a", "test": 93.5}]}'),
         "metrics.stages.0.test is 93.5: input should be less than or equal to 1"),
        (break_file("metrics.json", b'{"curves": [{"name": "a", "x": [1], "y": []}]}'),
         "x has 1 values and y has 0"),
        (break_file("metrics.json", b'{"curves": [{"name": "a", "x": [1], "y": [1e308]}]}'),
         "the range of an axis"),
        (break_file("metrics.json", b'{"title": 7}'), "metrics.title is 7"),
        (break_file("audit.json", b"no"), "audit.json is not JSON"),
        (break_file("audit.json", b'{"confidence": true}'), "audit.confidence is True"),
        (swap_record, "was not made from this record"),
    ],
)  # fmt: skip
def test_unusable_directories_are_one_sentence(tmp_path: Path, change: Any, sentence: str) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.json").write_text("{}")
    (tmp_path / "report.html").write_text("the page before")
    change(tmp_path)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ExpungeError) as caught:
        write_report(tmp_path)
    message = str(caught.value)
    assert sentence in message
    assert "\n" not in message
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "report.html").read_text() == "the page before"


def test_a_directory_that_is_none_and_a_record_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a directory"):
        write_report(tmp_path / "nowhere")
    with pytest.raises(InputError, match="only a public report"):
        render_report(None, certify(make_record(), delta=1e-5))


def test_records_read_from_disk_give_the_same_page(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.json").write_text(json.dumps(METRICS))
    written = write_report(tmp_path).read_bytes().decode()
    record = RunRecord.load(tmp_path / "record.json")
    certificate = Certificate.load(tmp_path / "certificate.json")
    assert written == render_report(record, certificate, METRICS)


@pytest.mark.parametrize("kind", [StatisticsHead, ConvexHead])
def test_models_built_to_forget_have_a_page(tmp_path: Path, kind: Any) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(60) % 3
    ids = [f"user-{i // 2}" for i in range(60)]
    given = {} if kind is StatisticsHead else {"weight_decay": 1e-3, "tolerance": 1e-6}
    features = Features(bits=6, lift=2, seed="s")
    head = kind(features, classes=3, state=tmp_path / "state", key=bytes(32), **given)
    head.learn((rng.normal(size=(60, 4)) + y[:, None], y), ids)
    run = head.forget(["user-3", "user-7"])
    certificate = certify(run.record, delta=1e-5)
    page = Page(render_report(run.record, certificate))
    assert page.problems == []
    words = " ".join(page.text.split())
    assert "2 people, with 4 samples, were to be forgotten" in words
    assert METHOD_WORDS[certificate.recipe.method] in words
    assert certificate.statistics is not None
    assert certificate.statistics.digest in words
