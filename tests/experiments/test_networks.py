"""The networks' sizes and starts, and ResNet-18 against another implementation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import networks
from expunge.errors import InputError
from resnets import make_resnet_state

pytestmark = pytest.mark.usefixtures("one_thread")


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


@pytest.mark.slow
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
