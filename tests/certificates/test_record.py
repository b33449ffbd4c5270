"""People, records and sources: round trips, golden values, and refusals."""

import functools
import hashlib
import json
import math
import unicodedata

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from expunge.certificates.people import commit, find_members, opens
from expunge.certificates.record import Record, Sharding, Trace, TrainingRun
from expunge.certificates.sources import hash_source, read_source
from expunge.data.people import read_people
from expunge.errors import CertificateError, InputError
from expunge.recipes import GradientClipping
from tests.helpers.sample_releases import (
    NOISY,
    SALT,
    make_linear,
    make_noisy,
    make_record,
    make_shards,
    make_tensors,
)


# --- people
def test_commitment_golden() -> None:
    found = commit(["alice", "bob"], 2, salt="00" * 32)
    assert found.root == "7fea5fce1bff3e05345e32db54887ed7c1d97eea95baec0585fe45dc08183451"
    assert (found.count, found.samples) == (2, 2)


def test_commitment_is_the_documented_formula() -> None:
    salt = bytes.fromhex(SALT)
    leaves = sorted(hashlib.sha256(b"expunge/id\0" + salt + i).digest() for i in (b"a", b"b", b"9"))
    header = b"expunge/ids\0" + salt + (3).to_bytes(8, "little")
    found = commit(["b", 9, "a"], 3, salt=SALT, leaves=True)
    assert found.root == hashlib.sha256(header + b"".join(leaves)).hexdigest()
    assert found.leaves == tuple(leaf.hex() for leaf in leaves)


def is_visible(name: str) -> bool:
    try:
        return bool(read_people([name]))
    except InputError:
        return False


@given(
    st.lists(st.text().filter(is_visible), unique_by=lambda x: unicodedata.normalize("NFC", x)),
    st.randoms(),
)
def test_commitment_ignores_order_and_opens_only_for_its_set(names, random) -> None:
    commitment = commit(names, len(names), leaves=True)
    shuffled = list(names)
    random.shuffle(shuffled)
    other = "another one, which is not in the list"
    assert opens(commitment, shuffled)
    assert not opens(commitment, [*names, other])
    assert not names or not opens(commitment, names[1:])
    assert find_members(commitment, [other, *names]) == list(read_people(names))


def test_numbers_and_normal_forms_are_one_person() -> None:
    assert commit(np.arange(3), 3, salt=SALT) == commit(["0", "1", "2"], 3, salt=SALT)
    assert commit(["Zo\u00eb", "Zoe\u0308"], 2).count == 1


def test_what_is_withheld_cannot_be_opened() -> None:
    whole = commit(["a"], 1, leaves=True)
    assert whole.root != commit(["a"], 1).root, "the salt hides the set"
    with pytest.raises(InputError, match="salt is withheld"):
        opens(whole.model_copy(update={"salt": None}), ["a"])
    with pytest.raises(InputError, match="leaves are not in this commitment"):
        find_members(commit(["a"], 1), ["a"])


# --- records
def list_records() -> dict[str, Record]:
    tensors = make_tensors()
    noisy = {name: make_noisy(tensors, name) for name in NOISY}
    exact = {"retraining": make_record(tensors), "linear": make_linear(tensors)}
    return noisy | exact | {"shards": make_shards()[1]}


@pytest.mark.parametrize("name", list_records())
def test_record_round_trip(name, tmp_path) -> None:
    record = list_records()[name]
    record.save(tmp_path / "record.json")
    found = Record.load(tmp_path / "record.json")
    assert found == record
    assert found.sha256 == record.sha256
    assert (tmp_path / "record.json").stat().st_mode & 0o077 == 0, "for its owner alone"


def test_infinity_large_seeds_and_arrays_survive() -> None:
    recipe = GradientClipping(
        start_clip=1.0, grad_clip=math.inf, learning_rate=0.1, weight_decay=0.0, steps=1,
        noise_std=1.0, start_noise_std=2.0,
    )  # fmt: skip
    options = {"betas": (0.9, 0.999), "clip": np.float32(0.5), "big": 2**60}
    record = make_record(
        make_tensors(), recipe=recipe, seed=2**60 + 1,
        training=TrainingRun(function="expunge.Training", options=options, examples=1),
    )  # fmt: skip
    found = Record.from_bytes(record.to_bytes())
    assert found == record
    assert (found.seed, found.recipe.grad_clip) == (str(2**60 + 1), math.inf)
    assert found.training.options == {"betas": [0.9, 0.999], "clip": 0.5, "big": str(2**60)}


def test_every_field_is_bound_by_the_digest() -> None:
    record = make_record(make_tensors())
    changed = {
        "seed": 1, "parameters": 16, "unchanged": ("w",), "created": "2026-11-15T22:00:01+00:00",
        "nonce": "7" * 64, "salt": "8" * 64, "parent": "9" * 64, "trace": Trace(), "grid": 1.0,
        "earlier": (commit(["x"], 1),),
    }  # fmt: skip
    digests = {record.model_copy(update={name: value}).sha256 for name, value in changed.items()}
    assert len(digests | {record.sha256}) == len(changed) + 1


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda p: p.update(format="expunge-record-2"), "format"),
        (lambda p: p.pop("weights"), "weights: field required"),
        (lambda p: p.update(surprise=1), "surprise: extra inputs"),
        (lambda p: p.update(parameters="15"), "parameters"),
        (lambda p: p["weights"].update(after="x"), "weights.after"),
        (lambda p: p.update(seed=1.5), "seed"),
        (lambda p: p["recipe"].update(steps=3), "recipe: retraining has no parameter steps"),
        (lambda p: p["recipe"].update(method="magic"), "recipe: method is 'magic'"),
        (lambda p: p["execution"].update(more=1), "execution.more"),
        (lambda p: p.update(grid=False), "grid"),
        (lambda p: p["execution"].update(rounding=-1), "execution: rounding is -1"),
        (lambda p: p["training"].update(function="\x1b[2Jgood"), "cannot be seen"),
    ],
)
def test_bad_records_are_named(change, sentence, tmp_path) -> None:
    plain = json.loads(make_record(make_tensors()).to_bytes())
    change(plain)
    (tmp_path / "record.json").write_bytes(rfc8785.dumps(plain))
    with pytest.raises(CertificateError, match=sentence) as caught:
        Record.load(tmp_path / "record.json")
    assert "\x1b" not in str(caught.value)


def test_a_key_that_stands_twice_is_refused() -> None:
    raw = make_record(make_tensors()).to_bytes()
    with pytest.raises(CertificateError, match="'parameters' twice"):
        Record.from_bytes(raw.replace(b"{", b'{"parameters":3,', 1))
    with pytest.raises(CertificateError, match="'after' twice"):
        Record.from_bytes(raw.replace(b'"weights":{', b'"weights":{"after":"' + b"0" * 64 + b'",'))


def test_columns_of_a_trace_are_as_long() -> None:
    with pytest.raises(ValidationError, match="as many entries"):
        Trace(learning_rate=(0.1,))
    with pytest.raises(ValidationError):
        Sharding(
            seed="s", combination="votes", samples=(-1,), hashes=(), trained_from=(), digest=""
        )


# --- sources

RATE = 0.1


def helper(x: float) -> float:
    return x * RATE


def train(model, examples, seed, epochs=3):
    return [helper(1.0) for _ in range(epochs)]


class Own:
    def __init__(self, rate: float, weight) -> None:
        self.rate, self.weight = rate, weight

    def __call__(self, model, examples, seed):
        return self.rate


def test_a_source_is_followed_into_its_own_module(monkeypatch) -> None:
    text = read_source(train)
    assert "epochs=3" in text
    assert "return x * RATE" in text
    assert "RATE = 0.1" in text
    before = hash_source(train, SALT)
    assert before == hash_source(train, SALT) != hash_source(train, "00" * 32)
    monkeypatch.setattr(f"{__name__}.RATE", 0.2, raising=False)
    monkeypatch.setitem(train.__globals__, "RATE", 0.2)
    assert hash_source(train, SALT) != before


def test_values_that_are_captured_count() -> None:
    def make(n):
        return lambda model, examples, seed: n

    sources = {
        read_source(given)
        for given in (
            make(1), make(2), functools.partial(train, epochs=4),
            functools.partial(train, epochs=5),
            Own(0.1, None), Own(0.2, None), Own(0.1, np.ones(2)), Own(0.1, np.zeros(2)),
            Own(0.1, None).__call__,
        )
    }  # fmt: skip
    assert len(sources) == 9
    assert read_source(make(1)) == read_source(make(1))
    assert read_source(Own(0.1, np.ones(2))) == read_source(Own(0.1, np.ones(2)))


def test_installed_code_is_named_and_weights_of_a_loss_count() -> None:
    import torch

    loss = torch.nn.CrossEntropyLoss
    assert read_source(torch.nn.functional.cross_entropy) == "torch.nn.functional.cross_entropy"
    assert "def " not in read_source(loss())
    weighted = [hash_source(loss(weight=torch.tensor(w)), SALT) for w in ([1.0, 2.0], [2.0, 1.0])]
    assert len({hash_source(loss(), SALT), *weighted}) == 3


def test_code_without_a_source_has_a_text() -> None:
    space: dict = {}
    exec("def build():\n    return 1", space)
    other: dict = {}
    exec("def build():\n    return 1 + len('a')", other)
    assert read_source(space["build"]) != read_source(other["build"])
    assert read_source(max) == "builtins.max"


def test_an_attribute_is_not_a_global() -> None:
    """A loop variable ``step`` of a notebook is not what ``optimizer.step()`` names."""
    space = {"__name__": "__main__", "step": 1}
    exec("def train(optimizer):\n    optimizer.step()", space)
    one = read_source(space["train"])
    space["step"] = 2
    assert read_source(space["train"]) == one


def test_what_a_function_writes_to_is_not_its_source() -> None:
    """A counter, a list of losses: they differ from call to call."""
    calls, losses, history = 0, [], {"loss": []}

    def own(model, examples, seed):
        nonlocal calls
        calls += 1
        losses.append(calls)
        history["loss"].append(calls)

    before = read_source(own)
    own(None, None, 0)
    assert read_source(own) == before
    assert calls == 1
