"""An ensemble whose parts never see each other's data: exact forgetting for any network.

A request retrains the shards it touches, each from the checkpoint before the first slice it touches
(THEORY, section 12; SISA, Bourtoule et al. 2021). Everything is a function of the public string and
of the examples that remain, so the result is what training on them alone gives, bit for bit on one
machine, whoever chose the requests: (0, 0). Learning more invalidates the slices that gain examples
and all later ones, at the same cost, so that the state never depends on the order of arrival.

One example costs (2R+1)/(3RS) of the ensemble's own training on average, 1/S at worst.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
import weakref
from collections import Counter
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Unpack

from expunge.certificates.certificate import Certificate
from expunge.certificates.identifiers import commit, read_ids
from expunge.certificates.record import (
    NO_NOISE,
    PublicTensors,
    Run,
    RunRecord,
    Sharding,
    Trace,
    list_versions,
)
from expunge.errors import (
    InputError,
    RunError,
    UnlearningError,
    VerificationError,
)
from expunge.forgettable.averaging import COMBINATIONS, Combination, Ensemble
from expunge.forgettable.constituents import (
    FEWEST,
    Build,
    Plan,
    Tensors,
    Train,
    find_behaviour,
    list_every,
    list_lineages,
    list_own,
    measure_work,
    read_checkpoint,
    read_options,
)
from expunge.forgettable.distilling import train_student
from expunge.forgettable.folders import FORMAT, Folder, Held, read_shards_meta
from expunge.forgettable.slices import (
    Assignment,
    Examples,
    add,
    join,
    read_examples,
    remove,
    split,
)
from expunge.forgettable.starts import find_public
from expunge.forgettable.store import create_folder, hold, write_together
from expunge.forgettable.workers import Workers, train_all
from expunge.noisy.model import Public
from expunge.processes.weights import hash_weights, list_tensors
from expunge.recipes import Execution, ShardedTraining
from expunge.training.settings import Options, SharedOptions, spell_out
from expunge.training.train import describe_training

MOST_RELEASES = 100


class ShardOptions(SharedOptions, total=False):
    """The options of training a constituent; :class:`expunge.training.settings.Settings`."""

    learning_rate: float
    weight_decay: float
    optimizer: Any


class Shards:
    """``shards`` networks of ``build()``, each trained on its own people in ``slices`` steps.

    ``seed`` is a public string, fixed beforehand: it decides who belongs where, every
    initialisation and every order. The options are those of :func:`expunge.train`; ``epochs``
    counts passes over a shard in all: each of the R stages makes 2·epochs/(R+1) passes over the
    slices so far. ``train(model, examples, seed)`` is another way to train. Tensors that ``build``
    does not draw from its seed (a pretrained base) must be ``public``: compared with a state_dict,
    module or file, or declared by names and patterns. ``deterministic=False``: training's bits
    cannot be had again, and the certificate says that requests must not depend on the models.
    ``workers`` processes (or a function's) train constituents at once; their bits are the same.

    Formal guarantee: after any sequence of ``learn`` and ``forget`` every constituent is, bit for
    bit on one machine, that of a fresh training on the examples that are held.

    >>> import torch
    >>> x, y = torch.eye(4).repeat(6, 1), torch.arange(24) % 2
    >>> ids = [f"user-{i}" for i in range(24)]
    >>> make = lambda: Shards(lambda: torch.nn.Linear(4, 2), shards=2, slices=2, seed="public",
    ...                       epochs=2, learning_rate=0.5)
    >>> ensemble, never = make(), make()
    >>> ensemble.learn((x, y), ids=ids), never.learn((x[1:], y[1:]), ids=ids[1:])
    (24, 23)
    >>> run = ensemble.forget(["user-0"])
    >>> run.record.weights_after == never.release().record.weights_after, run.model(x[:3]).shape
    (True, torch.Size([3, 2]))
    """

    @spell_out(ShardOptions)
    def __init__(
        self,
        build: Build,
        *,
        seed: str,
        shards: int = 8,
        slices: int = 4,
        train: Train | None = None,
        public: Public | None = None,
        combination: Combination = "probabilities",
        deterministic: bool = True,
        workers: int | Workers = 1,
        state: str | Path | None = None,
        progress: bool = False,
        **options: Unpack[ShardOptions],
    ) -> None:
        if combination not in COMBINATIONS:
            raise InputError.of("combination", combination, "one of " + ", ".join(COMBINATIONS))
        if not callable(workers) and (type(workers) is not int or workers < 1):
            raise InputError.of("workers", workers, "a whole number >= 1")
        if type(deterministic) is not bool:
            raise InputError.of("deterministic", deterministic, "True or False")
        assignment = Assignment(shards, slices, seed)
        self.plan = Plan(assignment, build, read_options(train, options), train, deterministic)
        self.public: Public | None = public
        self.combination: Combination = combination
        self.workers, self.progress = workers, progress
        if state is None:
            state = tempfile.mkdtemp(prefix="expunge-shards-")
            weakref.finalize(self, shutil.rmtree, state, ignore_errors=True)
        self._folder = Folder(Path(state).absolute())
        self._fixed: PublicTensors | None = None
        self._settings: dict[str, Any] = {}
        self._behaviour = ""
        self.trained: dict[int, tuple[int, int]] = {}
        if (self._folder.path / "meta.json").exists():
            with self._holding(writing=False):
                pass

    def __len__(self) -> int:
        """How many examples are held."""
        return sum(self.count_samples())

    def count_slices(self) -> tuple[tuple[int, ...], ...]:
        """How many examples each slice of each shard holds."""
        return tuple(
            tuple(held.samples for held in self._scan(shard))
            for shard in range(self.plan.assignment.shards)
        )

    def count_samples(self) -> tuple[int, ...]:
        """How many examples each shard holds."""
        return tuple(map(sum, self.count_slices()))

    def learn(self, data: Any, ids: Iterable[object]) -> int:
        """Add examples and train what they touch; returns how many were new.

        An example with an identifier and content that are already held is the same example:
        repeating a call that was cut short counts nothing twice.
        """
        names = list(read_ids(ids, ordered=True))
        if not names and len(data[0] if isinstance(data, tuple | list) else data) == 0:
            return 0
        examples = read_examples(self.plan.assignment, data, names)
        with self._holding(writing=True):
            fresh = not self._settings
            if fresh:
                self._create(examples)
            if not self._behaviour:
                self._behaviour = find_behaviour(self.plan, examples)
            files, before, new = dict[str, bytes](), dict[str, bytes](), 0
            for place, part in split(self.plan.assignment, examples).items():
                held = self._folder.read_slice(*place)
                joined = add(held, part)
                gained = len(joined) - (0 if held is None else len(held))
                if gained:
                    files |= self._replace(place, joined.to_bytes())
                    before |= self._replace(place, b"" if held is None else held.to_bytes())
                    new += gained
            self._check_shapes(examples)
            known = self._folder.read_forgotten()
            back = known & set(examples.read_names())
            if back:
                warnings.warn(
                    f"{len(back)} of these identifiers were forgotten before and are learned again",
                    stacklevel=2,
                )
                files |= self._folder.mark(known - back, {})
                before |= self._folder.mark(known, {})
            with self._undoing(before, fresh):
                self._write(files)
                self._train()
        return new

    def forget(self, ids: Iterable[object], *, since: Certificate | None = None) -> Run:
        """Remove every example of these identifiers, retrain what held them, release the rest.

        ``since`` is the certificate of the release that the next one will be chained to, if that is
        not the last one: what was trained again is told against it.
        """
        names = tuple(dict.fromkeys(read_ids(ids)))
        if not names:
            raise InputError("ids is empty; name at least one identifier to forget")
        with self._holding(writing=True):
            if not self._settings:
                raise InputError(f"ids holds {names[0]!r}, and nothing was learned yet")
            files, samples, held = self._plan_removal(names)
            marks = self._folder.read_forgotten()
            wanted = {self.plan.assignment.name(name): name for name in names}
            unknown = [wanted[mark] for mark in wanted if mark not in held.keys() | marks]
            if unknown:
                more = f" (and {len(unknown) - 1} more)" if len(unknown) > 1 else ""
                raise InputError(f"ids holds {unknown[0]!r}{more}, which was never learned")
            if len(held) < len(names):
                before = len(names) - len(held)
                warnings.warn(f"already forgotten: {before} of {len(names)}", stacklevel=2)
            self._find_release(since)
            left = [a - b for a, b in zip(self.count_samples(), samples, strict=True)]
            if max(left) < FEWEST:
                raise UnlearningError(
                    "no shard would hold two examples or more; there would be nothing to release"
                )
            if files:
                self._write(files | self._folder.mark(marks | held.keys(), held))
            self._train()
            counts = self._folder.read_counts()
            gone = sum(counts.get(mark.hex(), 0) for mark in wanted)
            return self._release(names, gone, since)

    def release(self, *, since: Certificate | None = None) -> Run:
        """The ensemble of everything that is held now; ``since`` as in :meth:`forget`."""
        with self._holding(writing=True):
            if not self._settings or max(self.count_samples()) < FEWEST:
                raise UnlearningError(
                    "no shard holds two examples or more; there is nothing to release"
                )
            self._find_release(since)
            self._train()
            return self._release((), 0, since)

    def digest(self) -> str:
        """SHA-256 of settings and held examples: the same on every machine."""
        shards = range(self.plan.assignment.shards)
        digests = ((held.digest for held in self._scan(shard)) for shard in shards)
        lineages = [list_lineages(self._settings, *found)[-1] for found in enumerate(digests)]
        return sha256("".join(lineages).encode()).hexdigest()

    def save(self, path: str | Path) -> None:
        """Write the state to a new folder; it holds the examples, so it is private."""
        target, source = Path(path), self._folder.path
        if not self._settings:
            raise InputError("nothing was learned yet; there is nothing to save")
        target.mkdir(parents=True, exist_ok=True)
        with self._holding(writing=False), hold(target, writing=True):
            create_folder(target)
            (target / "checkpoints").mkdir()
            kept = [p for p in source.rglob("*") if p.is_file() and p.name != "lock"]
            write_together(target, {str(p.relative_to(source)): p.read_bytes() for p in kept})

    def retrain(self, shard: int) -> str:
        """The hash of a constituent trained again from nothing on the examples that are held."""
        tensors: Tensors | None = None
        for stage in range(1, self.plan.assignment.slices + 1):
            data = self._folder.read_slices(shard, stage)
            tensors = self.plan.train_finite(tensors, data, shard, stage)
        return hash_weights(tensors or {})

    def measure(self, ids: Iterable[object]) -> float:
        """What forgetting ``ids`` would cost, as a part of the ensemble's own training."""
        return measure_work(self.count_slices(), self.plan.assignment.find_touched(read_ids(ids)))

    def check(self, certificate: Certificate) -> None:
        """Train every constituent that the certificate's request touched again, and compare bits.

        All of them where it names no parent. A :class:`VerificationError` names what differs.
        """
        told = certificate.shards
        if told is None:
            raise InputError("this certificate is not of shards; it has no constituents")
        if not self.plan.deterministic:
            raise InputError("this training is not deterministic; its bits cannot be had again")
        with self._holding(writing=False):
            ours = self._tell(self._hash_constituents(), ())
            told_plain = told.model_dump() | {"trained_from": (), "distilled": False}
            found = [
                f"shards.{name} is {told_plain[name]!r}, not {value!r}"
                for name, value in asdict(ours).items()
                if told_plain[name] != value
            ]
            if told.digest != ours.digest:
                found = ["other examples or settings are held"]
            recipe = ShardedTraining(self.plan.assignment.shards, self.plan.assignment.slices)
            if certificate.method != recipe:
                found.append(f"recipe is {certificate.method}, not {recipe}")
            for shard, expected in enumerate(told.hashes):
                touched = not told.trained_from or told.trained_from[shard] > 0
                if not found and touched and told.samples[shard] >= FEWEST:
                    again = self.retrain(shard)
                    if again != expected:
                        found.append(
                            f"constituent {shard} trained again is {again}, not {expected}"
                        )
        if found:
            raise VerificationError("the state is not what is certified: " + "; ".join(found))

    @spell_out(Options)
    def distill(self, run: Run, **options: Unpack[Options]) -> Run:
        """One fresh network trained on the held examples to answer as the ensemble does.

        It is post-processing: a function of the ensemble and of retained examples. The options are
        those of :func:`expunge.train`, but the loss: the divergence from the ensemble's answer.
        """
        sharding = run.record.shards
        if (
            sharding is None
            or sharding.distilled
            or hash_weights(list_tensors(run.model)) != run.record.weights_after
        ):
            raise InputError("distill takes the run that forget or release returned, unchanged")
        with self._holding(writing=False):
            if sharding.digest != self.digest():
                raise InputError("the examples held now are not those of this run; release again")
            constituents = self._read_constituents()
            if sharding.hashes != self._hash_constituents(constituents):
                raise InputError("run.model is not the ensemble of this state; release again")
            slices, shards = self.plan.assignment.slices, range(self.plan.assignment.shards)
            held = join(self._folder.read_slices(shard, slices) for shard in shards)
        teacher = Ensemble(self.plan.make(0), constituents, self.combination).eval()
        student = self.plan.make(self.plan.assignment.shards)
        log = train_student(student, teacher, held, options)
        record = replace(
            run.record,
            parameters=sum(tensor.numel() for tensor in list_tensors(student).values()),
            finetune=describe_training(log, None, True),
            weights_after=hash_weights(list_tensors(student)),
            shards=replace(sharding, distilled=True),
        )
        return Run(student.eval(), record, run.forgotten)

    def _scan(self, shard: int) -> list[Held]:
        assignment = self.plan.assignment
        return [self._folder.scan(assignment, shard, k) for k in range(assignment.slices)]

    def _list_lineages(self, shard: int) -> list[str]:
        """Those of checkpoints, which are also a function of what training does."""
        digests = (held.digest for held in self._scan(shard))
        return list_lineages(self._settings | {"behaviour": self._behaviour}, shard, digests)

    def _plan_removal(
        self, names: Sequence[str]
    ) -> tuple[dict[str, bytes], list[int], Counter[bytes]]:
        """(files as they will be, examples that leave each shard, examples of each name)."""
        assignment, files = self.plan.assignment, dict[str, bytes]()
        wanted = {assignment.name(name) for name in names}
        samples, held = [0] * assignment.shards, Counter[bytes]()
        for place in sorted({assignment.find_place(name) for name in wanted}):
            before = self._folder.read_slice(*place)
            if before is None:
                continue
            found = wanted.intersection(before.read_names())
            if found:
                after = remove(before, found)
                samples[place[0]] += len(before) - len(after)
                held.update(name for name in before.read_names() if name in found)
                files |= self._replace(place, after.to_bytes())
        return files, samples, held

    def _replace(self, place: tuple[int, int], data: bytes) -> dict[str, bytes]:
        """A slice with other examples; the checkpoints that saw the old ones go with them."""
        shard, part = place
        later = range(part, self.plan.assignment.slices)
        stale = (self._folder.checkpoint_name(shard, k) for k in later)
        return {self._folder.slice_name(shard, part): data, **dict.fromkeys(stale, b"")}

    def _write(self, files: Mapping[str, bytes]) -> None:
        place = self._folder.path
        needed = {name: data for name, data in files.items() if data or (place / name).exists()}
        if needed:
            with self._folder.changing():
                write_together(place, needed)

    @contextmanager
    def _undoing(self, before: Mapping[str, bytes], fresh: bool) -> Generator[None]:
        """What cannot be trained is not learned: kept, it would stand in every request's way."""
        try:
            yield
        except RunError:
            raise
        except Exception:
            self._write(before)
            if fresh:
                self._settings = {}
                self._folder.clear()
            raise

    def _check_shapes(self, examples: Examples) -> None:
        """New examples are like those of every other slice."""
        held = self._folder.find_example(self.plan.assignment)
        if held is not None:
            add(held, examples.take([0]))

    @contextmanager
    def _holding(self, *, writing: bool) -> Generator[None]:
        """The lock, with what a cut-short change left completed, and the folder's own settings."""
        self._folder.path.mkdir(parents=True, exist_ok=True)
        with hold(self._folder.path, writing=writing):
            file = self._folder.path / "meta.json"
            if file.exists() and not self._settings:
                self._open(file)
            elif self._settings and self._describe() != self._settings:
                raise InputError(
                    "build(), the plan or the combination is not what it was when the state was "
                    "opened; make Shards anew"
                )
            yield

    def _create(self, examples: Examples) -> None:
        """Check that the plan is a function of its arguments, then write what it is."""
        self._fixed = find_public(self.plan, self.public)
        self._behaviour = find_behaviour(self.plan, examples)
        create_folder(self._folder.path)
        settings = self._describe()
        write_together(self._folder.path, {"meta.json": self._write_meta(settings)})
        (self._folder.path / "checkpoints").mkdir(exist_ok=True)
        self._settings = settings

    def _write_meta(self, settings: Mapping[str, Any]) -> bytes:
        meta = {"format": FORMAT, "settings": settings, "behaviour": self._behaviour}
        return json.dumps(meta, indent=1, sort_keys=True).encode()

    def _open(self, file: Path) -> None:
        meta = read_shards_meta(file)
        held: dict[str, Any] = meta["settings"]
        self._fixed = find_public(self.plan, self.public)
        ours = self._describe()
        for name, value in sorted(held.items(), key=lambda item: item[0] == "build"):
            if ours.get(name) != value:
                raise InputError.of(name, ours.get(name), f"{value!r}, as in {file.parent}")
        (self._folder.path / "checkpoints").mkdir(exist_ok=True)
        self._folder.check_files(self.plan.assignment)
        like = self._folder.find_example(self.plan.assignment)
        if like is not None:
            self._behaviour = find_behaviour(self.plan, like)
            if self._behaviour != meta.get("behaviour"):
                warnings.warn(
                    "training behaves differently than when this state was made (other code or "
                    "versions): everything is trained again",
                    stacklevel=2,
                )
        self._settings = ours

    def _describe(self) -> dict[str, Any]:
        assignment = self.plan.assignment
        return {
            "shards": assignment.shards,
            "slices": assignment.slices,
            "seed": assignment.seed,
            "training": self.plan.describe(),
            "combination": self.combination,
            "deterministic": self.plan.deterministic,
            "build": hash_weights(list_every(self.plan.make(0))),
        }

    def _train(self) -> None:
        """Make every checkpoint that is missing or stale."""
        settings = self._settings | {"behaviour": self._behaviour}
        self.trained = train_all(self.plan, settings, self._folder, self.workers, self.progress)

    def _read_constituents(self) -> dict[int, Tensors]:
        """The tensors of every shard that holds examples enough."""
        found, last = dict[int, Tensors](), self.plan.assignment.slices - 1
        for shard, samples in enumerate(self.count_samples()):
            path = self._folder.path / self._folder.checkpoint_name(shard, last)
            if samples < FEWEST:
                continue
            tensors = read_checkpoint(path, self._list_lineages(shard)[-1])
            if tensors is None:
                raise UnlearningError(f"{path} is not what training wrote; release again")
            found[shard] = tensors
        return found

    def _hash_constituents(self, found: Mapping[int, Tensors] | None = None) -> tuple[str, ...]:
        held = self._read_constituents() if found is None else found
        return tuple(hash_weights(held.get(k, {})) for k in range(self.plan.assignment.shards))

    def _tell(self, hashes: tuple[str, ...], trained_from: tuple[int, ...]) -> Sharding:
        return Sharding(
            seed=self.plan.assignment.seed,
            combination=self.combination,
            training=self.plan.describe(),
            deterministic=self.plan.deterministic,
            build=self._settings["build"],
            samples=self.count_samples(),
            hashes=hashes,
            trained_from=trained_from,
            digest=self.digest(),
        )

    def _find_release(self, since: Certificate | None) -> dict[str, Any] | None:
        """The release of a certificate; without one, the last."""
        known = self._folder.list_releases()
        if since is None:
            return known[-1] if known else None
        found = [one for one in known if one["weights"] == since.weights.noisy]
        if not found or since.digest != since.compute_digest():
            raise InputError.of("since", since.weights.after, "a release of this state")
        return found[-1]

    def _release(self, names: tuple[str, ...], samples: int, since: Certificate | None) -> Run:
        assignment, before = self.plan.assignment, self._find_release(since)
        constituents = self._read_constituents()
        lineages = [self._list_lineages(k) for k in range(assignment.shards)]
        model = Ensemble(self.plan.make(0), constituents, self.combination)
        after = hash_weights(list_tensors(model))
        first = tuple(
            _find_first(None if before is None else before["lineages"][k], lineages[k])
            for k in range(assignment.shards)
        )
        told = [*self._folder.list_releases(), {"lineages": lineages, "weights": after}][
            -MOST_RELEASES:
        ]
        meta = {"meta.json": self._write_meta(self._settings)}
        write_together(self._folder.path, meta | {"released": json.dumps(told).encode()})
        started = before["weights"] if before else hash_weights(list_own(model.template))
        record = RunRecord(
            recipe=ShardedTraining(shards=assignment.shards, slices=assignment.slices),
            parameters=sum(t.numel() for part in constituents.values() for t in part.values()),
            grid=0.0,
            execution=Execution(),
            noise=dict(NO_NOISE),
            noise_keys=0,
            trace=Trace(),
            gradient_evaluations=0,
            weights_before=started if since is None else since.weights.after,
            weights_noisy=after,
            weights_after=after,
            device="cpu",
            dtype=_name_dtype(constituents),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            forget=commit(names, samples=samples) if names else None,
            start="fresh",
            initialisation=f"build() under the public string {assignment.seed!r}",
            checked=True,
            public=self._fixed,
            shards=self._tell(self._hash_constituents(constituents), first),
            versions=list_versions(),
        )
        return Run(model.eval(), record, frozenset(names))


def _find_first(before: list[str] | None, now: list[str]) -> int:
    """The first slice, from 1, that is not as in the release before; 0 if all are."""
    if before is None:
        return 1
    return next(
        (j + 1 for j, (one, two) in enumerate(zip(before, now, strict=True)) if one != two), 0
    )


def _name_dtype(constituents: Mapping[int, Tensors]) -> str:
    kinds = {t.dtype for part in constituents.values() for t in part.values()}
    widest = max(kinds, key=lambda kind: (kind.is_floating_point, kind.itemsize))
    return str(widest).removeprefix("torch.")
