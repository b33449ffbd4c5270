"""Attempts on the state of shards, on what trains them, and on what surrounds a request."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from expunge import (
    InputError,
    Shards,
    UnlearningError,
    VerificationError,
    certify,
)
from expunge.forgettable.folders import hold_training
from expunge.forgettable.slices import Examples
from expunge.training.train import train
from shard_ensembles import SEED, build, learn, make, make_data


def is_as_if_never(ensemble: Shards, gone: str, like: Callable[[], Shards] = make) -> bool:
    """Whether an ensemble is, bit for bit, that of a life without somebody."""
    learn(never := like(), lambda name: name != gone)
    return ensemble.release().record.weights_after == never.release().record.weights_after


def list_slices(state: Path) -> list[Path]:
    return sorted((state / "rows").iterdir())


def test_a_checkpoint_that_a_killed_process_was_writing(tmp_path: Path) -> None:
    """It saw the person, and its name is known to nobody."""
    state = tmp_path / "state"
    learn(make(state=state))
    half = state / "checkpoints" / ".000-001.0123456789abcdef.tmp"
    shutil.copy(state / "checkpoints" / "000-001", half)
    ensemble = make(state=state)
    ensemble.forget(["user-4"])
    assert not half.exists()
    assert is_as_if_never(ensemble, "user-4")


def test_a_worker_that_outlives_its_process_would_write_what_it_saw(tmp_path: Path) -> None:
    """Slices change only when no worker is at work."""
    state = tmp_path / "state"
    learn(make(state=state))
    ensemble, done = make(state=state), threading.Event()

    def forget() -> None:
        ensemble.forget(["user-4"])
        done.set()

    request = threading.Thread(target=forget)
    before = [file.read_bytes() for file in list_slices(state)]
    with hold_training(state, changing=False):  # the worker that is left
        request.start()
        assert not done.wait(0.5)
        assert [file.read_bytes() for file in list_slices(state)] == before
    request.join()
    assert done.is_set()
    assert is_as_if_never(ensemble, "user-4")


@pytest.mark.parametrize("how", ["hidden", "beside", "link", "reordered", "tensor", "twice"])
def test_people_put_where_a_request_does_not_look(tmp_path: Path, how: str) -> None:
    """An order of rows could say who was there; a hidden file, a tensor or a link keeps them."""
    state = tmp_path / "state"
    learn(make(state=state))
    file = list_slices(state)[0]
    rows = Examples.from_bytes(file.read_bytes())
    match how:
        case "hidden":
            shutil.copy(file, file.with_name(f".{file.name}"))
        case "beside":
            shutil.copy(file, file.with_name("000-00f"))
        case "link":
            shutil.move(file, tmp_path / "kept")
            file.symlink_to(tmp_path / "kept")
        case "reordered":
            file.write_bytes(rows.take(range(len(rows))[::-1]).to_bytes())
        case "tensor":
            kept = safetensors.torch.load(file.read_bytes()) | {"old": make_data()[0][4]}
            file.write_bytes(safetensors.torch.save(kept))
        case "twice":
            file.write_bytes(rows.take([0, *range(len(rows))]).to_bytes())
    with pytest.raises((InputError, UnlearningError), match=r"restore the state|a slice or check"):
        make(state=state).forget(["user-4"])


def test_a_slice_edited_in_place_with_its_clock_set_back(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ensemble = make(state=state)
    learn(ensemble)
    before, file = ensemble.digest(), list_slices(state)[0]
    told, rows = file.stat(), Examples.from_bytes(file.read_bytes())
    other = replace(rows, targets=(rows.targets + 1) % 3).to_bytes()
    with file.open("r+b") as handle:
        handle.write(other)
    os.utime(file, ns=(told.st_atime_ns, told.st_mtime_ns))
    now = file.stat()
    assert (now.st_ino, now.st_mtime_ns, now.st_size) == (
        told.st_ino, told.st_mtime_ns, told.st_size
    )  # fmt: skip
    assert ensemble.digest() != before
    run = ensemble.release()
    assert [ensemble.retrain(k) for k in range(3)] == list(run.record.shards.hashes)


def test_checkpoints_of_a_copy_that_forgot_somebody_else(tmp_path: Path) -> None:
    learn(make(state=tmp_path / "a"))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    make(state=tmp_path / "a").forget(["user-4"])
    make(state=tmp_path / "b").forget(["user-9"])
    shutil.rmtree(tmp_path / "a" / "checkpoints")
    shutil.copytree(tmp_path / "b" / "checkpoints", tmp_path / "a" / "checkpoints")
    assert is_as_if_never(make(state=tmp_path / "a"), "user-4")


def test_somebody_learned_again_and_forgotten_again(tmp_path: Path) -> None:
    ensemble, (x, y, _) = make(state=tmp_path / "state"), make_data()
    learn(ensemble)
    ensemble.forget(["user-4"])
    with pytest.warns(UserWarning, match="were forgotten before and are learned again"):
        ensemble.learn((x[4:6], y[4:6]), ids=["user-4", "user-4"])
    run = ensemble.forget(["user-4"])
    assert run.record.forget.samples == 2
    assert is_as_if_never(ensemble, "user-4")


def test_identifiers_that_look_the_same_are_the_same_or_refused() -> None:
    ensemble, (x, y, _) = make(), make_data()
    learn(ensemble)
    ensemble.learn((x[:2] + 1, y[:2]), ids=["Zoe\u0308", "Zo\u00eb"])
    assert ensemble.forget(["Zo\u00eb"]).record.forget.samples == 2
    for name in ("user-4 ", "user-4\u200b", "\ufeffuser-4", "user-4\n", True, 4.0):
        with pytest.raises(InputError, match="ids is"):
            ensemble.forget([name])
    assert is_as_if_never(ensemble, "")


def test_an_example_that_cannot_be_trained_would_stand_in_every_requests_way(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    ensemble, x = make(state=state), make_data()[0]
    learn(ensemble)
    rows = [file.read_bytes() for file in list_slices(state)]
    with pytest.raises(IndexError, match="out of bounds"):
        ensemble.learn((x[:3] + 1, torch.tensor([0, 99, 1])), ids=["a", "b", "c"])
    assert [file.read_bytes() for file in list_slices(state)] == rows
    with pytest.raises(InputError, match="'b', which was never learned"):
        ensemble.forget(["b"])
    ensemble.forget(["user-4"])
    assert is_as_if_never(ensemble, "user-4")
    with pytest.raises(UnlearningError, match="diverged"):
        learn(make(state=tmp_path / "new", learning_rate=1e30))
    learn(make(state=tmp_path / "new"))  # nothing is left of it, not even the rate


def test_a_training_that_remembers_what_noise_does_not_show() -> None:
    """Class constants of the first data that have classes: the noise has one class only."""
    memory: dict[str, Tensor] = {}

    def remember(model: nn.Module, data: Examples, seed: int) -> None:
        if len(data.targets.unique()) > 1:
            memory.setdefault("mean", data.inputs.mean(0))
        shifted = replace(data, inputs=data.inputs - memory.get("mean", torch.zeros(16)))
        train(model, shifted, epochs=1, learning_rate=0.1, seed=seed)

    with pytest.raises(UnlearningError, match="keeps something from one call to the next"):
        learn(Shards(build, seed=SEED, shards=3, slices=2, train=remember))


def test_a_memory_that_hides_from_noise_is_found_by_training_again_elsewhere() -> None:
    """No test of a function finds what hides from it; another process has no memory."""
    memory: list[Tensor] = []

    def hide(model: nn.Module, data: Examples, seed: int) -> None:
        shift = sum((x.mean(0) for x in memory), torch.zeros(16)) if len(data) != 32 else 0.0
        if len(data) != 32:
            memory.append(data.inputs.clone())
        shifted = replace(data, inputs=data.inputs + shift)
        train(model, shifted, epochs=1, learning_rate=0.1, seed=seed)

    ensemble = Shards(build, seed=SEED, shards=3, slices=2, train=hide)
    learn(ensemble)
    certificate = certify(ensemble.forget(["user-4"]).record, delta=1e-5)
    memory.clear()
    with pytest.raises(VerificationError, match="trained again is"):
        ensemble.check(certificate)


def test_other_arithmetic_around_a_request() -> None:
    ensemble = make()
    learn(ensemble)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(UnlearningError, match="autocast, a default dtype"),
    ):
        ensemble.forget(["user-4"])
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(InputError, match="not what it was when the state was opened"):
            ensemble.release()
    finally:
        torch.set_default_dtype(torch.float32)
    assert is_as_if_never(ensemble, "user-4")


def test_what_is_fixed_is_changed_after_it_was_described() -> None:
    """A base swapped in the file that build reads; a plan or combination set on the object."""
    base = [torch.randn(16, 16, generator=torch.Generator().manual_seed(0))]

    class Based(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(base[0].clone(), requires_grad=False)
            self.net = build()

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs @ self.base)

    ensemble = make(build=Based, public={"base": base[0].clone()})
    learn(ensemble)
    x = make_data()[0]
    base[0] = base[0] + x.T @ x
    with pytest.raises(InputError, match="not what it was when the state was opened"):
        ensemble.forget(["user-4"])
    other = make()
    learn(other)
    other.plan = replace(other.plan, settings=replace(other.plan.settings, epochs=1))
    with pytest.raises(InputError, match="not what it was"):
        other.forget(["user-4"])


def test_an_ensemble_that_answers_otherwise_given_to_distillation() -> None:
    """Its tensors are right and its forward is not: the teacher is made from the state."""
    ensemble, x = make(), make_data()[0]
    learn(ensemble)
    run = ensemble.release()
    honest = ensemble.distill(run, epochs=2, learning_rate=0.1, seed=0)
    run.model.combination = "votes"
    run.model._answer = lambda inputs, _: torch.eye(3)[:1].repeat(3, len(inputs[0]), 1) * 9
    lied = ensemble.distill(run, epochs=2, learning_rate=0.1, seed=0)
    assert torch.equal(lied.model(x), honest.model(x))


def test_a_start_half_of_which_is_the_old_model() -> None:
    """Nothing of it is the same under another seed, but it is correlated; small tensors too."""
    old = nn.Linear(64, 64)

    class Near(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 64)
            drawn = self.first.weight.detach()
            self.first.weight = nn.Parameter(old.weight.detach() + 1.5 * drawn)

    class Bits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i in range(8):
                kept = old.weight.detach()[i, :16]
                setattr(self, f"w{i}", nn.Parameter(kept + 0.2 * kept.std() * torch.randn(16)))

    for start, name in ((Near, "first.weight"), (Bits, "w0")):
        with pytest.raises(InputError, match=rf"build\(\) does not draw {name}"):
            learn(make(build=start))


def test_an_edited_certificate_to_be_chained_to() -> None:
    ensemble = make()
    learn(ensemble)
    first = certify(ensemble.release().record, delta=1e-5)
    edited = first.model_copy(
        update={"weights": first.weights.model_copy(update={"after": "ab" * 32})}
    )
    with pytest.raises(InputError, match=r"since is 'abab.*a release of this state"):
        ensemble.forget(["user-4"], since=edited)
    assert len(ensemble) == 45


def test_data_that_are_others_whenever_they_are_read() -> None:
    """They are read once; what was kept is what is trained on, every time."""

    class Moving:
        def __init__(self) -> None:
            self.reads, (self.inputs_, self.targets_, _) = 0, make_data()

        def __len__(self) -> int:
            return len(self.inputs_)

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            self.reads += 1
            return self.inputs_[index] + 0.01 * self.reads, self.targets_[index]

    ensemble = make()
    ensemble.learn(Moving(), ids=make_data()[2])
    run = ensemble.forget(["user-4"])
    assert [ensemble.retrain(k) for k in range(3)] == list(run.record.shards.hashes)


def test_a_forward_that_remembers_leaves_nothing_in_the_release() -> None:
    """The file is written from tensors; what code remembers stays in its process."""
    seen: list[Tensor] = []

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(inputs.detach().clone())
            return self.net(inputs)

        def get_extra_state(self) -> object:
            return seen

    ensemble = make(build=Remembering)
    learn(ensemble)
    released = ensemble.forget(["user-4"]).model.state_dict()
    shapes = {tuple(t.shape) for t in build().state_dict().values()}
    assert {tuple(tensor.shape) for tensor in released.values()} <= shapes
