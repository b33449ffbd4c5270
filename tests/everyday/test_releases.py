"""What people do with a release once they have it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

import expunge
from expunge import InputError, UnlearningError

ROWS = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
DATA = expunge.Data((ROWS, (ROWS[:, 0] > 0).long()), ids=[f"user-{i % 10}" for i in range(40)])


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 2))


def train(model: nn.Module, examples: tuple[Tensor, Tensor], seed: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()


@pytest.fixture
def release() -> expunge.Release:
    return expunge.retrain(build, DATA, forget=["user-3"], train=train)


def test_it_is_ready_to_use_and_using_it_changes_nothing(
    release: expunge.Release, tmp_path: Path
) -> None:
    first = release.model(ROWS)
    torch.testing.assert_close(release.model(ROWS), first)
    release.save(tmp_path / "run")
    loaded = expunge.load_model(tmp_path / "run", build)
    assert not loaded.training
    torch.testing.assert_close(loaded(ROWS), first)


def test_it_shows_itself_without_its_secrets(release: expunge.Release) -> None:
    assert len(repr(release)) < 200
    assert release.record.nonce not in repr(release)


def test_half_precision_stays_half_and_the_first_release_stays_whole(
    release: expunge.Release, tmp_path: Path
) -> None:
    half = release.apply(lambda model: model.half(), note="float16")
    assert release.model[0].weight.dtype == torch.float32
    half.save(tmp_path / "half")
    release.save(tmp_path / "whole")
    loaded = expunge.load_model(tmp_path / "half", build)
    assert loaded[0].weight.dtype == torch.float16
    assert torch.equal(loaded[0].weight, release.model[0].weight.half())


def test_weights_that_changed_are_not_laundered_by_apply(release: expunge.Release) -> None:
    train(release.model, DATA.examples, 0)
    with pytest.raises(UnlearningError, match="the weights changed after they were certified"):
        release.apply(lambda model: model.bfloat16(), note="bfloat16")


def test_a_state_that_is_not_all_tensors_is_refused(release: expunge.Release) -> None:
    class Packed(nn.Module):
        def state_dict(self, *given: Any, **named: Any) -> Any:
            return {"packed": (1, 2)}

    with pytest.raises(InputError, match="packed in the model's state is a tuple"):
        release.apply(lambda model: Packed(), note="int8")


def test_an_old_model_that_is_another_network_is_no_comparison() -> None:
    with pytest.raises(InputError, match=r"old fits build\(\)'s module nowhere"):
        expunge.retrain(
            build, DATA, forget=["user-3"], train=train, old=nn.Sequential(nn.Linear(5, 2))
        )


def test_regression_is_measured_by_a_loss_that_fits() -> None:
    model, targets = nn.Linear(4, 1), torch.randn(40, 1)
    with pytest.raises(InputError, match="the targets are real numbers"):
        expunge.evaluate(model, (ROWS, targets))
    assert expunge.evaluate(model, (ROWS, targets), loss=mse_loss).loss > 0
    rows = [{"image": x, "size": t} for x, t in zip(ROWS, targets, strict=True)]
    found = expunge.evaluate(
        model, rows, loss=lambda model, batch: mse_loss(model(batch["image"]), batch["size"])
    )
    assert (found.count, found.accuracy) == (40, None)
