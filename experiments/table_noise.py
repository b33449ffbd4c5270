"""Table 1 and all hyper-parameter tables of the paper: noise and iterations, from the accountants.

    python experiments/table_noise.py            # experiments/results/noise.md
    python experiments/table_noise.py --smoke    # three rows of each table, to runs/smoke

For every distinct row as the paper prints it (tests/data): the ε it is labelled with, the ε it
truly certifies at δ = 1e-5, and the noise that its label would need; for model clipping the steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from arms import DELTA, PRINTED, RECIPES, read_table
from expunge import ModelClipping, calibrate, guarantee
from options import Options, drive
from summary import make_table, publish


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Distinct rows; the compute budget does not matter to an accountant."""
    rows = [{k: v for k, v in row.items() if k != "epochs"} for row in read_table(path)]
    return [row for n, row in enumerate(rows) if row not in rows[:n]]


def account_row(kind: Any, row: dict[str, Any]) -> tuple[float, float, float]:
    """(labelled ε, certified ε, the noise that the label needs / the printed noise)."""
    fields = {name: value for name, value in row.items() if name != "epsilon"}
    target = {"epsilon": row["epsilon"], "delta": DELTA}
    printed = row["noise_std"]
    needed = calibrate(lambda s: kind(**fields | {"noise_std": s}), **target, start=printed)
    if kind is ModelClipping:
        fewest = calibrate(lambda n: kind(**fields | {"steps": int(n)}), **target, find="fewest")
        assert fewest.steps == row["steps"], "the paper's step counts are met, and not one fewer"
    found = guarantee(kind(**fields), delta=DELTA)
    return row["epsilon"], found.epsilon, needed.noise_std / printed


def tabulate(smoke: bool) -> str:
    """One line per table and label."""
    lines = list[list[object]]()
    for path in sorted(PRINTED.glob("*.csv")):
        name = path.stem.replace("_", " ")
        kind = next((k for n, k in RECIPES.items() if name.startswith(n.replace("-", " "))), None)
        rows = read_rows(path)[: 3 if smoke else None] if kind else []
        found = [account_row(kind, row) for row in rows]
        for label in dict.fromkeys(row[0] for row in found):
            _, *columns = zip(*(row for row in found if row[0] == label), strict=True)
            lines.append([name, f"{label:g}", len(columns[0]), *map(span, columns)])
    header = ["table", "labelled ε", "distinct rows", "truly certified ε", "noise needed / printed"]
    return make_table(header, lines) + "\n"


def span(values: tuple[float, ...]) -> str:
    """One number, or the range of several.

    >>> span((6.5730, 6.5731)), span((0.5, 1.0))
    ('6.573', '0.5 … 1')
    """
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} … {high}"


def show(_: str, options: Options) -> None:
    publish(tabulate(options.smoke), options.out / "noise.md")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("all rows",), None, show, arguments)


if __name__ == "__main__":
    main()
