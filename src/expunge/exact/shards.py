"""``Shards``: an ensemble whose parts never see each other's data; exact for any network.

A request retrains the shards it touches, each from the checkpoint before the first slice it touches
(THEORY, section 12; SISA, Bourtoule et al. 2021). Everything is a function of the public string and
of the examples that remain, so the result is what training on them alone gives, bit for bit on one
machine, whoever chose the requests: (0, 0). Learning more invalidates the slices that gain examples
and all later ones, at the same cost, so that the state never depends on the order of arrival.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from collections.abc import Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, get_args

import torch

from expunge import __version__
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.hashes import combine_leaves, hash_tensors
from expunge.certificates.people import commit
from expunge.certificates.record import Record, Sharding, Weights
from expunge.certificates.release import WEIGHTS, Release, describe_contents
from expunge.certificates.verification import verify
from expunge.data.data import Data, check_data
from expunge.data.people import check_request, read_people
from expunge.errors import InputError, RunError, UnlearningError
from expunge.exact.shards_constituents import (
    Build,
    Plan,
    Tensors,
    Work,
    describe_source,
    train_shards,
)
from expunge.exact.shards_ensemble import Combination, Ensemble, list_ensemble
from expunge.exact.shards_examples import (
    VALIDATION,
    Assignment,
    Index,
    check_repeatable,
    decode,
    index_examples,
)
from expunge.exact.shards_slices import FEWEST, Given, Kept, Slices
from expunge.manifests import read_kind
from expunge.networks.releases import hash_start
from expunge.recipes import Sharding as Recipe
from expunge.states import State
from expunge.training.calling import Train, check_train, describe_environment
from expunge.training.requests import describe_code, describe_training

KIND, NOTHING = "shards", "no shard has two examples or more"
SOURCES = ("build", "train", "collate")


class Shards:
    """``shards`` networks of ``build()``, each trained on its own people in ``slices`` stages.

    ``build`` and ``train`` are those of :func:`expunge.retrain`; every stage calls ``train`` on the
    slices so far, R slices (R + 1)/2 times as many examples as one training. ``train`` may name
    ``state=``, a dictionary that lasts from stage to stage; else each begins with a fresh
    optimizer. ``seed`` is a public string, fixed beforehand: who belongs where and every order
    follow from it. ``state`` is a folder; None: in memory. ``workers`` processes, or ``ray=True``
    (or an address), train constituents at once; the bits are the same. ``version`` is yours to
    change when something decides that the source does not show (a file that ``build`` reads).
    Another source, ``version``, torch or expunge trains everything again: it is refused until
    ``upgrade=True``. The state has keyed hashes of examples; with ``keep_examples=True`` it keeps a
    copy, and ``data`` may be left out later. A shard of fewer than two examples has no network.

    Formal guarantee: after any sequence of ``learn`` and ``forget`` every constituent is, bit for
    bit on one machine, that of a fresh training on the examples that are there.

    >>> x, y = torch.eye(4).repeat(6, 1), torch.arange(24) % 2
    >>> data = Data((x, y), ids=[f"user-{i}" for i in range(24)])
    >>> from expunge import Training
    >>> train = Training(epochs=3, learning_rate=0.5)
    >>> def make():
    ...     return Shards(lambda: torch.nn.Linear(4, 2), train, seed="public", shards=2, slices=2)
    >>> ensemble, never = make(), make()
    >>> ensemble.learn(data), never.learn(data.without(["user-0"]))
    (24, 23)
    >>> release = ensemble.forget(["user-0"], data)
    >>> release.record.weights.after == never.release().record.weights.after
    True
    >>> release.certificate.epsilon, release.model(x[:3]).shape
    (0.0, torch.Size([3, 2]))
    """

    def __init__(
        self,
        build: Build,
        train: Train,
        *,
        seed: str,
        shards: int = 8,
        slices: int = 4,
        state: str | Path | None = None,
        workers: int = 1,
        ray: bool | str = False,
        version: str = "",
        keep_examples: bool = False,
        combination: Combination = "logits",
        upgrade: bool = False,
        progress: bool = False,
    ) -> None:
        check_train(train)
        if combination not in (valid := get_args(Combination)):
            raise InputError.of("combination", combination, "one of " + ", ".join(valid))
        if type(workers) is not int or workers < 1:
            raise InputError.of("workers", workers, "a whole number >= 1")
        self.assignment = Assignment(shards, slices, seed)
        self.plan = Plan(build, train, seed)
        self.combination: Combination = combination
        self.version, self.keep_examples, self.upgrade = version, keep_examples, upgrade
        self.workers, self.ray, self.progress = workers, ray, progress
        self.path = None if state is None else Path(state)
        self.state: State | None = None
        # Read now: what training appends to (a list of losses) is no other source afterwards.
        self._code = {"build": describe_source(build), "train": describe_source(train)}
        self._open()

    def __repr__(self) -> str:
        own, where = self.assignment, None if self.path is None else str(self.path)
        sizes = f"shards={own.shards}, slices={own.slices}"
        return f"Shards(seed={own.seed!r}, {sizes}, state={where!r})"

    def __len__(self) -> int:
        return 0 if self.state is None else Slices.read(self.state).total

    def learn(self, data: Data, *, readmit: bool = False) -> int:
        """Add examples and train what they touch; returns how many were new.

        An example with names and content that are there is the same example: repeating a call that
        was cut short counts nothing twice. Shards that gain examples are trained again, so ``data``
        must have all that was learned there before, unless the state keeps examples. People who
        were forgotten are refused unless ``readmit``.
        """
        check_data(data)
        check_repeatable(data)
        with self._writing(create=True) as state:
            before, settings = Slices.read(state), self._describe(data)
            before.check_returned()
            back = state.find_readmitted(data.everybody(), readmit)
            index = index_examples(data, self.assignment, state)
            slices = before.add(index)
            source = self._make_source(slices, data, index)
            works = self._plan_work(source, settings)
            files = source.list_files(slices.list_changed(before))
            undo = {name: bytes(state.read(name)) if name in state else None for name in files}
            old = state.settings
            if files or settings != old:
                state.commit(files, settings=settings)
            try:
                self._train(slices, works)
            except RunError:  # what was trained is kept: the same call goes on
                raise
            except Exception:  # what cannot be trained is not learned
                state.commit(undo | before.list_stale(old), settings=old)
                raise
            stale = slices.list_stale(settings)
            if stale or back:
                state.commit(stale, readmit=back)
        return slices.total - before.total

    def forget(self, people: Iterable[Any], data: Data | None = None) -> Release:
        """Remove every example of these people, retrain what had them, release the rest.

        ``data`` is where the examples of the touched shards are read from, without these people or
        with them. After a kill, or where a release was never saved, the same call again goes on,
        and counts what they had.
        """
        with self._writing() as state:
            names = read_people(people, "forget")
            marks = {state.mark(state.name(name)): name for name in names}
            before, settings = Slices.read(state), self._describe(data)
            before.check_returned(leaving=marks)
            slices, gone = before.remove(names)
            left = {name for mark, name in marks.items() if mark in state.forgotten}
            there = {marks[mark] for mark in gone}
            if data is not None and not data.exact_names:  # to find those who look like them
                there |= data.everybody().difference(names)
            check_request(names, there, gone=left, exact_names=data is None or data.exact_names)
            if len(gone) < len(names):
                many = f"{len(names) - len(gone)} of {len(names)}"
                warnings.warn(f"already forgotten: {many}", stacklevel=2)
            if max(map(sum, slices.count())) < FEWEST:
                raise UnlearningError(f"{NOTHING}; there would be nothing to release")
            source = self._make_source(slices, data)
            works = self._plan_work(source, settings)
            files = source.list_files(slices.list_changed(before))
            if files or settings != state.settings:
                stale = slices.list_stale(settings)
                state.commit(files | stale, forget=gone, settings=settings)
            self._train(slices, works)
            return self._release(slices, names, marks)

    def release(self) -> Release:
        """The ensemble of everything that is there now."""
        with self._writing() as state:
            slices = Slices.read(state)
            slices.check_returned()
            if self._describe(None) != state.settings:
                raise InputError("upgrade is True; call learn(data): it trains everything again")
            return self._release(slices, (), ())

    def holds(self, people: Iterable[Any]) -> list[str]:
        """Those of ``people`` who have an example here."""
        if (state := self.state) is None:
            return []
        state.refresh()
        return Slices.read(state).find_people(people)

    def forgot(self, people: Iterable[Any]) -> list[str]:
        """Those of ``people`` who are in the list of the forgotten."""
        if (state := self.state) is None:
            return []
        state.refresh()
        return [name for name in dict.fromkeys(read_people(people)) if state.is_forgotten(name)]

    def cost(self, people: Iterable[Any]) -> float:
        """What forgetting these people would cost, as a part of training the whole ensemble."""
        if (state := self.state) is None:
            return 0.0
        return Slices.read(state).measure(set(map(state.name, read_people(people))))

    def replay(self, data: Data, run: str | Path | None = None) -> list[str]:
        """Train every constituent again from nothing; returns what differs from the state, and from
        the release in the folder ``run``. Of ``data``, whom the state does not have is left out."""
        expected, shards = dict[str, tuple[str, ...]](), range(self.assignment.shards)
        stated: tuple[int, tuple[int, ...]] | None = None
        if run is not None:
            c = verify(run).certificate  # its hashes are those of the released file
            if c.sharding is None or not (Path(run) / WEIGHTS).is_file():
                raise InputError.of("run", str(run), f"a release of shards, with {WEIGHTS}")
            expected["the release"] = c.sharding.hashes
            stated = c.retained.count, c.sharding.samples
        if self.state is not None:
            expected["the state"] = _hash_each(_read_constituents(Slices.read(self.state)), shards)
            data = data.drop(data.everybody().difference(self.holds(data.everybody())))
        fresh = Shards(self.plan.build, self.plan.train, **asdict(self.assignment),
                       workers=self.workers, ray=self.ray)  # fmt: skip
        fresh.learn(data)
        assert fresh.state is not None
        slices = Slices.read(fresh.state)
        found = _hash_each(_read_constituents(slices), shards)
        differ = [
            f"constituent {k} trained again is {one}, that of {where} is {other}"
            for where, hashes in expected.items()
            for k, (one, other) in enumerate(zip_longest(found, hashes))
            if one != other
        ]
        there = len(slices.list_owners()), tuple(map(sum, slices.count()))
        if stated is not None and stated != there:
            shown = [
                f"{people} people with {samples} examples" for people, samples in (there, stated)
            ]
            differ.append(f"the data are of {shown[0]} by shard; the release says {shown[1]}")
        return differ

    def _open(self) -> None:
        if self.state is not None or self.path is None or read_kind(self.path) is None:
            return
        self.state = State.open(self.path, KIND)
        ours = {**asdict(self.assignment), "keep_examples": self.keep_examples}
        for name, value in ours.items():
            if value != (there := self.state.settings.get(name)):
                raise InputError.of(name, value, f"{there!r}, as in {self.path}")

    @contextmanager
    def _writing(self, create: bool = False) -> Generator[State]:
        self._open()
        if self.state is None:
            if not create:
                raise InputError("nothing was learned yet; call learn(data) first")
            self.state = State.create(self.path, KIND, self._describe(None))
        with self.state.writing():
            yield self.state

    def _describe(self, data: Data | None) -> dict[str, Any]:
        """What decides, beside the examples; refused where it is not what the state was made by."""
        before = {} if self.state is None else self.state.settings
        collate = before.get("collate") if data is None else describe_source(data.collate)
        settings: dict[str, Any] = {
            **asdict(self.assignment),
            "keep_examples": self.keep_examples,
            **self._code,
            "collate": collate,
            "version": self.version,
            "torch": str(torch.__version__),
            "expunge": __version__,
        }
        if self.state is None or not self.state.names("slices/") or self.upgrade:
            return settings
        changed = [
            f"the source of {n}" if n in SOURCES else f"{n} ({before[n]!r}, now {value!r})"
            for n, value in settings.items()
            if before[n] != value
        ]
        if changed:
            raise InputError(
                f"{' and '.join(changed)} changed since this state was trained: all "
                f"{self.assignment.shards} constituents would be trained again from their first "
                "slice; pass upgrade=True to do that"
            )
        return settings

    def _make_source(self, slices: Slices, data: Data | None, index: Index | None = None) -> Given:
        return (Kept if self.keep_examples else Given)(slices, data, index)

    def _plan_work(self, source: Given, settings: Mapping[str, Any]) -> list[Work]:
        """What has to be trained; examples that it needs and that are not at hand are refused."""
        works, state = list[Work](), source.slices.state
        for shard, names in source.slices.list_checkpoints(settings).items():
            done = [j for j, name in enumerate(names, 1) if name in state]
            first = max(done, default=0) + 1
            places = self.assignment.list_places(shard)
            stages = [partial(source.read, places[:j]) for j in range(first, len(names) + 1)]
            if stages:
                before = bytes(state.read(names[first - 2])) if first > 1 else None
                works.append(Work(shard, first, before, stages))
        source.check([work.shard for work in works])
        return works

    def _train(self, slices: Slices, works: list[Work]) -> None:
        state = slices.state
        names = slices.list_checkpoints(state.settings)

        def keep(shard: int, stage: int, checkpoint: bytes) -> None:
            state.commit({names[shard][stage - 1]: checkpoint})

        train_shards(self.plan, works, keep, self.workers, self.ray, self.progress)

    def _release(self, slices: Slices, names: tuple[str, ...], marks: Collection[bytes]) -> Release:
        state, created = slices.state, datetime.now(UTC).isoformat(timespec="seconds")
        parent = None if state.parent is None else Certificate.from_bytes(state.parent)
        if left := state.pending.keys() - set(marks):
            warnings.warn(
                f"{len(left)} people of an earlier request are named in no certificate, because "
                "its release was not saved; name them again to have them named",
                stacklevel=3,
            )
        constituents = _read_constituents(slices)
        if not constituents:
            raise UnlearningError(f"{NOTHING}; there is nothing to release")
        base = self.plan.make()
        start = combine_leaves(hash_start(base).values())
        model = Ensemble(base, constituents, self.combination).eval()
        contents, salt = list_ensemble(model), secrets.token_hex(32)
        beside = sum(row.role == VALIDATION for part in slices.parts.values() for row in part.rows)
        handed = Data(range(slices.total), validation=Data(range(beside)) if beside else None)
        record = Record(
            recipe=Recipe(self.assignment.shards, self.assignment.slices),
            parameters=sum(t.numel() for part in constituents.values() for t in part.values()),
            seed=self.plan.start_seed,
            start="build",
            forget=commit(names, sum(state.pending.get(m, 0) for m in marks), leaves=True),
            retained=commit({owner.hex() for owner in slices.list_owners()}, slices.total),
            code=describe_code(salt, build=self.plan.build, train=self.plan.train),
            salt=salt,
            weights=Weights(start=start, **describe_contents(contents)),
            training=describe_training(self.plan.train, handed),
            sharding=self._describe_sharding(slices, constituents, parent),
            environment=describe_environment(model).model_copy(update={"threads": 1}),
            created=created,
            parent=None if parent is None else parent.sha256,
        )
        made: Any = model, certify(record, parent=parent), record, contents.tensors, contents.files
        return Release(*made, relist=list_ensemble, saving=state.saving(marks))

    def _describe_sharding(
        self, slices: Slices, constituents: Mapping[int, Tensors], parent: Certificate | None
    ) -> Sharding:
        """What a certificate says; what was trained since follows from the lineages then."""
        state, hashes = slices.state, _hash_each(constituents, range(self.assignment.shards))
        now = slices.list_lineages(state.settings)
        digest = hashlib.sha256("".join(own[-1] for own in now).encode()).hexdigest()
        last = None if parent is None else parent.sharding
        names = [f"releases/{d[:32]}" for d in (digest, "" if last is None else last.digest)]
        then = json.loads(bytes(state.read(names[1]))) if names[1] in state else now
        old = {name: None for name in state.names("releases/") if name not in names}
        if old or names[0] not in state:
            state.commit({**old, names[0]: json.dumps(now).encode()})
        samples, trained_from = tuple(map(sum, slices.count())), list[int]()
        for k, was in enumerate(
            () if last is None else zip(last.hashes, last.samples, strict=True)
        ):
            same = was == (hashes[k], samples[k])
            trained_from.append(0 if same else _find_first(then[k], now[k]))
        return Sharding(
            seed=self.assignment.seed,
            combination=self.combination,
            samples=samples,
            hashes=hashes,
            trained_from=tuple(trained_from),
            digest=digest,
        )


def _find_first(before: list[str], now: list[str]) -> int:
    """The first slice, from 1, whose lineage is not the one before."""
    pairs = enumerate(zip(before, now, strict=True), 1)
    return next((j for j, (one, two) in pairs if one != two), 1)


def _read_constituents(slices: Slices) -> dict[int, Tensors]:
    state, names = slices.state, slices.list_checkpoints(slices.state.settings)
    if any(own[-1] not in state for own in names.values()):
        raise UnlearningError("a call of learn or forget was cut short; repeat it first")
    return {k: decode(state.read(own[-1]))[0] for k, own in names.items()}


def _hash_each(constituents: Mapping[int, Tensors], shards: Iterable[int]) -> tuple[str, ...]:
    return tuple(
        hash_tensors({f"constituents.{k}.{name}": t for name, t in constituents.get(k, {}).items()})
        for k in shards
    )
