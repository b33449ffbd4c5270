"""What a third reading tried on lists of people, their order, state folders and reports."""

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import expunge
from expunge.errors import InputError, VerificationError
from expunge.jobs.data import open_data
from expunge.jobs.lists import read_ids
from expunge.reports.page import write_report
from handmade import make_run
from job_folder import call
from shard_ensembles import learn, make, make_data

X, Y = torch.eye(4).repeat(3, 1), torch.arange(12) % 2
IDS = [f"p{i}" for i in range(12)]


# --- people whom a list names, and nobody reads


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('id,name\np22,"ann\np23,bob\np24,"cid"\n', "line 2 of .* has a cell with a line break"),
        ('id,name\np22,ann\np23,"bob\np24,cid\n', "line 3 of .* has a cell with a line break"),
        ('id,"name\np22,ann\n', "line 1 of .* has a cell with a line break"),
        ("id,name\np22,ann\n,bob\n", "line 3 of .* has nothing in 'id'"),
        ("name,id\nann,p22\n\nbob\n", "line 4 of .* has nothing in 'id'"),
        ("id,name,id\np22,ann,p23\n", "column of .* is 'id'; it must be there once"),
        ("name,id\nLee, Ann,p22\n", "line 2 of .* has 3 cells; it must have 2"),
    ],
)
def test_a_table_leaves_nobody_out_without_a_word(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_ids(tmp_path / "a.csv", "id")


def test_rows_of_nothing_name_nobody(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id,name\np22,ann,\n\n,\np23,\n")
    assert read_ids(tmp_path / "a.csv", "id") == ["p22", "p23"]


def test_nor_do_json_and_parquet(tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    for empty in (None, " "):
        parquet.write_table(pyarrow.table({"id": ["p22", empty]}), tmp_path / "a.parquet")
        with pytest.raises(InputError, match=r"row 2 of .* has nothing in 'id'"):
            read_ids(tmp_path / "a.parquet", "id")
    twice = pyarrow.table([["p22"], ["p23"]], names=["id", "id"])
    parquet.write_table(twice, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="it must be there once"):
        read_ids(tmp_path / "a.parquet", "id")
    (tmp_path / "a.json").write_text('["p22", ""]')
    with pytest.raises(InputError, match="item 1 of"):
        read_ids(tmp_path / "a.json")


# --- identifiers that have no order, where one stands for each sample


def make_head(kind: str, **options: Any) -> Any:
    features = expunge.Features()
    if kind == "statistics":
        return expunge.StatisticsHead(features, classes=2, **options)
    return expunge.ConvexHead(features, classes=2, **options)


LEARNERS: dict[str, Callable[[Any], Any]] = {
    "statistics": lambda ids: make_head("statistics").learn((X, Y), ids=ids),
    "convex": lambda ids: make_head("convex").learn((X, Y), ids=ids),
    "shards": lambda ids: make().learn(make_data(12)[:2], ids=ids),
    "batches": lambda ids: expunge.Batches(X, Y, batch_size=2, ids=ids),
    "a job": lambda ids: open_data({"train": (X, Y), "ids": ids}),
}
UNORDERED: dict[str, Callable[[Iterable[str]], Any]] = {
    "set": set,
    "frozenset": frozenset,
    "keys": lambda ids: dict.fromkeys(ids).keys(),
    "dict": dict.fromkeys,
}


@pytest.mark.parametrize("kind", UNORDERED)
@pytest.mark.parametrize("learner", LEARNERS)
def test_what_has_no_order_stands_for_no_sample(learner: str, kind: str) -> None:
    with pytest.raises(InputError, match=r"ids is a .*in the order of the samples"):
        LEARNERS[learner](UNORDERED[kind](IDS))


def test_nor_does_a_data_set_of_which_a_part_is_taken() -> None:
    rows: Any = torch.utils.data.TensorDataset(X, Y)
    rows.ids = set(IDS)
    with pytest.raises(InputError, match="in the order of the samples"):
        expunge.retrain(
            torch.nn.Linear(4, 2),
            torch.utils.data.DataLoader(torch.utils.data.Subset(rows, [0, 1]), batch_size=2),
            epochs=1,
            learning_rate=0.1,
        )


def test_a_request_needs_no_order() -> None:
    head = make_head("statistics")
    head.learn((X, Y), ids=np.array(IDS))
    assert head.forget({"p0", "p1"}).record.forget.count == 2


# --- a state by a path that means another place later


@pytest.mark.parametrize("kind", ["statistics", "convex", "shards"])
def test_a_state_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    if kind == "shards":
        made = make(state="state")
        monkeypatch.chdir("elsewhere")
        learn(made)
    else:
        made = make_head(kind, state="state")
        monkeypatch.chdir("elsewhere")
        made.learn((X, Y), ids=IDS)
    assert (tmp_path / "state").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


# --- a report about other weights


@pytest.mark.parametrize("public", [False, True])
def test_no_report_says_of_other_weights_that_they_may_be_released(
    tmp_path: Path, public: bool
) -> None:
    make_run(tmp_path)
    (tmp_path / "metrics.json").write_text(json.dumps({}))
    weights = tmp_path / "model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(VerificationError, match=r"model\.safetensors are not the weights"):
        write_report(tmp_path, public=public)
    done = call("report", tmp_path, *(["--public"] if public else []))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert not list(tmp_path.glob("*.html"))
    weights.unlink()
    assert write_report(tmp_path, public=public).exists()
