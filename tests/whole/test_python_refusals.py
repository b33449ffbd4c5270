"""What Python callers do wrong is one sentence of ours, not one of torch's."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import expunge

RECIPE = expunge.GradientClipping(1.0, 1.0, 0.1, 1.0, 2, 5.0)
INPUTS = torch.randn(8, 2, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1] * 4)


def make_batches(inputs: torch.Tensor = INPUTS) -> expunge.Batches:
    return expunge.Batches(inputs, TARGETS, batch_size=4)


def unlearn(model: Any = None, inputs: torch.Tensor = INPUTS, **more: Any) -> expunge.Run:
    model = nn.Linear(2, 2) if model is None else model
    return expunge.unlearn(model, make_batches(inputs), RECIPE, loss_fn=cross_entropy, **more)


def retrain(model: Any = None, inputs: torch.Tensor = INPUTS, **more: Any) -> expunge.Run:
    model, given = nn.Linear(2, 2) if model is None else model, {"epochs": 2, "learning_rate": 0.1}
    return expunge.retrain(model, make_batches(inputs), **given | more)


def tune(inputs: torch.Tensor = INPUTS, **more: Any) -> expunge.Run:
    return expunge.fine_tune(
        unlearn(), make_batches(inputs), **{"epochs": 2, "learning_rate": 0.1} | more
    )


def write_run(path: Path, model: Any) -> Path:
    record = unlearn().record
    certificate = expunge.certify(record, delta=1e-5)
    return expunge.write_run(path / "run", model=model, record=record, certificate=certificate)


STATE = nn.Linear(2, 2).state_dict()
HALF = nn.Linear(2, 2).half
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "a state_dict is unlearned": (
        lambda _: unlearn(STATE),
        "model is a OrderedDict; it must be an nn.Module with its weights loaded",
    ),
    "a state_dict is retrained": (lambda _: retrain(STATE), "model is a OrderedDict; it must be"),
    "a state_dict is trained": (
        lambda _: expunge.train(STATE, make_batches(), epochs=1, learning_rate=0.1),  # type: ignore[arg-type]
        "model is a OrderedDict; it must be",
    ),
    "a state_dict is written": (lambda path: write_run(path, STATE), "model is a OrderedDict"),
    "a state_dict makes features": (lambda _: expunge.Features(STATE), "model is a OrderedDict"),  # type: ignore[arg-type]
    "a state_dict is counted": (
        lambda _: expunge.calibrate(
            lambda s: expunge.OutputPerturbation(1.0, s),
            epsilon=1.0,
            delta=1e-5,
            parameters=STATE,  # type: ignore[arg-type]
        ),
        "parameters is a OrderedDict; it must be a model, or a whole number >= 1",
    ),
    "a path is unlearned": (lambda _: unlearn("model.pt"), "model is a str; it must be a module"),
    "a model is tuned": (
        lambda _: expunge.fine_tune(nn.Linear(2, 2), make_batches(), epochs=1, learning_rate=0.1),  # type: ignore[arg-type]
        "run is a Linear; it must be the run that unlearn returned",
    ),
    "no GPU": (lambda _: unlearn(device="cuda:99"), "device is 'cuda:99'; it must be one that"),
    "no GPU to retrain on": (lambda _: retrain(device="cuda:99"), "device is 'cuda:99'; it must"),
    "no such device": (lambda _: unlearn(device="abacus"), "device is 'abacus'; it must be one"),
    "a half-precision model": (
        lambda _: unlearn(HALF()),
        "the model is float16 and its batches are float32; they must be of one dtype",
    ),
    "a half-precision model is retrained": (
        lambda _: retrain(HALF()),
        "the model is float16 and its batches are float32",
    ),
    "a double-precision model": (
        lambda _: unlearn(nn.Linear(2, 2).double()),
        "the model is float64 and its batches are float32",
    ),
    "no such optimizer": (
        lambda _: tune(optimizer="lion"),
        "optimizer is 'lion'; it must be 'sgd', 'adam', 'adamw' or a function of the parameters",
    ),
    "an optimizer that is there": (
        lambda _: tune(optimizer=torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1)),
        "optimizer is 'SGD'; it must be 'sgd', 'adam', 'adamw' or a function",
    ),
    "momentum of Adam": (
        lambda _: tune(optimizer="adam", momentum=0.9),
        r"momentum is 0\.9; it must be 0 with optimizer='adam'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_one_sentence(tmp_path: Path, case: str) -> None:
    act, sentence = WRONG[case]
    with pytest.raises(expunge.InputError, match=sentence) as caught:
        act(tmp_path)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "kind"), [("sgd", "SGD"), ("adam", "Adam(betas"), ("adamw", "AdamW(betas")]
)
def test_an_optimizer_may_be_named(name: str, kind: str) -> None:
    record = tune(optimizer=name, weight_decay=0.0).record
    assert record.finetune is not None
    assert record.finetune.optimizer.startswith(kind)
    again = tune(
        optimizer={"sgd": None, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[name],
        weight_decay=0.0,
        learning_rate=1e-3,
    )
    assert again.record.finetune is not None
    assert again.record.finetune.optimizer.partition("(")[0] == kind.partition("(")[0]


def spoil(place: int, value: float = math.nan) -> torch.Tensor:
    inputs = INPUTS.clone()
    inputs[place, 1] = value
    return inputs


class TestNothingThatIsNotFinite:
    """One NaN sample made an all-NaN model that was releasable."""

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_the_batch_of_the_sample_is_named(self, value: float) -> None:
        for act, doing in ((tune, "fine-tuning"), (retrain, "retraining")):
            with pytest.raises(
                expunge.UnlearningError,
                match=f"weight is not finite after {doing}: batch 2 of epoch 1 holds a number",
            ):
                act(inputs=spoil(6, value))

    def test_training_that_diverges_by_itself_is_told_apart(self) -> None:
        with pytest.raises(expunge.UnlearningError, match=r"diverged at .*lower the learning rate"):
            tune(learning_rate=1e38, momentum=9.0, epochs=9)

    def test_statistics_that_are_made_anew(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        with pytest.raises(
            expunge.UnlearningError, match="running_mean of 1 is not finite after batch 2 of the"
        ):
            unlearn(model, spoil(5), buffers="reset")

    def test_weights_that_leave_the_numbers_of_their_dtype(self) -> None:
        recipe = expunge.OutputPerturbation(start_clip=1.0, noise_std=1e9)
        with pytest.raises(expunge.UnlearningError, match="is not finite after the run; nothing"):
            expunge.unlearn(HALF(), make_batches(INPUTS.half()), recipe)

    def test_a_gradient_that_is_not_finite_counts_as_zero(self) -> None:
        run = unlearn(inputs=spoil(1))
        assert sum(run.record.trace.nonfinite) == 1
        assert all(bool(torch.isfinite(p).all()) for p in run.model.parameters())

    def test_a_run_directory_holds_no_such_weight(self, tmp_path: Path) -> None:
        model = nn.Linear(2, 2)
        nn.init.constant_(model.bias, math.nan)
        with pytest.raises(expunge.UnlearningError, match="bias holds values that are not finite"):
            write_run(tmp_path, model)
        assert not list(tmp_path.iterdir())

    def test_a_public_mask_may_be_infinite(self, tmp_path: Path) -> None:
        class Masked(nn.Linear):
            def __init__(self) -> None:
                super().__init__(2, 2)
                self.register_buffer("mask", torch.tensor([0.0, -math.inf]))

        run = unlearn(Masked(), public=["mask"])
        run = expunge.fine_tune(run, make_batches(), epochs=1, learning_rate=0.1)
        certificate = expunge.certify(run.record, delta=1e-5)
        out = expunge.write_run(
            tmp_path / "run", model=run.model, record=run.record, certificate=certificate
        )
        assert expunge.verify(out / "certificate.json").weights.public is not None

    def test_distillation(self) -> None:
        def build() -> nn.Module:
            return nn.Linear(2, 2)

        ensemble = expunge.Shards(
            build, shards=2, slices=1, seed="a", epochs=1, learning_rate=0.1, batch_size=4
        )
        ensemble.learn((INPUTS, TARGETS), ids=[f"p{i}" for i in range(8)])
        with pytest.raises(expunge.UnlearningError, match="is not finite after distillation"):
            ensemble.distill(ensemble.release(), epochs=9, learning_rate=1e38, momentum=9.0)
