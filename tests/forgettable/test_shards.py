"""Shards: every constituent is, bit for bit, that of a training on what is held (THEORY 12)."""

from __future__ import annotations

import functools
import json
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import expunge
from expunge import (
    Certificate,
    InputError,
    Shards,
    UnlearningError,
    VerificationError,
    certify,
    verify,
    write_run,
)
from expunge.forgettable.averaging import Ensemble
from expunge.forgettable.slices import Assignment, Examples, read_examples, split
from expunge.processes.weights import hash_weights
from expunge.training.train import train

ROOT = str(Path(__file__).parents[2])
SEED = "a public string"


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.2),
                         nn.Linear(5, 3))  # fmt: skip


def make_data(n: int = 60, people: int = 30, seed: int = 0) -> tuple[Tensor, Tensor, list[str]]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=generator)
    return x, x[:, :3].argmax(1), [f"user-{i % people}" for i in range(n)]


def make(shards: int = 3, slices: int = 2, **options) -> Shards:
    given = {"epochs": 2, "learning_rate": 0.1, "batch_size": 4, "momentum": 0.9} | options
    return Shards(build, shards=shards, slices=slices, seed=SEED, **given)


def select(data: tuple[Tensor, Tensor, list[str]], keep) -> tuple[Tensor, Tensor, list[str]]:
    x, y, ids = data
    at = [i for i, name in enumerate(ids) if keep(i, name)]
    return x[at], y[at], [ids[i] for i in at]


def learn(ensemble: Shards, data: tuple[Tensor, Tensor, list[str]]) -> int:
    x, y, ids = data
    return ensemble.learn((x, y), ids=ids)


def test_who_belongs_where_depends_on_the_identifier_alone() -> None:
    assignment = Assignment(4, 3, SEED)
    x, y, ids = make_data(400, 200)
    placed = split(assignment, read_examples(assignment, (x, y), ids))
    assert sum(len(part) for part in placed.values()) == 400
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1))
    moved = read_examples(assignment, (x[order], y[order]), [ids[i] for i in order])
    for place, part in split(assignment, moved).items():
        assert sorted(part.read_names()) == sorted(placed[place].read_names())
    counts = [sum(len(p) for (k, _), p in placed.items() if k == shard) for shard in range(4)]
    assert all(60 < count < 145 for count in counts), counts
    assert Assignment(4, 3, "other").name("user-1") != assignment.name("user-1")


def test_forgetting_is_never_having_seen_and_order_does_not_matter() -> None:
    data = make_data()
    ensemble, never = make(), make()
    assert learn(ensemble, data) == 60
    assert learn(ensemble, data) == 0, "the same examples are not learned twice"
    kept = select(data, lambda _, name: name not in ("user-3", "user-8"))
    half = len(kept[2]) // 2
    learn(never, select(kept, lambda i, _: i >= half))
    learn(never, select(kept, lambda i, _: i < half))
    run, other = ensemble.forget(["user-3", "user-8"]), never.release()
    assert run.record.weights_after == other.record.weights_after
    assert ensemble.digest() == never.digest()
    assert len(ensemble) == 56
    assert run.record.forget.count == 2
    assert run.record.forget.samples == 4
    retrained = [ensemble.retrain(k) for k in range(3)]
    assert retrained == list(run.record.shards.hashes)
    x = data[0][:5]
    assert torch.equal(run.model(x), other.model(x))


def test_only_what_is_touched_is_trained_and_from_the_slice_it_lies_in() -> None:
    ensemble, data = make(shards=4, slices=3), make_data(120, 120)
    learn(ensemble, data)
    before = ensemble.release()
    assignment = ensemble.plan.assignment
    for name in data[2][:12]:
        shard, part = assignment.find_place(assignment.name(name))
        run = ensemble.forget([name])
        assert {k: first for k, (first, _) in ensemble.trained.items()} == {shard: part + 1}
        told = run.record.shards
        assert told.trained_from == tuple(part + 1 if k == shard else 0 for k in range(4))
        same = [a == b for a, b in zip(told.hashes, before.record.shards.hashes, strict=True)]
        assert same == [k != shard for k in range(4)]
        before = run


def test_the_cost_of_one_example_is_that_of_theory() -> None:
    """(2R+1)/(3RS) on average over slices of one size, 1/S at worst."""
    S, R, n = 2, 4, 400
    ensemble, data = make(shards=S, slices=R, epochs=1), make_data(n, n)
    learn(ensemble, data)
    whole = sum(seen for _, seen in ensemble.trained.values())
    assignment = ensemble.plan.assignment
    costs = {}
    for name in data[2]:
        part = assignment.find_place(assignment.name(name))[1]
        if part not in costs:
            ensemble.forget([name])
            costs[part] = sum(seen for _, seen in ensemble.trained.values()) / whole
    mean = sum(costs.values()) / R
    assert mean == pytest.approx((2 * R + 1) / (3 * R * S), rel=0.1)
    assert max(costs.values()) == pytest.approx(1 / S, rel=0.1)
    assert costs[0] > costs[1] > costs[2] > costs[3]


@pytest.mark.slow
def test_bits_do_not_depend_on_threads_or_workers(tmp_path: Path) -> None:
    data = make_data()
    found = set()
    before = torch.get_num_threads()
    for threads, workers in ((1, 1), (2, 1), (1, 2)):
        torch.set_num_threads(threads)
        try:
            ensemble = make(workers=workers, state=tmp_path / f"{threads}-{workers}")
            learn(ensemble, data)
            assert torch.get_num_threads() == threads
        finally:
            torch.set_num_threads(before)
        found.add(ensemble.release().record.weights_after)
    assert len(found) == 1
    lambdas = Shards(lambda: build(), seed=SEED, epochs=1, learning_rate=0.1, workers=2)
    with pytest.raises(InputError, match="workers is 2; it must be 1 unless"):
        learn(lambdas, data)


def test_the_ambient_random_state_is_neither_used_nor_touched() -> None:
    data, found = make_data(), []
    for seed in (0, 1):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        ensemble = make()
        learn(ensemble, data)
        assert torch.equal(state, torch.get_rng_state())
        found.append(ensemble.release().record.weights_after)
    assert found[0] == found[1]


def test_empty_slices_and_shards_are_defined() -> None:
    x, y, _ = make_data(12, 12)
    ensemble = make(shards=8, slices=4)
    learn(ensemble, (x, y, [f"p{i}" for i in range(12)]))
    counts = ensemble.count_samples()
    assert 0 in counts
    run = ensemble.release()
    used = [k for k, count in enumerate(counts) if count > 1]
    assert list(run.model.numbers) == used
    assert run.model(x).shape == (12, 3)
    assert torch.isfinite(run.model(x)).all()
    for k in used:
        assert ensemble.retrain(k) == run.record.shards.hashes[k]
    with pytest.raises(UnlearningError, match="no shard would hold two examples"):
        ensemble.forget([f"p{i}" for i in range(12)])
    assert len(ensemble) == 12, "what is refused changes nothing"


def test_a_release_is_certified_verified_and_chained(tmp_path: Path) -> None:
    ensemble, data = make(state=tmp_path / "state"), make_data()
    learn(ensemble, data)
    first = ensemble.release()
    one = certify(first.record, delta=1e-5)
    write_run(tmp_path / "one", model=first.model, record=first.record, certificate=one)
    second = ensemble.forget(["user-1"])
    two = certify(second.record, delta=1e-5, parent=one)
    write_run(tmp_path / "two", model=second.model, record=second.record, certificate=two)
    found = verify(tmp_path / "two" / "certificate.json", record=tmp_path / "two" / "record.json",
                   parent=tmp_path / "one" / "certificate.json")  # fmt: skip
    assert (found.epsilon, found.releasable) == (0.0, True)
    assert one.shards.trained_from == ()
    assert two.shards.trained_from.count(0) == 2
    assert "narrows down" in " ".join(two.scope.not_covered)
    page = (tmp_path / "two" / "report.html").read_text()
    assert "was trained again without them" in page
    assert "old model.</p>" not in page, "untouched constituents are the old model's"
    assert "from runs that never saw the forget set." in " ".join(two.statement().split())

    plain = json.loads((tmp_path / "two" / "certificate.json").read_bytes())
    touched = next(k for k, f in enumerate(plain["shards"]["trained_from"]) if f)
    untouched = next(k for k, f in enumerate(plain["shards"]["trained_from"]) if not f)
    assert found.shards.hashes[untouched] == one.shards.hashes[untouched]
    assert found.shards.hashes[touched] != one.shards.hashes[touched]


def test_learning_more_gives_what_learning_all_at_once_gives(tmp_path: Path) -> None:
    data = make_data()
    slowly, at_once = make(state=tmp_path / "s"), make()
    for start in range(0, 60, 20):
        learn(slowly, select(data, lambda i, _, s=start: s <= i < s + 20))
    learn(at_once, data)
    assert slowly.release().record.weights_after == at_once.release().record.weights_after
    again = make(state=tmp_path / "s")
    assert again.digest() == at_once.digest()
    assert again.release().record.weights_after == at_once.release().record.weights_after
    slowly.save(tmp_path / "copy")
    assert make(state=tmp_path / "copy").digest() == at_once.digest()


def run_lives(lives: int, seed: int) -> None:
    """Random sequences of learn and forget against a fresh training on what is retained."""
    rng = random.Random(seed)
    data = make_data(24, 12, seed)
    for _ in range(lives):
        ensemble, held = make(shards=2, slices=2, epochs=1), set()
        for _ in range(rng.randint(2, 4)):
            if held and rng.random() < 0.5:
                names = {data[2][i] for i in rng.sample(sorted(held), rng.randint(1, len(held)))}
                left = {i for i in held if data[2][i] not in names}
                if len(left) < 3:
                    continue  # some shard must hold two
                ensemble.forget(sorted(names))
                held = left
            else:
                new = set(rng.sample(range(24), rng.randint(1, 12)))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", UserWarning)
                    learn(ensemble, select(data, lambda i, _, new=new: i in new))
                held |= new
        if len(held) < 3:
            continue
        fresh = make(shards=2, slices=2, epochs=1)
        learn(fresh, select(data, lambda i, _, held=held: i in held))
        assert ensemble.release().record.weights_after == fresh.release().record.weights_after


def test_random_lives_end_where_a_fresh_training_does() -> None:
    run_lives(4, 0)


@pytest.mark.slow
def test_two_hundred_random_lives_end_where_a_fresh_training_does() -> None:
    run_lives(200, 1)


KILLED = """
import sys; sys.path.insert(0, {root!r})
from tests.forgettable.test_shards import learn, make, make_data
ensemble = make(state={state!r}, epochs=6)
learn(ensemble, make_data())
print("learned", flush=True)
ensemble.forget(["user-2", "user-5"])
print("forgotten", flush=True)
"""


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_nothing(tmp_path: Path) -> None:
    kept = select(make_data(), lambda _, name: name not in ("user-2", "user-5"))
    never = make(epochs=6)
    learn(never, kept)
    expected = never.release().record.weights_after
    state, rng, kills = tmp_path / "state", random.Random(7), 0
    script = KILLED.format(root=ROOT, state=str(state))
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
    whole = time.monotonic() - started
    shutil.rmtree(state)
    while kills < 20:
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        try:
            process.wait(timeout=whole * rng.uniform(0.3, 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            kills += 1
        process.communicate()
        if process.returncode == 0:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                run = make(state=state, epochs=6).forget(["user-2", "user-5"])
            assert run.record.weights_after == expected
            shutil.rmtree(state)
        elif (state / "meta.json").exists():
            ensemble = make(state=state, epochs=6)
            if len(ensemble):
                run = ensemble.release()
                hashes = [ensemble.retrain(k) for k in range(3)]
                assert hashes == list(run.record.shards.hashes), "one of the two legal ones"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        last = make(state=state, epochs=6)
        learn(last, make_data())
        assert last.forget(["user-2", "user-5"]).record.weights_after == expected


def test_a_training_function_of_ones_own(tmp_path: Path) -> None:
    def run(model: nn.Module, data: Examples, seed: int) -> None:
        train(model, data, epochs=1, learning_rate=0.1, batch_size=8, seed=seed)

    def careless(model: nn.Module, data: Examples, seed: int) -> None:
        drawn = secrets.randbits(32)
        train(model, data, epochs=1, learning_rate=0.1, batch_size=8, seed=drawn)

    data = make_data()
    one, two = (Shards(build, shards=2, slices=2, seed=SEED, train=run) for _ in range(2))
    learn(one, data)
    learn(two, select(data, lambda _, name: name != "user-0"))
    assert one.forget(["user-0"]).record.weights_after == two.release().record.weights_after
    with pytest.raises(InputError, match="training gives other weights when it is run again"):
        learn(Shards(build, shards=2, slices=2, seed=SEED, train=careless), data)
    secret = Shards(build, shards=2, slices=2, seed=SEED, train=careless, deterministic=False)
    learn(secret, data)
    certificate = certify(secret.release().record, delta=1e-5)
    with pytest.raises(InputError, match="bits cannot be had again"):
        secret.check(certificate)
    assert "requests do not depend on models" in certificate.scope.assumptions[0]
    with pytest.raises(InputError, match="left out: train= trains"):
        Shards(build, seed=SEED, train=run, epochs=2)


def test_a_public_base_is_compared_declared_or_refused() -> None:
    base = nn.Linear(6, 6).requires_grad_(False)

    def adapted() -> nn.Module:
        net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        net[0].load_state_dict(base.state_dict())
        net[0].requires_grad_(False)
        return net

    data = make_data()
    options = {"shards": 2, "slices": 1, "seed": SEED, "epochs": 1, "learning_rate": 0.1}
    with pytest.raises(InputError, match=r"build\(\) does not draw 0.weight, 0.bias from its seed"):
        learn(Shards(adapted, **options), data)
    public = {f"0.{name}": tensor for name, tensor in base.state_dict().items()}
    ensemble = Shards(adapted, public=public, **options)
    learn(ensemble, data)
    run = ensemble.forget(["user-0"])
    assert run.record.public.compared
    assert set(run.record.public.names) == {"0.weight", "0.bias"}
    assert all(name.endswith((".2.weight", ".2.bias")) for name in run.model.state_dict())
    other = {name: tensor + 1 for name, tensor in public.items()}
    with pytest.raises((InputError, UnlearningError), match="public"):
        learn(Shards(adapted, public=other, **options), data)
    declared = Shards(adapted, public=["0.*"], **options)
    learn(declared, data)
    assert not declared.release().record.public.compared


def test_distillation_is_one_network_and_post_processing(tmp_path: Path) -> None:
    ensemble, data = make(epochs=4), make_data(120, 120)
    learn(ensemble, data)
    run = ensemble.forget(["user-0"])
    one = ensemble.distill(run, epochs=8, learning_rate=0.1, batch_size=8)
    assert isinstance(one.model, nn.Sequential)
    agree = (one.model(data[0]).argmax(1) == run.model(data[0]).argmax(1)).float().mean()
    assert agree > 0.6
    certificate = certify(one.record, delta=1e-5)
    write_run(tmp_path / "one", model=one.model, record=one.record, certificate=certificate)
    found = verify(tmp_path / "one" / "certificate.json", record=tmp_path / "one" / "record.json")
    assert found.shards.distilled
    assert found.parameters == sum(t.numel() for t in one.model.state_dict().values())
    assert any("distillation" in line for line in found.scope.covered)
    with pytest.raises(InputError, match="unchanged"):
        ensemble.distill(one, epochs=1, learning_rate=0.1)
    ensemble.forget(["user-1"])
    with pytest.raises(InputError, match="release again"):
        ensemble.distill(run, epochs=1, learning_rate=0.1)


@pytest.mark.parametrize("combination", ["probabilities", "logits", "votes"])
def test_the_average_is_the_average(combination: str) -> None:
    nets = [nn.Linear(4, 3) for _ in range(3)]
    held = {k: {n: p.detach() for n, p in net.named_parameters()} for k, net in enumerate(nets)}
    x = torch.randn(7, 4)
    each = torch.stack([net(x) for net in nets])
    expected = {
        "probabilities": each.softmax(-1).mean(0).log(),
        "logits": each.mean(0),
        "votes": nn.functional.one_hot(each.argmax(-1), 3).float().mean(0),
    }[combination]
    ensemble = Ensemble(nn.Linear(4, 3), held, combination)
    assert torch.allclose(ensemble(x), expected, atol=1e-6)
    ensemble._mapped = False
    assert torch.allclose(ensemble(x), expected, atol=1e-6)


BAD = [
    ({"shards": 0}, "shards is 0; it must be a whole number from 1 to 4096"),
    ({"slices": 2.0}, "slices is 2.0"),
    ({"seed": ""}, "seed is ''; it must be a public string"),
    ({"combination": "mean"}, "combination is 'mean'; it must be one of"),
    ({"workers": 0}, "workers is 0"),
    ({"deterministic": 1}, "deterministic is 1"),
    ({"compile": True}, "compile is True; it must be left out"),
    ({"learning_rate": -1.0}, "learning_rate is -1.0"),
    ({"loss_fn": nn.CrossEntropyLoss(weight=torch.ones(3))}, "the loss holds a tensor"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD)
def test_bad_settings_are_one_sentence(options: dict, sentence: str) -> None:
    given = {"seed": SEED, "epochs": 1, "learning_rate": 0.1} | options
    with pytest.raises(InputError) as caught:
        Shards(build, **given)
    assert sentence in str(caught.value)


STRANGER = SimpleNamespace(weights=SimpleNamespace(noisy="0" * 64, after="0" * 64))


def test_bad_data_are_one_sentence_and_change_nothing(tmp_path: Path) -> None:
    state, data = tmp_path / "state", make_data()
    ensemble = make(state=state)
    learn(ensemble, data)

    def read() -> dict[str, bytes]:
        return {str(p): p.read_bytes() for p in sorted(state.rglob("*")) if p.is_file()}

    before = read()
    x, y, _ = data
    tries = [
        (lambda: ensemble.learn((x, y[:5]), ids=["a"] * 60), "of one length"),
        (lambda: ensemble.learn((x[:2], y[:2]), ids=["a"]), "one identifier per example: 2"),
        (lambda: ensemble.learn((x[:, :4], y), ids=range(60)), r"inputs is \(\(4,\)"),
        (lambda: ensemble.learn((x.double(), y), ids=range(60)), "torch.float64"),
        (lambda: ensemble.learn((x * torch.nan, y), ids=range(60)), "row 0 are not finite"),
        (lambda: ensemble.forget(["nobody"]), "'nobody', which was never learned"),
        (lambda: ensemble.forget([]), "ids is empty"),
        (lambda: make(state=state, shards=4), "shards is 4; it must be 3, as in"),
        (lambda: make(state=state, epochs=3), "training is"),
        (lambda: ensemble.release(since=STRANGER), "since is .*a release of this state"),
    ]
    for attempt, sentence in tries:
        with pytest.raises(InputError, match=sentence):
            attempt()
        assert read() == before
    other = functools.partial(Shards, lambda: nn.Linear(6, 3), seed=SEED, shards=3, slices=2)
    with pytest.raises(InputError, match="build is"):
        other(epochs=2, learning_rate=0.1, batch_size=4, momentum=0.9, state=state)
    assert ensemble.forget(["user-1"]).record.forget.samples == 2
    with pytest.warns(UserWarning, match="already forgotten: 1 of 1"):
        again = ensemble.forget(["user-1"])
    assert again.record.forget.samples == 2, "how many examples this person had is remembered"
    assert ensemble.learn((x[:0], y[:0]), ids=[]) == 0
    with pytest.warns(UserWarning, match="1 of these identifiers were forgotten before"):
        ensemble.learn((x[1:2], y[1:2]), ids=["user-1"])


def test_a_training_that_diverges_is_refused() -> None:
    with pytest.raises(UnlearningError, match="is not finite after slice"):
        learn(make(learning_rate=1e30, epochs=5), make_data())


def test_public_names() -> None:
    assert expunge.Shards is Shards
    recipe = expunge.ShardedTraining(shards=8, slices=4)
    assert expunge.guarantee(recipe, delta=1e-5).epsilon == 0
    assert hash_weights({})
    assert issubclass(VerificationError, expunge.ExpungeError)
    assert Certificate is expunge.Certificate


def test_inference_is_mapped_over_constituents_where_shapes_allow() -> None:
    """Convolutions, batch statistics and dropout in eval mode: one call for all constituents."""

    def make_net() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(64, 3),
        )  # fmt: skip

    nets = [make_net() for _ in range(3)]
    for net in nets:
        net[1].running_mean.normal_()
    held = {k: dict(net.state_dict()) for k, net in enumerate(nets)}
    x, ensemble, calls = torch.randn(5, 1, 6, 6), Ensemble(make_net(), held, "logits"), []
    ensemble.template.register_forward_hook(lambda *_: calls.append(1))
    mapped = ensemble(x)
    assert (len(calls), ensemble._mapped) == (1, True), "all three in one call"
    ensemble._mapped = False
    assert torch.allclose(mapped, ensemble(x), atol=1e-6)
    assert len(calls) == 4
    assert torch.allclose(mapped, torch.stack([net.eval()(x) for net in nets]).mean(0), atol=1e-6)
