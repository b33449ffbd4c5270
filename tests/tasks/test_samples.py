"""Samples, their forget sets, and the digits that are embedded."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import ExpungeError, InputError
from expunge.jobs.lists import read_ids
from expunge.tasks import digits
from expunge.tasks.samples import Samples, normalise, number_ids, split_forget, split_validation


def make_samples(count: int = 20, classes: int = 4) -> Samples:
    return Samples(
        torch.arange(count * 4, dtype=torch.uint8).view(count, 1, 2, 2),
        torch.arange(count) % classes,
        number_ids("toy/train/", np.arange(count)),
    )


def all_ids(*parts: Samples) -> list[str]:
    return [name for part in parts for name in part.ids.tolist()]


def test_digits_are_embedded_and_split_for_good() -> None:
    task = digits.load()
    names = all_ids(task.train, task.validation, task.test)
    assert sorted(names) == [f"digits/{i:05d}" for i in range(1797)]
    assert task.train.inputs.max() == 16
    scaled = task.normalise(task.train.inputs)
    assert scaled.min().item() == pytest.approx(-1, abs=1e-6)
    assert scaled.max().item() == pytest.approx(1, abs=1e-6)
    fixed = hashlib.sha256("\n".join(names).encode()).hexdigest()
    assert fixed == "01ea1265a1e7359a156f6d0539ec32f0b51e8aa72ae2c10ee352e2b7f3c4a258"


def test_a_seeded_forget_set_is_the_same_for_ever() -> None:
    _, forget = split_forget(make_samples(20), 0.25, seed=7)
    assert forget.ids.tolist() == [
        "toy/train/00003",
        "toy/train/00004",
        "toy/train/00006",
        "toy/train/00011",
        "toy/train/00012",
    ]


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(2, 200),
    fraction=st.floats(0.01, 0.99),
    more=st.floats(0.0, 0.5),
    seed=st.integers(0, 2**64),
)
def test_a_fraction_splits_without_loss_and_grows_with_it(count, fraction, more, seed) -> None:
    samples = make_samples(count)
    if not 0 < round(fraction * count) < count:
        with pytest.raises(InputError, match="the forget set"):
            split_forget(samples, fraction, seed)
        return
    retain, forget = split_forget(samples, fraction, seed)
    assert len(forget) == round(fraction * count)
    assert sorted(all_ids(retain, forget)) == samples.ids.tolist()
    for part in (retain, forget):
        assert torch.equal(part.targets, torch.tensor([int(n[-5:]) % 4 for n in part.ids]))
    larger = min(fraction + more, 0.99)
    if round(larger * count) < count:
        assert set(forget.ids) <= set(split_forget(samples, larger, seed)[1].ids)


def test_ten_percent_is_the_default_and_seeds_differ() -> None:
    samples = make_samples(200)
    first, second = (set(split_forget(samples, seed=seed)[1].ids) for seed in (0, 1))
    assert len(first) == len(second) == 20
    assert first != second
    assert first == set(split_forget(samples, 0.1)[1].ids)


def test_every_sample_is_forgotten_equally_often() -> None:
    samples, runs = make_samples(40), 400
    counts = np.zeros(40)
    for seed in range(runs):
        for name in split_forget(samples, 0.25, seed)[1].ids:
            counts[int(name[-5:])] += 1
    expected, std = runs * 0.25, np.sqrt(runs * 0.25 * 0.75)
    assert np.abs(counts - expected).max() < 4.5 * std
    assert counts.std() > 0.5 * std


def test_identifiers_are_read_from_files(tmp_path: Path) -> None:
    wanted = ["toy/train/00007", "toy/train/00002"]
    (tmp_path / "ids.txt").write_text("\ufeff" + "\r\n".join(["", *wanted, " "]))
    (tmp_path / "ids.csv").write_text("user,sample\n1,toy/train/00007\n2,toy/train/00002\n")
    assert list(read_ids(tmp_path / "ids.txt")) == wanted
    assert list(read_ids(tmp_path / "ids.csv", "sample")) == wanted


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"fraction": 0.0}, "fraction is 0.0; it must be a number between 0 and 1"),
        ({"fraction": 1.0}, "fraction is 1.0"),
        ({"fraction": -0.1}, "fraction is -0.1"),
        ({"fraction": float("nan")}, "fraction is nan"),
        ({"fraction": 0.01}, "the forget set is empty; it must hold 1 to 11 of the people"),
        ({"fraction": 0.99}, "holds all 12 samples; at least one must be retained"),
        ({"seed": -1}, "seed is -1; it must be an integer >= 0"),
        ({"seed": 0.5}, "seed is 0.5"),
    ],
)
def test_bad_forget_sets_are_one_sentence(choice, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence) as caught:
        split_forget(make_samples(12), **choice)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, ExpungeError)
    assert caught.value.exit_code == 2


def test_an_identifier_is_kept_or_forgotten_as_a_whole() -> None:
    samples = make_samples(40)
    shared = Samples(samples.inputs, samples.targets, samples.ids[np.arange(40) % 10])
    retain, forget = split_forget(shared, 0.3, seed=4)
    assert (len(set(retain.ids)), len(set(forget.ids))) == (7, 3)
    assert (len(retain), len(forget)) == (28, 12)
    assert not set(retain.ids) & set(forget.ids)
    alone = Samples(samples.inputs, samples.targets, samples.ids[[1] * 40])
    with pytest.raises(InputError, match="all 40 samples are of one person, 'toy/train/00001'"):
        split_forget(alone, 0.5)
    with pytest.raises(InputError, match="stands on samples for training and for validation"):
        split_validation(shared, 3)


def test_the_digits_say_what_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"pip install 'expunge\[torch\]'"):
        digits.load()


def test_bad_files_of_identifiers(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "ids.csv").write_text("a,b\n1,2\n")
    (tmp_path / "ids.parquet").write_bytes(b"")
    for name, column, sentence in (
        ("absent.txt", None, "cannot be read: No such file"),
        ("empty.txt", None, "names no identifier"),
        ("bytes.txt", None, "cannot be read"),
        ("ids.csv", None, r"is None; it must be one of \['a', 'b'\]"),
        ("ids.csv", "c", r"is 'c'; it must be one of \['a', 'b'\]"),
    ):
        with pytest.raises(InputError, match=sentence):
            read_ids(tmp_path / name, column)


def test_normalise_is_the_equation_and_leaves_its_input_alone() -> None:
    pixels = torch.randint(0, 256, (5, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator())
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    shape = (3, 1, 1)
    wanted = (pixels.double() / 255 - torch.tensor(mean).double().view(shape)) / torch.tensor(
        std
    ).double().view(shape)
    before = pixels.clone()
    torch.testing.assert_close(normalise(pixels, mean, std).double(), wanted, atol=1e-6, rtol=0)
    assert torch.equal(pixels, before)
    features = torch.randn(5, 7, generator=torch.Generator())
    kept = features.clone()
    assert torch.equal(normalise(features, (0.0,), (1.0,)), features)
    normalise(features, (0.0,), (2.0,))
    assert torch.equal(features, kept)
    for bad in (((0.5,) * 2, (0.5,) * 2), ((0.5,), (0.5,) * 3), ((0.5,), (0.0,))):
        with pytest.raises(InputError):
            normalise(pixels, *bad)


def test_samples_are_a_data_set_and_must_fit_together() -> None:
    samples = make_samples(5)
    pixels, target = samples[3]
    assert pixels.flatten().tolist() == [12, 13, 14, 15]
    assert target.item() == 3
    inputs, targets = next(iter(torch.utils.data.DataLoader(samples, batch_size=5)))
    assert torch.equal(inputs, samples.inputs)
    assert torch.equal(targets, samples.targets)
    with pytest.raises(InputError, match=r"\(5, 4, 5\); it must be three equal numbers"):
        Samples(samples.inputs, samples.targets[:4], samples.ids)
    with pytest.raises(InputError, match="one int64 class per sample"):
        Samples(samples.inputs, samples.targets.float(), samples.ids)
    with pytest.raises(InputError, match="below 100000"):
        number_ids("a/", np.array([100_000]))


def test_validation_never_meets_train() -> None:
    samples = make_samples(50)
    train, held = split_validation(samples, 7)
    assert len(held) == 7
    assert not set(train.ids) & set(held.ids)
    assert sorted(all_ids(train, held)) == samples.ids.tolist()
