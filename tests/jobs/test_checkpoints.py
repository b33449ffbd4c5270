"""Weights as DDP, torch.compile, Lightning, the Trainer and PEFT save them."""

import argparse
import json
import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import save_file
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

from expunge.errors import InputError
from expunge.jobs.checkpoints import find_file, match_names, read_metadata, read_weights
from expunge.jobs.loading import put_weights
from expunge.jobs.run import run_job
from job_folder import write_job

FIELD = "model.weights"


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def rename(how) -> dict[str, torch.Tensor]:
    return {how(name): tensor.clone() for name, tensor in make().state_dict().items()}


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda n: f"module.{n}", "without 'module.'"),
        (lambda n: f"_orig_mod.{n}", "without '_orig_mod.'"),
        (lambda n: f"_orig_mod.module.{n}", "without '_orig_mod.' and 'module.'"),
        (lambda n: f"module._orig_mod.{n}", "without '_orig_mod.' and 'module.'"),
        (lambda n: n.replace(".", "._orig_mod."), "without '_orig_mod.'"),
        (lambda n: f"model.{n}", "without 'model.'"),
        (lambda n: f"_fsdp_wrapped_module.{n}", "without '_fsdp_wrapped_module.'"),
        (lambda n: f"model.module.net.{n}", "without 'model.' and 'module.' and 'net.'"),
    ],
)
def test_what_wrappers_put_before_names_is_recognised_and_told(how, told, caplog) -> None:
    given, model = rename(how), make()
    with caplog.at_level(logging.INFO, "expunge"):
        assert put_weights(model, given, FIELD) == ()
    assert told in caplog.text
    for mine, theirs in zip(model.state_dict().values(), given.values(), strict=True):
        assert torch.equal(mine, theirs)


def test_names_that_fit_are_left_alone(caplog) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = make()

    model = Wrapped()
    with caplog.at_level(logging.INFO, "expunge"):
        found = match_names(model, model.state_dict(), FIELD)
    assert list(found) == list(model.state_dict())
    assert caplog.text == ""


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module", "net"])
def test_a_state_dict_in_a_checkpoint_is_found(key: str, tmp_path: Path, caplog) -> None:
    model = make()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    held = {key: model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3,
            "lr_schedulers": [{"last_epoch": 3}], "rng": torch.get_rng_state()}  # fmt: skip
    torch.save(held, tmp_path / "last.ckpt")
    with caplog.at_level(logging.INFO, "expunge"):
        found = read_weights(tmp_path / "last.ckpt", FIELD)
    assert list(found) == list(model.state_dict())
    assert f"{key!r} of the checkpoint last.ckpt" in caplog.text


def test_a_state_dict_two_levels_down_is_found(tmp_path: Path) -> None:
    torch.save({"model": {"state_dict": make().state_dict(), "name": "x"}}, tmp_path / "w.pt")
    assert list(read_weights(tmp_path / "w.pt", FIELD)) == list(make().state_dict())


def write_trainer(folder: Path, *names: str) -> Path:
    """A Trainer's checkpoint with what lies beside weights."""
    folder.mkdir(parents=True)
    tensors = make().state_dict()
    for name in names:
        if name.endswith(".safetensors"):
            save_file(tensors, folder / name, {"format": "pt"})
        else:
            torch.save(tensors, folder / name)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"):
        torch.save({"state": {0: torch.ones(3)}, "namespace": {"a": 1}}, folder / name)
    (folder / "trainer_state.json").write_text("{}")
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
def test_a_folder_of_the_trainer_is_its_weights(name: str, tmp_path: Path, caplog) -> None:
    folder = write_trainer(tmp_path / "checkpoint-7", name)
    with caplog.at_level(logging.INFO, "expunge"):
        found = read_weights(folder, FIELD)
    assert f"{name} of the folder" in caplog.text
    assert found.keys() == make().state_dict().keys()
    assert read_metadata(folder) == ({"format": "pt"} if "safe" in name else {})


@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_an_index_of_several_files_is_read(kind: str, tmp_path: Path) -> None:
    tensors, places = make().state_dict(), {}
    stem = "model" if kind == "safetensors" else "pytorch_model"
    for k, part in enumerate((("0.weight", "0.bias"), ("2.weight", "2.bias")), 1):
        name = f"{stem}-0000{k}-of-00002.{kind}"
        chosen = {n: tensors[n] for n in part}
        (save_file if kind == "safetensors" else torch.save)(chosen, tmp_path / name)
        places |= dict.fromkeys(part, name)
    index = tmp_path / f"{stem}.{kind}.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    assert read_weights(tmp_path, FIELD).keys() == tensors.keys()
    index.write_text(json.dumps({"weight_map": places | {"more": f"{stem}-00001-of-00002.{kind}"}}))
    with pytest.raises(InputError, match="does not list what its files hold: more"):
        read_weights(tmp_path, FIELD)


def test_folders_that_do_not_say_which_are_refused(tmp_path: Path) -> None:
    both = write_trainer(tmp_path / "both", "model.safetensors", "pytorch_model.bin")
    with pytest.raises(InputError, match=r"holds model\.safetensors and pytorch_model\.bin; name"):
        find_file(both, FIELD)
    write_trainer(tmp_path / "out" / "checkpoint-10", "model.safetensors")
    write_trainer(tmp_path / "out" / "checkpoint-20", "model.safetensors")
    with pytest.raises(InputError, match="name one of checkpoint-10, checkpoint-20"):
        find_file(tmp_path / "out", FIELD)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="a folder that holds none of model"):
        find_file(tmp_path / "empty", FIELD)


def test_a_checkpoint_that_needs_code_says_what_to_do(tmp_path: Path) -> None:
    torch.save({"state_dict": make().state_dict(), "hyper_parameters": argparse.Namespace(a=1)},
               tmp_path / "light.ckpt")  # fmt: skip
    with pytest.raises(InputError, match=r"only by running code of argparse\.Namespace; .* save"):
        read_weights(tmp_path / "light.ckpt", FIELD)
    torch.save(make(), tmp_path / "whole.pt")
    with pytest.raises(InputError, match=r"torch\.save\(model\.state_dict\(\)"):
        read_weights(tmp_path / "whole.pt", FIELD)


def test_a_job_takes_a_folder(tmp_path: Path) -> None:
    path = write_job(tmp_path, model={"weights": "checkpoint-3"})
    (tmp_path / "checkpoint-3").mkdir()
    (tmp_path / "weights.safetensors").rename(tmp_path / "checkpoint-3" / "model.safetensors")
    assert run_job(path).certificate.releasable
    with pytest.raises(InputError, match=r"was unlearned itself; name its certificate"):
        run_job(write_job(tmp_path, model={"weights": "run/"}, output={"dir": "run2"}))


def build_classifier() -> nn.Module:
    torch.manual_seed(0)
    base = BertForSequenceClassification(
        BertConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                   intermediate_size=8, max_position_embeddings=8)
    )  # fmt: skip
    return get_peft_model(
        base, LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query"])
    )


def test_a_classifier_as_peft_saves_it(tmp_path: Path) -> None:
    old, new = build_classifier(), build_classifier()
    with torch.no_grad():
        for p in old.parameters():
            if p.requires_grad:
                p.add_(1.0)
    old.save_pretrained(tmp_path / "adapter")
    kept = put_weights(new, read_weights(tmp_path / "adapter", FIELD), FIELD)
    assert "base_model.model.classifier.original_module.weight" in kept
    for (name, a), b in zip(old.named_parameters(), new.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_the_base_is_known_by_its_own_names() -> None:
    model = build_classifier()
    base = build_classifier().unload().state_dict()
    found = match_names(model, base, "model.public")
    assert "base_model.model.bert.encoder.layer.0.attention.self.query.base_layer.weight" in found
    assert "base_model.model.classifier.original_module.weight" in found
    assert found.keys() <= model.state_dict().keys()
