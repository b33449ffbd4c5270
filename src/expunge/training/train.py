"""Training before the request and fine-tuning after the noise: SGD, one-cycle, batches in memory.

Nothing here is certified by itself. Fine-tuning on retained data after the last noise is
post-processing, so it costs nothing, provided that it starts from what the record says, sees
nothing of what was forgotten and draws from a seed that anyone may know: ``fine_tune`` checks it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Unpack, cast

import torch
from torch import Tensor, nn

from expunge.certificates.identifiers import (
    Commitment,
    commit,
    commit_request,
    opens,
    read_names,
)
from expunge.certificates.record import FineTuning, Run, RunRecord
from expunge.errors import InputError, UnlearningError
from expunge.processes.adapters import describe_adapter
from expunge.processes.agreement import check_step
from expunge.processes.group import Processes, is_sharded
from expunge.processes.weights import (
    check_module,
    find_nonfinite,
    hash_weights,
    list_tensors,
)
from expunge.progress import show_progress
from expunge.training.batches import Cycle, count_samples, find_ids, find_tensors, move_batch
from expunge.training.cached import cached_features
from expunge.training.compiled import CompiledLoss, plan_loss, warn_uncompiled
from expunge.training.holding import copy_module
from expunge.training.losses import check_loss, compute_loss
from expunge.training.randomness import (
    derive_seed,
    draw_apart,
    seed_random,
    seeded_random,
    untouched_random,
)
from expunge.training.resuming import Keeper, Standing
from expunge.training.settings import InMemory, Options, Settings, schedule_factor, spell_out
from expunge.training.shares import Shares

OnPass = Callable[[int, float], object]


@dataclass(frozen=True)
class TrainingLog:
    """What ran: ``losses`` is the mean training loss of each pass through the data.

    ``diverged`` is the first step, from 0, whose loss was not finite, ``tainted`` whether its batch
    was not finite itself; ``note`` says why steps were not ``compiled``, if that was considered.
    """

    optimizer: str
    epochs: float
    steps: int
    learning_rate: float
    batch_size: int
    schedule: str
    gradient_evaluations: int
    losses: tuple[float, ...]
    compiled: bool = False
    note: str = ""
    diverged: int | None = None
    tainted: bool = False


def make_log(
    how: Settings,
    optimizer: str,
    losses: Sequence[Tensor],
    length: int,
    *,
    batch_size: int,
    gradient_evaluations: int,
    compiled: bool,
    note: str,
    tainted: bool = False,
) -> TrainingLog:
    """The log of a training with these losses, one of each step; a pass has ``length`` steps."""
    means, wrong = (), []
    if losses:
        table = torch.stack(list(losses))
        means = tuple(float(part.mean()) for part in table.split(length))
        wrong = cast(list[int], torch.nonzero(~torch.isfinite(table)).flatten().tolist())
    return TrainingLog(
        optimizer=optimizer,
        epochs=float(how.epochs),
        steps=len(losses),
        learning_rate=float(how.learning_rate),
        batch_size=batch_size,
        schedule=how.schedule,
        gradient_evaluations=gradient_evaluations,
        losses=means,
        compiled=compiled,
        note=note,
        diverged=wrong[0] if wrong else None,
        tainted=tainted,
    )


@spell_out(Options)
def train(
    model: nn.Module,
    data: InMemory | Iterable[Any],
    *,
    generator: torch.Generator | None = None,
    on_pass: OnPass | None = None,
    on_step: Callable[[int], object] | None = None,
    progress: bool = False,
    processes: Processes | None = None,
    keeper: Keeper | None = None,
    **options: Unpack[Options],
) -> TrainingLog:
    """Train the module's trainable parameters in place, in the train or eval mode it is in.

    The options are ``epochs``, ``learning_rate``, ``batch_size`` (128), ``weight_decay``,
    ``momentum``, ``schedule`` ("constant" or "one-cycle"), ``optimizer``, ``augment``, ``prepare``,
    ``loss_fn`` (cross-entropy), ``seed``, ``compile`` and ``features``; what each does is told by
    :class:`expunge.training.settings.Settings`. ``data`` is in memory (``inputs`` and ``targets``;
    the order comes from ``generator`` or the seed) or any loader. The global random state is
    untouched.
    ``on_pass(passes, mean loss)`` is called after every pass through the data, when the module
    holds that pass's parameters, ``on_step(done)`` after every step. Several ``processes`` each
    take their share of every batch and average their gradients. A ``keeper`` saves the state, when
    ``on_step`` raises KeyboardInterrupt too, and the training goes on from what it holds.

    >>> model = nn.Linear(2, 2)
    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> log = train(model, batches, epochs=3, learning_rate=0.5)
    >>> log.steps, log.losses[0] > log.losses[-1]
    (3, True)
    """
    check_module(model)
    how, processes = Settings(**options), processes or Processes()
    loader = how.make_loader(data, generator)
    if how.features is not None:
        if not processes.alone:
            raise InputError.of("features", how.features, "left out with several processes")
        rest: dict[str, Any] = {**options, "features": None, "augment": None, "prepare": None}
        more: dict[str, Any] = {"on_pass": on_pass, "on_step": on_step, "keeper": keeper}
        with cached_features(model, how.features, loader, how.seed) as kept:
            return train(model, kept, progress=progress, **more, **rest)
    length = _count_batches(loader)
    steps = how.count_steps(length)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise UnlearningError("the model has no trainable parameter; there is nothing to train")
    optimizing = how.make_optimizer(model)
    planned = plan_loss(
        how if processes.alone else replace(how, compile=False), model, loader, steps
    )
    device, sharded, shares = parameters[0].device, is_sharded(model), Shares(loader, processes)
    found = None if keeper is None else keeper.load(model, optimizing.optimizer)
    first, evaluations = (0, 0) if found is None else (found.done, found.gradient_evaluations)
    losses = [] if found is None else [loss.to(device) for loss in found.losses]
    tainted = None
    with untouched_random():
        if found is None:
            cycle = Cycle(shares, keep=keeper is not None)
            seed_random(derive_seed(f"training {how.seed}"))
        else:
            assert keeper is not None
            keeper.resumed += found.done < steps
            cycle = _go_on(shares, found, keeper)
            _tell_passes(losses, length, steps, on_pass)
        optimizing.clear()
        for t in show_progress(
            range(first, steps), steps, "training", progress and processes.leads
        ):
            share = cycle.take()
            batch = move_batch(share.batch, device)
            with _work_apart(processes, how.seed, t):
                if isinstance(planned, CompiledLoss):
                    loss = planned(batch)
                else:
                    loss = compute_loss(model, batch, how.loss_fn)
                scale = share.weight * (processes.size if sharded else 1)
                (loss if scale == 1 else loss * scale).backward()
            if not (sharded or processes.alone):
                _average(parameters, processes)
            optimizing.step(schedule_factor(how.schedule, t, steps))
            losses.append(loss.detach())
            evaluations += share.total
            if tainted is None and device.type == "cpu" and not math.isfinite(losses[-1]):
                tainted = not all(bool(torch.isfinite(x).all()) for x in find_tensors(share.batch))
            if on_pass is not None and ((t + 1) % length == 0 or t + 1 == steps):
                passed = t // length * length
                on_pass(t // length + 1, float(torch.stack(losses[passed:]).mean()))
            stop = _ask(on_step, t + 1)
            if keeper is not None and (stop is not None or keeper.is_due() or t + 1 == steps):
                resumed = keeper.resumed
                now = Standing(t + 1, evaluations, resumed, tuple(losses), cycle.place())
                keeper.save(model, optimizing.optimizer, now)
            if stop is not None:
                raise stop
    note = planned.note if isinstance(planned, CompiledLoss) else planned
    if isinstance(planned, CompiledLoss) and note and how.compile is True:
        warn_uncompiled(note)
    given = getattr(loader, "batch_size", None)
    return make_log(
        how,
        optimizing.describe(),
        losses,
        length,
        batch_size=given if isinstance(given, int) else math.ceil(evaluations / max(steps, 1)),
        gradient_evaluations=evaluations,
        compiled=isinstance(planned, CompiledLoss) and not note,
        note=note,
        tainted=bool(tainted),
    )


def _go_on(shares: Shares, found: Standing, keeper: Keeper) -> Cycle:
    try:
        return Cycle(shares, found.place, keep=True)
    except (RuntimeError, KeyError) as error:
        raise InputError(f"checkpoint {keeper.path} is damaged: {error}") from None


def _ask(on_step: Callable[[int], object] | None, done: int) -> KeyboardInterrupt | None:
    """Whoever hears of a step may ask to stop there."""
    try:
        if on_step is not None:
            on_step(done)
    except KeyboardInterrupt as stop:
        return stop
    return None


def _tell_passes(losses: Sequence[Tensor], length: int, steps: int, on_pass: OnPass | None) -> None:
    """The passes that were complete before a training was resumed."""
    whole = len(losses) if len(losses) == steps else len(losses) // length * length
    for first in range(0, whole if on_pass is not None else 0, length):
        assert on_pass is not None
        part = torch.stack(list(losses[first : min(first + length, whole)]))
        on_pass(first // length + 1, float(part.mean()))


@contextlib.contextmanager
def _work_apart(processes: Processes, seed: int, step: int) -> Generator[None]:
    """Of several processes each draws its own dropout, and hears if another is gone."""
    if processes.alone:
        yield
        return
    text = f"expunge/training {seed} {step} {processes.rank}"
    with draw_apart(text), processes.listening("training"):
        yield


def _average(parameters: list[nn.Parameter], processes: Processes) -> None:
    """Gradients of shares, scaled already, as the gradient of the batch, on every process."""
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p, g in zip(parameters, processes.add_up(zeros), strict=True):
        p.grad = g.to(p.dtype)


@spell_out(Options)
def fine_tune(
    run: Run,
    data: InMemory | Iterable[Any],
    *,
    ids: Iterable[str | int] | None = None,
    forget_ids: Iterable[str | int] | None = None,
    on_pass: OnPass | None = None,
    progress: bool = False,
    processes: Processes | None = None,
    **options: Unpack[Options],
) -> Run:
    """Train a copy of ``run.model`` on retained data and write it into the record.

    The options are those of :func:`train`; order and dropout follow from ``seed``, a loader's own
    generator too. A model that is not what the record says is refused. ``ids`` identify the data
    (default: the ``ids`` of the data or their data set); they are committed to, and must not meet
    what the run forgot (``run.forgotten``, and ``forget_ids`` beside it). A sharded model is
    trained in place; of several ``processes`` every one returns the same run.

    >>> from expunge import OutputPerturbation
    >>> from expunge.noisy.run import unlearn
    >>> batches = [(torch.eye(2), torch.tensor([0, 1]))]
    >>> run = unlearn(nn.Linear(2, 2), batches, OutputPerturbation(start_clip=1.0, noise_std=4.0))
    >>> tuned = fine_tune(run, batches, epochs=2, learning_rate=0.1)
    >>> tuned.record.finetune.optimizer, tuned.record.finetune.steps
    ('SGD', 2)
    """
    if not isinstance(run, Run):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"run is a {type(run).__name__}; it must be the run that unlearn returned")
    check_loss(options.get("loss_fn"))
    tuning = begin_fine_tuning(run, data, ids, forget_ids, processes)
    with seeded_random(options.get("seed", 0), (data, options)):
        log = train(
            tuning.model,
            data,
            on_pass=on_pass,
            progress=progress,
            processes=tuning.processes,
            **options,
        )
    return tuning.end(log)


@dataclass(frozen=True, eq=False)
class Tuning:
    """A fine-tuning that was allowed to begin; ``fixed`` are hashes of what must not change."""

    run: Run
    model: nn.Module
    processes: Processes
    data: Commitment | None
    checked: bool
    forgotten: frozenset[str] | None
    fixed: dict[str, str]

    def end(self, log: TrainingLog) -> Run:
        """The run with its tuned model; refused if that is not finite, or not what was allowed."""
        public = self.run.record.public
        check_trained(self.model, log, "fine-tuning", () if public is None else public.names)
        found = _hash_fixed(self.model, self.run.record, self.processes)
        changed = sorted(name for name in self.fixed if found.get(name) != self.fixed[name])
        if changed:
            raise UnlearningError(
                f"{', '.join(changed[:3])} changed during fine-tuning but is public or frozen; "
                "freeze the module that writes it (requires_grad, eval mode)"
            )
        after = hash_weights(list_tensors(self.model), self.processes)
        check_step(self.processes, {"step": f"{log.steps} of fine-tuning", "parameters": after})
        finetune = describe_training(log, self.data, self.checked)
        adapter = describe_adapter(self.model, self.run.record.public)
        record = replace(self.run.record, finetune=finetune, weights_after=after, adapter=adapter)
        return Run(self.model, self.processes.share(record), self.forgotten)


def begin_fine_tuning(
    run: Run,
    data: object,
    ids: Iterable[str | int] | None = None,
    forget_ids: Iterable[str | int] | None = None,
    processes: Processes | None = None,
) -> Tuning:
    """Refuse a run that is not what its record says, and data that hold what it forgot."""
    record, processes = run.record, processes or Processes()
    if record.finetune is not None:
        raise InputError("this run was fine-tuned already; fine-tune the run that unlearn returned")
    if hash_weights(list_tensors(run.model), processes) != record.weights_after:
        raise UnlearningError(
            "run.model is not what the record says: a weight or buffer was changed or replaced "
            "after the run; fine-tune the run that unlearn returned"
        )
    public = record.public
    if (
        public is not None
        and hash_weights(_select(run.model, public.names), processes) != public.hash
    ):
        raise UnlearningError(
            "a public tensor of run.model is not what the record says; fine-tune the run that "
            "unlearn returned"
        )
    forgotten = run.forgotten
    if forgotten is not None and record.forget is not None and not opens(record.forget, forgotten):
        raise InputError("run.forgotten is not the set that the record commits to")
    if forget_ids is not None:
        given = frozenset(read_request(forget_ids) or ())
        if forgotten is None and record.forget is not None and not opens(record.forget, given):
            raise InputError("forget_ids is not the set that the record commits to")
        forgotten = given | (forgotten or frozenset())
    names = read_retained(data, ids, forgotten)
    model = run.model if is_sharded(run.model) else copy_module(run.model)
    return Tuning(
        run=run,
        model=model,
        processes=processes,
        data=None if names is None else commit(names),
        checked=None not in (names, forgotten, count_samples(data)),
        forgotten=forgotten,
        fixed=_hash_fixed(model, record, processes),
    )


def read_request(forget_ids: Iterable[str | int] | None) -> tuple[str, ...] | None:
    """The identifiers to forget, None where they are not known; a request names someone."""
    names = read_names(forget_ids)
    if names is not None and not names:
        raise InputError.of("forget_ids", [], "one identifier or more")
    return names


def read_retained(
    data: object, ids: Iterable[str | int] | None, forgotten: Iterable[str] | None
) -> tuple[str, ...] | None:
    """The identifiers of retained data (default: its own), one for each sample.

    None where they are not known; refused where one of them is forgotten.

    >>> read_retained([torch.zeros(2, 1)], ["a", "b"], ["b"])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: retain_ids holds 'b', which is forgotten (1 in all); ...
    """
    names = read_names(find_ids(data) if ids is None else ids, ordered=True)
    if names is None:
        return None
    count = count_samples(data)
    if count is not None and len(names) != count:
        raise InputError.of("number of retain_ids", len(names), f"{count}, one for each example")
    own = read_names(find_ids(data)) or ()
    both = {*names, *(own if len(own) == count else ())}.intersection(forgotten or ())
    if both:
        raise InputError(
            f"retain_ids holds {min(both)!r}, which is forgotten ({len(both)} in all); "
            "the retained data must not hold what is forgotten"
        )
    return names


@dataclass(frozen=True)
class Sets:
    """Who is forgotten and who is retained, as far as identifiers are known.

    ``checked``: both are known, one for each sample, and have none in common.
    """

    forgotten: frozenset[str] | None
    retained: tuple[str, ...] | None
    forget: Commitment | None
    retain: Commitment | None
    checked: bool

    def describe(self) -> dict[str, Any]:
        """What the record says of them."""
        return {"forget": self.forget, "retain": self.retain, "checked": self.checked}


def read_sets(
    data: object,
    forget_ids: Iterable[str | int] | None,
    retain_ids: Iterable[str | int] | None,
) -> Sets:
    """The identifiers of a request, and of the retained ``data``."""
    gone = read_request(forget_ids)
    kept = read_retained(data, retain_ids, gone)
    return Sets(
        forgotten=None if gone is None else frozenset(gone),
        retained=kept,
        forget=None if gone is None else commit_request(gone, kept),
        retain=None if kept is None else commit(kept),
        checked=None not in (gone, kept, count_samples(data)),
    )


def check_trained(
    model: nn.Module, log: TrainingLog, doing: str, public: Collection[str] = ()
) -> None:
    """Refuse a model that training drove out of the numbers."""
    wrong = find_nonfinite(list_tensors(model), public)
    if wrong is not None:
        step = log.steps - 1 if log.diverged is None else log.diverged
        length = max(int(log.steps / max(log.epochs, 1e-9) + 1e-9), 1)
        place = f"batch {step % length + 1} of epoch {step // length + 1}"
        raise UnlearningError(
            f"{wrong} is not finite after {doing}: "
            + (
                f"{place} holds a number that is not finite; mend or leave out that sample"
                if log.tainted
                else f"training diverged at {place}; lower the learning rate"
            )
        )


def describe_training(log: TrainingLog, data: Commitment | None, checked: bool) -> FineTuning:
    """A training on retained data as a record keeps it, with a commitment to its identifiers."""
    kept: dict[str, Any] = {f.name: getattr(log, f.name) for f in fields(TrainingLog)[:7]}
    return FineTuning(**kept, data=data, checked=checked)


def _select(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    every = dict(model.named_parameters(remove_duplicate=False))
    held = every | dict(model.named_buffers(remove_duplicate=False))
    return {name: held[name].detach() for name in names if name in held}


def _hash_fixed(model: nn.Module, record: RunRecord, processes: Processes) -> dict[str, str]:
    """Hashes of all that fine-tuning must leave alone: what is public, frozen, or a buffer that is
    not a statistic made anew."""
    fixed = {name for name, p in model.named_parameters() if not p.requires_grad}
    fixed |= {name for name, _ in model.named_buffers()}
    fixed -= set(record.buffer_names if record.buffers == "reset" else ())
    fixed |= set(() if record.public is None else record.public.names)
    chosen = _select(model, sorted(fixed))
    return {name: hash_weights({name: tensor}, processes) for name, tensor in chosen.items()}


def _count_batches(loader: Iterable[Any]) -> int:
    try:
        length = len(cast(Any, loader))
    except TypeError:
        raise InputError("data has no length; give a loader or list that has one") from None
    if length == 0:
        raise InputError("data is empty; it must yield at least one batch")
    return length
