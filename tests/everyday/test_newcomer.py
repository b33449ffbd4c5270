"""Slips and habits of somebody who reads the pages for the first time."""

from __future__ import annotations

import copy

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from sklearn import config_context
from sklearn.base import clone
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures
from tokenizers import Tokenizer, models
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from expunge.certificates.signing import fingerprint, generate_key_pair, read_public_key
from expunge.certificates.wording import write_statement
from expunge.data.people import check_request
from expunge.linear_model import LogisticRegression, Ridge
from tests.everyday.conftest import FORGET, NAMES

TOKENIZER = transformers.PreTrainedTokenizerFast(
    tokenizer_object=Tokenizer(models.WordLevel({"[PAD]": 0, "good": 1, "bad": 2}, "[PAD]")),
    pad_token="[PAD]",
)


def build():
    return nn.Linear(6, 2)


class Trainer:
    """Keeps what it saw, as own trainers do."""

    def __init__(self, rate):
        self.rate, self.history, self.steps, self.seen = rate, [], 0, {}

    def __call__(self, model, examples, seed):
        optimizer = torch.optim.SGD(model.parameters(), self.rate)
        for _ in range(3):
            self.step(model, optimizer, examples)

    def step(self, model, optimizer, examples):
        optimizer.zero_grad()
        loss = cross_entropy(model(examples[0]), examples[1])
        loss.backward()
        optimizer.step()
        self.history.append(loss.item())
        self.seen[self.steps] = len(examples[0])
        self.steps += 1

    def set_rate(self, rate):
        self.rate = rate


def test_a_trainer_that_keeps_a_history_is_the_same_trainer(data):
    train = Trainer(0.1)
    shards = {"seed": "public", "shards": 2, "slices": 2}
    release = expunge.retrain(build, data, forget=FORGET, train=train)
    assert str(expunge.replay(release, build, data, train=train)) == "the same bits again"
    ensemble = expunge.Shards(build, train, **shards)
    ensemble.learn(data)
    assert ensemble.forget(FORGET, data).certificate.epsilon == 0
    train.set_rate(0.2)  # an option is part of the code
    assert "the source of train" in str(expunge.replay(release, build, data, train=train))


def test_a_trainer_that_keeps_a_history_opens_its_state_again(data, tmp_path):
    train = Trainer(0.1)

    def open_shards():
        return expunge.Shards(build, train, seed="p", shards=2, slices=2, state=tmp_path / "state")

    open_shards().learn(data)
    assert open_shards().forget(FORGET, data).certificate.epsilon == 0


def test_a_tokenizer_that_has_warned_is_the_same_tokenizer():
    collate = transformers.DataCollatorWithPadding(TOKENIZER)
    rows = [{"input_ids": [1 + i % 2] * (1 + i % 3), "labels": i % 2} for i in range(40)]

    def make():
        return nn.Sequential(nn.EmbeddingBag(3, 2, padding_idx=TOKENIZER.pad_token_id))

    def train(model, examples, seed):
        batch = collate([examples[i] for i in range(len(examples))])
        cross_entropy(model(batch["input_ids"]), batch["labels"]).backward()
        torch.optim.SGD(model.parameters(), 0.1).step()

    data = expunge.Data(rows, ids=NAMES)
    release = expunge.retrain(make, data, forget=FORGET, train=train)
    assert str(expunge.replay(release, make, data, train=train)) == "the same bits again"


@pytest.mark.parametrize("flat", [False, True])
def test_real_targets_under_the_default_loss_are_refused_before_training(rows, flat):
    def make():
        return nn.Sequential(nn.Linear(6, 1), *([nn.Flatten(0)] if flat else []))

    x = rows[0]
    data = expunge.Data((x, x[:, 0] if flat else x[:, :1]), ids=NAMES)
    train = expunge.Training(epochs=1)
    assert "targets are real numbers" in str(expunge.check(make, data, train=train))
    with pytest.raises(expunge.InputError, match=r"real numbers; .* such as .*mse_loss"):
        expunge.retrain(make, data, forget=FORGET, train=train)
    with pytest.raises(expunge.InputError, match="real numbers"):
        expunge.evaluate(make(), data)


def test_training_a_copy_that_nobody_returns_is_said(data):
    def train(model, examples, seed):
        model = copy.deepcopy(model)
        Trainer(0.1)(model, examples, seed)
        return model.state_dict()

    with pytest.warns(UserWarning, match="train left every weight as build"):
        expunge.retrain(build, data, forget=FORGET, train=train)


def test_metadata_routing_reaches_the_clones_of_a_pipeline(rows):
    x, y = (part.numpy() for part in rows)
    with config_context(enable_metadata_routing=True):
        model = LogisticRegression().set_fit_request(ids=True)
        pipe = make_pipeline(PolynomialFeatures(1), model)
        fitted = clone(pipe).fit(x, y, ids=np.array(NAMES))
    assert fitted[-1].forget(FORGET).certificate.forget.samples == 5


def test_a_name_that_lost_its_zeros_is_recognised():
    with pytest.raises(expunge.InputError, match="did you mean '00007'"):
        check_request(["7"], ["00007", "00012"])


def test_a_statement_names_the_key_as_verify_does(data):
    private, public = generate_key_pair()
    release = expunge.retrain(build, data, forget=FORGET, train=Trainer(0.1))
    statement = write_statement(release.certificate.sign(private))
    assert fingerprint(read_public_key(public)) in statement


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ([1.0, np.nan], r"X, column 'b', is nan; .* not NaN or infinity"),
        ([None, 2.0], r"X, column 'b', is nan; .* not NaN or infinity"),
        (["x", "y"], r"X, column 'b', is '.*'; it must be numbers: of text declare"),
        (pd.date_range("2026", periods=2), r"X, column 'b', is 'datetime.*'; it must be numbers"),
    ],
)
def test_a_cell_that_is_no_number_is_named_by_its_column(column, said):
    table = pd.DataFrame({"a": [1.0, 2.0], "b": column})
    with pytest.raises(expunge.InputError, match=said):
        LogisticRegression().fit(table, [0, 1])


def test_a_class_loads_what_is_its_own(rows, tmp_path):
    x, y = (part.numpy() for part in rows)
    model = LogisticRegression().fit(x, y, ids=NAMES)
    model.save(tmp_path / "state")
    assert LogisticRegression.load(tmp_path / "state").holds(FORGET) == FORGET
    release = model.forget(FORGET).save(tmp_path / "release")
    assert (LogisticRegression.load(release).coef_ == model.coef_).all()
    with pytest.raises(expunge.InputError, match="it must be of a Ridge"):
        Ridge.load(tmp_path / "state")
