"""Data as people have them: each is handed over as it is, and both routes take it."""

from __future__ import annotations

import sqlite3

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import expunge
from tests.everyday.conftest import FORGET, NAMES, RECIPE

TRAIN = expunge.Training(epochs=1, batch_size=16)


def build():
    return nn.Linear(6, 2)


def serve(data, samples=5, loss=cross_entropy, train=TRAIN, **noisy):
    """Both routes, without the five rows of one person; returns the exact one."""
    train = expunge.Training(epochs=1, batch_size=16, loss=loss) if train is TRAIN else train
    given = {"forget": FORGET, "recipe": RECIPE, "loss": loss, "batch_size": 16} | noisy
    for release in (
        expunge.unlearn(build(), build, data, **given),
        exact := expunge.retrain(build, data, forget=FORGET, train=train),
    ):
        assert release.certificate.forget.samples == samples
        assert release.certificate.retained.samples == len(data) - samples
    return exact


@pytest.fixture
def expected(data):
    return serve(data).certificate.weights.after


def test_one_training_whatever_the_data_come_in(rows, expected):
    x, y = rows
    table = pd.DataFrame({"user": NAMES})
    for data in (
        expunge.Data((x.numpy(), y.numpy()), ids=np.array(NAMES)),
        expunge.Data((x, y), ids=table["user"]),
        expunge.Data(TensorDataset(x, y), ids=table["user"].tolist()),
        expunge.Data(list(zip(x, y, strict=True)), ids=NAMES),
        expunge.Data(ConcatDataset([TensorDataset(x[:9], y[:9]), TensorDataset(x[9:], y[9:])]),
                     ids=NAMES),
        expunge.Data(Subset(TensorDataset(x, y), range(40)), ids=NAMES),
    ):  # fmt: skip
        assert serve(data).certificate.weights.after == expected


def test_numbers_for_names(rows):
    numbers = [i % 8 for i in range(40)]
    for ids in (numbers, np.array(numbers), torch.tensor(numbers), pd.Series(numbers)):
        data = expunge.Data(rows, ids=ids)
        for forget in ([3], np.array([3]), {3}, (n for n in (3,))):
            release = expunge.retrain(build, data, forget=forget, train=TRAIN)
            assert release.certificate.forget.samples == 5


def test_columns_by_name(rows):
    x, y = rows

    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"])

    serve(expunge.Data({"x": x, "y": y}, ids=NAMES), loss=loss)
    frame = pd.DataFrame(x.numpy(), columns=list("abcdef")).assign(y=y.numpy(), user=NAMES)

    def collate(rows):
        table = pd.DataFrame(rows)
        return torch.tensor(table[list("abcdef")].to_numpy(dtype="float32")), torch.tensor(
            table["y"].to_numpy(dtype="int64")
        )

    serve(expunge.Data(frame, person="user", collate=collate))


def test_rows_of_a_data_base(rows, expected, tmp_path):
    with sqlite3.connect(tmp_path / "rows.db") as database:
        database.execute("create table rows (place integer primary key, x blob, y int, user text)")
        database.executemany(
            "insert into rows values (?, ?, ?, ?)",
            [(i, a.numpy().tobytes(), int(b), name)
             for i, (a, b, name) in enumerate(zip(*rows, NAMES, strict=True))],
        )  # fmt: skip

    class Rows(Dataset):
        def __init__(self, path):
            self.database = sqlite3.connect(path)

        def __len__(self):
            return self.database.execute("select count(*) from rows").fetchone()[0]

        def __getitem__(self, place):
            x, y = self.database.execute(
                "select x, y from rows where place = ?", (place,)
            ).fetchone()
            return torch.from_numpy(np.frombuffer(x, np.float32).copy()), y

    with sqlite3.connect(tmp_path / "rows.db") as database:
        names = [name for (name,) in database.execute("select user from rows order by place")]
    data = expunge.Data(Rows(tmp_path / "rows.db"), ids=names)
    assert serve(data).certificate.weights.after == expected


def test_an_example_of_two_people_goes_with_either(rows):
    pairs = [(f"user-{i % 8}", f"user-{(i + 1) % 8}") for i in range(40)]
    data = expunge.Data(rows, ids=pairs)
    serve(data, samples=10)
    assert len(data.without(["user-3", "user-4"])) == 25


class Stream(IterableDataset):
    """What is read once, row by row, and says whose each row is."""

    def __init__(self, rows):
        self.rows, self.passes = rows, 0

    def __iter__(self):
        self.passes += 1
        for x, y, user in zip(*self.rows, NAMES, strict=True):
            yield {"x": x, "y": y, "user": user}


def collate(rows):
    return torch.stack([row["x"] for row in rows]), torch.stack([row["y"] for row in rows])


def test_a_stream_is_counted_in_one_pass(rows):
    stream = Stream(rows)
    data = expunge.Data(stream, person="user", collate=collate)
    seen = []

    def train(model, examples, seed):
        seen.append(stream.passes)
        for x, y in DataLoader(examples, batch_size=16, collate_fn=collate):
            cross_entropy(model(x), y).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
        seen.append(stream.passes)

    release = expunge.retrain(build, data, forget=FORGET, train=train)
    assert (release.certificate.forget.samples, seen) == (5, [1, 2])
    with pytest.raises(expunge.InputError, match="'user-9', who is not in the data"):
        expunge.retrain(build, data, forget=["user-9"], train=train)
    serve(data)
    serve(expunge.Data(Stream(rows), person=lambda row: row["user"], collate=collate))


def test_tables_of_hugging_face_and_their_streams(rows):
    x, y = rows
    columns = {"x": x.tolist(), "y": y.tolist(), "user": NAMES}
    table = datasets.Dataset.from_dict(columns)

    def loss(model, batch):
        return cross_entropy(model(batch["x"]), batch["y"])

    serve(expunge.Data(table, person="user"), loss=loss)
    serve(expunge.Data(table.with_format("torch", ["x", "y"]), ids=NAMES), loss=loss)

    def stack(rows):
        return {
            "x": torch.tensor([r["x"] for r in rows]),
            "y": torch.tensor([r["y"] for r in rows]),
        }

    stream = table.to_iterable_dataset()
    serve(expunge.Data(stream, person="user", collate=stack), loss=loss)


def test_own_loaders_with_samplers_workers_and_mixup(rows, data):
    def sample(examples, seed):
        x, y = examples
        generator = torch.Generator().manual_seed(seed)
        sampler = WeightedRandomSampler(1.0 + y, len(y), generator=generator)
        return DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler, num_workers=1)

    def mix(examples, seed):
        x, y = examples
        generator = torch.Generator().manual_seed(seed)
        for places in torch.randperm(len(x), generator=generator).split(8):
            share = torch.rand((), generator=generator)
            yield share * x[places] + (1 - share) * x[places.flip(0)], (y[places], share)

    def mixed(output, target):
        y, share = target
        return share * cross_entropy(output, y) + (1 - share) * cross_entropy(output, y.flip(0))

    for loader, loss in ((sample, cross_entropy), (mix, mixed)):
        train = expunge.Training(epochs=1, loss=loss, loader=loader)
        serve(data, loss=loss, loader=loader, train=train)


def test_autocast_inside_the_loss(data):
    def loss(model, batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(model(batch[0]), batch[1])

    serve(data, loss=loss)


def test_rows_without_a_name_are_learned_and_never_forgotten(rows):
    nobody = [None if name == "user-5" else name for name in NAMES]
    serve(expunge.Data(rows, ids=nobody))
    with pytest.raises(expunge.InputError, match="'user-5', who is not in the data"):
        expunge.retrain(build, expunge.Data(rows, ids=nobody), forget=["user-5"], train=TRAIN)
    with pytest.raises(expunge.InputError, match="user-3"):
        expunge.retrain(build, expunge.Data(rows), forget=FORGET, train=TRAIN)
