"""Check a certificate: recompute every number and every hash, and name each thing that differs.

Needs the certificate and the weights it covers, and neither torch nor the data. The numbers are
recomputed by ``expunge.certificates.second_accountant``, which shares no formula with the
accountant that wrote them. A certificate that does not hold is a :class:`VerificationError` (exit
code 1); one that cannot be read is a :class:`CertificateError` (exit code 2). What was not looked
at is said too.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from expunge.certificates.certificate import (
    Bound,
    Certificate,
    check_derived,
    check_digest,
    check_link,
    derive_again,
)
from expunge.certificates.fields import serialise
from expunge.certificates.hashes import combine_leaves, read_leaves
from expunge.certificates.people import opens
from expunge.certificates.record import Record, Sharding
from expunge.certificates.release import CERTIFICATE, RECORD, WEIGHTS
from expunge.certificates.second_accountant import recompute
from expunge.certificates.signing import fingerprint, read_public_key
from expunge.certificates.wording import BLOCKS
from expunge.display import Shown, clean, shorten, tabulate
from expunge.errors import InputError, UnlearningError, VerificationError
from expunge.files import read_limited
from expunge.recipes import ComparedTo, is_exact

ADAPTER = "adapter_model.safetensors"
# A claim may be below 50 digits by the error of a float search, and above by this much.
BELOW, ABOVE = 1e-10, 1e-6
# These have checks of their own; the last digits of numbers differ from machine to machine.
_ELSEWHERE = {"epsilon", "mu", "retrained", "centre", "survival_bound"}
_ELSEWHERE |= {"digest", "record", "signature"}
_NEGLIGIBLE = 1e-9  # as good as zero: how far above the truth it is does not matter
OTHER_FILES = "other files in this folder: "
# What a program would load as weights, configuration or code if it lay beside a release.
_LOADED = (
    *(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".h5"),
    *(".keras", ".msgpack", ".onnx", ".gguf", ".npz", ".npy", ".index.json", ".py", ".pyc", ".so"),
    *(".ot", ".pb", ".tflite", ".pt2", ".dill", ".hdf5", ".zip", ".tar", ".pyd", ".dll", ".dylib"),
    *(".pte", ".ptl", ".nemo", ".mar", ".gz", ".tgz", ".sav", ".skops", ".distcp"),
)
_LOADED_NAMES = (
    *("config.json", "adapter_config.json", "generation_config.json", "adapter", "modules.json"),
    *("model_index.json", "manifest.json", "estimator.json", "constituents", "adapters"),
    "custom_generate",  # transformers takes generate() from it
)
_MOST_FILES = 1000  # of a folder beside a release that nobody asked about
_TOO_MANY = f"more than {_MOST_FILES} files"


@dataclass
class Verification(Shown):
    """What was checked, what was not looked at, and what does not hold."""

    certificate: Certificate
    checked: list[str] = field(default_factory=list[str])
    unchecked: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.problems

    def __str__(self) -> str:
        rows = [("differs", sentence) for sentence in self.problems]
        rows += [("checked", sentence) for sentence in self.checked]
        rows += [("not looked at", sentence) for sentence in self.unchecked]
        return tabulate("It holds." if self.holds else "It does not hold.", rows)

    def add(self, checked: str, problems: Iterable[str]) -> None:
        """Something was looked at; it counts as checked where nothing was found."""
        found = list(map(clean, problems))
        self.problems += found
        self.checked += [] if found else [clean(checked)]

    def skip(self, what: str) -> None:
        """Something was not looked at."""
        self.unchecked.append(clean(what))


def verify(
    run: str | Path,
    weights: str | Path | None = None,
    *,
    key: bytes | str | Path | None = None,
    parent: str | Path | None = None,
    record: str | Path | None = None,
    people: Iterable[Any] | None = None,
    strict: bool = True,
) -> Verification:
    """Check a run's folder, or a certificate and the files beside it.

    ``weights`` lie elsewhere; ``key`` (PEM bytes or file) is the public key it must be signed with;
    ``parent`` is the run or certificate it is chained to; ``record`` the operator's record (the
    one beside the certificate where there is one), by which the whole certificate is derived once
    more; ``people`` are the names that the request must have been about. A certificate that does
    not hold is a :class:`VerificationError` that names each difference, or with ``strict=False`` a
    result that does.

    >>> verify("run/certificate.json")
    Traceback (most recent call last):
    ...
    expunge.errors.CertificateError: certificate run/certificate.json is not a file that can be...
    """
    path = _find(run, CERTIFICATE)
    found = Verification(Certificate.load(path))
    _check_certificate(found)
    _check_signature(found, key)
    _check_record(found, path, record, people)
    _check_files(found, path, weights)
    if parent is not None:
        _check_parent(found, _find(parent, CERTIFICATE))
    elif found.certificate.parent is not None:
        found.skip(f"the parent: it names {found.certificate.parent}, which was not given")
    if is_exact(found.certificate.recipe):
        found.skip(
            "the release was not run again: expunge replay does that, with code and retained data"
        )
    found.skip("the operator's code, and what was done before it, are their word")
    if found.problems and strict:
        raise VerificationError(f"{clean(str(path))} does not hold: " + "; ".join(found.problems))
    return found


def _find(run: str | Path, name: str) -> Path:
    place = Path(run)
    return place / name if place.is_dir() else place


def _check_certificate(found: Verification) -> None:
    """All that needs nothing but the certificate."""
    c = found.certificate
    found.add("its bytes are canonical and have the digest it states", check_digest(c))
    found.add("every sentence and field follows from the others", check_derived(c))
    try:
        wrong = _compare_numbers(c)
    except (ArithmeticError, ValueError, RecursionError, MemoryError) as error:
        kind = type(error).__name__
        wrong = [f"the guarantee cannot be recomputed for this recipe ({kind}: {shorten(error)})"]
    found.add("every number was computed a second time", wrong)


def _compare_numbers(c: Certificate) -> list[str]:
    """Every ε, μ and probability: never below 50 digits, and not needlessly above."""
    found = list[str]()
    sides: list[tuple[ComparedTo, Bound]] = [("retrained", c.retrained), ("centre", c.centre)]
    for side, bound in sides:
        mu, delta_at = recompute(c.recipe, side, c.execution)
        found += _compare_epsilon(f"{side}.epsilon", bound.epsilon, c.delta, delta_at)
        found += _compare_value(f"{side}.mu", bound.mu, mu)
        if side == "centre":
            found += _compare_value("survival_bound", c.survival_bound, delta_at(0))
    return found


def _compare_epsilon(
    name: str, claimed: float, delta: float, delta_at: Callable[[Any], Any]
) -> list[str]:
    """δ(ε) ≤ δ, and δ(ε (1 - above)) > δ unless ε is as good as zero."""
    if delta_at(claimed * (1 + BELOW)) > delta * (1 + BELOW):
        return [f"{name} is {claimed!r}, which is too small: the run gives more at this delta"]
    if claimed > (_NEGLIGIBLE if delta else 0) and delta_at(claimed * (1 - ABOVE)) <= delta:
        return [f"{name} is {claimed!r}, which is not what the run gives: a smaller one holds"]
    return []


def _compare_value(name: str, claimed: float | None, truth: Any) -> list[str]:
    if claimed is None or truth is None:
        same = claimed is truth
    else:
        least = 1e-300 if truth else 0  # a truth below all floats is rounded up
        same = truth * (1 - BELOW) <= claimed <= truth * (1 + ABOVE) + least
    shown = None if truth is None else float(truth)
    return [] if same else [f"{name} is {claimed!r}; the recipe gives {shown!r}"]


def _check_signature(found: Verification, key: bytes | str | Path | None) -> None:
    signature = found.certificate.signature
    expected = None if key is None else read_public_key(key)
    if signature is None:
        if expected is None:
            found.skip("who wrote it: it is not signed")
        else:
            found.add("", ["it is not signed, but a public key was given"])
        return
    said, problems = f"it is signed by the key {fingerprint(signature.public_key)}", list[str]()
    if expected is None:
        found.skip("whose key signed it: no expected key was given")
    elif expected != signature.public_key:
        problems.append(f"{said}, not by the expected {fingerprint(expected)}")
    if not signature.matches(found.certificate.signed_bytes()):
        problems.append("the signature does not match the certificate")
    found.add(said, problems)


def _check_record(
    found: Verification, path: Path, record: str | Path | None, people: Iterable[Any] | None
) -> None:
    """The whole certificate, derived from the record again, and every field that differs."""
    c = found.certificate
    place = path.with_name(RECORD) if record is None else _find(record, RECORD)
    if record is None and not place.exists():
        if people is not None:
            raise InputError("people are given, and there is no record to compare them with")
        found.skip("the run record: it stays with the operator")
        return
    kept, wrong = Record.load(place), list[str]()
    if kept.sha256 != c.record:
        wrong.append(f"record is {c.record}, but the record's hash is {kept.sha256}")
    try:
        again = derive_again(kept, c)
        ours, theirs = (one.model_dump(mode="json", exclude=_ELSEWHERE) for one in (again, c))
        wrong += _name_differences(theirs, ours)
    except (UnlearningError, InputError) as error:
        wrong.append(f"record: {error}")
    found.add("the certificate follows from the run record", wrong)
    if people is not None:
        other = "the request was not about the people who were given"
        found.add(other.replace("not ", ""), [] if opens(kept.forget, people) else [other])


def _name_differences(theirs: Any, ours: Any, at: str = "") -> list[str]:
    if isinstance(theirs, dict) and isinstance(ours, dict):
        one, other = cast(dict[str, Any], theirs), cast(dict[str, Any], ours)
        if one.keys() == other.keys():
            pairs = {f"{at}.{k}".strip("."): (one[k], other[k]) for k in one}
            return [found for k in sorted(pairs) for found in _name_differences(*pairs[k], k)]
    same = serialise(theirs) == serialise(ours)  # Python has True == 1
    return [] if same else [f"{at} is {shorten(theirs)}, but the record gives {shorten(ours)}"]


def _check_files(found: Verification, path: Path, weights: str | Path | None) -> None:
    """The weights, what belongs to them, and what else a program might load."""
    c, place = found.certificate, path.parent if weights is None else Path(weights)
    folder, whole = (place, WEIGHTS) if place.is_dir() else (place.parent, place.name)
    tensors = {whole: c.weights.after}
    if c.weights.adapter is not None:
        tensors[f"adapter/{ADAPTER}"] = c.weights.adapter.hash
    places = {name: folder / name for name in (*tensors, *c.weights.files)}
    if weights is None and (folder / ADAPTER).exists():  # an adapter published by itself
        inner = [name for name in places if name.startswith("adapter/")]
        places = {name: folder / name.removeprefix("adapter/") for name in inner}
        if c.weights.adapter is not None:
            found.skip(f"the base of the adapter, {c.weights.adapter.base}: not here")
    for name, file in places.items():
        if not file.exists() and (weights is None or name != whole):
            found.skip(f"{name}: the certificate names it, and it is not here")
        elif name in tensors:
            problems = _check_tensors(c, file, tensors[name], whole=name == whole)
            found.add(f"{name} has the hash {tensors[name]}", problems)
        else:
            stated = c.weights.files[name]
            digest = hashlib.sha256(read_limited(file, c.most_bytes, "file")).hexdigest()
            wrong = [] if digest == stated else [f"{name} has hash {digest}, not {stated}"]
            found.add(f"{name} is the certificate's", wrong)
    if weights is None or Path(weights).is_dir():  # whoever names a file loads that file
        _check_beside(found, path, folder, places.values())


def _check_tensors(c: Certificate, path: Path, stated: str, whole: bool) -> list[str]:
    """The tensors by their hash; of the ``whole`` release also what is said of some of them."""
    leaves, layout = read_leaves(path)
    found, digest = list[str](), combine_leaves(leaves.values())
    if digest != stated:
        found.append(f"{path} has hash {digest}, but the certificate has {stated}")
    if layout.metadata not in (None, {"format": "pt"}):
        found.append(f"the metadata of {path} says more than its format, which no hash covers")
    if not whole or c.applied:
        return found
    if c.parameters > (size := sum(math.prod(entry.shape) for entry in layout.entries)):
        found.append(f"parameters is {c.parameters}, but {path} has {size} numbers")
    for what in ("buffers", "missing", "unchanged"):
        if strange := [name for name in getattr(c, what) if name not in leaves]:
            found.append(f"{what} names {strange[0]!r}, which is not in {path}")
    if (public := c.weights.published) is not None:
        kept = combine_leaves(leaves[name] for name in public.names if name in leaves)
        if kept != public.hash or not leaves.keys() >= set(public.names):
            found.append(f"weights.published is {public.hash}, but those in {path} are {kept}")
    return found + ([] if c.sharding is None else _check_constituents(path, leaves, c.sharding))


def _check_constituents(path: Path, leaves: Mapping[str, bytes], said: Sharding) -> list[str]:
    """Every tensor of an ensemble's file belongs to a constituent, which has its own hash."""
    parts: dict[str, list[bytes]] = {}
    for name, leaf in leaves.items():
        parts.setdefault(".".join(name.split(".")[:2]), []).append(leaf)
    there = {name: combine_leaves(part) for name, part in parts.items()}
    stated = {f"constituents.{k}": digest for k, digest in enumerate(said.hashes)}
    stated = {name: digest for name, digest in stated.items() if digest != combine_leaves([])}
    return [
        f"{part} in {path} is {there.get(part)}, but the certificate has {stated.get(part)}"
        for part in sorted(there.keys() | stated)
        if there.get(part) != stated.get(part)
    ]


def _check_beside(found: Verification, path: Path, folder: Path, places: Collection[Path]) -> None:
    """What else lies there: what would be loaded must be covered, the rest is named. In a folder
    of the release a further folder would be loaded as well."""
    covered = {one for place in places for one in (place, *place.parents)}
    loaded, rest, own = list[str](), list[str](), found.certificate
    inside = sorted(one for one in covered if folder in one.parents and one.is_dir())
    for inner in (folder, *inside):
        copy = inner / CERTIFICATE
        if copy.exists() and not _is_copy(other := Certificate.load(copy), own):
            said = f"{copy} is another certificate, or signed by another key: {other.sha256}"
            found.add("", [said])
        for one in sorted(inner.iterdir()):
            if one in covered or one.name in (path.name, CERTIFICATE, RECORD):
                continue
            within = _find_loaded(one)
            if _is_loaded(one.name) or (within is not None and inner != folder):
                loaded.append(one.name)
            else:
                rest.append(one.name if within is None else f"{one.name}/ (in it {within})")
    if loaded:
        found.add("", [f"{', '.join(loaded)} may be loaded, and no certificate covers it"])
    if rest:
        rest.sort(key=lambda name: "/" not in name)  # folders with models first
        more = f" and {len(rest) - 20} more" if len(rest) > 20 else ""
        found.skip(f"{OTHER_FILES}{', '.join(rest[:20])}{more}")


def _is_copy(c: Certificate, own: Certificate) -> bool:
    """Whether this is the same certificate, signed by no other key; one may be unsigned yet."""
    same = c.model_copy(update={"signature": own.signature}).to_bytes() == own.to_bytes()
    return same and (c.signature == own.signature or None in (c.signature, own.signature))


def _is_loaded(name: str) -> bool:
    plain = name.strip().casefold()
    return plain.endswith(_LOADED) or plain in _LOADED_NAMES


def _find_loaded(folder: Path) -> str | None:
    """What a program would load from a folder; in one too large to be searched it may be hidden."""
    if not folder.is_dir():
        return None
    names = [one.name for one in itertools.islice(folder.rglob("*"), _MOST_FILES + 1)]
    many = _TOO_MANY if len(names) > _MOST_FILES else None
    return next(filter(_is_loaded, names), many)


def _check_parent(found: Verification, path: Path) -> None:
    before = Verification(Certificate.load(path))
    _check_certificate(before)
    _check_signature(before, None)
    problems = [f"parent: {problem}" for problem in before.problems]
    problems += check_link(found.certificate, before.certificate)
    said = "it is chained to its parent, whose certificate holds; its files were not looked at"
    found.add(said, problems)
    if before.certificate.signature is not None:
        found.skip("whose key signed its parent")
    if before.certificate.parent is not None:
        found.skip(f"the parent of its parent: that names {before.certificate.parent}")
    for warning in before.certificate.warnings:
        if warning.startswith(BLOCKS):
            found.skip(f"whether its parent was released: that says {warning!r}")
