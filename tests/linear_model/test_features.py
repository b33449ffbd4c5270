"""Features of public networks: which layers, and no trace of batch-mates."""

from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import nn

from expunge.errors import InputError, UnlearningError
from expunge.linear_model import LogisticRegression, RidgeClassifier, load
from expunge.linear_model.features import Features, choose_layers


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()) for _ in range(6)
        )
        self.head = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Convolutions().eval()


def make_images(rows: int = 50):
    torch.manual_seed(1)
    x = torch.randn(rows, 1, 8, 8)
    return x, np.arange(rows) % 2, [f"user-{i}" for i in range(rows)]


def test_layers_are_those_of_the_public_network() -> None:
    network = build()
    features = Features(network)
    assert features.layers == ("blocks.0", "blocks.1", "blocks.2", "blocks.4", "")
    x, _, _ = make_images(5)
    found = features.compute(x)
    assert found.shape == (5, 4 * 4 + 5)
    assert features.numbers.widths == (4, 4, 4, 4, 5)
    inner = {}
    handle = network.blocks[2].register_forward_hook(lambda m, i, o: inner.update(out=o))
    with torch.no_grad():
        network(x)
    handle.remove()
    pooled = inner["out"].mean((2, 3)).double().numpy()
    alone = Features(network, layers=["blocks.2"])
    assert np.array_equal(alone.compute(x), found[:, 8:12])
    assert np.array_equal(alone.numbers.quantise(pooled, "x"), found[:, 8:12])
    assert Features(network, layers="last").layers == ("",)
    with pytest.raises(InputError, match="nowhere"):
        choose_layers(network, ["nowhere"])


def test_batches_do_not_show() -> None:
    x, _, _ = make_images()
    features = Features(build(), batch_size=8)
    whole = features.compute(x)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert np.array_equal(features.compute(x[order]), whole[order.numpy()])
    assert np.array_equal(features.compute(x[:3]), whole[:3])
    alone = features.compute(x, single=True)
    assert features.evaluation == "by construction"
    assert np.abs(alone.astype(int) - whole).max() <= 1


class Trimming(nn.Module):
    """As collators do: cut a batch to its longest row, here with an effect on every row."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 6)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        longest = int((tokens != 0).sum(1).max().clamp(min=1))
        return self.embed(tokens[:, :longest]).mean(1)


def test_trimming_to_the_longest_row_is_caught() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(1, 2, (40, 12))
    tokens[:20, 5:] = 0
    features = Features(Trimming().eval())
    whole = features.compute(tokens)
    assert features.evaluation == "by construction"
    assert np.array_equal(features.compute(tokens[:20]), whole[:20])


class Counting(nn.Module):
    def __init__(self, buffer: bool) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 2), 0
        self.register_buffer("seen", torch.zeros(()))
        self.buffer = buffer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.buffer:
            self.seen += 1
        return self.linear(x) + torch.arange(2) * self.calls


@pytest.mark.parametrize("buffer", [True, False])
def test_a_network_that_keeps_something_is_refused(buffer: bool) -> None:
    with pytest.raises(UnlearningError, match="rows before it"):
        Features(Counting(buffer).eval()).compute(torch.randn(9, 3))


def test_a_network_in_train_mode_or_changed_is_refused() -> None:
    network = build()
    features = Features(network)
    x, _, _ = make_images(3)
    network.train()
    with pytest.raises(InputError, match="train mode"):
        features.compute(x)
    network.eval()
    with torch.no_grad():
        network.head.weight += 1
    with pytest.raises(InputError, match="other weights"):
        features.compute(x)
    with pytest.raises(InputError, match="cannot be run"):
        Features(build()).compute(torch.randn(3, 7))
    with pytest.raises(InputError, match="dense"):
        Features(build()).compute([["a"]])


def test_a_life_with_a_network(tmp_path: Path) -> None:
    x, y, ids = make_images(80)
    model = LogisticRegression(features=Features(build()), state=tmp_path / "state", tol=1e-6)
    model.partial_fit(x[:40], y[:40], ids=ids[:40]).partial_fit(x[40:], y[40:], ids=ids[40:])
    release = model.forget(ids[:7])
    release.save(tmp_path / "run")
    never = LogisticRegression(features=Features(build()), tol=1e-6).fit(x[7:], y[7:], ids=ids[7:])
    assert np.array_equal(model.coef_, never.coef_)
    told = release.certificate.statistics
    assert told is not None
    assert told.features["layers"][-1] == ""
    assert told.features["evaluation"] in ("tested", "by construction")
    blind = load(tmp_path / "state")
    blind.forget(ids[7:9])
    with pytest.raises(InputError, match="network"):
        blind.predict(x)
    with pytest.raises(InputError, match="not the one"):
        load(tmp_path / "run", network=build(3))
    loaded = load(tmp_path / "run", network=build())
    assert np.array_equal(loaded.predict_proba(x), never.predict_proba(x))
    assert clone(model).features is model.features


def test_rows_from_another_machine_are_not_doubled() -> None:
    x, y, ids = make_images(40)
    features = Features(build())
    model = RidgeClassifier(features=features).fit(x, y, ids=ids)
    before, compute = model.digest(), features.compute

    def shift(*given, **options):
        q = compute(*given, **options)
        q[:, 3] += np.where(q[:, 3] < 100, 1, -1).astype(np.int8)
        return q

    features.compute = shift  # another machine's rounding
    with pytest.warns(UserWarning, match="40 rows are there already"):
        model.partial_fit(x, y, ids=ids)
    assert model.digest() == before


@pytest.mark.parametrize("kind", ["bert", "llama", "vit", "resnet"])
def test_models_of_transformers(kind: str) -> None:
    import transformers as t

    torch.manual_seed(0)
    small = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2,
             "intermediate_size": 16}  # fmt: skip
    ids = torch.randint(3, 40, (20, 9))
    text = {"input_ids": ids, "attention_mask": (torch.arange(9) < 5).long().repeat(20, 1)}
    image = torch.randn(4, 3, 32, 32)
    match kind:
        case "bert":
            config = t.BertConfig(vocab_size=40, **small)
            network, given = t.BertForSequenceClassification(config), text
        case "llama":
            config = t.LlamaConfig(vocab_size=40, **small)
            network, given = t.LlamaForCausalLM(config), text
        case "vit":
            config = t.ViTConfig(image_size=32, patch_size=8, **small)
            network, given = t.ViTModel(config), image
        case _:
            config = t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8, 8, 8], depths=[1] * 4)
            network, given = t.ResNetModel(config), {"pixel_values": image}
    features = Features(network.eval())
    found = features.compute(given)
    assert len(features.layers) >= 4
    assert found.shape[1] == sum(features.numbers.widths)
    if kind in ("bert", "llama"):
        cut = {name: value[:, :5] for name, value in text.items()}
        short = Features(network.eval()).compute(cut)
        assert np.abs(short.astype(int) - found).max() <= 1  # padding is not averaged
        ragged = {"input_ids": [row[: 3 + k % 4].tolist() for k, row in enumerate(ids)]}
        with pytest.raises(InputError, match="padding='max_length'"):
            Features(network.eval()).compute(ragged)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_dataset_of_ray() -> None:
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        rng = np.random.default_rng(0)
        X, ids = rng.normal(size=(3000, 2)), [f"u{i}" for i in range(3000)]
        y = np.where(X[:, 0] > 0, "a", "b")
        columns = {"one": X[:, 0], "two": X[:, 1], "label": y, "user": np.array(ids)}
        items = [{n: c[i].item() for n, c in columns.items()} for i in range(3000)]
        dataset = ray.data.from_items(items).repartition(3)
        model = RidgeClassifier().fit(dataset, y="label", ids="user")
    finally:
        ray.shutdown()
    other = RidgeClassifier().fit(X, y, ids=ids)
    assert model.digest() == other.digest()
    assert model.feature_names_in_.tolist() == ["one", "two"]
    model.forget(["u7"])
    other.forget(["u7"])
    assert np.array_equal(model.coef_, other.coef_)
