"""``make bench``: one table, and benchmarks/results/latest.json. Name suites to run only those."""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
import time
from pathlib import Path

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
)


def main(names: list[str]) -> None:
    console = Console()
    rows = []
    for name in names or SUITES:
        console.print(f"measuring {name} …")
        started = time.monotonic()
        rows += [
            {"suite": name} | row for row in importlib.import_module(f"benchmarks.{name}").run()
        ]
        console.print(f"  {time.monotonic() - started:.0f} s")
    table = Table(box=SIMPLE)
    for column in ("suite", "what", "ratio", "spread", "target"):
        table.add_column(column, overflow="fold")
    for row in rows:
        low, high = row.get("spread") or (row["ratio"], row["ratio"])
        target = row.get("target")
        direction = "≥" if row.get("direction") == "at least" else "≤"
        verdict = {True: "", False: "  missed", None: ""}[row.get("met")]
        table.add_row(
            row["suite"],
            row["name"],
            f"{row['ratio']:.3g}",
            f"{low:.3g} … {high:.3g}",
            "–" if target is None else f"{direction} {target:g}{verdict}",
        )
    console.print(table)
    if not names:
        machine = {"python": platform.python_version(), "cores": os.cpu_count()}
        target_file = HERE / "results" / "latest.json"
        target_file.parent.mkdir(exist_ok=True)
        target_file.write_text(json.dumps({"machine": machine, "ratios": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
