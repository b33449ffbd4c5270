"""Linear models: which layers of a public network, and tables beside scikit-learn's own models.

    python experiments/table_features.py                    # all images: hours, once
    python experiments/table_features.py --images 10000     # so many to learn from, half to test
    python experiments/table_features.py --smoke            # a drawn network on digits, runs/smoke

Arms: "auto" (five layers), "last", "last" with as many random features as "auto" has more columns,
and "auto" with 2,048 of them. A seed draws which rows are for validation, the same for every arm;
the penalty is chosen there. Pooled activations are computed once and stay below the folder of the
data, 250 rows a file; finished lines are never run again. Adult and Bank are read from the package
``aif360==0.2.3``, unpacked in the folder of the data, and left out where it is not there.
"""

from __future__ import annotations

import argparse
import json
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
from options import add_out, choose_out
from samples import Samples, split_validation

CHUNK, LIFT, SEEDS = 250, 2048, 3
ALPHAS = (10.0, 100.0, 1e3, 1e4)
TASKS = ("cifar10", "cifar100", "debian", "adult", "bank")
Line = dict[str, Any]
Key = tuple[Any, ...]


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


def load(task: str, images: int | None) -> tuple[Samples, Samples, Callable[[], nn.Module]]:
    """Rows to learn and validate with, rows to test with, and the public network."""
    if task == "debian":
        train, held, test = load_debian()
        both = [torch.cat(pair) for pair in zip(train.pair, held.pair, strict=True)]
        rows = Samples(both[0], both[1], np.concatenate([train.ids, held.ids]))
        return rows, test, lambda: load_minilm().net
    found = load_digits() if task == "digits" else load_cifar(task)
    rows, test = found.train, found.test
    if images is not None:
        rows, test = rows.take(range(images)), test.take(range(min(images // 2, len(test))))
    return rows, test, _draw if task == "digits" else ImageBackbone


def _draw() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Conv2d(k, 8, 3, padding=1), nn.ReLU()) for k in (1, 8, 8, 8)]
    made = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(512, 32)).eval()
    made.register_forward_pre_hook(lambda _m, given: (given[0].float() / 8 - 1,))
    return made


def run_features(task: str, images: int | None, seeds: int, done: set[Key]) -> Iterator[Line]:
    """One line for each arm, model and seed."""
    rows, test, build = load(task, images)
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
    for seed, arm in ((seed, arm) for seed in range(seeds) for arm in arms):
        learned, held = split_validation(numbered, len(rows) // 10, seed)
        key = {"task": task, "learned": len(learned), "arm": arm, "model": "ridge", "seed": seed}
        if tuple(key.values()) in done:
            continue
        features = Features(lookup, seed=f"{seed}", batch_size=1000, **arms[arm])
        model = RidgeClassifier(features=features).fit(learned.inputs, learned.targets)
        scores = {a: model.set_params(alpha=a).score(*held.pair) for a in ALPHAS}
        best = max(ALPHAS, key=lambda alpha: scores[alpha])
        accuracy = 100 * model.set_params(alpha=best).score(places, test.targets)
        columns = sum(features.numbers.widths) + features.lift
        yield key | {"tested": len(test), "columns": columns, "penalty": best, "test": accuracy}


def run_table(task: str, done: set[Key]) -> Iterator[Line]:
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
        key = {
            "task": task,
            "learned": len(ids),
            "arm": "table",
            "model": model.__name__,
            "seed": 0,
        }
        if tuple(key.values()) in done:
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
        yield key | {"columns": X.shape[1], "scores": scores, "seconds": seconds}


def write(lines: Sequence[Line], out: Path) -> None:
    """The tables, for people."""
    names = ("task", "model", "arm", "columns", "learned", "tested")
    text = [f"| {' | '.join(names)} | seeds | test % | minus last |", "|---" * 9 + "|"]
    found = [line for line in lines if line["arm"] != "table"]
    for key in dict.fromkeys(tuple(line[name] for name in names) for line in found):
        own = {x["seed"]: x["test"] for x in found if tuple(x[n] for n in names) == key}
        same = (key[0], key[1], "last", key[4])
        last = {x["seed"]: x["test"] for x in found
                if (x["task"], x["model"], x["arm"], x["learned"]) == same}  # fmt: skip
        less = [own[seed] - last[seed] for seed in own if seed in last] or [np.nan]
        mean = f"{np.mean([*own.values()]):.2f} | {np.mean(less):+.2f}"
        shown = " | ".join(str(value) for value in (*key, len(own)))
        text.append(f"| {shown} | {mean} ({min(less):+.2f} … {max(less):+.2f}) |")
    text += ["", "| table | model | people | columns | score | scikit-learn's | ms a request |"]
    text += ["|---" * 7 + "|"]
    for x in (line for line in lines if line["arm"] == "table"):
        shown = f"{x['columns']} | {x['scores'][0]:.5f} | {x['scores'][1]:.5f}"
        made = f"| {x['task']} | {x['model']} | {x['learned']} | {shown} "
        text.append(f"{made}| {1000 * x['seconds']:.0f} |")
    (out / "table_features.md").write_text("\n".join(text) + "\n")
    print("\n".join(text))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--images", type=int, help="how many images to learn from; default all")
    parser.add_argument("--smoke", action="store_true", help="digits, one seed")
    add_out(parser)
    given = parser.parse_args(arguments)
    out = choose_out(given)
    kept = out / "runs" / "table_features.jsonl"
    kept.parent.mkdir(exist_ok=True)
    kept.touch()
    lines: list[Line] = [json.loads(line) for line in kept.read_text().splitlines()]
    done: set[Key] = {
        tuple(x[n] for n in ("task", "learned", "arm", "model", "seed")) for x in lines
    }
    for task in ["digits"] if given.smoke else given.task:
        table, seeds = task in ("adult", "bank"), 1 if given.smoke else SEEDS
        made = run_table(task, done) if table else run_features(task, given.images, seeds, done)
        for line in made:
            with kept.open("a") as file:
                print(json.dumps(line), file=file)
            lines.append(line)
    write(lines, out)


if __name__ == "__main__":
    main()
