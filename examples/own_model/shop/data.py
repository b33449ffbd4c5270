"""The customers, from a file; every one has an identifier."""

import csv
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

FILE = Path(__file__).parent.parent / "customers.csv"
FEATURES = ("age", "visits", "basket", "returns", "days_since", "discount")
# Units fixed in advance: a mean taken over the customers would remember those who must go.
UNITS = torch.tensor([50.0, 5.0, 30.0, 0.1, 20.0, 0.5])


def read(split: str) -> tuple[TensorDataset, list[str]]:
    """The customers of one split, and their identifiers."""
    with FILE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    inputs = torch.tensor([[float(row[name]) for name in FEATURES] for row in rows]) / UNITS - 1
    targets = torch.tensor([int(row["segment"]) for row in rows])
    return TensorDataset(inputs, targets), [row["customer"] for row in rows]


def load() -> dict:
    """What expunge asks for: the training data, one identifier per sample, and a test set."""
    train, ids = read("train")
    return {"train": train, "ids": ids, "test": read("test")[0]}
