"""Which route keeps what, at which price: test accuracy against the cost of answering a request.

    python experiments/figure_routes.py                     # all tasks, three seeds
    python experiments/figure_routes.py --task mnist --arms shards
    python experiments/figure_routes.py --full              # noisy runs for one and fifty too
    python experiments/figure_routes.py --plot              # draw what there is
    python experiments/figure_routes.py --smoke --out DIR

Requests of one person, fifty and a tenth of all, another set with every seed; routes.py says what
each route is and what is counted. On MNIST the heads see pixels, plain or with public random
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from options import Options, drive
from plots import COLOURS, draw_panels
from problems import load_problem
from routes import LIFTS, SIZES, Case, Ground, Route, Size, answer, list_routes
from runs import Store, find_commit
from summary import Difference, Mean, compare, make_table

LADDER = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
RATES = LADDER[2:6]
SEEDS = {"retraining": 5, "statistics": 5}  # of other kinds 3
MORE_SEEDS = {"retraining": 12, "statistics": 12, "convex": 12}  # where routes lie close together
ROUTE_COLOURS = COLOURS | {
    "retraining": "#000000",
    "statistics": "#D55E00",
    "convex": "#56B4E9",
    "shards": "#8C564B",
}
Entries = list[dict[str, Any]]


@dataclass(frozen=True)
class Task:
    """Where networks and heads run, passes of a training, λ of exact statistics plain and lifted
    (the best on validation data in table_heads.py), whether there are public features from
    elsewhere (then the claims of heads apply), how many models must forget, and how many seeds the
    kinds of routes have."""

    title: str
    network: str
    heads: str
    epochs: float
    ridge: tuple[float, float]
    public: bool
    model_seeds: int = 3
    seeds: Mapping[str, int] = field(default_factory=lambda: SEEDS)

    def runs(self, route: Route) -> bool:
        """Whether a route is run here: the longer training, where the others have one pass."""
        return route.times == 1 or self.epochs == 1


LIFT = 4_096
TASKS = {
    "mnist": Task("MNIST", "mnist", "features_mnist", 30, (1e-4, 1e-8), False),
    "cifar10": Task("CIFAR-10", "cifar10", "crossed_cifar10", 1, (1e-6, 1e-6), False, 1),
    **{
        f"features_{name}": Task(f"{title} on public features", *(f"features_{name}",) * 2, *given)
        for name, title, *given in (
            ("cifar10", "CIFAR-10", 25, (1e-6, 1e-6), True, 3, MORE_SEEDS),
            ("cifar100", "CIFAR-100", 25, (1e-8, 1e-7), True),
        )
    },
    "debian": Task("Debian's descriptions", "debian", "debian", 25, (1e-6, 1e-8), True),
    "digits": Task("digits", "digits", "digits", 1, (1e-5, 1e-5), True),
}


def run(task: str, options: Options) -> None:
    """Whatever is missing: the rates, then all cases."""
    store, about = Store(options.out, f"routes_{task}"), TASKS[task]
    routes = [route for route in list_routes() if about.runs(route)]
    rates = LADDER[4:6] if options.smoke else RATES
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for route in routes:
            while case := find_trial(route, rates, store.read(), widen=not options.smoke):
                if options.arms not in case.key:
                    break
                run_cases(task, options, store, [case])
        for route in routes:
            seeds = options.seeds or (2 if options.smoke else about.seeds.get(route.kind, 3))
            cases = list_cases(route, seeds, store)
            if route.kind == "noisy" and not options.full:
                cases = [case for case in cases if case.size == "tenth"]
            run_cases(task, options, store, options.take_part(cases))
    finally:
        torch.set_num_threads(threads)


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
        for case, found in answer(load_ground(task, options.root, options.out), list(group)):
            told = {"key": case.key, "task": task, "route": case.route.name, "size": case.size}
            told |= {"seed": seed, "rate": case.rate, "commit": find_commit()}
            store.add(told | found)
            seconds = f"{time.monotonic() - began:.0f} s"
            print(f"{task}: {case.key}, {seconds}", file=sys.stderr, flush=True)


@functools.cache
def load_ground(task: str, root: Path | None, out: Path) -> Ground:
    """The problems of a task."""
    about = TASKS[task]
    network, heads = (load_problem(name, root) for name in (about.network, about.heads))
    lift = LIFT if task != "digits" else 64
    return Ground(
        network, heads, about.epochs, lift, about.ridge, out / "models", about.model_seeds
    )


def read_entries(task: str, out: Path) -> Entries:
    """Finished runs of the chosen rates; the trials of other rates are left out."""
    done = Store(out, f"routes_{task}").read()
    chosen = {route.name: choose_rate(route, done) for route in list_routes()}
    return [entry for entry in done.values() if entry["rate"] == chosen.get(entry["route"])]


def plot(task: str, options: Options) -> None:
    """One picture, one table."""
    entries = read_entries(task, options.out)
    if not entries:
        return
    named = {"1": "one forgotten", "50": "fifty forgotten", "tenth": "a tenth forgotten"}
    panels = {
        named[size]: {r.name: at for r in list_routes() if (at := place(entries, r, size))}
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
    text = f"{picture}\n\n{tabulate(task, options.out)}"
    (options.out / f"figure_routes_{task}.md").write_text(text, encoding="utf-8")
    print(text)


def style_route(route: Route) -> dict[str, str]:
    """Colour by method; a control looks like what it controls, and is drawn lighter.

    >>> style_route(list_routes()[0])
    {'color': '#000000', 'marker': 'o'}
    """
    second = route.centre == "initialisation" or not route.exact or route.times > 1
    if route.lift:
        return {"color": ROUTE_COLOURS[route.kind], "marker": "D" if route.lift == 1 else "p"}
    first = {"statistics": "^", "convex": "v", "noisy": "s", "shards": "h", "dp-sgd": "P"}
    marker = {"noisy": "*", "convex": "X"} if second else first
    return {
        "color": ROUTE_COLOURS[route.method or route.kind],
        "marker": marker.get(route.kind, "d" if second else "o"),
    }


def place(entries: Entries, route: Route, size: Size) -> tuple[float, float, float] | None:
    """(seconds, accuracy, its spread) of a route; None where there is nothing."""
    found = _select(entries, route, size)
    if not found:
        return None
    test = Mean.of([entry["test"] for entry in found])
    return Mean.of([entry["seconds"] for entry in found]).value, test.value, test.spread


def _select(entries: Entries, route: Route, size: Size) -> Entries:
    wanted = (route.name, size)
    return [e for e in entries if (e["route"], e["size"]) == wanted and "test" in e]


def tabulate(task: str, out: Path) -> str:
    """Every route by the size of the request: accuracy, minus retraining, cost, price."""
    entries = read_entries(task, out)
    rows: list[list[object]] = []
    for route in list_routes():
        for size in SIZES:
            found = _select(entries, route, size)
            if not found:
                continue
            apart = compare_with_retraining(entries, route, size)
            rows.append([
                route.name, route.guarantee, size, len(found),
                Mean.of([entry["test"] for entry in found]),
                "" if route.name == "retraining" else apart,
                _average(found, "seconds"), _average(found, "gradient_evaluations"), route.price,
            ])  # fmt: skip
    header = ["route", "(ε, δ)", "forgotten", "seeds", "test %", "minus retraining", "seconds",
              "gradient evaluations", "price"]  # fmt: skip
    return make_table(header, rows) + "\n"


def compare_with_retraining(entries: Entries, route: Route, size: Size) -> Difference:
    """Test accuracy, paired by seed."""
    scored = [entry for entry in entries if "test" in entry]
    return compare(scored, {"route": route.name}, {"route": "retraining"}, size=size)


def _average(found: Entries, name: str) -> str:
    value = Mean.of([entry[name] for entry in found]).value
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def tabulate_all(out: Path) -> str:
    """One table of all tasks: a tenth forgotten, test accuracy and seconds, route by route."""
    told = {task: read_entries(task, out) for task in TASKS if task != "digits"}
    told = {task: entries for task, entries in told.items() if entries}
    rows: list[list[object]] = []
    for route in list_routes():
        cells = [_tell_cell(entries, route) for entries in told.values()]
        if any(cell != "–" for cell in cells):
            rows.append([route.name, route.guarantee, *cells, route.price])
    header = ["route", "(ε, δ)", *(TASKS[task].title for task in told), "price"]
    return make_table(header, rows) if rows else "Not run yet."


def _tell_cell(entries: Entries, route: Route) -> str:
    found = _select(entries, route, "tenth")
    if not found:
        return "–"
    accuracy = Mean.of([entry["test"] for entry in found])
    return f"{accuracy}; {_average(found, 'seconds')} s"


def tabulate_claims(out: Path) -> str:
    """What the routes must show, one line for each task; a line that fails says for which size."""
    rows: list[list[object]] = []
    for task, about in TASKS.items():
        entries = read_entries(task, out) if task != "digits" else []
        claims = (claim_accuracy, claim_time, claim_shards, claim_noisy, claim_controls)
        rows += [row for claim in claims if (row := claim(about, entries))]
    return make_table(["claim", "target", "found", "verdict"], rows) if rows else "Not run yet."


Row = list[object]
HEADS = ("statistics", "convex")


def claim_accuracy(about: Task, entries: Entries) -> Row | None:
    """The head that is best on validation data, against retraining."""
    heads = {r.name: r for r in list_routes() if r.kind in HEADS}
    scored = {name: _select(entries, route, "tenth") for name, route in heads.items()}
    means = {
        name: Mean.of([e["validation"] for e in es]).value for name, es in scored.items() if es
    }
    if not about.public or not means:
        return None
    best = max(means, key=lambda name: means[name])
    found = {size: compare_with_retraining(entries, heads[best], size) for size in SIZES}
    what = f"{about.title}: {best} (best on validation data) is not below retraining"
    target = "interval not below −0.3"
    return _conclude(what, target, found, lambda gain: gain.low >= -0.3, lambda g: g.high < -0.3)


def claim_time(about: Task, entries: Entries) -> Row | None:
    """Exact statistics, from list to verified certificate, against retraining."""
    if not about.public:
        return None
    found = {
        f"{kind}, {size}": ratio
        for kind in LIFTS
        for size in SIZES
        if (ratio := _divide(entries, f"exact statistics, {kind}", size, "seconds"))
    }
    what = f"{about.title}: exact statistics take a fiftieth of retraining's time"
    return _conclude(what, "≤ 0.02", found, lambda ratio: ratio <= 0.02)


def claim_shards(about: Task, entries: Entries) -> Row | None:
    """Single requests, in examples that go through a network and in seconds."""
    counted = {"evaluations": "gradient_evaluations", "seconds": "seconds"}
    found = {
        name: ratio
        for name, field in counted.items()
        if (ratio := _divide(entries, "shards", "1", field))
    }
    what = f"{about.title}: shards forget one at a fifth of retraining's cost"
    return _conclude(what, "≤ 0.2", found, lambda ratio: ratio <= 0.2)


def claim_noisy(about: Task, entries: Entries) -> Row | None:
    """Certified runs around an initialisation are not significantly below retraining."""
    found = {
        f"{route.method}, {size}": compare_with_retraining(entries, route, size)
        for route in list_routes()
        if route.centre == "initialisation" and not route.control
        for size in SIZES
    }
    what = f"{about.title}: noise around an initialisation is not below retraining"
    return _conclude(what, "interval reaches 0", found, lambda gain: gain.high >= 0)


def claim_controls(about: Task, entries: Entries) -> Row | None:
    """What the noisy runs keep of the old model: nothing that three seeds can see."""
    found = {
        route.controls: compare(
            [entry for entry in entries if "test" in entry],
            {"route": route.controls}, {"route": route.name}, size="tenth",
        )
        for route in list_routes()
        if route.control
    }  # fmt: skip
    what = f"{about.title}: noisy runs minus their controls, which never saw the old model"
    return _conclude(what, "interval reaches 0", found, lambda gain: gain.low <= 0)


def _divide(entries: Entries, name: str, size: Size, field: str) -> float | None:
    """A route's mean cost, as a part of retraining's; None where one is missing."""
    both = [_select(entries, _find(each), size) for each in (name, "retraining")]
    if not all(both):
        return None
    one, base = (Mean.of([entry[field] for entry in found]).value for found in both)
    return one / base


def _conclude(
    what: str,
    target: str,
    found: Mapping[str, Any],
    holds: Callable[[Any], bool],
    fails: Callable[[Any], bool] = lambda _: True,
) -> Row | None:
    """One line of the claims; None where nothing was run. What neither ``holds`` nor ``fails`` is
    not shown by these seeds."""
    found = {k: v for k, v in found.items() if not (isinstance(v, Difference) and v.count < 2)}
    if not found:
        return None
    shown = [f"{k}: {v if isinstance(v, Difference) else f'{v:.3g}'}" for k, v in found.items()]
    left = [k for k, v in found.items() if not holds(v)]
    failed = [k for k in left if fails(found[k])]
    parts = [f"**fails**: {'; '.join(failed)}"] if failed else []
    if unclear := [k for k in left if k not in failed]:
        parts.append(f"not shown by these seeds: {'; '.join(unclear)}")
    return [what, target, "; ".join(shown), "; ".join(parts) or "holds"]


def _find(name: str) -> Route:
    return next(route for route in list_routes() if route.name == name)


main: Callable[..., None] = functools.partial(
    drive, __doc__, tuple(task for task in TASKS if task != "digits"), run, plot
)

if __name__ == "__main__":
    main()
