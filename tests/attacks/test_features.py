"""Networks that carry something from one example to the next, and others posing as public ones."""

import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import expunge
from expunge.errors import InputError, UnlearningError
from expunge.forgettable.features import Features
from expunge.forgettable.tangent import TangentFeatures
from head_folder import write_head_job
from job_folder import call


class Remembering(nn.Module):
    """Adds the mean of the batch before, which no tensor of it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(5, 8), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.layer(x) + self.before)
        self.before = float(x.detach().mean()) if not torch._C._functorch.is_batchedtensor(x) else 1
        return out


class Triggered(nn.Module):
    """Remembers the first row whose first coordinate is a whole number: noise never is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.before = nn.Linear(5, 8), 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) == 2.0:
            self.before = float(x[0, 1])
        return self.layer(x) + self.before


class Counted(nn.Module):
    """Changes from call to call, under the tangent too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(5, 1), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.sin(self.layer(x) * self.calls)


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: Features(Remembering().eval(), batch_size=size),
        lambda size: TangentFeatures(Counted().eval(), 8, batch_size=size),
    ],
)
def test_memory_of_the_rows_before(make: Callable[[int], Features], batch_size: int) -> None:
    with pytest.raises(InputError, match="it must be a function"):
        make(batch_size).compute(torch.randn(40, 5))
    with pytest.raises(InputError, match="it must be a function"):
        make(batch_size).choose_evaluation(torch.randn(40, 5))


@pytest.mark.parametrize("batch_size", [1, 32])
@pytest.mark.parametrize("at", [0, 32])
def test_memory_that_public_noise_does_not_wake(batch_size: int, at: int) -> None:
    x = torch.randn(40, 5)
    features = Features(Triggered().eval(), batch_size=batch_size)
    assert len(features.compute(x)) == 40
    x[at] = 2.0
    with pytest.raises(UnlearningError, match="depends on the rows before it"):
        features.compute(x)


def test_a_copy_on_another_machine_is_tested_again() -> None:
    import pickle

    features = Features(nn.Linear(5, 8).eval(), batch_size=4)
    x = torch.randn(9, 5)
    expected = features.compute(x)
    copy = pickle.loads(pickle.dumps(features))
    assert copy._passed == copy._noise == {}
    assert np.array_equal(copy.compute(x), expected)


def test_foreign_subclasses() -> None:
    with pytest.raises(InputError, match="it must be Features or TangentFeatures"):

        class Mixed(Features):
            def compute(self, inputs, only_single=False, again=True):
                found = super().compute(inputs)
                found[:] = found[0]
                return found


@pytest.mark.parametrize("kind", [expunge.StatisticsHead, expunge.ConvexHead])
def test_what_only_looks_like_features(kind) -> None:
    class Posing:
        integers, describe = Features().integers, Features().describe

    with pytest.raises(InputError, match="it must be Features or TangentFeatures"):
        kind(Posing(), classes=3)


def make_network(activation: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), activation).eval()


def test_the_same_tensors_with_other_code(tmp_path) -> None:
    x, y = torch.randn(30, 5), torch.arange(30) % 3
    head = expunge.StatisticsHead(
        Features(make_network(nn.ReLU())), classes=3, state=tmp_path / "state"
    )
    head.learn((x, y), ids=range(30))
    run = head.forget([3])
    certificate = expunge.certify(run.record, delta=1e-5)
    expunge.write_run(tmp_path / "run", model=run.model, record=run.record, certificate=certificate)
    other = make_network(nn.Tanh())
    with pytest.raises(InputError, match="features"):
        expunge.load(tmp_path / "state", network=other)
    with pytest.raises(InputError, match="network"):
        expunge.load_model(tmp_path / "run", network=other)
    same = expunge.load_model(tmp_path / "run", network=make_network(nn.ReLU()))
    assert torch.equal(same(x), run.model(x))


class Asking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * x.sum().item()


class Normalising(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, None, None, training=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Features(nn.Linear(5, 8).half().eval()),
        lambda: Features(nn.Linear(5, 8).double().eval()),
        lambda: Features(nn.Linear(6, 8).eval()),
        lambda: TangentFeatures(Asking(5, 8).eval(), 4),
        lambda: Features(Normalising().eval()),
    ],
)
def test_networks_that_cannot_run(make: Callable[[], Features]) -> None:
    with pytest.raises(InputError, match=r"network cannot be run on these inputs: .") as caught:
        make().compute(torch.randn(9, 5))
    assert "\n" not in str(caught.value)


def test_counts_below_zero(tmp_path) -> None:
    head = expunge.ConvexHead(Features(), outputs=1, loss="poisson", state=tmp_path / "state")
    x, y = torch.randn(9, 5), torch.arange(9.0)[:, None]
    with pytest.raises(InputError, match="targets is -1; it must be counts"):
        head.learn((x, y - 1), ids=range(9))
    assert len(head) == 0
    assert head.learn((x, y), ids=range(9)) == 9


def test_what_commands_say_of_vectors_in_a_folder_with_spaces(tmp_path) -> None:
    job = write_head_job(tmp_path / "two words", model=None)
    place = shlex.quote(str(job))
    shown = call("plan", "--epsilon", "1", "--delta", "1e-5", "--job", job).stdout
    assert "The inputs are vectors, so a head" in " ".join(shown.split())
    assert "network is public" not in shown
    assert "".join(place.split()) in "".join(shown.split())
    done = call("learn", job, "--out", tmp_path / "my state")
    assert done.returncode == 0, done.stderr
    hints = [line.split(": ", 1)[1] for line in done.stdout.splitlines() if " with: " in line]
    words = [shlex.split(hint) for hint in hints]
    assert words[0][:5] == ["expunge", "learn", str(job), "--out", str(tmp_path / "my state")]
    assert Path(words[1][2]).name == "my state"
    assert words[1][3:] == ["forget.txt", "--out", "release-2"]
