"""A certificate checked against the stored integers of the rows that remain, without torch."""

from __future__ import annotations

from pathlib import Path

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashing import hash_tensors
from expunge.errors import InputError, VerificationError
from expunge.forgettable.integers import Integers
from expunge.forgettable.memory import Memory, Targets, read_meta
from expunge.forgettable.ridge import solve_ridge


def verify_store(certificate: Certificate, state: str | Path) -> None:
    """Add up the stored rows again: their sums and hash must be the certificate's, and of exact
    statistics the weights that follow too.

    A :class:`VerificationError` names what differs. It costs as much as learning again.
    """
    told = certificate.statistics
    if told is None:
        raise InputError("this certificate is not of a head built to forget; it has no statistics")
    folder, found = Path(state), list[str]()
    meta = read_meta(folder)
    integers = Integers(*(meta["features"][name] for name in ("bits", "lift", "seed")))
    targets = Targets(**meta["targets"])
    memory = Memory(lambda: meta["features"], integers, targets, meta["settings"], folder)
    described = meta["features"] | {"evaluation": meta["evaluation"]}
    if described != told.features:
        found.append(f"its features are {described}, not {told.features}")
    sums = memory.add_all()
    if sums.digest() != told.digest:
        found.append(f"the stored rows sum to {sums.digest()}, not to {told.digest}")
    if sums.rows != told.samples:
        found.append(f"{sums.rows} rows are stored, not {told.samples}")
    if meta["settings"]["head"] == "exact-statistics" and not found:
        W, _ = solve_ridge(sums, meta["settings"]["regularisation"], memory.unit)
        weights = hash_tensors([("weight", "F64", W.shape, W.tobytes())])
        if weights != certificate.weights.after:
            found.append(
                f"the sums give weights {weights} here, the certificate has "
                f"{certificate.weights.after} (last digits depend on the machine)"
            )
    if found:
        raise VerificationError(f"{state} does not hold what is certified: " + "; ".join(found))
