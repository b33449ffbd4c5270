"""The figure of the routes, tiny: every arm, every size, resumed, drawn, and judged."""

import json
from pathlib import Path

import pytest

import figure_routes
from figure_routes import (
    LADDER,
    TASKS,
    claim_accuracy,
    claim_controls,
    claim_noisy,
    claim_shards,
    claim_time,
    find_trial,
    list_cases,
)
from routes import SIZES, Case, list_routes
from runs import Store


def run(out: Path, *words: str) -> list[dict]:
    figure_routes.main(["--smoke", "--seeds", "1", "--out", str(out), *words])
    file = out / "runs" / "routes_digits.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_the_arms_are_those_of_the_issue() -> None:
    routes = list_routes()
    assert len({route.name for route in routes}) == len(routes)
    assert routes[0].name == "retraining"
    noisy = [route for route in routes if route.kind == "noisy"]
    assert {(r.method, r.centre, r.control) for r in noisy} == {
        (method, centre, control)
        for method in ("gradient-clipping", "model-clipping", "output-perturbation")
        for centre in ("zero", "initialisation")
        for control in (False, True)
    }
    kinds = {"retraining", "noisy", "statistics", "convex", "shards", "dp-sgd"}
    assert {route.kind for route in routes} == kinds
    assert set(TASKS) == {
        "mnist", "cifar10", "features_cifar10", "features_cifar100", "debian", "digits"
    }  # fmt: skip


def test_the_rate_is_the_best_on_validation_data_and_no_end_of_the_grid(tmp_path: Path) -> None:
    store, routes = Store(tmp_path, "routes_digits"), list_routes()
    retraining, longer, clipping = routes[:3]

    def find(rate: float) -> float:
        return 100.0 - 10 * abs(LADDER.index(rate) - 6)  # best at 1

    tried = []
    while case := find_trial(retraining, (0.1, 0.3), store.read()):
        tried.append(case.rate)
        store.add({"key": case.key, "validation": find(case.rate)})
    assert tried == [0.1, 0.3, 1.0, 3.0]
    first = find_trial(longer, (0.1,), store.read())
    assert first == Case(longer, "tenth", 0, 1.0), "where the shorter one ended"
    found = list_cases(retraining, 2, store)
    assert {case.rate for case in found} == {1.0}
    assert [(case.seed, case.size) for case in found] == [(s, k) for s in (0, 1) for k in SIZES]
    exact = next(route for route in routes if route.kind == "statistics")
    assert {case.rate for case in list_cases(exact, 1, store)} == {0.0}
    assert find_trial(exact, (0.1,), store.read()) is None

    fresh = next(route for route in routes if route.centre == "initialisation")
    assert find_trial(fresh, (0.1,), store.read()) is None
    assert {case.rate for case in list_cases(fresh, 1, store)} == {1.0}, "retraining's"
    control = next(route for route in routes if route.name == f"{clipping.name}, control")
    assert find_trial(control, (0.1,), store.read()) is None
    store.add({"key": Case(clipping, "tenth", 0, 0.1).key, "validation": 1.0})
    assert [(c.size, c.rate) for c in list_cases(control, 1, store)] == [("tenth", 0.1)]


def test_some_arms_run_once_and_are_drawn(tmp_path: Path) -> None:
    run(tmp_path, "--arms", "retraining |")
    done = run(tmp_path, "--arms", "exact statistics, plain")
    assert len(done) == 4 + 3, "two rates for a tenth, the better one for one and fifty"
    assert run(tmp_path, "--arms", "exact statistics, plain") == done
    exact = {entry["size"]: entry for entry in done if entry["route"].startswith("exact")}
    assert {size: entry["gradient_evaluations"] for size, entry in exact.items()} == {
        "1": 1, "50": 50, "tenth": 130
    }  # fmt: skip
    assert all(entry["epsilon"] == 0 and entry["test"] > 85 for entry in exact.values())
    table = (tmp_path / "figure_routes_digits.md").read_text(encoding="utf-8")
    assert "| exact statistics, plain | (0, 0), bits | tenth | 1 |" in table
    assert (tmp_path / "figure_routes_digits.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_every_arm_answers_every_size(tmp_path: Path) -> None:
    done = run(tmp_path, "--full")
    keys = {entry["key"] for entry in done}
    for route in list_routes():
        for size in route.sizes:
            rates = {e["rate"] for e in done if (e["route"], e["size"]) == (route.name, size)}
            assert any(Case(route, size, 0, rate).key in keys for rate in rates)
    passed = {
        e["route"]: e["gradient_evaluations"]
        for e in done
        if e["size"] == "tenth" and e["route"].startswith("retraining")
    }
    assert passed["retraining, longer"] == 10 * passed["retraining"]
    answered = [e for e in done if "test" in e and not e["route"].startswith("retraining")]
    assert all(entry["epsilon"] <= 1 for entry in answered)
    shards = {e["size"]: e["gradient_evaluations"] for e in done if e["route"] == "shards"}
    assert shards["1"] < shards["50"], "one person touches one shard"


def test_a_claim_that_fails_says_so() -> None:
    task = TASKS["debian"]

    def make(name: str, tests: tuple[float, float], seconds: float, size: str = "1") -> list[dict]:
        about = {"route": name, "size": size, "seconds": seconds, "gradient_evaluations": seconds}
        return [
            about | {"seed": s, "test": test, "validation": test} for s, test in enumerate(tests)
        ]

    base = make("retraining", (60.0, 61.0), 10.0) + make("retraining", (60.0, 61.0), 10.0, "tenth")
    noisy = "gradient-clipping, initialisation"
    low, high = (50.0, 51.001), (62.0, 63.001)

    def list_verdicts(head: tuple, clipped: tuple, control: tuple, seconds: float) -> list[str]:
        entries = base + make("exact statistics, plain", head, seconds, "tenth")
        entries += make("shards", low, seconds * 10) + make(noisy, clipped, 9.0, "tenth")
        entries += make(f"{noisy}, control", control, 9.0, "tenth")
        claims = (claim_accuracy, claim_time, claim_shards, claim_noisy, claim_controls)
        return [str(row[-1]) for claim in claims if (row := claim(task, entries))]

    assert list_verdicts(high, high, (62.5, 62.6), 0.1) == ["holds"] * 5
    failed = list_verdicts(low, low, (40.0, 40.9), 9.0)
    assert [verdict[:9] for verdict in failed] == ["**fails**"] * 5
    assert failed[1] == "**fails**: plain, tenth"
    assert claim_accuracy(TASKS["mnist"], base) is None, "no public features there"
