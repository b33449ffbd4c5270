"""Own training, as people write it: all of these simply work."""

from __future__ import annotations

import lightning
import pytest
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import expunge
from tests.everyday.conftest import FORGET, check_same
from tests.helpers.small_networks import make_bert


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))


def loop(model, examples, seed):
    x, y = examples
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True)
    for _ in range(3):
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    return {"loss": 0.1}  # whatever a function returns beside a module is ignored


def test_it_is_what_a_life_without_them_gives(data):
    with_them = expunge.retrain(build, data, forget=FORGET, train=loop)
    never = data.without(FORGET)
    other = expunge.retrain(build, never, forget=["user-4"], train=loop)
    both = expunge.retrain(build, data, forget=["user-3", "user-4"], train=loop)
    assert other.certificate.weights.after == both.certificate.weights.after
    assert with_them.certificate.weights.after != both.certificate.weights.after


def test_the_built_in_training(data):
    train = expunge.Training(epochs=3, learning_rate=0.1, optimizer="adamw", schedule="cosine")
    release = expunge.retrain(build, data, forget=FORGET, train=train)
    assert release.certificate.training.options["schedule"] == "cosine"


def test_early_stopping_on_validation(rows):
    data = expunge.Data(rows, ids=range(40), validation=expunge.Data(rows, ids=range(40, 80)))
    train = expunge.Training(epochs=50, learning_rate=0.5, batch_size=8, patience=1)
    release = expunge.retrain(build, data, forget=[7, 47], train=train)
    assert release.certificate.training.validation == 39


def test_a_weighted_sampler_and_workers(data):
    def train(model, examples, seed):
        x, y = examples
        sampler = WeightedRandomSampler(torch.ones(len(y)), len(y))
        loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler, num_workers=1)
        optimizer = torch.optim.Adam(model.parameters())
        for inputs, targets in loader:
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    first, second = (expunge.retrain(build, data, forget=FORGET, train=train) for _ in range(2))
    assert first.certificate.weights.after == second.certificate.weights.after


def test_autocast_and_compile(data):
    def train(model, examples, seed):
        compiled = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = cross_entropy(compiled(examples[0]), examples[1])
        loss.backward()
        optimizer.step()
        return compiled

    release = expunge.retrain(build, data, forget=FORGET, train=train)
    assert "0.weight" in release.tensors


def test_mixup_and_schedules_of_torch(data):
    def train(model, examples, seed):
        x, y = examples
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        for _ in range(5):
            order, share = torch.randperm(len(x)), torch.rand(())
            output = model(share * x + (1 - share) * x[order])
            loss = share * cross_entropy(output, y) + (1 - share) * cross_entropy(output, y[order])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()

    assert expunge.retrain(build, data, forget=FORGET, train=train).certificate.releasable


def test_a_training_in_a_class(data):
    class Fitter:
        def __init__(self, epochs):
            self.epochs = epochs

        def __call__(self, model, examples, seed):
            for _ in range(self.epochs):
                loop(model, examples, seed)

        def fit(self, model, examples):
            self(model, examples, 0)

    fitter = Fitter(2)
    one = expunge.retrain(build, data, forget=FORGET, train=fitter)
    two = expunge.retrain(build, data, forget=FORGET, train=fitter.fit)
    assert one.certificate.weights.after == two.certificate.weights.after


def test_two_requests_one_after_the_other(data, tmp_path):
    first = expunge.retrain(build, data, forget=["user-1"], train=loop)
    first.save(tmp_path / "first")
    left = data.without(["user-1"])
    second = expunge.retrain(build, left, forget=["user-2"], train=loop, parent=tmp_path / "first")
    second.save(tmp_path / "second")
    assert expunge.verify(tmp_path / "second", parent=tmp_path / "first").holds
    same = expunge.retrain(build, data, forget=["user-1", "user-2"], train=loop, parent=first)
    assert same.certificate.weights.after == second.certificate.weights.after


def test_the_callers_random_numbers_are_their_own(data):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    expunge.retrain(build, data, forget=FORGET, train=loop)
    assert torch.equal(torch.rand(3), expected)


def test_a_killed_training_goes_on(data, tmp_path):
    folder = tmp_path / "checkpoints"

    class KilledError(Exception):
        pass

    train = expunge.Training(epochs=4)
    with pytest.MonkeyPatch.context() as patch:
        steps = []
        original = torch.optim.SGD.step

        def stop(self, *args):
            steps.append(1)
            if len(steps) == 3:
                raise KilledError
            return original(self, *args)

        patch.setattr(torch.optim.SGD, "step", stop)
        with pytest.raises(KilledError):
            expunge.retrain(build, data, forget=FORGET, train=train, resume=folder)
    resumed = expunge.retrain(build, data, forget=FORGET, train=train, resume=folder)
    straight = expunge.retrain(build, data, forget=FORGET, train=train)
    assert resumed.certificate.weights.after == straight.certificate.weights.after
    assert (resumed.certificate.resumed, straight.certificate.resumed) == (1, 0)
    assert "went on from a checkpoint" in " ".join(resumed.certificate.scope.operator)
    with pytest.raises(expunge.InputError, match="a run with other people to forget and data"):
        expunge.retrain(build, data, forget=["user-5"], train=train, resume=folder)


def sentences(count=24):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(5, 32, (count, 8), generator=generator)
    return [
        {"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row[0] % 2}
        for row in tokens
    ]


def test_berts_own_trainer(tmp_path):
    data = expunge.Data(
        sentences(),
        ids=[f"user-{i % 6}" for i in range(24)],
        validation=expunge.Data(sentences(8), ids=[f"user-{i}" for i in range(8)]),
    )

    def train(model, examples, seed, validation):
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "trainer"), num_train_epochs=2, per_device_train_batch_size=4,
            gradient_accumulation_steps=2, learning_rate=1e-3, lr_scheduler_type="cosine",
            warmup_steps=1, max_grad_norm=0.5, bf16=True, eval_strategy="epoch",
            save_strategy="epoch", load_best_model_at_end=True, seed=seed, report_to=[],
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        transformers.Trainer(
            model, arguments, train_dataset=examples, eval_dataset=validation,
            callbacks=[transformers.EarlyStoppingCallback(1)],
        ).train()  # fmt: skip

    release = expunge.retrain(make_bert, data, forget=["user-2"], train=train, seed=3)
    release.save(tmp_path / "run")
    assert expunge.verify(tmp_path / "run").holds
    loaded = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "run").eval()
    ours = expunge.load_model(tmp_path / "run", make_bert).eval()
    check_same(loaded, ours)
    batch = {name: row[None] for name, row in sentences(1)[0].items()}
    torch.testing.assert_close(loaded(**batch).logits, ours(**batch).logits)


@pytest.mark.filterwarnings("ignore::FutureWarning:lightning", "ignore::UserWarning:lightning")
def test_lightning(data, tmp_path):
    class Net(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = build()

        def training_step(self, batch, place):
            return cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), 1e-2)

    def train(model, examples, seed):
        lightning.seed_everything(seed, verbose=False)
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        loader = DataLoader(TensorDataset(*examples), batch_size=8, shuffle=True, num_workers=0)
        trainer.fit(model, loader)

    first, second = (expunge.retrain(Net, data, forget=FORGET, train=train) for _ in range(2))
    assert first.certificate.weights.after == second.certificate.weights.after
    assert "net.0.weight" in first.tensors
