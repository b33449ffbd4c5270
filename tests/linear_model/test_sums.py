"""Whole numbers and their sums: exact, in any order."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expunge.errors import InputError
from expunge.linear_model.numbers import FixedPoint, RowScaled, read_numbers
from expunge.linear_model.sums import Sums, add_rows, check_room, encode_labels
from expunge.linear_model.system import carry, subtract_product, to_floats, to_whole

TABLE = FixedPoint()


def make_table(rows: int = 50, columns: int = 4, seed: int = 0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, columns)) * 10.0 ** np.linspace(-6, 6, columns)
    return TABLE.quantise(x, "X"), TABLE.quantise(rng.normal(size=(rows, 2)), "y")


def read_digits(digits: np.ndarray, exponent: int) -> list[Fraction]:
    flat = digits.reshape(len(digits), -1).T.tolist()
    return [sum(d * Fraction(2) ** (14 * m + exponent) for m, d in enumerate(row)) for row in flat]


def test_sums_of_a_table_are_exact() -> None:
    x, y = make_table()
    sums = add_rows(TABLE, x, y, None, block=7)
    z = [[Fraction(v) for v in row] for row in x.tolist()]
    t = [[Fraction(v) for v in row] for row in y.tolist()]
    n = range(len(z))
    gram = [sum(z[i][a] * z[i][b] for i in n) for a in range(4) for b in range(4)]
    cross = [sum(z[i][a] * t[i][b] for i in n) for a in range(4) for b in range(2)]
    assert read_digits(sums.gram, -88) == gram
    assert read_digits(sums.cross[:, :, 1:], -88) == cross
    assert read_digits(sums.cross[:5, :, 0], -44) == [sum(z[i][a] for i in n) for a in range(4)]
    assert read_digits(sums.square[:, 1:, 1:], -88)[3] == sum(t[i][1] ** 2 for i in n)


@given(st.lists(st.floats(-(2.0**26) + 1, 2.0**26 - 1), min_size=1, max_size=20))
def test_limbs_are_the_number(values: list[float]) -> None:
    x = TABLE.quantise(np.array([values]), "X")
    assert np.abs(x - values).max() <= 2.0**-45
    limbs = TABLE.split(x)
    found = [sum(Fraction(float(limb[0, j])) * 2 ** (14 * k) for k, limb in enumerate(limbs))
             for j in range(len(values))]  # fmt: skip
    assert found == [Fraction(v) * 2**44 for v in x[0].tolist()]
    assert all(np.abs(limb).max() <= 2**14 for limb in limbs)


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 40), st.sampled_from([1, 5, 64]))
def test_any_order_and_any_blocks(seed: int, cut: int, block: int) -> None:
    x, y = make_table(seed=seed)
    whole = add_rows(TABLE, x, y, None)
    order = np.random.default_rng(seed).permutation(len(x))
    one, two = (add_rows(TABLE, x[o], y[o], None, block) for o in (order[:cut], order[cut:]))
    assert (one + two).digest() == whole.digest()
    assert (whole - one).digest() == two.digest()
    assert Sums.from_bytes(whole.to_bytes()).digest() == whole.digest()


def test_labels_come_and_go() -> None:
    x, _ = make_table(6)
    codes = encode_labels(list("abcabc"))
    whole = add_rows(TABLE, x, codes, ("a", "b", "c"))
    without = whole - add_rows(TABLE, x[[2, 5]], codes[[2, 5]], ("a", "b", "c"))
    assert without.labels == ("a", "b")
    kept = [0, 1, 3, 4]
    assert without.digest() == add_rows(TABLE, x[kept], codes[kept], ("a", "b")).digest()
    assert without.square[0].diagonal().tolist() == [2, 2]


@pytest.mark.parametrize("bits", [4, 8, 12])
def test_features_are_summed_exactly(bits: int) -> None:
    rng = np.random.default_rng(0)
    numbers = RowScaled((5, 7), bits, lift=3, seed="s")
    q = numbers.quantise(rng.normal(size=(3000, 12)), "X")
    q[:, 0] = numbers.largest  # a heavy column
    sums = add_rows(numbers, q, encode_labels([0] * 3000), (0,))
    full = numbers.lift_rows(q).astype(np.int64)
    assert full.shape[1] == 15
    assert np.abs(full).max() <= numbers.largest
    assert np.array_equal(sums.gram[0], full.T @ full)
    assert np.array_equal(sums.cross[0, :, 0], full.sum(axis=0))
    assert read_numbers(numbers.describe()) == numbers


def test_layers_are_scaled_by_themselves() -> None:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(9, 20))
    numbers = RowScaled((8, 12))
    q = numbers.quantise(z, "X")
    z[:, 8:] *= 1e6
    assert np.array_equal(numbers.quantise(z, "X"), q)
    assert np.array_equal(numbers.quantise(z[:1] * 3, "X"), q[:1])
    with pytest.raises(InputError, match="row 1"):
        numbers.quantise(np.array([[1.0] * 20, [np.nan] * 20]), "X")


@pytest.mark.parametrize(
    ("options", "named"),
    [({"bits": 3}, "bits"), ({"bits": 8.0}, "bits"), ({"lift": -1}, "lift"), ({"seed": 1}, "seed")],
)
def test_numbers_that_cannot_be(options: dict, named: str) -> None:
    with pytest.raises(InputError, match=named):
        RowScaled((1,), **options)


def test_wide_numbers() -> None:
    rng = np.random.default_rng(0)
    digits = rng.integers(-(2**40), 2**40, (4, 3))
    assert read_digits(carry(digits), 0) == read_digits(digits, 0)
    assert np.abs(carry(digits)[:-1]).max() <= 2**13
    left = rng.integers(-(2**30), 2**30, (2, 3))
    whole = np.multiply.outer(digits[:, 0], np.ones((3, 3), int))
    found = subtract_product(12345, whole, left[:, :, None], left[:, None])
    a, w = read_digits(left, 0), read_digits(digits[:, :1], 0)[0]
    assert read_digits(found, 0) == [12345 * w - p * q for p in a for q in a]
    exact = read_digits(digits, -7)
    assert [Fraction(int(w), 2**7) for w in to_whole(digits)] == exact
    assert to_floats(to_whole(digits), -7).tolist() == [float(f) for f in exact]


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="column 'b'"):
        TABLE.quantise(np.array([[0.0, -(2.0**26)]]), "X", ["a", "b"])
    with pytest.raises(InputError, match="column 1"):
        TABLE.quantise(np.array([[0.0, np.nan]]), "X")
    with pytest.raises(InputError, match="rows"):
        check_room(2**40, 127)
