"""Check a certificate: recompute every number and every hash, and name each thing that differs.

Needs the certificate and the weights it covers, and neither torch nor the data. The numbers are
recomputed by ``expunge.certificates.second_accountant``, which shares no formula with the
accountant that wrote them. A certificate that does not hold is a :class:`VerificationError` (exit
code 1); one that cannot be read is a :class:`CertificateError` (exit code 2).
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from expunge.accounting.guarantee import has_centre, theorem
from expunge.accounting.precision import find_disagreements
from expunge.certificates.certificate import (
    MAX_BYTES,
    Certificate,
    check_link,
    derive,
    describe_schedule,
    parse,
)
from expunge.certificates.consistency import (
    check_change,
    check_origin,
    check_shards,
    check_start,
    check_time,
    count_keys,
    least_rounding,
)
from expunge.certificates.hashing import (
    ADAPTER,
    combine_leaves,
    find_weights,
    hash_constituents,
    hash_contents,
    hash_weights,
    serialise_header,
)
from expunge.certificates.record import OLD_FORMAT, RunRecord
from expunge.certificates.second_accountant import recompute
from expunge.certificates.signing import fingerprint, holds, read_public_key
from expunge.certificates.wording import allows_release, derive_scope, find_warnings
from expunge.errors import InputError, UnlearningError, VerificationError
from expunge.files import read_limited
from expunge.recipes import (
    STATED,
    ComparedTo,
    DescentRecipe,
    Execution,
    GroupDPSGD,
    HeadRecipe,
    Problem,
    Retraining,
    ShardedTraining,
)

CONFIG = "adapter_config.json"
# A claim may be below 50 digits by the error of a float search, and above by this much.
BELOW, ABOVE = 1e-10, 1e-6
# DP-SGD's accountant rounds losses up to a grid; its second computation has eight digits.
DPSGD_BELOW, DPSGD_ABOVE = 1e-7, 1e-2
# An epsilon this small is as good as zero: how far above the truth it is does not matter.
_NEGLIGIBLE = 1e-9


def verify(
    certificate: str | Path,
    weights: str | Path | None = None,
    public_key: bytes | str | Path | None = None,
    *,
    parent: str | Path | None = None,
    record: str | Path | None = None,
) -> Certificate:
    """The certificate, if it holds for these weights (default: ``model.safetensors`` beside it, the
    index of several files, or an adapter alone). A run directory, or an adapter's folder, stands
    for the file in it, here and below.

    ``public_key`` (PEM bytes or file) is the key it must be signed with; a signature is checked
    against the key it names in any case. ``parent`` is the certificate it is chained to. With
    ``record``, the operator's run record, the whole certificate is derived from it once more.

    >>> verify("run/certificate.json")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate run/certificate.json is not a file that can be...
    """
    path = find_certificate(certificate)
    found, differences = _examine(path, public_key, record)
    file = find_weights(path) if weights is None else Path(weights)
    differences = [*_check_weights(found, file), *differences]
    if parent is not None:
        before, faults = _examine(find_certificate(parent))
        differences += [f"parent: {fault}" for fault in faults] + check_link(found, before)
    _raise_if_any(path, differences)
    return found


def find_certificate(path: str | Path) -> Path:
    """A certificate's file; that of a run directory."""
    place = Path(path)
    return place / "certificate.json" if place.is_dir() else place


def verify_chain(
    certificates: Sequence[str | Path],
    weights: str | Path | None = None,
    public_key: bytes | str | Path | None = None,
) -> tuple[Certificate, ...]:
    """All certificates of a sequence of requests, oldest first, if they hold and are chained.

    The weights are those of the last one; the models in between need not exist any more.
    """
    if not certificates:
        raise InputError.of("certificates", certificates, "at least one path")
    found: list[Certificate] = []
    for place, path in enumerate(map(find_certificate, certificates)):
        certificate, differences = _examine(path, public_key)
        found.append(certificate)
        if place > 0:
            differences += check_link(found[-1], found[-2])
        elif found[-1].parent is not None:
            differences.append(f"it names the parent {found[-1].parent}, which was not given")
        _raise_if_any(path, differences)
    verify(certificates[-1], weights, public_key)
    return tuple(found)


def find_differences(certificate: str | Path, record: str | Path | None = None) -> list[str]:
    """What does not hold of a certificate by itself, by its record, and by weights beside it."""
    found, differences = _examine(certificate, None, record)
    file = find_weights(Path(certificate))
    return [*differences, *(_check_weights(found, file) if file.exists() else ())]


def _examine(
    path: str | Path,
    public_key: bytes | str | Path | None = None,
    record: str | Path | None = None,
) -> tuple[Certificate, list[str]]:
    raw = read_limited(path, MAX_BYTES, "certificate")
    found = parse(raw)
    differences = [*_check_claims(found, raw), *_check_signature(found, public_key)]
    if record is not None:
        file = Path(record)
        differences += _check_record(
            found, RunRecord.load(file / "record.json" if file.is_dir() else file)
        )
    return found, differences


def _raise_if_any(path: Path, differences: list[str]) -> None:
    if differences:
        raise VerificationError(f"{path} does not hold: " + "; ".join(differences))


def _check_claims(certificate: Certificate, raw: bytes) -> list[str]:
    """All that needs nothing but the certificate."""
    found = list[str]()
    if certificate.to_bytes() != raw:
        found.append("the file is not in canonical form (RFC 8785)")
    digest = certificate.compute_digest()
    if certificate.digest != digest:
        found.append(f"digest is {certificate.digest}, but the content has {digest}")
    return [*found, *_check_derived(certificate), *_check_numbers(certificate)]


def _check_derived(certificate: Certificate) -> list[str]:
    """Fields that follow from others."""
    c, recipe = certificate, certificate.method
    warnings = find_warnings(c)
    chosen = c.retrained if c.compared_to == "retrained" else c.centre
    plain = c.model_dump(mode="json")
    expected: dict[str, Any] = {
        "theorem": theorem(recipe),
        "schedule": describe_schedule(recipe),
        "scope": derive_scope(c).model_dump(mode="json"),
        "warnings": list(warnings),
        "releasable": allows_release(warnings),
    }
    if chosen is not None:
        expected |= {"epsilon": chosen.epsilon, "delta": chosen.delta, "mu": chosen.mu}
    found = [
        f"{name} is {_short(plain[name])}; the rest of the certificate gives {_short(value)}"
        for name, value in expected.items()
        if plain[name] != value
    ]
    if chosen is None or (c.centre is None and has_centre(recipe)):
        found.append("centre is missing: this method can be compared to it")
    if any(bound.delta != c.delta for bound in (c.retrained, c.centre) if bound is not None):
        found.append("delta differs between the two bounds")
    found += [*check_time(c.created), *check_start(recipe, c.start, c.weights.centre)]
    found += check_origin(recipe, c.weights.origin, c.weights.centre)
    found += _check_counts(c)
    if c.weights.noisy != c.weights.after:
        steps = 0 if c.finetune is None else c.finetune.steps
        found += check_change(recipe, steps, c.buffers.policy)
    keys = count_keys(recipe) + c.resumed
    if c.schedule and c.noise.source == "system" and c.noise.keys != keys:
        found.append(f"noise.keys is {c.noise.keys} for a run resumed {c.resumed} times")
    if (c.weights.before is None) != (c.parent is None):
        found.append("weights.before must be given exactly when there is a parent")
    p = c.finite_precision
    if p.epsilon_cost != max(c.epsilon - p.ideal_epsilon, 0.0):
        found.append("finite_precision.epsilon_cost is not epsilon - ideal_epsilon")
    problem = None if c.problem is None else Problem(**c.problem.model_dump())
    least = least_rounding(recipe, problem, p.grid, c.parameters)
    if p.rounding < least * (1 - 1e-9):
        found.append(
            f"finite_precision.rounding is {p.rounding!r}; its grid costs at least {least!r}"
        )
    if isinstance(recipe, DescentRecipe):
        found += find_disagreements(recipe, problem or STATED, c.parameters)
    if (problem is not None) != isinstance(recipe, DescentRecipe):
        found.append("problem must be given exactly for full-batch descent")
    if (c.statistics is not None) != isinstance(recipe, HeadRecipe):
        found.append("statistics must be given exactly for heads built to forget")
    if isinstance(recipe, ShardedTraining):
        found += check_shards(recipe, c.shards)
    elif c.shards is not None:
        found.append("shards must be given exactly for ensembles built to forget")
    if c.shards is not None and (c.parent is None) != (not c.shards.trained_from):
        found.append("shards.trained_from must be given exactly when there is a parent")
    return found


def _check_counts(c: Certificate) -> list[str]:
    """People are at most as many as their samples (a state may have forgotten them before), and
    retraining draws no noise and trains on the retained data."""
    found = list[str]()
    sets = {"data.retain": c.data.retain}
    if c.statistics is None and c.shards is None:
        sets["data.forget"] = c.data.forget
    if c.finetune is not None:
        sets["finetune.data"] = c.finetune.data
    for name, held in sets.items():
        if held is not None and held.samples is not None and held.samples < held.count:
            found.append(f"{name} has {held.samples} samples of {held.count} people")
    if isinstance(c.method, Retraining):
        if c.noise.source != "none":
            found.append(f"noise.source is {c.noise.source!r}, but retraining draws none")
        if c.finetune is not None and c.finetune.checked != c.data.checked:
            found.append("finetune.checked is not data.checked, but retraining has one training")
    return found


def _check_numbers(certificate: Certificate) -> list[str]:
    """Every ε, μ and probability against 50 digits; what cannot be recomputed does not hold."""
    try:
        return _compare_numbers(certificate)
    except (ArithmeticError, ValueError, RecursionError, MemoryError) as error:
        kind = type(error).__name__
        return [f"the guarantee cannot be recomputed for this recipe ({kind}: {_short(error)})"]


def _compare_numbers(certificate: Certificate) -> list[str]:
    """Never below 50 digits, and not needlessly above."""
    c, found = certificate, list[str]()
    recompute_once = functools.cache(recompute)
    method, ideal = c.method, Execution(releases=c.releases)
    check = _Tolerance(DPSGD_BELOW, DPSGD_ABOVE) if isinstance(method, GroupDPSGD) else _EXACT
    sides: list[tuple[ComparedTo, Any]] = [("retrained", c.retrained), ("centre", c.centre)]
    for side, bound in sides:
        if bound is None:
            continue
        mu, delta_at = recompute_once(method, side, c.execution)
        found += check.epsilon(f"{side}.epsilon", bound.epsilon, c.delta, delta_at)
        if (mu is None) != (bound.mu is None):
            found.append(f"{side}.mu is {bound.mu!r}; it must be {mu}")
        elif mu is not None:
            found += check.value(f"{side}.mu", bound.mu, mu)
        if side == "centre":
            found += check.value("survival_bound", c.survival_bound, delta_at(0))
    if c.centre is None:
        _, delta_at = recompute_once(method, "retrained", c.execution)
        found += check.value("survival_bound", c.survival_bound, delta_at(0))
    _, delta_at = recompute_once(method, c.compared_to, ideal)
    claimed = c.finite_precision.ideal_epsilon
    return found + check.epsilon("finite_precision.ideal_epsilon", claimed, c.delta, delta_at)


@dataclass(frozen=True)
class _Tolerance:
    """How far a claim may be below and above its second computation, relatively."""

    below: float
    above: float

    def epsilon(
        self, name: str, claimed: float, delta: float, delta_at: Callable[[Any], Any]
    ) -> list[str]:
        """δ(ε) ≤ δ, and δ(ε (1 - above)) > δ unless ε is as good as zero."""
        if delta_at(claimed * (1 + self.below)) > delta * (1 + self.below):
            return [f"{name} is {claimed!r}, which is too small: the run gives more at this delta"]
        if claimed > _NEGLIGIBLE and delta_at(claimed * (1 - self.above)) <= delta:
            return [f"{name} is {claimed!r}, which is not what the run gives: a smaller one holds"]
        return []

    def value(self, name: str, claimed: float, truth: Any) -> list[str]:
        low, high = truth * (1 - self.below), truth * (1 + self.above) + 1e-300
        if low <= claimed <= high:
            return []
        return [f"{name} is {claimed!r}; the recipe gives {float(truth)!r}"]


_EXACT = _Tolerance(BELOW, ABOVE)


def _check_weights(certificate: Certificate, path: Path) -> list[str]:
    """What is released: all weights, and the adapter beside them; or an adapter alone."""
    path = find_weights(path / "certificate.json") if path.is_dir() else path
    if path.name == ADAPTER:
        return check_adapter(certificate, path.parent)
    found = _check_tensors(certificate, path, "weights.after", certificate.weights.after)
    found += _check_constituents(certificate, path)
    if path.with_name("adapter").is_dir():
        found += check_adapter(certificate, path.with_name("adapter"), path)
    return found


def _check_tensors(certificate: Certificate, path: Path, field: str, told: str) -> list[str]:
    """The tensors by their hash, and every byte of the headers by writing them again."""
    found = list[str]()
    digest, layouts = hash_weights(path)
    if digest != told:
        found.append(f"the weights {path} have hash {digest}, but {field} is {told}")
    allowed = (None, {"format": "pt"}, certificate.safetensors_metadata())
    for name, layout in layouts.items():
        file = path.with_name(name)
        if layout.metadata not in allowed:
            found.append(f"the metadata of {file} is not this certificate's")
        elif layout.header != serialise_header(layout.entries, layout.metadata):
            found.append(f"the header of {file} is not in canonical form")
    return found


def check_adapter(certificate: Certificate, folder: Path, weights: Path | None = None) -> list[str]:
    """An adapter in its folder: tensors, configuration, nothing beside them that is loaded too.

    With ``weights`` it must hold the tensors there that are not public, and no other.
    """
    told, public = certificate.weights.adapter, certificate.weights.public
    if told is None:
        return [f"{folder} holds an adapter, and the certificate speaks of none"]
    found = _check_tensors(certificate, folder / ADAPTER, "weights.adapter.hash", told.hash)
    config = hashlib.sha256(read_limited(folder / CONFIG, MAX_BYTES, "adapter's configuration"))
    if config.hexdigest() != told.config:
        found.append(f"{folder / CONFIG} has hash {config.hexdigest()}, not {told.config}")
    copied = folder / "certificate.json"
    if copied.exists():
        other = parse(read_limited(copied, MAX_BYTES, "certificate"))
        if not other.digest == other.compute_digest() == certificate.digest:
            found.append(f"{copied} is another certificate, {other.compute_digest()}")
    beside = {place.name for place in folder.iterdir()} - {
        ADAPTER,
        CONFIG,
        copied.name,
        "README.md",
    }
    if beside:
        found.append(f"{folder} holds {min(beside)} too, which no certificate covers")
    if weights is not None:
        names = () if public is None else public.names
        contents = hash_contents(weights)
        held = {contents[name] for name in contents if name not in names}
        fixed = {contents[name] for name in contents if name in names}
        if not held - fixed <= set(hash_contents(folder / ADAPTER).values()) <= held:
            found.append(
                f"{folder / ADAPTER} does not hold what {weights} has beside public tensors"
            )
    return found


def _check_constituents(certificate: Certificate, path: Path) -> list[str]:
    """Every constituent of an ensemble's file by its own hash."""
    told = certificate.shards
    if told is None or told.distilled:
        return []
    held = hash_constituents(path)
    expected = {k: h for k, h in enumerate(told.hashes) if h != combine_leaves([])}
    return [
        f"constituent {k} in {path} is {held.get(k)}, but the certificate has {expected.get(k)}"
        for k in sorted(held.keys() | expected.keys())
        if held.get(k) != expected.get(k)
    ]


def _check_signature(certificate: Certificate, public_key: bytes | str | Path | None) -> list[str]:
    found, signature = list[str](), certificate.signature
    expected = None if public_key is None else read_public_key(public_key)
    if signature is None:
        return [] if expected is None else ["it is not signed, but a public key was given"]
    if expected not in (None, signature.public_key):
        found.append(
            f"it is signed by the key {fingerprint(signature.public_key)}, not by the expected "
            f"{fingerprint(expected or '')}"
        )
    if not holds(signature.value, signature.public_key, certificate.signed_bytes()):
        found.append("the signature does not match the certificate")
    return found


def describe_key(certificate: Certificate, compared: bool) -> str:
    """Whose signature a certificate that holds carries, and whether anybody expected that key."""
    if certificate.signature is None:
        return "not signed"
    whose = f"signed by {fingerprint(certificate.signature.public_key)}"
    return f"{whose}, {'the expected key' if compared else 'not compared with an expected key'}"


def _check_record(certificate: Certificate, record: RunRecord) -> list[str]:
    """The whole certificate, derived from the record again, and every field that differs."""
    c = certificate
    try:
        derived = derive(
            record,
            delta=c.delta,
            compared_to=c.compared_to,
            parent=c.parent,
            releases=c.releases,
            accept_unchecked=c.accepted_unchecked,
            version=c.schema_version,
        )
    except (UnlearningError, InputError) as error:
        return [f"record: {error}"]
    found = list[str]()
    if record.digest() != c.record:
        found.append(f"record is {c.record}, but the record's hash is {record.digest()}")
    ours, theirs = _flatten(derived), _flatten(c)
    found += [
        f"{name} is {_short(theirs.get(name))}, but the record gives {_short(ours.get(name))}"
        for name in sorted(ours.keys() | theirs.keys())
        if not _agree(name, theirs.get(name), ours.get(name))
    ]
    if c.schema_version == 1 and record.format != OLD_FORMAT:
        found.append("schema_version is 1, but the record is of a later version")
    return found


# What the accountant computed may differ in the last digits from machine to machine.
_COMPUTED = frozenset(("epsilon", "mu", "survival_bound", "ideal_epsilon", "epsilon_cost"))


def _agree(name: str, one: object, other: object) -> bool:
    if name.rpartition(".")[2] in _COMPUTED and isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=ABOVE, abs_tol=_NEGLIGIBLE)
    return one == other


def _flatten(certificate: Certificate) -> dict[str, object]:
    """Every field by its path, but the three that seal the others."""

    def walk(value: object, at: str) -> Iterator[tuple[str, object]]:
        if isinstance(value, dict) and value:
            for name, part in cast(dict[str, object], value).items():
                yield from walk(part, f"{at}.{name}" if at else name)
        else:
            yield at, value

    return dict(walk(certificate.model_dump(exclude={"digest", "record", "signature"}), ""))


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
