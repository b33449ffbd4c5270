"""The tensors of a module by name: those of state_dict, and no more than its own."""

import pytest
import torch
from torch import nn

from expunge import UnlearningError
from expunge.processes.weights import check_name, hash_weights, list_tensors


def make_tied():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[2].register_buffer("hidden", torch.ones(1), persistent=False)
    return model


MODELS = {
    "tied": make_tied,
    "shared-module": lambda: nn.ModuleList([nn.Linear(2, 2)] * 2),
    "lstm": lambda: nn.LSTM(3, 4),
    "transformer": lambda: nn.TransformerEncoderLayer(8, 2),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "no-bias": lambda: nn.Linear(2, 2, bias=False),
}


@pytest.mark.parametrize("name", MODELS)
def test_names_order_and_values_are_those_of_state_dict(name):
    model = MODELS[name]()
    found, expected = list_tensors(model), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert not any(t.requires_grad for t in found.values())
    assert hash_weights(found) == hash_weights(expected)


def test_a_plain_attribute_that_is_a_parameter_is_no_other_tensor():
    model = nn.Linear(2, 2)
    model.alias = [model.weight]
    assert list(list_tensors(model)) == ["weight", "bias"]


def test_old_weight_norm_keeps_a_plain_tensor():
    with pytest.warns(FutureWarning):
        model = nn.utils.weight_norm(nn.Linear(2, 2))
    with pytest.raises(UnlearningError, match="weight of the model is a plain tensor"):
        list_tensors(model)


def test_names_are_text_that_a_file_can_hold():
    assert check_name("a.é") == "a.é"
    with pytest.raises(UnlearningError, match="not valid Unicode"):
        check_name("\udc80")
