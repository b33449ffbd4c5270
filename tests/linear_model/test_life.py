"""Learn, forget, learn again: what is left is what was never anything else."""

import json
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.datasets import load_iris
from sklearn.exceptions import NotFittedError
from sklearn.utils.estimator_checks import parametrize_with_checks

import expunge.states
from expunge.certificates.people import opens
from expunge.certificates.record import Record
from expunge.certificates.verification import verify
from expunge.errors import InputError, UnlearningError
from expunge.linear_model import LogisticRegression, Ridge, RidgeClassifier, load, replay
from tests.helpers.deaths import kill_at

MODELS = [Ridge, RidgeClassifier, LogisticRegression]
some = partial(settings, suppress_health_check=[HealthCheck.function_scoped_fixture])


@parametrize_with_checks([model() for model in MODELS])
def test_scikit_learns_own_checks(estimator, check) -> None:
    check(estimator)


def make_data(rows: int = 60, seed: int = 0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(rows, 3))
    y = np.array(["a", "b", "c"])[np.arange(rows) % 3]
    X[:, 0] += np.arange(rows) % 3
    return X, y, [f"user-{i}" for i in range(rows)]


def make_target(model: type, y: np.ndarray) -> np.ndarray:
    return np.char.count(y, "a") * 2.5 if model is Ridge else y


@pytest.fixture
def one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expunge.states.secrets, "token_bytes", bytes)


def read_contents(folder: Path) -> dict[str, bytes]:
    """What the manifest names, but for the last certificate."""
    files = json.loads((folder / "manifest.json").read_bytes())["files"]
    return {
        name: (folder / entry["file"]).read_bytes()
        for name, entry in files.items()
        if name != "certificate.json"
    }


@pytest.mark.parametrize("model", MODELS)
def test_forgetting_is_never_having_learned(model: type, tmp_path: Path, one_key: None) -> None:
    X, y, ids = make_data(2500)
    t = make_target(model, y)
    forgot = model(state=tmp_path / "a").fit(X, t, ids=ids)
    forgot.forget(ids[:5]).save(tmp_path / "r1")
    release = forgot.forget(ids[20:1600])
    release.save(tmp_path / "r2")
    kept = [i for i in range(2500) if i >= 1600 or 5 <= i < 20]
    never = model(state=tmp_path / "b").fit(X[kept], t[kept], ids=[ids[i] for i in kept])
    assert forgot.digest() == never.digest()
    assert np.array_equal(forgot.coef_, never.coef_)
    assert np.array_equal(forgot.intercept_, never.intercept_)
    assert read_contents(tmp_path / "a") == read_contents(tmp_path / "b")
    assert verify(tmp_path / "r2", parent=tmp_path / "r1").holds
    record = Record.load(tmp_path / "r2" / "record.json")
    assert opens(record.forget, ids[20:1600])
    assert (record.forget.samples, record.retained.samples, record.retained.count) == (
        1580, 915, 915,
    )  # fmt: skip
    assert replay(tmp_path / "r2", tmp_path / "a") == []
    assert replay(tmp_path / "r2", (X[kept], t[kept])) == []
    assert "rows" in replay(tmp_path / "r2", (X[kept[1:]], t[kept[1:]]))[0]
    predictor = load(tmp_path / "r2")
    assert np.array_equal(predictor.predict(X), forgot.predict(X))
    with pytest.raises(InputError, match="released"):
        predictor.forget(["user-7"])


PEOPLE = [f"p{i}" for i in range(6)]
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("learn"), st.lists(st.tuples(st.sampled_from(PEOPLE), st.integers(0, 9)),
                                             min_size=1, max_size=6)),
        st.tuples(st.just("forget"), st.sets(st.sampled_from(PEOPLE), min_size=1, max_size=3)),
        st.tuples(st.just("anonymous"), st.lists(st.integers(0, 9), min_size=1, max_size=3)),
    ),
    max_size=10,
)  # fmt: skip
ROWS = np.random.default_rng(0).normal(size=(10, 2))
LABELS = np.array(["x", "y"])[np.arange(10) % 2]


def live(model, actions) -> tuple[dict[tuple[str, int], int], list[int]]:
    """Do as the actions say; returns what must be there: (person, row) → how often, anonymous."""
    present: dict[tuple[str, int], int] = {}
    anonymous = list(range(4))
    model.partial_fit(ROWS[:4], LABELS[:4])
    for what, items in actions:
        if what == "learn":
            rows = [row for _, row in items]
            model.partial_fit(ROWS[rows], LABELS[rows], ids=[p for p, _ in items], readmit=True)
            for item in set(items):
                present[item] = max(present.get(item, 0), items.count(item))
        elif what == "anonymous":
            model.partial_fit(ROWS[items], LABELS[items])
            anonymous += items
        else:
            known = sorted({*model.holds(items), *model.forgot(items)})
            if known:
                model.forget(known)
            present = {k: n for k, n in present.items() if k[0] not in items}
    return present, anonymous


def learn_anew(present: dict[tuple[str, int], int], anonymous: list[int], **options):
    rows = [row for (_, row), n in sorted(present.items()) for _ in range(n)]
    ids = [person for (person, _), n in sorted(present.items()) for _ in range(n)]
    model = RidgeClassifier(**options)
    every = rows + anonymous
    return model.partial_fit(ROWS[every], LABELS[every], ids=ids + [None] * len(anonymous))


def compare_lives(actions) -> None:
    model = RidgeClassifier()
    present, anonymous = live(model, actions)
    other = learn_anew(present, anonymous)
    assert model.digest() == other.digest()
    assert np.array_equal(model.coef_, other.coef_)
    stores = model._open(), other._open()
    contents = [{n: bytes(s.state.read(n)) for n in s.state.names() if n != "key"} for s in stores]
    assert contents[0] == contents[1]
    assert model.holds(PEOPLE) == [p for p in PEOPLE if any(q == p for q, _ in present)]


@some(max_examples=100)
@given(ACTIONS)
def test_lives(one_key: None, actions) -> None:
    compare_lives(actions)


@pytest.mark.slow
@some(max_examples=10_000)
@given(ACTIONS)
def test_ten_thousand_lives(one_key: None, actions) -> None:
    compare_lives(actions)


@some(max_examples=10)
@given(ACTIONS)
def test_lives_on_disk(one_key: None, tmp_path_factory, actions) -> None:
    place = tmp_path_factory.mktemp("life")
    present, anonymous = live(RidgeClassifier(state=place / "a"), actions)
    learn_anew(present, anonymous, state=place / "b")
    assert read_contents(place / "a") == read_contents(place / "b")


def test_the_key_does_not_show() -> None:
    X, y, ids = make_data()
    one, two = (LogisticRegression().fit(X, y, ids=ids) for _ in range(2))
    assert one.identity != two.identity
    assert np.array_equal(one.coef_, two.coef_)


def test_rows_of_several_people() -> None:
    X, y, _ = make_data(4)
    ids = [("ann", "bob"), ("bob",), None, "cem"]
    model = Ridge().fit(X, make_target(Ridge, y), ids=ids)
    assert model.holds(["ann", "bob", "cem"]) == ["ann", "bob", "cem"]
    release = model.forget(["ann"])
    assert release.record.forget.samples == 1
    assert model.holds(["ann", "bob", "cem"]) == ["bob", "cem"]
    model.forget(["bob"])
    assert model.digest() == Ridge().fit(X[2:], make_target(Ridge, y)[2:]).digest()


def test_rows_that_are_there_are_not_doubled() -> None:
    X, y, ids = make_data()
    model = RidgeClassifier().fit(X, y, ids=ids)
    before = model.digest()
    assert model.partial_fit(X[:30], y[:30], ids=ids[:30]).digest() == before
    twice = RidgeClassifier().fit(np.tile(X, (2, 1)), np.tile(y, 2), ids=ids * 2)
    assert twice._open().sums.rows == 120  # rows of one call are all counted
    anonymous = RidgeClassifier().fit(X, y).partial_fit(X, y)
    assert anonymous.digest() == twice.digest()


def test_classes_go_with_their_last_row(tmp_path: Path) -> None:
    X, y, ids = make_data(9)
    only_c = [name for name, label in zip(ids, y, strict=True) if label == "c"]
    for model in (RidgeClassifier, LogisticRegression):
        plain, declared = model().fit(X, y, ids=ids), model(classes=["a", "b", "c", "z"])
        declared.fit(X, y, ids=ids)
        for one in (plain, declared):
            one.forget(only_c)
        assert plain.classes_.tolist() == ["a", "b"]
        assert declared.classes_.tolist() == ["a", "b", "c", "z"]
        assert set(declared.predict(X)) <= {"a", "b"}
        rest = [n for n, label in zip(ids, y, strict=True) if label == "b"]
        with pytest.raises(UnlearningError, match=r"they are forgotten.*two classes"):
            plain.forget(rest)
        assert plain.holds(rest) == []
        with pytest.raises(UnlearningError, match="two classes"):
            plain.release()
        plain.partial_fit(X, y, ids=[f"new-{i}" for i in range(9)])
        assert plain.release().certificate.epsilon == 0
    with pytest.raises(InputError, match="one of the classes"):
        RidgeClassifier(classes=["a", "b"]).fit(X, y)


def test_a_life_on_disk(tmp_path: Path) -> None:
    X, y, ids = make_data()
    model = RidgeClassifier(state=tmp_path / "state")
    with pytest.raises(NotFittedError):
        model.predict(X)
    model.partial_fit(X[:30], y[:30], ids=ids[:30])
    other = RidgeClassifier(state=tmp_path / "state")
    assert np.array_equal(other.predict(X), model.predict(X))
    other.partial_fit(X[30:], y[30:], ids=ids[30:])
    assert model.holds(["user-50"]) == ["user-50"]
    model.forget(["user-50"])
    assert other.coef_.tobytes() == model.coef_.tobytes()
    with pytest.raises(InputError, match="partial_fit adds"):
        RidgeClassifier(state=tmp_path / "state").fit(X, y)
    with pytest.raises(InputError, match="alpha"):
        RidgeClassifier(2.0, state=tmp_path / "state").predict(X)
    with pytest.raises(InputError, match="state"):
        Ridge(state=tmp_path / "state").predict(X)
    copied = load(model.save(tmp_path / "copy"))
    assert (copied.digest(), copied.identity) == (model.digest(), model.identity)
    assert copied.state != model.state
    assert clone(model).state is None
    assert clone(model).alpha == model.alpha
    again = pickle.loads(pickle.dumps(RidgeClassifier().fit(X, y, ids=ids)))
    assert again.holds(["user-3"]) == ["user-3"]


def test_the_same_request_twice(tmp_path: Path) -> None:
    X, y, ids = make_data()
    model = RidgeClassifier(state=tmp_path / "state").fit(X, y, ids=ids)
    model.forget(["user-1", "user-2"])  # the process dies before it is saved
    model = load(tmp_path / "state")
    assert model.forgot(["user-1", "user-3"]) == ["user-1"]
    release = model.forget(["user-1", "user-2"])
    assert release.record.forget.samples == 2
    release.save(tmp_path / "run")
    assert verify(tmp_path / "run", people=["user-1", "user-2"]).holds
    second = model.forget(["user-3"])
    second.save(tmp_path / "next")
    assert second.certificate.parent == release.certificate.sha256
    with pytest.raises(InputError, match="forgotten before"):
        model.partial_fit(X[:3], y[:3], ids=ids[:3])
    model.partial_fit(X[:3], y[:3], ids=ids[:3], readmit=True)
    assert model.holds(ids[:3]) == ids[:3]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m, X, y, i: m.forget([]), "empty"),
        (lambda m, X, y, i: m.forget(["user-1", "user-1"]), "twice"),
        (lambda m, X, y, i: m.forget(["nobody"]), "not in the data"),
        (lambda m, X, y, i: m.forget("user-1"), "a list of names"),
        (lambda m, X, y, i: m.partial_fit(X, y, ids=i[:3]), "one entry per row"),
        (lambda m, X, y, i: m.partial_fit(X[:, :2], y, ids=i), "features"),
        (lambda m, X, y, i: m.partial_fit(X * 1e9, y, ids=i), "column 0"),
        (lambda m, X, y, i: m.partial_fit(X, np.arange(60) % 3, ids=i), "labels before"),
        (lambda m, X, y, i: m.set_params(alpha=-1).predict(X), "alpha"),
        (lambda m, X, y, i: type(m)(alpha=[]).fit(X, y), "alpha"),
        (lambda m, X, y, i: type(m)().fit(X, ["a"] * 60), "only one class"),
    ],
)
def test_slips_are_refused_in_one_sentence(change, sentence: str) -> None:
    X, y, ids = make_data()
    model = RidgeClassifier().fit(X, y, ids=ids)
    before = model.digest()
    with pytest.raises(ValueError, match=sentence) as caught:
        change(model, X, y, ids)
    assert "\n" not in str(caught.value)
    assert model.digest() == before


def test_labels_of_every_kind() -> None:
    X, y, ids = make_data(6)
    for labels in (y == "a", np.char.count(y, "a"), y.astype(object), list(y), y):
        model = LogisticRegression().fit(X, labels, ids=ids)
        assert set(model.predict(X)) <= set(np.asarray(labels).tolist())
        assert model.classes_.tolist() == sorted(set(np.asarray(labels).tolist()))
        model.forget(["user-0"])


def test_columns_have_names(tmp_path: Path) -> None:
    import pandas

    X, y, ids = make_data()
    frame = pandas.DataFrame(X, columns=["age", "height", "weight"])
    model = RidgeClassifier(state=tmp_path / "state").fit(frame, y, ids=ids)
    assert model.feature_names_in_.tolist() == ["age", "height", "weight"]
    opened = load(tmp_path / "state")
    assert np.array_equal(opened.predict(frame), model.predict(frame))
    with pytest.raises(InputError, match="column 'height'"):
        model.partial_fit(frame * [1, 1e12, 1], y, ids=ids)


def test_memory_is_the_default_and_iris_is_learned() -> None:
    X, y = load_iris(return_X_y=True)
    for model in (RidgeClassifier([0.1, 1.0, 10.0]), LogisticRegression()):
        assert model.fit(X, y).score(X, y) > 0.8
        assert model.get_params()["state"] is None
        with pytest.raises(InputError, match="not in the data"):
            model.forget(["0"])


@pytest.mark.parametrize("command", ["forget", "learn"])
def test_killed_at_twenty_moments(command: str, tmp_path: Path) -> None:
    X, y, ids = make_data(1500)
    RidgeClassifier(state=tmp_path / "state").fit(X, y, ids=ids)
    without = [i for i in range(1500) if i not in (1, 2)]
    before = RidgeClassifier().fit(X, y, ids=ids)
    after = RidgeClassifier().fit(X[without], y[without], ids=[ids[i] for i in without])
    rows, new = np.arange(30.0).reshape(10, 3), [f"new-{i}" for i in range(10)]
    if command == "learn":
        after = RidgeClassifier().fit(X, y, ids=ids).partial_fit(rows, ["a"] * 10, ids=new)
    fates = set()
    for moment in range(1, 41, 2):
        place = tmp_path / str(moment)
        load(tmp_path / "state").save(place / "state")

        def work(place: Path = place) -> None:
            model = load(place / "state")
            if command == "forget":
                model.forget(["user-1", "user-2"]).save(place / "run")
            else:
                model.partial_fit(rows, ["a"] * 10, ids=new)

        died = kill_at(moment, work)
        model = load(place / "state")
        fates.add((died, model.digest() == after.digest()))
        assert model.digest() in (before.digest(), after.digest())
        assert model._open().add_again().digest() == model.digest()
        if command == "forget":
            model.forget(["user-1", "user-2"]).save(place / "again")
            assert verify(place / "again").holds
            assert model.digest() == after.digest()
    assert (True, False) in fates
