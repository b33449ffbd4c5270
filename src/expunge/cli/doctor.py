"""``expunge doctor`` and ``--version``: the environment."""

from __future__ import annotations

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from expunge.cli.text import AsJson, print_json

PACKAGES = ("torch", "numpy", "scipy", "safetensors", "pydantic", "cryptography", "mpmath")
OPTIONAL = ("transformers", "peft", "pyarrow", "ray", "opacus")


def doctor(as_json: AsJson = False) -> None:
    """What expunge finds here: versions, noise, threads, disk. Exit 1 if unusable."""
    import torch

    from expunge.noisy.noise import SystemNoise

    SystemNoise().begin()
    versions, folder = list_versions(), Path.cwd()
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    missing = [name for name in PACKAGES if versions[name] is None]
    good = not missing and writable and free > 1e8
    findings = {
        "system": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": describe_versions(versions),
        "missing": ", ".join(missing) or "nothing that is needed",
        "noise": "fresh keys from the operating system, AES-256 counter mode",
        "threads": f"{torch.get_num_threads()} for torch",
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "disk": f"{free / 1e9:,.1f} GB free in {folder}" + ("" if writable else ", not writable"),
    }
    if as_json:
        print_json({"good": good, "versions": versions, "findings": findings})
    else:
        for name, text in findings.items():
            typer.echo(f"{name:<9} {text}")
        typer.echo("all is well" if good else "NOT USABLE: see missing and disk")
    if not good:
        raise typer.Exit(1)


def show_version() -> None:
    """expunge's version, then those of what computes with it."""
    versions = list_versions()
    typer.echo(f"expunge {versions.pop('expunge')}")
    typer.echo(describe_versions(versions))


def describe_versions(versions: dict[str, str | None]) -> str:
    """Those that are there, in one line.

    >>> describe_versions({"torch": "2.9", "ray": None})
    'torch 2.9'
    """
    return ", ".join(f"{name} {number}" for name, number in versions.items() if number is not None)


def list_versions() -> dict[str, str | None]:
    """expunge, Python and the packages that matter; None for what is not installed.

    >>> list_versions()["python"] == platform.python_version()
    True
    """
    from expunge import __version__

    found: dict[str, str | None] = {"expunge": __version__, "python": platform.python_version()}
    for name in (*PACKAGES, *OPTIONAL):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found
