"""From a state to a head, a certificate and back; tangent features."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import expunge
from expunge.errors import InputError, VerificationError
from expunge.forgettable.verification import verify_store


def make_data(rows: int = 120):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(rows, 8)).astype(np.float32), np.arange(rows) % 3
    x[np.arange(rows), y] += 2
    return x, y, [f"user-{i}" for i in range(rows)]


def make_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh()).eval()


def make_heads(network: nn.Module, folder: Path):
    features = expunge.Features(network, bits=8, lift=5, seed="public")
    yield expunge.StatisticsHead(features, classes=3, state=folder / "s")
    yield expunge.ConvexHead(features, classes=3, weight_decay=1e-3, state=folder / "c")


def test_a_state_is_loaded_and_goes_on(tmp_path: Path) -> None:
    x, y, ids = make_data()
    network = make_network()
    for head in make_heads(network, tmp_path):
        head.learn((x, y), ids)
        first = head.forget(ids[:2])
        folder = tmp_path / ("s" if isinstance(head, expunge.StatisticsHead) else "c")
        again = expunge.load(folder, network=network)
        assert type(again) is type(head)
        assert again.digest() == head.digest()
        assert torch.equal(again.release().model.weight, first.model.weight)
        assert again.learn((x[:3], y[:3]), ["new"] * 3) == 3
        blind = expunge.load(folder)
        run = blind.forget(["new"])
        assert torch.equal(run.model.weight, first.model.weight)
        with pytest.raises(InputError, match="network is not given"):
            blind.learn((x[:3], y[:3]), ["new"] * 3)
        with pytest.raises(InputError, match="network is not given"):
            run.model(torch.from_numpy(x))
        with pytest.raises(InputError, match=r"features\.\w+ is .* as in"):
            expunge.load(folder, network=nn.Linear(8, 16).eval())


def test_certificates_hold_and_chain(tmp_path: Path) -> None:
    x, y, ids = make_data()
    for number, head in enumerate(make_heads(make_network(), tmp_path)):
        head.learn((x, y), ids)
        first = expunge.certify(head.release().record, delta=1e-5)
        run = head.forget(ids[:2])
        certificate = expunge.certify(run.record, delta=1e-5, parent=first)
        assert (certificate.epsilon, certificate.mu) == (0.0, 0.0)
        assert certificate.survival_bound == 0.0
        assert certificate.releasable
        assert certificate.statistics is not None
        assert certificate.statistics.digest == head.digest()
        folder = tmp_path / f"run-{number}"
        expunge.write_run(folder, model=run.model, record=run.record, certificate=certificate)
        path = folder / "certificate.json"
        assert expunge.verify(path, record=folder / "record.json") == certificate
        verify_store(certificate, tmp_path / ("s", "c")[number])
        words = certificate.statement()
        assert "learned from the rows that remain" in words
        assert head.digest() in words
        assert all(name not in path.read_text() for name in ids[:2])


def test_a_noisy_convex_release_is_certified(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = list(make_heads(make_network(), tmp_path))[1]
    head.learn((x, y), ids)
    head.release()
    run = head.forget(ids[:2], epsilon=1.0, delta=1e-5)
    certificate = expunge.certify(run.record, delta=1e-5)
    assert 0.999 < certificate.epsilon <= 1.0
    assert certificate.releasable
    expunge.write_run(tmp_path / "run", model=run.model, record=run.record, certificate=certificate)
    expunge.verify(tmp_path / "run/certificate.json", record=tmp_path / "run/record.json")
    assert "exact minimiser on the rows that remain" in certificate.statement()
    seeded = head.forget(ids[2:3], epsilon=1.0, delta=1e-5, noise=expunge.SeededNoise(0))
    assert not expunge.certify(seeded.record, delta=1e-5).releasable


def test_stored_rows_that_differ_are_named(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = next(make_heads(make_network(), tmp_path))
    head.learn((x, y), ids)
    run = head.forget(ids[:2])
    certificate = expunge.certify(run.record, delta=1e-5)
    verify_store(certificate, tmp_path / "s")
    bucket = next(path for path in sorted((tmp_path / "s/rows").iterdir()))
    data = bytearray(bucket.read_bytes())
    data[20] ^= 1
    bucket.write_bytes(bytes(data))
    with pytest.raises(VerificationError, match="the stored rows sum to"):
        verify_store(certificate, tmp_path / "s")


def test_a_record_or_certificate_without_statistics_is_refused(tmp_path: Path) -> None:
    x, y, ids = make_data()
    head = next(make_heads(make_network(), tmp_path))
    head.learn((x, y), ids)
    run = head.release()
    plain = run.record.to_dict()
    del plain["statistics"]
    with pytest.raises(expunge.UnlearningError, match="statistics is missing"):
        expunge.certify(expunge.RunRecord.from_dict(plain), delta=1e-5)
    certificate = expunge.certify(run.record, delta=1e-5)
    changed = json.loads(certificate.to_bytes())
    changed["statistics"]["digest"] = "0" * 64
    expunge.write_run(tmp_path / "run", model=run.model, record=run.record, certificate=certificate)
    (tmp_path / "run/certificate.json").write_text(json.dumps(changed))
    with pytest.raises(VerificationError, match="does not hold"):
        expunge.verify(tmp_path / "run/certificate.json", record=tmp_path / "run/record.json")


def test_tangent_features_are_projected_gradients() -> None:
    """Of a linear map the gradient is the input: products of inputs are what the kernel keeps."""
    network = nn.Linear(40, 1, bias=False).eval()
    features = expunge.TangentFeatures(network, 4000, bits=12, seed="public")
    x = torch.randn(6, 40)
    q = features.compute(x).astype(float)
    unit = x / x.norm(dim=1, keepdim=True)
    kernel = q @ q.T / np.square(q).sum(axis=1).mean()
    assert np.abs(kernel - (unit @ unit.T).numpy()).max() < 0.1


def test_tangent_features_of_chosen_parameters_differ() -> None:
    network = make_network()
    x = torch.randn(3, 8)
    whole = expunge.TangentFeatures(network, 16, seed="a")
    bias = expunge.TangentFeatures(network, 16, parameters=["*.bias"], seed="a")
    assert bias.parameters == ["0.bias"]
    assert whole.describe() != bias.describe()
    assert not np.array_equal(whole.compute(x), bias.compute(x))
    with pytest.raises(InputError, match="parameters is"):
        expunge.TangentFeatures(network, 16, parameters=["nothing"])
    with pytest.raises(InputError, match="dimension is 0"):
        expunge.TangentFeatures(network, 0)


def test_a_tangent_head_is_loaded(tmp_path: Path) -> None:
    x, y, ids = make_data()
    network = make_network()
    features = expunge.TangentFeatures(network, 30, parameters=["0.*"], seed="t")
    head = expunge.StatisticsHead(features, classes=3, state=tmp_path / "t")
    head.learn((x, y), ids)
    run = expunge.load(tmp_path / "t", network=network).forget(ids[:1])
    assert (run.model(torch.from_numpy(x)).argmax(1).numpy() == y).mean() > 0.6
    expunge.certify(run.record, delta=1e-5)
