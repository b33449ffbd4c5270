"""A state folder as the head that wrote it, and a release as a module that predicts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, overload

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from expunge.certificates.certificate import Certificate
from expunge.errors import CertificateError, InputError
from expunge.forgettable.averaging import Combination, Ensemble
from expunge.forgettable.constituents import Build
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.folders import holds_shards, read_shards_meta
from expunge.forgettable.memory import read_meta
from expunge.forgettable.released import HeadModel
from expunge.forgettable.shards import Shards
from expunge.forgettable.statistics import StatisticsHead
from expunge.forgettable.tangent import TangentFeatures
from expunge.processes.weights import hash_weights

Head = StatisticsHead | ConvexHead


@overload
def load(path: str | Path, network: nn.Module | None = None) -> Head: ...


@overload
def load(path: str | Path, *, build: Build, **functions: Any) -> Shards: ...


def load(
    path: str | Path,
    network: nn.Module | None = None,
    *,
    build: Build | None = None,
    **functions: Any,
) -> Head | Shards:
    """The head that ``state=`` or ``save`` wrote to ``path``; it goes on there.

    ``network`` is the public one its features were made with. Without it the head can still forget
    and release; it cannot learn, and what it releases cannot be called. Shards need ``build``, and
    as keywords whatever else they were given that is no number or name: ``train``, ``public``, …

    >>> load("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: state is '/nowhere'; it must be a folder that learn or save wrote
    """
    if build is not None:
        return _load_shards(Path(path), build, functions)
    folder = Path(path)
    if holds_shards(folder):
        raise InputError.of("build", None, "given: the function that makes the network of shards")
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


def _load_shards(folder: Path, build: Build, functions: dict[str, Any]) -> Shards:
    settings = read_shards_meta(folder / "meta.json")["settings"]
    training: dict[str, Any] = settings["training"]
    known = {"epochs", "learning_rate", "batch_size", "weight_decay", "momentum", "schedule"}
    given = {name: training[name] for name in known & training.keys()}
    own = {name: settings[name] for name in ("shards", "slices", "seed")}
    own |= {name: settings[name] for name in ("combination", "deterministic")}
    return Shards(build, state=folder, **own, **given, **functions)


def load_model(path: str | Path, network: nn.Module | None = None) -> nn.Module:
    """The module of a release directory of a head or of shards.

    A release holds the head alone. ``network`` is the public one that its certificate names by its
    hash; it is not needed where the inputs are vectors. Of shards it is what ``build()`` makes.

    >>> load_model("/nowhere")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate /nowhere/certificate.json is not a file that can...
    """
    folder = Path(path)
    certificate = Certificate.load(folder / "certificate.json")
    try:
        tensors = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise CertificateError(f"{folder}/model.safetensors cannot be read: {error}") from None
    if hash_weights(tensors) != certificate.weights.after:
        raise CertificateError(f"{folder}/model.safetensors is not what its certificate is about")
    if certificate.shards is not None and network is not None:
        return _join_shards(certificate.shards.combination, network, tensors)
    if certificate.statistics is None:
        raise InputError.of("path", str(folder), "a release of a head; of shards, give network=")
    told, head = dict(certificate.statistics.features), certificate.statistics.head
    told.pop("evaluation")
    features, weights = _make_features(told, network), tensors["weight"].numpy()
    if features.describe() != told:
        ours = features.describe()
        named = "network" if ours["network"] != told["network"] else "code"
        valid = f"the one with the hash {told.get(named)}, as certified"
        raise InputError.of("network", ours[named], valid)
    unit = features.integers.unit(len(weights) - features.integers.lift - 1)
    return HeadModel(features, weights, unit, float(head.get("target_scale", 1.0))).eval()


def _join_shards(
    combination: Combination, network: nn.Module, tensors: dict[str, Tensor]
) -> nn.Module:
    parts: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        first, _, rest = name.removeprefix("constituents.").partition(".")
        if not name.startswith("constituents."):
            raise InputError("this release is one distilled network; put its tensors into build()")
        parts.setdefault(int(first), {})[rest] = tensor
    return Ensemble(network, dict(sorted(parts.items())), combination).eval()


def _make_features(description: dict[str, Any], network: nn.Module | None) -> Features:
    shape = {name: description[name] for name in ("bits", "lift", "seed")}
    if network is None:
        return Features.from_hash(description, **shape)
    if "tangent" in description:
        names = description["parameters"].split(" ")
        return TangentFeatures(network, description["tangent"], parameters=names, **shape)
    return Features(network, **shape)
