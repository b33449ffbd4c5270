"""The figure of the routes, tiny: every arm, every size, resumed, drawn, and judged."""

import json
from pathlib import Path

import pytest

import figure_routes
from figure_routes import TASKS, claim_heads, claim_noisy, claim_shards, list_cases, list_trials
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


def test_the_rate_is_the_best_on_validation_data(tmp_path: Path) -> None:
    store, (retraining, *_) = Store(tmp_path, "routes_digits"), list_routes()
    for case, validation in zip(list_trials(retraining, (0.1, 0.3)), (50.0, 60.0), strict=True):
        store.add({"key": case.key, "validation": validation})
    found = list_cases(retraining, (0.1, 0.3), 2, store)
    assert {case.rate for case in found} == {0.3}
    assert [(case.seed, case.size) for case in found] == [(s, k) for s in (0, 1) for k in SIZES]
    exact = next(route for route in list_routes() if route.kind == "statistics")
    assert {case.rate for case in list_cases(exact, (0.1,), 1, store)} == {0.0}


def test_some_arms_run_once_and_are_drawn(tmp_path: Path) -> None:
    run(tmp_path, "--arms", "retraining")
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
    done = run(tmp_path)
    keys = {entry["key"] for entry in done}
    for route in list_routes():
        for size in SIZES:
            rates = {e["rate"] for e in done if (e["route"], e["size"]) == (route.name, size)}
            assert any(Case(route, size, 0, rate).key in keys for rate in rates)
    answered = [entry for entry in done if "test" in entry and entry["route"] != "retraining"]
    assert all(entry["epsilon"] <= 1 for entry in answered)
    shards = {e["size"]: e["gradient_evaluations"] for e in done if e["route"] == "shards"}
    assert shards["1"] < shards["50"], "one person touches one shard"


def test_a_claim_that_fails_says_so() -> None:
    task = TASKS["debian"]

    def make(name: str, tests: tuple[float, float], seconds: float) -> list[dict]:
        return [
            {"route": name, "size": "1", "seed": s, "test": test, "seconds": seconds}
            for s, test in enumerate(tests)
        ]

    base = make("retraining", (60.0, 61.0), 10.0)
    good = base + make("exact statistics, plain", (62.0, 63.0), 0.1) + make("shards", (1, 2), 1.0)
    poor = base + make("exact statistics, plain", (50.0, 51.0), 9.0) + make("shards", (1, 2), 9.0)
    poor += make("gradient-clipping, initialisation", (50.0, 51.001), 9.0)
    for entries, verdict in ((good, "holds"), (poor, "**fails**")):
        rows = [
            row
            for claim in (claim_heads, claim_shards, claim_noisy)
            for row in claim(task, entries, "1", 10.0)
        ]
        assert len(rows) >= 3
        assert {row[-1] for row in rows} == {verdict}
