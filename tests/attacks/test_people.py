"""Attempts to keep a part of a person, or to miscount; each must fail, on every path."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

import expunge
from expunge.accounting.precision import softmax_constants
from expunge.baselines.descent import SoftmaxRegression, descend, forget
from expunge.baselines.dpsgd import train_dpsgd
from expunge.baselines.retraining import retrain
from expunge.certificates.certificate import certify
from expunge.certificates.identifiers import commit_request, find_lookalikes, opens
from expunge.certificates.record import RunRecord
from expunge.errors import InputError
from expunge.jobs.data import split_data
from expunge.jobs.lists import read_ids
from expunge.jobs.preview import preview_job
from expunge.jobs.run import run_job
from expunge.recipes import GroupDPSGD, NoisyDescent, OutputPerturbation
from expunge.tasks.samples import Samples, split_forget
from expunge.training.batches import Batches
from job_folder import call, write_job

RECIPE = OutputPerturbation(start_clip=1.0, noise_std=4.0)
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 2
PEOPLE = [f"person-{i % 4}" for i in range(12)]  # three samples each


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """One thread for these small runs."""


def kept(*gone: str) -> Batches:
    places = [i for i, name in enumerate(PEOPLE) if name not in gone]
    names = [PEOPLE[i] for i in places]
    return Batches(X[places], Y[places], batch_size=4, ids=names)


def unlearn(loader, ids, **options):
    options = {"loss_fn": cross_entropy} | options
    return expunge.unlearn(nn.Linear(3, 2), loader, RECIPE, forget_ids=ids, **options)


# Who is who.


@pytest.mark.parametrize(
    "name", ["person-1 ", " person-1", "person-1\t", "person-1\u200b", "\u00adx"]
)
def test_invisible_characters_keep_nobody(name: str) -> None:
    loader = Batches(X[:2], Y[:2], batch_size=2, ids=[name, "b"])
    with pytest.raises(InputError, match="visible text without spaces at its ends"):
        unlearn(loader, ["person-1"])
    with pytest.raises(InputError, match="visible text without spaces at its ends"):
        split_data({"train": (X[:2], Y[:2]), "ids": [name, "b"]}, ["b"])
    with pytest.raises(InputError, match="visible text without spaces at its ends"):
        split_forget(Samples(X[:2], Y[:2], np.array([name, "b"])), ids=["b"])


def test_numbers_and_their_digits_are_one_person() -> None:
    for ids in ([7, 8, 7], ["7", "8", "7"], np.array([7, 8, 7]), torch.tensor([7, 8, 7])):
        splits = split_data({"train": (X[:3], Y[:3]), "ids": ids}, ["7"])
        assert splits.forget.positions == (0, 2)
        loader = Batches(X[:3], Y[:3], batch_size=3)
        with pytest.raises(InputError, match="retain_ids holds '7', which is in forget_ids too"):
            unlearn(loader, [7], retain_ids=ids)


@pytest.mark.parametrize("name", [7.0, True, None, b"7", float("nan")])
def test_what_is_neither_text_nor_a_whole_number_is_nobody(name) -> None:
    with pytest.raises(InputError, match="strings or whole numbers"):
        split_data({"train": (X[:2], Y[:2]), "ids": ["a", name]}, ["a"])


def test_one_text_is_not_a_list_of_people() -> None:
    with pytest.raises(InputError, match="a list of identifiers, not one text"):
        split_data({"train": (X[:3], Y[:3]), "ids": "abc"}, ["a"])
    with pytest.raises(InputError, match="a list of identifiers, not one text"):
        unlearn(kept(), "person-1")


def test_two_spellings_that_a_reader_takes_for_one_are_told(caplog) -> None:
    ids = ["Ann Lee", "ann  lee", "\uff21nn Lee", "bob"]
    with caplog.at_level(logging.WARNING, "expunge"):
        split_data({"train": (X[:4], Y[:4]), "ids": ids}, ["Ann Lee"])
    assert "'Ann Lee' is forgotten and 'ann  lee' is kept" in caplog.text
    assert [b for _, b in find_lookalikes(["Ann Lee"], ids)] == ["ann  lee", "\uff21nn Lee"]


# All of a person, or an error.


def test_a_person_in_both_sets_is_refused_on_every_path() -> None:
    for ids in (["person-1"], ["person-1", "person-1"], iter(["person-1"])):
        with pytest.raises(InputError, match="holds 'person-1'"):
            unlearn(kept("person-2"), ids)
    with pytest.raises(InputError, match="holds 'person-1'"):
        retrain(nn.Linear(3, 2), kept("person-2"), forget_ids=["person-1"], epochs=1,
                learning_rate=0.1)  # fmt: skip
    run = unlearn(kept("person-1"), ["person-1"])
    with pytest.raises(InputError, match="holds 'person-1', which is forgotten"):
        expunge.fine_tune(run, kept("person-2"), epochs=1, learning_rate=0.1)


def test_a_request_cannot_take_some_of_a_person() -> None:
    samples = Samples(X, Y, np.array(PEOPLE))
    retain, gone = split_forget(samples, ids=["person-1"])
    assert (len(retain), len(gone)) == (9, 3)
    for seed in range(20):
        retain, gone = split_forget(samples, fraction=0.25, seed=seed)
        assert not set(retain.ids) & set(gone.ids)
        assert len(gone) == 3
    splits = split_data({"train": (X, Y), "ids": PEOPLE}, ["person-1"])
    assert splits.forget.positions == (1, 5, 9)


def test_a_request_for_nobody_is_refused() -> None:
    for ids in (["person-9"], ["PERSON-1"], ["person-1", "person-9"]):
        with pytest.raises(InputError, match="unknown samples, the first is"):
            split_data({"train": (X, Y), "ids": PEOPLE}, ids)
        with pytest.raises(InputError, match="it must be known"):
            split_forget(Samples(X, Y, np.array(PEOPLE)), ids=ids)
    with pytest.raises(InputError, match="one identifier or more"):
        unlearn(kept(), [])


def test_the_ids_of_a_data_set_are_found_behind_its_loader() -> None:
    class Known(TensorDataset):
        ids = PEOPLE

    whole = Known(X, Y)
    with pytest.raises(InputError, match="retain_ids holds 'person-1'"):
        unlearn(DataLoader(whole, batch_size=4), ["person-1"])
    part = Subset(whole, [0, 2, 3, 4])
    run = unlearn(DataLoader(part, batch_size=4), ["person-1"] * 3)
    assert run.record.checked
    assert opens(run.record.retain, ["person-0", "person-2", "person-3"])
    assert run.record.retain.samples == 4
    with pytest.raises(InputError, match="retain_ids holds 'person-2'"):
        unlearn(DataLoader(Subset(part, [0, 1]), batch_size=2), ["person-1", "person-2"])


@pytest.mark.parametrize("ids", [PEOPLE[:11], [*PEOPLE, "person-5"], iter(PEOPLE[:3])])
def test_fewer_or_more_identifiers_than_samples_are_refused(ids) -> None:
    class Known(TensorDataset):
        pass

    data = Known(X, Y)
    data.ids = list(ids)
    with pytest.raises(InputError, match="it must be 12"):
        unlearn(DataLoader(data, batch_size=4), ["person-9"])
    with pytest.raises(InputError, match="it must be 12, as many as samples"):
        split_data({"train": data}, ["person-1"])


def test_a_stream_is_not_called_checked() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(list(zip(X, Y, strict=True)))

    run = unlearn(DataLoader(Stream(), batch_size=4), ["a"], retain_ids=iter(PEOPLE))
    assert not run.record.checked
    assert not certify(run.record, delta=1e-5).releasable


def test_a_lazy_list_of_identifiers_is_read_once_and_whole() -> None:
    loader = Batches(X[:9], Y[:9], batch_size=4)
    names = (name for name in ["a", "b", "c"] * 3)
    run = unlearn(loader, (n for n in ["d", "d"]), retain_ids=names)
    assert (run.record.retain.count, run.record.retain.samples) == (3, 9)
    assert (run.record.forget.count, run.record.forget.samples) == (1, 2)
    assert run.forgotten == {"d"}


def test_people_of_the_test_set_leave_it_too() -> None:
    data = {"train": (X, Y), "ids": PEOPLE, "test": (X[:4], Y[:4])}
    assert len(split_data(data, ["person-1"]).test) == 4
    told = data | {"test_ids": ["person-1", "person-7", "person-1", "gone"]}
    found = split_data(told, ["person-1"], ["gone"]).test
    assert (found.positions, found.ids) == ((1,), ("person-7",))
    carried = data | {"test": Samples(X[:3], Y[:3], np.array(["x", "person-1", "x"]))}
    assert split_data(carried, ["person-1"]).test.positions == (0, 2)
    with pytest.raises(InputError, match="the number of test_ids is 1; it must be 4"):
        split_data(data | {"test_ids": ["x"]}, ["person-1"])


# Both numbers, and never a wrong one.


def test_people_named_once_do_not_count_as_one_sample_each() -> None:
    run = unlearn(kept("person-1"), ["person-1"])
    certificate = certify(run.record, delta=1e-5)
    assert (certificate.data.forget.count, certificate.data.forget.samples) == (1, None)
    assert "1 person on samples that were not counted" in certificate.statement()
    run = unlearn(kept("person-1"), ["person-1"] * 3)
    certificate = certify(run.record, delta=1e-5)
    assert (certificate.data.forget.count, certificate.data.forget.samples) == (1, 3)
    assert "Forget set: 1 person on 3 samples" in certificate.statement()
    assert "Retained set: 3 people on 9 samples" in certificate.statement()
    again = retrain(nn.Linear(3, 2), kept("person-1"), forget_ids=["person-1"], epochs=1,
                    learning_rate=0.1)  # fmt: skip
    assert (again.record.forget.count, again.record.forget.samples) == (1, None)


def test_a_request_that_nobody_can_compare_with_is_not_counted() -> None:
    assert commit_request(["a", "b"], None).samples is None
    assert commit_request(["a", "a"], None).samples == 2


def test_all_samples_of_a_person_count_towards_the_group() -> None:
    """Noise for one example does not cover a person with three of them."""
    recipe = NoisyDescent(learning_rate=0.5, noise_std=0.1, train_steps=5, steps=2, examples=12,
                          group_size=1, strong_convexity=0.1, **softmax_constants(1.0))  # fmt: skip
    trained = descend(SoftmaxRegression(3, 2, feature_clip=1.0), Samples(X, Y, np.array(PEOPLE)),
                      recipe)  # fmt: skip
    with pytest.raises(InputError, match="group_size = 1"):
        forget(trained, kept("person-1"), forget_ids=["person-1"])
    mended = Batches(X[:11], Y[:11], batch_size=11,
                     ids=[*kept("person-1").ids, "person-0", "person-0"])  # fmt: skip
    with pytest.raises(InputError, match="'person-0' on more examples than were trained on"):
        forget(trained, mended, forget_ids=["person-1"])
    with pytest.raises(InputError, match="number of forgotten examples is 3; it must be at most 2"):
        train_dpsgd(
            nn.Linear(3, 2), Samples(X, Y, np.array(PEOPLE)),
            GroupDPSGD(clip=1.0, noise_multiplier=9.0, sampling_rate=0.5, steps=2, group_size=2),
            learning_rate=0.1, forget_ids=["person-1"],
        )  # fmt: skip


def test_descent_counts_the_samples_of_the_people_it_forgets() -> None:
    recipe = NoisyDescent(learning_rate=0.5, noise_std=0.1, train_steps=5, steps=2, examples=12,
                          group_size=3, strong_convexity=0.1, **softmax_constants(1.0))  # fmt: skip
    data = Samples(X, Y, np.array(PEOPLE))
    run = forget(descend(SoftmaxRegression(3, 2, feature_clip=1.0), data, recipe),
                 kept("person-1"), forget_ids=["person-1"])  # fmt: skip
    assert (run.record.forget.count, run.record.forget.samples) == (1, 3)
    assert run.record.checked


def test_heads_and_shards_count_people_and_samples() -> None:
    head = expunge.StatisticsHead(expunge.Features(None, seed="s"), classes=2)
    head.learn((X, Y), ids=PEOPLE)
    run = head.forget(["person-1", "person-1", "person-2"])
    assert (run.record.forget.count, run.record.forget.samples) == (2, 6)
    assert len(head) == 6
    ensemble = expunge.Shards(lambda: nn.Linear(3, 2), shards=2, slices=2, seed="s", epochs=1,
                              learning_rate=0.1)  # fmt: skip
    ensemble.learn((X, Y), ids=PEOPLE)
    first = certify(ensemble.release().record, delta=1e-5)
    run = ensemble.forget(["person-1"])
    told = certify(run.record, delta=1e-5, parent=first).data.forget
    assert (told.count, told.samples) == (1, 3)
    with pytest.raises(InputError):
        ensemble.forget(["Person-3"])


SEVERAL = """
from own import load as load_all


def load():
    data = load_all()
    return data | {"ids": [i // 5 for i in range(50)], "test_ids": [9] * 5 + ["other"] * 5}
"""


def test_a_job_forgets_people_and_says_both_numbers(tmp_path: Path, caplog) -> None:
    path = write_job(tmp_path, data={"load": "several.py:load"})
    (tmp_path / "several.py").write_text(SEVERAL)
    (tmp_path / "forget.txt").write_text("9\n3\n9\n")
    preview = preview_job(path)
    assert (preview.retain, preview.forget) == (40, 10)
    assert (preview.retain_people, preview.forget_people) == (8, 2)
    assert "those of 8 and of 2 people" in call("unlearn", str(path), "--dry-run").stdout
    with caplog.at_level(logging.INFO, "expunge"):
        done = run_job(path)
    assert "40 samples of 8 people kept, 10 of 2 people forgotten" in caplog.text
    assert "5 samples of the test set are of forgotten people and left out" in caplog.text
    cost, data = done.metrics["cost"], done.certificate.data
    assert (cost["people kept"], cost["people forgotten"], cost["samples forgotten"]) == (8, 2, 10)
    assert (data.forget.count, data.forget.samples) == (2, 10)
    assert (data.retain.count, data.retain.samples) == (8, 40)
    assert opens(RunRecord.load(tmp_path / "run" / "record.json").forget, [3, 9])
    page = (tmp_path / "run" / "report.html").read_text()
    assert "2 people, with 10 samples, were to be forgotten" in page
    assert "8 people, on 40 samples" in page


def test_a_list_with_invisible_names_is_refused(tmp_path: Path) -> None:
    (tmp_path / "forget.txt").write_text("p1\np2\u200b\n", "utf-8")
    with pytest.raises(InputError, match="visible text"):
        read_ids(tmp_path / "forget.txt")
