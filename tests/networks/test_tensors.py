"""Tensors by name, as state_dict has them; buffers, modes and slips."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from expunge.errors import InputError, UnlearningError
from expunge.networks import tensors
from expunge.networks.building import call_build
from expunge.training.requests import check_start
from tests.helpers.small_networks import (
    compiled,
    hash_module,
    make_bert,
    make_gpt2,
    make_llama,
    make_lora,
    make_mlp,
)


def make_tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model[2].register_buffer("hidden", torch.ones(1), persistent=False)
    model[2].register_buffer("none", None)
    return model


class Plain(nn.Module):
    """What honest modules have beside parameters: tensors, arrays, caches, extra state, hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.table = torch.arange(4.0).sin()
        self.cache = {"mask": torch.ones(2, 2)}
        self.register_state_dict_post_hook(lambda *_: None)

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": 3}

    def set_extra_state(self, state: object) -> None:
        pass


MODELS = {
    "tied": make_tied, "shared-module": lambda: nn.ModuleList([nn.Linear(2, 2)] * 2),
    "lstm": lambda: nn.LSTM(3, 4), "transformer": lambda: nn.TransformerEncoderLayer(8, 2),
    "weight-norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
    "spectral-norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "parametrized": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2)),
    "gpt2": make_gpt2, "llama": make_llama, "bert": make_bert, "lora": make_lora,
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_names_order_and_values_are_those_of_state_dict(name: str) -> None:
    model = MODELS[name]()
    found, expected = tensors.list_tensors(model), model.state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert not any(t.requires_grad for t in found.values())
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    trainable = tensors.list_trainable(model)
    assert list(trainable) == list(named)
    assert all(trainable[n] is p for n, p in named.items())
    trained = tensors.list_aliases(model).keys()
    assert trained | tensors.list_published(model).keys() == found.keys()


def test_plain_attributes_hooks_and_extra_state_are_the_modules_own() -> None:
    assert list(tensors.list_tensors(Plain())) == ["layer.weight", "layer.bias"]
    assert list(tensors.list_published(Plain())) == []


@pytest.mark.parametrize(
    "wrap",
    [
        compiled, nn.DataParallel, AveragedModel, lambda m: nn.DataParallel(compiled(m)),
        lambda m: nn.Sequential(compiled(m[0]), m[1], compiled(m[2])),
    ],
)  # fmt: skip
def test_wrappers_leave_no_trace_in_names(wrap) -> None:
    model = make_mlp()
    wrapped = wrap(model)
    assert list(tensors.list_tensors(wrapped)) == list(model.state_dict())
    assert list(tensors.list_trainable(wrapped)) == list(model.state_dict())
    assert hash_module(wrapped) == hash_module(model)
    assert type(tensors.unwrap(wrapped)) is nn.Sequential


def test_a_module_of_ones_own_called_module_keeps_its_name() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    assert list(tensors.list_tensors(Own())) == ["module.weight", "module.bias"]


def test_lazy_layers_are_asked_to_have_a_shape() -> None:
    with pytest.raises(InputError, match="weight has no shape yet"):
        tensors.list_trainable(nn.LazyLinear(2))


def test_buffers_are_restored_in_place_and_replaced_ones_come_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2))
    model[1].register_buffer("ids", torch.arange(3).expand(2, -1), persistent=False)
    model[1].register_buffer("lazy", None)
    model[0].running_var.fill_(3.0)
    before, mean = tensors.Buffers(model), model[0].running_mean
    for _ in range(2):
        model(torch.randn(5, 2) + 7)
        model[0].running_var = torch.zeros(2)
        model[1].lazy = torch.ones(1)
        model[1].register_buffer("added", torch.ones(1))
        before.restore()
        assert model[0].running_mean is mean
        assert mean.tolist() == [0, 0]
        assert model[0].running_var.tolist() == [3, 3]
        assert model[0].num_batches_tracked == 0
        assert model[1].lazy is None
        assert "added" not in dict(model.named_buffers())
    tensors.Buffers(make_mlp()).restore()


def test_modes_of_frozen_parts_are_those_of_build() -> None:
    class Stubborn(nn.Sequential):
        """The usual way to keep statistics of a norm as they are."""

        def train(self, mode: bool = True) -> "Stubborn":
            super().train(mode)
            self[1].eval()
            return self

    frozen = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)))
    frozen.requires_grad_(False).eval()[1][0].train()
    model = nn.Sequential(frozen, Stubborn(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Dropout()).eval()
    frozen[1][0].train()
    tensors.set_training_mode(model)
    assert [m.training for m in (frozen, frozen[0], frozen[1], frozen[1][0])] == [0, 0, 0, 1]
    assert [model[1][0].training, model[1][1].training, model[2].training] == [1, 0, 1]
    modes = [m.training for m in model.modules()]
    with tensors.evaluating(model):
        assert not any(m.training for m in model.modules())
    assert [m.training for m in model.modules()] == modes


def test_the_very_values_of_the_old_model_are_a_slip() -> None:
    old, fresh = make_mlp(), make_mlp()
    check_start(fresh, tensors.list_trainable(old))
    fresh[2] = copy.deepcopy(old[2])
    with pytest.raises(UnlearningError, match=r"own weights in 2\.weight and 1 more; it must"):
        check_start(fresh, tensors.list_trainable(old))
    with pytest.raises(UnlearningError, match=r"own weights in 2\.weight; it must"):
        check_start(fresh, tensors.list_trainable(old), ["2.bias"])
    check_start(nn.LayerNorm(3), tensors.list_trainable(nn.LayerNorm(3)))
    half = {n: t.detach().half() for n, t in tensors.list_trainable(old).items()}
    with pytest.raises(UnlearningError, match=r"own weights in 0\.weight and 3 more"):
        check_start(old.half().float(), half)


def test_bits_and_numbers() -> None:
    assert not tensors.has_same_bits(torch.ones(2), torch.ones(2).double())
    assert tensors.has_same_bits(torch.tensor([torch.nan]), torch.tensor([torch.nan]))
    assert (
        tensors.find_nonfinite({"a": torch.tensor([1, 2]), "b": torch.tensor([torch.inf])}) == "b"
    )


def test_build_is_called_under_a_seed_and_gives_what_is_fresh() -> None:
    state = torch.get_rng_state()
    one, two, other = (call_build(make_mlp, seed) for seed in (1, 1, 2))
    assert hash_module(one) == hash_module(two) != hash_module(other)
    assert torch.equal(state, torch.get_rng_state())
    trained = make_mlp()
    trained(torch.ones(1, 4)).sum().backward()
    with pytest.raises(InputError, match=r"trained before: 0\.weight has a gradient"):
        call_build(lambda: trained)


SHARDED = """
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from expunge.networks.tensors import collect_tensors, list_tensors
from expunge.certificates.hashes import hash_tensors

hash_module = lambda module: hash_tensors(list_tensors(module))
dist.init_process_group("gloo")
def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))
    model[2].weight = model[0].weight
    return model
whole, model = make(), make()
ddp = DistributedDataParallel(make())
assert hash_tensors(collect_tensors(ddp)) == hash_module(whole)
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
fully_shard(model, mesh=mesh)
found = collect_tensors(model)
assert list(found) == (list(list_tensors(whole)) if dist.get_rank() == 0 else []), list(found)
assert dist.get_rank() or hash_tensors(found) == hash_module(whole)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an interpreter that is taken down around them
"""


def test_a_model_of_two_processes_is_gathered(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SHARDED)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*command, tmp_path / "own.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
