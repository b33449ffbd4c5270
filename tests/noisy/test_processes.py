"""One process and two give the same run: the same noise, the same weights, one certificate."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from expunge.errors import RunError, UnlearningError
from expunge.noisy.processes import Processes
from expunge.training.batches import split_batch
from tests.noisy.networks import NOISY, flatten, make_mlp, run
from tests.noisy.ranks import train_plain

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.noisy.ranks", str(folder)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    root = Path(__file__).parents[2]
    ranks = [subprocess.Popen([*command, str(r)], env=environment, cwd=root) for r in (0, 1)]
    try:
        assert [process.wait(240) for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def compare(report, release, noise=True):
    weights = torch.tensor(report["weights"], dtype=torch.float64)
    assert torch.allclose(weights, flatten(release), atol=1e-6, rtol=0)
    if noise:
        assert tuple(report["noise"]) == release.record.trace.noise_norm
    assert report["epsilon"] == release.certificate.epsilon
    assert report["processes"] == 2


@pytest.mark.parametrize("name", NOISY)
def test_two_processes_give_the_weights_and_the_noise_of_one(reports, name):
    release = run(recipe=NOISY[name])
    for report in reports:
        compare(report["runs"][name], release)


def test_both_ranks_have_one_release(reports):
    first, second = reports
    for name in ("system", "single rows", "norm"):
        assert first[name] == second[name]
    assert first["runs"] == second["runs"]


def test_a_batch_of_fewer_rows_than_processes(reports):
    compare(reports[0]["single rows"], run(batch_size=1))


def test_the_built_in_training_shares_its_batches(reports):
    assert reports[0]["trained"] == reports[1]["trained"]
    assert reports[0]["trained"] == pytest.approx(train_plain(), abs=1e-5)
    assert reports[0]["early stopping"] == reports[1]["early stopping"]  # one decision, one model


def test_stopped_and_resumed_together(reports):
    for report in reports:
        compare(report["resumed"], run())
        assert report["resumed"]["count"] == 1


def test_processes_that_differ_are_stopped_with_one_sentence(reports):
    assert reports[0]["refused"] == reports[1]["refused"]
    found = reports[0]["refused"]
    assert found["recipe"].startswith("InputError: rank 1 has another recipe than rank 0")
    assert found["data"].startswith("InputError: rank 1 has another data than rank 0")
    assert found["one rank"].startswith("CalibrationError: rank 1: recipe gives epsilon")
    assert found["bent"].startswith("UnlearningError: rank 1 has another vector than rank 0 after")


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shares_are_a_partition(size):
    for count in range(1, 12):
        shares = [split_batch((torch.arange(count), 1), r, size) for r in range(size)]
        rows = [row for share, _ in shares if share is not None for row in share[0].tolist()]
        assert rows == list(range(count))
        assert sum(weight for _, weight in shares) == pytest.approx(1.0)


def test_what_cannot_be_split():
    with pytest.raises(UnlearningError, match="every tensor must have the examples first"):
        split_batch((torch.zeros(4, 2), torch.zeros(3)), 0, 2)
    with pytest.raises(UnlearningError, match="no tensor to split"):
        split_batch(["a"], 0, 2)


def test_a_lost_process_is_one_sentence():
    lost = pytest.raises(RunError, match="rank 0 of 2 lost another process while summing")
    with lost as caught, Processes(0, 2).listening("summing gradients"):
        raise RuntimeError("[pair.cc:5] Read error: reset. GLHF\nmore")
    assert "\n" not in str(caught.value)


def test_one_process_does_not_touch_torch_distributed(monkeypatch):
    for name in ("all_reduce", "broadcast", "all_gather_object", "broadcast_object_list"):
        monkeypatch.delattr(torch.distributed, name)
    run(build=lambda: make_mlp(norm=True), strict=False)
