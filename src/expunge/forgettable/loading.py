"""A state folder as the head that wrote it, and a release as a module that predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from expunge.certificates.certificate import Certificate
from expunge.errors import CertificateError, InputError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.memory import read_meta
from expunge.forgettable.released import HeadModel
from expunge.forgettable.statistics import StatisticsHead
from expunge.forgettable.tangent import TangentFeatures
from expunge.processes.weights import hash_weights

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


def load_model(path: str | Path, network: nn.Module | None = None) -> HeadModel:
    """The module of a release directory: public features, then the released weights.

    A release holds the head alone. ``network`` is the public one that its certificate names by its
    hash; it is not needed where the inputs are vectors.

    >>> load_model("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate /nowhere/certificate.json is not a file that can...
    """
    folder = Path(path)
    certificate = Certificate.load(folder / "certificate.json")
    if certificate.statistics is None:
        raise InputError.of("path", str(folder), "a release of a statistics or convex head")
    told, head = dict(certificate.statistics.features), certificate.statistics.head
    told.pop("evaluation")
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CertificateError(f"{folder}/model.safetensors cannot be read: {error}") from None
    if hash_weights(tensors) != certificate.weights.after:
        raise CertificateError(f"{folder}/model.safetensors is not what its certificate is about")
    features, weights = _make_features(told, network), tensors["weight"].numpy()
    if features.describe() != told:
        found, named = features.describe()["network"], told["network"]
        raise InputError.of("network", found, f"the one with the hash {named}, as certified")
    unit = features.integers.unit(len(weights) - features.integers.lift - 1)
    return HeadModel(features, weights, unit, float(head.get("target_scale", 1.0))).eval()


def _make_features(description: dict[str, Any], network: nn.Module | None) -> Features:
    shape = {name: description[name] for name in ("bits", "lift", "seed")}
    if network is None:
        return Features.from_hash(description, **shape)
    if "tangent" in description:
        names = description["parameters"].split(" ")
        return TangentFeatures(network, description["tangent"], parameters=names, **shape)
    return Features(network, **shape)
