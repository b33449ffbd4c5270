"""Networks as people write them: each is retrained and unlearned, saved, verified and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy

import expunge
from tests.everyday.conftest import FORGET, RECIPE, check_same
from tests.helpers.small_networks import make_bert, make_gpt2, make_llama


def serve(build, data, folder, *, loss=cross_entropy, probe=None):
    """Retrain, unlearn from a model that saw everybody, and use both releases."""
    training = expunge.Training(epochs=1, learning_rate=0.05, batch_size=8, loss=loss)
    old = expunge.retrain(build, data, forget=["user-7"], train=training, seed=5).model
    releases = {
        "retrained": expunge.retrain(build, data, forget=FORGET, train=training, old=old),
        "noisy": expunge.unlearn(old, build, data, forget=FORGET, recipe=RECIPE, loss=loss),
        "tuned": expunge.unlearn(
            old, build, data, forget=FORGET, recipe=RECIPE, loss=loss, train=training, releases=2
        ),
    }
    for name, release in releases.items():
        run = release.save(folder / name)
        assert expunge.verify(run).holds, name
        model = expunge.load_model(run, build)
        if probe is not None:
            with torch.no_grad():
                expected, found = probe(release.model.eval()), probe(model.eval())
            assert torch.equal(expected, found), name
    assert expunge.replay(folder / "retrained", build, data, train=training).same
    return releases


def probe_rows(model):
    return model(torch.linspace(-1, 1, 12).reshape(2, 6))


class Own(nn.Module):
    """A body and a head, as in a thousand notebooks."""

    def __init__(self, body, size=8):
        super().__init__()
        self.body, self.head = body, nn.Linear(size, 2)

    def forward(self, x):
        return self.head(self.body(x))


class Identity(nn.Module):
    """A parameter that begins as the identity, and one that begins as a sinusoid."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.empty(6, 6))
        nn.init.eye_(self.mix)
        self.wave = nn.Parameter(torch.sin(torch.arange(6.0)))
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        return self.head(x @ self.mix + self.wave)


class Attributes(nn.Module):
    """Plain tensors, arrays of them, a cache and a counter, none of them registered."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.scale = torch.linspace(0.5, 1.5, 6)
        self.tables = [torch.randn(6), {"shift": torch.rand(6)}]

    def forward(self, x):
        return self.layer(x * self.scale + self.tables[0] + self.tables[1]["shift"])


class Positions(nn.Module):
    """A sinusoid table as a buffer that is not saved, and extra state."""

    def __init__(self):
        super().__init__()
        angles = torch.arange(6)[:, None] / 10 ** (torch.arange(4) / 4)
        self.register_buffer("position_ids", torch.arange(6).expand(2, -1))
        self.register_buffer("table", torch.cat([angles.sin(), angles.cos()], 1), persistent=False)
        self.up, self.head = nn.Linear(1, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.head(torch.tanh(self.up(x[..., None]) + self.table).mean(1))

    def get_extra_state(self):
        return {"version": 2}

    def set_extra_state(self, state):
        assert state == {"version": 2}


class Causal(nn.Module):
    """A mask with minus infinity, kept as a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))
        self.up, self.head = nn.Linear(1, 8), nn.Linear(8, 2)

    def forward(self, x):
        h = self.up(x[..., None])
        return self.head(torch.softmax(h @ h.mT + self.mask, -1) @ h)[:, -1]


def make_frozen():
    """A backbone that stays in eval mode, under a head that learns."""
    backbone = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU())
    backbone.requires_grad_(False).eval()
    return Own(backbone)


def make_seeded():
    torch.manual_seed(3)
    return nn.Linear(6, 2)


def make_tied():
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 2))
    model[2].weight = model[0].weight
    return model


MODELS = {
    "seeded": make_seeded,
    "batch-norm": lambda: Own(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())),
    "dropout": lambda: Own(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3))),
    "eval-mode": lambda: Own(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3))).eval(),
    "frozen": make_frozen, "tied": make_tied, "identity": Identity, "attributes": Attributes,
    "positions": Positions, "causal-mask": Causal,
    "spectral-norm": lambda: Own(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 8))),
    "old-spectral-norm": lambda: Own(nn.utils.spectral_norm(nn.Linear(6, 8))),
    "weight-norm": lambda: Own(nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))),
    "compiled": lambda: torch.compile(Own(nn.Linear(6, 8)), backend="eager"),
    "double": lambda: Own(nn.Linear(6, 8)).double().to(torch.float32),
    "prelu": lambda: Own(nn.Sequential(nn.Linear(6, 8), nn.PReLU(), nn.LayerNorm(8))),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_network(name, data, tmp_path):
    serve(MODELS[name], data, tmp_path, probe=probe_rows)


def test_modes_are_those_of_training(data, tmp_path):
    seen = []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = make_frozen().body
            self.drop = nn.Dropout(0.1)
            self.head = nn.Linear(8, 2)

        def forward(self, x):
            seen.append((self.training, self.drop.training, self.body[2].training))
            return self.head(self.drop(self.body(x)))

    train = expunge.Training(epochs=1, learning_rate=0.1)
    expunge.retrain(lambda: Watched().eval(), data, forget=FORGET, train=train)
    assert set(seen) == {(True, True, False)}
    seen.clear()
    old = Watched()
    expunge.unlearn(old, lambda: Watched().eval(), data, forget=FORGET, recipe=RECIPE,
                    loss=cross_entropy)  # fmt: skip
    assert (True, True, False) in seen


@pytest.mark.parametrize("sparse", [True, False])
def test_embeddings_of_words(sparse, tmp_path):
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.EmbeddingBag(20, 4, sparse=sparse)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.words(x))

    words = torch.randint(0, 20, (40, 5), generator=torch.Generator().manual_seed(0))
    data = expunge.Data((words, words[:, 0] % 2), ids=[f"user-{i % 8}" for i in range(40)])
    serve(Bag, data, tmp_path, probe=lambda model: model(torch.arange(10).reshape(2, 5)))


# Hugging Face.
def make_words(label):
    ids = torch.randint(0, 32, (24, 8), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": label(k, row)} for k, row in enumerate(ids)]
    return expunge.Data(rows, ids=[f"user-{k % 8}" for k in range(24)])


TEXTS, REVIEWS = make_words(lambda k, row: row), make_words(lambda k, row: k % 2)


def probe_words(model):
    return model(torch.arange(8)[None]).logits


@pytest.mark.parametrize("build", [make_gpt2, make_llama])
def test_a_language_model(build, tmp_path):
    releases = serve(build, TEXTS, tmp_path, loss=None, probe=probe_words)
    for name, release in releases.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        check_same(model, release.model)
        torch.testing.assert_close(probe_words(model), probe_words(release.model))
        tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        assert tied == (build is make_gpt2)


def test_a_classifier(tmp_path):
    releases = serve(make_bert, REVIEWS, tmp_path, loss=None, probe=probe_words)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "tuned"
    ).eval()
    check_same(model, releases["tuned"].model)


@pytest.mark.parametrize("saved", [["classifier", "pooler"], None])
def test_an_adapter_and_modules_that_are_saved_whole(saved, tmp_path):
    def build():
        torch.manual_seed(0)
        config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query"],
                            lora_dropout=0.1, modules_to_save=saved)  # fmt: skip
        return get_peft_model(make_bert(), config)

    training = expunge.Training(
        epochs=3, learning_rate=0.01, batch_size=8, loss=None, optimizer="adamw"
    )
    old = expunge.retrain(build, REVIEWS, forget=["user-7"], train=training, seed=5).model
    release = expunge.unlearn(old, build, REVIEWS, forget=FORGET, recipe=RECIPE, train=training)
    run = release.save(tmp_path / "run")
    assert expunge.verify(run).holds
    assert release.certificate.weights.adapter is not None
    assert (run / "adapter" / "adapter_model.safetensors").is_file()
    model = expunge.load_model(run, build).eval()
    assert torch.equal(probe_words(model), probe_words(release.model.eval()))


def test_post_processing_is_recorded(data, tmp_path):
    build = MODELS["frozen"]
    release = expunge.retrain(build, data, forget=FORGET, train=expunge.Training(epochs=1))

    def quantise(model):
        with torch.no_grad():
            for parameter in model.parameters():
                step = parameter.abs().max().clamp(min=1e-6) / 127
                parameter.copy_((parameter / step).round() * step)

    def spoil(model):
        model.head.weight.data.div_(0)

    small = release.apply(quantise, note="int8 grid").apply(lambda m: m.half(), note="float16")
    run = small.save(tmp_path / "run")
    assert [step.note for step in expunge.verify(run).certificate.applied] == [
        "int8 grid", "float16"]  # fmt: skip
    model = expunge.load_model(run, lambda: build().half())
    assert torch.equal(model.head.weight, small.model.head.weight)
    with pytest.raises(expunge.UnlearningError, match=r"head\.weight is not finite"):
        small.apply(spoil, note="a slip")


def test_two_runs_in_one_notebook(data):
    train = expunge.Training(epochs=1)
    one = copy.deepcopy(expunge.retrain(MODELS["dropout"], data, forget=FORGET, train=train))
    torch.rand(3)
    two = expunge.retrain(MODELS["dropout"], data, forget=FORGET, train=train)
    assert one.certificate.weights.after == two.certificate.weights.after
