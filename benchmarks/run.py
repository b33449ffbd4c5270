"""``make bench``: results/latest.json, suite by suite, and the page docs/speed.md.

Name suites to measure only those (``--only heads`` or ``heads``); the rows of the others stay, and
so do those of a suite that fails. ``--page`` writes the page from what was measured last.

A new suite is a file ``benchmarks/NAME.py`` and its name in ``SUITES``. Its docstring says on the
page what is compared; its ``run()`` returns rows of :func:`benchmarks.timing.compare`. The number
is its allowance in seconds: rounds beyond the third are left out once it is spent.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import platform
import re
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from benchmarks.timing import within

HERE = Path(__file__).parent
SUITES = {
    "heads": 75,
    "convex": 135,
    "shards": 40,
    "ledger": 20,
    "throughput": 90,
    "figures": 40,
    "engine": 20,
    "noise": 15,
    "memory": 15,
    "data": 15,
    "baselines": 30,
    "distributed": 25,
    "audit": 15,
    "accounting": 15,
    "latency": 25,
    "cached": 10,
    "estimates": 15,
}
MOST_SECONDS = 600
RESULTS, PAGE = "results/latest.json", "docs/speed.md"
START, END = "<!-- ratios -->\n", "\n<!-- end of ratios -->"
Facts = dict[str, Any]


def main(arguments: list[str]) -> int:
    console, facts = Console(), read()
    if arguments == ["--page"]:
        write(facts)
        return 0
    names = [name for name in arguments if name != "--only"]
    if unknown := [name for name in names if name not in SUITES]:
        console.print(f"suite is {unknown[0]!r}; it must be one of {', '.join(SUITES)}")
        return 2
    began, failed = time.monotonic(), list[str]()
    for name in names or SUITES:
        console.print(f"measuring {name} …")
        started = time.monotonic()
        try:
            with within(SUITES[name]):
                found = importlib.import_module(f"benchmarks.{name}").run()
        except Exception:
            console.print_exception()
            failed.append(name)
            continue
        seconds = round(time.monotonic() - started)
        facts = replace_suite(facts, name, found, seconds)
        write(facts)
        console.print(f"  {seconds} s")
    console.print(tabulate([row for row in facts["ratios"] if row["suite"] in (names or SUITES)]))
    spent = time.monotonic() - began
    console.print(f"{spent:.0f} s" + ("" if names else f" of at most {MOST_SECONDS}"))
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return len(failed)


def read() -> Facts:
    """What was measured last."""
    path = HERE / RESULTS
    known: Facts = json.loads(path.read_text()) if path.exists() else {}
    return {"suites": known.get("suites", {}), "ratios": known.get("ratios", [])}


def replace_suite(facts: Facts, name: str, rows: list[Facts], seconds: int) -> Facts:
    """The rows of a suite in the place of those before, in the order of the suites."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    told = {"seconds": seconds, "measured": date.today().isoformat(), **machine}
    suites = facts["suites"] | {name: told}
    kept = [row for row in facts["ratios"] if row["suite"] in SUITES and row["suite"] != name]
    order = list(SUITES)
    ratios = sorted(
        [*kept, *({"suite": name} | row for row in rows)], key=lambda row: order.index(row["suite"])
    )
    return {"suites": {n: suites[n] for n in SUITES if n in suites}, "ratios": ratios}


def write(facts: Facts) -> None:
    """What is measured so far, as JSON and on the page."""
    target = HERE / RESULTS
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(facts, indent=1) + "\n")
    if (page := HERE.parent / PAGE).exists():
        before, _, rest = page.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{START}{list_ratios(facts)}{END}{after}", encoding="utf-8")


def list_ratios(facts: Facts) -> str:
    """Every suite: what it compares, when it was measured, each ratio with its target."""
    parts = list[str]()
    for name in SUITES:
        rows = [row for row in facts["ratios"] if row["suite"] == name]
        if not rows:
            continue
        told = facts["suites"].get(name)
        when = f" {told['measured']}, {told['seconds']} s." if told else ""
        lines = [f"### {name}\n\n{describe(name)}\n\n`python -m benchmarks.run {name}`.{when}\n"]
        lines += ["| ratio | found | target |", "|---|---|---|"]
        lines += [f"| {r['name']} | {r['ratio']:.3g} | {_describe_target(r)} |" for r in rows]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def describe(name: str) -> str:
    """The docstring of a suite, as Markdown, without importing it."""
    found = importlib.util.find_spec(f"benchmarks.{name}")
    if found is None or found.origin is None:
        return ""
    tree = compile(Path(found.origin).read_text(encoding="utf-8"), name, "exec")
    text = inspect.cleandoc(next((c for c in tree.co_consts if isinstance(c, str)), ""))
    text = re.sub(r"``(.+?)``", r"`\1`", text)
    return re.sub(r"(?<=\S)\n(?=[^\s-])", " ", re.sub(r"\n +", " ", text))


def _describe_target(row: Facts) -> str:
    if row.get("target") is None:
        return "–"
    direction = "≥" if row.get("direction") == "at least" else "≤"
    return f"{direction} {row['target']:g}" + ("" if row.get("met") else "  missed")


def tabulate(rows: list[Facts]) -> Table:
    table = Table(box=SIMPLE)
    for column in ("suite", "what", "ratio", "spread", "target"):
        table.add_column(column, overflow="fold")
    for row in rows:
        low, high = row.get("spread") or (row["ratio"], row["ratio"])
        table.add_row(
            row["suite"],
            row["name"],
            f"{row['ratio']:.3g}",
            f"{low:.3g} … {high:.3g}",
            _describe_target(row),
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
