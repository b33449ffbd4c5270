"""What ran, step by step, and what it ran on: frozen data, written once, read by ``certify``.

A record belongs to the operator and is **not for release**. Its trace and the hash of the old
weights are functions of the old model that no noise covers: the realised norm of the noise alone
tells two candidate starts apart. ``certify`` publishes what may be published and binds the rest
by the record's hash, which the secret ``nonce`` blinds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_type_hints

import rfc8785

from expunge import recipes
from expunge.certificates.identifiers import Commitment, check_count, check_digest
from expunge.errors import CertificateError, InputError
from expunge.files import read_limited, write_atomic
from expunge.recipes import Execution, Problem, Recipe

if TYPE_CHECKING:
    from torch import nn

FORMAT, OLD_FORMAT = "expunge-record-2", "expunge-record-1"
MAX_BYTES = 1_000_000_000
_LARGEST_SAFE_INTEGER = 2**53 - 1


@dataclass(frozen=True)
class Trace:
    """One entry per noisy step, in order.

    ``gradient_norm`` is ‖g_t‖ before clipping; ``clip_factor`` what it was multiplied by;
    ``model_norm`` ‖x - c‖ after the step's clips and before its noise; ``noise_norm`` the realised
    ‖ξ_t‖; ``nonfinite`` whether the gradient was not finite and counted as zero (its norm is then
    recorded as 0). Output perturbation has one entry with learning rate and gradient norm 0.
    """

    learning_rate: tuple[float, ...] = ()
    noise_std: tuple[float, ...] = ()
    gradient_norm: tuple[float, ...] = ()
    clip_factor: tuple[float, ...] = ()
    model_norm: tuple[float, ...] = ()
    noise_norm: tuple[float, ...] = ()
    nonfinite: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for column in fields(self):
            kind = bool if column.name == "nonfinite" else float
            values = tuple(kind(value) for value in getattr(self, column.name))
            object.__setattr__(self, column.name, values)
            if len(values) != len(self.learning_rate):
                raise InputError(
                    f"trace.{column.name} has {len(values)} entries; "
                    f"trace.learning_rate has {len(self.learning_rate)}"
                )
            bad = next((value for value in values if not 0 <= value < math.inf), None)
            if bad is not None:
                raise InputError.of(f"trace.{column.name}", bad, "finite and >= 0 at every step")

    def __len__(self) -> int:
        return len(self.learning_rate)


@dataclass(frozen=True)
class FineTuning:
    """Training on retained data after the last noise: post-processing, so it costs nothing.

    ``checked``: the identifiers of its data were known, and none of them is of the forget set.
    """

    optimizer: str
    epochs: float
    steps: int
    learning_rate: float
    batch_size: int
    schedule: str
    gradient_evaluations: int
    data: Commitment | None = None
    checked: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "gradient_evaluations"):
            check_count(name, getattr(self, name))
        for name in ("epochs", "learning_rate"):
            checked = recipes.check_value("nonnegative", name, getattr(self, name))
            object.__setattr__(self, name, checked)


@dataclass(frozen=True)
class PublicTensors:
    """The tensors of a release that are not certified, by name, and why they are public.

    ``compared``: each is bit for bit the tensor of that name in ``source`` (a file, or words for
    what was given); otherwise the operator declared them public and nothing was compared.
    ``hash`` is the tree hash of these tensors as they are released.
    """

    names: tuple[str, ...]
    compared: bool
    source: str
    hash: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.names))
        if not self.names:
            raise InputError.of("public.names", self.names, "the names of one tensor or more")
        check_digest("public.hash", self.hash)


@dataclass(frozen=True)
class Statistics:
    """Where the weights of a head built to forget come from.

    ``features`` describes the public map to integers (network's hash, bits, lift, seed, how rows
    were evaluated), ``head`` what was solved; ``samples`` is how many rows remain and ``digest``
    the SHA-256 of their exact sums, which anyone with the stored integers can compute again.
    """

    features: Mapping[str, Any]
    head: Mapping[str, Any]
    samples: int
    digest: str

    def __post_init__(self) -> None:
        check_count("statistics.samples", self.samples)
        check_digest("statistics.digest", self.digest)


@dataclass(frozen=True)
class Sharding:
    """What the constituents of an ensemble are, shard by shard.

    ``seed`` is the public string, ``build`` the hash of the first network before any data,
    ``samples`` how many examples each shard holds, ``hashes`` the constituents (of an empty shard:
    of no tensors) and ``trained_from`` the first slice each was trained again from since the
    release before, 0 for untouched. ``digest`` is the SHA-256 over settings and held examples;
    ``distilled``: the release is one network trained to answer as the ensemble does.
    """

    seed: str
    combination: str
    training: Mapping[str, Any]
    deterministic: bool
    build: str
    samples: tuple[int, ...]
    hashes: tuple[str, ...]
    trained_from: tuple[int, ...]
    digest: str
    distilled: bool = False

    def __post_init__(self) -> None:
        for name in ("samples", "hashes", "trained_from"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for value in (*self.samples, *self.trained_from):
            check_count("shards.samples", value)
        for value in (self.build, self.digest, *self.hashes):
            check_digest("shards.hashes", value)


CentreKind = Literal["initialisation", "zero", "public weights"]


@dataclass(frozen=True)
class CentreOrigin:
    """What the public centre of a noisy run is; its hash is the record's ``centre``.

    A fresh initialisation has the ``seed`` it was ``drawn`` from, and how.

    >>> CentreOrigin("initialisation", "expunge", "reset_parameters of every module").seed
    'expunge'
    """

    kind: CentreKind
    seed: str | None = None
    drawn: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(CentreKind):
            raise InputError.of(
                "origin.kind", self.kind, "one of " + ", ".join(get_args(CentreKind))
            )
        for name in ("seed", "drawn"):
            if (getattr(self, name) is not None) != (self.kind == "initialisation"):
                raise InputError(f"origin.{name} must be given exactly for an initialisation")


@dataclass(frozen=True)
class Adapter:
    """A release of PEFT's kind: tree hashes of the adapter's tensors as PEFT names them and of the
    base's by their own names, and the SHA-256 of ``adapter_config.json``."""

    hash: str
    base: str
    config: str

    def __post_init__(self) -> None:
        for name in ("hash", "base", "config"):
            check_digest(f"adapter.{name}", getattr(self, name))


@dataclass(frozen=True)
class RunRecord:
    """Everything needed to recompute the guarantee, and what the run worked on.

    ``parameters`` counts the certified ones; ``grid`` is the power-of-two grid (0.0: none);
    ``noise`` is the noise source's description (``source`` "system", "seeded" or "none",
    ``generator``, ``releasable``, ``seed``) and ``noise_keys`` how many keys it used (one, plus one
    per resume). Weights are hashed as in ``expunge.certificates.hashing``: ``weights_before`` all
    tensors of the old model, ``weights_noisy`` all tensors right after the last noise,
    ``weights_after`` all tensors of the released file, ``centre`` those of the centre, which
    ``origin`` describes; ``public``
    are the ones that are not certified (``frozen`` and ``frozen_names`` in records of before
    version 0.2). ``checked``: the identifiers of forget and retained data were known, as many as
    there are data, and have none in common. ``gradient_evaluations`` counts examples in the noisy
    steps; ``start`` is "model", "centre" for the control that never saw the old model, or "fresh"
    for a run from a start that saw no data (``initialisation`` says which). ``problem`` says where
    the constants of full-batch descent come from; ``processes`` how several worked together, None
    for one; ``adapter`` describes the release once more where it is an adapter on a public base.

    >>> record = RunRecord(
    ...     recipe=recipes.Retraining(), parameters=3, grid=0.0, execution=Execution(),
    ...     noise={"source": "none"}, noise_keys=0, trace=Trace(), gradient_evaluations=640,
    ...     weights_before="a" * 64, weights_noisy="b" * 64, weights_after="b" * 64,
    ...     device="cpu", dtype="float32", created="2025-11-15T22:00:00+00:00")
    >>> RunRecord.from_dict(record.to_dict()) == record
    True
    """

    recipe: Recipe
    parameters: int
    grid: float
    execution: Execution
    noise: Mapping[str, Any]
    noise_keys: int
    trace: Trace
    gradient_evaluations: int
    weights_before: str
    weights_noisy: str
    weights_after: str
    device: str
    dtype: str
    created: str
    frozen: str | None = None
    frozen_names: tuple[str, ...] = ()
    centre: str | None = None
    forget: Commitment | None = None
    retain: Commitment | None = None
    buffers: Literal["none", "frozen", "reset"] = "none"
    buffer_names: tuple[str, ...] = ()
    finetune: FineTuning | None = None
    start: Literal["model", "centre", "fresh"] = "model"
    initialisation: str | None = None
    problem: Problem | None = None
    resumed: int = 0
    parent: str | None = None
    processes: Mapping[str, Any] | None = None
    public: PublicTensors | None = None
    checked: bool = False
    statistics: Statistics | None = None
    shards: Sharding | None = None
    origin: CentreOrigin | None = None
    adapter: Adapter | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str])
    nonce: str = field(default_factory=lambda: secrets.token_hex(32))
    format: str = FORMAT

    def __post_init__(self) -> None:
        for name in ("parameters", "noise_keys", "gradient_evaluations", "resumed"):
            check_count(name, getattr(self, name))
        recipes.check_value("nonnegative", "grid", self.grid)
        if self.grid > 0 and math.frexp(self.grid)[0] != 0.5:
            raise InputError.of("grid", self.grid, "0 or a power of two")
        for name in ("weights_before", "weights_noisy", "weights_after", "nonce"):
            check_digest(name, getattr(self, name))
        for name in ("frozen", "centre", "parent"):
            if getattr(self, name) is not None:
                check_digest(name, getattr(self, name))
        if self.start not in ("model", "centre", "fresh"):
            raise InputError.of("start", self.start, "'model', 'centre' or 'fresh'")
        if self.buffers not in ("none", "frozen", "reset"):
            raise InputError.of("buffers", self.buffers, "'none', 'frozen' or 'reset'")
        if self.noise.get("source") not in ("system", "seeded", "none"):
            raise InputError.of(
                "noise.source", self.noise.get("source"), "'system', 'seeded' or 'none'"
            )
        for name in ("frozen_names", "buffer_names"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "grid", float(self.grid))

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; infinity is written as the string "inf"."""
        return cast(dict[str, Any], encode(self))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> RunRecord:
        """The record that ``to_dict`` described; anything else is a :class:`CertificateError`."""
        if data.get("format") not in (FORMAT, OLD_FORMAT):
            raise CertificateError(f"format is {data.get('format')!r}; it must be {FORMAT!r}")
        try:
            return _rebuild(cls, data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CertificateError(f"not a usable record: {error}") from error

    def to_bytes(self) -> bytes:
        """The canonical JSON (RFC 8785)."""
        try:
            return rfc8785.dumps(self.to_dict())
        except (rfc8785.CanonicalizationError, UnicodeError) as error:
            raise CertificateError(f"not a usable record: {error}") from None

    def digest(self) -> str:
        """SHA-256 of the canonical JSON: what a certificate binds; hiding while this is secret."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write canonical JSON for its owner alone; the file is either complete or not there."""
        write_atomic(path, self.to_bytes(), private=True)

    @classmethod
    def load(cls, path: str | Path) -> RunRecord:
        """Read what ``save`` wrote."""
        raw = read_limited(path, MAX_BYTES, "record")
        try:
            data = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise CertificateError(f"{path} is not JSON: {error}") from None
        if not isinstance(data, dict):
            raise CertificateError(f"{path} does not hold a JSON object")
        return cls.from_dict(cast(dict[str, Any], data))


# Fields that records of before version 0.2 do not have are left out where they say nothing.
_LATER = ("processes", "public", "checked", "samples", "statistics", "shards", "origin", "adapter")


def encode(value: object) -> object:
    """Plain data in which JSON can say everything: inf and integers from 2**53 become strings.

    >>> encode({"radius": math.inf, "seed": 2**60})
    {'radius': 'inf', 'seed': '1152921504606846976'}
    """
    match value:
        case bool() | str() | None:
            return value
        case int():
            return value if abs(value) <= _LARGEST_SAFE_INTEGER else str(value)
        case float():
            return value if math.isfinite(value) else str(value)
        case Mapping():
            items = cast(Mapping[str, object], value).items()
            return {key: encode(item) for key, item in items}
        case Sequence():
            return [encode(item) for item in cast(Sequence[object], value)]
        case _ if type(value) in recipes.METHODS.values():
            return encode(recipes.to_dict(cast(Recipe, value)))
        case _ if is_dataclass(value):
            given = {f.name: getattr(value, f.name) for f in fields(value)}
            told = [k for k, v in given.items() if k not in _LATER or not (v is None or v is False)]
            return {name: encode(given[name]) for name in told}
        case _:
            raise InputError.of("value", value, "plain data: numbers, strings, lists, mappings")


def decode(data: Mapping[str, Any]) -> dict[str, Any]:
    """Undo ``encode`` in a recipe: the string "inf" is a radius that does not clip."""
    return {key: math.inf if value == "inf" else value for key, value in data.items()}


def _rebuild(kind: type[Any], data: Mapping[str, Any]) -> Any:
    """Undo ``encode`` in a dataclass, by the types of its fields."""
    hints = _read_hints(kind)
    return kind(**{name: _read(name, hints.get(name), value) for name, value in data.items()})


def _read(name: str, hint: Any, value: Any) -> Any:
    if name == "recipe":
        return recipes.from_dict(decode(value))
    if name == "noise":
        return value | {"seed": int(value["seed"])} if value.get("seed") else value
    parts = [part for part in get_args(hint) if is_dataclass(part)]
    if is_dataclass(hint) or (parts and value is not None):
        return _rebuild(cast(type[Any], hint if is_dataclass(hint) else parts[0]), value)
    if hint in (str, bool) and type(value) is not hint:
        raise InputError.of(name, value, "text" if hint is str else "true or false")
    return value


@functools.cache
def _read_hints(kind: type[Any]) -> dict[str, Any]:
    return get_type_hints(kind)


@dataclass(frozen=True, eq=False)
class Run:
    """What ``unlearn`` returns: a new module, and the record of what ran.

    ``forgotten`` are the identifiers that must not come back, as text; they are kept in memory,
    for the check of what is fine-tuned on, and never written. None: they are not known.
    """

    model: nn.Module
    record: RunRecord
    forgotten: frozenset[str] | None = None


@functools.cache
def list_versions() -> dict[str, str]:
    """The versions of what computed a run; once per process, because reading them takes long."""
    names = ("expunge", "torch", "numpy", "scipy", "cryptography", "mpmath")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


NO_NOISE = {"source": "none", "generator": None, "releasable": False, "seed": None}
