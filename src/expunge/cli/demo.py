"""``expunge demo``: every route on embedded data, in one table, in under a minute.

scikit-learn's digits; a tenth of the people ask to be forgotten. Each route answers, from the
request to a verified certificate: heads and shards that are built to forget, training once more,
and the noisy methods, each beside its control: the same run started from its centre, which never
saw the old network.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import typer
from torch import nn

from expunge.accounting.calibration import calibrate
from expunge.accounting.planning import plan
from expunge.accounting.precision import NoisyRecipe
from expunge.baselines.retraining import PublicStart, retrain
from expunge.certificates.certificate import Certificate, certify
from expunge.certificates.record import Run
from expunge.certificates.verification import verify
from expunge.cli.text import format_up
from expunge.forgettable.convex import ConvexHead
from expunge.forgettable.features import Features
from expunge.forgettable.released import HeadModel
from expunge.forgettable.shards import Shards
from expunge.forgettable.statistics import StatisticsHead
from expunge.jobs.directory import check_free, write_run
from expunge.jobs.tracking import SETS
from expunge.noisy.centre import Centre, find_scale
from expunge.noisy.run import Start, unlearn
from expunge.recipes import GradientClipping
from expunge.reports.metrics import AFTER_NOISE, AFTER_TRAINING, AFTER_TUNING, BEFORE, CENTRE, OLD
from expunge.tasks import digits
from expunge.tasks.networks import count_parameters, digits_net
from expunge.tasks.samples import Samples, split_forget
from expunge.training.batches import Batches
from expunge.training.evaluation import evaluate
from expunge.training.train import fine_tune, train

SEED = "expunge demo"
TARGET: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-5}
PUBLIC, SHARDS = 400, 4
SHORT: dict[str, Any] = {
    "epochs": 6, "learning_rate": 0.1, "batch_size": 32, "schedule": "one-cycle",
}  # fmt: skip
FULL: dict[str, Any] = SHORT | {"epochs": 60}
NAMES = ("route", "test %", "control", "epsilon", "seconds", "verified", "keeps of the old model")
LINE, WIDTH = "{:<28}{:>7}{:>8}{:>8}{:>8}{:>9}  {}", 99
ALL = "all that the others' data say"

Answer = Run | tuple[Run, Run]


@dataclass(frozen=True)
class Release:
    """What was written and verified: its promise, how good it is, and what the answer cost."""

    run: Run
    certificate: Certificate
    test: float
    control: float | None
    seconds: float

    @property
    def bound(self) -> str:
        """In percent: how many runs can differ from those that never saw the old model."""
        return f"{math.ceil(1000 * self.certificate.survival_bound) / 10:.1f} %"

    def __str__(self) -> str:
        return f"here {100 * self.test:.1f} % in {self.seconds:.2f} s"


class Demo:
    """Who stays, who asked to be forgotten, what is public, and where releases are written."""

    def __init__(self, out: Path) -> None:
        self.out, self.task = out, digits.load()
        known = self.task.train
        self.everybody = known.take(range(PUBLIC, len(known)))
        self.retain, self.forget = split_forget(self.everybody, fraction=0.1, seed=0)
        self.old = self.fit(0, self.everybody)
        self.public = self.fit(3, known.take(range(PUBLIC))).state_dict()
        self.scores = {OLD: self.score(self.old, OLD, BEFORE)}

    def fit(self, seed: int, samples: Samples) -> nn.Module:
        """A network of its own start, trained in full."""
        model = digits_net(generator=torch.Generator().manual_seed(seed))
        train(model, samples, prepare=self.task.normalise, seed=seed, **FULL)
        return model

    def score(self, model: nn.Module, arm: str, stage: str) -> dict[str, Any]:
        """Accuracy on every set; a head takes the pixels as they are."""
        prepare = None if isinstance(model, HeadModel) else self.task.normalise
        sets = zip(SETS, (self.retain, self.forget, self.task.test), strict=True)
        found = {n: evaluate(model, s.inputs, s.targets, prepare=prepare) for n, s in sets}
        return {"arm": arm, "stage": stage} | {name: one.accuracy for name, one in found.items()}

    def score_answer(self, arm: str, answer: Answer) -> list[dict[str, Any]]:
        """After the noise and after fine-tuning; one row where there is no noise."""
        if isinstance(answer, Run):
            return [self.score(answer.model, arm, AFTER_TRAINING)]
        stages = (AFTER_NOISE, AFTER_TUNING)
        return [self.score(r.model, arm, stage) for r, stage in zip(answer, stages, strict=True)]

    def perturb(self, recipe: NoisyRecipe, centre: Centre, start: Start = "model") -> Answer:
        """Noisy steps from the old network (or its control's start), then fine-tuning."""
        batches = Batches(
            self.retain.inputs,
            self.retain.targets,
            batch_size=SHORT["batch_size"],
            generator=torch.Generator(),
            prepare=self.task.normalise,
            ids=self.retain.ids.tolist(),
        )
        loss, gone = nn.functional.cross_entropy, self.forget.ids
        asked: dict[str, Any] = {"loss_fn": loss, "forget_ids": gone, "start": start}
        noisy = unlearn(self.old, batches, recipe, centre=centre, **asked)
        return noisy, fine_tune(noisy, self.retain, prepare=self.task.normalise, **SHORT)

    def release(
        self,
        folder: str,
        work: Callable[[], Answer],
        *,
        before: str | None = OLD,
        control: Answer | None = None,
    ) -> Release:
        """Answer, certify, write and verify: that is timed, measuring accuracy is not.

        ``before`` is the release that this one is chained to, the old network or nothing.
        """
        arm = folder.partition("/")[0]
        started = time.perf_counter()
        answer = work()
        paused = time.perf_counter()
        rows = self.score_answer(arm, answer)
        against = [] if control is None else self.score_answer(CENTRE, control)
        self.scores[folder] = rows[-1]
        known = [] if before is None else [self.scores[before] | {"arm": OLD, "stage": BEFORE}]
        metrics = {
            "title": f"expunge demo: {arm}",
            "task": f"scikit-learn's digits of {len(self.everybody)} people",
            "arm": arm,
            "stages": [*known, *rows, *against],
        }
        started += time.perf_counter() - paused
        run = answer if isinstance(answer, Run) else answer[-1]
        last = None if before in (None, OLD) else self.out / before
        parent = None if last is None else Certificate.load(last / "certificate.json")
        made = certify(run.record, delta=TARGET["delta"], parent=parent)
        place = self.out / folder
        write_run(place, model=run.model, record=run.record, certificate=made, metrics=metrics)
        found = verify(place, record=place, parent=last)
        seconds = time.perf_counter() - started
        return Release(
            run, found, rows[-1]["test"], against[-1]["test"] if against else None, seconds
        )

    def learn(self, folder: str, model: StatisticsHead | ConvexHead | Shards) -> None:
        """Everybody, before anybody asks, and the first release."""
        model.learn((self.everybody.inputs, self.everybody.targets), ids=self.everybody.ids)
        self.release(f"{folder}/release-1", model.release, before=None)


def run_demo(out: str | Path) -> None:
    """Answer by every route, with a verified release of each in ``out``, and say which to take."""
    started = time.perf_counter()
    target = check_free(out)
    target.mkdir(parents=True, exist_ok=True)
    # A network this small is slower on two threads than on one.
    torch.set_num_threads(1)
    demo = Demo(target)
    _say(
        f"{len(demo.everybody)} people's digits; {len(demo.forget)} of them ask to be forgotten. "
        f"{PUBLIC} more are public."
    )
    _say(
        f"The old network has {100 * demo.scores[OLD]['test']:.1f} % of {len(demo.task.test)} test "
        f"digits right. Noise is for epsilon = {TARGET['epsilon']:g}, delta = {TARGET['delta']:g}."
    )
    typer.echo("\n" + LINE.format(*NAMES))
    head = _answer_by_heads(demo)
    restarted, retrained = _train_again(demo)
    _answer_by_shards(demo)
    noisy = _answer_with_noise(demo)
    _say("")
    _say("seconds: from the request to its verified certificate, here and now.")
    _say(
        "control: the same noisy run started from its centre, without the old network. At this "
        f"epsilon at most {noisy.bound} of runs can differ from it in any way, so what noise "
        "leaves of the old network cannot be measured; public weights as the centre stay."
    )
    _say(
        f"{target} holds every release. The noisy ones are all of one old network: publish one of "
        f"them, or certify with releases=. All of it took {time.perf_counter() - started:.0f} s."
    )
    for does, command in (
        ("Check one yourself:", f"expunge verify {target}/statistics-head/release-2"),
        ("Read it in words:", f"expunge show {target}/statistics-head/release-2"),
        ("Your own model:", "expunge plan --job job.toml"),
    ):
        typer.echo(f"  {does:<21}{command}")
    _say(
        "Your route: a head built to forget, where your features are public "
        f"({head}, epsilon = 0); else a restart from public weights ({restarted}); without those "
        f"retraining ({retrained}), in shards if requests will keep coming; and noisy fine-tuning "
        "only where nothing can be trained again."
    )


def _answer_by_heads(demo: Demo) -> Release:
    """Exact sums of public random features; softmax on fewer of them, without and with noise."""
    ids = demo.forget.ids
    head = StatisticsHead(Features(None, lift=1000, seed=SEED), classes=10, regularisation=1e-5)
    demo.learn("statistics-head", head)
    exact = _request(demo, "statistics-head", lambda: head.forget(ids))
    _print_row("exact statistics head", exact, ALL)
    for name, title, keeps, budget in (
        ("convex-head", "convex head, solved again", ALL, {}),
        ("convex-head-noisy", "convex head, with noise", "the same, and the old start", TARGET),
    ):
        convex = ConvexHead(Features(None, lift=400, seed=SEED), classes=10, weight_decay=1e-5)
        demo.learn(name, convex)
        _print_row(title, _request(demo, name, partial(convex.forget, ids, **budget)), keeps)
    return exact


def _train_again(demo: Demo) -> tuple[Release, Release]:
    """From public weights, from a fresh start, and as short as noisy runs are fine-tuned."""
    asked: dict[str, Any] = {"forget_ids": demo.forget.ids, "prepare": demo.task.normalise}
    again = partial(retrain, demo.old, demo.retain, **asked)
    start = PublicStart(demo.public, "the demo's public digits")
    restarted = demo.release("restart", partial(again, initialise=start, **SHORT))
    _print_row("restart from public weights", restarted, "nothing; the public stays")
    retrained = demo.release("retraining", partial(again, **FULL))
    _print_row(f"retraining, {FULL['epochs']} epochs", retrained, "nothing")
    short = demo.release("retraining-short", partial(again, **SHORT))
    _print_row(f"retraining, {SHORT['epochs']} epochs", short, "nothing")
    return restarted, retrained


def _answer_by_shards(demo: Demo) -> None:
    """One person first, who is in one shard; then all the others, who are in every shard."""
    ways: dict[str, Any] = {"shards": SHARDS, "slices": 2, "prepare": demo.task.normalise}
    ensemble = Shards(_build, seed=SEED, **ways, **FULL)
    demo.learn("shards", ensemble)
    for number, ids in enumerate((demo.forget.ids[:1], demo.forget.ids[1:]), start=1):
        found = _request(demo, "shards", partial(ensemble.forget, ids), number)
        parts = found.run.record.shards
        assert parts is not None
        who = "1 person" if len(ids) == 1 else f"{len(ids)} people"
        kept = f"{parts.trained_from.count(0)} of its {SHARDS} networks"
        _print_row(f"{SHARDS} shards, {who}", found, kept)


def _build() -> nn.Module:
    """The demo's network from the global generator, which shards seed."""
    return digits_net(generator=torch.default_generator)


def _answer_with_noise(demo: Demo) -> Release:
    """Every noisy method, and one around public weights; the one whose bound is the largest."""
    size, scale = count_parameters(demo.old), find_scale(demo.old)
    planned = plan(**TARGET, parameters=size, scale=scale, batch_size=SHORT["batch_size"])
    ways: list[tuple[str, str, NoisyRecipe, Centre]] = [
        (c.method, c.method.replace("-", " "), c.recipe, "initialisation")
        for c in sorted(planned.candidates, key=lambda candidate: candidate.method)
        if isinstance(c.recipe, NoisyRecipe)
    ]
    clips: dict[str, float] = {"start_clip": 0.01, "grad_clip": 0.01}
    steps: dict[str, Any] = {"learning_rate": 0.05, "weight_decay": 2.0, "steps": 10}
    near = calibrate(
        lambda sigma: GradientClipping(**clips, **steps, noise_std=sigma),
        parameters=size,
        **TARGET,
    )
    ways.append(("public-centre", "noise around public weights", near, demo.public))
    found = list[Release]()
    for name, title, recipe, centre in ways:
        control = demo.perturb(recipe, centre, start="centre")
        found.append(demo.release(name, partial(demo.perturb, recipe, centre), control=control))
        _print_row(title, found[-1], f"at most {found[-1].bound} of runs differ")
    return max(found, key=lambda one: one.certificate.survival_bound)


def _request(demo: Demo, folder: str, work: Callable[[], Answer], number: int = 1) -> Release:
    """The next release of a model that was built to forget, chained to the one before."""
    return demo.release(f"{folder}/release-{number + 1}", work, before=f"{folder}/release-{number}")


def _print_row(title: str, found: Release, keeps: str) -> None:
    control = "" if found.control is None else f"{100 * found.control:.1f}"
    epsilon, seconds = format_up(found.certificate.epsilon, 6), f"{found.seconds:.2f}"
    row = (title, f"{100 * found.test:.1f}", control, epsilon, seconds, "yes", keeps)
    typer.echo(LINE.format(*row))


def _say(text: str) -> None:
    typer.echo(textwrap.fill(text, WIDTH, break_on_hyphens=False))
