"""Estimates are made from the steps of real loops; here the clock is given, never read."""

import os

import pytest

from expunge.jobs.timing import SECONDS, Clock, Enough, Times, find_quiet, tell_load


def make_clock(*seconds: float) -> Clock:
    clock = Clock()
    clock.began, at = 0.0, 0.0
    for taken in seconds:
        at += taken
        clock.ends.append(at)
    return clock


def test_a_start_is_counted_once_and_steps_as_often_as_they_run() -> None:
    clock = make_clock(5.0, *[1.0] * 9)
    assert clock.estimate(1) == 5.0
    assert clock.estimate(101) == 105.0
    assert clock.estimate(100, starts=10) == 50.0 + 90.0


def test_what_the_machine_did_meanwhile_is_left_out() -> None:
    busy = [200.0 if place % 50 >= 20 else 1.0 for place in range(400)]
    assert find_quiet(busy) == 1.0
    assert find_quiet([1.0, 1.0, 1.0, 90.0]) == 1.0


def test_bursts_of_a_loader_are_averaged() -> None:
    assert find_quiet([8.0, 0.0, 0.0, 0.0] * 20) == 2.0


def test_a_loop_is_stopped_when_enough_is_known() -> None:
    clock = Clock(seconds=0.0)
    for _ in range(4):
        clock()
    with pytest.raises(Enough):
        clock()
    assert Clock().seconds == SECONDS


def test_a_control_repeats_all_but_what_is_done_once() -> None:
    times = Times(noise=3.0, training=10.0, evaluation=1.0, once=7.0)
    assert times.add_up(control=False) == 7.0 + 13.0 + 3.0
    assert times.add_up(control=True) == 7.0 + 26.0 + 5.0
    assert Times(None, 10.0, 1.0).add_up(control=True) == 12.0


def test_busy_cores_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.5, 9.0, 9.0))
    assert tell_load() is None
    monkeypatch.setattr(os, "getloadavg", lambda: (6.4, 0.0, 0.0))
    assert tell_load().startswith("The load is 6.4 on 2 cores: beside other work it takes longer")
