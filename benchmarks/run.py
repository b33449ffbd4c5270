"""``make bench``: one table, results/latest.json suite by suite, and the page docs/howto/speed.md.

Name suites to measure only those (``--only heads`` or ``heads``); the rows of the others stay.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
SUITES = (
    "accounting",
    "latency",
    "noise",
    "engine",
    "memory",
    "data",
    "throughput",
    "baselines",
    "audit",
    "distributed",
    "figures",
    "convex",
    "heads",
    "shards",
)
RESULTS, PAGE = "results/latest.json", "docs/howto/speed.md"
START, END = "<!-- heads -->\n", "\n<!-- end of heads -->"
ON_PAGE = ("convex", "heads")


def main(arguments: list[str]) -> int:
    console = Console()
    names = [name for name in arguments if name != "--only"]
    rows: list[dict[str, Any]] = []
    failed: list[str] = []
    for name in names or SUITES:
        console.print(f"measuring {name} …")
        started = time.monotonic()
        try:
            found = importlib.import_module(f"benchmarks.{name}").run()
        except Exception:
            console.print_exception()
            failed.append(name)
            continue
        rows += [{"suite": name} | row for row in found]
        write([*keep(names), *rows])
        console.print(f"  {time.monotonic() - started:.0f} s")
    console.print(tabulate(rows))
    if failed:
        console.print(f"failed: {', '.join(failed)}")
    return len(failed)


def keep(names: list[str]) -> list[dict[str, Any]]:
    """Where only some suites are measured, the rows of the others."""
    path = HERE / RESULTS
    known = json.loads(path.read_text())["ratios"] if names and path.exists() else []
    return [row for row in known if row["suite"] not in names]


def write(rows: list[dict[str, Any]]) -> None:
    """What is measured so far; a suite that fails later takes nothing away."""
    machine = {"python": platform.python_version(), "cores": os.cpu_count()}
    target_file = HERE / RESULTS
    target_file.parent.mkdir(exist_ok=True)
    target_file.write_text(json.dumps({"machine": machine, "ratios": rows}, indent=1) + "\n")
    if (page := HERE.parent / PAGE).exists():
        before, _, rest = page.read_text(encoding="utf-8").partition(START)
        after = rest.partition(END)[2]
        page.write_text(f"{before}{START}{list_ratios(rows)}{END}{after}", encoding="utf-8")


def list_ratios(rows: list[dict[str, Any]]) -> str:
    """The rows of heads that forget, as the page on speed shows them."""
    lines = ["| ratio | found | target |", "|---|---|---|"]
    for row in rows:
        if row["suite"] in ON_PAGE:
            lines.append(f"| {row['name']} | {row['ratio']:.3g} | {_describe_target(row)} |")
    return "\n".join(lines)


def _describe_target(row: dict[str, Any]) -> str:
    if row.get("target") is None:
        return "–"
    direction = "≥" if row.get("direction") == "at least" else "≤"
    return f"{direction} {row['target']:g}" + ("" if row.get("met") else "  missed")


def tabulate(rows: list[dict[str, Any]]) -> Table:
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
