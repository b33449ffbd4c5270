"""``make bench``: every suite in a fresh process with one thread, a table, results/latest.json.

``python -m benchmarks.run step ledger`` measures only those; the rows of the others stay, and so do
those of a suite that fails. What a suite is: benchmarks/__init__.py.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

SUITES = ("step", "retraining", "linear_models", "shards", "ledger", "accounting")
RESULTS = Path(__file__).parent / "results" / "latest.json"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def main(arguments: list[str]) -> int:
    console = Console()
    if unknown := [name for name in arguments if name not in SUITES]:
        console.print(f"suite is {unknown[0]!r}; it must be one of {', '.join(SUITES)}")
        return 2
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    begun, failed = time.monotonic(), list[str]()
    for name in arguments or SUITES:
        if not Path(__file__).with_name(f"{name}.py").exists():
            console.print(f"{name}: no such file yet")
            continue
        console.print(f"measuring {name} …")
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.timing", name], cwd=Path(__file__).parents[1],
            env=os.environ | dict.fromkeys(THREADS, "1"), capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        if done.returncode:
            console.print(done.stderr, markup=False)
            failed.append(name)
            continue
        found[name] = {
            "seconds": round(time.monotonic() - started),
            "measured": date.today().isoformat(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "rows": json.loads(done.stdout.splitlines()[-1]),
        }
        RESULTS.parent.mkdir(exist_ok=True)
        ordered = {suite: found[suite] for suite in SUITES if suite in found}
        RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")
    console.print(tabulate(found, arguments or SUITES))
    console.print(f"{time.monotonic() - begun:.0f} s" + f"; failed: {failed}" * bool(failed))
    return len(failed)


def tabulate(found: dict[str, Any], names: tuple[str, ...] | list[str]) -> Table:
    """Every row: its target, what was measured, whether the target holds."""
    table = Table("suite", "what", "target", "measured", "rounds", "holds", box=SIMPLE)
    for name in names:
        for row in found.get(name, {}).get("rows", []):
            ratio, target = row["ratio"], row["target"]
            if ratio is None:
                table.add_row(name, row["name"], _write(target, "≤ "), row["note"], "", "–")
                continue
            holds = "" if target is None else "yes" if ratio <= target else "NO"
            spread = f"{row['low']:.3g} … {row['high']:.3g}"
            table.add_row(name, row["name"], _write(target, "≤ "), f"{ratio:.3g}", spread, holds)
    return table


def _write(value: float | None, before: str = "") -> str:
    return "" if value is None else f"{before}{value:g}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
