"""A text classifier with a LoRA adapter, trained and evaluated by the Hugging Face Trainer.

Running this file trains it. The public base is a tiny BERT built from a config, so that everything
runs offline; with a base of your own, ``load_base`` is
``AutoModelForSequenceClassification.from_pretrained(...)``.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, TaskType, get_peft_model
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

FOLDER = Path(__file__).parent
WORDS, LENGTH, PEOPLE = 24, 8, 40


def load_base() -> torch.nn.Module:
    """The public base model; its classifier is new and drawn from a fixed seed."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def build() -> torch.nn.Module:
    """The base, frozen, with an adapter and a classifier, as PEFT makes them for SEQ_CLS."""
    base = load_base()
    lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["query", "value"])
    return get_peft_model(base, lora)


def write_texts(count: int, seed: int) -> list[dict]:
    """Texts with more high words than low ones, or the other way round."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=draw)
    labels = ((words >= WORDS // 2).sum(1) > LENGTH // 2).long()
    return [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def load() -> dict:
    """Ten texts of each person."""
    ids = [f"person-{i % PEOPLE:02d}" for i in range(10 * PEOPLE)]
    return {"train": write_texts(len(ids), 1), "ids": ids, "test": write_texts(200, 2)}


def score(found) -> dict:
    return {"accuracy": float((found.predictions.argmax(1) == found.label_ids).mean())}


def make_trainer(
    model: torch.nn.Module, output: str = "trained", without: Sequence[str] = ()
) -> Trainer:
    """A Trainer on everybody's texts but those of some people."""
    data = load()
    kept = [
        text for text, name in zip(data["train"], data["ids"], strict=True) if name not in without
    ]
    options = TrainingArguments(
        output_dir=str(FOLDER / output), num_train_epochs=20, learning_rate=2e-2, seed=0,
        per_device_train_batch_size=40, per_device_eval_batch_size=200, save_strategy="epoch",
        save_total_limit=1, report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
    )  # fmt: skip
    return Trainer(
        model, options, train_dataset=kept, eval_dataset=data["test"],
        compute_metrics=score,
    )  # fmt: skip


if __name__ == "__main__":
    model = build()
    model.save_pretrained(FOLDER / "start")
    trainer = make_trainer(model)
    trainer.train()
    print(f"trained on all: accuracy {100 * trainer.evaluate()['eval_accuracy']:.1f} %")
