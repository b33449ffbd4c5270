"""Retraining under torchrun, by people's own functions: DDP, FSDP2, the built-in training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import expunge

dist.init_process_group("gloo")
kind, out = sys.argv[1:]
X = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
data = expunge.Data((X, (X[:, 0] > 0).long()), ids=[f"user-{i % 8}" for i in range(40)])

def build():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2))

def train(model, examples, seed):
    if kind == "ddp":
        model = DistributedDataParallel(model)
    if kind == "fsdp":
        fully_shard(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(5):
        optimizer.zero_grad()
        x, y = (column[rank::size] for column in examples)
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model

how = expunge.Training(epochs=2, batch_size=16) if kind == "built-in" else train
release = expunge.retrain(build, data, forget=["user-3"], train=how)
open(f"{out}.{dist.get_rank()}", "w").write(release.certificate.sha256)
if dist.get_rank() == 0:
    release.save(out)
if kind == "ddp":
    assert type(release.model) is nn.Sequential  # as build() gave it, without the wrapper
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may abort an interpreter that is taken down around them
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "built-in"])
def test_two_processes_give_one_release(kind, tmp_path):
    import expunge

    program = tmp_path / "own.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += [str(program), kind, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
    assert done.returncode == 0, done.stderr[-3000:]
    found = expunge.verify(tmp_path / "run")
    both = {(tmp_path / f"run.{rank}").read_text() for rank in range(2)}
    assert both == {found.certificate.sha256}
    assert found.certificate.environment.processes == 2
    from safetensors.torch import load_file

    tensors = load_file(tmp_path / "run" / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {
        "0.weight": (16, 6), "0.bias": (16,), "2.weight": (2, 16), "2.bias": (2,),
    }  # fmt: skip
