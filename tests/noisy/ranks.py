"""One of two processes of a run: ``python -m tests.noisy.ranks FOLDER RANK`` writes a report."""

import hashlib
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from expunge import ExpungeError, SystemNoise, Training
from expunge.noisy.steps import Steps
from tests.noisy import networks


def describe(release) -> dict:
    flat = networks.flatten(release).contiguous()
    return {
        "weights": flat.tolist(), "digest": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "noise": release.record.trace.noise_norm, "certificate": release.certificate.sha256,
        "processes": release.certificate.environment.processes,
        "epsilon": release.certificate.epsilon,
    }  # fmt: skip


def refuse(**options) -> str:
    try:
        networks.run(**options)
    except ExpungeError as error:
        return f"{type(error).__name__}: {error}"
    return "not noticed"


def bend(rank: int) -> str:
    """One coordinate of one rank moves."""
    step = Steps._step

    def bent(self, t, batches, whole):
        step(self, t, batches, whole)
        if t == 3 and rank == 1:
            self.vector.cells[5] += 1 << 20

    Steps._step = bent
    try:
        return refuse()
    finally:
        Steps._step = step


def train(**options) -> list[float]:
    """The built-in training, which shares every batch."""
    model, (x, y) = networks.make_old(norm=True), networks.make_rows()
    train = Training(epochs=3, batch_size=8, clip_norm=1.0, **options)
    train(model, (x, y), seed=0, validation=(x, y))
    return [value for t in model.state_dict().values() for value in t.double().flatten().tolist()]


def train_plain() -> list[float]:
    model = networks.make_old()
    Training(epochs=3, batch_size=9, optimizer="adam")(model, networks.make_rows(), seed=0)
    return [value for t in model.state_dict().values() for value in t.double().flatten().tolist()]


def stop_and_resume(folder: Path):
    seen = SimpleNamespace(count=0)

    def loss(output, target):
        seen.count += 1
        if seen.count == 4:
            raise KeyboardInterrupt
        return cross_entropy(output, target)

    try:
        networks.run(loss=loss, resume=folder / "state")
    except KeyboardInterrupt:
        dist.barrier()
    return networks.run(loss=loss, resume=folder / "state")


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, y = networks.make_rows()
    other = networks.make_data((x + rank, y))
    resumed = stop_and_resume(folder)
    report = {
        "runs": {
            name: describe(networks.run(recipe=recipe)) for name, recipe in networks.NOISY.items()
        },
        "system": describe(
            networks.run(noise=SystemNoise(), build=lambda: networks.make_mlp(dropout=0.3))
        ),
        "single rows": describe(networks.run(batch_size=1)),
        "norm": describe(networks.run(build=lambda: networks.make_mlp(norm=True), strict=False)),
        "resumed": describe(resumed) | {"count": resumed.record.resumed},
        "trained": train_plain(),
        "early stopping": train(patience=1, learning_rate=3.0),
        "refused": {
            "recipe": refuse(recipe=networks.MODEL if rank else networks.GRADIENT),
            "data": refuse(data=other),
            "one rank": refuse(recipe=replace(networks.GRADIENT, noise_std=1e-9 if rank else 0.3)),
            "bent": bend(rank),
        },
    }
    (folder / f"{rank}.json").write_text(json.dumps(report))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may abort an interpreter that is taken down around them


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
