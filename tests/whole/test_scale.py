"""The plan on paper is what its command prints, and its formulas are the engine's volumes."""

from pathlib import Path

import pytest

from benchmarks.scale import (
    DEVICES,
    Costs,
    plan_replicated,
    plan_sharded,
    read_costs,
    write_tables,
)

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
COSTS = Costs(noise=10.0, update=25.0, hash=0.5)


def test_the_page_is_what_the_command_prints():
    text = PAGE.read_text(encoding="utf-8")
    shown = text.partition("<!-- tables -->\n")[2].partition("\n<!-- end of tables -->")[0]
    assert shown == write_tables(read_costs())
    assert shown != write_tables(COSTS)


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
