"""unlearn(): loaders, losses, centres, buffers, dtypes, identifiers, and every refusal."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from engine import (
    GRADIENT,
    MODEL,
    OUTPUT,
    equal,
    flatten,
    make_batches,
    make_mlp,
    plain,
    public_part,
    without_onednn,
)
from expunge import ExpungeError, InputError, Retraining, UnlearningError, guarantee
from expunge.certificates.identifiers import opens
from expunge.certificates.record import Run
from expunge.noisy.noise import SeededNoise
from expunge.noisy.run import unlearn
from expunge.processes.weights import hash_weights
from expunge.training.batches import Batches

torch.set_num_threads(1)


def go(model=None, batches=None, recipe=GRADIENT, **options) -> Run:
    given = {"loss_fn": cross_entropy, "noise": SeededNoise(0), "centre": "zero"} | options
    model = make_mlp() if model is None else model
    return unlearn(model, make_batches() if batches is None else batches, recipe, **given)


class Holder(nn.Module):
    """A linear model with whatever else a test hangs on it."""

    def __init__(self, **extra):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(6, 3)
        for name, value in extra.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.body(x)


# Loaders and losses


def test_any_iterable_of_batches_gives_the_same_run():
    batches = make_batches(count=2)
    samples = torch.utils.data.TensorDataset(*(torch.cat(t) for t in zip(*batches, strict=True)))
    memory = Batches(*samples.tensors, batch_size=8)
    loaders = [batches, tuple(map(list, batches)), torch.utils.data.DataLoader(samples, 8), memory]
    runs = [go(batches=loader) for loader in loaders]
    assert all(equal(runs[0].model, run.model) for run in runs[1:])


def test_mappings_with_the_models_own_loss():
    class OwnLoss(Holder):
        def forward(self, x, labels):
            return {"loss": cross_entropy(self.body(x), labels), "logits": self.body(x)}

    batches = [{"x": x, "labels": y} for x, y in make_batches()]
    own = go(OwnLoss(), batches, loss_fn=None)
    given = go(OwnLoss(), batches, loss_fn=lambda out, b: cross_entropy(out["logits"], b["labels"]))
    tuples = go(Holder())
    assert equal(own.model, given.model)
    assert equal(own.model, tuples.model)


def test_batches_of_inputs_alone_and_of_several_inputs():
    model = nn.Linear(6, 6)
    run = go(model, [x for x, _ in make_batches()], loss_fn=mse_loss)
    assert run.record.gradient_evaluations == 7 * 8

    class TwoInputs(Holder):
        def forward(self, a, b):
            return self.body(a + b)

    go(TwoInputs(), [(x, x, y) for x, y in make_batches()])


def test_shuffled_loader_with_dropout_is_repeatable():
    x, y = (torch.cat(t) for t in zip(*make_batches(), strict=True))
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=5, shuffle=True
    )
    torch.manual_seed(7)
    first = go(make_mlp(dropout=0.3), loader)
    torch.manual_seed(8)
    assert equal(first.model, go(make_mlp(dropout=0.3), loader).model)
    other = go(make_mlp(dropout=0.3), loader, noise=SeededNoise(1)).record.trace
    assert other.gradient_norm[0] != first.record.trace.gradient_norm[0]


def test_gradient_that_is_not_finite_counts_as_zero_and_is_recorded():
    x, y = make_batches(count=1)[0]
    poisoned = x.clone()
    poisoned[0, 0] = math.nan
    run = go(batches=[(x, y), (poisoned, y)])
    trace = run.record.trace
    assert trace.nonfinite == (False, True) * 3 + (False,)
    assert trace.clip_factor[1] == 0
    assert trace.gradient_norm[1] == 0
    assert torch.isfinite(flatten(run.model)).all()
    still = go(batches=[(poisoned, y)], recipe=replace(GRADIENT, noise_std=0.0, grad_clip=math.inf))
    assert all(still.record.trace.nonfinite)


@pytest.mark.parametrize(
    ("batches", "options", "words"),
    [
        ([], {}, "yields no batches"),
        (iter(make_batches(count=2)), {}, "ended after 2 batches"),
        (None, {"loss_fn": None}, "loss_fn is None"),
        (None, {"loss_fn": lambda o, t: cross_entropy(o, t, reduction="none")}, r"shape \(8,\)"),
        (None, {"loss_fn": lambda o, t: 1.0}, "the loss is a float"),
        (None, {"loss_fn": lambda o, t: o.argmax().sum()}, "dtype torch.int64"),
        (None, {"loss_fn": lambda o, t: torch.zeros(())}, "no trainable parameter"),
        ([("text",)], {}, "batch is 'tuple'"),
        ([3], {}, "batch is 'int'"),
    ],
)
def test_bad_data_and_losses_are_refused(batches, options, words):
    with pytest.raises(ExpungeError, match=words):
        go(batches=batches, **options)


# Centres and starts


def test_exact_restart_with_start_clip_zero_is_the_centre_run():
    centre = make_mlp(seed=5).state_dict()
    zero = go(make_mlp(1), recipe=replace(GRADIENT, start_clip=0.0), centre=centre)
    restart = go(make_mlp(2), start="centre", centre=centre)
    assert equal(zero.model, restart.model)
    assert guarantee(restart.record.recipe, delta=1e-5).epsilon == 0


def test_centre_without_noise_and_steps_is_returned_exactly():
    centre = make_mlp(seed=5)
    recipe = plain(3, learning_rate=0.0)["gradient-clipping"]
    run = go(make_mlp(1), recipe=replace(recipe, start_clip=0.0), centre=centre.state_dict())
    assert equal(run.model, centre)


def test_weight_decay_pulls_towards_the_centre():
    centre = make_mlp(seed=5)
    strong = replace(
        GRADIENT, grad_clip=0.0, weight_decay=5.0, learning_rate=0.15, steps=20, noise_std=1e-6
    )
    run = go(recipe=strong, centre=centre.state_dict())
    assert torch.allclose(flatten(run.model), flatten(centre), atol=1e-4)
    assert run.record.centre == hash_weights(dict(centre.named_parameters()))


def test_tied_weights_are_certified_once_and_stay_tied():
    model = Holder(head=nn.Linear(6, 3))
    model.head.weight = model.body.weight
    run = go(model)
    assert run.record.parameters == 18 + 3 + 3
    assert run.model.head.weight is run.model.body.weight
    assert run.model.state_dict().keys() == model.state_dict().keys()
    centre = {"head.weight": torch.ones(3, 6), "body.bias": torch.zeros(3)}
    go(model, centre=centre | {"head.bias": torch.zeros(3)})
    both = model.state_dict() | {"body.weight": torch.zeros(3, 6)}
    with pytest.raises(InputError, match="tied weights"):
        go(model, centre=both)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.pop("0.bias"), "centre has no 0.bias"),
        (lambda c: c.update({"9.bias": torch.zeros(1)}), "centre key is '9.bias'"),
        (lambda c: c.update({"0.bias": torch.zeros(2)}), r"shape is \(2,\); it must be \(16,\)"),
        (lambda c: c.update({"0.bias": torch.full((16,), math.nan)}), "not finite"),
        (lambda c: c.update({"0.bias": torch.zeros(16, dtype=torch.int64)}), "not finite real"),
    ],
)
def test_bad_centres_are_refused_by_name(change, words):
    centre = dict(make_mlp().state_dict())
    change(centre)
    with pytest.raises(InputError, match=words):
        go(centre=centre)


# What is certified and what is public


def test_frozen_parameters_are_left_alone_and_hashed():
    model = make_mlp()
    model[0].requires_grad_(False)
    with pytest.raises(UnlearningError, match=r"0\.weight, 0\.bias are not certified"):
        go(model)
    run = go(model, public=public_part(model))
    assert torch.equal(run.model[0].weight, model[0].weight)
    assert not run.model[0].weight.requires_grad
    assert run.record.public.names == ("0.weight", "0.bias")
    assert run.record.public.compared
    assert run.record.public.hash == hash_weights(
        {n: model.state_dict()[n] for n in ("0.weight", "0.bias")}
    )
    assert run.record.parameters == 16 * 3 + 3
    full = go(model, centre=make_mlp(3).state_dict(), public=["0.*"])
    assert (full.record.public.names, full.record.public.compared) == (
        run.record.public.names,
        False,
    )
    assert torch.equal(full.model[0].weight, model[0].weight)


def test_unused_parameters_get_noise_too():
    model = Holder(unused=nn.Linear(2, 2))
    run = go(model)
    assert float(run.model.unused.weight.detach().std()) > 0.05


def test_sparse_gradients_are_densified():
    model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Flatten(), nn.Linear(6, 3))
    ids = [(torch.randint(0, 5, (8, 2)), torch.randint(0, 3, (8,)))]
    dense = copy.deepcopy(model)
    dense[0].sparse = False
    cross_entropy(model(ids[0][0]), ids[0][1]).backward()
    assert model[0].weight.grad.layout is torch.sparse_coo
    model.zero_grad()
    runs = [go(m, ids) for m in (model, dense)]
    assert runs[0].record.trace.gradient_norm == runs[1].record.trace.gradient_norm
    assert equal(runs[0].model, runs[1].model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_keep_their_dtype(dtype):
    model = make_mlp().to(dtype)
    batches = [(x.to(dtype), y) for x, y in make_batches()]
    with without_onednn():
        run = go(model, batches)
    assert {p.dtype for p in run.model.parameters()} == {dtype}
    assert run.record.dtype == str(dtype).removeprefix("torch.")
    assert run.record.trace.noise_norm == go().record.trace.noise_norm


def test_channels_last_parameters():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3))
    batch = [(torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))]
    torch.manual_seed(0)
    rows = go(model, batch)
    last = go(model.to(memory_format=torch.channels_last), batch)
    assert torch.allclose(flatten(rows.model), flatten(last.model), atol=1e-4)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (make_mlp().requires_grad_(False), "no trainable parameter"),
        (nn.Flatten(), "no trainable parameter"),
        (nn.LazyLinear(3), "no shape yet"),
        (nn.Linear(6, 3, dtype=torch.complex64), "complex"),
    ],
)
def test_models_that_cannot_be_certified(model, words):
    with pytest.raises(UnlearningError, match=words):
        go(model)


def test_broken_weights_and_shared_memory_are_refused():
    broken = make_mlp()
    broken[0].weight.detach()[0, 0] = math.nan
    with pytest.raises(UnlearningError, match=r"parameter 0\.weight holds values"):
        go(broken)
    shared = Holder(head=nn.Linear(6, 3))
    shared.head.weight = nn.Parameter(shared.body.weight.detach())
    with pytest.raises(UnlearningError, match="share memory"):
        go(shared)


# Identifiers, recipes, records


def test_identifiers_must_be_disjoint_and_are_committed():
    names = np.array(["a", "b"] * 12)
    run = go(forget_ids=[3, "x"], retain_ids=names)
    assert opens(run.record.forget, ["x", "3"])
    assert opens(run.record.retain, ["b", "a"])
    assert run.record.checked
    assert run.forgotten == {"3", "x"}
    assert not go(retain_ids=names).record.checked
    assert not go(forget_ids=["x"]).record.checked
    with pytest.raises(InputError, match=r"retain_ids holds '7'.*2 in all"):
        go(forget_ids=["7", "8", "9"], retain_ids=[7, 8, 10])


def test_identifiers_of_batches_in_memory_are_used():
    x, y = make_batches(count=1)[0]
    loader = Batches(x, y, batch_size=4, ids=[f"s{i}" for i in range(8)])
    assert go(batches=loader).record.retain.count == 8
    with pytest.raises(InputError, match="s3"):
        go(batches=loader, forget_ids=["s3"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recipe": Retraining()}, "recipe is Retraining"),
        ({"start": "zero"}, "start is 'zero'"),
        ({"checkpoint": "somewhere"}, "checkpoint is 'somewhere'"),
        ({"noise": 3}, "noise is 3"),
        ({"forget_ids": []}, "forget_ids is"),
        ({"retain_ids": ["a"]}, "number of retain_ids is 1; it must be 24"),
        ({"public": ["9.*"]}, r"public is '9\.\*'"),
        ({"public": "nowhere"}, "names and patterns are given as a list"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(InputError, match=words):
        go(**options)


def test_record_says_what_ran():
    record = go().record
    assert record.execution.releases == 1
    assert (record.public, record.processes, record.checked) == (None, None, False)
    assert record.parameters == 6 * 16 + 16 + 16 * 3 + 3
    assert record.execution.rounding >= 2 * record.grid * math.sqrt(record.parameters)
    assert (record.start, record.buffers, record.resumed, record.noise_keys) == (
        "model",
        "none",
        0,
        1,
    )
    assert (record.device, record.dtype) == ("cpu", "float32")
    assert record.trace.learning_rate == (0.1,) * 7
    assert all(
        n * c <= 1.0
        for n, c in zip(record.trace.gradient_norm, record.trace.clip_factor, strict=True)
    )
    assert {"torch", "numpy", "expunge", "python"} <= record.versions.keys()


def test_model_clipping_keeps_the_model_in_its_ball():
    trace = go(recipe=MODEL).record.trace
    assert max(trace.model_norm) <= 1.0
    assert min(trace.clip_factor) == 1.0


def test_output_perturbation_reads_no_data():
    run = go(batches=[], recipe=OUTPUT)
    assert run.record.gradient_evaluations == 0
    assert run.record.trace.learning_rate == (0.0,)
    assert run.record.trace.model_norm[0] <= 0.5


def test_works_inside_no_grad_and_inference_mode():
    with torch.no_grad():
        first = go()
    model, batches = make_mlp(), make_batches()
    with torch.inference_mode():
        second = go(model, batches)
    assert equal(first.model, second.model)


def test_on_step_sees_every_step():
    seen = []
    go(on_step=lambda done, model: seen.append((done, flatten(model).sum().item())))
    assert [done for done, _ in seen] == list(range(1, 8))
    assert len({value for _, value in seen}) == 7


def test_progress_goes_to_a_terminal_only(monkeypatch, capsys):
    go(progress=True)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    shown = go(progress=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "unlearning" in captured.err
    assert equal(shown.model, go().model)
