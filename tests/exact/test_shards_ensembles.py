"""Ensembles as modules, and as folders that load where the model lives."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from expunge import Data, Release, Shards, UnlearningError, load_model, verify
from expunge.exact.shards_ensemble import Ensemble
from tests.helpers.small_networks import make_bert
from tests.helpers.small_shards import hash_release, make, make_data


def build_lora() -> Any:
    import peft

    config = peft.LoraConfig(r=2, target_modules=["query"], modules_to_save=["classifier"])
    with torch.random.fork_rng():
        torch.manual_seed(1)  # a published base
        base = make_bert()
    return peft.get_peft_model(base, config)


def make_texts(count: int = 24) -> Data:
    draw = torch.Generator().manual_seed(0)
    examples = [
        {"input_ids": torch.randint(1, 30, (7,), generator=draw), "labels": torch.tensor(i % 2)}
        for i in range(count)
    ]
    return Data(examples, ids=[f"u{i // 2}" for i in range(count)])


def train_texts(model: nn.Module, examples: Any, seed: int) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.05)
    for _ in range(2):
        batch = {name: torch.stack([one[name] for one in examples]) for name in examples[0]}
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()


def release_texts(build: Any, folder: Path) -> tuple[Data, Release]:
    data, ensemble = make_texts(), make(build=build, train=train_texts, shards=2)
    ensemble.learn(data)
    release = ensemble.forget(["u1"], data)
    release.save(folder)
    return data, release


def ask(model: Any, data: Data) -> Any:
    model.eval()
    with torch.no_grad():
        return model(input_ids=torch.stack([one["input_ids"] for one in data.examples]))


def test_logits_and_probabilities_are_averaged() -> None:
    net, x = nn.Linear(3, 4), torch.randn(5, 3)
    parts = [{n: torch.randn_like(p) for n, p in net.named_parameters()} for _ in range(3)]
    each = torch.stack([x @ p["weight"].T + p["bias"] for p in parts])
    numbered = dict(enumerate(parts))
    assert torch.allclose(Ensemble(net, numbered, "logits")(x), each.mean(0), atol=1e-6)
    mean = Ensemble(net, numbered, "probabilities")(x).exp()
    assert torch.allclose(mean, each.softmax(-1).mean(0), atol=1e-6)
    double = Ensemble(net, numbered, "logits").double()
    assert double(x.double()).dtype == torch.float64

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = net

        def forward(self, x: Tensor) -> dict[str, Any]:
            return {"one": self.one(x), "two": (self.one(x),)}

    heads = Ensemble(Heads(), {0: {f"one.{n}": t for n, t in parts[0].items()}}, "logits")(x)
    assert torch.equal(heads["one"], heads["two"][0])


def test_a_model_of_transformers_is_a_folder_per_constituent(tmp_path: Path) -> None:
    import transformers

    data, release = release_texts(make_bert, tmp_path / "run")
    kind = transformers.AutoModelForSequenceClassification
    parts = [kind.from_pretrained(tmp_path / "run" / "constituents" / str(k)) for k in (0, 1)]
    mean = torch.stack([ask(part, data).logits for part in parts]).mean(0)
    assert torch.allclose(ask(release.model, data).logits, mean, atol=1e-6)
    assert torch.equal(ask(load_model(tmp_path / "run", make_bert), data).logits,
                       ask(release.model, data).logits)  # fmt: skip
    with_labels = release.model(**{n: torch.stack([e[n] for e in data.examples])
                                   for n in data.examples[0]})  # fmt: skip
    assert with_labels.loss.ndim == 0
    found = verify(tmp_path / "run")
    assert found.holds, found.problems


def test_adapters_share_one_base_and_are_peft_s_own(tmp_path: Path) -> None:
    import peft

    data, release = release_texts(build_lora, tmp_path / "run")
    size = sum(file.stat().st_size for file in (tmp_path / "run").rglob("*.safetensors"))
    base = sum(p.numel() * 4 for p in build_lora().parameters())
    assert not any("base_layer" in name for name in release.tensors)
    folder = tmp_path / "run" / "adapters"
    model = peft.PeftModel.from_pretrained(build_lora().unload(), folder / "0", adapter_name="0")
    model.load_adapter(folder / "1", adapter_name="1")
    each = []
    for name in ("0", "1"):
        model.set_adapter(name)
        each.append(ask(model, data).logits)
    mean = torch.stack(each).mean(0)
    assert torch.allclose(ask(release.model, data).logits, mean, atol=1e-6)
    assert size < 4 * base
    found = verify(tmp_path / "run")
    assert found.holds, found.problems


def test_tied_and_frozen_tensors_and_statistics(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(6, 6).requires_grad_(False)
            self.one, self.norm, self.two = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
            self.two.weight = self.one.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.norm(self.one(self.base(x))))

    def train(model: nn.Module, examples: Any, seed: int) -> None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
        cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()

    data = make_data()
    ensemble = make(build=Tied, train=train)
    ensemble.learn(data)
    release = ensemble.release()
    own = ("one.weight", "one.bias", "two.bias", "norm.weight", "norm.bias")
    statistics = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert {name.split(".", 2)[2] for name in release.tensors} == {*own, *statistics}
    one = release.model.load(0)
    assert one.two.weight is one.one.weight
    assert not torch.equal(release.tensors["constituents.0.norm.running_mean"],
                           release.tensors["constituents.1.norm.running_mean"])  # fmt: skip
    half = release.apply(lambda model: model.half(), note="float16")
    half.save(tmp_path / "half")
    assert verify(tmp_path / "half").certificate.applied[0].note == "float16"
    again = ensemble.release()
    with torch.no_grad():
        again.model.constituents.get_parameter("0.one.bias").add_(1)
    with pytest.raises(UnlearningError, match="changed after they were certified"):
        again.save(tmp_path / "changed")


@pytest.mark.slow
@settings(max_examples=4, suppress_health_check=list(HealthCheck))
@given(life=st.lists(st.sets(st.integers(0, 11), min_size=1, max_size=3), min_size=1, max_size=3))
def test_any_life_with_transformers_trainer(tmp_path: Path, life: list[set[int]]) -> None:
    """Every second set is learned again, the others are forgotten."""
    import transformers

    def train(model: Any, examples: Any, seed: int) -> None:
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "trainer"), num_train_epochs=2, learning_rate=1e-2,
            per_device_train_batch_size=4, lr_scheduler_type="cosine", warmup_steps=1,
            max_grad_norm=0.5, gradient_accumulation_steps=2, seed=seed % 2**32, report_to=[],
            save_strategy="no", use_cpu=True, disable_tqdm=True, logging_strategy="no",
        )  # fmt: skip
        transformers.Trainer(model, arguments, train_dataset=examples).train()

    def begin(data: Data) -> Shards:
        ensemble = Shards(make_bert, train, seed="public", shards=2, slices=2)
        ensemble.learn(data)
        return ensemble

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        data = make_texts()
        inside, ensemble = set(data.people), begin(data)
        for number, chosen in enumerate(life):
            people = {f"u{i}" for i in chosen}
            if number % 2:
                inside |= people
                ensemble.learn(data.only(sorted(inside)), readmit=True)
            elif people & inside:
                ensemble.forget(sorted(people & inside), data)
                inside -= people
        fresh = begin(data.only(sorted(inside)))
        assert hash_release(ensemble.release()) == hash_release(fresh.release())
