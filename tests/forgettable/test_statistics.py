"""Exact statistics: what is forgotten was never there, bit for bit."""

import math
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from expunge.certificates.record import RunRecord
from expunge.errors import InputError, UnlearningError
from expunge.forgettable import ridge
from expunge.forgettable.features import Features
from expunge.forgettable.memory import Targets
from expunge.forgettable.ridge import GRID, choose_regularisation, solve_ridge
from expunge.forgettable.statistics import StatisticsHead
from expunge.forgettable.sums import Sums, add_rows, check_room

KEY = bytes(32)


def make_data(rows: int = 120, width: int = 6, classes: int = 4, seed: int = 0):
    rng = np.random.default_rng(seed)
    y = np.arange(rows) % classes
    x = rng.normal(size=(rows, width))
    x[np.arange(rows), y % width] += 2
    return x, y, [f"user-{i}" for i in range(rows)]


def make_head(state: Path | None = None, **given) -> StatisticsHead:
    return StatisticsHead(
        Features(bits=6, lift=3, seed="s"), **({"classes": 4} | given), state=state, key=KEY
    )


def read_bytes(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "forgotten"
    }


def test_forgetting_is_never_having_learned(tmp_path: Path) -> None:
    x, y, ids = make_data()
    forgot, never = make_head(tmp_path / "a"), make_head(tmp_path / "b")
    forgot.learn((x, y), ids)
    forgot.release()
    first = forgot.forget(ids[:5])
    last = forgot.forget(ids[20:30])
    kept = [i for i in range(120) if i >= 30 or 5 <= i < 20]
    never.learn((x[kept], y[kept]), [ids[i] for i in kept])
    run = never.release()
    assert forgot.digest() == never.digest()
    assert torch.equal(last.model.weight, run.model.weight)
    assert not torch.equal(first.model.weight, run.model.weight)
    assert last.record.weights_after == run.record.weights_after
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")
    assert not list((tmp_path / "a/journal").iterdir())
    assert forgot.add_up().digest() == forgot.digest()


def test_the_model_is_ridge_regression() -> None:
    x, y, ids = make_data()
    head = make_head(regularisation=1e-3)
    head.learn((x, y), ids)
    run = head.release()
    phi = head.features.integers.expand(head.features.compute(x)).astype(float)
    a = phi / head.features.integers.unit(6)
    expected = np.linalg.solve(a.T @ a + 120 * 1e-3 * np.eye(a.shape[1]), a.T @ np.eye(4)[y])
    assert np.allclose(run.model.weight.numpy(), expected, rtol=1e-9, atol=1e-12)
    scores = run.model(torch.from_numpy(x))
    assert np.allclose(scores.numpy(), a @ expected, atol=1e-5)
    assert (scores.argmax(1).numpy() == y).mean() > 0.7


@st.composite
def lives(draw):
    steps = draw(
        st.lists(
            st.tuples(st.booleans(), st.lists(st.integers(0, 11), min_size=1, max_size=5)),
            min_size=1,
            max_size=8,
        )
    )
    return steps, draw(st.booleans())


X, Y, IDS = make_data(rows=24, width=4, classes=3)
PEOPLE = [f"p{i % 12}" for i in range(24)]


def play(steps) -> tuple[StatisticsHead, set[int]]:
    """A life: learn some rows, forget some people, over and over; and who remains."""
    head = StatisticsHead(Features(bits=4), classes=3, key=KEY)
    held: set[int] = set()
    for learning, picked in steps:
        if learning:
            rows = [*picked, *[p + 12 for p in picked[::2]]]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "forgotten before, and learned again")
                head.learn((X[rows], Y[rows]), [PEOPLE[i] for i in rows])
            held |= set(rows)
        else:
            people = {f"p{i}" for i in picked} & {PEOPLE[i] for i in held}
            left = {i for i in held if PEOPLE[i] not in people}
            if people and left:
                head.forget(sorted(people))
                held = left
    return head, held


def check_life(life) -> None:
    head, held = play(life[0])
    fresh = StatisticsHead(Features(bits=4), classes=3, key=KEY)
    if not held:
        return
    rows = sorted(held, reverse=life[1])
    fresh.learn((X[rows], Y[rows]), [PEOPLE[i] for i in rows])
    assert head.digest() == fresh.digest()
    assert len(head) == len(held)
    assert torch.equal(head.release().model.weight, fresh.release().model.weight)


@settings(max_examples=150)
@given(lives())
def test_any_life_ends_as_the_retained_set_alone(life) -> None:
    check_life(life)


@pytest.mark.slow
@settings(max_examples=10_000)
@given(lives())
def test_ten_thousand_lives(life) -> None:
    check_life(life)


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_sums_do_not_depend_on_blocks(bits: int) -> None:
    largest = 2 ** (bits - 1) - 1
    rng = np.random.default_rng(0)
    phi = rng.integers(-largest, largest + 1, (700, 5)).astype(np.float32)
    phi[:, 0] = largest
    t = rng.integers(-1000, 1001, (700, 2))
    whole = add_rows(phi, t, largest)
    exact = phi.astype(object).astype(int)
    assert whole.gram.tolist() == (exact.T.astype(object) @ exact.astype(object)).tolist()
    assert whole.cross.tolist() == (exact.T.astype(object) @ t.astype(object)).tolist()
    assert whole.square == int(np.square(t).sum())
    for block in (1, 3, 100, 699):
        assert add_rows(phi, t, largest, block).digest() == whole.digest()
    order = rng.permutation(700)
    parts = add_rows(phi[order[:301]], t[order[:301]], largest)
    assert (parts + add_rows(phi[order[301:]], t[order[301:]], largest)).digest() == whole.digest()


def test_a_block_that_is_too_long_would_not_be_exact() -> None:
    """The limit of 2^24 matters: at 12 bits float32 sums of 1,040 rows are wrong."""
    phi = np.full((1040, 2), 2047, np.float32)
    phi[:, 1] = 2046
    assert (phi.T @ phi)[0, 1] != 1040 * 2047 * 2046
    assert add_rows(phi, np.ones((1040, 1), int), 2047).gram[0, 1] == 1040 * 2047 * 2046


@pytest.mark.parametrize("threads", [pytest.param("1", marks=pytest.mark.slow), "2"])
def test_other_processes_and_thread_counts_give_this_digest(threads: str) -> None:
    code = (
        "import numpy as np\n"
        "from expunge import Features, StatisticsHead\n"
        "rng = np.random.default_rng(0); y = np.arange(3000) % 4\n"
        "x = rng.normal(size=(3000, 40)); ids = [f'user-{i}' for i in range(3000)]\n"
        "h = StatisticsHead(Features(lift=30, seed='t'), classes=4, key=bytes(32))\n"
        "h.learn((x, y), ids); h.forget(ids[:7])\n"
        "print(h.digest(), h._memory.add_all(block=17).digest(), h.release().record.weights_after)"
    )
    environment = os.environ | {"OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
    told = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    ).stdout.split()
    x, y = np.random.default_rng(0).normal(size=(3000, 40)), np.arange(3000) % 4
    ids = [f"user-{i}" for i in range(3000)]
    head = StatisticsHead(Features(lift=30, seed="t"), classes=4, key=KEY)
    head.learn((x[7:], y[7:]), ids[7:])
    weights = head.release().record.weights_after
    assert told == [head.digest(), head.digest(), weights]


def test_bytes_of_sums_round_trip() -> None:
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    sums = head._memory.sums
    again = Sums.from_bytes(sums.to_bytes())
    assert again.digest() == sums.digest()
    assert np.array_equal(again.gram, sums.gram)


def test_overflow_is_refused_before_it_happens() -> None:
    check_room(2**62 // 127**2, 127, 1)
    with pytest.raises(InputError, match="rows is"):
        check_room(2**62 // 127**2 + 1, 127, 1)
    with pytest.raises(InputError, match="rows is"):
        check_room(2**40, 2047, 2**20)


def test_unknown_identifiers_are_refused_by_name(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = make_head(tmp_path / "a")
    head.learn((x, y), ids)
    before, digest = read_bytes(tmp_path / "a"), head.digest()
    with pytest.raises(InputError, match="'nobody', which was never learned"):
        head.forget([ids[0], "nobody"])
    with pytest.raises(InputError, match="ids is empty"):
        head.forget([])
    assert read_bytes(tmp_path / "a") == before
    assert head.digest() == digest


def test_forgetting_twice_is_said(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = make_head(tmp_path / "a")
    head.learn((x, y), ids)
    first = head.forget(ids[:3])
    head = make_head(tmp_path / "a")
    with pytest.warns(UserWarning, match="already forgotten: 2 of 3"):
        run = head.forget([*ids[1:3], ids[10]])
    assert len(head) == 116
    with pytest.warns(UserWarning, match="already forgotten: 1 of 1"):
        again = head.forget(ids[:1])
    assert torch.equal(run.model.weight, again.model.weight)
    assert first.forgotten == frozenset(ids[:3])


def test_an_identifier_stands_on_many_rows_and_gains_more() -> None:
    x, y, _ = make_data()
    head, never = make_head(), make_head()
    head.learn((x[:60], y[:60]), ["ann"] * 20 + ["bob"] * 40)
    head.learn((x[60:], y[60:]), ["bob"] * 50 + ["ann"] * 10)
    head.forget(["ann"])
    never.learn((x[20:110], y[20:110]), ["bob"] * 90)
    assert head.digest() == never.digest()


def test_identifiers_are_text_in_one_form() -> None:
    x, y, _ = make_data(8)
    head = make_head()
    head.learn((x, y), ["e\u0301", 7, *"abcdef"])
    head.forget(["\u00e9", "7"])
    assert len(head) == 6


def test_a_class_may_vanish() -> None:
    x, y, ids = make_data()
    head, never = make_head(), make_head()
    head.learn((x, y), ids)
    run = head.forget([name for name, label in zip(ids, y, strict=True) if label == 2])
    never.learn((x[y != 2], y[y != 2]), [n for n, label in zip(ids, y, strict=True) if label != 2])
    assert torch.equal(run.model.weight, never.release().model.weight)
    assert not run.model.weight[:, 2].any()


def test_nobody_left() -> None:
    x, y, ids = make_data(8)
    head = make_head()
    head.learn((x, y), ids)
    digest = head.digest()
    with pytest.raises(UnlearningError, match="no example is left"):
        head.forget(ids)
    assert head.digest() == digest


def test_generalised_cross_validation_is_leave_one_out_on_average() -> None:
    """Against the definition: GCV from the hat matrix of the rows themselves."""
    x, y, ids = make_data(60)
    head = make_head()
    head.learn((x, y), ids)
    unit = head._memory.unit
    a = head.features.integers.expand(head.features.compute(x)).astype(float) / unit
    t = np.eye(4)[y]
    scores = []
    for value in GRID:
        hat = a @ np.linalg.solve(a.T @ a + 60 * value * np.eye(a.shape[1]), a.T)
        rss = np.square(t - hat @ t).sum()
        scores.append(rss / 60 / (1 - np.trace(hat) / 60) ** 2)
    chosen = choose_regularisation(head._memory.sums, GRID, unit)
    assert chosen == GRID[int(np.argmin(scores))]
    assert chosen not in (GRID[0], GRID[-1])
    tuned = make_head(regularisation=GRID)
    tuned.learn((x, y), ids)
    assert tuned.release().record.statistics.head["regularisation"] == chosen


def test_regression_on_scaled_integers() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = np.stack([x @ [1.0, -2, 0, 0, 1], x[:, 0]], axis=1)
    head = StatisticsHead(
        Features(bits=12), outputs=2, target_scale=1000.0, regularisation=1e-8, key=KEY
    )
    ids = list(range(200))
    head.learn((x, y), ids)
    run = head.forget(ids[:10])
    assert np.abs(run.model(torch.from_numpy(x)).numpy() - y).max() < 5e-3
    never = StatisticsHead(
        Features(bits=12), outputs=2, target_scale=1000.0, regularisation=1e-8, key=KEY
    )
    never.learn((x[10:], y[10:]), ids[10:])
    assert never.digest() == head.digest()


def test_learning_somebody_again_says_so_and_takes_the_name_off_the_list(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = make_head(tmp_path / "a")
    head.learn((x, y), ids)
    head.forget(ids[:2])
    with pytest.warns(UserWarning, match=rf"learned again now: 1 of the .* such as {ids[0]!r}"):
        assert make_head(tmp_path / "a").learn((x[:1], y[:1]), ids[:1]) == 1
    with pytest.warns(UserWarning, match="already forgotten: 1 of 2"):
        head.forget(ids[:2])
    with pytest.warns(UserWarning, match="learned again now: 2 of the identifiers"):
        assert head.learn((x[:2], y[:2]), ids[:2]) == 2
    assert not (tmp_path / "a/forgotten").exists()
    head.learn((x[:2], y[:2]), ids[:2])
    never = make_head()
    never.learn((x, y), ids)
    assert head.digest() == never.digest()


def test_a_dataset_is_read_in_pieces(monkeypatch) -> None:
    x, y, ids = make_data()
    pairs = TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
    whole, parts = make_head(), make_head()
    whole.learn((x, y), ids)
    monkeypatch.setattr("expunge.forgettable.released.PIECE", 17)
    assert parts.learn(pairs, ids) == len(ids)
    assert parts.digest() == whole.digest()
    with pytest.raises(InputError, match="a Dataset of such pairs"):
        parts.learn(TensorDataset(torch.zeros(3)), ["a", "b", "c"])


def test_save_and_open_again(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    head.forget(ids[:2])
    head.save(tmp_path / "s")
    again = make_head(tmp_path / "s")
    assert again.digest() == head.digest()
    assert torch.equal(again.release().model.weight, head.release().model.weight)
    with pytest.raises(InputError, match=r"features\.bits is 8; it must be 6"):
        StatisticsHead(Features(bits=8, lift=3, seed="s"), classes=4, state=tmp_path / "s")
    with pytest.raises(InputError, match=r"targets\.classes is 5; it must be 4"):
        make_head(tmp_path / "s", classes=5)


def test_two_processes_take_turns(tmp_path: Path) -> None:
    """A second head on the same folder sees what the first one wrote."""
    x, y, ids = make_data()
    one, two = make_head(tmp_path / "a"), make_head(tmp_path / "a")
    one.learn((x[:60], y[:60]), ids[:60])
    two.learn((x[60:], y[60:]), ids[60:])
    one.forget(ids[:30])
    two.forget(ids[90:])
    assert len(two) == 60
    assert two.add_up().digest() == two.digest()


@pytest.mark.parametrize(
    ("data", "ids", "words"),
    [
        ((np.zeros((2, 6)), [0, 4]), "ab", "targets is 4.*classes 0 … 3"),
        ((np.zeros((2, 6)), [0, -1]), "ab", "targets is -1"),
        ((np.zeros((2, 6)), [0.5, 1]), "ab", "targets is 0.5"),
        ((np.zeros((2, 5)), [0, 1]), "ab", "features is 5; it must be 6 wide"),
        ((np.full((2, 6), np.nan), [0, 1]), "ab", "not finite"),
        ((np.zeros((2, 6)), [0, 1]), "a", "ids is 1; it must be one identifier per example: 2"),
        ((np.zeros((2, 6)), [0, 1, 2]), "ab", "of one length"),
        ((np.zeros((2, 6)), [0, 1]), [True, "b"], "ids is True"),
    ],
)
def test_bad_input_writes_nothing(tmp_path: Path, data, ids, words: str) -> None:
    x, y, names = make_data()
    head = make_head(tmp_path / "a")
    head.learn((x, y), names)
    before = read_bytes(tmp_path / "a")
    with pytest.raises(InputError, match=words):
        head.learn(data, list(ids))
    assert read_bytes(tmp_path / "a") == before


@pytest.mark.parametrize("value", [0.0, -1.0, math.inf, math.nan, True, ()])
def test_bad_regularisation(value) -> None:
    with pytest.raises(InputError, match="regularisation"):
        make_head(regularisation=value)


@pytest.mark.parametrize("given", [{"classes": 1}, {"classes": None, "outputs": 0}])
def test_bad_targets(given) -> None:
    with pytest.raises(InputError, match="a whole number"):
        make_head(**given)
    with pytest.raises(InputError, match="at most 1048576 after scaling"):
        Targets(outputs=1, scale=1e6).encode([2.0])


def test_a_solution_that_is_not_one_is_refused(monkeypatch) -> None:
    sums = add_rows(np.eye(3, dtype=np.float32) * 100, np.ones((3, 1), int), 127)
    assert solve_ridge(sums, [1e-4], 30.0)[0].shape == (3, 1)
    real = ridge.linalg.cho_solve
    monkeypatch.setattr(ridge.linalg, "cho_solve", lambda *a, **k: real(*a, **k) * (1 + 1e-6))
    with pytest.raises(UnlearningError, match="residual"):
        solve_ridge(sums, [1e-4], 30.0)


def test_the_record_says_where_the_weights_come_from() -> None:
    x, y, ids = make_data()
    head = make_head()
    head.learn((x, y), ids)
    run = head.forget(ids[:3])
    told = run.record.statistics
    assert told is not None
    assert told.digest == head.digest()
    assert told.samples == 117
    assert told.features["evaluation"] == "by construction"
    assert told.features["bits"] == 6
    assert RunRecord.from_dict(run.record.to_dict()) == run.record


# One process that loads everything once and forks a child for each life that is killed.
LIVES = """
import os, random, signal, sys, time, warnings
import numpy as np
from expunge import Features, StatisticsHead

def live(folder):
    rng = np.random.default_rng(0)
    x, y, ids = rng.normal(size=(400, 30)), np.arange(400) % 4, [f"user-{i}" for i in range(400)]
    head = StatisticsHead(Features(), classes=4, state=folder, key=bytes(32))
    warnings.simplefilter("ignore")
    for at in range(0, 400, 40):
        head.learn((x[at:at + 40], y[at:at + 40]), ids[at:at + 40])
        if at:
            head.forget(ids[at - 5:at])
    return head

calm, killed, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
started = time.perf_counter()
live(calm)
span = time.perf_counter() - started
chance = random.Random(0)
for _ in range(kills):
    child = os.fork()
    if child == 0:
        live(killed)
        os._exit(0)
    time.sleep(chance.uniform(0, span))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
print(live(killed).digest() == live(calm).digest())
"""


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_kills_at_random_moments(tmp_path: Path, kills: int) -> None:
    """The same life, killed again and again, and lived once more: the undisturbed state."""
    folders = [str(tmp_path / "calm"), str(tmp_path / "killed")]
    told = subprocess.run(
        [sys.executable, "-c", LIVES, *folders, str(kills)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.strip() == "True"
    assert read_bytes(tmp_path / "killed") == read_bytes(tmp_path / "calm")


@pytest.mark.parametrize(
    "data",
    [
        None,
        5,
        (row for row in np.eye(2)),
        (None, [0, 1]),
        ((row for row in np.eye(2)), [0, 1]),
        (np.eye(2), [0, 1], [0, 1]),
        (np.array([["a"], ["b"]]), [0, 1]),
        (torch.eye(2).to_sparse(), [0, 1]),
        [(None, 0), (None, 1)],
    ],
)
def test_data_that_is_none(data: Any) -> None:
    head = StatisticsHead(Features(), classes=2)
    with pytest.raises(InputError):
        head.learn(data, ids=["a", "b"])
    assert len(head) == 0


@pytest.mark.parametrize("ids", [5, None])
def test_a_request_is_a_list(ids: Any) -> None:
    with pytest.raises(InputError, match="it must be a list of identifiers"):
        StatisticsHead(Features(), classes=2).forget(ids)
