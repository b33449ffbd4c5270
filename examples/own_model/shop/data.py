"""The customers, from a file; every one has a name."""

import csv
from pathlib import Path

import torch

import expunge

FILE = Path(__file__).parent.parent / "customers.csv"
FEATURES = ("age", "visits", "basket", "returns", "days_since", "discount")
# Units fixed in advance: a mean taken over the customers would remember those who must go.
UNITS = torch.tensor([50.0, 5.0, 30.0, 0.1, 20.0, 0.5])


def read(split: str, test: expunge.Data | None = None) -> expunge.Data:
    """The customers of one split, and their names."""
    with FILE.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    inputs = torch.tensor([[float(row[name]) for name in FEATURES] for row in rows]) / UNITS - 1
    targets = torch.tensor([int(row["segment"]) for row in rows])
    return expunge.Data((inputs, targets), ids=[row["customer"] for row in rows], test=test)


def load() -> expunge.Data:
    """What expunge asks for: the training data, whose they are, and a test set."""
    return read("train", test=read("test"))
