"""``expunge doctor``: the environment, and the speed of this machine's noisy step."""

from __future__ import annotations

import functools
import itertools
import os
import platform
import shutil
import sys
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import typer

from expunge.cli.text import AsJson, print_json

PACKAGES = ("torch", "numpy", "scipy", "safetensors", "pydantic", "cryptography", "mpmath")
OPTIONAL = ("transformers", "peft", "pyarrow", "tensorboard", "opacus")
SPEED_PARAMETERS = 1_000_000


@dataclass(frozen=True)
class Finding:
    """One line: ``good`` is False for what would keep expunge from working, None for news."""

    name: str
    text: str
    good: bool | None = True


def doctor(as_json: AsJson = False) -> None:
    """The environment, and how fast a noisy step is here. Exit 1 if unusable."""
    findings, speed = examine()
    good = all(finding.good is not False for finding in findings)
    if as_json:
        facts = {finding.name: finding.text for finding in findings}
        print_json({"good": good, "versions": list_versions(), **speed, "findings": facts})
    else:
        for finding in findings:
            mark = {True: "ok", False: "NO", None: "  "}[finding.good]
            typer.echo(f"{mark}  {finding.name:<10}  {finding.text}")
    if not good:
        sys.exit(1)


def show_version() -> None:
    """expunge's version, then those of what computes with it."""
    versions = list_versions()
    typer.echo(f"expunge {versions.pop('expunge')}")
    shown = [f"{name} {number}" for name, number in versions.items() if number is not None]
    typer.echo(", ".join(shown))


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


def examine(parameters: int = SPEED_PARAMETERS) -> tuple[list[Finding], dict[str, float]]:
    """Everything worth knowing, and the measured speeds."""
    import torch

    from expunge.noisy.noise import SystemNoise

    versions, folder = list_versions(), Path.cwd()
    shown = [f"{name} {versions[name]}" for name in ("expunge", "python", *PACKAGES)]
    extra = [f"{name} {versions[name]}" for name in OPTIONAL if versions[name] is not None]
    absent = [name for name in OPTIONAL if versions[name] is None]
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    place = f"{free / 1e9:,.1f} GB free in {folder}" + ("" if writable else ", not writable")
    SystemNoise().begin()
    speed = measure_step(parameters)
    findings = [
        Finding("system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs"),
        Finding("versions", ", ".join(shown), all(versions[name] for name in PACKAGES)),
        Finding(
            "optional", f"{', '.join(extra) or 'none'} (not installed: {', '.join(absent)})", None
        ),
        Finding("noise", "fresh keys from the operating system, AES-256 counter mode"),
        Finding("threads", f"{torch.get_num_threads()} for torch"),
        *([Finding("cuda", torch.cuda.get_device_name())] if torch.cuda.is_available() else []),
        Finding("disk", place, writable and free > 1e8),
        Finding(
            "noisy step",
            f"{speed['parameters_per_second'] / 1e6:,.1f} million parameters per second "
            f"({speed['milliseconds_per_step']:,.0f} ms for {parameters:,}, "
            f"{speed['plain_step_ratio']:,.0f} times a step without noise)",
        ),
    ]
    return findings, speed


def measure_step(parameters: int) -> dict[str, float]:
    """The time of one noisy step over this many parameters, beside a plain step of the same.

    A linear model and a single example: the gradient costs next to nothing.
    """
    import torch
    from torch import nn

    from expunge.noisy.run import unlearn
    from expunge.recipes import GradientClipping

    model = nn.Linear(parameters, 1, bias=False)
    batches = [(torch.ones(1, parameters), torch.ones(1, 1))]
    numbers = {"start_clip": 1.0, "grad_clip": 1.0, "learning_rate": 0.1, "weight_decay": 1.0}
    seconds: dict[float, float] = {}
    for noise_std in (1.0, 0.0):
        times = list[float]()
        recipe = GradientClipping(**numbers, steps=4, noise_std=noise_std)
        clock = functools.partial(_note, times)
        unlearn(model, batches, recipe, loss_fn=nn.functional.mse_loss, on_step=clock)
        seconds[noise_std] = min(b - a for a, b in itertools.pairwise(times))
    return {
        "milliseconds_per_step": 1e3 * seconds[1.0],
        "parameters_per_second": parameters / seconds[1.0],
        "plain_step_ratio": seconds[1.0] / seconds[0.0],
    }


def _note(times: list[float], done: int, model: object) -> None:
    times.append(time.perf_counter())
