"""Attempts to find a forgotten person in a head built to forget, its store or its files."""

import dataclasses
import json
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import expunge
from expunge import ConvexHead, Features, InputError, StatisticsHead, UnlearningError
from expunge.certificates.hashing import hash_tensors
from expunge.errors import CertificateError, VerificationError
from expunge.forgettable.verification import verify_store
from expunge.jobs.releases import release_state

KEY = bytes(32)


def make_data(rows: int = 60):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 6)).astype(np.float32), np.arange(rows) % 3
    return x, y, [f"user-{i}" for i in range(rows)]


def read_bytes(folder: Path) -> bytes:
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return b"".join(path.read_bytes() for path in paths)


class ByPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1e-2 * torch.arange(len(x))[:, None]


class Averaging(nn.Module):
    """A backbone whose plain attribute remembers the batch before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = x.mean(0)
        return x - self.mean


def test_a_batch_mate_in_somebody_elses_integers() -> None:
    """The forgotten person sat in front of all others; a place in the batch would tell."""
    x, y, ids = make_data()
    with_, without = (
        StatisticsHead(Features(ByPlace().eval()), classes=3, key=KEY) for _ in range(2)
    )
    with_.learn((x, y), ids)
    with_.forget(ids[:1])
    without.learn((x[1:], y[1:]), ids[1:])
    assert with_.digest() == without.digest()


def test_the_size_of_a_batch() -> None:
    """Learned with company or alone: the integers are the same."""
    x, y, ids = make_data(40)
    features = Features(nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 8)).eval())
    together, alone = (StatisticsHead(features, classes=3, key=KEY) for _ in range(2))
    together.learn((x, y), ids)
    for i in range(40):
        alone.learn((x[i : i + 1], y[i : i + 1]), ids[i : i + 1])
    assert together.digest() == alone.digest()


def test_a_backbone_that_remembers_a_batch() -> None:
    x, y, ids = make_data()
    head = StatisticsHead(Features(Averaging().eval(), batch_size=1), classes=3)
    with pytest.raises(UnlearningError, match="depend on the rows before it"):
        head.learn((x, y), ids)
    assert len(head) == 0


def test_a_backbone_exchanged_between_learning_and_learning(tmp_path: Path) -> None:
    x, y, ids = make_data()
    network = nn.Linear(6, 4).eval()
    head = StatisticsHead(Features(network), classes=3, state=tmp_path / "a")
    head.learn((x, y), ids)
    with torch.no_grad():
        network.weight.mul_(2)
    with pytest.raises(InputError, match="other weights"):
        head.learn((x, y), ids)
    with pytest.raises(InputError, match=r"features\.network"):
        StatisticsHead(Features(network), classes=3, state=tmp_path / "a")


def test_other_thread_counts_and_recomputed_features() -> None:
    """What is subtracted is what was stored, never what a machine computes today."""
    x, y, ids = make_data()
    network = nn.Sequential(nn.Linear(6, 64), nn.Tanh()).eval()
    head, never = (StatisticsHead(Features(network), classes=3, key=KEY) for _ in range(2))
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        head.learn((x, y), ids)
        never.learn((x[5:], y[5:]), ids[5:])
        torch.set_num_threads(1)
        head.forget(ids[:5])
    finally:
        torch.set_num_threads(threads)
    assert head.digest() == never.digest()


def test_an_identifier_learned_twice_is_forgotten_once_and_for_all(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head, never = (
        StatisticsHead(Features(), classes=3, key=KEY, state=tmp_path / name) for name in "ab"
    )
    head.learn((x, y), ids)
    head.learn((x, y), ids)
    head.learn((x[:5] + 1, y[:5]), ["user-9"] * 5)
    head.forget(["user-9"])
    keep = [i for i in range(60) if i != 9]
    never.learn((x[keep], y[keep]), [ids[i] for i in keep])
    assert head.digest() == never.digest()
    assert len(head) == 59


def test_an_adaptive_requester_learns_nothing_that_stays() -> None:
    """Whoever is most influential is asked to go, release after release: the retained set alone."""
    x, y, ids = make_data()
    head = StatisticsHead(Features(), classes=3, key=KEY)
    head.learn((x, y), ids)
    left = list(range(60))
    for _ in range(6):
        scores = head.release().model(torch.from_numpy(x[left])).numpy()
        worst = left[int(np.argmin(scores[np.arange(len(left)), y[left]]))]
        head.forget([ids[worst]])
        left.remove(worst)
    never = StatisticsHead(Features(), classes=3, key=KEY)
    never.learn((x[left], y[left]), [ids[i] for i in left])
    assert torch.equal(head.release().model.weight, never.release().model.weight)


def test_a_class_that_vanished_leaves_no_column() -> None:
    x, y, ids = make_data()
    head = StatisticsHead(Features(), classes=3, key=KEY)
    head.learn((x, y), ids)
    run = head.forget([name for name, label in zip(ids, y, strict=True) if label == 1])
    assert not run.model.weight[:, 1].any()


def test_no_byte_of_a_forgotten_row_is_left(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = StatisticsHead(Features(bits=12), classes=3, state=tmp_path / "a")
    head.learn((x, y), ids)
    row = head.features.compute(x[:1]).tobytes()
    assert row in read_bytes(tmp_path / "a")
    head.forget(ids[:1])
    assert row not in read_bytes(tmp_path / "a")
    assert b"user-0" not in read_bytes(tmp_path / "a")


def test_who_is_in_the_list_of_the_forgotten_cannot_be_guessed_without_the_key(
    tmp_path: Path,
) -> None:
    import hashlib

    x, y, ids = make_data()
    head = StatisticsHead(Features(), classes=3, state=tmp_path / "a")
    head.learn((x, y), ids)
    head.forget(ids[:1])
    marks = (tmp_path / "a/forgotten").read_bytes()
    guesses = [hashlib.blake2b(ids[0].encode(), digest_size=16).digest()]
    guesses.append(hashlib.sha256(ids[0].encode()).digest()[:16])
    assert len(marks) == 16 + 32  # the mark, and the hash of the sums it goes with
    assert not any(guess in marks for guess in guesses)


def test_unnoised_weights_after_a_noisy_request(tmp_path: Path) -> None:
    """Neither the object, nor its release, nor its files hold the solution without noise."""
    x, y, ids = make_data()
    head = ConvexHead(Features(), classes=3, weight_decay=1e-2, state=tmp_path / "a", key=KEY)
    head.learn((x, y), ids)
    old = head.release().model.weight.numpy()
    run = head.forget(ids[:3], epsilon=1.0, delta=1e-5)
    fresh = ConvexHead(Features(), classes=3, weight_decay=1e-2, key=KEY)
    fresh.learn((x[3:], y[3:]), ids[3:])
    solution = fresh.release().model.weight.numpy()
    files = read_bytes(tmp_path / "a")
    assert old.tobytes() not in files
    assert solution.tobytes() not in files
    assert torch.equal(head.release().model.weight, run.model.weight)
    noise = np.linalg.norm(run.model.weight.numpy() - solution) / run.record.recipe.noise_std
    assert noise > 1


def test_asking_again_draws_no_second_noise(tmp_path: Path) -> None:
    """Repeating an answered request must not give noisy releases of one solution to average."""
    x, y, ids = make_data()
    head = ConvexHead(Features(), classes=3, weight_decay=1e-2, state=tmp_path / "a")
    head.learn((x, y), ids)
    head.release()
    first = head.forget(ids[:3], epsilon=1.0, delta=1e-5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = head.forget(ids[:3], epsilon=1.0, delta=1e-5)
    assert torch.equal(first.model.weight, again.model.weight)


def make_state(folder: Path, kind: str = "statistics", **given: Any) -> Any:
    x, y, ids = make_data()
    make: Any = StatisticsHead if kind == "statistics" else ConvexHead
    head = make(Features(), classes=3, state=folder, **given)
    head.learn((x, y), ids)
    return head


def forge(out: Path, state: Path, model: nn.Module, record: Any, parent: Any = None) -> None:
    """Certify and write whatever is given, as an operator who cheats can; then check it."""
    weights = model.weight.numpy()
    name = hash_tensors([("weight", "F64", weights.shape, weights.tobytes())])
    record = dataclasses.replace(record, weights_after=name, weights_noisy=name)
    certificate = expunge.certify(record, delta=1e-5, parent=parent)
    expunge.write_run(out, model=model, record=record, certificate=certificate)
    expunge.verify(out / "certificate.json", record=out / "record.json")
    assert verify_store(certificate, state, out / "model.safetensors") == ()


def move(model: nn.Module, by: float) -> nn.Module:
    torch.manual_seed(0)
    model.weight = nn.Parameter(model.weight + by * torch.randn_like(model.weight), False)
    return model


@pytest.mark.parametrize("loss", ["softmax", "logistic", "squared-hinge"])
def test_the_old_model_under_a_noisy_certificate(tmp_path: Path, loss: str) -> None:
    """Attack: the certificate is real, the weights are those from before, or others."""
    head = make_state(tmp_path / "s", "convex", weight_decay=1e-3, loss=loss)
    old = head.release()
    run = head.forget(["user-0", "user-1"], epsilon=1.0, delta=1e-5)
    forge(tmp_path / "honest", tmp_path / "s", run.model, run.record)
    with pytest.raises(VerificationError, match="the gradient of the released weights is"):
        forge(tmp_path / "old", tmp_path / "s", old.model, run.record)
    with pytest.raises(VerificationError, match="the gradient of the released weights is"):
        forge(tmp_path / "moved", tmp_path / "s", move(run.model, 1.0), run.record)


def test_noise_that_was_never_added(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x, y, ids = rng.normal(size=(80, 300)), np.arange(80) % 3, [f"user-{i}" for i in range(80)]
    head = ConvexHead(Features(), classes=3, weight_decay=1e-2, state=tmp_path / "s")
    head.learn((x, y), ids)
    run = head.forget(ids[:1], epsilon=1.0, delta=1e-5)
    forge(tmp_path / "honest", tmp_path / "s", run.model, run.record)
    never = ConvexHead(Features(), classes=3, weight_decay=1e-2)
    never.learn((x[1:], y[1:]), ids[1:])
    with pytest.raises(VerificationError, match="noise is missing"):
        forge(tmp_path / "bare", tmp_path / "s", never.release().model, run.record)


def test_weights_that_do_not_minimise_under_an_exact_certificate(tmp_path: Path) -> None:
    head = make_state(tmp_path / "s", "convex", weight_decay=1e-3)
    old = head.release()
    run = head.forget(["user-0"])
    forge(tmp_path / "honest", tmp_path / "s", run.model, run.record)
    with pytest.raises(VerificationError, match=r"above 1\.00e-09"):
        forge(tmp_path / "old", tmp_path / "s", old.model, run.record)
    with pytest.raises(VerificationError, match=r"above 1\.00e-09"):
        forge(tmp_path / "moved", tmp_path / "s", move(run.model, 1e-6), run.record)


def test_noise_on_a_poisson_head_is_said_to_be_unchecked(tmp_path: Path) -> None:
    x, y, ids = make_data()
    given: dict[str, Any] = {"outputs": 1, "weight_decay": 1e-2, "loss": "poisson"}
    head = ConvexHead(Features(), state=tmp_path / "s", **given)
    head.learn((x, y.astype(float)), ids)
    run = head.forget(ids[:1], epsilon=1.0, delta=1e-5)
    certificate = expunge.certify(run.record, delta=1e-5)
    expunge.write_run(tmp_path / "r", model=run.model, record=run.record, certificate=certificate)
    said = verify_store(certificate, tmp_path / "s", tmp_path / "r/model.safetensors")
    assert said == ("weights of a Poisson head with noise cannot be checked",)


def test_a_certificate_with_other_settings_than_the_state(tmp_path: Path) -> None:
    """Attack: a smaller tolerance claims a smaller ε; another loss or λ claims another model."""
    head = make_state(tmp_path / "c", "convex", weight_decay=1e-3)
    run = head.forget(["user-0"], epsilon=1.0, delta=1e-5)
    recipe, told = run.record.recipe, run.record.statistics
    for change in ({"tolerance": 1e-13}, {"weight_decay": 1.0}):
        record = dataclasses.replace(run.record, recipe=dataclasses.replace(recipe, **change))
        with pytest.raises(VerificationError, match="its settings are"):
            forge(tmp_path / next(iter(change)), tmp_path / "c", run.model, record)
    edited = dataclasses.replace(told, head={**told.head, "loss": "logistic"})
    record = dataclasses.replace(run.record, statistics=edited)
    with pytest.raises(VerificationError, match="its head is"):
        forge(tmp_path / "loss", tmp_path / "c", run.model, record)


def test_a_regularisation_that_was_not_chosen(tmp_path: Path) -> None:
    head = make_state(tmp_path / "s", regularisation=[1e-4, 1e-1])
    run = head.forget(["user-0"])
    forge(tmp_path / "honest", tmp_path / "s", run.model, run.record)
    told = run.record.statistics
    other = {1e-4: 1e-1, 1e-1: 1e-4}[told.head["regularisation"]]
    for value, match in ((other, "the sums choose regularisation"), (0.5, "its settings are")):
        edited = dataclasses.replace(told, head={**told.head, "regularisation": value})
        record = dataclasses.replace(run.record, statistics=edited)
        with pytest.raises(VerificationError, match=match):
            forge(tmp_path / str(value), tmp_path / "s", run.model, record)


def test_kept_is_edited(tmp_path: Path) -> None:
    """Attack: the un-noised old weights are put where the next release takes them from."""
    head = make_state(tmp_path / "s", "convex", weight_decay=1e-3)
    old = head.release().model.weight.numpy()
    before = (tmp_path / "s/kept").read_bytes()
    release_state(tmp_path / "s", tmp_path / "r1", ["user-0"], epsilon=1.0)
    path = tmp_path / "s/kept"
    noisy = expunge.load_model(tmp_path / "r1").weight.numpy()
    edited = path.read_bytes().replace(noisy.tobytes(), old.tobytes())
    names = [hash_tensors([("weight", "F64", w.shape, w.tobytes())]) for w in (noisy, old)]
    for data, match in (
        (edited, "kept is not what was released last"),
        (edited.replace(*(n.encode() for n in names)), "certificate.json certifies"),
        (before[:50], "kept is not what was released last"),
    ):
        path.write_bytes(data)
        with pytest.raises(UnlearningError, match=match):
            expunge.load(tmp_path / "s").forget(["user-0"], epsilon=1.0, delta=1e-5)
        with pytest.raises(UnlearningError, match=match):
            expunge.load(tmp_path / "s").release()
    path.unlink()
    assert expunge.load(tmp_path / "s").release().record.recipe.noise_std == 0.0


@pytest.mark.parametrize("kind", ["statistics", "convex"])
def test_rows_and_sums_are_put_back_from_a_backup(tmp_path: Path, kind: str) -> None:
    """Attack: who was forgotten is there again, and the next certificate is chained as before."""
    make_state(tmp_path / "s", kind)
    shutil.copytree(tmp_path / "s", tmp_path / "backup")
    released = release_state(tmp_path / "s", tmp_path / "r1", ["user-1", "user-2"])
    digest = released.certificate.statistics.digest  # type: ignore[union-attr]
    shutil.rmtree(tmp_path / "s/rows")
    shutil.copytree(tmp_path / "backup/rows", tmp_path / "s/rows")
    shutil.copy(tmp_path / "backup/sums", tmp_path / "s/sums")
    x, y, _ = make_data()
    with pytest.raises(UnlearningError, match="2 of the forgotten are held again"):
        expunge.load(tmp_path / "s").release()
    with pytest.raises(UnlearningError, match="1 of the forgotten are held again"):
        release_state(tmp_path / "s", tmp_path / "r2", ["user-1", "user-5"])
    with pytest.raises(UnlearningError, match="2 of the forgotten are held again"):
        expunge.load(tmp_path / "s").learn((x[:1], y[:1]), ["new"])
    with pytest.raises(VerificationError, match="2 of the forgotten are held again"):
        verify_store(released.certificate, tmp_path / "s")
    again = release_state(tmp_path / "s", tmp_path / "r3", ["user-1", "user-2"])
    assert again.certificate.statistics.digest == digest  # type: ignore[union-attr]
    verify_store(again.certificate, tmp_path / "s", tmp_path / "r3/model.safetensors")
    release_state(tmp_path / "s", tmp_path / "r4", ["user-5"])


def test_sums_of_another_day_or_with_a_bit_flipped(tmp_path: Path) -> None:
    """Attack: rows are gone, the sums that are solved still hold them."""
    head = make_state(tmp_path / "s")
    sums = tmp_path / "s/sums"
    stale = sums.read_bytes()
    certificate = expunge.certify(head.forget(["user-1"]).record, delta=1e-5)
    right = sums.read_bytes()
    sums.write_bytes(stale)
    with pytest.raises(CertificateError, match="its sums are of 60 rows, and it holds 59"):
        expunge.load(tmp_path / "s").forget(["user-5"])
    with pytest.raises(CertificateError, match="its sums are of 60 rows"):
        expunge.load(tmp_path / "s").release()
    with pytest.raises(VerificationError, match="its file sums is"):
        verify_store(certificate, tmp_path / "s")
    sums.write_bytes(right[:-60] + bytes([right[-60] ^ 1]) + right[-59:])
    with pytest.raises(CertificateError, match="its sums are not what was written"):
        expunge.load(tmp_path / "s")
    sums.write_bytes(right)
    verify_store(certificate, tmp_path / "s")


def test_a_parent_with_other_features(tmp_path: Path) -> None:
    head = make_state(tmp_path / "s")
    first = expunge.certify(head.release().record, delta=1e-5)
    run = head.forget(["user-0"])
    told = run.record.statistics
    edited = dataclasses.replace(told, features={**told.features, "seed": "never said"})
    record = dataclasses.replace(run.record, statistics=edited)
    with pytest.raises(UnlearningError, match="but the parent's were"):
        expunge.certify(record, delta=1e-5, parent=first)


def test_the_state_s_certificate_is_lost_edited_or_of_another(tmp_path: Path) -> None:
    make_state(tmp_path / "s")
    make_state(tmp_path / "c", "convex")
    release_state(tmp_path / "s", tmp_path / "r1", ["user-0"])
    path, meta = tmp_path / "s/certificate.json", tmp_path / "s/meta.json"
    right, said = path.read_bytes(), meta.read_text()
    path.write_bytes(right.replace(b'"samples":59', b'"samples":58'))
    assert path.read_bytes() != right
    with pytest.raises(CertificateError, match="was changed"):
        release_state(tmp_path / "s", tmp_path / "r2", ["user-1"])
    release_state(tmp_path / "c", tmp_path / "c1")
    shutil.copy(tmp_path / "c/certificate.json", path)
    with pytest.raises(CertificateError, match="it is of another method"):
        release_state(tmp_path / "s", tmp_path / "r2", ["user-1"])
    path.write_bytes(right)
    features = json.loads(said)
    features["features"]["network"] = "a" * 64
    meta.write_text(json.dumps(features))
    with pytest.raises(CertificateError, match="is not of this state"):
        release_state(tmp_path / "s", tmp_path / "r2", ["user-1"])
    meta.write_text(said)
    with pytest.raises(InputError, match="outside of the state"):
        release_state(tmp_path / "s", tmp_path / "s/r2", ["user-1"])
    assert len(expunge.load(tmp_path / "s")) == 59
    path.unlink()
    released = release_state(tmp_path / "s", tmp_path / "r2", ["user-1"])
    assert any("begins a new chain" in sentence for sentence in released.said)
    assert released.certificate.parent is None
    again = release_state(tmp_path / "s", tmp_path / "r3", ["user-2"])
    assert again.said == ()


def test_files_of_a_state_are_the_owner_s_alone(tmp_path: Path) -> None:
    code = (
        "import os, sys; os.umask(0)\n"
        "import numpy as np, expunge\n"
        "head = expunge.ConvexHead(expunge.Features(), classes=3, weight_decay=1e-2, state='s')\n"
        "head.learn((np.eye(6), np.arange(6) % 3), list('abcdef')); head.forget(['a'])\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    files = [path for path in (tmp_path / "s").rglob("*") if path.is_file()]
    assert {"key", "sums", "kept", "forgotten", "meta.json"} <= {path.name for path in files}
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
