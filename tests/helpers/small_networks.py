"""Small real networks."""

import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from expunge.certificates.hashes import hash_tensors
from expunge.networks.tensors import list_tensors


def make_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def make_gpt2() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**sizes))


def make_llama() -> LlamaForCausalLM:
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                    num_attention_heads=2, max_position_embeddings=16)
    )  # fmt: skip


def make_bert() -> BertForSequenceClassification:
    return BertForSequenceClassification(
        BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                   intermediate_size=16, max_position_embeddings=16)
    )  # fmt: skip


def make_lora(**options) -> nn.Module:
    torch.manual_seed(0)
    settings = {"task_type": TaskType.SEQ_CLS, "r": 2, "target_modules": ["query"]} | options
    return get_peft_model(make_bert(), LoraConfig(**settings))


def shift(module: nn.Module, by: float = 1.0) -> nn.Module:
    """As if it had been trained."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.add_(by)
    return module


def compiled(module: nn.Module) -> nn.Module:
    """By the backend that needs no compiler: torch's own import of the other one warns."""
    return torch.compile(module, backend="eager")


def hash_module(module: nn.Module) -> str:
    """As a release's file has it."""
    return hash_tensors(list_tensors(module))
