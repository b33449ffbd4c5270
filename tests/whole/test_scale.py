"""The plan on paper is what its command prints, and its formulas are the engine's volumes."""

from pathlib import Path

import pytest

from benchmarks.scale import (
    DEVICES,
    PAGE,
    Costs,
    plan_head,
    plan_replicated,
    plan_sharded,
    read_costs,
    write_heads,
    write_page,
    write_tables,
)

COSTS = Costs(noise=10.0, update=25.0, hash=0.5, product=0.01, factor=0.03, rounding=4.0)


def test_the_page_is_what_the_command_prints(tmp_path: Path):
    text = PAGE.read_text(encoding="utf-8")
    assert write_tables(read_costs()) in text
    assert write_heads(read_costs()) in text
    copy = tmp_path / "scale.md"
    copy.write_text(text, encoding="utf-8")
    write_page(copy, read_costs())
    assert copy.read_text(encoding="utf-8") == text
    write_page(copy, COSTS)
    assert write_heads(read_costs()) not in copy.read_text(encoding="utf-8")
    write_page(copy, read_costs())
    assert copy.read_text(encoding="utf-8") == text


def test_a_head_by_hand():
    head = plan_head(1e9, 4096, COSTS)
    assert head.rows == 4120e9
    assert head.sums == pytest.approx(8 * 4097 * 4098 / 2, rel=1e-3)
    assert head.operations == pytest.approx(1.6785e16, rel=1e-3)
    assert head.product == pytest.approx(167_850, rel=1e-3)
    assert head.rounding == pytest.approx(16_384)
    assert head.factor == pytest.approx(0.6877, rel=1e-3)


def test_the_volumes_by_hand():
    step = plan_replicated(1e9, 2, COSTS)
    assert step.sent == pytest.approx(4e9)  # a ring of two: each sends half, twice
    assert step.memory == 12e9
    assert step.core == pytest.approx(25.0)
    parts = plan_sharded(1e9, 2, COSTS)
    assert parts.sent == pytest.approx(3e9)  # half of 2 bytes, three times
    assert parts.core == pytest.approx(12.5)


def test_more_devices_share_the_work_and_not_the_network():
    steps = [plan_sharded(8e9, devices, COSTS) for devices in DEVICES]
    assert [s.core for s in steps] == sorted((s.core for s in steps), reverse=True)
    assert [s.memory for s in steps] == sorted((s.memory for s in steps), reverse=True)
    assert [s.sent for s in steps] == sorted(s.sent for s in steps)
    assert steps[-1].sent < 6 * 8e9
