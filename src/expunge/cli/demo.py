"""``expunge demo``: the whole story in one screen, on embedded data, in under a minute.

A small network is trained on scikit-learn's digits; a tenth of the people ask to be forgotten.
Every method answers at the same target, with the two controls that tell what is due to the old
model: retraining, and the same noisy run started from the centre. Then the same request again with
a public pretrained centre.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from expunge.accounting.calibration import calibrate
from expunge.accounting.planning import plan
from expunge.accounting.precision import NoisyRecipe
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import Run
from expunge.certificates.verification import verify
from expunge.cli.text import print_table
from expunge.jobs.directory import check_free, write_run
from expunge.jobs.tracking import SETS
from expunge.noisy.centre import find_scale
from expunge.noisy.run import unlearn
from expunge.recipes import GradientClipping
from expunge.tasks import digits
from expunge.tasks.networks import count_parameters, digits_net
from expunge.tasks.samples import Samples, split_forget
from expunge.training.batches import Batches
from expunge.training.evaluation import evaluate
from expunge.training.train import fine_tune, train

EPSILON, DELTA = 1.0, 1e-5
PUBLIC = 400
FINE_TUNING: dict[str, Any] = {
    "epochs": 6, "learning_rate": 0.1, "batch_size": 32, "schedule": "one-cycle",
}  # fmt: skip
TRAINING: dict[str, Any] = FINE_TUNING | {"epochs": 60}


class Story:
    """Who stays, who asked to be forgotten, who never trained, and what was measured of each."""

    def __init__(self) -> None:
        self.task = digits.load()
        everyone = self.task.train
        self.public = everyone.take(range(PUBLIC))
        self.everybody = everyone.take(range(PUBLIC, len(everyone)))
        self.retain, self.forget = split_forget(self.everybody, fraction=0.1, seed=0)
        self.rows: list[dict[str, Any]] = []

    def fit(self, start: int, samples: Samples, seed: int, **options: Any) -> nn.Module:
        """A network of its own start, trained."""
        model = digits_net(generator=torch.Generator().manual_seed(start))
        train(model, samples, prepare=self.task.normalise, seed=seed, **options)
        return model

    def score(self, model: nn.Module, arm: str, stage: str) -> None:
        sets = {"retain": self.retain, "forget": self.forget, "test": self.task.test}
        row: dict[str, Any] = {"arm": arm, "stage": stage}
        for name, s in sets.items():
            found = evaluate(model, s.inputs, s.targets, prepare=self.task.normalise)
            row[name] = found.accuracy
        self.rows.append(row)

    def answer(self, old: nn.Module, recipe: NoisyRecipe, arm: str, **options: Any) -> Run:
        """Noisy steps, then fine-tuning on retained data; accuracy after each."""
        batches = Batches(
            self.retain.inputs,
            self.retain.targets,
            batch_size=32,
            generator=torch.Generator(),
            prepare=self.task.normalise,
            ids=self.retain.ids.tolist(),
        )
        asked = {"loss_fn": nn.functional.cross_entropy, "forget_ids": self.forget.ids}
        run = unlearn(old, batches, recipe, **asked, **options)
        self.score(run.model, arm, "after noise")
        run = fine_tune(run, self.retain, prepare=self.task.normalise, **FINE_TUNING)
        self.score(run.model, arm, "after fine-tuning")
        return run

    def sum_up(self, arm: str, run: Run, cert: Certificate) -> dict[str, Any]:
        """What the report compares: the guarantee, the cost, and the accuracy at the end."""
        tuned = run.record.finetune
        cost = run.record.gradient_evaluations + (tuned.gradient_evaluations if tuned else 0)
        last = next(row for row in reversed(self.rows) if row["arm"] == arm)
        facts = {"epsilon": cert.epsilon, "delta": cert.delta, "gradient_evaluations": cost}
        return {"arm": arm} | facts | {name: last[name] for name in SETS}


def run_demo(out: str | Path) -> None:
    """Run the story, leave two run directories (``out`` and ``out/public-centre``), verify both."""
    started = time.perf_counter()
    target = check_free(out)
    # A network this small is slower on two threads than on one.
    torch.set_num_threads(1)
    console, story = Console(highlight=False), Story()
    console.print(
        f"{len(story.everybody)} people's digits, {len(story.forget)} of them ask to be forgotten. "
        f"Target: epsilon = {EPSILON:g}, delta = {DELTA:g}."
    )
    old = story.fit(0, story.everybody, 0, **TRAINING)
    story.score(old, "old model", "before")
    runs = {"gradient-clipping": _answer_every_way(story, old)}
    retrained = story.fit(7, story.retain, 1, **FINE_TUNING)
    story.score(retrained, "retraining", "after fine-tuning")
    runs["around public centre"] = _answer_around_public_centre(story, old)
    certificates = {arm: certify(run.record, delta=DELTA) for arm, run in runs.items()}
    metrics = {
        "title": "expunge demo",
        "task": "scikit-learn digits, 64-16-10 network, a tenth of the training data forgotten",
        "stages": story.rows,
        "arms": [story.sum_up(arm, run, certificates[arm]) for arm, run in runs.items()],
    }
    _print_rows(story.rows)
    for (arm, run), folder in zip(runs.items(), (target, target / "public-centre"), strict=True):
        cert, told = certificates[arm], metrics | {"arm": arm}
        write_run(folder, model=run.model, record=run.record, certificate=cert, metrics=told)
        found = verify(folder / "certificate.json", record=folder / "record.json")
        console.print(
            f"verified {folder}/certificate.json: epsilon = {found.epsilon:.6g}, "
            f"delta = {found.delta:g}, {found.recipe.method}"
        )
    _print_moral(console, certificates["gradient-clipping"], target, time.perf_counter() - started)


def _answer_every_way(story: Story, old: nn.Module) -> Run:
    """Each method at the target, and the centre control; the first one is what is kept."""
    size = count_parameters(old)
    scale = find_scale(old)  # of the public centre, whatever the old model holds
    planned = plan(epsilon=EPSILON, delta=DELTA, parameters=size, scale=scale, batch_size=32)
    recipes = {c.method: c.recipe for c in planned.candidates if isinstance(c.recipe, NoisyRecipe)}
    kept = story.answer(old, recipes["gradient-clipping"], "gradient-clipping")
    for name in ("model-clipping", "output-perturbation"):
        story.answer(old, recipes[name], name)
    story.answer(old, recipes["gradient-clipping"], "centre", start="centre")
    return kept


def _answer_around_public_centre(story: Story, old: nn.Module) -> Run:
    """The same request, pulled towards weights trained on public data only."""
    public = story.fit(3, story.public, 3, **TRAINING)
    story.score(public, "public centre", "before")

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
    return story.answer(old, recipe, "around public centre", centre=public.state_dict())


def _print_rows(rows: list[dict[str, Any]]) -> None:
    shown, last = list[tuple[str, ...]](), None
    for row in rows:
        arm = "centre control" if row["arm"] == "centre" else row["arm"]
        values = [f"{100 * row[k]:.1f}" for k in SETS]
        shown.append(("" if arm == last else arm, row["stage"], *values))
        last = arm
    names = ("", "stage", "retained", "forgotten", "test")
    print_table(names, shown, left=2, title="accuracy in %", pad_edge=False)


def _print_moral(console: Console, cert: Certificate, target: Path, seconds: float) -> None:
    console.print(
        f"\nWhat can survive: at this target at most {100 * cert.survival_bound:.1f} % of runs can "
        "differ in any way from the centre control, which never saw the old model: the rows above "
        "differ by their noise, not by what the old model knew. The lever that keeps information "
        "is public weights as the centre, in place of a fresh initialisation: what they knew stays."
        "\n\n"
        f"{target} holds model.safetensors and certificate.json to release, and record.json, "
        f"metrics.json and report.html, which stay with you. {seconds:.0f} s.\n"
        "Both directories are runs of the same old model: release one of them, or certify with "
        "releases=2.\n"
        f"Check it yourself:   expunge verify {target}/certificate.json\n"
        f"Read it in words:    expunge show {target}/certificate.json"
    )
