"""``replay``: an exact release made again, compared bit for bit.

This, not inspection, answers a doubt about the operator: run it where neither the old weights nor
the forgotten rows exist, from the hashed source, the published files and the retained data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from expunge.certificates.certificate import Certificate
from expunge.certificates.hashes import hash_tensors
from expunge.certificates.people import Commitment, opens
from expunge.certificates.record import Record, compare_versions
from expunge.certificates.release import CERTIFICATE, RECORD, WEIGHTS, Parent, Release, check_record
from expunge.data.data import Data
from expunge.errors import InputError
from expunge.networks.building import call_build
from expunge.networks.tensors import collect_tensors, has_same_bits
from expunge.recipes import Retraining
from expunge.training.calling import Train, check_train, describe_environment, run_training
from expunge.training.requests import describe_code


@dataclass(frozen=True)
class Replay:
    """Whether the same bits came out again; else what differs, and what could be the cause.

    ``notes``: the same bits by other code, and what was applied afterwards and not repeated here.
    """

    differences: tuple[str, ...]
    causes: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        return not self.differences

    def __bool__(self) -> bool:
        return self.same

    def __str__(self) -> str:
        if self.same:
            return "; ".join(["the same bits again", *self.notes])
        return "\n".join([*self.differences, *(f"it may be: {cause}" for cause in self.causes)])


def replay(
    run: Release | str | Path,
    build: Callable[[], nn.Module],
    data: Data,
    *,
    train: Train,
    device: torch.device | str | None = None,
) -> Replay:
    """Retrain a release once more, from its own seed, and compare all bits.

    ``data`` are the retained ones; of forgotten people who are still in them nothing is used.

    >>> from expunge.exact.retrain import retrain
    >>> from expunge.training.training import Training
    >>> data = Data((torch.eye(4), torch.tensor([0, 1, 0, 1])), ids=["ann", "bob", "cy", "di"])
    >>> three = {"build": lambda: nn.Linear(4, 2), "data": data, "train": Training(epochs=2)}
    >>> release = retrain(forget=["ann"], **three)
    >>> print(replay(release, **three))
    the same bits again
    """
    check_train(train)
    certificate, record, released = _read(run)
    if not isinstance(certificate.recipe, Retraining):
        raise InputError.of(
            "run", certificate.method, "a retraining; for others Shards.replay, linear_model.replay"
        )
    check_record(certificate, record, run)
    retained = data.drop(Parent(certificate, record).find_returned(data.people))
    code = [] if record is None else _compare_code(record, build, data, train)
    module = call_build(build, int(certificate.seed), device=device)
    causes = [*code, "other rows of the same people", *_list_causes(certificate, module)]
    trained = run_training(train, module, retained, int(certificate.seed), device=device)
    stated = (certificate if record is None else record).retained
    differences = [
        *_compare_people(stated, retained),
        *_compare(collect_tensors(trained), released, certificate),
    ]
    notes = [*code, *(f"before {a.note!r}, not repeated" for a in certificate.applied)]
    return Replay(tuple(differences), tuple(causes) if differences else (), tuple(notes))


def _read(run: Release | str | Path) -> tuple[Certificate, Record | None, Mapping[str, Tensor]]:
    if isinstance(run, Release):
        return run.certificate, run.record, run.tensors
    folder = Path(run)
    if not (folder / WEIGHTS).is_file():
        raise InputError.of("run", str(run), f"the folder of a release, with {WEIGHTS}")
    record = Record.load(folder / RECORD) if (folder / RECORD).is_file() else None
    return Certificate.load(folder / CERTIFICATE), record, load_file(folder / WEIGHTS)


def _compare(
    tensors: Mapping[str, Tensor], released: Mapping[str, Tensor], certificate: Certificate
) -> list[str]:
    """Tensors that differ; what was applied afterwards is compared by the hash before."""
    found, stated = list[str](), certificate.weights.after
    if certificate.applied:
        first, root = certificate.applied[0], hash_tensors(tensors)
        if root != first.before:
            found.append(
                f"the weights before {first.note!r} have the hash {root}, not {first.before}"
            )
    else:
        names, both = sorted(tensors.keys() | released.keys()), tensors.keys() & released.keys()
        wrong = [n for n in names if n not in both or not has_same_bits(tensors[n], released[n])]
        if wrong:
            found.append(f"{len(wrong)} of {len(names)} tensors differ, {wrong[0]} first")
    if (root := hash_tensors(released)) != stated:
        found.append(f"the released weights have the hash {root}; the certificate says {stated}")
    return found


def _compare_people(stated: Commitment, retained: Data) -> list[str]:
    """By name where the record is there, which has the salt; else by number."""
    people = retained.people
    same = len(people) == stated.count if stated.salt is None else opens(stated, people)
    if same and stated.samples == len(retained):
        return []
    return [
        f"the data are others: {len(retained)} examples of {len(people)} people, the run had "
        f"{stated.samples} of {stated.count}"
    ]


def _compare_code(record: Record, build: Any, data: Data, train: Train) -> list[str]:
    found = describe_code(record.salt, build=build, data=data, train=train)
    return [
        f"the source of {name} is another than the run's"
        for name in ("build", "data", "train")
        if getattr(found, name) != getattr(record.code, name)
    ]


def _list_causes(certificate: Certificate, module: nn.Module) -> list[str]:
    """What could make bits differ although nothing is wrong."""
    then, now = certificate.environment, describe_environment(module)
    causes = compare_versions(then.versions)
    for name in ("device", "dtype", "threads", "processes"):
        was, is_ = getattr(then, name), getattr(now, name)
        causes += [f"{name} was {was}, here it is {is_}"] if was != is_ else []
    if now.device != "cpu":
        return [*causes, "kernels of an accelerator: there a difference proves nothing"]
    return [*causes, "another processor, or a train() that draws on what no seed decides"]
