"""What ran, and what it ran on: frozen data, written once, read by ``certify``.

A record belongs to the operator and is **not for release**. Its trace and the hash of the old
weights are functions of the old model that no noise covers: the realised norm of the noise alone
tells two candidate starts from each other. ``certify`` publishes what may be published
(:meth:`Record.publish`) and binds the rest by the record's hash, which the secret ``nonce`` blinds.
"""

from __future__ import annotations

import functools
import platform
import secrets
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from expunge.certificates.fields import (
    Count,
    Digest,
    Document,
    FileName,
    Model,
    Names,
    Plain,
    Positive,
    Real,
    RecipeField,
    Seed,
    Text,
    Time,
)
from expunge.certificates.people import Commitment
from expunge.recipes import IDEAL, Execution

OWN = "a function of the operator"


class Code(Model):
    """The operator's code, by the hash of its source under the record's salt; None: none was given,
    or it has no source (see ``expunge.certificates.sources``)."""

    build: Digest | None = None
    data: Digest | None = None
    train: Digest | None = None
    loss: Digest | None = None


class Tensors(Model):
    """Released tensors that are public as ``build()`` gave them: frozen parameters and buffers.

    ``compared`` is the name of the published file that has the same bits; None: published, says the
    operator.
    """

    names: Names
    hash: Digest
    compared: Text | None = None


class Adapter(Model):
    """A release of PEFT's kind: tree hashes of the adapter's tensors as PEFT names them, and of the
    base's by their own names."""

    hash: Digest
    base: Digest


class Weights(Model):
    """Tree hashes of named tensors, as in ``expunge.certificates.hashes``.

    ``after``: all tensors of the released file; ``start``: of what ``build()`` gave; ``noisy``:
    right after the last noise; ``old``: of the old model, which is private unless a parent released
    it. ``files``: SHA-256 of what lies beside the weights and belongs to them, such as config.json.
    """

    after: Digest
    start: Digest | None = None
    noisy: Digest | None = None
    old: Digest | None = None
    published: Tensors | None = None
    adapter: Adapter | None = None
    files: dict[FileName, Digest] = Field(default_factory=dict)


class TrainingRun(Model):
    """The training: all of it, or what came after the noise.

    ``function`` is its name ("expunge.Training", or the operator's own), ``options`` what the
    built-in one was given, ``examples`` how many retained ones it was handed.
    """

    function: Text
    options: Plain = Field(default_factory=dict)
    examples: Count
    validation: Count | None = None

    @property
    def built_in(self) -> bool:
        """Whether it is the library's own: then its name quotes nobody."""
        return self.function.startswith("expunge.")


class Noise(Model):
    """``keys`` counts the keys of the generator: one, and one more for every resume."""

    source: Literal["system", "seeded", "none"] = "none"
    generator: Text | None = None
    keys: Count = 0


class Trace(Model):
    """One entry per noisy step, in order: private.

    ``gradient_norm`` is ‖g_t‖ before clipping; ``clip_factor`` what it was multiplied by;
    ``model_norm`` ‖x - c‖ after the step's clips and before its noise; ``noise_norm`` the realised
    ‖ξ_t‖; ``nonfinite`` whether the gradient was not finite and counted as zero (its norm is then
    recorded as 0). Output perturbation has one entry with learning rate and gradient norm 0.
    """

    learning_rate: tuple[Real, ...] = ()
    noise_std: tuple[Real, ...] = ()
    gradient_norm: tuple[Real, ...] = ()
    clip_factor: tuple[Real, ...] = ()
    model_norm: tuple[Real, ...] = ()
    noise_norm: tuple[Real, ...] = ()
    nonfinite: tuple[bool, ...] = ()

    @model_validator(mode="after")
    def _check_lengths(self) -> Trace:
        for name in type(self).model_fields:
            if len(getattr(self, name)) != len(self):
                raise ValueError(f"{name} and learning_rate must have as many entries")
        return self

    def __len__(self) -> int:
        return len(self.learning_rate)


class Statistics(Model):
    """What a linear model was computed from.

    ``features`` describes the public map, ``numbers`` how values became integers, ``model`` what
    was solved; ``samples`` is how many rows remain and ``digest`` the SHA-256 of what is stored of
    them, which anyone who has it can compute again.
    """

    features: Plain
    numbers: Plain
    model: Plain
    samples: Count
    digest: Digest


class Sharding(Model):
    """The constituents of an ensemble, shard by shard.

    ``seed`` is the public string, ``samples`` how many examples each shard has, ``hashes`` the
    constituents (of an empty shard: of no tensors) and ``trained_from`` the first slice each was
    trained again from since the parent, 0 for untouched. ``digest`` is the SHA-256 over settings
    and examples. Constituent k has the tensors ``constituents.k.NAME`` of the released file.
    """

    seed: Text
    combination: Literal["logits", "probabilities"]
    samples: tuple[Count, ...]
    hashes: tuple[Digest, ...]
    trained_from: tuple[Count, ...]
    digest: Digest


class Applied(Model):
    """Post-processing of the released tensors alone: hashes of all of them before and after."""

    note: Text
    before: Digest
    after: Digest


class Environment(Model):
    """Where it ran: what could make bits differ when it is run again."""

    versions: dict[Text, Text] = Field(default_factory=lambda: dict(list_versions()))
    device: Text = "cpu"
    dtype: Text = "float32"
    threads: Count = 1
    deterministic: bool = True
    processes: Positive = 1


class Run(Document):
    """What record and certificate both say.

    ``parameters`` counts the certified ones; ``seed`` is the public one of ``build()``, batches and
    training. ``start``: "model" for a noisy run from the old one, "centre" for its control, which
    never saw it, "build" for exact methods. ``origin``: what the centre of a noisy run is,
    ``build()``'s tensors or zero; ``grid`` its power-of-two grid (0: none) and ``execution`` what
    the machine added to the account. ``buffers`` names running statistics that were estimated on
    retained data, ``missing`` trainable tensors that the old model lacks (they start at the
    centre), ``unchanged`` tensors that the operator says the old training never touched. ``parent``
    is the SHA-256 of the certificate of the release before.
    """

    recipe: RecipeField
    parameters: Positive
    seed: Seed = 0
    start: Literal["model", "centre", "build"]
    origin: Literal["build", "zero"] | None = None
    forget: Commitment
    retained: Commitment
    code: Code
    weights: Weights
    training: TrainingRun | None = None
    noise: Noise = Field(default_factory=Noise)
    grid: Real = 0.0
    execution: Execution = IDEAL
    buffers: Names = ()
    missing: Names = ()
    unchanged: Names = ()
    statistics: Statistics | None = None
    sharding: Sharding | None = None
    applied: tuple[Applied, ...] = ()
    resumed: Count = 0
    environment: Environment
    created: Time
    parent: Digest | None = None


class Record(Run):
    """Everything needed to recompute the guarantee, and what the run worked on.

    ``earlier`` are the requests of all releases before, by which a later run finds people who came
    back; ``salt`` is that of the hashes of code.

    >>> from expunge.certificates.people import commit
    >>> from expunge.recipes import Retraining
    >>> record = Record(
    ...     recipe=Retraining(), parameters=3, start="build", forget=commit(["ann"], 2),
    ...     retained=commit(["bob"], 5), code=Code(), weights=Weights(after="b" * 64),
    ...     training=TrainingRun(function="expunge.Training", examples=5))
    >>> Record.from_bytes(record.to_bytes()) == record
    True
    """

    what: ClassVar[str] = "record"
    most_bytes: ClassVar[int] = 1_000_000_000
    private: ClassVar[bool] = True
    environment: Environment = Field(default_factory=Environment)
    created: Time = Field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    trace: Trace | None = None
    earlier: tuple[Commitment, ...] = ()
    salt: Digest = Field(default_factory=lambda: secrets.token_hex(32))
    nonce: Digest = Field(default_factory=lambda: secrets.token_hex(32))
    format: Literal["expunge-record-1"] = "expunge-record-1"

    def publish(self) -> dict[str, Any]:
        """The fields of :class:`Run` as they may be published, as plain data.

        Nothing here is a function of the old model that no noise covers, or of forgotten data but
        for counts and salted commitments; a function's name may quote somebody's.
        """
        plain = self.model_dump(mode="json", include=set(Run.model_fields))
        for name in ("forget", "retained"):
            plain[name] |= {"salt": None, "leaves": None}
        if self.start != "model" or self.parent is None:
            plain["weights"]["old"] = None
        if self.training is not None and not self.training.built_in:
            plain["training"] |= {"function": OWN, "options": {}}
        if self.sharding is not None and self.parent is None:
            plain["sharding"]["trained_from"] = []
        return plain


@functools.cache
def list_versions() -> dict[str, str]:
    """The versions of what computes a run; once per process, because reading them takes long."""
    found = {"python": platform.python_version()}
    for name in ("expunge", "torch", "numpy", "scipy", "scikit-learn", "cryptography"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def compare_versions(then: dict[str, str]) -> list[str]:
    """What is of another version here: it may make other bits."""
    pairs = {name: (then.get(name), found) for name, found in list_versions().items()}
    return [f"{n} was {was}, here it is {is_}" for n, (was, is_) in pairs.items() if was != is_]
