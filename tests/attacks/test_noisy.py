"""Ways past the noise of ``unlearn`` that once worked, or might: each is refused or harmless."""

import array
import collections
import copy
import inspect
import os
import random
import types
import weakref
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from engine import GRADIENT, MODEL, OUTPUT, equal, make_batches, make_mlp, public_part
from expunge import (
    Checkpoint,
    ExpungeError,
    InputError,
    SeededNoise,
    SystemNoise,
    UnlearningError,
    unlearn,
)
from expunge.noisy.noise import NoiseStream
from expunge.processes.weights import list_tensors
from expunge.training.batches import Batches

torch.set_num_threads(1)


def go(model=None, batches=None, recipe=GRADIENT, **options):
    given = {"loss_fn": cross_entropy, "noise": SeededNoise(0), "centre": "zero"} | options
    model = make_mlp() if model is None else model
    return unlearn(model, make_batches() if batches is None else batches, recipe, **given)


class Holder(nn.Module):
    """A linear model, for an attack to hang something on."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 3)

    def forward(self, x):
        return self.body(x)


# The release is written from the vector and from public tensors


class ExtraState(Holder):
    def get_extra_state(self):
        return self.body.weight.detach().clone()


class SavesMore(Holder):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "old"] = torch.ones(3)


class OwnStateDict(Holder):
    def state_dict(self, *args, **kwargs):
        return super().state_dict(*args, **kwargs) | {"old": torch.ones(3)}


def hooked(before):
    model = Holder()

    def hook(module, destination, *rest):
        if isinstance(destination, dict):
            destination["old"] = torch.ones(3)

    if before:
        model.body.register_state_dict_pre_hook(hook)
    else:
        model.body.register_state_dict_post_hook(hook)
    return model


def shadowed():
    model = Holder()
    model.body.state_dict = lambda *_, **__: {}
    return model


@pytest.mark.parametrize(
    "make",
    [ExtraState, SavesMore, OwnStateDict, lambda: hooked(True), lambda: hooked(False), shadowed],
    ids=["extra-state", "saves-more", "state-dict", "pre-hook", "hook", "on-the-instance"],
)
def test_a_state_dict_that_says_more_than_its_tensors(make):
    with pytest.raises(UnlearningError, match="may hold more than its parameters and buffers"):
        go(make())
    with pytest.raises(UnlearningError, match="may hold more"):
        list_tensors(make())


def hide(where):
    model, old = Holder(), torch.ones(3)
    if where == "attribute":
        model.old = old
    elif where == "array":
        model.body.old = old.numpy()
    elif where == "list":
        model.old = [{"deep": (old,)}]
    else:
        model.meter = type("Meter", (), {})()
        model.meter.average = old
    return model


@pytest.mark.parametrize("where", ["attribute", "array", "list", "object"])
def test_old_weights_in_a_plain_attribute(where):
    with pytest.raises(UnlearningError, match=r"neither parameter nor buffer|plain tensor"):
        go(hide(where))


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("persistent", [True, False])
def test_old_weights_in_a_buffer_of_another_dtype(kind, persistent):
    model = Holder()
    old = (10 * model.body.weight.detach()).round().clamp_min(0.0)
    model.register_buffer("old", old.to(kind), persistent=persistent)
    with pytest.raises(UnlearningError, match="old is not certified"):
        go(model)
    with pytest.raises(UnlearningError, match="old differs from the public tensors"):
        go(model, public={"old": torch.full((3, 6), 7).to(kind)})


def test_an_average_or_teacher_as_frozen_submodule():
    model = Holder()
    model.teacher = copy.deepcopy(model.body).requires_grad_(False)
    with pytest.raises(UnlearningError, match=r"teacher\.weight, teacher\.bias are not certified"):
        go(model)
    with pytest.raises(UnlearningError, match=r"teacher\.weight.* is not in the public tensors"):
        go(model, public=Holder())
    with pytest.raises(
        InputError, match=r"declares teacher\.weight, whose values are those of body"
    ):
        go(model, public=["teacher.*"])
    with torch.no_grad():
        for p in model.teacher.parameters():
            p.mul_(0.9)
    declared = go(model, public=["teacher.*"]).record.public
    assert (declared.names, declared.compared) == (("teacher.weight", "teacher.bias"), False)


def test_a_frozen_layer_that_was_fine_tuned():
    base, model = make_mlp(), make_mlp()
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[-1].weight.add_(1.0)
    go(model, public=base)
    model[0].weight.detach()[0, 0] += 1e-7
    with pytest.raises(UnlearningError, match=r"0\.weight differs from the public tensors"):
        go(model, public=base.state_dict())


def test_a_public_tensor_that_differs_in_its_dtype_or_sign_of_zero():
    model = Holder()
    model.register_buffer("scale", torch.zeros(2))
    for other in (torch.zeros(2).double(), -torch.zeros(2), torch.zeros(1, 2)):
        with pytest.raises(UnlearningError, match="scale differs"):
            go(model, public={"scale": other})
    go(model, public={"scale": torch.zeros(2)})


class RemembersMore(nn.BatchNorm1d):
    """A subclass with one more buffer, which nobody resets."""

    def __init__(self, width, **options):
        super().__init__(width, **options)
        self.register_buffer("longest", torch.full((width,), 3.0))


def with_norm(norm):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))


def test_a_normalisation_with_a_buffer_that_is_not_reset():
    with pytest.raises(UnlearningError, match=r"1\.longest is not reset by reset_running_stats"):
        go(with_norm(RemembersMore(8)), buffers="reset")


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.BatchNorm1d(8, affine=False),
        lambda: nn.BatchNorm1d(8).requires_grad_(False),
        lambda: nn.BatchNorm1d(8),
    ],
    ids=["without-affine", "frozen", "trained"],
)
def test_statistics_of_a_normalisation_in_eval_mode(make):
    model = with_norm(make()).eval()
    public = copy.deepcopy(model)
    model[1].running_mean.add_(0.5)
    with pytest.raises(UnlearningError, match="are not certified"):
        go(model)
    with pytest.raises(UnlearningError, match=r"1\.running_mean differs from the public"):
        go(model, public=public)


def test_statistics_of_an_instance_norm_in_eval_mode():
    norm = nn.InstanceNorm1d(3, track_running_stats=True)
    model = nn.Sequential(norm, nn.Flatten(), nn.Linear(6, 3)).eval()
    batches = [(torch.randn(4, 3, 2), torch.tensor([0, 1, 2, 0]))]
    with pytest.raises(UnlearningError, match=r"0\.running_mean, .* are not certified"):
        go(model, batches)
    found = []
    for value in (5.0, -5.0):
        norm.running_mean.fill_(value)
        found.append(go(model, batches, buffers="reset").model)
    assert equal(*found)


def test_without_affine_reset_means_reset():
    found = []
    for value in (5.0, -5.0):
        model = with_norm(nn.BatchNorm1d(8, affine=False)).eval()
        model[1].running_mean.fill_(value)
        found.append(go(model, buffers="reset").model)
    assert equal(*found)


def test_the_old_model_as_centre():
    def tied():
        model = Holder()
        model.head = nn.Linear(6, 3)
        model.head.weight = model.body.weight
        return model

    model = make_mlp()
    state = model.state_dict()
    frozen = make_mlp()
    frozen[0].bias.requires_grad_(False)
    flagged = Holder()
    flagged.register_buffer("flag", torch.tensor([True]))
    one_name = {k: v for k, v in tied().state_dict().items() if k != "body.weight"}
    for old, centre, public in (
        (model, state, None),
        (model, {k: v.double() for k, v in state.items()}, None),
        (model, {k: v * (1 + 1e-6) for k, v in state.items()}, None),
        (frozen, frozen.state_dict() | {"0.bias": torch.ones(16)}, ["0.bias"]),
        (flagged, flagged.state_dict() | {"flag": torch.tensor([False])}, ["flag"]),
        (tied(), one_name, None),
        (model, {k: v * 1.01 for k, v in state.items()}, None),
        (model, {k: -2 * v for k, v in state.items()}, None),
    ):
        with pytest.raises(InputError, match="centre is the old model"):
            go(old, centre=centre, public=public)
    go(model, centre={k: v + 0.1 * torch.randn_like(v) for k, v in state.items()})


def test_public_tensors_written_to_through_the_callers_model():
    model = make_mlp()
    model[0].requires_grad_(False)

    def on_step(done, _):
        model[0].weight.detach().add_(1.0)

    with pytest.raises(UnlearningError, match="changed during the run"):
        go(model, public=public_part(model), on_step=on_step)


# A step is a function of the vector, of retained data and of fresh randomness


def test_there_is_no_compiled_path_to_choose():
    assert "compile" not in inspect.signature(unlearn).parameters
    seen = []

    def loss(output, target):
        seen.append(torch.compiler.is_compiling())
        return cross_entropy(output, target)

    go(loss_fn=loss)
    assert seen == [False] * GRADIENT.steps


@pytest.mark.slow
def test_a_loss_that_was_compiled_runs_as_it_is_written():
    def loss(output, target):
        return cross_entropy(output, target) * (5.0 if torch.compiler.is_compiling() else 1.0)

    compiled = torch.compile(loss, backend="eager")
    assert torch.allclose(
        compiled(torch.eye(3), torch.arange(3)), 5 * loss(torch.eye(3), torch.arange(3))
    )
    assert equal(go(loss_fn=compiled).model, go().model)


def test_dropout_masks_of_the_generators_that_training_left():
    masks = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        random.seed(seed)
        shown = []

        def loss(output, target, shown=shown):
            shown.append(((output == 0).tolist(), random.random()))
            return cross_entropy(output, target)

        go(nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5)), loss_fn=loss)
        masks.append(shown)
    assert masks[0] == masks[1]
    assert len({str(mask) for mask, _ in masks[0]}) == GRADIENT.steps


def load(kind, data, generator):
    match kind:
        case "memory":
            return Batches(*data.tensors, batch_size=5, generator=generator)
        case "loader":
            return DataLoader(data, 5, shuffle=True, generator=generator)
        case "sampler":
            return DataLoader(data, 5, sampler=RandomSampler(data, generator=generator))
        case "batch-sampler":
            sampler = BatchSampler(RandomSampler(data, generator=generator), 5, drop_last=False)
            return DataLoader(data, batch_sampler=sampler)
        case _:
            return DataLoader(data, 5, shuffle=True)


@pytest.mark.parametrize("kind", ["memory", "loader", "sampler", "batch-sampler", "global"])
def test_the_order_of_the_data_of_a_generator_that_training_left(kind):
    data = TensorDataset(*(torch.cat(t) for t in zip(*make_batches(), strict=True)))
    orders = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        before, shown = generator.get_state(), []

        def loss(output, target, shown=shown):
            shown.append(target.tolist())
            return cross_entropy(output, target)

        go(batches=load(kind, data, generator), loss_fn=loss)
        assert torch.equal(before, generator.get_state())
        orders.append(shown)
    assert orders[0] == orders[1]


def test_a_forward_pass_that_writes_into_its_input():
    class Writes(Holder):
        def forward(self, x):
            found = self.body(x)
            x.data.add_(self.body.weight.detach().sum().sign())
            return found

    (x, y), shown = make_batches(count=1)[0], []
    kept = x.clone()
    for loader in ([(x, y)], [[x, y]], Batches(x, y, batch_size=8)):
        go(Writes(), loader)
        assert torch.equal(x, kept)
    mapped = [{"x": x, "labels": y}]
    go(Writes(), [(d["x"], d["labels"]) for d in mapped], on_step=lambda *_: shown.append(1))
    assert torch.equal(mapped[0]["x"], kept)


class Notes(Holder):
    """Writes the sign of an old weight down at the first step, and looks it up later."""

    kind = "number"

    def __init__(self):
        super().__init__()
        self.seen, self.list, self.steps = None, [], {"count": 0}
        self.meter = types.SimpleNamespace(value=None, inner=types.SimpleNamespace(list=[]))

    def forward(self, x):
        sign = float(self.body.weight.detach()[0, 0].sign())
        SEEN.append((self.seen, list(self.list), dict(self.steps), hasattr(self, "new")))
        assert self.meter.value is None
        assert not self.meter.inner.list
        assert not hasattr(self.meter, "new")
        self.meter.value = self.meter.new = sign
        self.meter.inner.list.append(sign)
        self.seen = sign if self.seen is None else self.seen
        self.list.append(sign)
        self.steps["count"] += 1
        self.new = x.detach()
        self.body.weight.grad = None
        self.register_buffer("late", torch.ones(1))
        return self.body(x)


SEEN: list = []


def test_notes_in_python_attributes_between_steps():
    SEEN.clear()
    model = Notes()
    run = go(model)
    assert [(None, [], {"count": 0}, False)] * GRADIENT.steps == SEEN
    assert (run.model.seen, run.model.list, run.model.steps) == (None, [], {"count": 0})
    assert list_tensors(run.model).keys() == list_tensors(model).keys()
    assert not hasattr(run.model, "new")


def test_notes_in_the_attributes_of_a_loss():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.steps = 0
            self.means = []

        def forward(self, output, target):
            seen.append((self.steps, len(self.means)))
            self.steps += 1
            self.means.append(output.detach().mean().item())
            return cross_entropy(output, target)

    seen = []
    go(loss_fn=Loss())
    assert seen == [(0, 0)] * GRADIENT.steps
    holding = Loss()
    holding.register_buffer("mean", torch.zeros(3))
    with pytest.raises(InputError, match="the loss holds a tensor"):
        go(loss_fn=holding)


@pytest.mark.parametrize("recipe", [GRADIENT, MODEL], ids=["gradient", "model"])
def test_on_step_sees_and_cannot_steer(recipe):
    def on_step(done, model):
        for p in model.parameters():
            p.detach().fill_(7.0)
        model.eval()
        model[0].register_forward_hook(lambda *_: 1 / 0)
        torch.manual_seed(0)

    assert equal(go(recipe=recipe, on_step=on_step).model, go(recipe=recipe).model)


def test_a_forward_pass_that_writes_into_the_parameters():
    class Writes(Holder):
        def forward(self, x):
            found = self.body(x)
            self.body.weight.data.fill_(9.0)
            return found

    assert equal(go(Writes()).model, go(Holder()).model)


# One draw of noise, one release


def test_a_fork_in_the_middle_of_a_run():
    """The child would go on with the same noise: its next draw is refused."""
    told, wrote = os.pipe()

    def on_step(done, model):
        if done == 3 and os.fork() == 0:
            forked.append(True)

    forked = []
    try:
        run = go(on_step=on_step, noise=SystemNoise())
        outcome = b"released"
    except ExpungeError as error:
        outcome = b"refused" if "another process" in str(error) else b"other"
    except BaseException:
        outcome = b"other"
    if forked:
        os.write(wrote, outcome)
        os._exit(0)
    os.wait()
    assert os.read(told, 100) == b"refused"
    assert run.record.noise_keys == 1


@pytest.mark.parametrize("kind", ["duck", "subclass"])
def test_a_noise_object_of_another_class(kind):
    base = SystemNoise if kind == "subclass" else object

    class Constant(base):
        source, releasable, seed = "system", True, None

        def begin(self):
            return NoiseStream(bytes(32))

        def describe(self):
            return {"source": "system", "releasable": True}

    with pytest.raises(InputError, match="and no other class"):
        go(noise=Constant())


# Runs know what they are


def save(path, resume=False, **options):
    given = {"forget_ids": ["a"], "noise": SystemNoise()} | options
    return go(checkpoint=Checkpoint(path, 0.0, resume), **given)


def test_the_finished_checkpoint_of_another_request(tmp_path):
    path = tmp_path / "state"
    first = save(path)
    with pytest.raises(InputError, match="another run: its forget set is"):
        save(path, resume=True, forget_ids=["a", "b"])
    with pytest.raises(InputError, match="another run: its forget set is"):
        save(path, resume=True, forget_ids=None)
    with pytest.raises(InputError, match="another run: its retained data is"):
        save(path, resume=True, batches=make_batches(seed=2))
    with pytest.raises(InputError, match="another run: its retained set is"):
        save(path, resume=True, retain_ids=[f"r{i}" for i in range(24)])
    with pytest.raises(InputError, match="another run: its recipe is"):
        save(path, resume=True, recipe=replace(GRADIENT, steps=6))
    with pytest.raises(InputError, match="another run: its old weights is"):
        save(path, resume=True, model=make_mlp(3))
    assert equal(save(path, resume=True).model, first.model)


def test_identifiers_that_are_missing_short_or_forgotten():
    names = [f"r{i}" for i in range(24)]
    with pytest.raises(InputError, match="forget_ids"):
        go(forget_ids=[], retain_ids=names)
    with pytest.raises(InputError, match="number of retain_ids is 23"):
        go(forget_ids=["a"], retain_ids=names[:-1])
    with pytest.raises(InputError, match="must not hold what is forgotten"):
        go(forget_ids=["e\u0301"], retain_ids=["\u00e9", *names[1:]])
    assert go(forget_ids=["a"], retain_ids=names).record.checked
    for known in ({}, {"forget_ids": ["a"]}, {"retain_ids": names}):
        assert not go(**known).record.checked
    unknown = (batch for batch in make_batches(count=7))
    assert not go(batches=unknown, forget_ids=["a"], retain_ids=names).record.checked


def test_a_lone_surrogate_in_the_name_of_a_tensor():
    for make in (nn.Module.register_parameter, nn.Module.register_buffer):
        model = Holder()
        value = (
            torch.zeros(2) if make is nn.Module.register_buffer else nn.Parameter(torch.zeros(2))
        )
        make(model, "odd\ud800", value)
        with pytest.raises(UnlearningError, match="not valid Unicode") as caught:
            go(model, public=["*"] if make is nn.Module.register_buffer else None)
        assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_module():
    model = torch.ao.quantization.quantize_dynamic(Holder(), {nn.Linear})
    model.extra = nn.Linear(2, 2)
    with pytest.raises(UnlearningError, match=r"may hold more|quint8|qint8") as caught:
        go(model, recipe=OUTPUT)
    assert "\n" not in str(caught.value)


class Keeping(nn.Module):
    """Notes down in an object of any kind how often it was called, and what it first saw."""

    def __init__(self, notes, note):
        super().__init__()
        self.body, self.notes, self.note = nn.Linear(6, 3), notes, note

    def forward(self, x):
        SEEN.append(len(self.notes) if hasattr(self.notes, "__len__") else self.notes.count)
        self.note(self.notes)
        return self.body(x)


class Slotted:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


def raise_count(notes):
    notes.count += 1


SEEN = []


@pytest.mark.parametrize(
    ("make", "note"),
    [
        (collections.deque, lambda notes: notes.append(1)),
        (bytearray, lambda notes: notes.append(1)),
        (lambda: array.array("d"), lambda notes: notes.append(1.0)),
        (Slotted, raise_count),
        (lambda: [Slotted()], lambda notes: notes.append(notes[0])),
    ],
    ids=["deque", "bytearray", "array", "slots", "objects in a list"],
)
def test_a_module_notes_in_any_object_what_it_saw_before_the_noise(make, note):
    SEEN.clear()
    go(Keeping(make(), note))
    assert len(SEEN) > 1
    assert set(SEEN) == {SEEN[0]}


def test_a_forward_pass_freezes_a_layer_or_changes_its_kind_for_later_steps():
    class Other(nn.Linear):
        pass

    class Turning(Holder):
        def forward(self, x):
            seen.append((self.body.weight.requires_grad, type(self.body)))
            self.body.__class__ = Other
            found = super().forward(x)
            self.body.weight.requires_grad_(False)
            self.body.bias.extra = 1
            self.body.bias.register_hook(lambda g: 0 * g)
            return found

    seen = []
    run = go(Turning())
    assert len(seen) > 1
    assert set(seen) == {(True, nn.Linear)}
    assert run.model.body.weight.requires_grad
    assert not run.model.body.bias._backward_hooks


def test_a_loss_that_counts_its_calls():
    class Counting:
        def __init__(self):
            self.calls = 0

        def __call__(self, output, target):
            seen.append(self.calls)
            self.calls += 1
            return nn.functional.cross_entropy(output, target)

    seen = []
    go(make_mlp(), loss_fn=Counting())
    assert len(seen) > 1
    assert set(seen) == {0}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_torchscript_is_one_sentence():
    with pytest.raises(UnlearningError, match="TorchScript"):
        go(torch.jit.script(nn.Linear(6, 3)))


def test_a_model_that_is_its_own_copy():
    class Single(Holder):
        def __deepcopy__(self, memo):
            return self

    with pytest.raises(UnlearningError, match="copies to itself"):
        go(Single())


def test_the_old_model_as_its_own_public_source():
    model = Holder()
    model.backbone = nn.Linear(6, 6).requires_grad_(False)
    for public in (model, model.state_dict(), copy.deepcopy(model).state_dict()):
        with pytest.raises(InputError, match="old model"):
            go(model, public=public)
    go(model, public=copy.deepcopy(model.backbone).state_dict(prefix="backbone."))


def test_the_loss_is_a_method_of_the_old_model():
    class Judging(Holder):
        def judge(self, output, target):
            return cross_entropy(output, target) + (output - self.body.bias).pow(2).mean()

    model = Judging()
    with pytest.raises(InputError, match="the loss holds a tensor"):
        go(model, loss_fn=model.judge)


def test_a_loader_that_holds_the_old_model_cannot_reach_the_copy():
    model = make_mlp()
    hidden = weakref.ref(model)

    class Reaching(list):
        def __iter__(self):
            for p in hidden().parameters():
                p.detach().fill_(9.0)
            return super().__iter__()

    with pytest.raises(InputError, match=r"hold 0\.weight of the old model"):
        go(model, Reaching(make_batches()))


def test_parameters_of_a_parametrization_are_the_certified_ones():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))
    run = go(model)
    assert {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"} <= set(
        list_tensors(run.model)
    )
    assert run.record.parameters == sum(p.numel() for p in model.parameters())
