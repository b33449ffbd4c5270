"""Shards: bit for bit what training on the examples that remain gives, whatever happened."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy

from expunge import Data, InputError, Shards, Training, UnlearningError, load_model, verify
from tests.helpers.small_shards import (
    PEOPLE,
    build,
    hash_release,
    make,
    make_data,
    train,
    train_fresh,
)


def train_with_state(model: nn.Module, examples: Any, seed: int, state: dict[str, Any]) -> None:
    """Momentum and a counter that last from slice to slice."""
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    if state:
        optimizer.load_state_dict(state["optimizer"])
    for _ in range(2 + state.get("calls", 0)):
        optimizer.zero_grad()
        cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()
    state |= {"optimizer": optimizer.state_dict(), "calls": state.get("calls", 0) + 1}


def train_and_validate(model: nn.Module, examples: Any, seed: int, validation: Any = None) -> None:
    """Early stopping on the validation data of the shard's own people."""
    optimizer, best = torch.optim.SGD(model.parameters(), 0.3), float("inf")
    for _ in range(6):
        optimizer.zero_grad()
        cross_entropy(model(examples[0]), examples[1]).backward()
        optimizer.step()
        if validation is not None:
            model.eval()
            loss = cross_entropy(model(validation[0]), validation[1]).item()
            model.train()
            if loss > best:
                return
            best = loss


TRAININGS: dict[str, Callable[..., Any]] = {
    "loop": train, "state": train_with_state, "validation": train_and_validate,
    "built in": Training(epochs=1, learning_rate=0.1, batch_size=6, momentum=0.9, clip_norm=1.0),
}  # fmt: skip
LIVES = st.lists(
    st.tuples(st.booleans(), st.sets(st.integers(0, PEOPLE - 1), min_size=1, max_size=4)),
    min_size=1,
    max_size=4,
)


def with_validation(data: Data) -> Data:
    """Everybody's first example again, as validation."""
    each = data.take(range(0, len(data), 3))
    part = Data((each.examples[0] + 1, each.examples[1]), ids=each.ids)
    return Data(data.examples, data.ids, validation=part)


@pytest.mark.parametrize("how", TRAININGS)
@settings(max_examples=6, suppress_health_check=list(HealthCheck))
@given(life=LIVES)
def test_any_life_is_that_of_a_training_on_who_is_there(
    how: str, life: list[tuple[bool, set[int]]]
) -> None:
    inside = set(range(PEOPLE - 4))
    ensemble = make(train=TRAININGS[how])
    ensemble.learn(with_validation(make_data(sorted(inside))))
    for learns, people in life:
        names = [f"user-{i}" for i in sorted(people & inside)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if learns:
                inside |= people
                ensemble.learn(with_validation(make_data(sorted(inside))), readmit=True)
            elif names and len(inside - people) > 4:
                ensemble.forget(names, with_validation(make_data(sorted(inside))))
                inside -= people
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        released = hash_release(ensemble.release())
    fresh = train_fresh(with_validation(make_data(sorted(inside))), train=TRAININGS[how])
    assert released == fresh
    assert len(ensemble) == 3 * len(inside)


def test_the_order_and_kind_of_data_do_not_matter_but_their_content_does() -> None:
    data, ensemble = make_data(), make()
    ensemble.learn(data)
    expected = hash_release(ensemble.release())
    order = torch.randperm(len(data)).tolist()
    assert train_fresh(data.take(order)) == expected
    other = make()
    other.learn(data.take(order + order[:5]))  # an example twice is one
    assert hash_release(other.release()) == expected
    assert len(other) == len(data)
    changed = Data((data.examples[0] + 1e-6, data.examples[1]), ids=data.ids)
    with pytest.raises(InputError, match=r"data lack \d+ examples .* or have them with other"):
        ensemble.forget(["user-3"], changed)
    with pytest.raises(InputError, match="data lack"):
        ensemble.learn(Data((torch.ones(2, 6), torch.ones(2).long()), ids=["x", "y"]))
    assert ensemble.holds(["user-3", "x"]) == ["user-3"]


@pytest.mark.parametrize("with_them", [True, False])
def test_a_request_reads_data_with_or_without_them(with_them: bool) -> None:
    data, ensemble = make_data(), make()
    ensemble.learn(data)
    before = ensemble.release()
    people = ["user-3", "user-5"]
    assert 0 < ensemble.cost(people) < 1
    release = ensemble.forget(people, data if with_them else data.without(people))
    assert hash_release(release) == train_fresh(data.without(people))
    assert release.certificate.forget.samples == 6
    assert release.certificate.forget.count == 2
    assert ensemble.holds([*people, "user-4"]) == ["user-4"]
    assert ensemble.forgot([*people, "user-4"]) == people
    shown = release.model(data.examples[0])
    assert shown.shape == (len(data), 3)
    assert not torch.equal(shown, before.model(data.examples[0]))


def test_examples_of_several_people_and_of_nobody() -> None:
    data = make_data()
    ids = [("user-1", "user-2") if i % 5 == 0 else (None if i % 7 == 0 else owner)
           for i, owner in enumerate(data.ids)]  # fmt: skip
    mixed = Data(data.examples, ids=ids)
    ensemble = make()
    ensemble.learn(mixed)
    release = ensemble.forget(["user-2"], mixed)
    left = mixed.without(["user-2"])
    assert hash_release(release) == train_fresh(left)
    assert release.certificate.forget.samples == len(mixed) - len(left)
    assert len(ensemble) == len(left)


def tokens(length: int, seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    return {"ids": torch.randint(0, 9, (length,), generator=draw), "label": seed % 2, "text": "x"}


def pad(examples: list[dict[str, Any]]) -> dict[str, Any]:
    rows = nn.utils.rnn.pad_sequence([one["ids"] for one in examples], batch_first=True)
    return {"ids": rows, "label": torch.tensor([one["label"] for one in examples])}


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor, label: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(self.table(ids).mean(1))


def train_bag(model: nn.Module, examples: Any, seed: int, collate: Any) -> None:
    loader = torch.utils.data.DataLoader(
        examples, 4, shuffle=True, collate_fn=collate, generator=torch.Generator().manual_seed(seed)
    )
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    for batch in loader:
        optimizer.zero_grad()
        cross_entropy(model(**batch), batch["label"]).backward()
        optimizer.step()


@pytest.mark.parametrize("kept", [False, True])
def test_dictionaries_of_several_lengths_with_a_collate_function(kept: bool) -> None:
    examples = [tokens(2 + i % 5, i) for i in range(40)]
    data = Data(examples, ids=[f"u{i % 10}" for i in range(40)], collate=pad)
    given = {"build": Bag, "train": train_bag, "keep_examples": kept}
    ensemble = make(**given)
    ensemble.learn(data)
    release = ensemble.forget(["u3"], data)
    assert hash_release(release) == train_fresh(data.without(["u3"]), **given)
    with pytest.raises(InputError, match="the source of collate changed"):
        ensemble.forget(["u4"], Data(examples, ids=data.ids, collate=lambda rows: pad(rows[::-1])))


def test_a_state_that_keeps_examples_needs_no_data(tmp_path: Path) -> None:
    data = make_data()
    ensemble = make(tmp_path / "state", keep_examples=True)
    ensemble.learn(data.take(range(30)))
    ensemble.learn(data.take(range(30, 48)))
    again = make(tmp_path / "state", keep_examples=True)
    assert hash_release(again.forget(["user-3"])) == train_fresh(data.without(["user-3"]))
    assert again.replay(data) == []
    with pytest.raises(InputError, match="keep_examples is False; it must be True, as in"):
        make(tmp_path / "state")
    plain = make(tmp_path / "plain")
    plain.learn(data)
    with pytest.raises(InputError, match="data is missing: examples of the touched shards"):
        plain.forget(["user-3"])
    assert plain.holds(["user-3"]) == ["user-3"]


def test_workers_of_other_processes_make_the_same_bits(tmp_path: Path) -> None:
    data = make_data()
    ensemble = make(tmp_path / "state", workers=2)
    ensemble.learn(data)
    assert hash_release(ensemble.release()) == train_fresh(data)
    local = make(workers=2, build=lambda: build())
    with pytest.raises(InputError, match="workers is 2; it must be 1 unless build and train can"):
        local.learn(data)


@pytest.mark.slow
def test_tasks_of_ray_make_the_same_bits(tmp_path: Path) -> None:
    import ray

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
        try:
            ensemble = make(tmp_path / "state", ray=True)
            ensemble.learn(make_data())
            released = hash_release(ensemble.release())
        finally:
            ray.shutdown()
    assert released == train_fresh(make_data())


def test_releases_form_a_chain_that_verifies_and_replays(tmp_path: Path) -> None:
    data, state = make_data(), tmp_path / "state"
    make(state).learn(data)
    make(state).release().save(tmp_path / "one")
    ensemble = make(state)
    ensemble.forget(["user-3"], data).save(tmp_path / "two")
    for name, parent in (("one", None), ("two", tmp_path / "one" / "certificate.json")):
        found = verify(tmp_path / name, parent=parent)
        assert found.holds, found.problems
    certificate = verify(tmp_path / "two").certificate
    assert certificate.epsilon == certificate.delta == 0
    touched = certificate.sharding.trained_from
    assert sorted(touched)[:2] == [0, 0]
    assert max(touched) >= 1
    retained = data.without(["user-3"])
    assert ensemble.replay(data, run=tmp_path / "two") == []
    assert make().replay(retained, run=tmp_path / "two") == []
    *differ, wrong = make().replay(make_data(range(8)), run=tmp_path / "two")
    assert "the data are of 8 people" in wrong
    assert len(differ) == 3
    model = load_model(tmp_path / "two", build)
    assert torch.equal(model(data.examples[0]), ensemble.release().model(data.examples[0]))


def test_a_release_that_was_not_saved_is_made_again(tmp_path: Path) -> None:
    data, ensemble = make_data(), make(tmp_path / "state")
    ensemble.learn(data)
    ensemble.forget(["user-3"], data)  # and never saved
    with pytest.warns(UserWarning, match="1 people of an earlier request are named in no cert"):
        ensemble.forget(["user-5"], data)
    with pytest.warns(UserWarning, match="already forgotten: 2 of 2"):
        release = make(tmp_path / "state").forget(["user-3", "user-5"])  # nothing to train
    assert release.certificate.forget.samples == 6
    release.save(tmp_path / "run")
    with pytest.warns(UserWarning, match="already forgotten"):
        again = ensemble.forget(["user-3"])
    assert again.certificate.parent == release.certificate.sha256
    assert again.certificate.forget.samples == 0


def test_what_decides_is_not_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, state, rate = make_data(), tmp_path / "state", 0.1

    def own(model: nn.Module, examples: Any, seed: int) -> None:
        Training(epochs=1, learning_rate=rate)(model, examples, seed)

    make(state, train=own).learn(data)
    rate = 0.2
    for options, what in (
        ({"train": own}, "the source of train changed"),
        ({"train": own, "version": "2"}, "the source of train and version"),
        ({"train": own, "build": lambda: nn.Linear(6, 3)}, "the source of build and"),
    ):
        changed = make(state, **options)
        for call in (changed.release, lambda c=changed: c.forget(["user-3"], data)):
            with pytest.raises(InputError, match=f"{what}.* all 3 constituents would be trained"):
                call()
    assert changed.holds(["user-3"]) == ["user-3"]
    upgraded = make(state, train=own, upgrade=True)
    with pytest.raises(InputError, match="it trains everything again"):
        upgraded.release()
    release = upgraded.forget(["user-3"], data)
    assert hash_release(release) == train_fresh(data.without(["user-3"]), train=own)
    monkeypatch.setattr("expunge.exact.shards.__version__", "9.9")
    with pytest.raises(InputError, match=r"expunge \('0.1.0', now '9.9'\) changed"):
        make(state, train=own).forget(["user-4"], data)
    for name, value in (("seed", "another"), ("shards", 4), ("slices", 3)):
        with pytest.raises(InputError, match=f"{name} is .* as in"):
            make(state, **{name: value})


def test_slips_are_named_before_anything_is_trained() -> None:
    data, ensemble = make_data(), make()
    with pytest.raises(InputError, match="nothing was learned yet"):
        ensemble.release()
    with pytest.raises(InputError, match=r"it must be an expunge\.Data"):
        ensemble.learn(data.examples)
    ensemble.learn(data)
    for people, what in (
        ([], "forget is empty"),
        (["User-3"], "'User-3', who is not in the data; did you mean 'user-3'"),
        (["user-3", "x", "y"], r"'x', who is not in the data \(2 such names in all\)"),
        (["user-3", "user-3"], "'user-3' twice"),
        ("user-3", "a list of names, not one text"),
    ):
        with pytest.raises(InputError, match=what):
            ensemble.forget(people, data)
    ensemble.forget(["user-3"], data)
    with pytest.raises(InputError, match="1 of these people were forgotten before, such as"):
        ensemble.learn(data)
    assert ensemble.learn(data, readmit=True) == 3
    assert ensemble.forgot(["user-3"]) == []
    with pytest.raises(UnlearningError, match="there would be nothing to release"):
        ensemble.forget(list(data.people), data)

    class Moving:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randn(2)

    with pytest.raises(InputError, match="what is drawn at random"):
        make().learn(Data(Moving(), ids=list("abcd")))
    with pytest.raises(InputError, match="an example has a object; it must be made of tensors"):
        make().learn(Data([(object(), 1)] * 3, ids=list("abc")))
    for options, what in (({"seed": " "}, "seed is"), ({"shards": 0}, "shards is 0"),
                        ({"workers": 0}, "workers is 0"), ({"combination": "votes"}, "logits, "),
                        ({"train": lambda model: None}, "train takes")):  # fmt: skip
        with pytest.raises(InputError, match=what):
            make(**options)


def test_what_cannot_be_trained_is_not_learned(tmp_path: Path) -> None:
    data, ensemble = make_data(range(8)), make(tmp_path / "state")
    ensemble.learn(data)
    expected = hash_release(ensemble.release())
    wrong = Data((torch.randn(24, 6), torch.full((24,), 99)), ids=["new"] * 24)
    both = Data(tuple(torch.cat(pair) for pair in zip(data.examples, wrong.examples, strict=True)),
                ids=[*data.ids, *wrong.ids])  # fmt: skip
    with pytest.raises(IndexError, match="out of bounds"):
        ensemble.learn(both)
    assert ensemble.holds(["new"]) == []
    assert hash_release(ensemble.release()) == expected
    diverging = make(tmp_path / "other", train=Training(epochs=9, learning_rate=1e30))
    with pytest.raises(UnlearningError, match=r"diverged|not finite"):
        diverging.learn(data)
    make(tmp_path / "other").learn(data)  # nothing is left of it, not even its source


def test_the_shards_of_a_seed_are_spread_and_the_cost_is_the_theorys() -> None:
    data = Data((torch.randn(2000, 6), torch.zeros(2000).long()), ids=range(2000))
    ensemble = Shards(build, lambda model, examples: None, seed="s", shards=8, slices=4)
    ensemble.learn(data)
    assert min(ensemble.release().certificate.sharding.samples) > 180
    each = [ensemble.cost([name]) for name in range(100)]
    assert sum(each) / 100 == pytest.approx(9 / 96, rel=0.15)  # (2R + 1)/(3RS)


def test_constituents_start_each_on_its_own_and_share_what_is_frozen() -> None:
    """Networks that start alike err alike: eight of MNIST lost six points to it."""

    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
        made[0].requires_grad_(False)
        return made

    ensemble = make(build=build, train=lambda model, examples, seed: None)
    ensemble.learn(make_data())
    release = ensemble.release()
    drawn = [release.tensors[f"constituents.{k}.2.weight"] for k in range(3)]
    assert not any(torch.equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert not any(".0.weight" in name or "running" in name for name in release.tensors)
    inputs = torch.randn(4, 6)
    each = [release.model.load(k).eval()(inputs) for k in range(3)]
    torch.testing.assert_close(release.model(inputs), torch.stack(each).mean(0))
