"""Fine-tuning and measuring by all processes of a run, each on its share of every batch."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from expunge.agreement import check_step
from expunge.batching import Cycle, LossFunction, compute_loss, move_batch
from expunge.errors import InputError
from expunge.gathering import hash_together
from expunge.measuring import Measurement, count_hits
from expunge.processes import Processes, is_sharded, reshard
from expunge.progress import show_progress
from expunge.randomness import draw_apart, untouched_random
from expunge.record import FineTuning
from expunge.sgd import Scheduled, Sgd
from expunge.shares import Shares
from expunge.training import MakeOptimizer, ScheduleName, check_numbers, schedule_factor
from expunge.unlearning import Run, commit_disjoint
from expunge.weights import hash_weights


def fine_tune_together(
    run: Run,
    loader: Any,
    processes: Processes,
    *,
    ids: Iterable[str | int] | None,
    forget_ids: Iterable[str | int] | None,
    epochs: float,
    learning_rate: float,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    schedule: ScheduleName = "constant",
    optimizer: MakeOptimizer | None = None,
    loss_fn: LossFunction,
    seed: int = 0,
    progress: bool = False,
) -> Run:
    """``fine_tune`` by all processes: the same steps, on gradients averaged over the processes.

    A sharded model is trained in place, any other in a copy. Every process returns the same run.
    """
    if run.record.finetune is not None:
        raise InputError("this run was fine-tuned already; fine-tune the run that unlearn returned")
    check_numbers(epochs, learning_rate, loader.batch_size, weight_decay, momentum)
    _, data = commit_disjoint(forget_ids, ids)
    sharded = is_sharded(run.model)
    model = run.model if sharded else copy.deepcopy(run.model)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizing = (
        Sgd(parameters, learning_rate, momentum, weight_decay)
        if optimizer is None
        else Scheduled(optimizer(parameters))
    )
    shares = Shares(loader, processes)
    steps = math.ceil(epochs * len(shares) - 1e-9)
    cycle, device, evaluations = Cycle(shares), parameters[0].device, 0
    optimizing.clear()
    with untouched_random():
        torch.manual_seed(seed)
        for t in show_progress(range(steps), steps, "training", progress and processes.leads):
            share = cycle.take()
            scale = share.weight * (processes.size if sharded else 1)
            text = f"expunge/fine-tuning {seed} {t} {processes.rank}"
            with draw_apart(text), processes.listening("fine-tuning"):
                loss = compute_loss(model, move_batch(share.batch, device), loss_fn)
                (loss * scale).backward()
            if not sharded:
                _average(parameters, processes)
            optimizing.step(schedule_factor(schedule, t, steps))
            evaluations += share.total
    finetune = FineTuning(
        optimizer=optimizing.describe(),
        epochs=float(epochs),
        steps=steps,
        learning_rate=float(learning_rate),
        batch_size=loader.batch_size,
        schedule=schedule,
        gradient_evaluations=evaluations,
        data=data,
    )
    state = model.state_dict()
    after = hash_together(state, processes) if sharded else hash_weights(state)
    check_step(processes, {"step": f"{steps} of fine-tuning", "parameters": after})
    record = replace(run.record, finetune=finetune, weights_after=after)
    return Run(model, processes.share(record))


def measure_together(
    model: nn.Module, loader: Iterable[Any], loss_fn: LossFunction, processes: Processes
) -> Measurement:
    """``measure`` by all processes; every one returns the measurement of all data."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    seen: list[tuple[Any, Any]] = []

    def watch(output: Any, target: Any) -> Tensor:
        seen.append((output, target))
        return loss_fn(output, target)

    flags = {module: module.training for module in model.modules()}
    model.eval()
    total = right = count = 0.0
    known = True
    try:
        with torch.no_grad(), untouched_random(), processes.listening("measuring"):
            for share in Shares(loader, processes, even=False):
                loss = compute_loss(model, move_batch(share.batch, device), watch)
                hits = count_hits(*seen.pop())
                if share.count > 0:
                    known = known and hits is not None
                    total, count = total + share.count * float(loss), count + share.count
                    right += hits or 0
    finally:
        reshard(model)
        for module, flag in flags.items():
            module.training = flag
    total, right, count, unknown = processes.sum([total, right, count, not known])
    if count == 0:
        raise InputError("there is nothing to measure on; the data set is empty")
    return Measurement(total / count, None if unknown else right / count, int(count))


def _average(parameters: list[nn.Parameter], processes: Processes) -> None:
    """Gradients of shares, scaled already, as the gradient of the batch, on every process."""
    zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    for p, g in zip(parameters, processes.add_up(zeros), strict=True):
        p.grad = g.to(p.dtype)
