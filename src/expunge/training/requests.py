"""A request, read: who goes, what stays, which release came before, which folder it resumes in."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashes import hash_bytes, hash_tensor, hash_tensors, is_tensor
from expunge.certificates.people import commit
from expunge.certificates.record import Code, Tensors, TrainingRun, list_versions
from expunge.certificates.release import Parent, Release, read_parent
from expunge.certificates.sources import hash_source, read_source
from expunge.data.data import Data, check_data
from expunge.data.examples import list_columns
from expunge.data.people import Names, check_request, read_people
from expunge.errors import InputError, UnlearningError
from expunge.networks.checkpoints import compare_published
from expunge.networks.tensors import list_published, list_trainable, name_first

Before = Release | Certificate | str | Path


@dataclass(frozen=True, eq=False)
class Request:
    """Who is forgotten, on how many examples; the data without them; the release before."""

    names: Names
    examples: int
    retained: Data
    created: str
    before: Parent | None = None

    @property
    def parent(self) -> Certificate | None:
        """The certificate of the release before."""
        return None if self.before is None else self.before.certificate

    def describe(self) -> dict[str, Any]:
        """What a record says of people: salted commitments, and those of all requests before."""
        return {
            "forget": commit(self.names, self.examples, leaves=True),
            "retained": commit(self.retained.people, len(self.retained)),
            "earlier": () if self.before is None else self.before.requests,
            "parent": None if self.parent is None else self.parent.sha256,
            "created": self.created,
        }


def read_request(data: Data, forget: Iterable[Any], parent: Before | None = None) -> Request:
    """The request of these people, against data in which they may or may not be any more.

    With a ``parent`` (a release, or its folder), nobody whom it forgot may be among those who stay.

    >>> data = Data(([1.0, 2.0], [0, 1]), ids=["ann", "bob"])
    >>> request = read_request(data, ["ann"])
    >>> request.names, request.examples, request.retained.people
    (('ann',), 1, ('bob',))
    """
    check_data(data)
    created = datetime.now(UTC).isoformat(timespec="seconds")
    before = read_parent(parent, created)
    if before is not None and before.record is None:
        warnings.warn(
            "people whom the parent forgot cannot be looked for in the data: its record.json is "
            "missing; parent= takes the folder of the release that has it",
            stacklevel=3,
        )
    people, wanted = data.everybody(), read_people(forget, "forget")
    gone = [] if before is None else before.find_returned(people.union(wanted))
    names = check_request(wanted, people, gone=gone, exact_names=data.exact_names)
    retained = data.drop(names)
    if len(retained) == 0:
        raise InputError("forget names everybody who has an example; nothing is left to train on")
    return Request(names, data.count(names), retained, created, before)


def describe_code(salt: str, *, data: Data | None = None, **functions: Any) -> Code:
    """The operator's code by salted hash: ``build``, ``train``, ``loss``, and ``data``: what loads
    it, says whose an example is, and makes a batch."""
    parts = [] if data is None else [data.source, data.person, data.collate]
    given = functions | {"data": [part for part in parts if part is not None] or None}
    return Code(**{n: hash_source(thing, salt) for n, thing in given.items() if thing is not None})


def describe_training(train: Any, retained: Data) -> TrainingRun:
    """What a record says of a training: its name, and the options of the built-in one."""
    from expunge.training.training import Training

    own = getattr(train, "__qualname__", type(train).__name__)
    built_in = isinstance(train, Training)
    return TrainingRun(
        function="expunge.Training" if built_in else f"{getattr(train, '__module__', '')}.{own}",
        options=train.describe() if built_in else {},
        examples=len(retained),
        validation=None if retained.validation is None else len(retained.validation),
    )


def check_start(
    module: nn.Module, old: Mapping[str, Tensor], unchanged: Collection[str] = ()
) -> None:
    """Refuse a ``build()`` that gives trainable weights of the old model: the slip of loading the
    trained file where the published one was meant."""
    own = list_trainable(module)
    if strange := [unchanged] if isinstance(unchanged, str) else sorted(set(unchanged) - set(own)):
        valid = f"a list of names of trainable parameters, such as {next(iter(own))!r}"
        raise InputError.of("unchanged", strange[0], valid)
    # Tensors whose numbers are all equal are nobody's.
    copied = [
        name
        for name, fresh in ((n, p.detach()) for n, p in own.items())
        if name in old
        and name not in unchanged
        and torch.equal(fresh, old[name].to(fresh.device, fresh.dtype))
        and bool((fresh != fresh.flatten()[:1]).any())
    ]
    if copied:
        raise UnlearningError(
            f"build() returns the old model's own weights in {name_first(copied)}; it must give a "
            "public start (unchanged=[names] declares what the old training never touched)"
        )


def describe_published(module: nn.Module, published: str | Path | None) -> Tensors | None:
    """Frozen parameters and buffers of ``build()``: compared with a file, or declared."""
    tensors = list_published(module)
    if published is not None:
        compare_published(published, module)
    if not tensors:
        return None
    compared = None if published is None else Path(published).name
    return Tensors(names=tuple(tensors), hash=hash_tensors(tensors), compared=compared)


def identify(request: Request, **more: Any) -> dict[str, str]:
    """What a resumed run must have in common with the one that was stopped, by name: of data that
    lie in memory the bytes too."""
    data = request.retained
    columns = list_columns(data.examples) if data.kind == "columns" else []
    content = [hash_tensor(column).hex() for column in columns if is_tensor(column)]
    facts = {
        "people to forget": "\0".join(sorted(request.names)),
        "data": repr((data.kind, data.people if data.stream else data.ids, content)),
        "versions": repr(list_versions()),
    }
    facts |= {
        n: read_source(given) if callable(given) else repr(given) for n, given in more.items()
    }
    return {n: hash_bytes([text.encode("utf-8", "surrogatepass")]) for n, text in facts.items()}
