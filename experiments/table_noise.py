"""Table 1 and all hyper-parameter tables of the paper: noise and iterations, from the accountants.

    python experiments/table_noise.py            # experiments/results/noise.csv and noise.md
    python experiments/table_noise.py --smoke    # the same code on three rows of each table

For every distinct row as the paper prints it (tests/data): the ε it is labelled with, the ε it
truly certifies at δ = 1e-5, and the noise that its label would need; for model clipping the steps.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path
from typing import Any

from expunge import GradientClipping, ModelClipping, OutputPerturbation, calibrate, guarantee

HERE = Path(__file__).parent
PRINTED = HERE.parent / "tests" / "data"
DELTA = 1e-5
METHODS = {
    "gradient_clipping": GradientClipping,
    "model_clipping": ModelClipping,
    "output_perturbation": OutputPerturbation,
}


def read_rows(path: Path) -> list[dict[str, float]]:
    """Distinct rows; the compute budget does not matter to an accountant."""
    with path.open(newline="") as file:
        rows = [
            {k: float(v) for k, v in row.items() if k != "epochs"} for row in csv.DictReader(file)
        ]
    return [row for n, row in enumerate(rows) if row not in rows[:n]]


def account_row(table: str, row: dict[str, float]) -> dict[str, Any]:
    """What a printed row says, and what is true."""
    kind = next(kind for name, kind in METHODS.items() if table.startswith(name))
    fields = {k: int(v) if k == "steps" else v for k, v in row.items() if k != "epsilon"}
    recipe = kind(**fields)
    found = guarantee(recipe, delta=DELTA)
    needed = calibrate(
        lambda sigma: kind(**(fields | {"noise_std": sigma})),
        epsilon=row["epsilon"],
        delta=DELTA,
        start=recipe.noise_std,
    )
    steps = fields.get("steps", 0)
    if kind is ModelClipping:
        fewest = calibrate(
            lambda n: kind(**(fields | {"steps": int(n)})),
            epsilon=row["epsilon"],
            delta=DELTA,
            find="fewest",
        )
        assert fewest.steps == steps, "the paper's step counts are met, and not one fewer"
    return {
        "table": table,
        "labelled_epsilon": row["epsilon"],
        **{k: fields.get(k) for k in ("start_clip", "grad_clip", "model_clip")},
        **{k: fields.get(k) for k in ("learning_rate", "weight_decay", "steps")},
        "printed_noise": recipe.noise_std,
        "certified_epsilon": found.epsilon,
        "needed_noise": needed.noise_std,
        "factor": needed.noise_std / recipe.noise_std,
        "survival_bound": found.survival_bound,
    }


def run(smoke: bool) -> list[dict[str, Any]]:
    """Every table, in the order of its name."""
    rows: list[dict[str, Any]] = []
    for path in sorted(PRINTED.glob("*.csv")):
        if path.stem.startswith(tuple(METHODS)):
            printed = read_rows(path)
            rows += [account_row(path.stem, row) for row in printed[: 3 if smoke else None]]
    return rows


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """The CSV for programs, and a summary for people: one line per table and label."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "noise.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    lines = [
        "| table | labelled ε | distinct rows | truly certified ε | noise needed / printed |",
        "|---|---|---|---|---|",
    ]
    for key in dict.fromkeys((row["table"], row["labelled_epsilon"]) for row in rows):
        group = [row for row in rows if (row["table"], row["labelled_epsilon"]) == key]
        spans = [span([row[name] for row in group]) for name in ("certified_epsilon", "factor")]
        name = key[0].replace("_", " ")
        lines.append(f"| {name} | {key[1]:g} | {len(group)} | {spans[0]} | {spans[1]} |")
    (out / "noise.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


def span(values: list[float]) -> str:
    """One number, or the range of several.

    >>> span([6.5730, 6.5731]), span([0.5, 1.0])
    ('6.573', '0.5 … 1')
    """
    low, high = f"{min(values):.4g}", f"{max(values):.4g}"
    return low if low == high else f"{low} … {high}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="three rows of each table")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    write(run(args.smoke), args.out)


if __name__ == "__main__":
    main()
