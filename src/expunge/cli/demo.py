"""``expunge demo``: every route on embedded data, in one table, in under a minute.

scikit-learn's digits; a tenth of the people ask to be forgotten. Each route answers, from the
request to a verified certificate: what people would take first, then the paper's three methods,
each beside its control: the same run started from its centre, which never saw the old network.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import expunge
from expunge.cli.text import echo, print_json, write
from expunge.display import round_up
from expunge.files import check_free
from expunge.jobs.run import write_release
from expunge.jobs.tables import NOISY

SEED = "expunge demo"
PUBLISHED, TEST = 397, 300  # the first images are somebody else's, the last are the test set
EPSILON, DELTA, SHARDS = 1.0, 1e-5, 4
NAMES = ("route", "test %", "control", "epsilon", "seconds", "verified", "keeps of the old model")
LINE = "{:<28}{:>7}{:>8}{:>8}{:>8}{:>9}  {}"
ALL = "all that the others' data say"

Examples = tuple[Tensor, Tensor]


def read_digits() -> Examples:
    """scikit-learn's digits: 1,797 images of 8 x 8 pixels from 0 to 16, as numbers from -1 to 1."""
    from sklearn.datasets import load_digits

    images, targets = load_digits(return_X_y=True)
    return torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(targets)


def load() -> expunge.Data:
    """Two digits of each of 550 people; a test set of digits by others."""
    x, y = read_digits()
    own, rest = slice(PUBLISHED, len(y) - TEST), slice(len(y) - TEST, None)
    ids = [f"person-{i // 2:03d}" for i in range(len(y[own]))]
    return expunge.Data((x[own], y[own]), ids=ids, test=expunge.Data((x[rest], y[rest])))


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def train(model: nn.Module, examples: Examples, seed: int, epochs: int = 30) -> None:
    """A training as people write it."""
    x, y = examples
    steps = epochs * math.ceil(len(x) / 32)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(32):
            optimizer.zero_grad()
            cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
            schedule.step()


def publish_network() -> nn.Module:
    """What stands for a published network: trained on digits that are nobody's here."""
    torch.manual_seed(3)
    x, y = (part[:PUBLISHED] for part in read_digits())
    network = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU())
    train(nn.Sequential(network, nn.Linear(64, 10)), (x, y), 3, epochs=15)
    return network.eval().requires_grad_(False)


class Demo:
    """Everybody's data, who asked to be forgotten, the old network, and where releases go."""

    def __init__(self, out: Path, quiet: bool) -> None:
        self.out, self.quiet, self.data = out, quiet, load()
        self.people = list(self.data.people[::10])
        self.rows = list[dict[str, Any]]()
        torch.manual_seed(1)
        self.old = build()
        train(self.old, self.data.examples, 1)

    def score(self, model: Any) -> float:
        """Accuracy on the test set; a linear model says it itself, as in scikit-learn."""
        assert self.data.test is not None
        if hasattr(model, "score"):
            return model.score(*(part.numpy() for part in self.data.test.examples))
        found = expunge.evaluate(model, self.data.test, loss=cross_entropy).accuracy
        assert found is not None
        return found

    def answer(
        self,
        route: str,
        folder: str,
        work: Callable[[], expunge.Release],
        keeps: Callable[[expunge.Release], str] = lambda release: ALL,
        **more: Any,
    ) -> None:
        """Forget, certify, write and verify: that is timed, measuring accuracy is not. ``more``:
        the ``parent`` of the release, the accuracy of its ``control``, the ``model`` to score."""
        began = time.perf_counter()
        release = work()
        place = write_release(release, self.out / folder)
        found = expunge.verify(place, parent=more.get("parent")).certificate
        seconds = time.perf_counter() - began
        row = {
            "route": route,
            "folder": folder,
            "test": self.score(more.get("model", release.model)),
            "control": more.get("control"),
            "epsilon": found.epsilon,
            "survival_bound": found.survival_bound,
            "seconds": seconds,
            "keeps": keeps(release),
        }
        self.rows.append(row)
        if not self.quiet:
            test, control = (
                "" if x is None else f"{100 * x:.1f}" for x in (row["test"], row["control"])
            )
            shown = (round_up(found.epsilon), f"{seconds:.2f}", "yes", row["keeps"])
            echo(LINE.format(route, test, control, *shown))


def run_demo(out: str | Path, as_json: bool = False) -> None:
    """Answer by every route, with a verified release of each in ``out``, and say which to take."""
    began, target = time.perf_counter(), Path(out)
    check_free(target)
    torch.set_num_threads(1)  # networks this small are slower on two
    demo = Demo(target, as_json)
    data, old, leaving = demo.data, demo.score(demo.old), demo.data.count(demo.people)
    if not as_json:
        write(
            f"{len(data)} digits of {len(data.people)} people; {len(demo.people)} of them ask to "
            f"be forgotten, with {leaving} digits. The old network has {100 * old:.1f} % of {TEST} "
            "test digits right."
        )
        echo("\n" + LINE.format(*NAMES))
    work = partial(expunge.retrain, build, data, forget=demo.people, train=train, old=demo.old)
    demo.answer("retraining", "retraining", work, lambda release: "nothing")
    _learn_linear(demo)
    _learn_shards(demo)
    _add_noise(demo)
    seconds = time.perf_counter() - began
    if as_json:
        print_json({"seconds": seconds, "old": old, "rows": demo.rows})
    else:
        _conclude(demo, seconds)


def _learn_linear(demo: Demo) -> None:
    """On the table of pixels, and on the features of a published network."""
    from expunge.linear_model import LogisticRegression

    x, y = demo.data.examples
    ids = [owners[0] for owners in demo.data.ids or ()]
    head = LogisticRegression(features=expunge.Features(publish_network()))
    for route, folder, model in (
        ("logistic regression", "logistic-regression", LogisticRegression()),
        ("head on a published network", "head", head),
    ):
        model.fit(x.numpy(), y.numpy(), ids=ids)
        first = write_release(model.release(), demo.out / folder / "release-1")
        work = partial(model.forget, demo.people)
        demo.answer(route, f"{folder}/release-2", work, parent=first, model=model)


def _learn_shards(demo: Demo) -> None:
    """One person first, who is in one shard; then all the others, who are in every shard."""

    def count_kept(release: expunge.Release) -> str:
        assert release.record.sharding is not None
        return f"{release.record.sharding.trained_from.count(0)} of its {SHARDS} networks"

    place = demo.out / "shards"
    shards = expunge.Shards(build, train, seed=SEED, shards=SHARDS, slices=2, state=place / "state")
    shards.learn(demo.data)
    before = write_release(shards.release(), place / "release-1")
    one, others = demo.people[:1], demo.people[1:]
    for who, folder, people in (
        ("1 person", "release-2", one),
        (f"{len(others)} people", "release-3", others),
    ):
        work = partial(shards.forget, people, demo.data)
        route = f"{SHARDS} shards, {who}"
        demo.answer(route, f"shards/{folder}", work, count_kept, parent=before)
        before = place / folder


def _add_noise(demo: Demo) -> None:
    """The paper's methods, planned around build(), and the control of each."""

    def bound_kept(release: expunge.Release) -> str:
        bound = math.ceil(1000 * release.certificate.survival_bound) / 10
        return f"at most {bound:.1f} % of runs differ"

    for method in sorted(NOISY):
        work = partial(
            expunge.unlearn, demo.old, build, demo.data, forget=demo.people, method=method,
            epsilon=EPSILON, delta=DELTA, loss=cross_entropy, batch_size=32,
            train=partial(train, epochs=5),
        )  # fmt: skip
        control = demo.score(work(start="centre").model)
        # each in a folder of its own: beside each other they would have to say releases=3
        folder = f"{method}/release"
        demo.answer(method.replace("-", " "), folder, work, bound_kept, control=control)


def _conclude(demo: Demo, seconds: float) -> None:
    bound = max(row["survival_bound"] for row in demo.rows)
    write("\nseconds: from the request to its verified certificate, here and now.")
    write(
        "epsilon: at 0 the new model is, bit for bit, what training without these people gives; "
        f"at {EPSILON:g} no answer of it is more than e times as likely, but for {DELTA:g}."
    )
    write(
        "control: the same noisy run started from its centre, without the old network. At epsilon "
        f"= {EPSILON:g} at most {100 * bound:.1f} % of runs can differ from it in any way: what "
        "noise leaves of the old network cannot be measured."
    )
    write(
        f"{demo.out} has every release. The noisy ones are of one old network: publish at most "
        f"one of them. All of it took {seconds:.0f} s."
    )
    write(
        "Your route: a linear model, where vectors or a published network's features will do; "
        "else retraining by your own training, in shards if requests will keep coming; and noise "
        "only where nothing can be trained again."
    )
    first = demo.out / demo.rows[0]["folder"]
    echo(f"  Check one yourself:  expunge verify {first}")
    echo(f"  Read it in words:    expunge show {first}")
    echo("  Your own model:      expunge init mine")
