"""Linear models: which layers of a public network, and tables beside scikit-learn's own models.

    python experiments/table_features.py                    # hours, once
    python experiments/table_features.py --arms debian      # one of the data sets
    python experiments/table_features.py --full             # all images of CIFAR: hours more
    python experiments/table_features.py --smoke            # a drawn network on digits, runs/smoke

Arms: "auto" (five layers), "last", "last" with as many random features as "auto" has more columns,
and "auto" with 2,048 of them. Of CIFAR the first images are learned, and half as many tested. A
seed draws which rows are for validation, the same for every arm; the penalty is chosen there.
Pooled activations are computed once and stay below the folder of the data, 250 rows a file;
finished lines are never run again. Adult and Bank are read from the package ``aif360==0.2.3``,
unpacked in the folder of the data, and left out where it is not there.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from debian import load as load_debian
from download import data_folder
from expunge import Features
from expunge.linear_model import LogisticRegression, Ridge, RidgeClassifier
from features import ImageBackbone, load_minilm
from images import load_cifar, load_digits
from options import Options, drive
from runs import Store
from samples import Samples, split_validation
from summary import average, compare, make_table, publish

CHUNK, LIFT, SEEDS = 250, 2048, 3
ALPHAS = (10.0, 100.0, 1e3, 1e4)
TASKS = ("cifar10", "cifar100", "debian", "adult", "bank")
IMAGES = {"cifar10": 10_000, "cifar100": 2_500}
Line = dict[str, Any]


class Lookup(nn.Module):
    """Activations that a network gave, by number of the row: the same features at no cost."""

    def __init__(self, parts: Sequence[Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Embedding.from_pretrained(part) for part in parts)
        self.eval()

    def forward(self, rows: Tensor) -> Tensor:
        return [layer(rows) for layer in self.layers][-1]


def pool(network: nn.Module, names: Sequence[str], inputs: Tensor) -> list[Tensor]:
    """Mean activations of the named layers; of texts over the tokens that are not padding."""
    seen: dict[str, Any] = {}

    def watch(name: str) -> Any:
        keep: Any = lambda _m, _i, out: seen.update({name: out})  # noqa: E731
        return network.get_submodule(name).register_forward_hook(keep)

    hooks = [watch(name) for name in names if name]
    mask = inputs != 0 if inputs.dtype == torch.int32 else None
    with torch.inference_mode():
        if mask is None:
            seen[""] = network(inputs)
        else:
            longest = int(mask.sum(1).max())
            inputs, mask = inputs[:, :longest].long(), mask[:, :longest].long()
            seen[""] = network(input_ids=inputs, attention_mask=mask).last_hidden_state
    for hook in hooks:
        hook.remove()
    found = [out[0] if isinstance(out, tuple) else out for out in (seen[name] for name in names)]
    if mask is not None:
        return [(out * mask[:, :, None]).sum(1) / mask.sum(1)[:, None] for out in found]
    return [out.mean((2, 3)) if out.ndim == 4 else out for out in found]


def compute(name: str, samples: Samples, build: Callable[[], nn.Module]) -> list[Tensor]:
    """Pooled activations of every sample by layer, from disk where they are there."""
    folder, network, files = data_folder() / "features" / name, None, list[Path]()
    folder.mkdir(parents=True, exist_ok=True)
    for at in range(0, len(samples), CHUNK):
        files.append(folder / f"{samples.ids[at].replace('/', '-')}-{at:06}.npz")
        if files[-1].exists():
            continue
        network = network or build()
        part = samples.inputs[at : at + CHUNK]
        order = (part != 0).flatten(1).sum(1).argsort()  # texts of one length together
        pooled = [pool(network, Features(network).layers, part[o]) for o in order.split(50)]
        back = order.argsort()
        layers = [torch.cat(one)[back].float().numpy() for one in zip(*pooled, strict=True)]
        np.savez(files[-1].with_suffix(".part.npz"), *layers)
        files[-1].with_suffix(".part.npz").rename(files[-1])
        print(f"{name}: {at + len(part)} of {len(samples)}", file=sys.stderr, flush=True)
    loaded = [list(np.load(file).values()) for file in files]
    return [torch.from_numpy(np.concatenate(one)) for one in zip(*loaded, strict=True)]


def load(task: str, full: bool) -> tuple[Samples, Samples, Callable[[], nn.Module]]:
    """Rows to learn and validate with, rows to test with, and the public network."""
    if task == "debian":
        train, held, test = load_debian()
        both = [torch.cat(pair) for pair in zip(train.pair, held.pair, strict=True)]
        rows = Samples(both[0], both[1], np.concatenate([train.ids, held.ids]))
        return rows, test, lambda: load_minilm().net
    found = load_digits() if task == "digits" else load_cifar(task)
    rows, test = found.train, found.test
    if task in IMAGES and not full:
        rows, test = rows.take(range(IMAGES[task])), test.take(range(IMAGES[task] // 2))
    return rows, test, _draw if task == "digits" else ImageBackbone


def _draw() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(k, 8, 3, padding=1), nn.ReLU()) for k in (1, 8, 8, 8)]
    made = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 32)).eval()
    made.register_forward_pre_hook(lambda _m, given: (given[0].float() / 8 - 1,))
    return made


def name_line(task: str, learned: int, arm: str, model: str, seed: int) -> Line:
    """The fields that name a line, and its key."""
    named = {"task": task, "learned": learned, "arm": arm, "model": model, "seed": seed}
    return {"key": " | ".join(map(str, named.values()))} | named


def run_features(task: str, options: Options, done: Line) -> Iterator[Line]:
    """One line for each arm and seed."""
    rows, test, build = load(task, options.full)
    parts = zip(compute(task, rows, build), compute(task, test, build), strict=True)
    joined = [torch.cat(pair) for pair in parts]
    names = [*(f"layers.{k}" for k in range(len(joined) - 1)), ""]
    more, lookup = sum(part.shape[1] for part in joined[:-1]), Lookup(joined)
    arms: dict[str, dict[str, Any]] = {
        "auto": {"layers": names},
        "last": {"layers": "last"},
        f"last, lift {more}": {"layers": "last", "lift": more},
        f"auto, lift {LIFT}": {"layers": names, "lift": LIFT},
    }
    numbered = Samples(torch.arange(len(rows)), rows.targets, rows.ids)
    places = len(rows) + torch.arange(len(test))
    seeds = options.seeds or (1 if options.smoke else SEEDS)
    for seed, arm in ((seed, arm) for seed in range(seeds) for arm in arms):
        learned, held = split_validation(numbered, len(rows) // 10, seed)
        line = name_line(task, len(learned), arm, "ridge", seed)
        if line["key"] in done:
            continue
        features = Features(lookup, seed=f"{seed}", batch_size=1000, **arms[arm])
        model = RidgeClassifier(features=features).fit(learned.inputs, learned.targets)
        scores = {a: model.set_params(alpha=a).score(*held.pair) for a in ALPHAS}
        best = max(ALPHAS, key=lambda alpha: scores[alpha])
        accuracy = 100 * model.set_params(alpha=best).score(places, test.targets)
        columns = sum(features.numbers.widths) + features.lift
        yield line | {"tested": len(test), "columns": columns, "penalty": best, "test": accuracy}


def run_table(task: str, done: Line) -> Iterator[Line]:
    """One line for each model: ours, scikit-learn's on scaled columns, seconds for one person."""
    import pandas
    import sklearn.linear_model as theirs
    from sklearn.preprocessing import StandardScaler

    folder = data_folder() / "aif360" / "aif360" / "data" / "raw"
    if not folder.is_dir():
        print(f"{task} is left out: {folder} is not there", file=sys.stderr)
        return
    if task == "adult":
        options: Any = {"header": None, "skipinitialspace": True, "comment": "|"}
        read = [pandas.read_csv(folder / f"adult/adult.{n}", **options) for n in ("data", "test")]
        table, label = pandas.concat(read, ignore_index=True), 14
        test = np.arange(len(table)) >= len(read[0])
    else:
        table, label = pandas.read_csv(folder / "bank/bank-additional-full.csv", sep=";"), "y"
        test = np.random.default_rng(0).random(len(table)) < 0.2
    y = table.pop(label).astype(str).str.strip(".").isin([">50K", "yes"]).to_numpy()
    X = pandas.get_dummies(table, dtype=float).rename(columns=str)  # categories as published
    scaler, ids = StandardScaler().fit(X[~test]), [f"person-{k}" for k in range((~test).sum())]
    for model in (Ridge, RidgeClassifier, LogisticRegression):
        line = name_line(task, len(ids), "table", model.__name__, 0)
        if line["key"] in done:
            continue
        t = y.astype(float) if model is Ridge else y
        ours = model(standardise=True).fit(X[~test], t[~test], ids=ids)
        tight = {"tol": 1e-8, "max_iter": 5000} if model is LogisticRegression else {}
        other = getattr(theirs, model.__name__)(**tight)
        other.fit(scaler.transform(X[~test]), t[~test])
        scores = ours.score(X[test], t[test]), other.score(scaler.transform(X[test]), t[test])
        start = time.process_time()
        for person in ids[:5]:
            ours.forget([person])
        seconds = (time.process_time() - start) / 5
        yield line | {"columns": X.shape[1], "scores": scores, "seconds": seconds}


def run(_: str, options: Options) -> None:
    """What is not finished."""
    store = Store(options.out, "table_features")
    for task in filter(options.wants, ("digits",) if options.smoke else TASKS):
        table, done = task in ("adult", "bank"), store.read()
        for line in run_table(task, done) if table else run_features(task, options, done):
            store.add(line)


def show(_: str, options: Options) -> None:
    """The tables, for people."""
    lines = list(Store(options.out, "table_features").read().values())
    text = f"{tabulate_layers(lines)}\n\n{tabulate_tables(lines)}\n"
    publish(text, options.out / "table_features.md")


def tabulate_layers(lines: list[Line]) -> str:
    """The arms of every data set beside each other, with their columns."""
    rows = list[list[object]]()
    for learned in dict.fromkeys((x["task"], x["learned"]) for x in lines if x["arm"] != "table"):
        own = [line for line in lines if (line["task"], line["learned"]) == learned]
        columns = {line["arm"]: line["columns"] for line in own}
        lifted = next(arm for arm in columns if arm.startswith("last, lift"))
        arms = "auto", "last", lifted, f"auto, lift {LIFT}"
        cells = [f"{average(own, arm=arm)} ({columns[arm]:,})" for arm in arms if arm in columns]
        gaps = [compare(own, {"arm": "auto"}, {"arm": other}) for other in ("last", lifted)]
        rows.append([*learned, own[0]["tested"], *cells, *gaps])
    arms = "auto", "last", "last, lifted to as many", f"auto, lifted by {LIFT:,}"
    gaps = "auto − last", "auto − last, lifted"
    return make_table(["data", "learned", "tested", *arms, *gaps], rows)


def tabulate_tables(lines: list[Line]) -> str:
    """Ours beside scikit-learn's own."""
    rows = list[list[object]]()
    for x in (line for line in lines if line["arm"] == "table"):
        about, scores = [x[n] for n in ("task", "model", "learned", "columns")], x["scores"]
        rows.append([*about, *(f"{s:.5f}" for s in scores), f"{1000 * x['seconds']:.0f}"])
    header = ["table", "model", "people", "columns", "score", "scikit-learn's", "ms a request"]
    return make_table(header, rows)


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("features",), run, show, arguments)


if __name__ == "__main__":
    main()
