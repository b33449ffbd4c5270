"""Old weights behind what a check looks at: gradients, storages, and objects that are no list."""

import contextvars
import itertools
import types
import weakref
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import expunge
from expunge import Batches, OutputPerturbation
from expunge.errors import ExpungeError
from expunge.training.holding import copy_module

IDS = [f"u{i}" for i in range(50)]
X = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
Y = X[:, :3].argmax(1)


def load() -> Batches:
    return Batches(X, Y, batch_size=25, ids=IDS)


def measure(out: Tensor, _: Tensor) -> Tensor:
    return (out**2).mean()


def unlearn(model: nn.Module, **options: Any) -> expunge.Run:
    recipe = OutputPerturbation(start_clip=1.0, noise_std=5.0)
    given: dict[str, Any] = {"loss_fn": measure, "centre": "zero", "forget_ids": ["f"]}
    return expunge.unlearn(model, load(), recipe, **given | options)


class Net(nn.Module):
    """Pulls its weights towards whatever ``recall`` finds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3, bias=False)
        self.register_buffer("known", torch.zeros(3, 4))

    def recall(self) -> Tensor:
        return torch.zeros(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) - x @ self.recall().T


class ByGradient(Net):
    def recall(self) -> Tensor:
        return torch.zeros(3, 4) if self.known.grad is None else self.known.grad


class ByStorage(Net):
    def recall(self) -> Tensor:
        behind = self.known.untyped_storage().nbytes() > 48
        return torch.as_strided(self.known, (3, 4), (4, 1), 12) if behind else torch.zeros(3, 4)


class ByParameter(Net):
    def recall(self) -> Tensor:
        weight = self.linear.weight.detach()
        behind = weight.untyped_storage().nbytes() > 48
        return torch.as_strided(weight, (3, 4), (4, 1), 12) if behind else torch.zeros(3, 4)


def hide_in_gradient() -> Net:
    model = ByGradient()
    model.known.grad = model.linear.weight.detach().clone()
    return model


def hide_behind_buffer() -> Net:
    model = ByStorage()
    old = model.linear.weight.detach().flatten()
    model.known = torch.cat([torch.zeros(12), old])[:12].view(3, 4)
    return model


def hide_behind_parameter() -> Net:
    model = ByParameter()
    old = model.linear.weight.detach().flatten()
    model.linear.weight.data = torch.cat([old, old])[:12].view(3, 4)
    return model


@pytest.mark.parametrize("hide", [hide_in_gradient, hide_behind_buffer, hide_behind_parameter])
def test_nothing_lies_behind_what_is_compared(hide: Callable[[], Net]) -> None:
    model = hide()
    old = model.linear.weight.detach().clone()
    run = unlearn(model, public={"known": torch.zeros(3, 4)})
    run = expunge.fine_tune(run, load(), loss_fn=measure, epochs=200, learning_rate=0.3)
    assert expunge.certify(run.record, delta=1e-5).weights.public.compared
    assert torch.equal(run.model.recall(), torch.zeros(3, 4))
    assert (run.model.linear.weight - old).norm() > 0.3, "it ends at zero, not at the old weights"


@pytest.mark.parametrize("place", ["known", "linear.weight"])
def test_nor_in_what_is_fine_tuned(place: str) -> None:
    model = ByGradient()
    old = model.linear.weight.detach().clone()
    run = unlearn(model, public={"known": torch.zeros(3, 4)})
    dict([*run.model.named_parameters(), *run.model.named_buffers()])[place].grad = old
    tuned = expunge.fine_tune(run, load(), loss_fn=measure, epochs=200, learning_rate=0.3)
    assert tuned.model.linear.weight.norm() < 0.1
    run.model.kept = weakref.ref(old)
    with pytest.raises(ExpungeError, match="neither parameter nor buffer"):
        expunge.fine_tune(run, load(), loss_fn=measure, epochs=1, learning_rate=0.3)


class Text(str):
    """Looks like a plain text, and holds more."""

    old: Tensor


class Liar:
    """Says that it is a text."""

    def __init__(self, old: Tensor) -> None:
        self.old = old

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        return str


class Strange(list):
    """A list that shows nothing of what it holds."""

    def __iter__(self) -> Any:
        return iter(())

    def __deepcopy__(self, memo: dict) -> "Strange":
        return self


def make_text(old: Tensor) -> Text:
    found = Text("x")
    found.old = old
    return found


KEPT: list[Tensor] = []  # what weak references need, to find anything


def keep(old: Tensor) -> Tensor:
    KEPT.append(old)
    return old


def make_future(old: Tensor) -> torch.futures.Future:
    found = torch.futures.Future()
    found.set_result(old)
    return found


def make_context(old: Tensor) -> contextvars.ContextVar:
    found = contextvars.ContextVar("old")
    found.set(old)
    return found


HIDERS: dict[str, Callable[[Tensor], Any]] = {
    "mapping": lambda old: types.MappingProxyType({"w": old}),
    "repeat": lambda old: itertools.repeat(old),
    "exception": lambda old: ValueError(old),
    "values": lambda old: {"w": old}.values(),
    "iterator": lambda old: iter([old]),
    "zip": lambda old: zip([old], [old], strict=True),
    "weak": lambda old: weakref.ref(keep(old)),
    "weak values": lambda old: weakref.WeakValueDictionary({"w": keep(old)}),
    "storage": lambda old: old.untyped_storage(),
    "array": lambda old: array("f", old.flatten().tolist()),
    "bytes": lambda old: bytearray(old.numpy().tobytes()),
    "view": lambda old: memoryview(old.numpy()),
    "method": lambda old: old.sum,
    "graph": lambda old: (old.clone().requires_grad_() * 1).grad_fn,
    "objects": lambda old: np.array([old, None], dtype=object)[:1].reshape(1, 1),
    "text": make_text,
    "future": make_future,
    "context": make_context,
    "liar": Liar,
    "list": lambda old: Strange([old]),
}


@pytest.fixture(params=HIDERS)
def hidden(request: pytest.FixtureRequest) -> tuple[nn.Linear, Any]:
    model = nn.Linear(4, 3, bias=False)
    return model, HIDERS[request.param](model.weight.detach().clone())


def test_a_loss_hides_no_tensor(hidden: tuple[nn.Linear, Any]) -> None:
    model, box = hidden

    def steer(out: Tensor, _: Tensor) -> Tensor:
        return (out**2).mean() if box is None else out.sum()

    for call in (
        lambda: unlearn(model, loss_fn=steer),
        lambda: expunge.retrain(
            model, load(), forget_ids=["f"], epochs=1, learning_rate=0.1, loss_fn=steer
        ),
    ):
        with pytest.raises(ExpungeError, match="the loss holds"):
            call()


def test_an_optimizer_hides_no_tensor(hidden: tuple[nn.Linear, Any]) -> None:
    model, box = hidden

    class Copying(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.box = box

    with pytest.raises(ExpungeError, match="holds a tensor of an earlier training"):
        expunge.retrain(
            model, load(), forget_ids=["f"], epochs=1, learning_rate=0.1, optimizer=Copying
        )


def test_a_model_hides_no_tensor(hidden: tuple[nn.Linear, Any]) -> None:
    model, box = hidden
    model.box = box
    with pytest.raises(ExpungeError, match=r"no noise covers it|cannot be copied"):
        unlearn(model)


@pytest.mark.parametrize(
    "change", [lambda w: w.numpy(), lambda w: w.T.contiguous(), lambda w: w.flatten().double()]
)
def test_data_hold_no_old_weights_in_another_shape(change: Callable[[Tensor], Any]) -> None:
    model = nn.Linear(4, 3, bias=False)

    class Labels(torch.utils.data.Dataset):
        ids = IDS

        def __init__(self, w: Any) -> None:
            self.w = w

        def __len__(self) -> int:
            return 50

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            return X[i], torch.as_tensor(self.w).float().reshape(3, 4) @ X[i]

    data = torch.utils.data.DataLoader(Labels(change(model.weight.detach().clone())), batch_size=25)
    with pytest.raises(ExpungeError, match="hold weight of the old model"):
        expunge.retrain(
            model, data, forget_ids=["f"], epochs=1, learning_rate=0.1, loss_fn=nn.MSELoss()
        )


def test_a_copy_keeps_what_is_no_secret() -> None:
    """Layouts, ties, recurrent layers and gradients of a trained model are no reason to refuse."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4))
    model[0].to(memory_format=torch.channels_last)
    model[2].weight = model[1].weight
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    copied = copy_module(model)
    assert copied[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert copied[2].weight is copied[1].weight
    assert all(p.grad is None for p in copied.parameters())
    assert model[1].weight.grad is not None
    for name, p in model.state_dict().items():
        assert torch.equal(p, copied.state_dict()[name])


def test_a_model_without_values_is_refused() -> None:
    with pytest.raises(ExpungeError, match="device meta"):
        unlearn(nn.Linear(4, 3, device="meta"))


def test_retained_identifiers_have_an_order() -> None:
    with pytest.raises(ExpungeError, match="in the order of the samples"):
        expunge.unlearn(
            nn.Linear(4, 3),
            [(X, Y)],
            OutputPerturbation(start_clip=1.0, noise_std=5.0),
            forget_ids=["f"],
            retain_ids=set(IDS),
        )


@pytest.mark.parametrize("name", ["storage", "array", "bytes", "view", "weak", "method"])
def test_nor_does_what_prepares_them(name: str) -> None:
    model = nn.Linear(4, 3, bias=False)
    box = HIDERS[name](model.weight.detach().clone())

    def prepare(x: Tensor) -> Tensor:
        return x if box is None else x + 0

    data = Batches(X, Y, batch_size=25, ids=IDS, prepare=prepare)
    with pytest.raises(ExpungeError, match="hold weight of the old model"):
        expunge.retrain(model, data, forget_ids=["f"], epochs=1, learning_rate=0.1)


def test_a_frozen_parameter_has_nothing_behind_it() -> None:
    model = Net()
    old = model.linear.weight.detach().flatten()
    behind = torch.cat([torch.zeros(12), old])[:12].view(3, 4)
    model.frozen = nn.Parameter(behind, requires_grad=False)
    public = {"known": torch.zeros(3, 4), "frozen": torch.zeros(3, 4)}
    run = unlearn(model, public=public)
    assert run.model.frozen.untyped_storage().nbytes() == 48


def test_a_module_that_is_no_child_is_refused() -> None:
    model = nn.Linear(4, 3)
    vars(model)["aside"] = [nn.Linear(4, 3)]
    with pytest.raises(ExpungeError, match="neither parameter nor buffer"):
        unlearn(model)
