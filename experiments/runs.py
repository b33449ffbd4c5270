"""One run of one arm at one budget with one seed; results are kept as they come.

A budget is counted in epochs of the retained data, noisy steps included. Seeds are paired: run s of
every arm shares its noise and its order of batches, so that differences between arms are
differences within pairs; the forget set is the same throughout. Finished runs are in
experiments/results/runs/<task>.jsonl, one line each, and are never run again; certificates are
beside them.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import expunge
from arms import DELTA, Arm, find_epsilon, make_recipe, measure_noise, plan_recipe
from expunge import (
    Batches,
    Initialisation,
    Run,
    SeededNoise,
    certify,
    evaluate,
    fine_tune_many,
    train_many,
    unlearn,
    verify,
)
from expunge.noisy.centre import find_centre
from expunge.noisy.model import copy_model
from problems import Problem, load_model

RESULTS = Path(__file__).parent / "results"
Private = Callable[[int], Run]
SEARCH_SEED = 100
CERTIFIED = ("certified", "initialisation")


@dataclass(frozen=True, order=True)
class Case:
    """What identifies a run. ``learning_rate`` is that of the training after the noise."""

    arm: Arm
    budget: float
    seed: int
    learning_rate: float
    noise_scale: float = 0.0  # of a Gaussian start; 0 takes that of gradient clipping
    augment: bool = False
    row: float = 0.0  # the budget whose printed row is used; 0 takes its own

    @property
    def key(self) -> str:
        """One line that names it.

        >>> Case(Arm("retrain", "gaussian"), 4, 0, 0.06).key
        'retrain, gaussian | budget 4 | seed 0 | rate 0.06'
        """
        parts = [self.arm.name, f"budget {self.budget:g}", f"seed {self.seed}"]
        parts.append(f"rate {self.learning_rate:g}")
        parts += [f"scale {self.noise_scale:g}"] if self.noise_scale else []
        parts += [f"row {self.row:g}"] if self.row else []
        parts += [self.arm.table] if self.arm.table else []
        return " | ".join([*parts, *(["flips"] if self.augment else [])])


class Store:
    """The finished runs of a problem, read and written as JSON lines."""

    def __init__(self, folder: Path, problem: str) -> None:
        self.folder = folder
        self.file = folder / "runs" / f"{problem}.jsonl"
        self.certificates = folder / "certificates" / problem
        self.file.parent.mkdir(parents=True, exist_ok=True)

    def read(self) -> dict[str, dict[str, Any]]:
        """All finished runs by key; a line cut short by a crash is dropped."""
        found: dict[str, dict[str, Any]] = {}
        for line in self.file.read_text().splitlines() if self.file.exists() else []:
            try:
                entry = json.loads(line)
            except json.JSONDecodeError:
                continue
            found[entry["key"]] = entry
        return found

    def read_paired(self, learning_rate: float) -> list[dict[str, Any]]:
        """The runs of the figures: the tables' settings, and none of the search's seeds."""
        return [
            entry
            for entry in self.read().values()
            if entry["learning_rate"] == learning_rate
            and entry["seed"] < SEARCH_SEED
            and "augment" not in entry
            and " | row " not in entry["key"]
            and " | scale " not in entry["key"]
        ]

    def add(self, entry: dict[str, Any]) -> None:
        """One more; appended in a single write, so that processes can share the file."""
        line = json.dumps(entry, ensure_ascii=False) + "\n"
        whole = not self.file.exists() or self.file.read_bytes()[-1:] in (b"", b"\n")
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, (line if whole else "\n" + line).encode())
        finally:
            os.close(descriptor)


def run_cases(
    problem: Problem,
    cases: Iterable[Case],
    store: Store,
    *,
    model_seeds: int,
    compile: Any,
    private: Private | None = None,
) -> None:
    """Run what is not finished, cheapest budgets first, those that can step together together.

    ``model_seeds`` models must forget: run s starts from model s modulo that number.
    ``private(seed)`` is the run that was trained with DP-SGD, where an arm needs it.
    """
    done = store.read()
    left = [case for case in dict.fromkeys(cases) if case.key not in done]
    size = sum(p.numel() for p in problem.build(0).parameters())

    def steps(case: Case) -> int:
        recipe = _recipe(case, problem, size)
        return getattr(recipe, "steps", 0)

    def kind(case: Case) -> tuple[Any, ...]:
        return (case.budget, steps(case), case.augment, case.arm.method)

    left.sort(key=lambda case: (*kind(case), case.seed, case.arm))
    total, spent, began = sum(case.budget for case in left), 0.0, time.monotonic()
    for shared, group in groupby(left, kind):
        batch = list(group)
        together = len(batch) if compile != "one by one" else 1
        for part in _split(batch, together if _is_small(problem) else 1):
            run_part(problem, part, store, shared[1], size, model_seeds, compile, private)
            spent += sum(case.budget for case in part)
            elapsed = time.monotonic() - began
            remaining = elapsed / spent * (total - spent)
            print(
                f"{problem.name}: {spent:g} of {total:g} epochs, {remaining / 60:.0f} min left "
                f"({part[-1].key})",
                file=sys.stderr,
                flush=True,
            )


def run_part(
    problem: Problem,
    cases: Sequence[Case],
    store: Store,
    noisy_steps: int,
    size: int,
    model_seeds: int,
    compile: Any,
    private: Private | None = None,
) -> None:
    """Cases with one budget and one number of noisy steps: noise each, then train together."""
    setting = problem.setting
    starts = [
        make_start(problem, case, size, case.seed % model_seeds, store, private) for case in cases
    ]
    retain, forget = problem.parts
    length = -(-len(retain) // setting.batch_size)
    options: dict[str, Any] = {
        "seeds": [case.seed for case in cases],
        "epochs": cases[0].budget - noisy_steps / length,
        "learning_rate": [case.learning_rate for case in cases],
        "batch_size": setting.batch_size,
        "weight_decay": setting.weight_decay,
        "schedule": "one-cycle",
        "prepare": problem.prepare,
        "augment": _flip if cases[0].augment else None,
        "compile": False if compile == "one by one" else compile,
    }
    fresh = [k for k, start in enumerate(starts) if isinstance(start, nn.Module)]
    noisy = [k for k in range(len(starts)) if k not in fresh]
    results: dict[int, Run | nn.Module] = {}
    began = time.monotonic()
    for chosen, tune in ((fresh, _train_fresh), (noisy, fine_tune_many)):
        if chosen:
            picked = options | {
                name: [options[name][k] for k in chosen] for name in ("seeds", "learning_rate")
            }
            ended = tune([starts[k] for k in chosen], retain, **picked)
            results |= dict(zip(chosen, ended, strict=True))
    seconds = (time.monotonic() - began) / len(cases)  # they step together, and share the time
    for k, case in enumerate(cases):
        ended = results[k]
        model = ended.model if isinstance(ended, Run) else ended
        entry = describe(case, problem, size, options["epochs"], length)
        entry["seconds"] = round(seconds, 2)
        for name, part in (
            ("validation", problem.validation),
            ("test", problem.test),
            ("forget", forget),
        ):
            found = evaluate(model, part.inputs, part.targets, prepare=problem.prepare)
            entry[name] = round(100 * found.accuracy, 3)
        if case.arm.version in CERTIFIED and isinstance(ended, Run):
            entry |= keep_certificate(ended, case.key, store, case.seed == 0 and case.budget == 1)
        store.add(entry)


def make_start(
    problem: Problem,
    case: Case,
    size: int,
    model_seed: int,
    store: Store,
    private: Private | None,
) -> Run | nn.Module:
    """Where training starts: a fresh network, or a run after its noise."""
    if case.arm.method == "dp-sgd":
        assert private is not None
        return private(model_seed)
    if case.arm.method == "retrain":
        if case.arm.version == "initialisation":
            return build_public(problem, case.seed)
        net = problem.build(1_000 + case.seed)
        if case.arm.version == "gaussian":
            scale = find_scale(case, problem, size)
            generator = torch.Generator().manual_seed(2_000 + case.seed)
            with torch.no_grad():
                for p in net.parameters():
                    p.copy_(torch.randn(p.shape, generator=generator) * scale)
        return net
    retain, forget = problem.parts
    recipe = _recipe(case, problem, size)
    assert recipe is not None
    certified = case.arm.version in CERTIFIED  # the others get no certificate that names a set
    loader = Batches(
        retain.inputs,
        retain.targets,
        batch_size=problem.setting.batch_size,
        generator=torch.Generator().manual_seed(3_000 + case.seed),
        prepare=problem.prepare,
        ids=retain.ids if certified else None,
    )
    return unlearn(
        load_model(problem, model_seed, store.folder / "models"),
        loader,
        recipe,
        loss_fn=nn.functional.cross_entropy,
        noise=SeededNoise(case.seed),
        centre=_find_centre(case, problem),
        start="centre" if case.arm.version == "centre" else "model",
        forget_ids=forget.ids if certified else None,
    )


def find_scale(case: Case, problem: Problem, size: int) -> float:
    """The standard deviation of a Gaussian start."""
    if case.noise_scale:
        return case.noise_scale
    arm = Arm("gradient-clipping", "printed", case.arm.epsilon, case.arm.table)
    return measure_noise(make_recipe(arm, name_table(problem), case.row or case.budget, size))


def describe(case: Case, problem: Problem, size: int, tuned: float, length: int) -> dict[str, Any]:
    """What ran, in units that do not depend on the machine."""
    recipe = _recipe(case, problem, size)
    told: dict[str, Any] = {"key": case.key, "task": problem.name}
    told |= {"method": case.arm.method, "version": case.arm.version}
    told |= {"epsilon": case.arm.epsilon, "budget": case.budget, "seed": case.seed}
    told |= {"learning_rate": case.learning_rate, "tuned_epochs": round(tuned, 6)}
    told["gradient_evaluations"] = round(case.budget * length * problem.setting.batch_size)
    if case.augment:
        told["augment"] = "horizontal flips"
    if recipe is not None:
        told["recipe"] = {k: v for k, v in asdict(recipe).items() if v is not None}
        told["true_epsilon"] = round(find_epsilon(recipe), 4)
    elif case.arm.version == "gaussian":
        told["scale"] = find_scale(case, problem, size)
    return told | {"commit": find_commit()}


def keep_certificate(run: Run, key: str, store: Store, weights_too: bool) -> dict[str, Any]:
    """A certificate of the run, verified against its weights as a stranger would."""
    certificate = certify(run.record, delta=DELTA)
    store.certificates.mkdir(parents=True, exist_ok=True)
    name = key.replace(" | ", "_").replace(", ", "-").replace(" ", "").replace("ε=", "epsilon")
    path = store.certificates / f"{name}.json"
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        if weights_too:  # for strangers to verify
            weights = path.with_suffix(".safetensors")
        save_file(run.model.state_dict(), weights)
        certificate.save(path)
        verify(path, weights)
    return {"certificate": path.name, "certified_epsilon": certificate.epsilon}


@functools.cache
def find_commit() -> str:
    """The commit of the code that ran."""
    done = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
        cwd=RESULTS.parent,
    )
    return done.stdout.strip() or "unknown"


def _recipe(case: Case, problem: Problem, size: int) -> Any:
    if case.arm.method in ("retrain", "dp-sgd"):
        return None
    if case.arm.version == "initialisation":
        return plan_recipe(case.arm, size, measure_start(problem))
    return make_recipe(case.arm, name_table(problem), case.row or case.budget, size)


def _find_centre(case: Case, problem: Problem) -> Any:
    """The paper's zero, or the network's own initialisation under a public seed of this run."""
    if case.arm.version != "initialisation":
        return "zero"
    return name_start(problem, case.seed)


def name_start(problem: Problem, seed: int) -> Initialisation:
    """The network's own initialisation under the public seed of run s."""
    return Initialisation(f"run {seed}", functools.partial(build_afresh, problem))


def build_public(problem: Problem, seed: int) -> nn.Module:
    """The network at that initialisation, to be trained from there."""
    net = problem.build(seed)
    centre = find_centre(copy_model(net), name_start(problem, seed)).tensors
    assert centre is not None
    net.load_state_dict(centre)
    return net


def build_afresh(problem: Problem) -> nn.Module:
    """As its own initialisation is drawn, from the global random state."""
    return problem.build(int(torch.randint(2**62, ()).item()))


@functools.cache
def measure_start(problem: Problem) -> float:
    """What noise may be left: a tenth of the smallest layer of any fresh start."""
    found = expunge.find_scale(problem.build(0), Initialisation(0, lambda: build_afresh(problem)))
    assert found is not None
    return found


def name_table(problem: Problem) -> str:
    """Whose rows of the paper are followed; its tables know neither digits nor text."""
    return {"digits": "mnist", "debian": "transfer_cifar100"}.get(problem.name, problem.name)


def _is_small(problem: Problem) -> bool:
    return problem.name != "cifar10"


def _train_fresh(nets: Sequence[nn.Module], data: Any, **options: Any) -> list[nn.Module]:
    copies = [copy.deepcopy(net) for net in nets]
    train_many(copies, data, **options)
    return copies


def _flip(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    chosen = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(chosen, images.flip(-1), images)


def _split(items: Sequence[Case], size: int) -> Iterator[Sequence[Case]]:
    for start in range(0, len(items), max(size, 1)):
        yield items[start : start + max(size, 1)]
