"""Figure 3: a three-layer head on frozen public features, CIFAR-10 and CIFAR-100, with DP-SGD.

    python experiments/figure_transfer.py                    # budgets 1, 4, 10, 25, 49
    python experiments/figure_transfer.py --full             # 17 budgets, DP-SGD for 100 epochs
    python experiments/figure_transfer.py --smoke

The paper's backbone is an ImageNet ResNet-18, whose weights are not at hand here: these features
are those of the public EfficientNet-Lite0 at 96 pixels, projected to the 512 inputs of the paper's
head (problems.py). DP-SGD trains the head so that any 0.5 % of the data can be forgotten at
(50, 1e-5), and the budget then goes to fine-tuning, as in the paper; 5 epochs unless --full, with
the noise that 5 need (dpsgd.py). The arms "initialisation" are at true (1, 1e-5) around a fresh
initialisation under a public seed, with the radii of expunge.plan; the paper's are around zero.
They are paired with retraining from that very initialisation: at one epoch of CIFAR-100 two dozen
draws of it differ by more than anything that is compared here.
"""

from __future__ import annotations

import functools
import math
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

import dpsgd
from arms import DELTA, GAUSSIAN, RETRAIN, Arm, list_arms
from dpsgd import GroupDPSGD, calibrate_noise
from figure_budget import METHODS
from options import Options, drive
from plots import draw_arms, style_arm
from problems import SETTINGS, Problem, load_problem, save_model
from runs import Store, run_arms
from summary import publish, tabulate_arms

PRIVATE = Arm("dp-sgd", "certified", epsilon=50.0)
SAME = Arm("retrain", "initialisation")
FRESH = [Arm(method, "initialisation") for method in METHODS]
ARMS = [RETRAIN, GAUSSIAN, *list_arms(("gradient-clipping",)), SAME, *FRESH, PRIVATE]
FULL = tuple(range(1, 50, 3))
REDUCED = (1, 4, 10, 25, 49)
CLIP, GROUP = 0.5, 0.005


def run(task: str, options: Options) -> None:
    """Whatever is missing."""
    budgets = options.budgets or ((1,) if options.smoke else FULL if options.full else REDUCED)
    epochs = 1 if options.smoke else 100 if options.full else 5
    problem = load_problem(task)
    private = functools.partial(train_privately, problem, epochs, options.out)
    run_arms(task, options, ARMS, budgets, private)


def train_privately(problem: Problem, epochs: int, out: Path, seed: int) -> nn.Module:
    """The head trained by DP-SGD on all data; kept, and trained once."""
    path = out / "models" / f"dpsgd-{problem.name}-{epochs}-{seed}.safetensors"
    net, setting = problem.build(4_000 + seed), problem.setting
    if not path.exists():
        recipe = find_private_recipe(len(problem.train), setting.batch_size, epochs)
        dpsgd.train_privately(
            net, problem.train.pair, recipe, learning_rate=setting.learning_rate,
            weight_decay=setting.weight_decay, one_cycle=True, seed=seed,
        )  # fmt: skip
        save_model(net, path)
    net.load_state_dict(load_file(path))
    return net


@functools.cache
def find_private_recipe(count: int, batch: int, epochs: int) -> GroupDPSGD:
    """Enough noise that any 0.5 % of the data are covered at (50, 1e-5)."""
    steps, size = math.ceil(epochs * count / batch), max(round(GROUP * count), 1)
    return calibrate_noise(
        lambda z: GroupDPSGD(CLIP, z, batch / count, steps, size),
        epsilon=PRIVATE.epsilon,
        delta=DELTA,
    )


def plot(task: str, options: Options) -> None:
    """The figure, the table and the paired differences."""
    entries = Store(options.out, task).read_paired(SETTINGS[task].tuned_rate)
    name = f"figure_{task}"
    styles = {arm: (arm.name, style_arm(arm.method, arm.version)) for arm in ARMS}
    title = f"{task.replace('_', ' ')}: head on frozen public features"
    draw_arms(entries, styles, options.out, name, title=title, logarithmic=True)
    printed, certified, centre = list_arms(("gradient-clipping",))
    pairs = [(printed, RETRAIN), (certified, RETRAIN), (printed, centre), (certified, GAUSSIAN)]
    pairs += [*((arm, SAME) for arm in FRESH), (PRIVATE, RETRAIN)]
    publish(tabulate_arms(entries, ARMS, pairs), options.out / f"{name}.md")


def main(arguments: list[str] | None = None) -> None:
    drive(__doc__, ("transfer_cifar10", "transfer_cifar100"), run, plot, arguments)


if __name__ == "__main__":
    main()
