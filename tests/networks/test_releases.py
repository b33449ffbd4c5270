"""A release as the folder that transformers, PEFT and build() load."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors import safe_open
from torch import nn

from expunge.certificates.hashes import combine_leaves
from expunge.certificates.people import commit
from expunge.certificates.record import Code, Record, Tensors, TrainingRun, Weights
from expunge.certificates.release import Release
from expunge.errors import InputError, VerificationError
from expunge.networks.adapters import find_adapter, list_file_names
from expunge.networks.building import call_build
from expunge.networks.releases import hash_start, load_model, make_release
from expunge.networks.tensors import list_published, list_tensors
from expunge.recipes import Retraining
from tests.helpers.small_networks import (
    compiled,
    hash_module,
    make_bert,
    make_gpt2,
    make_llama,
    make_lora,
    make_mlp,
    shift,
)

IDS = torch.arange(8)[None]


def release_of(build, train=shift, seed: int = 0) -> Release:
    """As ``retrain`` makes it."""
    module = call_build(build, seed)
    start, published = hash_start(module), list_published(module)
    root = combine_leaves(start.values())
    told = Tensors(names=tuple(published), hash=root) if published else None
    record = Record(
        recipe=Retraining(), parameters=1, seed=seed, start="build", forget=commit(["ann"], 1),
        retained=commit(["bob"], 1), code=Code(),
        weights=Weights(after=root, start=root, published=told),
        training=TrainingRun(function="own.train", examples=1),
    )  # fmt: skip
    return make_release(train(module), record, start=start)


@pytest.mark.parametrize(
    ("make", "auto"),
    [
        (make_gpt2, transformers.AutoModelForCausalLM),
        (make_llama, transformers.AutoModelForCausalLM),
        (make_bert, transformers.AutoModelForSequenceClassification),
        (lambda: compiled(make_gpt2()), transformers.AutoModelForCausalLM),
        (lambda: make_gpt2().bfloat16(), transformers.AutoModelForCausalLM),
        (
            lambda: transformers.GPT2LMHeadModel(
                transformers.GPT2Config(
                    vocab_size=8, n_embd=4, n_layer=1, n_head=1, tie_word_embeddings=False
                )
            ),
            transformers.AutoModelForCausalLM,
        ),
    ],
)
def test_transformers_load_the_folder(make, auto, tmp_path: Path, capfd) -> None:
    release = release_of(make)
    run = release.save(tmp_path / "run").rename(tmp_path / "moved")
    model, found = auto.from_pretrained(run, output_loading_info=True)
    assert not any(found.values()), found
    assert "MISSING" not in capfd.readouterr().err
    assert hash_module(model) == release.certificate.weights.after
    assert json.loads((run / "config.json").read_text())["architectures"] == [type(model).__name__]
    assert (run / "generation_config.json").exists() == model.can_generate()
    again = load_model(run, make)
    assert hash_module(again) == hash_module(model)
    for network in (release.model, again, model):
        network.eval()
    with torch.no_grad():
        outputs = [network(IDS % 8).logits for network in (release.model, again, model)]
    assert torch.equal(outputs[0], outputs[1])
    torch.testing.assert_close(outputs[0], outputs[2])  # hashes say that all bits are the same


def test_names_and_metadata_of_the_file(tmp_path: Path) -> None:
    run = release_of(lambda: nn.DataParallel(make_mlp())).save(tmp_path / "run")
    with safe_open(run / "model.safetensors", "pt") as file:
        assert set(file.keys()) == set(make_mlp().state_dict())
        assert file.metadata()["format"] == "pt"
    assert sorted(p.name for p in run.iterdir()) == [
        "certificate.json", "model.safetensors", "record.json"]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{}, {"modules_to_save": ["classifier", "pooler"]}, {"use_dora": True}]
)
def test_an_adapter_is_released_as_pefts_own_files(options, tmp_path: Path) -> None:
    release = release_of(lambda: make_lora(**options))
    run = release.save(tmp_path / "run")
    assert sorted(p.name for p in (run / "adapter").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors", "certificate.json"]  # fmt: skip
    assert not (run / "config.json").exists()
    base = make_lora(**options).unload()
    assert release.certificate.weights.adapter.base == hash_module(base)
    loaded = PeftModel.from_pretrained(base, run / "adapter").eval()
    release.model.eval()
    with torch.no_grad():
        expected = release.model(IDS).logits
        torch.testing.assert_close(loaded(IDS).logits, expected)
        assert torch.equal(
            load_model(run, lambda: make_lora(**options)).eval()(IDS).logits, expected
        )
    (run / "model.safetensors").unlink()
    again = load_model(run, lambda: make_lora(**options))
    assert hash_module(again) == release.certificate.weights.after

    def build_other() -> nn.Module:
        model = make_lora(**options)
        torch.nn.init.ones_(model.get_parameter("base_model.model.bert.embeddings.LayerNorm.bias"))
        return model

    with pytest.raises(VerificationError, match="gives a base with the hash"):
        load_model(run, build_other)


def test_what_is_trained_beside_an_adapter_is_no_adapter() -> None:
    def build() -> nn.Module:
        model = make_lora()
        model.get_parameter("base_model.model.bert.pooler.dense.bias").requires_grad_(True)
        return model

    assert find_adapter(build()) is None
    release = release_of(build)
    assert release.certificate.weights.adapter is None
    assert list(release.files) == []
    assert list_file_names(make_mlp()) == {}


def test_two_adapters_or_a_merged_one_are_released_whole() -> None:
    model = make_lora()
    assert find_adapter(model) is not None
    model.merge_adapter()
    assert find_adapter(model) is None
    model.unmerge_adapter()
    model.add_adapter("second", model.peft_config["default"])
    assert find_adapter(model) is None


def test_published_is_what_training_left_as_build_gave_it() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        model[0].requires_grad_(False)
        model.register_buffer("table", torch.arange(3.0))
        return model

    def train(model: nn.Module) -> nn.Module:
        model(torch.randn(4, 2))
        return shift(model)

    weights = release_of(build, train).record.weights
    assert weights.published.names == ("table", "0.weight", "0.bias")
    kept = release_of(build, shift).record.weights
    assert len(kept.published.names) == 6
    assert release_of(make_mlp).record.weights.published is None


def test_what_the_file_does_not_have_is_built_under_the_runs_seed(tmp_path: Path) -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)
            self.directions = torch.randn(4, 3)  # not a buffer, as people write it
            self.register_buffer("phase", torch.rand(3), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer((x @ self.directions + self.phase).cos())

    release = release_of(Projected, seed=7)
    model = load_model(release.save(tmp_path / "run"), Projected)
    assert torch.equal(model(torch.ones(1, 4)), release.model(torch.ones(1, 4)))


def test_a_run_loads_into_its_own_network_only(tmp_path: Path) -> None:
    run = release_of(make_mlp).save(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"and .*run differ in the name or shape of 0\.bias and 5 more"
    ):
        load_model(run, lambda: nn.Linear(4, 2))
    with pytest.raises(InputError, match=r"differ in the name or shape of 0\.bias and 2 more"):
        load_model(run, lambda: nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)))
    other = release_of(make_mlp, lambda m: shift(m, 2.0)).save(tmp_path / "other")
    (other / "model.safetensors").rename(run / "model.safetensors")
    with pytest.raises(VerificationError, match="its certificate says"):
        load_model(run, make_mlp)
    (run / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"a folder with model\.safetensors"):
        load_model(run, make_mlp)


def test_what_is_applied_is_listed_again(tmp_path: Path) -> None:
    release = release_of(make_gpt2).apply(lambda model: model.bfloat16(), note="bfloat16")
    run = release.save(tmp_path / "run")
    model = transformers.AutoModelForCausalLM.from_pretrained(run)
    assert model.dtype is torch.bfloat16
    assert hash_module(model) == release.certificate.weights.after
    assert release.certificate.applied[0].note == "bfloat16"
    assert hash_module(load_model(run, lambda: make_gpt2().bfloat16())) == hash_module(model)
    assert list(list_tensors(model)) == list(release.tensors)


class Counting(nn.Linear):
    """Keeps numbers where no release holds them."""

    steps = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"steps": self.steps}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def test_extra_state_that_training_changes_is_warned_about(recwarn) -> None:
    def train(model: nn.Module) -> nn.Module:
        model[0].steps += 1
        return shift(model)

    release_of(lambda: nn.Sequential(Counting(2, 2)))
    assert not recwarn.list
    with pytest.warns(UserWarning, match=r"training changed 0\._extra_state"):
        release_of(lambda: nn.Sequential(Counting(2, 2)), train)
