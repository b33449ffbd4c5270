"""Sums of whole numbers: exact in blocks longer than the worst case allows, and when they are not.

The other properties of sums are in test_statistics.py.
"""

import numpy as np
import pytest

from expunge.errors import InputError
from expunge.forgettable import sums
from expunge.forgettable.sums import Sums, add_blocks, add_rows, choose_block


def add_slowly(phi: np.ndarray, t: np.ndarray) -> Sums:
    """In Python's whole numbers."""
    phi, t = phi.astype(np.int64).astype(object), t.astype(object)
    gram, cross = (phi.T @ phi).astype(np.int64), (phi.T @ t).astype(np.int64)
    return Sums(len(phi), gram, cross, int((t * t).sum()))


def make_rows(rows: int, width: int, largest: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rows)
    phi = np.clip(np.rint(rng.normal(0, largest / 4, (rows, width))), -largest, largest)
    phi[:, -1] = largest
    return phi.astype(np.float32), np.eye(3, dtype=np.int64)[rng.integers(0, 3, rows)]


@pytest.mark.parametrize("largest", [7, 127, 255, 511, 2047])
@pytest.mark.parametrize("rows", [1, 1041, 4161])
def test_long_blocks_are_exact(largest: int, rows: int) -> None:
    phi, t = make_rows(rows, 17, largest)
    assert add_rows(phi, t, largest).digest() == add_slowly(phi, t).digest()


@pytest.mark.parametrize("heavy", [1, 2, 9, 17])
def test_columns_that_a_long_block_rounds_are_computed_again(heavy: int) -> None:
    """Odd numbers near M: in float32 their sums of squares pass 2^24 and lose their last bit."""
    phi, t = make_rows(4160, 17, 127)
    phi[:, :heavy] = np.random.default_rng(0).choice([125, 127], (4160, heavy))
    rounded = (phi.T @ phi).astype(np.int64)
    exact = add_slowly(phi, t)
    assert (rounded != exact.gram).any()
    assert add_rows(phi, t, 127).digest() == exact.digest()


def test_the_diagonal_tells_where_a_block_is_exact() -> None:
    """Columns that are light by themselves never make a heavy entry together."""
    phi, _ = make_rows(16_640, 33, 127)
    phi[:, ::3] = np.abs(phi[:, ::3])
    phi[:, 1::5] = 127
    product, exact = phi.T @ phi, phi.T.astype(np.float64) @ phi
    light = product.diagonal() < 2**24
    assert 0 < light.sum() < 33
    assert (product[np.ix_(light, light)] == exact[np.ix_(light, light)]).all()
    assert (light == (exact.diagonal() < 2**24)).all()


def test_blocks_add_up_to_the_whole() -> None:
    phi, t = make_rows(3000, 9, 127)
    whole = add_rows(phi, t, 127).digest()
    for cut in (1, 700, 2999):
        parts = [(phi[:cut], t[:cut]), (phi[cut:], t[cut:])]
        assert add_blocks(parts, 127, (9, 3)).digest() == whole
        assert (add_rows(*parts[0], 127) + add_rows(*parts[1], 127)).digest() == whole
    assert add_blocks([], 127, (9, 3)).digest() == Sums.empty(9, 3).digest()


def test_large_targets_are_exact() -> None:
    phi, _ = make_rows(5000, 5, 2047)
    t = np.random.default_rng(1).integers(-(2**20), 2**20 + 1, (5000, 2))
    assert add_rows(phi, t, 2047).digest() == add_slowly(phi, t).digest()


def test_squares_that_no_machine_word_holds_are_added_too() -> None:
    t = np.full((5, 1), 2**31 + 1)
    assert add_rows(np.ones((5, 1), np.float32), t, 1).square == 5 * (2**31 + 1) ** 2


def test_what_no_float_adds_exactly_is_refused() -> None:
    assert choose_block(2047 * 2**20)[0] is np.float64
    with pytest.raises(InputError, match="in a product"):
        choose_block(2**46)


def test_the_rule_holds_however_long_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sums, "_LONGER", 64)
    phi, t = make_rows(40_000, 5, 127)
    phi[:, 1] = 31
    assert add_rows(phi, t, 127).digest() == add_slowly(phi, t).digest()
