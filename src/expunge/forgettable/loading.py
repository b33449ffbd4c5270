"""A state folder as the head that wrote it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.memory import read_meta
from expunge.forgettable.statistics import StatisticsHead
from expunge.forgettable.tangent import TangentFeatures

Head = StatisticsHead | ConvexHead


def load(path: str | Path, network: nn.Module | None = None) -> Head:
    """The head that ``state=`` or ``save`` wrote to ``path``; it goes on there.

    ``network`` is the public one its features were made with. Without it the head can still forget
    and release; it cannot learn, and what it releases cannot be called.

    >>> load("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: state is '/nowhere'; it must be a folder that learn or save wrote
    """
    folder = Path(path)
    meta = read_meta(folder)
    features = _make_features(meta["features"], network)
    settings = dict(meta["settings"])
    targets = meta["targets"]
    given: dict[str, Any] = {
        "classes": targets["classes"],
        "outputs": targets["outputs"],
        "target_scale": targets["scale"],
        "state": folder,
    }
    if settings.pop("head") == "exact-statistics":
        return StatisticsHead(features, regularisation=settings["regularisation"], **given)
    return ConvexHead(features, **settings, **given)


def _make_features(description: dict[str, Any], network: nn.Module | None) -> Features:
    shape = {name: description[name] for name in ("bits", "lift", "seed")}
    if network is None:
        return Features.from_hash(description, **shape)
    if "tangent" in description:
        names = description["parameters"].split(" ")
        return TangentFeatures(network, description["tangent"], parameters=names, **shape)
    return Features(network, **shape)
