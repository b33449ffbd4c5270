"""The figure of the routes, tiny: rates, every kind of arm, resumed, drawn, and judged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import figure_routes
from figure_routes import LADDER, claim_linear, claim_noisy, claim_shards, find_trial, list_cases
from routes import SIZES, Case, list_routes
from runs import Store


def run(out: Path, *words: str) -> list[dict[str, Any]]:
    figure_routes.main(["--smoke", "--seeds", "1", "--out", str(out), *words])
    file = out / "runs" / "routes_digits.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def find(name: str) -> Any:
    return next(route for route in list_routes() if route.name == name)


def test_every_route_has_a_name_of_its_own_and_every_noisy_one_a_control() -> None:
    routes = list_routes()
    assert len({route.name for route in routes}) == len(routes)
    noisy = {(r.method, r.centre, r.control) for r in routes if r.kind == "noisy"}
    assert noisy == {(m, c, not control) for m, c, control in noisy}
    assert len(noisy) == 12


def test_the_rate_is_the_best_on_validation_data_and_no_end_of_the_grid(tmp_path: Path) -> None:
    store = Store(tmp_path, "routes_digits")
    retraining, longer = find("retraining"), find("retraining, longer")
    clipping = find("gradient-clipping, zero")
    tried = list[float]()
    while case := find_trial(retraining, (0.1, 0.3), store.read()):
        tried.append(case.rate)
        found = 100.0 - 10 * abs(LADDER.index(case.rate) - 6)  # best at 1
        store.add({"key": case.key, "validation": found})
    assert tried == [0.1, 0.3, 1.0, 3.0]
    first = find_trial(longer, (0.1,), store.read())
    assert first == Case(longer, "tenth", 0, 1.0), "where the shorter one ended"
    cases = list_cases(retraining, 2, store)
    assert {case.rate for case in cases} == {1.0}
    assert [(case.seed, case.size) for case in cases] == [(s, k) for s in (0, 1) for k in SIZES]
    assert {case.rate for case in list_cases(find("ridge, plain"), 1, store)} == {0.0}
    fresh = find("gradient-clipping, initialisation")
    assert find_trial(fresh, (0.1,), store.read()) is None
    assert {case.rate for case in list_cases(fresh, 1, store)} == {1.0}, "retraining's"
    store.add({"key": Case(clipping, "tenth", 0, 0.1).key, "validation": 1.0})
    control = list_cases(find("gradient-clipping, zero, control"), 1, store)
    assert [(c.size, c.rate) for c in control] == [("tenth", 0.1)]


def test_some_arms_run_once_and_are_drawn(tmp_path: Path) -> None:
    run(tmp_path, "--arms", "retraining |")
    done = run(tmp_path, "--arms", "ridge, plain")
    assert len(done) == 4 + 3, "two rates for a tenth, the better one for one and fifty"
    assert run(tmp_path, "--arms", "ridge, plain") == done
    linear = {entry["size"]: entry for entry in done if entry["route"].startswith("ridge")}
    assert set(linear) == set(SIZES)
    assert all(entry["epsilon"] == 0 and entry["test"] > 85 for entry in linear.values())
    table = (tmp_path / "figure_routes_digits.md").read_text(encoding="utf-8")
    assert "| ridge, plain | (0, 0), bits | tenth | 1 |" in table
    assert (tmp_path / "figure_routes_digits.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_every_arm_answers_every_size(tmp_path: Path) -> None:
    done = run(tmp_path, "--full")
    answered = {(entry["route"], entry["size"]) for entry in done}
    expected = {(r.name, s) for r in list_routes() if r.kind != "gone" for s in r.sizes}
    assert answered == expected
    assert all(entry["epsilon"] <= 1 for entry in done if "test" in entry)
    shards = {e["size"]: e["gradient_evaluations"] for e in done if e["route"] == "shards"}
    assert shards["1"] < shards["50"], "one person touches one shard"


def test_claims_compare_the_best_linear_model_and_every_control() -> None:
    def make(name: str, tests: Any, seconds: float, size: str = "tenth") -> list[dict[str, Any]]:
        about = {"route": name, "size": size, "seconds": seconds, "gradient_evaluations": seconds}
        return [about | {"seed": s, "test": t, "validation": t} for s, t in enumerate(tests)]

    noisy = "gradient-clipping, initialisation"
    entries = make("retraining", (60.0, 61.0), 10.0) + make("retraining", (60.0, 61.0), 10.0, "1")
    entries += make("ridge, plain", (62.0, 63.5), 1.0) + make("ridge, lifted", (50.0, 50.0), 1.0)
    entries += make("shards", (50.0, 51.0), 2.0, "1") + make(noisy, (50.0, 51.0), 9.0)
    entries += make(f"{noisy}, control", (50.5, 50.5), 9.0)
    assert claim_linear(entries).startswith("ridge, plain: +2.25 [")
    assert claim_shards(entries) == "gradient evaluations 0.2; seconds 0.2"
    below, level = claim_noisy(entries)
    assert below == "-10.00, 0 inside the interval at 0 of 1"
    assert level == "+0.00, 0 inside the interval at 1 of 1"
    assert claim_linear(entries[:2]) == claim_shards(entries[:2]) == "not run"
