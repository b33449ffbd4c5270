"""``expunge demo``: the whole story in one screen, on embedded data, in under a minute.

A small network is trained on scikit-learn's digits; a tenth of the people ask to be forgotten.
Every method answers at the same target, with the two controls that tell what is due to the old
model: retraining, and the same noisy run started from the centre. Then the same request again with
a public pretrained centre.
"""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from expunge.accounting.calibration import calibrate
from expunge.accounting.planning import plan
from expunge.accounting.precision import NoisyRecipe
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import Run
from expunge.certificates.verification import verify
from expunge.jobs.directory import check_free, write_run
from expunge.noisy.run import unlearn
from expunge.recipes import GradientClipping
from expunge.tasks import digits
from expunge.tasks.networks import count_parameters, digits_net
from expunge.tasks.samples import Samples, Task, split_forget
from expunge.training.batches import Batches
from expunge.training.evaluation import evaluate
from expunge.training.train import fine_tune, train

EPSILON, DELTA = 1.0, 1e-5
PUBLIC = 400
TRAINING: dict[str, Any] = {
    "epochs": 60,
    "learning_rate": 0.1,
    "batch_size": 32,
    "schedule": "one-cycle",
}
FINE_TUNING: dict[str, Any] = TRAINING | {"epochs": 6}
# Chosen for this architecture's initialisation, before any weight was trained.
SCALE = 0.15

Row = dict[str, Any]


@dataclass(frozen=True)
class Stage:
    """The data of the story: who stays, who asked to be forgotten, and who never trained."""

    task: Task
    public: Samples
    retain: Samples
    forget: Samples

    def fit(self, model: nn.Module, samples: Samples, **options: Any) -> nn.Module:
        train(model, samples, prepare=self.task.normalise, **options)
        return model

    def load_retained(self, seed: int) -> Batches:
        return Batches(
            self.retain.inputs,
            self.retain.targets,
            batch_size=32,
            generator=torch.Generator().manual_seed(seed),
            prepare=self.task.normalise,
            ids=self.retain.ids.tolist(),
        )

    def score(self, model: nn.Module, arm: str, stage: str) -> Row:
        sets = {"retain": self.retain, "forget": self.forget, "test": self.task.test}
        return {"arm": arm, "stage": stage} | {
            name: evaluate(model, s.inputs, s.targets, prepare=self.task.normalise).accuracy
            for name, s in sets.items()
        }


def set_stage() -> Stage:
    """Digits, a public part nobody asks to forget, and a tenth of the rest to be forgotten."""
    task = digits.load()
    everyone = task.train
    public = everyone.take(range(PUBLIC))
    private = everyone.take(range(PUBLIC, len(everyone)))
    retain, forget = split_forget(private, fraction=0.1, seed=0)
    return Stage(task, public, retain, forget)


def join(first: Samples, second: Samples) -> Samples:
    """Both sets in one."""
    import numpy as np

    return Samples(
        torch.cat([first.inputs, second.inputs]),
        torch.cat([first.targets, second.targets]),
        np.concatenate([first.ids, second.ids]),
    )


def forget_with(
    stage: Stage,
    old: nn.Module,
    recipe: NoisyRecipe,
    arm: str,
    rows: list[Row],
    **options: Any,
) -> Run:
    """Noisy steps, then fine-tuning on retained data; accuracy after each, and the cost."""
    run = unlearn(
        old,
        stage.load_retained(1),
        recipe,
        loss_fn=nn.functional.cross_entropy,
        forget_ids=stage.forget.ids,
        **options,
    )
    rows.append(stage.score(run.model, arm, "after noise"))
    tuned = fine_tune(
        run,
        stage.retain,
        forget_ids=stage.forget.ids,
        prepare=stage.task.normalise,
        **FINE_TUNING,
    )
    rows.append(stage.score(tuned.model, arm, "after fine-tuning"))
    return tuned


def run_demo(out: str | Path, sign: str | Path | None = None) -> None:
    """Run the story, leave two run directories (``out`` and ``out/public-centre``), verify both."""
    from rich.console import Console

    started = time.perf_counter()
    target = check_free(out)
    # A network this small is slower on two threads than on one.
    torch.set_num_threads(1)
    console = Console(highlight=False)
    stage = set_stage()
    rows: list[Row] = []
    console.print(
        f"{len(stage.retain) + len(stage.forget)} people's digits, {len(stage.forget)} of them ask "
        f"to be forgotten. Target: epsilon = {EPSILON:g}, delta = {DELTA:g}."
    )
    old = stage.fit(
        digits_net(generator=torch.Generator().manual_seed(0)),
        join(stage.retain, stage.forget),
        seed=0,
        **TRAINING,
    )
    rows.append(stage.score(old, "old model", "before"))
    main, cert = _forget_every_way(stage, old, rows, sign)
    retrained = digits_net(generator=torch.Generator().manual_seed(7))
    stage.fit(retrained, stage.retain, seed=1, **FINE_TUNING)
    rows.append(stage.score(retrained, "retraining", "after fine-tuning"))
    public, public_cert = _forget_around_public_centre(stage, old, rows, sign)
    metrics = {
        "title": "expunge demo",
        "task": "scikit-learn digits, 64-16-10 network, a tenth of the training data forgotten",
        "stages": rows,
        "arms": [_sum_up(main, cert, rows), _sum_up(public, public_cert, rows)],
    }
    write_run(target, model=main.model, record=main.record, certificate=cert, metrics=metrics)
    inner = target / "public-centre"
    write_run(
        inner,
        model=public.model,
        record=public.record,
        certificate=public_cert,
        metrics=metrics | {"arm": "around public centre"},
    )
    _print_rows(console, rows)
    for folder in (target, inner):
        found = verify(folder / "certificate.json", record=folder / "record.json")
        console.print(
            f"verified {folder}/certificate.json: epsilon = {found.epsilon:.6g}, "
            f"delta = {found.delta:g}, {found.recipe.method}"
        )
    _print_moral(console, cert, target, time.perf_counter() - started)


def _forget_every_way(
    stage: Stage, old: nn.Module, rows: list[Row], sign: str | Path | None
) -> tuple[Run, Certificate]:
    """Each method at the target, and the centre control; the first one is what is kept."""
    planned = plan(
        epsilon=EPSILON,
        delta=DELTA,
        parameters=count_parameters(old),
        scale=SCALE,
        batch_size=32,
    )
    recipes = {c.method: c.recipe for c in planned.candidates if isinstance(c.recipe, NoisyRecipe)}
    kept = recipes["gradient-clipping"]
    main = forget_with(stage, old, kept, "gradient-clipping", rows)
    for name in ("model-clipping", "output-perturbation"):
        forget_with(stage, old, recipes[name], name, rows)
    forget_with(stage, old, kept, "centre", rows, start="centre")
    cert = certify(main.record, delta=DELTA)
    return main, cert if sign is None else cert.sign(sign)


def _forget_around_public_centre(
    stage: Stage, old: nn.Module, rows: list[Row], sign: str | Path | None
) -> tuple[Run, Certificate]:
    """The same request, pulled towards weights trained on public data only."""
    public = stage.fit(
        digits_net(generator=torch.Generator().manual_seed(3)), stage.public, seed=3, **TRAINING
    )
    rows.append(stage.score(public, "public centre", "before"))

    def make(sigma: float) -> GradientClipping:
        return GradientClipping(
            start_clip=0.01,
            grad_clip=0.01,
            learning_rate=0.05,
            weight_decay=2.0,
            steps=10,
            noise_std=sigma,
        )

    recipe = calibrate(make, epsilon=EPSILON, delta=DELTA, parameters=count_parameters(old))
    run = forget_with(
        stage,
        old,
        recipe,
        "around public centre",
        rows,
        centre=copy.deepcopy(public.state_dict()),
    )
    cert = certify(run.record, delta=DELTA)
    return run, cert if sign is None else cert.sign(sign)


def _sum_up(run: Run, cert: Certificate, rows: list[Row]) -> Row:
    """What the report compares: the guarantee, the cost, and the accuracy at the end."""
    tuned = run.record.finetune
    arm = "gradient-clipping" if run.record.centre is None else "around public centre"
    last = next(r for r in reversed(rows) if r["arm"] == arm)
    return {
        "arm": arm,
        "epsilon": cert.epsilon,
        "delta": cert.delta,
        "gradient_evaluations": run.record.gradient_evaluations
        + (0 if tuned is None else tuned.gradient_evaluations),
    } | {k: last[k] for k in ("retain", "forget", "test")}


def _print_rows(console: Any, rows: list[Row]) -> None:
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(box=SIMPLE, title="accuracy in %", title_justify="left", pad_edge=False)
    for name in ("", "stage", "retained", "forgotten", "test"):
        table.add_column(name, justify="left" if name in ("", "stage") else "right", no_wrap=True)
    last = None
    for row in rows:
        arm = "centre control" if row["arm"] == "centre" else row["arm"]
        values = [f"{100 * row[k]:.1f}" for k in ("retain", "forget", "test")]
        table.add_row("" if arm == last else arm, row["stage"], *values)
        last = arm
    console.print(table)


def _print_moral(console: Any, cert: Certificate, target: Path, seconds: float) -> None:
    console.print(
        f"\nWhat can survive: at this target at most {100 * cert.survival_bound:.1f} % of runs can "
        "differ in any way from the centre control, which never saw the old model: the rows above "
        "differ by their noise, not by what the old model knew. The lever that keeps information "
        "is a public centre: there the noise is small and what the centre knew stays."
    )
    console.print(
        f"\n{target} holds model.safetensors and certificate.json to release, and record.json, "
        f"metrics.json and report.html, which stay with you. {seconds:.0f} s."
    )
    console.print(
        "Both directories are runs of the same old model: release one of them, or certify with "
        "releases=2."
    )
    console.print(f"Check it yourself:   expunge verify {target}/certificate.json")
    console.print(f"Read it in words:    expunge show {target}/certificate.json")
