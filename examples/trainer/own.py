"""A text classifier, trained and evaluated by the Hugging Face Trainer: python own.py trains it on
everybody. The model is a tiny BERT built from a config, so that everything runs offline; with a
published one, ``build`` is ``AutoModelForSequenceClassification.from_pretrained(...)``.
"""

from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EarlyStoppingCallback,
    Trainer,
    TrainingArguments,
)

import expunge

FOLDER = Path(__file__).parent
WORDS, LENGTH, PEOPLE = 24, 8, 40


def build() -> torch.nn.Module:
    """A fresh model."""
    config = BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=2,
    )  # fmt: skip
    return BertForSequenceClassification(config)


def write_texts(count: int, seed: int) -> list[dict]:
    """Texts with more high words than low ones, or the other way round."""
    draw = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (count, LENGTH), generator=draw)
    labels = ((words >= WORDS // 2).sum(1) > LENGTH // 2).long()
    return [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def load() -> expunge.Data:
    """Ten texts of each person, and texts for early stopping and testing by others."""
    ids = [f"person-{i % PEOPLE:02d}" for i in range(10 * PEOPLE)]
    validation, test = expunge.Data(write_texts(100, 2)), expunge.Data(write_texts(200, 3))
    return expunge.Data(write_texts(len(ids), 1), ids=ids, validation=validation, test=test)


def train(model: torch.nn.Module, examples: list[dict], seed: int, validation=None) -> None:
    """The Trainer as ever: schedule, warm-up, clipping, accumulation, early stopping."""
    options = TrainingArguments(
        output_dir=str(FOLDER / "trained"), num_train_epochs=20, learning_rate=1e-2, seed=seed,
        per_device_train_batch_size=20, gradient_accumulation_steps=2, lr_scheduler_type="cosine",
        warmup_steps=10, max_grad_norm=1.0, eval_strategy="epoch", save_strategy="epoch",
        load_best_model_at_end=True, metric_for_best_model="eval_loss", save_total_limit=1,
        report_to=[], disable_tqdm=True, logging_strategy="no", use_cpu=True,
    )  # fmt: skip
    stop = EarlyStoppingCallback(early_stopping_patience=3)
    Trainer(
        model, options, train_dataset=examples, eval_dataset=validation, callbacks=[stop]
    ).train()


if __name__ == "__main__":
    torch.manual_seed(1)
    model, data = build(), load()
    train(model, data.examples, seed=1, validation=data.validation.examples)
    model.save_pretrained(FOLDER / "trained" / "final")
    print(f"trained on all: {expunge.evaluate(model, data.test).accuracy:.1%} right")
