"""``expunge doctor``: the environment."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import typer

import expunge
from expunge.cli.text import AsJson, show
from expunge.display import tabulate

NEEDED = ("numpy", "scipy", "safetensors", "pydantic", "cryptography", "mpmath")
FOR = {
    "torch": "retraining, noise and shards",
    "scikit-learn": "linear models and the demo",
    "transformers": "its models",
    "peft": "its adapters",
    "pyarrow": "lists in Parquet",
    "ray": "shards on several machines",
}


def doctor(as_json: AsJson = False) -> None:
    """Which versions of what expunge needs are here, and what may be missing.

    Exit 1 if that is not enough.
    """
    versions = {"expunge": expunge.__version__, "python": platform.python_version()}
    found = {name: _find_version(name) for name in (*NEEDED, *FOR)}
    good = all(found[name] for name in NEEDED)
    absent = {
        n: f"not here: {FOR[n]}" if n in FOR else "MISSING" for n, v in found.items() if not v
    }
    verdict = "all is well" if good else "NOT USABLE: install what is missing"
    rows = [(name, str(shown)) for name, shown in (versions | found | absent).items()]
    facts = {"good": good, "versions": versions | found}
    show(facts, tabulate("expunge and what it uses", rows, note=verdict), as_json)
    if not good:
        raise typer.Exit(1)


def _find_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
