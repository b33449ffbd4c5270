"""One LoRA adapter per shard on a common public base: exact forgetting for a language model.

    python own.py

trains a public base (a tiny GPT-2 from a config, so that everything runs offline), learns texts of
people in four shards of two slices, forgets two people by training again what they touched, and
writes, verifies and chains both releases. The base is named by its hash and is in no release.
"""

import tempfile
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel

import expunge

WORDS, LENGTH, PEOPLE = 16, 8, 120


def make_base() -> GPT2LMHeadModel:
    """The network of the public base, without its weights."""
    config = GPT2Config(
        n_layer=1, n_head=2, n_embd=32, vocab_size=WORDS, n_positions=LENGTH,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def count_up(steps: list[int], count: int) -> Tensor:
    """Texts that count in steps."""
    first = torch.randint(0, WORDS, (count, 1))
    chosen = torch.tensor(steps)[torch.randint(0, len(steps), (count, 1))]
    return (first + chosen * torch.arange(LENGTH)) % WORDS


def next_word(output: object, texts: Tensor) -> Tensor:
    """The loss of every next word."""
    logits = getattr(output, "logits", output)
    return cross_entropy(logits[:, :-1].flatten(0, 1), texts[:, 1:].flatten())


def train_base() -> dict[str, Tensor]:
    """The public base: it knows how to count in ones and twos."""
    torch.manual_seed(0)
    base, texts = make_base(), count_up([1, 2], 256)
    expunge.train(base, expunge.Batches(texts, texts, batch_size=64), epochs=20, learning_rate=0.01,
                  loss_fn=next_word, optimizer=lambda p: torch.optim.AdamW(p, 0.01))  # fmt: skip
    return {name: tensor.clone() for name, tensor in base.state_dict().items()}


def main(folder: Path) -> None:
    public = train_base()

    def build() -> nn.Module:
        """The base with its public weights, frozen, and a fresh adapter: the seed draws that."""
        base = make_base()
        base.load_state_dict(public)
        adapter = LoraConfig(r=4, lora_alpha=8, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(base, adapter)

    names = [n for n, p in build().named_parameters() if not p.requires_grad]
    strip = {n: n.removeprefix("base_model.model.").replace(".base_layer", "") for n in names}
    ensemble = expunge.Shards(
        build, shards=4, slices=2, seed="adapters of 2026", epochs=20, learning_rate=0.05,
        batch_size=16, loss_fn=next_word, optimizer=lambda p: torch.optim.AdamW(p, 0.05),
        public={name: public[strip[name]] for name in names}, state=folder / "state",
    )  # fmt: skip
    torch.manual_seed(1)
    texts, test = count_up([3, 5], PEOPLE), count_up([3, 5], 60)
    ensemble.learn((texts, texts), ids=[f"person-{i}" for i in range(PEOPLE)])

    parent = None
    for name, people in (("release-1", []), ("release-2", ["person-3", "person-70"])):
        run = ensemble.forget(people) if people else ensemble.release()
        parent = expunge.certify(run.record, delta=1e-5, parent=parent)
        expunge.write_run(folder / name, model=run.model, record=run.record, certificate=parent)
        found = expunge.verify(folder / name / "certificate.json")
        loss = float(next_word(run.model(test), test))
        again = [k for k, first in enumerate(found.shards.trained_from) if first]
        print(f"{name}: epsilon = {found.epsilon:g}, loss {loss:.2f}, trained again: "
              f"{again or 'all'}; {len(ensemble)} texts remain")  # fmt: skip
    ensemble.check(parent)
    print(
        "trained again from nothing, the constituents that the request touched have the same bits"
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        main(Path(place))
