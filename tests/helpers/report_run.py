"""A real small run for the report: digits, a 64-32-10 network, noise from the operating system.

``python tests/helpers/report_run.py docs/images/report.png`` takes the picture of the documents.
"""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from expunge.accounting.calibration import calibrate
from expunge.accounting.guarantee import guarantee
from expunge.certificates.certificate import certify
from expunge.certificates.identifiers import commit
from expunge.certificates.record import FineTuning
from expunge.certificates.signing import generate_key_pair
from expunge.noisy.noise import SystemNoise
from expunge.noisy.run import unlearn
from expunge.processes.weights import hash_weights, save_weights
from expunge.recipes import GradientClipping
from expunge.reports.metrics import AFTER_NOISE, AFTER_TUNING, BEFORE
from expunge.reports.page import write_report
from expunge.tasks import digits
from expunge.tasks.networks import dense_net
from expunge.tasks.samples import split_forget

BATCH, RATE = 64, 0.1
OnEpoch = Callable[[int, nn.Module], None]


def launch_chromium(profile: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Debian's browser headless with a new profile and no background traffic."""
    browser = shutil.which("chromium")
    assert browser is not None, "chromium is not installed"
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--hide-scrollbars",
    ]
    cut_off = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
    return subprocess.run(
        [browser, *flags, cut_off, f"--user-data-dir={profile}", *arguments],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip


def scale(images: Tensor) -> Tensor:
    return images.flatten(1).float() / 8 - 1


def train(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    epochs: int,
    seed: int,
    on_epoch: OnEpoch | None = None,
) -> int:
    """Plain SGD; how many examples it took a gradient of."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(epochs):
        if on_epoch is not None:
            on_epoch(epoch, model)
        for rows in torch.randperm(len(inputs), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[rows]), targets[rows]).backward()
            optimizer.step()
    if on_epoch is not None:
        on_epoch(epochs, model)
    return epochs * len(inputs)


def make_real_run(folder: Path, *, epochs: int = 15, signed: bool = True) -> Path:
    """Train, forget a tenth, certify, and write what a run directory holds but the report."""
    task = digits.load()
    retained, forgotten = split_forget(task.train, fraction=0.1, seed=0)
    parts = {"retain": retained, "forget": forgotten, "test": task.test}
    data = {name: (scale(part.inputs), part.targets) for name, part in parts.items()}
    inputs, targets = data["retain"]

    @torch.no_grad()
    def measure(model: nn.Module) -> dict[str, float]:
        return {
            name: float((model(x).argmax(1) == y).float().mean()) for name, (x, y) in data.items()
        }

    stages: list[dict[str, Any]] = []
    arms: list[dict[str, Any]] = []
    curves: list[dict[str, Any]] = []

    def follow(name: str) -> OnEpoch:
        curve = {"name": name, "x": [], "y": [], "x_label": "epoch", "y_label": "test accuracy"}
        curves.append(curve)

        def on_epoch(epoch: int, model: nn.Module) -> None:
            curve["x"].append(epoch)
            curve["y"].append(measure(model)["test"])

        return on_epoch

    old = dense_net((64, 32, 10), torch.Generator().manual_seed(1))
    train(old, scale(task.train.inputs), task.train.targets, 2 * epochs, seed=1)
    stages.append({"stage": BEFORE, "arm": "gradient-clipping"} | measure(old))
    recipe = calibrate(
        lambda sigma: GradientClipping(
            start_clip=0.05, grad_clip=1.0, learning_rate=0.01, weight_decay=10.0, steps=20,
            noise_std=sigma,
        ),
        epsilon=0.99, delta=1e-5,
    )  # fmt: skip
    batches = list(zip(inputs.split(BATCH), targets.split(BATCH), strict=True))
    run: Any = None
    for arm, start in (("centre", "centre"), ("gradient-clipping", "model")):
        run = unlearn(
            old, batches, recipe, loss_fn=nn.functional.cross_entropy, noise=SystemNoise(),
            start=start, forget_ids=forgotten.ids.tolist(), retain_ids=retained.ids.tolist(),
            centre="zero",
        )  # fmt: skip
        stages.append({"stage": AFTER_NOISE, "arm": arm} | measure(run.model))
        spent = train(run.model, inputs, targets, epochs, 2, follow(f"{arm}, fine-tuned"))
        stages.append({"stage": AFTER_TUNING, "arm": arm} | measure(run.model))
        total = spent + run.record.gradient_evaluations
        found = guarantee(run.record.recipe, delta=1e-5, execution=run.record.execution)
        arms.append(
            {"arm": arm, "epsilon": found.epsilon, "delta": 1e-5, "gradient_evaluations": total}
            | measure(run.model)
        )
    fresh = dense_net((64, 32, 10), torch.Generator().manual_seed(3))
    spent = train(fresh, inputs, targets, 2 * epochs, 3, follow("retraining"))
    stages.append({"stage": AFTER_TUNING, "arm": "retraining"} | measure(fresh))
    arms.append(
        {"arm": "retraining", "epsilon": 0.0, "delta": 0.0, "gradient_evaluations": spent}
        | measure(fresh)
    )
    record = dataclasses.replace(
        run.record,
        weights_after=hash_weights(run.model.state_dict()),
        finetune=FineTuning(
            optimizer="SGD, momentum 0.9 from zero", epochs=epochs, steps=epochs * len(batches),
            learning_rate=RATE, batch_size=BATCH, schedule="constant",
            gradient_evaluations=epochs * len(inputs), data=commit(retained.ids.tolist()),
        ),
    )  # fmt: skip
    certificate = certify(record, delta=1e-5)
    if signed:
        private, public = generate_key_pair()
        certificate = certificate.sign(private)
        (folder / "operator.pem").write_bytes(public)
    metrics = {
        "title": "Handwritten digits: 130 of 1,300 examples forgotten",
        "task": "scikit-learn’s digits, 64-32-10 network, ten classes",
        "stages": stages, "curves": curves, "arms": arms,
    }  # fmt: skip
    save_weights(
        folder / "model.safetensors", run.model.state_dict(), certificate.safetensors_metadata()
    )
    record.save(folder / "record.json")
    certificate.save(folder / "certificate.json")
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")
    return folder


def picture(page: Path, target: Path, scratch: Path) -> None:
    """The top of both parts of the page, side by side."""
    from PIL import Image

    text = page.read_text(encoding="utf-8")
    second = scratch / "second.html"
    head, rest = text.index("<body>") + 6, text.index('<section aria-labelledby="engineer">')
    second.write_text(text[:head] + "<main>" + text[rest:], encoding="utf-8")
    parts: list[Image.Image] = []
    for shown in (page, second):
        shot = scratch / f"shot{len(parts)}.png"
        launch_chromium(
            scratch / f"profile{len(parts)}", "--window-size=1080,1560", f"--screenshot={shot}",
            shown.as_uri(),
        )  # fmt: skip
        parts.append(Image.open(shot).convert("RGB"))
    width, height = parts[0].size
    both = Image.new("RGB", (2 * width + 8, height), "#8a949e")
    for place, part in enumerate(parts):
        both.paste(part, (place * (width + 8), 0))
    small = both.resize((both.width * 7 // 10, both.height * 7 // 10), Image.Resampling.LANCZOS)
    small.quantize(256, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE).save(
        target, optimize=True
    )


def main() -> None:
    target = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        picture(write_report(make_real_run(folder)), target, folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
