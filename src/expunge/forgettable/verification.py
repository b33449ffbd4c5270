"""A certificate checked against the stored integers of the rows that remain, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file
from scipy import linalg

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashing import hash_tensors
from expunge.errors import CertificateError, InputError, VerificationError
from expunge.forgettable.losses import check_loss
from expunge.forgettable.memory import Memory, open_memory, read_meta
from expunge.forgettable.ridge import one_thread, solve_ridge
from expunge.forgettable.solver import Objective
from expunge.forgettable.sums import Sums
from expunge.recipes import ConvexHeadRecipe

Weights = npt.NDArray[np.float64]
_STEEPEST = {"softmax": 0.5, "logistic": 0.25, "squared-hinge": 2.0}
_RARE = 12.0  # a Gaussian is further out once in e^72


def verify_store(
    certificate: Certificate, state: str | Path, weights: str | Path | None = None
) -> tuple[str, ...]:
    """Add up the stored rows again: sums, settings and released weights must be what is certified.

    Exact statistics are solved again, with the certified λ. Of a convex head the file ``weights``
    must be a minimiser on these rows, to the certified tolerance and noise; without it, they are
    not looked at. A :class:`VerificationError` names what differs; returned is what could not be
    checked. It costs as much as learning again.
    """
    told = certificate.statistics
    if told is None:
        raise InputError("this certificate is not of a head built to forget; it has no statistics")
    folder = Path(state)
    meta, memory = read_meta(folder), open_memory(folder)
    found, unchecked = _compare_settings(certificate, meta, memory), list[str]()
    sums = memory.add_all()
    if memory.sums.digest() != sums.digest():
        found.append(f"its file sums is {memory.sums.digest()}, its rows sum to {sums.digest()}")
    if sums.digest() != told.digest:
        found.append(f"the stored rows sum to {sums.digest()}, not to {told.digest}")
    if sums.rows != told.samples:
        found.append(f"{sums.rows} rows are stored, not {told.samples}")
    if again := len(memory.find_returned()):
        found.append(f"{again} of the forgotten are held again")
    recipe = certificate.method
    if not found and not isinstance(recipe, ConvexHeadRecipe):
        found += _check_ridge(certificate, meta["settings"]["regularisation"], sums, memory.unit)
    elif not found and isinstance(recipe, ConvexHeadRecipe) and weights is not None:
        W = _read_weights(certificate, Path(weights), sums)
        if recipe.noise_std > 0 and told.head["loss"] == "poisson":
            unchecked.append("weights of a Poisson head with noise cannot be checked")
        else:
            found += _check_convex(recipe, certificate.finite_precision.grid, W, memory, sums)
    if found:
        raise VerificationError(f"{state} does not hold what is certified: " + "; ".join(found))
    return tuple(unchecked)


def _compare_settings(
    certificate: Certificate, meta: Mapping[str, Any], memory: Memory
) -> list[str]:
    """Features, recipe and head are those of the state; the head's λ is one of its candidates."""
    told, recipe, settings = certificate.statistics, certificate.method, meta["settings"]
    assert told is not None
    features = meta["features"] | {"evaluation": meta["evaluation"]}
    targets, head = memory.targets, dict(told.head)
    shape = {"outputs": targets.width, "classification": targets.classes is not None}
    held: dict[str, Any] = shape | ({} if targets.classes else {"target_scale": targets.scale})
    ours: dict[str, Any] = {"head": certificate.recipe.method}
    if isinstance(recipe, ConvexHeadRecipe):
        ours |= {"weight_decay": recipe.weight_decay, "tolerance": recipe.tolerance}
        held |= {"loss": settings.get("loss")}
        theirs = {name: settings.get(name) for name in ours}
    else:
        held |= {"loss": "squared"}
        ours["regularisation"] = head.pop("regularisation", None)
        theirs = {"head": settings["head"], "regularisation": ours["regularisation"]}
        if ours["regularisation"] not in settings.get("regularisation", ()):
            theirs["regularisation"] = settings.get("regularisation")
    pairs = (("features are", features, told.features), ("head is", held, head))
    return [
        f"its {name} {stored}, not {certified}"
        for name, stored, certified in (*pairs, ("settings are", theirs, ours))
        if stored != certified
    ]


def _check_ridge(
    certificate: Certificate, candidates: list[float], sums: Sums, unit: float
) -> list[str]:
    assert certificate.statistics is not None
    certified = certificate.statistics.head.get("regularisation")
    W, chosen = solve_ridge(sums, candidates, unit)
    if chosen != certified:
        return [f"the sums choose regularisation {chosen}, not {certified}"]
    weights = _hash(W)
    if weights == certificate.weights.after:
        return []
    return [
        f"the sums give weights {weights} here, the certificate has "
        f"{certificate.weights.after} (last digits depend on the machine)"
    ]


def _hash(W: Weights) -> str:
    return hash_tensors([("weight", "F64", W.shape, W.tobytes())])


def _read_weights(certificate: Certificate, path: Path, sums: Sums) -> Weights:
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CertificateError(f"weights {path} cannot be read: {error}") from None
    W = tensors.get("weight")
    if W is None or W.dtype != np.float64 or W.shape != sums.cross.shape:
        raise VerificationError(f"{path} is not a head of shape {sums.cross.shape}")
    if _hash(W) != certificate.weights.after:
        raise VerificationError(f"{path} is not what the certificate is about")
    return W


def _check_convex(
    recipe: ConvexHeadRecipe, grid: float, W: Weights, memory: Memory, sums: Sums
) -> list[str]:
    """‖∇F(W)‖ is what a minimiser to τ, plus the noise, can have.

    Without noise at most τ. With Z ~ N(0, σ²I) on d weights, and K = c I ⊗ G/(nU²) + m above every
    Hessian, as no ∂²ℓ/∂z² is above c:

        m ‖Z‖ - τ ≤ ‖∇F(W)‖ ≤ τ + ‖K‖^½ ‖K^½ Z‖,      ‖Z‖ ≥ σ (√(d-1) - 12)
                                                      ‖K^½ Z‖ ≤ σ ((tr K)^½ + 12 ‖K‖^½)

    but once in e^72 releases. The grid moves every weight by at most a cell. What is refused is
    outside for certain, rounding of the gradient included.
    """
    loss, m, tau = check_loss(memory.settings["loss"]), recipe.weight_decay, recipe.tolerance
    gram, n, d = sums.gram.astype(np.float64), sums.rows, W.size
    objective = Objective(loss, m, memory.unit, list(memory.read_blocks()), gram)
    with one_thread(), np.errstate(over="ignore", invalid="ignore"):
        _, gradient, above, _ = objective.evaluate(W)
    norm = float(np.linalg.norm(gradient))
    below, least, most = 2 * norm - above, 0.0, tau
    if recipe.noise_std > 0:
        c, scale, cells = _STEEPEST[loss], n * memory.unit**2, 2 * grid * math.sqrt(d)
        last = len(gram) - 1
        with one_thread():
            largest = float(linalg.eigvalsh(gram, subset_by_index=[last, last])[0]) / scale
        K = (c * largest + m) * (1 + 1e-6)
        trace = c * W.shape[1] * float(gram.trace()) / scale + m * d
        noise = recipe.noise_std * (math.sqrt(trace) + _RARE * math.sqrt(K))
        most = tau + math.sqrt(K) * noise * (1 + 1e-6) + K * cells
        least = m * (recipe.noise_std * (math.sqrt(d - 1) - _RARE) - cells) - tau
    if not below <= most:
        return [f"the gradient of the released weights is {norm:.2e}, above {most:.2e}"]
    if not above >= least:
        return [f"the gradient of the released weights is {norm:.2e}: noise is missing"]
    return []
