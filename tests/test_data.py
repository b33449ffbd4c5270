"""Data: examples of every kind, whose they are, and the rows that leave."""

from __future__ import annotations

from collections import namedtuple
from itertools import pairwise

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from expunge import Data, InputError
from expunge.data.people import check_request, read_ids

IDS = ["ann", "bob", "ann", "cy"]
X, Y = torch.arange(8.0).view(4, 2), torch.tensor([0, 1, 0, 1])


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, place):
        return {"x": X[place], "y": int(Y[place]), "user_id": IDS[place]}


class Stream(IterableDataset):
    def __iter__(self):
        return ({"x": float(i), "user_id": name} for i, name in enumerate(IDS))


def test_tensors_stay_a_pair_of_tensors():
    data = Data((X, Y), ids=IDS).without(["ann"])
    inputs, targets = data.examples
    assert torch.equal(inputs, X[[1, 3]])
    assert targets.tolist() == [1, 1]
    assert data.people == ("bob", "cy")


def test_every_kind_stays_of_its_kind():
    Pair = namedtuple("Pair", "x y")
    kinds = {
        "arrays": (X.numpy(), Y.numpy()), "named": Pair(X, Y), "nested": ((X, X), {"y": Y}),
        "mapping": {"x": X, "y": Y}, "tensor": X, "TensorDataset": TensorDataset(X, Y),
        "list": [(x, y) for x, y in zip(X, Y, strict=True)], "dataset": Rows(),
        "table": datasets.Dataset.from_dict({"x": [1, 2, 3, 4], "user_id": IDS}),
    }  # fmt: skip
    for name, examples in kinds.items():
        left = Data(examples, ids=IDS).without(["ann"])
        assert len(left) == 2, name
        expected = Subset if name == "dataset" else type(examples)
        assert isinstance(left.examples, expected), name
    assert Data(kinds["table"], person="user_id").without(["ann"]).examples["x"][:] == [2, 4]
    texts = Data((["a", "b", "c", "d"], Y), ids=IDS).without(["bob"])
    assert texts.examples[0] == ["a", "c", "d"]


def test_a_column_or_a_function_says_whose_it_is():
    assert Data(Rows(), person="user_id").people == ("ann", "bob", "cy")
    assert Data((X, Y), person=lambda row: f"p{int(row[1])}").people == ("p0", "p1")
    with pytest.raises(InputError, match="person is 'user'; it must be a column"):
        Data(Rows(), person="user")


def test_a_stream_is_filtered_each_time_it_is_read():
    data = Data(Stream(), person="user_id")
    assert data.people == ("ann", "bob", "cy")
    assert len(data) == 4
    left = data.without(["ann"])
    assert isinstance(left.examples, IterableDataset)
    for _ in range(2):
        assert [row["user_id"] for row in left.examples] == ["bob", "cy"]
    assert [row["user_id"] for row in data.only(["cy"]).examples] == ["cy"]
    batches = list(DataLoader(left.examples, batch_size=2))
    assert batches[0]["x"].tolist() == [1.0, 3.0]


def test_validation_and_test_lose_them_too():
    data = Data(
        (X, Y), ids=IDS, validation=Data([1, 2], ids=["ann", "dan"]), test=Data([3], ids=["ann"])
    )
    left = data.without(["ann"])
    assert left.validation.people == ("dan",)
    assert len(left.test) == 0
    assert data.without(["dan"]).validation.people == ("ann",)


@pytest.mark.parametrize(
    ("forget", "sentence"),
    [
        (["zoe"], "'zoe', who is not in the data; is this the right list"),
        (["ann "], "visible text without spaces"),
        ([1.5], "strings or whole numbers"),
        (["ann\u200b"], "visible text"),
    ],
)
def test_a_list_with_a_slip_is_refused(forget, sentence):
    with pytest.raises(InputError, match=sentence):
        Data((X, Y), ids=IDS).without(forget)


def test_names_that_look_like_one_another():
    names = ["Ann Lee", "ann  lee", "bob"]
    with pytest.raises(InputError, match="'ann  lee', who would stay"):
        Data([1, 2, 3], ids=names).without(["Ann Lee"])
    assert Data([1, 2, 3], ids=names).without(["Ann Lee", "ann  lee"]).examples == [3]
    assert Data([1, 2, 3], ids=names, exact_names=True).without(["Ann Lee"]).examples == [2, 3]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Data((X, Y), ids=IDS[:3]), "number of ids is 3; it must be 4"),
        (lambda: Data((X, Y[:2]), ids=IDS), "columns of 2 and 4 rows"),
        (lambda: Data((X, Y), ids=set(IDS)), "ids is a set"),
        (lambda: Data(iter([1, 2]), ids=["a", "b"]), "read only once"),
        (lambda: Data(3.0), "examples is 'float'"),
        (lambda: Data(Data([1])), "a Data already"),
        (lambda: Data([1], ids=["a"], person="x"), "ids and person are both given"),
    ],
)
def test_data_that_do_not_fit(make, sentence):
    with pytest.raises(InputError, match=sentence):
        make()


def test_names_come_from_anything():
    assert read_ids(np.array([7, 8])) == (("7",), ("8",))
    assert read_ids(torch.tensor([7, 8])) == (("7",), ("8",))
    assert read_ids(["e\u0301"]) == (("\u00e9",),)
    assert check_request({"ann"}, ["ann"]) == ("ann",)
    assert check_request(["gone"], ["ann"], gone=["gone"]) == ("gone",)


@given(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=30), st.sets(st.sampled_from("abcdef"))
)
def test_what_stays_is_what_was_never_theirs(ids, gone):
    data = Data((np.arange(len(ids)), list(range(len(ids)))), ids=ids)
    wanted = gone & set(ids)
    if not wanted:
        return
    left, theirs = data.without(wanted), data.only(wanted)
    assert left.examples[1] == [i for i, name in enumerate(ids) if name not in wanted]
    assert sorted(left.examples[1] + theirs.examples[1]) == list(range(len(ids)))
    assert not wanted & set(left.people)
    assert all(a < b for a, b in pairwise(left.people))
