"""The old model as people have it: modules, state_dicts, and what training tools write."""

import argparse
import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import save_file
from torch import nn

from expunge.errors import InputError
from expunge.networks.checkpoints import compare_published, find_file, read_old, read_state
from expunge.networks.tensors import list_trainable
from tests.helpers.small_networks import (
    compiled,
    make_bert,
    make_gpt2,
    make_llama,
    make_lora,
    make_mlp,
    shift,
)


def rename(model: nn.Module, how) -> dict[str, torch.Tensor]:
    return {how(name): tensor.clone() for name, tensor in model.state_dict().items()}


def check_read(old: object, expected: nn.Module, module: nn.Module, **options) -> None:
    found, wanted = read_old(old, module, **options), list_trainable(expected)
    assert list(found) == list(list_trainable(module))
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def refuse(sentence: str, old: object, module: nn.Module, **options) -> None:
    with pytest.raises(InputError, match=sentence):
        read_old(old, module, **options)


# What is in memory.
@pytest.mark.parametrize(
    "how",
    [
        lambda n: n, lambda n: f"module.{n}", lambda n: f"_orig_mod.{n}",
        lambda n: f"_orig_mod.module.{n}", lambda n: f"module._orig_mod.{n}",
        lambda n: n.replace(".", "._orig_mod."), lambda n: f"model.{n}",
        lambda n: f"_fsdp_wrapped_module.{n}", lambda n: f"model.module.net.{n}",
    ],
)  # fmt: skip
def test_names_with_what_wrappers_put_before_them(how) -> None:
    old = make_mlp()
    check_read(rename(old, how), old, make_mlp())


@pytest.mark.parametrize("make", [make_mlp, make_gpt2, make_llama, make_bert, make_lora])
def test_a_module_compiled_or_wrapped(make) -> None:
    old = shift(make())
    for given in (old, compiled(old), nn.DataParallel(old), copy.deepcopy(old).state_dict()):
        check_read(given, old, make())
    check_read(old, old, compiled(make()))


def test_values_come_in_the_modules_dtype() -> None:
    old = make_mlp().half()
    found = read_old(old, make_mlp())
    assert {t.dtype for t in found.values()} == {torch.float32}
    assert torch.equal(found["0.weight"], old[0].weight.float())


def test_frozen_tensors_buffers_and_strangers_never_enter() -> None:
    old = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    new = copy.deepcopy(old)
    new[0].requires_grad_(False)
    given = old.state_dict() | {
        "optimizer.exp_avg": torch.ones(3),
        "criterion.weight": torch.ones(2),
    }
    assert list(read_old(given, new)) == ["1.weight", "1.bias"]


def test_running_statistics_are_read_to_measure_the_old_model(tmp_path: Path) -> None:
    old = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.BatchNorm1d(2))
    old(torch.randn(4, 2))
    torch.save({"state_dict": rename(old, lambda n: f"module.{n}")}, tmp_path / "w.ckpt")
    found = read_state(tmp_path / "w.ckpt", nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    assert {n: t.tolist() for n, t in found.items()} == {
        n: t.tolist() for n, t in old.state_dict().items()
    }


def test_what_is_missing_or_of_another_shape() -> None:
    old, new = make_mlp(), nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 5))
    refuse(r"shape of 2\.weight in old is \(2, 3\); it must be \(5, 3", old, new)
    assert list(read_old(old, new, strict=False)) == ["0.weight", "0.bias"]
    short = {n: t for n, t in old.state_dict().items() if n.startswith("0.")}
    refuse(r"no tensor for 2\.weight and 1 more; .* strict=False lets", short, make_mlp())
    assert list(read_old(short, make_mlp(), strict=False)) == ["0.weight", "0.bias"]
    for strict in (True, False):
        refuse(
            r"none of the names of build\(\)'s module, 0\.weight", {"a.b": torch.ones(2)},
            make_mlp(), strict=strict,
        )  # fmt: skip


def test_numbers_must_be_finite_weights() -> None:
    old = make_mlp()
    with torch.no_grad():
        old[2].bias[1] = torch.nan
    refuse(r"2\.bias in old is not finite", old, make_mlp())
    given = make_mlp().state_dict() | {"0.bias": torch.ones(3, dtype=torch.int8)}
    refuse(r"0\.bias in old is torch\.int8; .* floating-point", given, make_mlp())


def test_tied_weights_by_either_name_but_not_with_two_values() -> None:
    old = shift(make_gpt2())
    state = old.state_dict()
    one = {n: t for n, t in state.items() if n != "lm_head.weight"}
    other = {n: t for n, t in state.items() if n != "transformer.wte.weight"}
    for given in (one, other, state):
        check_read(given, old, make_gpt2())
    untied = state | {"lm_head.weight": state["lm_head.weight"] + 1}
    refuse(r"two different tensors for transformer\.wte\.weight", untied, make_gpt2())


@pytest.mark.parametrize("old", [3, None, [torch.ones(2)]])
def test_what_is_no_model(old: object) -> None:
    refuse("it must be a module, a state_dict or the path of", old, make_mlp())
    refuse("no named tensors", {"epoch": 3}, make_mlp())


# Files of loops, Lightning and averages.
@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module", "net"])
def test_a_state_dict_in_a_checkpoint(key: str, tmp_path: Path) -> None:
    model = make_mlp()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    saved = {key: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
             "args": argparse.Namespace(lr=0.1), "best": np.float64(0.5), "where": tmp_path,
             "losses": np.arange(3.0), "rng": {"torch": torch.get_rng_state()}}  # fmt: skip
    torch.save(saved, tmp_path / "last.pt")
    check_read(tmp_path / "last.pt", model, make_mlp())
    check_read(str(tmp_path / "last.pt"), model, make_mlp(), key=key)
    torch.save({"run": {"state": {key: model.state_dict()}}}, tmp_path / "deep.pt")
    check_read(tmp_path / "deep.pt", model, make_mlp())
    torch.save(saved, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    check_read(tmp_path / "old.pth", model, make_mlp())


def test_a_model_and_its_average_need_a_key(tmp_path: Path) -> None:
    model, average = make_mlp(), make_mlp()
    saved = {"model": model.state_dict(), "ema": rename(average, lambda n: f"module.{n}")}
    torch.save(saved, tmp_path / "w.pt")
    for old in (tmp_path / "w.pt", saved):
        refuse(r"weights in 'ema\.module' and in 'model' that fit", old, make_mlp())
        check_read(old, model, make_mlp(), key="model")
        check_read(old, average, make_mlp(), key="ema")
        check_read(old, average, make_mlp(), key="ema.module")
        refuse(
            r"key of old is 'best'; .* one of 'model', 'ema\.module'", old, make_mlp(), key="best"
        )


def test_a_teacher_under_another_prefix_needs_a_key(tmp_path: Path) -> None:
    model, teacher = make_mlp(), make_mlp()
    both = rename(model, lambda n: f"model.{n}") | rename(teacher, lambda n: f"teacher.{n}")
    torch.save({"state_dict": both}, tmp_path / "w.ckpt")
    refuse(
        r"'state_dict\.model' and in 'state_dict\.teacher' that", tmp_path / "w.ckpt", make_mlp()
    )
    check_read(tmp_path / "w.ckpt", model, make_mlp(), key="model")
    check_read(tmp_path / "w.ckpt", teacher, make_mlp(), key="state_dict.teacher")


def test_a_file_that_needs_code_says_what_to_do(tmp_path: Path) -> None:
    torch.save(make_mlp(), tmp_path / "whole.pt")
    refuse(
        r"only by running code of .*; .* torch\.save\(model\.state",
        tmp_path / "whole.pt",
        make_mlp(),
    )
    (tmp_path / "broken.safetensors").write_bytes(b"not at all")
    for name in ("broken.safetensors", "nowhere.pt"):
        refuse(f"{name}, which cannot be read: ", tmp_path / name, make_mlp())


# Folders of the Trainer and of PEFT.
def write_trainer(folder: Path, *names: str) -> nn.Module:
    """A Trainer's checkpoint with what lies beside weights."""
    folder.mkdir(parents=True)
    model = make_mlp()
    for name in names:
        save = save_file if name.endswith(".safetensors") else torch.save
        save(model.state_dict(), folder / name)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": {0: torch.ones(3)}}, folder / name)
    (folder / "trainer_state.json").write_text("{}")
    return model


def test_a_folder_is_its_weights(tmp_path: Path) -> None:
    for names in (("model.safetensors",), ("pytorch_model.bin",),
                  ("model.safetensors", "pytorch_model.bin")):  # fmt: skip
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        check_read(folder, write_trainer(folder, *names), make_mlp())
        moved = folder.rename(tmp_path / f"{folder.name}-moved")
        assert find_file(moved).name == names[0]


@pytest.mark.parametrize("make", [make_gpt2, make_llama, make_bert])
def test_a_folder_of_transformers(make, tmp_path: Path) -> None:
    model = shift(make())
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "several", max_shard_size="10KB")
    assert (tmp_path / "several" / "model.safetensors.index.json").exists()
    for folder in ("one", "several"):
        check_read(tmp_path / folder, model, make())


def test_an_index_of_pickled_files(tmp_path: Path) -> None:
    model, places = make_mlp(), {}
    for k, names in enumerate((("0.weight", "0.bias"), ("2.weight", "2.bias")), 1):
        part = f"pytorch_model-0000{k}-of-00002.bin"
        torch.save({n: model.state_dict()[n] for n in names}, tmp_path / part)
        places |= dict.fromkeys(names, f"elsewhere/{part}")  # only names beside the index count
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    check_read(tmp_path, model, make_mlp())


def test_folders_that_do_not_say_which_are_refused(tmp_path: Path) -> None:
    write_trainer(tmp_path / "both", "model.safetensors", "adapter_model.safetensors")
    with pytest.raises(InputError, match=r"has .*model\.safetensors; name the one that is meant"):
        find_file(tmp_path / "both")
    for step in (10, 20):
        write_trainer(tmp_path / "out" / f"checkpoint-{step}", "model.safetensors")
    with pytest.raises(InputError, match="name one of checkpoint-10, checkpoint-20"):
        find_file(tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder that has none of model"):
        find_file(tmp_path / "empty")
    (tmp_path / "empty" / "__0_0.distcp").touch()
    with pytest.raises(InputError, match="format_utils dcp_to_torch"):
        find_file(tmp_path / "empty")


def make_other(**options) -> nn.Module:
    model = make_bert()
    return get_peft_model(model, LoraConfig(r=2, target_modules=["query"], **options), "mine")


@pytest.mark.parametrize(
    "options",
    [
        {}, {"modules_to_save": ["classifier", "pooler"]}, {"use_dora": True},
        {"target_modules": ["query", "word_embeddings"]}, {"bias": "lora_only"},
    ],
)  # fmt: skip
def test_an_adapter_as_peft_saves_it(options, tmp_path: Path) -> None:
    old = shift(make_lora(**options))
    old.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    check_read(tmp_path / "adapter", old, make_lora(**options))
    torch.save(old.state_dict(), tmp_path / "all.pt")
    check_read(tmp_path / "all.pt", old, make_lora(**options))


def test_the_adapters_name_does_not_matter(tmp_path: Path) -> None:
    old = shift(make_other(task_type=TaskType.SEQ_CLS))
    old.save_pretrained(tmp_path)
    for given in (old, tmp_path / "mine"):
        found = read_old(given, make_lora())
        assert next(iter(found.values())).shape == (2, 16)
        for a, b in zip(found.values(), list_trainable(old).values(), strict=True):
            assert torch.equal(a, b)


# What was published.
def test_frozen_tensors_are_compared_with_a_file(tmp_path: Path) -> None:
    model = make_lora()
    base = make_lora().unload()
    base.save_pretrained(tmp_path / "base")
    names = compare_published(tmp_path / "base", model)
    assert "base_model.model.bert.encoder.layer.0.attention.self.query.base_layer.weight" in names
    assert "base_model.model.classifier.original_module.weight" in names
    with torch.no_grad():
        model.get_parameter("base_model.model.bert.pooler.dense.bias").add_(1e-3)
    with pytest.raises(
        InputError, match=r"bert\.pooler\.dense\.bias of .* is not the one in publi"
    ):
        compare_published(tmp_path / "base", model)


def test_tied_frozen_tensors_are_compared_once(tmp_path: Path) -> None:
    model = make_gpt2()
    model.save_pretrained(tmp_path)
    model.requires_grad_(False).transformer.ln_f.requires_grad_(True)
    assert "lm_head.weight" in compare_published(tmp_path, model)
    with pytest.raises(InputError, match=r"published has no tensor for transformer\.wpe\.weight"):
        compare_published({"transformer.wte.weight": model.lm_head.weight}, model)
