"""``check``: every refusal at once, and one batch, before anything is trained."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from expunge.data.data import Data, check_data
from expunge.errors import ExpungeError, InputError, collecting, describe_error
from expunge.networks.building import call_build
from expunge.networks.checkpoints import read_old
from expunge.networks.tensors import list_published, list_trainable
from expunge.training.batches import Batches
from expunge.training.calling import check_train
from expunge.training.losses import Loss, check_loss, is_repeatable
from expunge.training.requests import Before, check_start, describe_published, read_request
from expunge.training.training import Training


@dataclass(frozen=True)
class Check:
    """``problems`` that would stop a run, one sentence each, and ``facts`` about what would run."""

    problems: tuple[str, ...]
    facts: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [*self.facts, *(f"PROBLEM  {problem}" for problem in self.problems)]
        return "\n".join([*lines, "" if self.problems else "nothing stands in the way"]).rstrip()


def check(
    build: Callable[[], nn.Module],
    data: Data,
    *,
    train: Any = None,
    old: Any = None,
    forget: Iterable[Any] | None = None,
    loss: Loss | None = None,
    batch_size: int = 128,
    key: str | None = None,
    strict: bool = True,
    unchanged: Collection[str] = (),
    published: str | Path | None = None,
    parent: Before | None = None,
    seed: int = 0,
) -> Check:
    """Everything a run would refuse, found at once; nothing is trained and nothing is written.

    Where the loss is given (``loss=``, or that of a :class:`expunge.Training`), one batch runs
    forward and backward, twice: a ``forward`` that keeps something between calls shows itself.

    >>> import torch
    >>> data = Data((torch.eye(2), torch.tensor([0, 1])), ids=["ann", "bob"])
    >>> found = check(lambda: nn.Linear(3, 2), data, train=Training(epochs=1), forget=["an"])
    >>> for problem in found.problems:
    ...     print(problem)
    forget names 'an', who is not in the data; did you mean 'ann'?
    one batch failed: RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x2 and 3x2) (...)
    """
    problems, facts, retained = list[str](), list[str](), data
    with collecting(problems):
        if train is not None:
            check_train(train)
    with collecting(problems):
        check_loss(loss)
    with collecting(problems):
        check_data(data)
        facts.append(f"data: {len(data)} examples of {len(data.people)} people")
        if forget is not None:
            request = read_request(data, forget, parent)
            retained = request.retained
            facts.append(f"forget: {len(request.names)} people, {request.examples} examples")
    with collecting(problems):
        module = call_build(build, seed)
        trainable = sum(p.numel() for p in list_trainable(module).values())
        fixed = sum(t.numel() for t in list_published(module).values())
        facts.append(
            f"build(): {type(module).__name__}, {trainable:,} trainable numbers, {fixed:,} others"
        )
        with collecting(problems):
            describe_published(module, published)
        with collecting(problems):
            if old is not None:
                check_start(module, read_old(old, module, key=key, strict=strict), unchanged)
        own = train.loss if loss is None and isinstance(train, Training) else loss
        if (loss is not None or isinstance(train, Training)) and isinstance(retained, Data):  # pyright: ignore[reportUnnecessaryIsInstance]
            with collecting(problems):
                facts.append(_run_batch(module, retained, own, batch_size, seed))
    return Check(tuple(problems), tuple(facts))


def _run_batch(module: nn.Module, data: Data, loss: Loss | None, size: int, seed: int) -> str:
    try:
        batches = Batches(data.examples, batch_size=size, seed=seed, collate=data.collate)
        same = is_repeatable(module, next(batches.read(0)), loss)
    except ExpungeError:
        raise
    except StopIteration:
        raise InputError("the data give no batch; there must be at least one example") from None
    except Exception as error:
        raise InputError(f"one batch failed: {describe_error(error, 1)}") from error
    if same:
        return "one batch: forward and backward"
    return "one batch gives two gradients: noisy runs are refused, retraining is not"
