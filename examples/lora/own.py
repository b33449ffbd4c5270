"""A Hugging Face model with a LoRA adapter. Running this file makes the weights job.toml names.

Here the public base is a tiny GPT-2 built from a config, so that everything runs offline. With a
base of your own, ``load_base`` is ``AutoModelForCausalLM.from_pretrained(...)``.
"""

from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

FOLDER = Path(__file__).parent
WORDS, LENGTH = 32, 12


def load_base() -> GPT2LMHeadModel:
    """The public base model."""
    config = GPT2Config(
        n_layer=2, n_head=2, n_embd=32, vocab_size=WORDS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    if (FOLDER / "base.safetensors").exists():
        model.load_state_dict(load_file(FOLDER / "base.safetensors"), strict=False)
        model.tie_weights()
    return model


def build() -> torch.nn.Module:
    """The base, frozen, with an adapter that is the same every time: that is the public centre."""
    torch.manual_seed(0)
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
    return get_peft_model(load_base(), adapter)


def count_up(steps: torch.Tensor, count: int) -> list[dict]:
    """Texts that count in steps, as a Hugging Face model takes them."""
    first = torch.randint(0, WORDS, (count, 1))
    chosen = steps[torch.randint(0, len(steps), (count, 1))]
    texts = (first + chosen * torch.arange(LENGTH)) % WORDS
    return [{"input_ids": text, "labels": text} for text in texts]


def load() -> dict:
    """The private texts count in threes and fives; the base only knows ones and twos."""
    torch.manual_seed(1)
    private = torch.tensor([3, 5])
    train, test = count_up(private, 300), count_up(private, 100)
    return {"train": train, "ids": [f"text-{i:03d}" for i in range(300)], "test": test}


def fit(model: torch.nn.Module, texts: list[dict], epochs: int, rate: float) -> float:
    stacked = torch.stack([text["input_ids"] for text in texts])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(stacked)).split(50):
            optimizer.zero_grad()
            loss = model(input_ids=stacked[batch], labels=stacked[batch]).loss
            loss.backward()
            optimizer.step()
    return loss.item()


if __name__ == "__main__":
    torch.manual_seed(2)
    base = load_base()
    print(f"public base: loss {fit(base, count_up(torch.tensor([1, 2]), 400), 15, 1e-2):.2f}")
    public = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    save_file(public, FOLDER / "base.safetensors")
    model = build()
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    save_file(start, FOLDER / "start.safetensors")
    print(f"adapter on all texts: loss {fit(model, load()['train'], 15, 2e-2):.2f}")
    model.save_pretrained(FOLDER / "adapter")
