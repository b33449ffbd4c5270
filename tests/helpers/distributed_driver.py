"""What the processes of the distributed tests do; every rank writes its findings as JSON.

Started once with two ranks: ``distributed_driver.py FOLDER``, with the environment of torchrun.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from engine import GRADIENT, MODEL, NOISY, flatten, make_mlp
from expunge import certify
from expunge.errors import ExpungeError
from expunge.noisy.checkpoint import Checkpoint
from expunge.noisy.noise import NoiseStream, SeededNoise, SystemNoise
from expunge.noisy.run import unlearn
from expunge.noisy.sharded_vector import ShardedNoise, Span
from expunge.noisy.team import Team
from expunge.noisy.vector import GridVector
from expunge.processes.group import Processes, find_processes
from expunge.processes.weights import hash_together, hash_weights, save_together
from expunge.training.batches import Batches

COUNT = 43  # batches of 8: the last has 3, so its shares are uneven


class StopError(Exception):
    pass


def load_data():
    g = torch.Generator().manual_seed(3)
    return torch.randn(COUNT, 6, generator=g), torch.randint(0, 3, (COUNT,), generator=g)


def make_loader(kind="memory", count=COUNT):
    x, y = (t[:count] for t in load_data())
    generator = torch.Generator().manual_seed(5)
    if kind == "memory":
        return Batches(x, y, batch_size=8, generator=generator)
    if kind == "list":
        return list(zip(x.split(8), y.split(8), strict=True))
    return DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True, generator=generator)


def shard(model, mesh):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def gather(model) -> torch.Tensor:
    parts = [p.detach().full_tensor().reshape(-1).double() for p in model.parameters()]
    return torch.cat(parts)


def go(model, recipe=GRADIENT, loader=None, noise=None, **options):
    loader = make_loader() if loader is None else loader
    noise = SeededNoise(1) if noise is None else noise
    given = {"loss_fn": cross_entropy, "noise": noise, "centre": "zero"} | options
    return unlearn(model, loader, recipe, **given)


class Drawn:
    """All noise that a run draws, by (step, position)."""

    def __enter__(self):
        self.values, self.before = {}, NoiseStream.draw
        values, before = self.values, self.before

        def draw(stream, out, *, step, position, std):
            before(stream, out, step=step, position=position, std=std)
            for i, row in enumerate(np.atleast_2d(out)):
                for j, value in enumerate(row.tolist()):
                    values[f"{step + i},{position + j}"] = value

        NoiseStream.draw = draw
        return self

    def __exit__(self, *_):
        NoiseStream.draw = self.before


def compare_with_one(mesh) -> dict:
    """Every recipe, replicated and sharded, against one process; and the noise itself."""
    found = {}
    for name, recipe in NOISY.items():
        with Drawn() as alone:
            one = go(make_mlp(), recipe, distributed=False)
        with Drawn() as copied:
            two = go(make_mlp(), recipe, distributed=find_processes(True, check_every=2))
        with Drawn() as own:
            three = find_processes(True, check_every=3)
            parts = go(shard(make_mlp(), mesh), recipe, distributed=three)
        noise = [
            {k: v for k, v in drawn.values.items() if int(k.split(",")[0]) <= len(one.record.trace)}
            for drawn in (alone, copied, own)
        ]
        a = one.record.parameters
        found[name] = {
            "replicated": float((flatten(one.model) - flatten(two.model)).abs().max()),
            "sharded": float((flatten(one.model) - gather(parts.model)).abs().max()),
            "scale": float(flatten(one.model).abs().max()),
            "noise_norms": [list(run.record.trace.noise_norm) for run in (one, two, parts)],
            "noise_same": noise[0] == noise[1],
            "noise_alone": noise[0],
            "noise_own": noise[2],
            "parameters": [run.record.parameters for run in (one, two, parts)] == [a] * 3,
            "evaluations": len({r.record.gradient_evaluations for r in (one, two, parts)}) == 1,
            "before": len({run.record.weights_before for run in (one, two, parts)}) == 1,
            "certificates": [
                certify(run.record, delta=1e-5).model_dump(mode="json") for run in (one, two, parts)
            ],
            "processes": [run.record.processes for run in (one, two, parts)],
            "digests": [two.record.digest(), parts.record.digest()],
        }
    return found


def compare_loaders() -> dict:
    """The same batches however they are read, and batches of fewer examples than processes."""
    found = {}
    for kind in ("loader", "list"):
        one = go(make_mlp(), MODEL, make_loader(kind), distributed=False)
        two = go(make_mlp(), MODEL, make_loader(kind))
        found[kind] = float((flatten(one.model) - flatten(two.model)).abs().max())
    one = go(make_mlp(), MODEL, make_loader(count=17), distributed=False)
    two = go(make_mlp(), MODEL, make_loader(count=17))
    found["one left"] = float((flatten(one.model) - flatten(two.model)).abs().max())
    centre = {name: torch.full_like(t, 0.1) for name, t in make_mlp().state_dict().items()}
    mesh = init_device_mesh("cpu", (2,))
    one = go(make_mlp(), centre=centre, distributed=False)
    two = go(shard(make_mlp(), mesh), centre=centre)
    found["centre"] = float((flatten(one.model) - gather(two.model)).abs().max())
    found["same centre"] = one.record.centre == two.record.centre
    return found


def compare_files(mesh, folder: Path, processes: Processes) -> dict:
    """One hash for a model, whole or in shards, in memory or in files."""
    model = shard(make_mlp(), mesh)
    whole = hash_weights(make_mlp().state_dict())
    (folder / "shards").mkdir(exist_ok=True)
    save_together(folder / "shards", model.state_dict(), {"format": "pt"}, processes)
    return {"whole": whole, "together": hash_together(model.state_dict(), processes)}


def resume(mesh, folder: Path) -> dict:
    """Stopped after three steps and resumed: the same run, another key, recorded."""
    found = {}
    for name in ("replicated", "sharded"):

        def make(name=name):
            model = make_mlp(dropout=0.2)
            return shard(model, mesh) if name == "sharded" else model

        path = folder / f"checkpoint-{name}"

        def stop(done, _):
            if done == 3:
                raise StopError

        torch.manual_seed(7 + dist.get_rank())
        try:
            go(make(), on_step=stop, checkpoint=Checkpoint(path, 0.0))
        except StopError:
            dist.barrier()
        resumed = go(make(), checkpoint=Checkpoint(path, 0.0, resume=True))
        torch.manual_seed(7 + dist.get_rank())
        whole = go(make(), checkpoint=Checkpoint(folder / f"other-{name}", 0.0))
        pair = [r.model.state_dict() for r in (resumed, whole)]
        if name == "sharded":
            pair = [{k: t.to_local() for k, t in state.items()} for state in pair]
        found[name] = {
            "same": all(torch.equal(pair[0][k], pair[1][k]) for k in pair[0]),
            "trace": resumed.record.trace == whole.record.trace,
            "resumed": [resumed.record.resumed, resumed.record.noise_keys],
            "left": sorted(p.name for p in path.iterdir()),
        }
        try:
            go(make(), MODEL, checkpoint=Checkpoint(path, resume=True))
        except ExpungeError as error:
            found[name]["other"] = str(error)
    return found


def refuse(what, **options) -> str:
    try:
        go(make_mlp(), distributed=find_processes(True, check_every=1), **options)
    except ExpungeError as error:
        return f"{what}: {error}"
    return f"{what}: not noticed"


def disagree(rank: int) -> list[str]:
    """Ranks that should agree and do not, one way after another."""
    told = [refuse("nothing")]
    told.append(refuse("recipe", recipe=MODEL if rank == 1 else GRADIENT))
    torch.manual_seed(0)

    check, take, begin = Team.check, Team.take_key, Team.begin

    def bend(team, done, last, columns, cycle, vector):
        if rank == 1 and done == 2:
            vector.parameters[0].view(-1)[0].nextafter_(torch.tensor(9.0))
        check(team, done, last, columns, cycle, vector)

    Team.check = bend
    told.append(refuse("one bit of one weight"))
    Team.check = check

    def other_key(team, noise):
        stream = take(team, noise)
        return NoiseStream(bytes(32)) if rank == 1 else stream

    Team.take_key = other_key
    told.append(refuse("another key"))
    Team.take_key = take

    def other_torch(team, facts, noise):
        mixed = facts["versions"] | ({"torch": "2.0.0"} if rank == 1 else {})
        begin(team, dict(facts) | {"versions": mixed}, noise)

    Team.begin = other_torch
    told.append(refuse("versions"))
    Team.begin = begin
    x, y = load_data()
    told.append(refuse("batch", loader=Batches(x, y, batch_size=9)))
    told.append(refuse("few", loader=Batches(x[:1], y[:1], batch_size=2)))
    norm = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    try:
        go(norm, buffers="reset")
        told.append("buffers: not noticed")
    except ExpungeError as error:
        told.append(f"buffers: {error}")
    return told


def correlate(mesh, wrong: bool) -> float:
    """The correlation of two shards' noise, in standard errors; ``wrong`` draws by local place."""
    take = ShardedNoise.__init__

    def local(self, stream, levels, spans, longest):
        own = [Span(span.local, span.local, span.length) for span in spans]
        take(self, stream, levels, own, longest)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1000), nn.ReLU(), nn.Linear(1000, 3))
    held, step = [], GridVector._finish

    def finish(vector, chunk, update, square):
        before = chunk.cells.clone()
        noise = step(vector, chunk, update, square)
        held.append((chunk.cells - before).reshape(-1))
        return noise

    GridVector._finish = finish
    if wrong:
        ShardedNoise.__init__ = local
    try:
        go(shard(model, mesh), MODEL, noise=SystemNoise())
    finally:
        GridVector._finish, ShardedNoise.__init__ = step, take
    own = torch.cat(held).reshape(MODEL.steps, -1)
    parts = find_processes(True).gather(own.numpy())
    shortest = min(part.shape[1] for part in parts)
    first, second = (part[:, :shortest].reshape(-1) for part in parts)
    return float(np.corrcoef(first, second)[0, 1] * first.size**0.5)


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (2,))
    processes = find_processes(True)
    report = {
        "runs": compare_with_one(mesh),
        "loaders": compare_loaders(),
        "files": compare_files(mesh, folder, processes),
        "resume": resume(mesh, folder),
        "told": disagree(rank),
        "correlation": correlate(mesh, wrong=False),
        "wrong": correlate(mesh, wrong=True),
    }
    (folder / f"report-{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
