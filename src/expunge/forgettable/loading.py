"""A state folder as the head that wrote it, and a certificate checked against stored integers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from expunge.certificates.certificate import Certificate
from expunge.errors import InputError, VerificationError
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.memory import read_meta
from expunge.forgettable.released import hash_head
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


def verify_store(certificate: Certificate, state: str | Path) -> None:
    """Add up the stored rows again: sums, their hash and the weights must be the certificate's.

    A :class:`VerificationError` names what differs. It costs as much as learning again.
    """
    told = certificate.statistics
    if told is None:
        raise InputError("this certificate is not of a head built to forget; it has no statistics")
    head, found = load(state), list[str]()
    sums = head.add_up()
    if sums.digest() != told.digest:
        found.append(f"the stored rows sum to {sums.digest()}, not to {told.digest}")
    if sums.rows != told.samples:
        found.append(f"{sums.rows} rows are stored, not {told.samples}")
    if isinstance(head, StatisticsHead) and not found:
        weights = hash_head(head.solve(sums)[0])
        if weights != certificate.weights.after:
            found.append(
                f"the sums give weights {weights} here, the certificate has "
                f"{certificate.weights.after} (the last digits depend on the machine)"
            )
    if found:
        raise VerificationError(f"{state} does not hold what is certified: " + "; ".join(found))
