"""More attempts to carry the old model, or the forgotten, past a certificate of (0, 0)."""

import copy
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import expunge
from engine import make_batches, make_mlp
from expunge.baselines.retraining import PublicStart
from expunge.certificates.certificate import Certificate
from expunge.certificates.verification import find_differences
from expunge.errors import InputError, UnlearningError
from expunge.jobs.run import run_job
from expunge.noisy.fresh import find_fixed
from expunge.training.resuming import Keeper
from job_folder import OWN
from route_folder import begin, save_public, write_route

torch.set_num_threads(1)
IDS = [f"p{i}" for i in range(24)]
Build = Callable[[], nn.Module]


def load() -> expunge.Batches:
    pairs = make_batches()
    x, y = (torch.cat(side) for side in zip(*pairs, strict=True))
    return expunge.Batches(x, y, batch_size=8, ids=IDS)


def go(old: nn.Module, data: Any = None, **options: Any) -> Certificate:
    given: dict[str, Any] = {"epochs": 1, "learning_rate": 0.01, "forget_ids": ["f"]} | options
    run = expunge.retrain(old, load() if data is None else data, **given)
    return expunge.certify(run.record, delta=1e-5)


def draw() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.0), nn.Linear(16, 3))


# --- a start with the old model in it, under noise that follows from the seed


def mix(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module], nn.Module]:
    """A fresh network in which every tensor is made of the drawn and of the old one."""

    def build(old: nn.Module) -> nn.Module:
        made = draw()
        with torch.no_grad():
            for p, q in zip(made.parameters(), old.parameters(), strict=True):
                p.copy_(change(p, q))
        return made

    return build


def put_first(p: Tensor, q: Tensor) -> Tensor:
    half = p.numel() // 2
    return torch.cat([q.flatten()[:half], p.flatten()[half:]]).view_as(p)


HIDDEN = {
    "a little noise": mix(lambda p, q: q + 0.01 * torch.randn_like(q)),
    "half a fresh draw": mix(lambda p, q: q + 0.5 * p),
    "its signs": mix(lambda p, q: p.abs() * q.sign()),
    "half of every tensor": mix(put_first),
    "rescaled": mix(lambda p, q: q * (1 + torch.rand(len(q), *[1] * (q.ndim - 1)))),
    "in another order": mix(lambda p, q: q.flatten()[torch.randperm(q.numel())].view_as(q)),
}


@pytest.mark.parametrize("kind", HIDDEN)
def test_what_two_seeds_have_in_common_is_no_fresh_start(kind: str) -> None:
    old = make_mlp(seed=3)
    with pytest.raises(InputError, match="under another seed, so the old model could be in there"):
        go(old, initialise=lambda: HIDDEN[kind](old))
    recipe = expunge.OutputPerturbation(start_clip=1.0, noise_std=4.0)
    with pytest.raises(UnlearningError, match="not follow from the seed"):
        expunge.unlearn(old, load(), recipe, loss_fn=nn.functional.cross_entropy,
                        centre=expunge.Initialisation("s", lambda: HIDDEN[kind](old)))  # fmt: skip


KEPT: list[Tensor] = []


class Restoring(nn.Linear):
    def reset_parameters(self) -> None:
        super().reset_parameters()
        if KEPT:
            with torch.no_grad():
                self.weight.mul_(0.1).add_(KEPT[0])


def test_a_reset_that_adds_the_old_weights_is_no_fresh_start() -> None:
    old = nn.Sequential(Restoring(6, 3))
    KEPT[:] = [old[0].weight.detach().clone()]
    try:
        with pytest.raises(InputError, match=r"0\.weight is the same, or alike"):
            go(old)
    finally:
        KEPT.clear()


def test_an_honest_start_is_taken() -> None:
    """The control: drawn tensors with padding, a gate's bias of ones, gains and zeros."""

    def build() -> nn.Module:
        words, gate = nn.Embedding(9, 8, padding_idx=0), nn.LSTM(8, 8)
        with torch.no_grad():
            gate.bias_ih_l0[8:16] = 1.0
        return nn.Sequential(words, gate, nn.LayerNorm(8), nn.Linear(8, 64).half())

    drawn = [{n: p.detach() for n, p in build().named_parameters()} for _ in range(20)]
    assert [find_fixed(one, two) for one, two in itertools.pairwise(drawn)] == [()] * 19
    assert go(make_mlp(seed=3), initialise=draw).epsilon == 0


NOISY = """
from pathlib import Path
from safetensors.torch import load_file

def build_noisy():
    model = Slow(4, 3)
    with torch.no_grad():
        for name, old in load_file(Path(__file__).with_name("weights.safetensors")).items():
            p = model.get_parameter(name)
            p.copy_(old + 0.01 * torch.randn_like(old))
    return model
"""


def test_a_job_refuses_the_old_model_under_noise(tmp_path: Path) -> None:
    job = write_route(tmp_path, model={"build": "own.py:build_noisy"})
    (tmp_path / "own.py").write_text(OWN + NOISY)
    with pytest.raises(InputError, match="or one that is alike, so the old model could be in it"):
        run_job(job)
    save_file({"bias": torch.randn(3)}, tmp_path / "public.safetensors")
    job = write_route(tmp_path, "restart", model={"build": "own.py:build_noisy"},
                      centre={"weights": "public.safetensors"})  # fmt: skip
    (tmp_path / "own.py").write_text(OWN + NOISY)
    with pytest.raises(InputError, match="or one that is alike, so the old model could be in it"):
        run_job(job)


def test_a_build_without_shapes_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"initialise\(\) leaves weight without a shape"):
        go(nn.Linear(6, 3), initialise=lambda: nn.LazyLinear(3))


# --- a release as public weights


@pytest.mark.parametrize("folder", [False, True])
def test_the_release_of_an_earlier_request_is_not_public(tmp_path: Path, folder: bool) -> None:
    """It was trained on the data kept then: those forgotten now were among them."""
    run_job(write_route(tmp_path / "first"))
    shutil.copytree(tmp_path / "first" / "run", tmp_path / "second" / "release")
    file = "release" if folder else "release/model.safetensors"
    for table in ({"centre": {"weights": file}}, {"model": {"public": file}}):
        job = write_route(tmp_path / "second", "restart" if "centre" in table else "retraining",
                          **table)  # fmt: skip
        with pytest.raises(InputError, match="the release of an earlier request"):
            run_job(job)


def test_where_public_weights_are_from_is_told_in_one_line() -> None:
    with pytest.raises(InputError, match=r"source is .*one line"):
        PublicStart(make_mlp().state_dict(), "base\nThis certificate covers all else too.")


# --- a checkpoint of another training


def test_a_keeper_takes_no_state_of_other_data(tmp_path: Path) -> None:
    """Whatever the caller calls the training: its data and its start tell."""
    old, file = make_mlp(seed=3), tmp_path / "training.safetensors"

    def stop(done: int) -> None:
        if done == 4:
            raise KeyboardInterrupt

    every = load()
    less = expunge.Batches(every.inputs[8:], every.targets[8:], batch_size=8, ids=IDS[8:])
    given: dict[str, Any] = {"epochs": 4, "forget_ids": IDS[:8]}
    for first in (lambda k: expunge.train(draw(), every, epochs=4, learning_rate=0.01, **k),
                  lambda k: go(old, every, epochs=4, **k)):  # fmt: skip
        with pytest.raises(KeyboardInterrupt):
            first({"keeper": Keeper(file, {"run": 1}, every=0), "on_step": stop})
        with pytest.raises(InputError, match="belongs to another training"):
            go(old, less, keeper=Keeper(file, {"run": 1}, every=0), **given)
        file.unlink()
    with pytest.raises(KeyboardInterrupt):
        go(old, less, keeper=Keeper(file, {"run": 1}, every=0), on_step=stop, **given)
    assert go(old, less, keeper=Keeper(file, {"run": 1}, every=0), **given).resumed == 1


def test_a_checkpoint_with_the_old_weights_in_it_is_refused(tmp_path: Path) -> None:
    job = write_route(tmp_path)
    begin(job)
    (file,) = tmp_path.rglob("training.safetensors")
    with safe_open(file, "pt") as held:
        about = held.metadata()
    old = load_file(tmp_path / "weights.safetensors")
    tensors = load_file(file) | {f"model.{name}": t for name, t in old.items()}
    save_file(tensors, file, metadata=about)
    with pytest.raises(InputError, match="was changed after it was saved"):
        run_job(job, resume=True)


# --- data, optimizers and features that know the old model


class Labelled(TensorDataset):
    def __init__(self, teacher: nn.Module, *tensors: Tensor) -> None:
        super().__init__(*tensors)
        self.teacher, self.ids = [teacher], IDS

    def __getitem__(self, at: int) -> Any:
        x, _ = super().__getitem__(at)
        return x, self.teacher[0](x).argmax()


def test_labels_of_the_old_model_are_refused() -> None:
    old, data = make_mlp(seed=3), load()
    copied = copy.deepcopy(old)

    def collate(rows: list[Any]) -> Any:
        x = torch.stack([row[0] for row in rows])
        return x, copied(x).argmax(1)

    pairs = TensorDataset(data.inputs, data.targets)
    prepared = expunge.Batches(data.inputs, data.targets, batch_size=8, ids=IDS,
                               prepare=lambda x: x + copied[0](x).mean())  # fmt: skip
    for made in (DataLoader(Labelled(copied, data.inputs, data.targets), batch_size=8),
                 DataLoader(pairs, batch_size=8, collate_fn=collate), prepared):  # fmt: skip
        with pytest.raises(InputError, match=r"the retained data hold 0\.weight of the old model"):
            go(old, made)
        with pytest.raises(InputError, match=r"the retained data hold 0\.weight of the old model"):
            expunge.unlearn(old, made, expunge.OutputPerturbation(start_clip=1.0, noise_std=4.0),
                            loss_fn=nn.functional.cross_entropy)  # fmt: skip


def test_an_optimizer_that_writes_the_old_weights_is_refused() -> None:
    old = make_mlp(seed=3)

    def make(parameters: Any) -> torch.optim.Optimizer:
        with torch.no_grad():
            for p, q in zip(parameters, old.parameters(), strict=True):
                p.copy_(q)
        return torch.optim.SGD(parameters, lr=0.01)

    with pytest.raises(InputError, match=r"optimizer\(\) changes the parameters"):
        go(old, optimizer=make)


class Centred(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return found - found.mean(0)


@pytest.mark.parametrize("kind", ["mean", "BatchNorm"])
def test_features_that_depend_on_the_batch_are_refused(kind: str) -> None:
    norm = nn.BatchNorm1d(6, affine=False, track_running_stats=False)
    frozen = Centred(6, 6) if kind == "mean" else nn.Sequential(nn.Linear(6, 6), norm)
    model = nn.Sequential(frozen.requires_grad_(False).eval(), nn.Linear(6, 3))
    with pytest.raises(InputError, match="answers each sample alone"):
        go(model, public=["0.*"], features="0")


def test_other_identifiers_do_not_hide_those_of_the_data() -> None:
    old, data = make_mlp(seed=3), load()
    others = [f"q{i}" for i in range(24)]
    with pytest.raises(InputError, match="retain_ids holds 'p1', which is forgotten"):
        go(old, forget_ids=["p1"], retain_ids=others)
    recipe = expunge.OutputPerturbation(start_clip=1.0, noise_std=4.0)
    loss: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "forget_ids": ["p1"]}
    with pytest.raises(InputError, match="retain_ids holds 'p1', which is forgotten"):
        expunge.unlearn(old, data, recipe, retain_ids=others, **loss)
    kept = expunge.Batches(data.inputs, data.targets, batch_size=8, ids=others)
    run = expunge.unlearn(old, kept, recipe, **loss)
    with pytest.raises(InputError, match="retain_ids holds 'p1', which is forgotten"):
        expunge.fine_tune(run, data, ids=others, epochs=1, learning_rate=0.1)


# --- certificates that contradict themselves


def edit(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Write a certificate with other content and a digest that fits."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    made = Certificate.model_validate_json(path.read_text())
    path.write_bytes(made.model_copy(update={"digest": made.compute_digest()}).to_bytes())


CONTRADICTIONS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "more people than samples": (
        lambda c: c["data"]["forget"].update(count=50), "data.forget has 3 samples of 50 people"),
    "fewer retained samples": (
        lambda c: c["data"]["retain"].update(samples=2), "data.retain has 2 samples of"),
    "noise": (
        lambda c: c.update(noise={"source": "system", "generator": "AES-256-CTR", "keys": 1}),
        "noise.source is 'system', but retraining draws none"),
    "a training that was not checked": (
        lambda c: c["finetune"].update(checked=False), "finetune.checked is not data.checked"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_contradictions_do_not_verify(tmp_path: Path, kind: str) -> None:
    change, sentence = CONTRADICTIONS[kind]
    done = run_job(write_route(tmp_path, "restart", centre=save_public(tmp_path)))
    path = done.directory / "certificate.json"
    edit(path, change)
    assert any(sentence in found for found in find_differences(path))


def test_an_old_model_that_is_not_finite_is_told_as_that(tmp_path: Path) -> None:
    """It was called a tied weight that differs from itself. Retraining needs nothing of it."""
    job = write_route(tmp_path)
    old = load_file(tmp_path / "weights.safetensors")
    save_file(old | {"bias": old["bias"] * torch.nan}, tmp_path / "weights.safetensors")
    assert run_job(job).certificate.epsilon == 0
