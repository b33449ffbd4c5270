"""The certificate: what a run guarantees, on what, and what it does not cover.

``certify`` is a pure function of the record. It publishes what may be published; the record itself
stays with the operator, bound by its blinded hash. Canonical JSON (RFC 8785) makes the bytes of a
certificate unique. ``expunge.verify`` checks one.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from expunge.accounting.guarantee import guarantee
from expunge.certificates.consistency import check_run, find_contradictions
from expunge.certificates.fields import Digest, Model, Names, Real, Text, serialise
from expunge.certificates.hashes import combine_leaves
from expunge.certificates.record import OWN, Record, Run
from expunge.certificates.signing import Signature, sign_bytes
from expunge.certificates.wording import BLOCKS, derive_scope, find_warnings, write_statement
from expunge.display import Shown, shorten
from expunge.errors import UnlearningError
from expunge.recipes import IDEAL, MAX_EPSILON, ComparedTo, is_exact

# A clock may be wrong, and a chain must go forward: a later request is not this much later.
LONGEST_GAP = timedelta(days=5 * 365)


class Bound(Model):
    """One (ε, δ) statement; ``mu`` is null where no μ is proved."""

    epsilon: Real
    delta: Annotated[float, Field(ge=0, lt=1)]
    mu: Real | None


class Scope(Model):
    """Plain sentences, derived from the other fields."""

    covered: Names
    not_covered: Names
    operator: Names
    void_if: Names


class Certificate(Run, Shown):
    """A certificate of unlearning; docs/certificate_format.md explains its fields.

    ``epsilon``, ``delta``, ``mu`` are those of ``compared_to``; ``retrained`` and ``centre`` give
    both choices; ``releasable`` is False where a warning begins with "Not for release".
    """

    what: ClassVar[str] = "certificate"
    most_bytes: ClassVar[int] = 100_000_000
    private: ClassVar[bool] = False
    schema_version: Literal[1]
    epsilon: Real
    delta: Annotated[float, Field(ge=0, lt=1)]
    mu: Real | None
    compared_to: ComparedTo
    theorem: Text
    retrained: Bound
    centre: Bound
    survival_bound: Annotated[float, Field(ge=0, le=1)]
    releasable: bool
    warnings: Names
    scope: Scope
    record: Digest
    digest: Digest
    signature: Signature | None

    @model_validator(mode="after")
    def _check_salts(self) -> Certificate:
        for people in (self.forget, self.retained):
            if people.salt is not None or people.leaves is not None:
                raise ValueError("a salt or leaves are given; they belong in the record")
        return self

    @property
    def method(self) -> str:
        """The method's name on the command line and in files."""
        return self.recipe.method

    @property
    def releases(self) -> int:
        """How many released noisy runs of the same old model this accounts for, together."""
        return self.execution.releases

    def compute_digest(self) -> str:
        """SHA-256 of the canonical bytes without ``digest`` and ``signature``."""
        plain = self.model_dump(mode="json", exclude={"digest", "signature"})
        return hashlib.sha256(serialise(plain)).hexdigest()

    def signed_bytes(self) -> bytes:
        """What a signature signs: everything but itself."""
        plain = self.model_dump(mode="json", exclude={"signature"})
        return b"expunge/certificate-1\0" + serialise(plain)

    def sign(self, private_key: bytes | str | Path) -> Certificate:
        """The same certificate, signed with an Ed25519 key: PEM bytes, or a PEM file's path."""
        return self.model_copy(update={"signature": sign_bytes(self.signed_bytes(), private_key)})

    def statement(self) -> str:
        """The certificate in plain language, for an auditor."""
        return write_statement(self)

    def __str__(self) -> str:
        return write_statement(self)


def certify(
    record: Record,
    *,
    delta: float = 1e-5,
    compared_to: ComparedTo = "retrained",
    releases: int = 1,
    parent: Certificate | None = None,
) -> Certificate:
    """The certificate of a run at δ; an :class:`UnlearningError` says why there can be none.

    ``parent`` is the certificate of the release before, whose hash the record names. ``releases``
    counts the released noisy runs of the same old model, this one included. An exact run has
    (0, 0), whatever ``delta`` says.

    >>> from expunge.certificates.people import commit
    >>> from expunge.certificates.record import Code, TrainingRun, Weights
    >>> from expunge.recipes import Retraining
    >>> record = Record(
    ...     recipe=Retraining(), parameters=3, start="build", forget=commit(["ann"], 2),
    ...     retained=commit(["bob"], 5), code=Code(),
    ...     weights=Weights(after="b" * 64, start="a" * 64),
    ...     training=TrainingRun(function="expunge.Training", examples=5))
    >>> certificate = certify(record)
    >>> certificate.epsilon, certificate.delta, certificate.releasable
    (0.0, 0.0, True)
    """
    problems, certificate = list[str](), derive(record, delta, compared_to, releases)
    if parent is not None:
        problems = [*check_link(certificate, parent), *check_clock(certificate.created, parent)]
    elif record.parent is not None:
        problems = [f"it names the parent {record.parent}, which must be given to check the chain"]
    if problems:
        raise UnlearningError("this run cannot be certified: " + "; ".join(problems))
    return certificate


def derive(record: Record, delta: float, compared_to: ComparedTo, releases: int) -> Certificate:
    """The certificate that follows from a record alone."""
    if problems := find_contradictions(record):
        raise UnlearningError("this run cannot be certified: " + "; ".join(problems))
    ran = replace(record.execution, releases=max(releases, record.execution.releases))
    ran = IDEAL if is_exact(record.recipe) else ran  # exact releases do not add up
    found = guarantee(record.recipe, delta=delta, compared_to=compared_to, execution=ran)
    largest = max(found.retrained.epsilon, found.centre.epsilon)
    if not largest <= MAX_EPSILON:
        raise UnlearningError(
            f"this run certifies nothing at delta = {delta}: epsilon is {largest:g}, and above "
            f"{MAX_EPSILON:g} it says nothing; it needs more noise or smaller clips"
        )
    sealed = {"schema_version": 1, "record": record.sha256, "signature": None}
    return complete(record.publish() | asdict(found) | {"execution": asdict(ran)} | sealed)


def derive_again(record: Record, c: Certificate) -> Certificate:
    """The certificate of this record at what ``c`` states: δ, reference, number of releases."""
    return derive(record, c.delta or 1e-5, c.compared_to, c.releases)


def complete(plain: dict[str, Any]) -> Certificate:
    """Add what follows from the rest: scope, warnings, digest."""
    empty = {name: [] for name in Scope.model_fields}
    blank = {"releasable": False, "warnings": [], "scope": empty, "digest": "0" * 64}
    draft = Certificate.from_bytes(serialise(plain | blank))
    warnings = tuple(find_warnings(draft))
    releasable = not any(warning.startswith(BLOCKS) for warning in warnings)
    words = {"scope": Scope(**derive_scope(draft)), "warnings": warnings, "releasable": releasable}
    draft = draft.model_copy(update=words)
    return draft.model_copy(update={"digest": draft.compute_digest()})


def check_digest(c: Certificate) -> list[str]:
    """A sentence if the content does not have the digest that is stated."""
    found = c.compute_digest()
    return [] if c.digest == found else [f"digest is {c.digest}, but the content has {found}"]


def check_derived(c: Certificate) -> list[str]:
    """Fields that follow from others, and those that must agree."""
    plain = c.model_dump(mode="json")
    derived = complete(plain | plain[c.compared_to] | {"theorem": c.recipe.theorem})
    found = [
        f"{name} is {shorten(plain[name])}; the rest of the certificate gives {shorten(value)}"
        for name, value in derived.model_dump(mode="json", exclude={"digest"}).items()
        if plain[name] != value
    ]
    if c.retrained.delta != c.centre.delta:
        found.append("delta differs between the two bounds")
    if is_exact(c.recipe) != (c.delta == 0):
        found.append(f"delta is {c.delta}; it must be 0 exactly for methods without noise")
    if (c.weights.old is None) != (c.parent is None or c.start != "model"):
        found.append("weights.old must be given exactly for a noisy run with a parent")
    if c.sharding is not None and (c.parent is None) != (not c.sharding.trained_from):
        found.append("sharding.trained_from must be given exactly when there is a parent")
    own = c.training is None or c.training.function == OWN
    if c.training is not None and (c.training.options if own else not c.training.built_in):
        found.append("training.function and options must be those of the library, or withheld")
    return [*found, *check_run(c)]


def check_link(child: Certificate, parent: Certificate) -> list[str]:
    """What breaks the chain from ``child`` to its parent, if anything."""
    found = list[str]()
    unsigned = parent.model_copy(update={"signature": None})  # it may have been signed since
    if child.parent not in (parent.sha256, unsigned.sha256):
        found.append(f"parent is {child.parent}, but the SHA-256 of the parent is {parent.sha256}")
    if child.created < parent.created:
        found.append(f"created is {child.created}, before its parent's {parent.created}")
    released = parent.weights.after
    if child.start == "model" and child.weights.old != released:
        found.append(
            f"the run started from weights {child.weights.old}, but the parent released {released}"
        )
    if child.weights.start == released:
        found.append("build() gave the parent's released model, which a request was about")
    ours, theirs = child.statistics, parent.statistics
    if ours is not None and (theirs is None or theirs.features != ours.features):
        found.append("its features are not those of the parent, or that is no linear model")
    return [*found, *_check_untouched(child, parent), *_check_changed(child, parent)]


def _check_untouched(child: Certificate, parent: Certificate) -> list[str]:
    """Constituents that were not trained again are, bit for bit, those of the parent."""
    ours, theirs = child.sharding, parent.sharding
    if ours is None:
        return []
    if theirs is None or ours.seed != theirs.seed or child.recipe != parent.recipe:
        return ["sharding: the parent is not of the same ensemble"]
    found = list[str]()
    own = zip(ours.trained_from, ours.hashes, ours.samples, strict=False)  # lengths: check_run
    before = zip(theirs.hashes, theirs.samples, strict=False)
    for k, ((first, one, now), (other, saw)) in enumerate(zip(own, before, strict=False)):
        if first == 0 and (one, now) != (other, saw):
            found.append(
                f"constituent {k} is {one} of {now} samples, said to be untouched, but the "
                f"parent's was {other} of {saw}"
            )
        elif one == other != combine_leaves([]) and now != saw:
            found.append(f"constituent {k} of {now} samples is the parent's, which saw {saw}")
    return found


def _check_changed(child: Certificate, parent: Certificate) -> list[str]:
    """A model that saw fewer samples is another. Who is named again although they left already is
    counted again, and changes nothing: then as many samples are retained as before."""
    gone, left, before = child.forget.samples, child.retained.samples, parent.retained.samples
    fewer = gone > 0 and left != before
    if child.sharding is not None:  # constituent by constituent, above
        same = False
    elif child.statistics is not None and parent.statistics is not None:
        same = fewer and child.statistics.digest == parent.statistics.digest
    else:
        one, other = (
            c.applied[0].before if c.applied else c.weights.after for c in (child, parent)
        )
        same = one == other and (fewer or not is_exact(child.recipe))
    said = f"it releases what its parent released, which saw {before} samples, though {gone} were"
    return [f"{said} forgotten and {left} are retained"] if same else []


def check_clock(created: str, parent: Certificate) -> list[str]:
    """A sentence if a run at this time cannot follow its parent: one of the clocks was wrong.

    Callers ask before they train; ``certify`` asks again.
    """
    now, before = map(datetime.fromisoformat, (created, parent.created))
    said = f"this machine's clock says {created}"
    if now < before:
        return [f"{said}, before its parent was created ({parent.created})"]
    if now - before > LONGEST_GAP:
        years = f"more than {LONGEST_GAP.days // 365} years after its parent was created"
        return [f"{said}, {years} ({parent.created}); is it right?"]
    return []
