"""Attempts to carry the old model past an adapter or a checkpoint; each must fail."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from expunge.certificates.certificate import Certificate
from expunge.certificates.signing import write_key_pair
from expunge.certificates.verification import verify
from expunge.errors import CertificateError, ExpungeError, InputError, UnlearningError
from expunge.jobs.checkpoints import match_names, read_weights
from expunge.jobs.loading import put_weights
from expunge.jobs.run import run_job
from expunge.processes.adapters import describe_adapter, find_adapter, name_base
from expunge.processes.weights import hash_weights, list_tensors
from expunge.recipes import OutputPerturbation
from expunge.reports.signing import sign_run
from expunge.training.batches import Batches
from job_folder import write_job

RECIPE = OutputPerturbation(start_clip=1.0, noise_std=4.0)
X = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
Y = torch.arange(12) % 3
LOADER = Batches(X, Y, batch_size=6, ids=[f"p{i}" for i in range(12)])
OWN = """
import torch
from peft import LoraConfig, get_peft_model
from torch import nn


def make_base():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def build():
    base = make_base()
    torch.manual_seed(1)
    return get_peft_model(base, LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))


def build_two():
    model = build()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["0"]))
    return model


def build_merged():
    model = build()
    model.merge_adapter()
    return model
"""


@pytest.fixture(autouse=True)
def _alone(one_thread: None) -> None:
    """One thread for these small runs."""


def make_base() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def make(**options) -> PeftModel:
    """An adapter and a classifier on a public base, trained already."""
    base = make_base()
    torch.manual_seed(1)
    options = {"r": 2, "target_modules": ["0"], "modules_to_save": ["2"]} | options
    model = get_peft_model(base, LoraConfig(**options))
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn_like(p))
    return model


def publish() -> dict[str, torch.Tensor]:
    model = get_peft_model(
        make_base(), LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    )
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}


def unlearn(model: nn.Module, **options):
    options = {"public": publish(), "loss_fn": cross_entropy, "forget_ids": ["gone"]} | options
    return expunge.unlearn(model, LOADER, RECIPE, **options)


@pytest.fixture
def released(tmp_path: Path) -> Path:
    run = unlearn(make())
    certificate = expunge.certify(run.record, delta=1e-5)
    return expunge.write_run(
        tmp_path / "run", model=run.model, record=run.record, certificate=certificate
    )


def save_as_peft(model: PeftModel, folder: Path) -> dict[str, torch.Tensor]:
    model.save_pretrained(folder)
    return load_file(folder / "adapter_model.safetensors")


# What is released.


def test_a_release_is_an_adapter_that_peft_loads(released: Path) -> None:
    found = verify(released / "certificate.json", record=released / "record.json")
    alone = verify(released / "adapter" / "certificate.json")
    assert alone.to_bytes() == found.to_bytes()
    verify(released / "certificate.json", weights=released / "adapter")
    assert found.weights.adapter.base == hash_weights(make_base().state_dict())
    assert f"on base {found.weights.adapter.base}" in found.statement()
    whole = make()
    whole.load_state_dict(load_file(released / "model.safetensors"))
    loaded = PeftModel.from_pretrained(make_base(), released / "adapter")
    assert torch.equal(loaded(X), whole(X))
    (released / "model.safetensors").unlink()
    verify(released / "certificate.json")


def test_signing_a_run_signs_its_adapter(released: Path, tmp_path: Path) -> None:
    key, _ = write_key_pair(tmp_path / "key.pem")
    sign_run(released, key)
    for folder in (released, released / "adapter"):
        assert verify(folder).signature is not None


def test_fine_tuning_changes_the_adapter_that_is_certified() -> None:
    run = unlearn(make())
    tuned = expunge.fine_tune(run, LOADER, epochs=1, learning_rate=0.1)
    assert tuned.record.adapter != run.record.adapter
    assert tuned.record.adapter.base == run.record.adapter.base
    assert tuned.record.adapter == describe_adapter(tuned.model, tuned.record.public)


def test_nothing_of_an_old_folder_is_copied(tmp_path: Path) -> None:
    """Unknown keys and files beside the old adapter stay where they are."""
    old = make()
    old.save_pretrained(tmp_path / "old")
    config = tmp_path / "old" / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"diary": [0.125, 3]}))
    (tmp_path / "old" / "README.md").write_text("secret")
    with pytest.warns(UserWarning, match="diary"):
        model = PeftModel.from_pretrained(make_base(), tmp_path / "old", is_trainable=True)
    vars(model.peft_config["default"])["diary"] = [0.125, 3]
    run = unlearn(model)
    certificate = expunge.certify(run.record, delta=1e-5)
    out = expunge.write_run(
        tmp_path / "run", model=run.model, record=run.record, certificate=certificate
    )
    names = {path.name for path in (out / "adapter").iterdir()}
    assert names == {"adapter_model.safetensors", "adapter_config.json", "certificate.json"}
    assert "diary" not in (out / "adapter" / "adapter_config.json").read_text()
    held = load_file(out / "adapter" / "adapter_model.safetensors")
    before = load_file(tmp_path / "old" / "adapter_model.safetensors")
    assert held.keys() == before.keys()
    assert not any(torch.equal(held[name], before[name]) for name in held)


@pytest.mark.parametrize(
    "file", ["adapter_model.safetensors", "adapter_config.json", "certificate.json"]
)
def test_one_changed_byte_of_an_adapter_does_not_hold(file: str, released: Path) -> None:
    raw = bytearray((released / "adapter" / file).read_bytes())
    raw[len(raw) * 2 // 3] ^= 1
    (released / "adapter" / file).write_bytes(bytes(raw))
    with pytest.raises(ExpungeError):
        verify(released / "certificate.json")


@pytest.mark.parametrize("file", ["optimizer.pt", "adapter_model.bin", "model.safetensors"])
def test_what_lies_beside_an_adapter_is_named(file: str, released: Path) -> None:
    (released / "adapter" / file).write_bytes(b"old")
    with pytest.raises(ExpungeError, match=rf"holds {file} too"):
        verify(released / "certificate.json")


def test_an_old_adapter_beside_new_weights_is_noticed(released: Path, tmp_path: Path) -> None:
    tensors = save_as_peft(make(), tmp_path / "old")
    place = released / "adapter" / "adapter_model.safetensors"
    metadata = Certificate.load(released / "certificate.json").safetensors_metadata()
    save_file(tensors, place, metadata)
    with pytest.raises(ExpungeError, match=r"weights\.adapter\.hash is"):
        verify(released / "certificate.json")
    shutil.rmtree(released / "adapter")
    verify(released / "certificate.json")


def test_an_adapter_that_no_certificate_speaks_of_is_noticed(tmp_path: Path) -> None:
    run = expunge.unlearn(nn.Linear(4, 3), LOADER, RECIPE, loss_fn=cross_entropy, forget_ids=["x"])
    assert run.record.adapter is None
    out = expunge.write_run(tmp_path / "run", model=run.model, record=run.record,
                            certificate=expunge.certify(run.record, delta=1e-5))  # fmt: skip
    assert not (out / "adapter").exists()
    make().save_pretrained(out / "adapter")
    with pytest.raises(ExpungeError, match="the certificate speaks of none"):
        verify(out / "certificate.json")


def test_the_adapter_of_another_run_is_not_written(tmp_path: Path) -> None:
    one, other = unlearn(make()), unlearn(make())
    certificate = expunge.certify(one.record, delta=1e-5)
    forged = certificate.model_copy(
        update={"weights": certificate.weights.model_copy(
            update={"adapter": expunge.certify(other.record, delta=1e-5).weights.adapter}
        )}
    )  # fmt: skip
    with pytest.raises(UnlearningError, match="adapter is not the one that the certificate"):
        expunge.write_run(tmp_path / "run", model=one.model, record=one.record, certificate=forged)
    assert not (tmp_path / "run").exists()


def test_what_is_trained_beside_the_adapter_is_no_adapter() -> None:
    """Otherwise the adapter on the public base would not be the certified model."""
    model = make(modules_to_save=None)
    model.base_model.model[2].weight.requires_grad_(True)
    public = {n: p for n, p in model.named_parameters() if not p.requires_grad}
    run = unlearn(model, public={n: p.detach().clone() for n, p in public.items()})
    assert run.record.adapter is None
    assert run.record.parameters > 15


# What is not public.


def test_a_base_that_is_not_the_public_one_is_refused() -> None:
    model = make()
    with torch.no_grad():
        model.base_model.model[0].base_layer.weight.add_(1e-3)
    with pytest.raises(UnlearningError, match=r"0\.base_layer\.weight differs from the public"):
        unlearn(model)


def test_an_original_module_that_holds_old_weights_is_refused() -> None:
    model = make()
    wrapper = model.base_model.model[2]
    with torch.no_grad():
        for name, p in wrapper.original_module.named_parameters():
            p.copy_(wrapper.modules_to_save["default"].get_parameter(name))
    with pytest.raises(UnlearningError, match=r"original_module\.weight, .* differs? from the"):
        unlearn(model)


def test_a_copy_of_trained_weights_cannot_be_declared_public() -> None:
    model = make()
    wrapper = model.base_model.model[2]
    with torch.no_grad():
        for name, p in wrapper.original_module.named_parameters():
            p.copy_(wrapper.modules_to_save["default"].get_parameter(name))
    with pytest.raises(
        InputError, match=r"original_module\.weight, whose values are those of .*modules_to_save"
    ):
        unlearn(model, public=["base_model.*"])


def test_a_merged_adapter_is_refused(tmp_path: Path) -> None:
    model = make()
    model.merge_adapter()
    with pytest.raises(UnlearningError, match="differs from the public tensors"):
        unlearn(model)
    with pytest.raises(InputError, match=r"merged into base_model\.model\.0"):
        run_job(write_own(tmp_path, "build_merged"))


def test_two_adapters_are_refused_in_a_job_and_never_one_adapter(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the adapters 'default', 'second'; a release is one"):
        run_job(write_own(tmp_path, "build_two"))
    model = make()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["0"]))
    assert find_adapter(model, ()) is None
    with pytest.raises(UnlearningError, match=r"second\.weight.* is not in the public tensors"):
        unlearn(model)


def write_own(folder: Path, build: str = "build", **model: str) -> Path:
    path = write_job(
        folder,
        centre={"kind": "zero"},
        model={"build": f"own_adapter.py:{build}", "weights": "old", "public": "build"} | model,
    )
    (folder / "own_adapter.py").write_text(OWN)
    make().save_pretrained(folder / "old")
    return path


def test_a_job_takes_and_gives_adapters(tmp_path: Path) -> None:
    done = run_job(write_own(tmp_path))
    assert verify(done.directory / "certificate.json").weights.adapter is not None
    loaded = PeftModel.from_pretrained(make_base(), done.directory / "adapter")
    assert loaded(X).shape == (12, 3)
    again = write_job(
        tmp_path, output={"dir": "run2"}, centre={"kind": "zero"},
        model={"build": "own_adapter.py:build", "weights": "run/adapter", "public": "build"},
    )  # fmt: skip
    with pytest.raises(InputError, match="was unlearned itself; name its certificate"):
        run_job(again)


def test_a_public_base_in_a_file_is_compared_by_its_own_names(tmp_path: Path) -> None:
    path = write_own(tmp_path, public="base.safetensors")
    save_file(make_base().state_dict(), tmp_path / "base.safetensors")
    done = run_job(path)
    assert done.certificate.weights.public.compared
    shutil.rmtree(tmp_path / "run")
    tuned = {name: tensor + 1e-4 for name, tensor in make_base().state_dict().items()}
    save_file(tuned, tmp_path / "base.safetensors")
    with pytest.raises(UnlearningError, match="differs from the public tensors"):
        run_job(path)


# What a checkpoint says.

LAYERS = {"0.weight": torch.ones(5, 4), "0.bias": torch.ones(5),
          "2.weight": torch.ones(3, 5), "2.bias": torch.ones(3)}  # fmt: skip


@pytest.mark.parametrize(
    "more", ["module.0.weight", "0._orig_mod.weight", "_orig_mod.module.0.weight"]
)
def test_two_names_for_one_tensor_are_refused(more: str) -> None:
    given = {f"_orig_mod.{name}": tensor for name, tensor in LAYERS.items()}
    given |= {"_orig_mod." * (more[0] == "0") + more: torch.zeros(5, 4)}
    with pytest.raises(InputError):
        put_weights(make_base(), given, "model.weights")
    with pytest.raises(InputError, match=r"two tensors for 0\.weight, the second is 0\._orig_mod"):
        put_weights(make_base(), LAYERS | {"0._orig_mod.weight": LAYERS["0.weight"]}, "w")


def test_a_teacher_or_an_average_beside_the_model_is_not_chosen(tmp_path: Path) -> None:
    for other in ("ema", "teacher", "model_ema", "best"):
        torch.save({"model": LAYERS, other: LAYERS}, tmp_path / "w.pt")
        with pytest.raises(InputError, match=f"named tensors in 'model' and in '{other}'"):
            read_weights(tmp_path / "w.pt", "model.weights")
    both = {f"{p}.{n}": t for p in ("model", "ema_model") for n, t in LAYERS.items()}
    with pytest.raises(InputError, match="'ema_model' and 'model' fit the model"):
        put_weights(make_base(), both, "model.weights")
    loss = {f"model.{n}": t for n, t in LAYERS.items()} | {"criterion.weight": torch.ones(3)}
    with pytest.raises(InputError, match="under 'criterion', 'model', and those under 'model' fit"):
        put_weights(make_base(), loss, "model.weights")


def test_tensors_beside_an_adapter_are_refused_by_name(tmp_path: Path) -> None:
    given = save_as_peft(make(), tmp_path / "old")
    for name in ("base_model.model.0.lora_A.secret.weight", "base_model.model.9.weight", "note"):
        with pytest.raises(InputError, match=f"has the tensor {name}, which the model has not"):
            put_weights(make(), given | {name: torch.ones(2, 4)}, "model.weights")
    extra = {"base_model.model.2.modules_to_save.default.weight": torch.ones(3, 5)}
    with pytest.raises(InputError, match=r"two tensors for base_model\.model\.2\.modules_to_save"):
        put_weights(make(), given | extra, "model.weights")


def test_a_name_that_may_mean_two_adapters_is_refused(tmp_path: Path) -> None:
    given = save_as_peft(make(), tmp_path / "old")
    model = make()
    model.add_adapter("second", LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"]))
    with pytest.raises(InputError, match=r"which may be .*default.* or .*second"):
        match_names(model, given, "model.weights")


def test_tied_weights_of_two_values_are_refused() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.b.weight = self.a.weight

    same = {"a.weight": torch.ones(3, 3), "b.weight": torch.ones(3, 3)}
    put_weights(Tied(), same, "w")
    put_weights(Tied(), {"b.weight": torch.ones(3, 3)}, "w")
    with pytest.raises(InputError, match=r"different values for the tied weights a\.weight and b"):
        put_weights(Tied(), same | {"b.weight": torch.zeros(3, 3)}, "w")


def test_a_buffer_that_is_not_saved_is_not_taken_from_a_file() -> None:
    class Holding(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.register_buffer("memory", torch.zeros(2), persistent=False)

    given = nn.Linear(2, 2).state_dict() | {"memory": torch.ones(2)}
    with pytest.raises(InputError, match="has the tensor memory, which the model has not"):
        put_weights(Holding(), given, "w")


def test_an_optimizer_is_never_taken_for_weights(tmp_path: Path) -> None:
    state = {"state": {0: {"exp_avg": torch.ones(3, 5)}}, "param_groups": []}
    torch.save({"optimizer": state, "epoch": 1}, tmp_path / "w.pt")
    with pytest.raises(InputError, match="must hold named tensors"):
        read_weights(tmp_path / "w.pt", "model.weights")


def test_files_of_an_index_that_hold_a_tensor_twice_are_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(InputError, match="whose files hold b twice"):
        read_weights(tmp_path, "model.weights")


def test_an_index_does_not_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "w.safetensors")
    index = tmp_path / "in" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../w.safetensors"}}))
    with pytest.raises(InputError, match="cannot be read"):
        read_weights(index, "model.weights")


def test_names_of_a_base_are_those_of_the_base() -> None:
    model = make()
    held = {name_base(n): t for n, t in list_tensors(model).items() if n in publish()}
    assert held.keys() == make_base().state_dict().keys()
    with pytest.raises(CertificateError):
        verify("nowhere/certificate.json")
