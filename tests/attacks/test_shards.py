"""Attempts to bring a forgotten person back through shards; each must fail."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from expunge import (
    Certificate,
    CertificateError,
    InputError,
    Run,
    RunRecord,
    ShardedTraining,
    Shards,
    UnlearningError,
    VerificationError,
    certify,
    verify,
    write_run,
)
from expunge.forgettable.constituents import _KEY
from expunge.forgettable.slices import Examples
from expunge.processes.weights import hash_weights, save_weights
from expunge.training.train import train
from shard_ensembles import OPTIONS, SEED, build, learn, make, make_data


def test_a_requester_who_deletes_what_the_ensemble_says_about_them() -> None:
    """Requests chosen from released models: there is no randomness left to exploit."""
    ensemble, (x, y, ids), gone = make(), make_data(), set()
    learn(ensemble)
    run = ensemble.release()
    for _ in range(4):
        left = [i for i, name in enumerate(ids) if name not in gone]
        scores = nn.functional.cross_entropy(run.model(x[left]), y[left], reduction="none")
        worst = ids[left[int(scores.argmax())]]
        gone.add(worst)
        run = ensemble.forget([worst])
    never = make()
    learn(never, lambda name: name not in gone)
    assert run.record.weights_after == never.release().record.weights_after


def test_an_assignment_by_position_would_move_others_and_ours_does_not() -> None:
    ensemble, ids = make(), make_data()[2]
    assignment = ensemble.plan.assignment
    before = {name: assignment.find_place(assignment.name(name)) for name in ids}
    by_position = {name: (i % 3, i // 3 % 2) for i, name in enumerate(ids)}
    rest = ids[1:]
    moved = {name: (i % 3, i // 3 % 2) for i, name in enumerate(rest)}
    assert any(moved[name] != by_position[name] for name in rest), "what SISA's code does"
    assert all(assignment.find_place(assignment.name(name)) == before[name] for name in rest)


def test_checkpoints_put_back_from_before_are_not_used(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ensemble, never = make(state=state), make()
    learn(ensemble)
    shutil.copytree(state / "checkpoints", tmp_path / "old")
    ensemble.forget(["user-4"])
    shutil.rmtree(state / "checkpoints")
    shutil.copytree(tmp_path / "old", state / "checkpoints")
    learn(never, lambda name: name != "user-4")
    again = make(state=state).release()
    assert again.record.weights_after == never.release().record.weights_after


def test_an_old_checkpoint_with_a_forged_lineage_is_found_by_training_again(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ensemble = make(state=state)
    learn(ensemble)
    shutil.copytree(state / "checkpoints", tmp_path / "old")
    certificate = certify(ensemble.forget(["user-4"]).record, delta=1e-5)
    ensemble.check(certificate)
    assignment = ensemble.plan.assignment
    shard, _ = assignment.find_place(assignment.name("user-4"))
    name = f"{shard:03x}-{assignment.slices - 1:03x}"
    raw = (state / "checkpoints" / name).read_bytes()
    told = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    old = safetensors.torch.load_file(tmp_path / "old" / name)
    file = state / "checkpoints" / name
    file.write_bytes(safetensors.torch.save(old, told))
    forged = make(state=state).release()
    assert forged.record.weights_after == certificate.weights.after, "stale, so trained again"
    whole = json.loads(told[_KEY])
    whole["hash"] = hash_weights(old)
    file.write_bytes(safetensors.torch.save(old, {_KEY: json.dumps(whole, sort_keys=True)}))
    smuggled = certify(make(state=state).release().record, delta=1e-5)
    with pytest.raises(VerificationError, match=f"constituent {shard} trained again is"):
        make(state=state).check(smuggled)


def test_the_old_model_as_the_start_of_every_constituent() -> None:
    old = build()
    x, y, _ = make_data()
    train(old, [(x, y)], epochs=20, learning_rate=0.5)

    def same() -> nn.Module:
        net = build()
        net.load_state_dict(old.state_dict())
        return net

    def nearly() -> nn.Module:
        net = same()
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1 * p.std() * torch.randn_like(p))
        return net

    def shared() -> nn.Module:
        return old

    for start in (same, nearly, shared):
        with pytest.raises(InputError, match=r"build\(\) does not draw 0.weight"):
            learn(make(build=start))
    with pytest.raises(InputError, match=r"0\.weight of build"):
        learn(make(build=same, public=build().state_dict()))


def test_one_network_for_all_constituents_would_carry_one_to_the_next() -> None:
    built: list[nn.Module] = []

    def once() -> nn.Module:
        """Fresh under the first two seeds that are compared, one module ever after."""
        if len(built) < 4:
            built.append(build())
        return built[-1]

    with pytest.raises(InputError, match="gives other weights when it is called again"):
        learn(make(build=once))


def test_an_augmentation_that_remembers_other_shards() -> None:
    seen: list[Tensor] = []

    def mix(inputs: Tensor, generator: torch.Generator) -> Tensor:
        mixed = inputs + 0.1 * sum((x.mean(0) for x in seen), torch.zeros(16))
        seen.append(inputs.clone())
        return mixed

    with pytest.raises(InputError, match="training gives other weights when it is run again"):
        learn(make(augment=mix))


def test_what_a_training_function_leaves_on_the_module_stays_behind() -> None:
    """Only parameters and buffers go from one stage to the next, and into the release."""

    def leave(model: nn.Module, data: Examples, seed: int) -> None:
        carried = getattr(model, "carried", None)
        assert carried is None, "the module of a stage is built anew"
        model.carried = data.inputs.clone()
        train(model, data, epochs=1, learning_rate=0.1, seed=seed)

    ensemble = Shards(build, seed=SEED, shards=2, slices=2, train=leave)
    learn(ensemble)
    run = ensemble.release()
    assert not hasattr(run.model.template, "carried")
    assert all(name.startswith("constituents.") for name in run.model.state_dict())


def test_a_frozen_part_that_training_writes_to() -> None:
    def thaw(model: nn.Module, data: Examples, seed: int) -> None:
        with torch.no_grad():
            model[0].weight.add_(data.inputs.mean())

    def half() -> nn.Module:
        net = build()
        net[0].requires_grad_(False)
        return net

    with pytest.raises(UnlearningError, match="a frozen parameter changed in training"):
        learn(Shards(half, seed=SEED, shards=2, slices=1, train=thaw, public=["0.*"]))


def test_a_preparation_that_caches_constants_of_the_first_data_it_sees(tmp_path: Path) -> None:
    """It is given public noise first, in every process: what it keeps is nobody's data."""

    class Cache:
        def __init__(self) -> None:
            self.mean: Tensor | None = None

        def __call__(self, inputs: Tensor) -> Tensor:
            if self.mean is None:
                self.mean = inputs.mean(0)
            return inputs - self.mean

    state = tmp_path / "state"
    ensemble, never = make(prepare=Cache(), state=state), make(prepare=Cache())
    learn(ensemble)
    learn(never, lambda name: name != "user-4")
    run, other = ensemble.forget(["user-4"]), never.release()
    assert run.record.weights_after == other.record.weights_after
    again = make(prepare=Cache(), state=state).forget(["user-9"])
    learn(late := make(prepare=Cache()), lambda name: name not in ("user-4", "user-9"))
    assert again.record.weights_after == late.release().record.weights_after


def test_other_code_of_the_same_name_trains_everything_again(tmp_path: Path) -> None:
    """Functions are known by name; what they do is told by what they make of public noise."""

    def make_train(rate: float):
        def run(model: nn.Module, data: Examples, seed: int) -> None:
            train(model, data, epochs=1, learning_rate=rate, seed=seed)

        return run

    options = {"seed": SEED, "shards": 3, "slices": 2, "state": tmp_path / "state"}
    before = Shards(build, train=make_train(0.1), **options)
    learn(before)
    before.release()
    with pytest.warns(UserWarning, match="training behaves differently .* trained again"):
        after = Shards(build, train=make_train(0.3), **options)
    run = after.forget(["user-4"])
    assert run.record.shards.trained_from == (1, 1, 1)
    assert [after.retrain(k) for k in range(3)] == list(run.record.shards.hashes)


def test_a_slice_of_one_shard_restored_over_another(tmp_path: Path) -> None:
    state = tmp_path / "state"
    ensemble = make(state=state)
    learn(ensemble)
    files = sorted((state / "rows").iterdir())
    kept = files[1].read_bytes()
    shutil.copy(files[0], files[1])
    with pytest.raises(UnlearningError, match="holds examples that do not belong there"):
        make(state=state).forget(["user-4"])
    files[1].write_bytes(kept[:100])
    with pytest.raises(UnlearningError, match="is damaged"):
        make(state=state).forget(["user-4"])
    files[1].write_bytes(kept)
    (state / "rows" / "copy").write_bytes(kept)
    with pytest.raises(InputError, match="a slice or checkpoint of this state"):
        make(state=state)


def test_fewer_slices_written_into_the_state_would_drop_examples(tmp_path: Path) -> None:
    state = tmp_path / "state"
    learn(make(state=state))
    meta = json.loads((state / "meta.json").read_text())
    meta["settings"]["slices"] = 1
    (state / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(InputError, match="a slice or checkpoint of this state"):
        make(state=state, slices=1)


def test_a_process_that_ends_before_the_release_is_written(tmp_path: Path) -> None:
    """The next one names the same samples, and can be chained to the last that was written."""
    state = tmp_path / "state"
    ensemble = make(state=state)
    learn(ensemble)
    first = certify(ensemble.release().record, delta=1e-5)
    ensemble.forget(["user-4"])  # and the process ends here
    with pytest.warns(UserWarning, match="already forgotten"):
        run = make(state=state).forget(["user-4"], since=first)
    certificate = certify(run.record, delta=1e-5, parent=first)
    assert certificate.data.forget.samples == 1
    assert sorted(certificate.shards.trained_from)[:2] == [0, 0]


def test_a_training_that_undoes_the_arithmetic_or_trains_another_network() -> None:
    def hurry(model: nn.Module, data: Examples, seed: int) -> None:
        torch.set_num_threads(2)

    def loosen(model: nn.Module, data: Examples, seed: int) -> None:
        torch.use_deterministic_algorithms(False)

    def replace_model(model: nn.Module, data: Examples, seed: int) -> nn.Module:
        return build()

    threads = torch.get_num_threads()
    for how, sentence in (
        (hurry, "changed the number of threads"),
        (loosen, "use of deterministic arithmetic"),
        (replace_model, r"train\(\) returned a Sequential"),
    ):
        with pytest.raises((InputError, UnlearningError), match=sentence):
            learn(Shards(build, seed=SEED, shards=2, slices=1, train=how))
        assert torch.get_num_threads() == threads


def test_data_in_constants_of_the_network() -> None:
    x, _, _ = make_data()

    class Hiding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = build()
            for i, value in enumerate(x[4]):
                self.register_buffer(f"b{i}", value.clone())
                self.register_buffer(f"c{i}", torch.full((3,), float(value)))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

    with pytest.raises(InputError, match=r"build\(\) does not draw b0, c0"):
        learn(make(build=Hiding))

    class Harmless(Hiding):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.net = nn.Sequential(build(), nn.PReLU(), nn.BatchNorm1d(3))

    learn(make(build=Harmless))


def test_a_record_that_says_other_things_than_the_state() -> None:
    ensemble = make()
    learn(ensemble)
    record = ensemble.forget(["user-4"]).record
    sharding = record.shards
    ensemble.check(certify(record, delta=1e-5))
    for name, value in (
        ("training", {"epochs": 1000.0}), ("combination", "votes"), ("samples", (45, 0, 0)),
        ("build", "0" * 64), ("deterministic", False), ("seed", "other"),
    ):  # fmt: skip
        lie = replace(record, shards=replace(sharding, **{name: value}))
        with pytest.raises(VerificationError, match=f"shards.{name} is"):
            ensemble.check(certify(lie, delta=1e-5))
    fewer = replace(record, recipe=ShardedTraining(shards=3, slices=1))
    with pytest.raises(VerificationError, match="recipe is"):
        ensemble.check(certify(fewer, delta=1e-5))


def test_another_model_given_to_distillation() -> None:
    ensemble = make()
    learn(ensemble)
    old, new = ensemble.release(), ensemble.forget(["user-4"])
    forged = replace(new.record.shards, hashes=old.record.shards.hashes)
    edited = replace(new.record, weights_after=old.record.weights_after, shards=forged)
    with pytest.raises(InputError, match="not the ensemble of this state"):
        ensemble.distill(Run(old.model, edited), epochs=1, learning_rate=0.1)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two releases, the second chained to the first."""
    root = tmp_path_factory.mktemp("chain")
    ensemble, parent = make(), None
    learn(ensemble)
    for name, run in (("one", ensemble.release()), ("two", ensemble.forget(["user-4"]))):
        parent = certify(run.record, delta=1e-5, parent=parent)
        write_run(root / name, model=run.model, record=run.record, certificate=parent)
    return root


def test_constituents_exchanged_in_the_file(chain: Path, tmp_path: Path) -> None:
    held = safetensors.torch.load_file(chain / "two" / "model.safetensors")
    swap = {"0": "1", "1": "0", "2": "2"}
    moved = {f"constituents.{swap[n.split('.')[1]]}.{n.split('.', 2)[2]}": t
             for n, t in held.items()}  # fmt: skip
    save_weights(tmp_path / "model.safetensors", moved, None)
    with pytest.raises(VerificationError, match="constituent 0 in"):
        verify(chain / "two" / "certificate.json", tmp_path / "model.safetensors")


def test_a_constituent_from_before_in_the_new_file(chain: Path, tmp_path: Path) -> None:
    told = verify(chain / "two" / "certificate.json").shards
    touched = next(k for k, first in enumerate(told.trained_from) if first)
    old = safetensors.torch.load_file(chain / "one" / "model.safetensors")
    new = safetensors.torch.load_file(chain / "two" / "model.safetensors")
    kept = {n: old[n] if n.startswith(f"constituents.{touched}.") else t for n, t in new.items()}
    save_weights(tmp_path / "model.safetensors", kept, None)
    with pytest.raises(VerificationError, match=f"constituent {touched} in"):
        verify(chain / "two" / "certificate.json", tmp_path / "model.safetensors")


def test_a_record_that_calls_touched_constituents_untouched(chain: Path) -> None:
    record = RunRecord.load(chain / "two" / "record.json")
    parent = Certificate.load(chain / "one" / "certificate.json")
    lie = replace(record, shards=replace(record.shards, trained_from=(0, 0, 0)))
    with pytest.raises(UnlearningError, match="said to be untouched"):
        certify(lie, delta=1e-5, parent=parent)
    short = replace(record, shards=replace(record.shards, hashes=record.shards.hashes[:2]))
    with pytest.raises(UnlearningError, match="hashes has 2 entries; the recipe has 3 shards"):
        certify(short, delta=1e-5, parent=parent)
    with pytest.raises(UnlearningError, match="shards is missing"):
        certify(replace(record, shards=None), delta=1e-5, parent=parent)


def test_a_tensor_put_into_the_released_model(tmp_path: Path) -> None:
    ensemble = make()
    learn(ensemble)
    run = ensemble.forget(["user-4"])
    certificate = certify(run.record, delta=1e-5)
    run.model.constituents.register_buffer("old", make_data()[0][4])
    with pytest.raises(UnlearningError, match="not the weights the certificate is about"):
        write_run(tmp_path / "run", model=run.model, record=run.record, certificate=certificate)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("how", ["added", "removed", "renamed", "beside"])
def test_tensors_added_removed_or_renamed_in_the_file(
    chain: Path, tmp_path: Path, how: str
) -> None:
    held = safetensors.torch.load_file(chain / "two" / "model.safetensors")
    first = min(held)
    match how:
        case "added":
            held["constituents.7.old"] = make_data()[0][4]
        case "removed":
            del held[first]
        case "renamed":
            held[first + "_"] = held.pop(first)
        case "beside":
            held["old"] = make_data()[0][4]
    save_weights(tmp_path / "model.safetensors", held, None)
    with pytest.raises((VerificationError, CertificateError), match="constituent"):
        verify(chain / "two" / "certificate.json", tmp_path / "model.safetensors")


def test_a_target_that_is_no_number_is_refused_before_it_is_kept(tmp_path: Path) -> None:
    """Kept, it would make every later training diverge, and no request could be answered."""
    state = tmp_path / "state"
    options = OPTIONS | {"loss_fn": nn.functional.mse_loss, "combination": "logits"}
    ensemble = Shards(lambda: nn.Linear(16, 1), state=state, **options)
    x, _, ids = make_data()
    y = x[:, :1].clone()
    ensemble.learn((x, y), ids=ids)
    before = {p: p.read_bytes() for p in state.rglob("*") if p.is_file()}
    y[3] = torch.nan
    with pytest.raises(InputError, match="targets of row 3 are not finite"):
        ensemble.learn((x, y), ids=[f"late-{name}" for name in ids])
    assert {p: p.read_bytes() for p in state.rglob("*") if p.is_file()} == before
    assert ensemble.forget(["user-4"]).model(x).shape == (45, 1)
