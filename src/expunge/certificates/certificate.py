"""The certificate: what a run guarantees, on what, and what it does not cover.

``certify`` is a pure function of the record. It publishes what may be published; the record itself
stays with the operator, bound by its blinded hash. Canonical JSON (RFC 8785) makes the bytes of a
certificate unique. ``expunge.certificates.verification.verify`` checks one.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import rfc8785
from pydantic import ValidationError

from expunge import recipes
from expunge.accounting.guarantee import MAX_EPSILON, check_delta, guarantee, log_delta
from expunge.certificates.card import write_model_card
from expunge.certificates.consistency import find_contradictions, summarise_schedule
from expunge.certificates.identifiers import Commitment
from expunge.certificates.record import RunRecord, encode
from expunge.certificates.schema import (
    SCHEMA_VERSION,
    CertificateWire,
    find_misplaced,
    keep_version_1,
)
from expunge.certificates.signing import sign_bytes
from expunge.certificates.summary import summarise
from expunge.certificates.wording import (
    allows_release,
    derive_scope,
    find_unchecked,
    find_warnings,
    list_facts,
    read_recipe,
    write_statement,
)
from expunge.errors import CertificateError, InputError, UnlearningError
from expunge.files import read_limited, write_atomic
from expunge.recipes import (
    ComparedTo,
    ConvexHeadRecipe,
    Execution,
    GroupDPSGD,
    Guarantee,
    Problem,
    Recipe,
)

MAX_BYTES = 100_000_000
_BLANK = "0" * 64


class Certificate(CertificateWire):
    """A certificate of unlearning. Frozen; its fields are explained in docs/certificate_format.md.

    ``epsilon``, ``delta``, ``mu`` are those of ``compared_to``; ``retrained`` and ``centre`` give
    both choices; ``releasable`` is False where a warning begins with "Not for release".
    """

    def model_dump(self, **options: Any) -> dict[str, Any]:
        """Plain data: the fields that this certificate's version has."""
        given: dict[str, Any] = {"exclude_unset": True} | options
        return super().model_dump(**given)

    @property
    def method(self) -> Recipe:
        """The recipe as the accountant takes it."""
        return read_recipe(self)

    @property
    def execution(self) -> Execution:
        """What the machine added to the account."""
        p = self.finite_precision
        return Execution(rounding=p.rounding, tail_delta=p.tail_delta, releases=self.releases)

    def to_bytes(self) -> bytes:
        """The canonical bytes: one certificate, one file."""
        return rfc8785.dumps(self.model_dump(mode="json"))

    @classmethod
    def from_bytes(cls, data: bytes) -> Certificate:
        """The certificate with exactly these bytes; a sentence says why there is none."""
        certificate = parse(data)
        if certificate.to_bytes() != data:
            raise CertificateError("this certificate is not in canonical form (RFC 8785)")
        return certificate

    @property
    def sha256(self) -> str:
        """SHA-256 of the file: what a later certificate names as its parent."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the canonical bytes; the file is either complete or not there."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> Certificate:
        """Read a certificate without checking what it claims: that is ``expunge.verify``."""
        return cls.from_bytes(read_limited(path, MAX_BYTES, "certificate"))

    def compute_digest(self) -> str:
        """SHA-256 of the canonical bytes without ``digest`` and ``signature``."""
        return hashlib.sha256(rfc8785.dumps(self._without("digest", "signature"))).hexdigest()

    def signed_bytes(self) -> bytes:
        """What a signature signs: everything but itself."""
        return b"expunge/certificate-1\0" + rfc8785.dumps(self._without("signature"))

    def sign(
        self, private_key: bytes | str | Path, *, password: bytes | None = None
    ) -> Certificate:
        """The same certificate, signed with an Ed25519 key: PEM bytes, or a PEM file's path."""
        signature = sign_bytes(self.signed_bytes(), private_key, password)
        return parse(rfc8785.dumps(self._without("signature") | {"signature": signature}))

    def safetensors_metadata(self) -> dict[str, str]:
        """What the weights file repeats, so that file and certificate name each other."""
        facts = {"schema_version": self.schema_version} | list_facts(self)
        plain = {
            f"expunge.{key}": value if isinstance(value, str) else rfc8785.dumps(value).decode()
            for key, value in facts.items()
        }
        return {"format": "pt"} | plain

    def statement(self) -> str:
        """The certificate in plain language, for an auditor."""
        return write_statement(self)

    def model_card(self) -> str:
        """A block for a Hugging Face model card: YAML metadata, then markdown."""
        return write_model_card(self)

    def __str__(self) -> str:
        return summarise(self).to_text()

    def _repr_html_(self) -> str:
        return summarise(self).to_html()

    def _without(self, *names: str) -> dict[str, Any]:
        return {k: v for k, v in self.model_dump(mode="json").items() if k not in names}


def parse(data: bytes) -> Certificate:
    """A certificate from its bytes, canonical or not; nothing it claims is checked.

    >>> parse(b"{}")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: schema_version is None; this version of expunge reads 1 and 2
    """
    try:
        plain = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CertificateError(f"a certificate must be JSON: {error}") from None
    if not isinstance(plain, dict):
        raise CertificateError("a certificate must be a JSON object")
    version = cast(dict[str, object], plain).get("schema_version")
    if type(version) is not int or version not in (1, SCHEMA_VERSION):
        shown = str(version)[:40]
        raise CertificateError(
            f"schema_version is {shown}; this version of expunge reads 1 and {SCHEMA_VERSION}"
        )
    try:
        certificate = Certificate.model_validate_json(data)
        read_recipe(certificate)
        misplaced = find_misplaced(certificate, version)
        if version == 1 and certificate.gradient_evaluations is None:
            misplaced.append("gradient_evaluations is missing")
        if misplaced:
            raise CertificateError(f"the certificate is not usable: {misplaced[0]}")
        if certificate.problem is not None:
            Problem(**certificate.problem.model_dump())
        rfc8785.dumps(certificate.model_dump(mode="json"))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise CertificateError(
            f"{place or 'the certificate'} is not usable: {first['msg']}"
        ) from None
    except (InputError, rfc8785.CanonicalizationError, UnicodeError) as error:
        raise CertificateError(f"the certificate is not usable: {error}") from None
    return certificate


def certify(
    record: RunRecord,
    *,
    delta: float,
    compared_to: ComparedTo = "retrained",
    parent: Certificate | None = None,
    releases: int = 1,
    accept_unchecked: bool = False,
) -> Certificate:
    """The certificate of a run at δ; an :class:`UnlearningError` says why there can be none.

    ``parent`` is the certificate of the model this run started from, when that model was itself
    unlearned: its released weights must be the record's ``weights_before``. ``releases`` counts the
    released noisy runs of the same old model, this one included. A run whose forget and retained
    data were not checked against each other is not releasable unless ``accept_unchecked``, which
    the certificate then states.

    >>> from expunge.certificates.record import Trace
    >>> record = RunRecord(
    ...     recipe=recipes.OutputPerturbation(start_clip=0.01, noise_std=0.0746128),
    ...     parameters=1, grid=2.0**-30, execution=Execution(),
    ...     noise={"source": "seeded", "generator": "AES-256-CTR", "releasable": False, "seed": 0},
    ...     noise_keys=1, trace=Trace((0,), (0.0746128,), (0,), (1,), (0.009,), (0.05,), (False,)),
    ...     gradient_evaluations=0, weights_before="a" * 64, weights_noisy="b" * 64,
    ...     weights_after="b" * 64, device="cpu", dtype="float32",
    ...     created="2025-11-15T22:00:00+00:00")
    >>> certificate = certify(record, delta=1e-5)
    >>> round(certificate.epsilon, 4), certificate.compared_to, certificate.releasable
    (1.0, 'retrained', False)
    """
    if not isinstance(parent, Certificate | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError.of(
            "parent", parent, "a Certificate, as Certificate.load reads one, or None"
        )
    named = record.parent or (None if parent is None else parent.sha256)
    certificate = derive(
        record,
        delta=delta,
        compared_to=compared_to,
        parent=named,
        releases=releases,
        accept_unchecked=accept_unchecked,
    )
    problems = list[str]()
    if parent is not None:
        problems = check_link(certificate, parent)
    elif named is not None:
        problems = [f"it names the parent {named}, which must be given to check the chain"]
    if problems:
        raise UnlearningError("this run cannot be certified: " + "; ".join(problems))
    if isinstance(record.recipe, GroupDPSGD):
        _confirm(record.recipe, certificate)
    return certificate


def derive(
    record: RunRecord,
    *,
    delta: float,
    compared_to: ComparedTo,
    parent: str | None,
    releases: int,
    accept_unchecked: bool,
    version: int = SCHEMA_VERSION,
) -> Certificate:
    """The certificate that follows from a record; ``parent`` is the hash of the parent's file."""
    check_delta(delta)
    told = Execution(releases=releases)
    execution = replace(record.execution, releases=max(told.releases, record.execution.releases))
    problems = find_contradictions(replace(record, execution=execution, parent=parent))
    if problems:
        raise UnlearningError("this run cannot be certified: " + "; ".join(problems))
    found, ideal = (
        guarantee(record.recipe, delta=delta, compared_to=compared_to, execution=ran)
        for ran in (execution, Execution(releases=execution.releases))
    )
    bounds = [b.epsilon for b in (found.retrained, found.centre) if b is not None]
    if not max(bounds) <= MAX_EPSILON:
        raise UnlearningError(
            f"this run certifies nothing at delta = {delta}: epsilon is {max(bounds):g}, "
            f"and above {MAX_EPSILON:g} it says nothing; it needs more noise or smaller clips"
        )
    plain = _describe_run(record, parent, version)
    plain |= _describe_guarantee(record, execution, found, ideal)
    return _complete(plain, version, accept_unchecked)


def _confirm(recipe: GroupDPSGD, found: Certificate) -> None:
    """Refuse a claim about DP-SGD that its second computation cannot confirm."""
    from expunge.certificates.second_accountant import recompute

    try:
        confirmed = recompute(recipe, "retrained", Execution())[1](found.epsilon) <= found.delta
    except InputError as error:
        raise UnlearningError(f"this run cannot be certified: {error}") from None
    if not confirmed:
        raise UnlearningError("this run cannot be certified: the two accountants disagree")


def check_link(child: Certificate, parent: Certificate) -> list[str]:
    """What breaks the chain from ``child`` to its parent, if anything.

    What is public must have been just as public in the parent, unless it was compared.
    """
    w, before, found = child.weights, parent.weights, list[str]()
    unsigned = parent.model_copy(update={"signature": None})  # it may have been signed since
    if child.parent not in (parent.sha256, unsigned.sha256):
        found.append(f"parent is {child.parent}, but the SHA-256 of the parent is {parent.sha256}")
    if w.before != before.after:
        found.append(
            f"the run started from weights {w.before}, but the parent released {before.after}"
        )
    ours, theirs = (x.frozen if x.public is None else x.public.hash for x in (w, before))
    if ours != theirs and not (w.public is not None and w.public.compared):
        found.append(f"the frozen part is {ours}, but the parent's was {theirs}")
    if w.centre is not None and w.centre == before.after:
        found.append("the centre is the parent's released model, which saw the forget data")
    return [*found, *_check_features(child, parent), *_check_untouched(child, parent)]


def _check_features(child: Certificate, parent: Certificate) -> list[str]:
    """A head's features are public, and those of every release before it."""
    ours, theirs = child.statistics, parent.statistics
    if ours is None:
        return []
    if theirs is None:
        return ["the parent is not of a head built to forget"]
    if ours.features != theirs.features:
        return [f"its features are {ours.features}, but the parent's were {theirs.features}"]
    return []


def _check_untouched(child: Certificate, parent: Certificate) -> list[str]:
    """Constituents that were not trained again are, bit for bit, those of the parent."""
    ours, theirs = child.shards, parent.shards
    if ours is None:
        return []
    if theirs is None or ours.seed != theirs.seed or len(ours.hashes) != len(theirs.hashes):
        return ["shards: the parent is not of the same ensemble"]
    return [
        f"constituent {k} is {ours.hashes[k]}, said to be untouched, but the parent's was "
        f"{theirs.hashes[k]}"
        for k, first in enumerate(ours.trained_from)
        if first == 0 and ours.hashes[k] != theirs.hashes[k]
    ]


def _describe_guarantee(
    record: RunRecord, execution: Execution, found: Guarantee, ideal: Guarantee
) -> dict[str, Any]:
    survival = found.survival_bound
    if survival is None:  # no old model to start from: the run without the forget set stands in
        survival = min(math.exp(log_delta(record.recipe, 0.0, execution=execution)), 1.0)
    return asdict(found) | {
        "survival_bound": survival,
        "finite_precision": {
            "grid": record.grid,
            "rounding": execution.rounding,
            "tail_delta": execution.tail_delta,
            "ideal_epsilon": ideal.epsilon,
            "epsilon_cost": max(found.epsilon - ideal.epsilon, 0.0),
        },
        "releases": execution.releases,
    }


def _describe_run(record: RunRecord, parent: str | None, version: int) -> dict[str, Any]:
    """What may be published: nothing here is a function of the old model that no noise covers."""
    finetune = record.finetune
    # Sizes of Poisson samples tell who was in them, and passes from weights that saw the forgotten
    # depend on them; version 1 told them.
    match record.recipe:
        case GroupDPSGD():
            told = version == 1
        case ConvexHeadRecipe(noise_std=sigma):
            told = sigma == 0
        case _:
            told = True
    return {
        "recipe": encode(recipes.to_dict(record.recipe)),
        "schedule": describe_schedule(record.recipe),
        "parameters": record.parameters,
        "start": record.start,
        "initialisation": record.initialisation,
        "problem": None if record.problem is None else asdict(record.problem),
        "noise": {
            "source": record.noise["source"],
            "generator": record.noise.get("generator"),
            "keys": record.noise_keys,
        },
        "weights": {
            "before": None if parent is None else record.weights_before,
            "noisy": record.weights_noisy,
            "after": record.weights_after,
            "centre": record.centre,
            "frozen": record.frozen,
            "frozen_names": list(record.frozen_names),
            "public": None if record.public is None else asdict(record.public),
        }
        | ({} if record.origin is None else {"origin": asdict(record.origin)})
        | ({} if record.adapter is None else {"adapter": asdict(record.adapter)}),
        "data": {
            "forget": _publish(record.forget),
            "retain": _publish(record.retain),
            "checked": record.checked,
        },
        "buffers": {"policy": record.buffers, "names": list(record.buffer_names)},
        "finetune": finetune and asdict(finetune) | {"data": _publish(finetune.data)},
        "statistics": None if record.statistics is None else asdict(record.statistics),
        "shards": _describe_shards(record, parent),
        "gradient_evaluations": record.gradient_evaluations if told else None,
        "resumed": record.resumed,
        "device": record.device,
        "dtype": record.dtype,
        "versions": dict(record.versions),
        "created": record.created,
        "parent": parent,
        "record": record.digest(),
    }


def _describe_shards(record: RunRecord, parent: str | None) -> dict[str, Any] | None:
    """The constituents; which of them were trained again is said against the parent alone."""
    if record.shards is None:
        return None
    return asdict(record.shards) | ({"trained_from": ()} if parent is None else {})


def describe_schedule(recipe: Recipe) -> list[dict[str, float]]:
    """The certificate's ``schedule`` field."""
    return [
        {"steps": steps, "learning_rate": rate, "noise_std": sigma}
        for steps, rate, sigma in summarise_schedule(recipe)
    ]


def _publish(commitment: Commitment | None) -> dict[str, Any] | None:
    if commitment is None:
        return None
    return {name: value for name, value in asdict(commitment).items() if name != "salt"}


def _complete(plain: dict[str, Any], version: int, accept_unchecked: bool) -> Certificate:
    """Add what follows from the rest: scope, warnings, digest."""
    empty = {"covered": [], "not_covered": [], "assumptions": [], "void_if": []}
    plain |= {"schema_version": version, "releasable": False, "warnings": [], "scope": empty}
    plain |= {"digest": _BLANK, "signature": None, "accepted_unchecked": accept_unchecked}
    if version == 1:
        plain = keep_version_1(CertificateWire.model_validate_json(rfc8785.dumps(plain)))
    draft = parse(rfc8785.dumps(plain))
    if accept_unchecked and not find_unchecked(draft):
        draft = draft.model_copy(update={"accepted_unchecked": False})
    warnings = find_warnings(draft)
    draft = draft.model_copy(
        update={
            "scope": derive_scope(draft),
            "warnings": warnings,
            "releasable": allows_release(warnings),
        }
    )
    return draft.model_copy(update={"digest": draft.compute_digest()})
