"""Which route keeps what, at which price: test accuracy against the cost of answering a request.

    python experiments/figure_routes.py                     # all tasks, three seeds
    python experiments/figure_routes.py --task mnist --arms shards
    python experiments/figure_routes.py --full              # noisy runs for one and fifty too
    python experiments/figure_routes.py --plot              # draw what there is
    python experiments/figure_routes.py --smoke             # digits, to runs/smoke

Requests of one person, fifty and a tenth of all, another set with every seed; routes.py says what
each route is and what is counted. On MNIST linear models see pixels, plain or with public random
features beside them; on CIFAR-10 what the paper's network learned on CIFAR-100, which is public
here; elsewhere all that a frozen public network gives. Learning rates are chosen on validation data
with the first seed and a tenth forgotten, for all other runs of a route: four rates, and further
ones as long as the best is the smallest or the largest. Differences to retraining are paired by
seed. Noisy runs for one and for fifty take as long as for a tenth and promise the same: only --full
has them.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from options import Options, drive
from plots import COLOURS, draw_panels
from problems import load_problem
from routes import SIZES, Case, Ground, Route, Size, answer, list_routes
from runs import Store, find_commit
from summary import Difference, average, compare, count_level, make_table, publish, span

LADDER = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RATES = LADDER[2:6]
SEEDS = 3
ROUTE_COLOURS = COLOURS | {
    "retraining": "#000000",
    "ridge": "#D55E00",
    "logistic": "#56B4E9",
    "gone": "#999999",
    "shards": "#8C564B",
}
COSTS = ("seconds", "wall", "gradient_evaluations")
Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Where networks and linear models run, passes of a training, C of logistic regression (the
    best on validation data)."""

    title: str
    network: str
    linear: str
    epochs: float
    C: float

    def runs(self, route: Route) -> bool:
        """Whether a route is run here: the longer training, where the others have one pass."""
        return route.kind != "gone" and (route.times == 1 or self.epochs == 1)


LIFT = 4_096
TASKS = {
    "mnist": Task("MNIST", "mnist", "mnist", 30, 0.01),
    "cifar10": Task("CIFAR-10", "cifar10", "crossed_cifar10", 1, 100),
    "features_cifar10": Task(
        "CIFAR-10 on public features", "features_cifar10", "features_cifar10", 25, 0.01
    ),
    "features_cifar100": Task(
        "CIFAR-100 on public features", "features_cifar100", "features_cifar100", 25, 0.01
    ),
    "debian": Task("Debian's descriptions", "debian", "debian", 25, 0.1),
    "digits": Task("digits", "digits", "digits", 1, 0.1),
}


def run(task: str, options: Options) -> None:
    """Whatever is missing: the rates, then all cases."""
    store, about = Store(options.out, f"routes_{task}"), TASKS[task]
    routes = [route for route in list_routes() if about.runs(route)]
    rates = LADDER[4:6] if options.smoke else RATES
    for route in routes:
        while case := find_trial(route, rates, store.read(), widen=not options.smoke):
            if not options.wants(case.key):
                break
            run_cases(task, options, store, [case])
    for route in routes:
        cases = list_cases(route, options.seeds or (2 if options.smoke else SEEDS), store)
        if route.kind == "noisy" and not options.full:
            cases = [case for case in cases if case.size == "tenth"]
        run_cases(task, options, store, [c for c in cases if options.wants(c.key)])


def find_trial(
    route: Route, rates: tuple[float, ...], done: dict[str, Any], *, widen: bool = True
) -> Case | None:
    """The next rate to try, with the first seed and a tenth forgotten; None when the best is not
    the smallest or the largest that was tried, and for routes that have no rate of their own. A
    longer training begins at the best rate of the shorter one."""
    if not route.tuned or route.tuned_as != route.name:
        return None
    tried = read_trials(route, done)
    if route.times > 1:
        rates = (choose_rate(_find("retraining"), done) or rates[-1],)
    left = [rate for rate in rates if rate not in tried]
    if not left and widen:
        best = choose_rate(route, done)
        place = LADDER.index(best)
        beside = LADDER[max(place - 1, 0) : place + 2]
        left = [rate for rate in beside if rate not in tried]
    return Case(route, "tenth", 0, left[0]) if left else None


def read_trials(route: Route, done: dict[str, Any]) -> dict[float, float]:
    """Accuracy on validation data by rate, of the arm for which it is chosen."""
    arm = next(each for each in list_routes() if each.name == route.tuned_as)
    keys = {rate: Case(arm, "tenth", 0, rate).key for rate in LADDER}
    return {rate: done[key].get("validation", 0.0) for rate, key in keys.items() if key in done}


def list_cases(route: Route, seeds: int, store: Store) -> list[Case]:
    """All sizes and seeds at the rate that was best on validation data."""
    rate = choose_rate(route, store.read())
    return [Case(route, size, s, rate) for s in range(seeds) for size in route.sizes]


def choose_rate(route: Route, done: dict[str, Any]) -> float:
    """The best rate of those that were tried; 0 for routes without one."""
    tried = read_trials(route, done) if route.tuned else {}
    return max(tried, key=lambda rate: tried[rate]) if tried else 0.0


def run_cases(task: str, options: Options, store: Store, cases: list[Case]) -> None:
    """Those that are not finished; what was learned before is shared by the sizes of a seed."""
    done = store.read()
    left = [case for case in cases if case.key not in done and (case.rate or not case.route.tuned)]
    for seed, group in groupby(left, lambda case: case.seed):
        began = time.monotonic()
        for case, found in answer(load_ground(task, options.out), list(group)):
            entry = {"key": case.key, "task": task, "route": case.route.name, "size": case.size}
            entry |= {"seed": seed, "rate": case.rate, "commit": find_commit()}
            store.add(entry | found)
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{task}: {case.key}, {seconds}", file=sys.stderr, flush=True)


@functools.cache
def load_ground(task: str, out: Path) -> Ground:
    """The problems of a task."""
    about = TASKS[task]
    network, linear = (load_problem(name) for name in (about.network, about.linear))
    lift = LIFT if task != "digits" else 64
    return Ground(network, linear, about.epochs, lift, about.C, out / "models")


def read_entries(task: str, out: Path) -> Entries:
    """Finished runs of the chosen rates; trials of other rates, and what failed, are left out."""
    done = Store(out, f"routes_{task}").read()
    chosen = {route.name: choose_rate(route, done) for route in list_routes()}
    return [e for e in done.values() if e["rate"] == chosen.get(e["route"]) and "test" in e]


def plot(task: str, options: Options) -> None:
    """One picture, one table."""
    entries = read_entries(task, options.out)
    if not entries:
        return
    named = {"1": "one forgotten", "50": "fifty forgotten", "tenth": "a tenth forgotten"}
    panels = {
        named[size]: {
            route.name: (average(entries, "seconds", **about).value, mean.value, mean.spread)
            for route in list_routes()
            if (mean := average(entries, **(about := {"route": route.name, "size": size}))).count
        }
        for size in SIZES
    }
    tests = [mean for panel in panels.values() for _, mean, _ in panel.values()]
    base = [panel["retraining"][1] for panel in panels.values() if "retraining" in panel]
    draw_panels(
        panels,
        styles={route.name: style_route(route) for route in list_routes()},
        controls={route.name for route in list_routes() if route.control},
        title=TASKS[task].title,
        horizontal="seconds of one core",
        vertical="test accuracy (%)",
        files=[options.out / f"figure_routes_{task}.{kind}" for kind in ("png", "svg")],
        window=max(8.0, max(tests) - min(base, default=max(tests)) + 2),  # retraining is seen
    )
    picture = f"![{TASKS[task].title}](results/figure_routes_{task}.png)"
    publish(f"{picture}\n\n{tabulate(entries)}", options.out / f"figure_routes_{task}.md")


def style_route(route: Route) -> dict[str, str]:
    """Colour by method; a control looks like what it controls, and is drawn lighter.

    >>> style_route(list_routes()[0])
    {'color': '#000000', 'marker': 'o'}
    """
    kinds = {"linear": "^", "noisy": "s", "shards": "h", "gone": "v"}
    if route.lift:
        marker = "D" if route.lift == 1 else "p"
    elif route.centre == "initialisation" or route.times > 1:
        marker = "*" if route.kind == "noisy" else "d"
    else:
        marker = "P" if route.method == "dp-sgd" else kinds.get(route.kind, "o")
    return {"color": ROUTE_COLOURS[route.method or route.kind], "marker": marker}


def tabulate(entries: Entries) -> str:
    """Every route by the size of the request: accuracy, minus retraining, cost, price."""
    rows: list[list[object]] = []
    for route in list_routes():
        for size in SIZES:
            test = average(entries, route=route.name, size=size)
            if not test.count:
                continue
            gain = compare_with_retraining(entries, route.name, size)
            rows.append([
                route.name, route.guarantee, size, test.count, test,
                "" if route.name == "retraining" else gain,
                *(write_cost(entries, route, size, each) for each in COSTS), route.price,
            ])  # fmt: skip
    header = ["route", "(ε, δ)", "forgotten", "seeds", "test %", "minus retraining", "seconds",
              "of the clock", "gradient evaluations", "price"]  # fmt: skip
    return make_table(header, rows) + "\n"


def compare_with_retraining(entries: Entries, name: str, size: Size = "tenth") -> Difference:
    """Test accuracy, paired by seed."""
    return compare(entries, {"route": name}, {"route": "retraining"}, size=size)


def write_cost(entries: Entries, route: Route, size: Size, name: str) -> str:
    known = [entry for entry in entries if name in entry]
    mean = average(known, name, route=route.name, size=size)
    value = mean.value
    return "–" if not mean.count else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tabulate_all(out: Path) -> str:
    """One table of all tasks: a tenth forgotten, test accuracy and seconds, route by route."""
    found = {task: read_entries(task, out) for task in TASKS if task != "digits"}

    def write(entries: Entries, route: Route) -> str:
        mean = average(entries, route=route.name, size="tenth")
        seconds = write_cost(entries, route, "tenth", "seconds")
        missing = "–" if route.kind == "gone" else "not run"
        return f"{mean}; {seconds} s" if mean.count else missing

    rows: list[list[object]] = []
    for route in (each for each in list_routes() if not each.control):
        cells = [write(entries, route) for entries in found.values()]
        if not {"–", "not run"} >= set(cells):
            rows.append([route.name, route.guarantee, *cells, route.price])
    header = ["route", "(ε, δ)", *(TASKS[task].title for task in found), "price"]
    return make_table(header, rows)


def tabulate_claims(out: Path) -> str:
    """What the routes show, a line for each task: paired differences with a tenth forgotten."""
    rows: list[list[object]] = []
    for task, about in TASKS.items():
        if entries := read_entries(task, out):
            shown = [claim_linear(entries), claim_shards(entries), *claim_noisy(entries)]
            rows.append([about.title, *shown])
    header = ["data", "linear model, the best on validation data − retraining",
              "shards: one person / retraining", "noise around an initialisation − retraining",
              "noise − its control, which never saw the old model"]  # fmt: skip
    return make_table(header, rows)


def claim_linear(entries: Entries) -> str:
    """Of the linear models the one that is best on validation data, against retraining."""
    names = [r.name for r in list_routes() if r.kind in ("linear", "gone") and r.name != "dp-sgd"]
    means = {n: average(entries, "validation", route=n, size="tenth") for n in names}
    means = {name: mean.value for name, mean in means.items() if mean.count}
    if not means:
        return "not run"
    best = max(means, key=lambda name: means[name])
    return f"{best}: {compare_with_retraining(entries, best)}"


def claim_shards(entries: Entries) -> str:
    """A single request, in examples that go through a network and in seconds."""
    shown: list[str] = []
    for field in ("gradient_evaluations", "seconds"):
        one, base = (average(entries, field, route=r, size="1") for r in ("shards", "retraining"))
        if one.count and base.count:
            shown.append(f"{field.replace('_', ' ')} {one.value / base.value:.3g}")
    return "; ".join(shown) or "not run"


def claim_noisy(entries: Entries) -> list[str]:
    """Smallest and largest mean difference, and in how many arms 0 lies inside the interval."""
    noisy = [r for r in list_routes() if r.kind == "noisy" and not r.control]
    gains = [compare_with_retraining(entries, r.name) for r in noisy if r.centre != "zero"]
    kept = [
        compare(entries, {"route": r.name}, {"route": f"{r.name}, control"}, size="tenth")
        for r in noisy
    ]
    return [f"{span(found)}, {count_level(found)}" for found in (gains, kept)]


def _find(name: str) -> Route:
    return next(route for route in list_routes() if route.name == name)


main: Callable[..., None] = functools.partial(
    drive, __doc__, tuple(task for task in TASKS if task != "digits"), run, plot
)

if __name__ == "__main__":
    main()
