"""The experiments with heads: lives on digits, texts by source package, and the table of them."""

import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import debian
import heads
import table_heads
from arms import RETRAIN
from expunge import UnlearningError
from expunge.errors import InputError
from expunge.forgettable.statistics import StatisticsHead
from expunge.tasks.samples import Samples
from features import TextBackbone
from figure_budget import identify
from heads import Life, run_lives
from problems import load_problem
from runs import Store

LIVES = [
    Life("exact-statistics", 0, 0, (1e-4, 1e-3)),
    Life("exact-statistics", 32, 0, (1e-4,)),
    Life("convex-head", 0, 0, (1e-3,)),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    run_lives(load_problem("digits"), LIVES, Store(out, "heads_digits"))
    return out


def test_lives_are_run_once_and_named_by_what_they_are(results: Path) -> None:
    store = Store(results, "heads_digits")
    done, before = store.read(), store.file.read_bytes()
    assert list(done) == [name for life in LIVES for name in life.name_runs()]
    run_lives(load_problem("digits"), LIVES, store)
    assert store.file.read_bytes() == before
    assert all(entry["test"] > 85 for entry in done.values())


def test_certified_lives_keep_certificates(results: Path) -> None:
    done = Store(results, "heads_digits").read()
    kept = {e["version"]: e["certified_epsilon"] for e in done.values() if "certificate" in e}
    assert kept["plain, exact"] == kept["lift 32, exact"] == 0.0
    assert 0.999 < kept["plain, certified"] <= 1.0


def test_a_head_that_kept_something_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forget = StatisticsHead.forget
    monkeypatch.setattr(StatisticsHead, "forget", lambda head, ids: forget(head, list(ids)[1:]))
    with pytest.raises(UnlearningError, match="not that of a life without"):
        run_lives(load_problem("digits"), LIVES[:1], Store(tmp_path, "heads_digits"))
    assert Store(tmp_path, "heads_digits").read() == {}


def test_what_is_measured_is_what_the_released_module_answers() -> None:
    problem = load_problem("digits")
    head = StatisticsHead(features := heads.make_features(LIVES[1]), classes=10)
    head.learn((problem.train.inputs, problem.train.targets), ids=problem.train.ids.tolist())
    run = head.release()
    right = run.model(problem.test.inputs).argmax(1) == problem.test.targets
    found = heads.prepare_measure(problem, features)(run)
    assert found["test"] == round(100 * float(right.double().mean()), 3)


def add_retraining(out: Path, rates: dict[float, tuple[float, float]]) -> None:
    for rate, (validation, test) in rates.items():
        entry: dict[str, Any] = identify(RETRAIN) | {"key": f"{rate}", "learning_rate": rate}
        entry |= {"seed": 0, "validation": validation, "test": test, "seconds": 1.0}
        Store(out, "heads_digits").add(entry)


def test_the_table_chooses_on_validation_data_alone(tmp_path: Path) -> None:
    add_retraining(tmp_path, {0.1: (90.0, 50.0), 1.0: (80.0, 99.0)})
    found = table_heads.read_rows("digits", tmp_path)
    assert list(found) == ["retraining, the paper's network"]
    chosen = found["retraining, the paper's network"]
    assert (chosen.chosen, chosen.get("test")) == (0.1, {0: 50.0})
    assert "rate 0.1 | 50.00 ± 0.00" in table_heads.tabulate("digits", tmp_path)


@pytest.mark.parametrize(
    ("low", "high", "word"), [(-0.2, 0.5, "holds"), (-1.0, -0.5, "fails"), (-1.0, 0.5, "not shown")]
)
def test_verdicts_follow_the_interval(low: float, high: float, word: str) -> None:
    assert word in table_heads.judge(low >= -0.3, high < 0)


class Encoder(nn.Module):
    """Hidden states that depend on all tokens of a text, as those of a transformer."""

    def forward(self, input_ids: torch.Tensor) -> Any:
        one_hot = nn.functional.one_hot(input_ids, 12).float()
        hidden = one_hot + one_hot.cumsum(1)
        return type("Output", (), {"last_hidden_state": hidden})


def test_a_text_has_the_same_features_whatever_is_beside_it() -> None:
    tokens = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0], [1, 2, 3, 4], [8, 11, 0, 0]])
    backbone = TextBackbone("toy", Encoder(), together=2)
    together = backbone(tokens)
    assert torch.equal(together, torch.cat([backbone(row[None]) for row in tokens]))
    assert torch.allclose(together.norm(dim=1), torch.ones(4))
    assert torch.equal(backbone(tokens.flip(0)), together.flip(0))


def write_descriptions(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lines = [f"p{i}\ts{i // 3}\tsection-{i // 30}\ttext {i}" for i in range(90)]
    text = "\n".join(["package\tsource\tsection\tdescription", *lines, lines[0]]) + "\n"
    path = folder / debian.FILE
    path.write_bytes(lzma.compress(text.encode()))
    checksum = __import__("hashlib").sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(debian, "DIGEST", f"sha256:{checksum}")
    monkeypatch.setattr(debian, "tokenise", lambda texts: torch.arange(len(texts))[:, None])
    return path


def test_no_source_package_stands_in_two_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_descriptions(tmp_path, monkeypatch)
    task = debian.load(tmp_path)
    parts = [task.train, task.validation, task.test]
    names = [set(part.ids.tolist()) for part in parts]
    assert [len(part) for part in parts] == [72, 6, 12]
    assert sum(map(len, names)) == len(set.union(*names)) == 30
    assert task.classes == ("section-0", "section-1", "section-2")


def test_other_descriptions_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_descriptions(tmp_path, monkeypatch).write_bytes(lzma.compress(b"other"))
    with pytest.raises(InputError, match="is not the official file"):
        debian.load(tmp_path)


def test_a_forgotten_identifier_takes_all_of_its_samples() -> None:
    ids = np.array([f"s{i // 4}" for i in range(80)])
    samples = Samples(torch.arange(80.0)[:, None], torch.zeros(80, dtype=torch.int64), ids)
    problem = replace(load_problem("digits"), train=samples)
    for seed in (0, 1):
        retain, forget = replace(problem, forget_seed=seed).parts
        assert (len(retain), len(forget)) == (72, 8)
        assert not set(retain.ids) & set(forget.ids)
    assert not np.array_equal(forget.ids, problem.parts[1].ids)
