"""``expunge doctor``: the environment."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from expunge.cli.text import AsJson, echo, print_json

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
    """What expunge finds here: versions, threads, disk.

    Exit 1 if that is not enough.
    """
    versions, folder = list_versions(), Path.cwd()
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    missing = [name for name in NEEDED if versions[name] is None]
    absent = [f"{name} ({use})" for name, use in FOR.items() if versions[name] is None]
    good = not missing and writable and free > 1e8
    findings = {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": ", ".join(f"{name} {number}" for name, number in versions.items() if number),
        "missing": ", ".join(missing) or "nothing that is needed",
        "not here": ", ".join(absent) or "nothing that may be used",
        "torch": _describe_torch() if versions["torch"] is not None else "none",
        "disk": f"{free / 1e9:,.1f} GB free in {folder}" + ("" if writable else ", not writable"),
    }
    if as_json:
        print_json({"good": good, "versions": versions, "findings": findings})
    else:
        for name, text in findings.items():
            echo(f"{name:<9} {text}")
        echo("all is well" if good else "NOT USABLE: see missing and disk")
    if not good:
        raise typer.Exit(1)


def _describe_torch() -> str:
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA"
    return f"{torch.get_num_threads()} threads, {device}"


def list_versions() -> dict[str, str | None]:
    """expunge, Python and the packages that matter; None for what is not installed.

    >>> list_versions()["python"] == platform.python_version()
    True
    """
    from expunge import __version__

    found: dict[str, str | None] = {"expunge": __version__, "python": platform.python_version()}
    for name in (*NEEDED, *FOR):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
