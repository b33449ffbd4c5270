"""Two processes unlearn, fine-tune and measure as one would; prints a JSON line of each rank."""

import json
import os
import socket
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from engine import GRADIENT, flatten, make_mlp
from expunge import Batches, SeededNoise, fine_tune, unlearn
from expunge.processes.group import find_processes
from expunge.training.evaluation import measure


def make_data():
    g = torch.Generator().manual_seed(3)
    x, y = torch.randn(22, 6, generator=g), torch.arange(22) % 3
    order = torch.Generator().manual_seed(1)
    return Batches(x, y, batch_size=8, generator=order, ids=[f"r{i}" for i in range(22)])


def go(*, shard=False, alone=False):
    model, processes = make_mlp(), find_processes(False if alone else None)
    if shard:
        fully_shard(model)
    given = {"loss_fn": cross_entropy, "noise": SeededNoise(0), "forget_ids": ["f"]}
    given["centre"] = "zero"
    run = unlearn(model, make_data(), GRADIENT, distributed=processes, **given)
    tuned = fine_tune(run, make_data(), epochs=2, learning_rate=0.1, processes=processes)
    return tuned, measure(tuned.model, make_data(), cross_entropy, processes)


def work(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    one, expected = go(alone=True)
    for shard in (False, True):
        tuned, found = go(shard=shard)
        whole = [getattr(p, "full_tensor", lambda p=p: p)() for p in tuned.model.parameters()]
        flat = torch.cat([p.detach().reshape(-1) for p in whole])
        told = {
            "apart": float((flat - flatten(one.model)).abs().max()),
            "loss": [found.loss, expected.loss],
            "count": found.count,
            "steps": tuned.record.finetune.steps,
            "checked": tuned.record.finetune.checked,
            "record": tuned.record.digest(),
        }
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        chosen = str(free.getsockname()[1])
    mp.spawn(work, (chosen,), nprocs=2)
