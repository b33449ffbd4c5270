"""Data split by identifiers: people, not rows."""

import unicodedata

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expunge.errors import InputError
from expunge.jobs.data import make_loader, split_data

X, Y = torch.arange(12.0).reshape(6, 2), torch.arange(6)
IDS = ["anna", "bo", "anna", "cleo", "bo", "dan"]


class Rows(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[i], Y[i]


@pytest.mark.parametrize(
    "train", [(X, Y), TensorDataset(X, Y), Rows()], ids=["pair", "set", "rows"]
)
def test_forgetting_a_person_forgets_every_sample_of_theirs(train: object) -> None:
    splits = split_data({"train": train, "ids": IDS}, ["anna"], ["bo"])
    assert splits.forget.positions == (0, 2)
    assert splits.retain.positions == (3, 5)
    assert splits.retain.ids == ("cleo", "dan")
    seen = [y.tolist() for _, y in make_loader(splits.retain, 8)]
    assert seen == [[3, 5]]
    assert isinstance(make_loader(splits.retain, 8), DataLoader) == isinstance(train, Rows)


def test_identifiers_that_look_alike_are_the_same() -> None:
    apart = [unicodedata.normalize("NFD", "Zoë"), "Zoë", "Max"]
    splits = split_data({"train": (X[:3], Y[:3]), "ids": apart}, ["Zoë"])
    assert splits.forget.positions == (0, 1)
    assert splits.retain.ids == ("Max",)
    with pytest.raises(InputError, match="at least one kept"):
        split_data({"train": (X[:3], Y[:3]), "ids": apart}, ["Max"], ["Zoë"])


def test_identifiers_may_be_numbers_of_any_kind_or_positions() -> None:
    for ids in (np.arange(6), torch.arange(6), list(range(6)), None):
        assert split_data({"train": (X, Y), "ids": ids}, ["4"]).forget.positions == (4,)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"train": (X, Y), "ids": IDS[:5]}, "the number of ids is 5; it must be 6"),
        ({"train": (X, Y), "ids": [True] * 6}, "it must be strings or whole numbers"),
        ({"train": (X, Y[:5]), "ids": IDS}, "has 6 inputs and 5 targets"),
        ({"train": (X, Y), "labels": 1}, "returned the key 'labels'"),
        ({"ids": IDS}, "must return a mapping with the key 'train'"),
        ({"train": iter([]), "ids": IDS}, "must be a data set with a length"),
        ({"train": (X, Y), "ids": ["x"] * 6}, "names 1 unknown samples, the first is 'anna'"),
        ({"train": (X, Y), "ids": ["anna"] * 6}, "names 6 of the 6 samples that are left"),
    ],
)
def test_data_that_cannot_be_split_are_refused(data: dict, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        split_data(data, ["anna"])


def test_an_earlier_request_is_no_request_of_today() -> None:
    splits = split_data({"train": (X, Y), "ids": IDS}, ["anna"], ["cleo", "gone"])
    assert splits.forget.ids == ("anna", "anna")
    assert set(splits.retain.ids) == {"bo", "dan"}
