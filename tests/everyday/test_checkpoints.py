"""The old model as people have it: whatever wrote the checkpoint, `old=` takes it."""

from __future__ import annotations

import copy

import lightning
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import expunge
from tests.everyday.conftest import FORGET, RECIPE, check_same
from tests.helpers.small_networks import make_bert


def build():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))


def fit(model, rows, epochs=2):
    x, y = rows
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(epochs):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


def unlearn(old, data, **options):
    given = {"recipe": RECIPE, "loss": cross_entropy, "batch_size": 16} | options
    return expunge.unlearn(old, build, data, forget=FORGET, **given)


@pytest.fixture
def trained(rows):
    model = build()
    fit(model, rows)
    return model


def find_start(old, data, **options):
    """The hash of the old model as the private record has it: the same for the same weights."""
    return unlearn(old, data, **options).record.weights.old


def test_one_model_however_it_was_saved(trained, rows, data, tmp_path):
    expected = find_start(trained, data)
    optimizer = fit(copy.deepcopy(trained), rows)
    state = trained.state_dict()
    torch.save(state, tmp_path / "plain.pt")
    torch.save({f"module.{n}": t for n, t in state.items()}, tmp_path / "ddp.pth")
    torch.save({f"_orig_mod.{n}": t for n, t in state.items()}, tmp_path / "compiled.bin")
    loop = {"epoch": 7, "model": state, "optimizer": optimizer.state_dict(), "best": 0.5}
    torch.save(loop, tmp_path / "loop.pt")
    lightning = {"state_dict": {f"net.{n}": t for n, t in state.items()}, "epoch": 1,
                 "pytorch-lightning_version": "2.5", "callbacks": {}}  # fmt: skip
    torch.save(lightning, tmp_path / "epoch=1.ckpt")
    for name in ("plain.pt", "ddp.pth", "compiled.bin", "loop.pt", "epoch=1.ckpt"):
        assert find_start(tmp_path / name, data) == expected, name
    for old in (state, loop, torch.load(tmp_path / "plain.pt"), str(tmp_path / "plain.pt")):
        assert find_start(old, data) == expected


def test_an_average_beside_the_model_is_chosen_by_a_key(rows, data, tmp_path):
    model = build()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    for _ in range(3):
        fit(model, rows, 1)
        average.update_parameters(model)
    saved = {"model": model.state_dict(), "ema": average.state_dict(), "step": 3}
    torch.save(saved, tmp_path / "both.pt")
    with pytest.raises(expunge.InputError, match="choose one by key="):
        unlearn(tmp_path / "both.pt", data)
    assert find_start(tmp_path / "both.pt", data, key="model") == find_start(model, data)
    assert find_start(tmp_path / "both.pt", data, key="ema") == find_start(average, data)


def test_a_folder_that_moved(trained, data, tmp_path):
    release = unlearn(trained, data)
    release.save(tmp_path / "run")
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert expunge.verify(moved).holds
    model = expunge.load_model(moved, build)
    assert torch.equal(model(torch.ones(1, 6)), release.model(torch.ones(1, 6)))
    later = expunge.unlearn(None, build, data.without(FORGET), forget=["user-4"], parent=moved,
                            recipe=RECIPE, loss=cross_entropy, batch_size=16)  # fmt: skip
    later.save(tmp_path / "later")
    assert expunge.verify(tmp_path / "later", parent=moved).holds


def test_retraining_compares_with_the_old_one_and_uses_nothing_of_it(trained, data, tmp_path):
    torch.save(trained.state_dict(), tmp_path / "old.pt")
    train = expunge.Training(epochs=1, learning_rate=0.1)
    release = expunge.retrain(build, data, forget=FORGET, train=train, old=tmp_path / "old.pt")
    again = expunge.retrain(build, data, forget=FORGET, train=train)
    assert release.certificate.weights.after == again.certificate.weights.after


class Lit(lightning.LightningModule):
    def __init__(self, lr=0.01, widths=(6, 8)):
        super().__init__()
        self.save_hyperparameters()
        self.net = build()
        self.loss = nn.CrossEntropyLoss(weight=torch.ones(2))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, place):
        return self.loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.hparams.lr)


@pytest.mark.filterwarnings("ignore::FutureWarning:lightning", "ignore::UserWarning:lightning")
def test_a_checkpoint_of_lightning(rows, data, tmp_path):
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    module = Lit()
    trainer.fit(module, DataLoader(TensorDataset(*rows), batch_size=8))
    (saved,) = tmp_path.rglob("*.ckpt")
    inner = unlearn(saved, data)  # build() gives the network alone
    whole = expunge.unlearn(saved, Lit, data, forget=FORGET, recipe=RECIPE, loss=cross_entropy)
    assert inner.record.weights.old == find_start(module.net, data)
    assert list(whole.tensors) == list(module.state_dict())


# Hugging Face.
def build_lora():
    torch.manual_seed(0)  # the base is a published file, in life
    config = LoraConfig(task_type=TaskType.SEQ_CLS, r=2, target_modules=["query", "value"])
    return get_peft_model(make_bert(), config)  # the classifier is trained too: modules_to_save


@pytest.fixture
def texts():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 32, (24, 8), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones(8, dtype=torch.long), "labels": k % 2}
        for k, row in enumerate(ids)
    ]


@pytest.fixture
def text_data(texts):
    return expunge.Data(texts, ids=[f"user-{k % 6}" for k in range(len(texts))])


def train_with_trainer(model, examples, folder, steps=2):
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, per_device_train_batch_size=4, save_steps=steps, report_to=[],
        use_cpu=True, disable_tqdm=True, logging_strategy="no", dataloader_pin_memory=False,
        learning_rate=0.01, save_strategy="steps",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=examples)
    trainer.train()
    return f"{folder}/checkpoint-{steps}"


def test_a_checkpoint_of_the_trainer(texts, text_data, tmp_path):
    folder = train_with_trainer(make_bert(), texts, str(tmp_path / "out"))
    release = expunge.unlearn(folder, make_bert, text_data, forget=FORGET, recipe=RECIPE)
    run = release.save(tmp_path / "run")
    assert expunge.verify(run).holds
    model = transformers.AutoModelForSequenceClassification.from_pretrained(run)
    check_same(model, release.model)


def test_an_adapter_of_the_trainer_and_back_to_peft(texts, text_data, tmp_path):
    folder = train_with_trainer(build_lora(), texts, str(tmp_path / "out"), 3)
    release = expunge.unlearn(
        folder, build_lora, text_data, forget=FORGET, recipe=RECIPE,
        train=expunge.Training(epochs=1, learning_rate=0.01, loss=None, optimizer="adamw"),
    )  # fmt: skip
    run = release.save(tmp_path / "run")
    assert expunge.verify(run).holds
    base = build_lora().unload()
    model = PeftModel.from_pretrained(base, run / "adapter").eval()
    ids = torch.arange(8)[None]
    expected = release.model.eval()(ids).logits
    torch.testing.assert_close(model(ids).logits, expected)
    assert torch.equal(expunge.load_model(run, build_lora).eval()(ids).logits, expected)


def test_a_frozen_base_is_compared_with_the_published_one(text_data, tmp_path):
    build_lora().unload().save_pretrained(tmp_path / "published")
    train = expunge.Training(epochs=1, learning_rate=0.01, loss=None)
    release = expunge.retrain(build_lora, text_data, forget=FORGET, train=train,
                              published=tmp_path / "published")  # fmt: skip
    assert release.certificate.weights.published.compared == "published"
    with torch.no_grad():
        other = build_lora().unload()
        other.bert.pooler.dense.bias.add_(1.0)
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(expunge.ExpungeError, match=r"pooler\.dense\.bias"):
        expunge.retrain(build_lora, text_data, forget=FORGET, train=train,
                        published=tmp_path / "other")  # fmt: skip
