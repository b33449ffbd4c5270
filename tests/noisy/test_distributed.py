"""One process and two give the same run: the same weights, exactly the same noise, one certificate.

All of it is found by ``distributed_driver.py`` in one start of two real processes over gloo.
"""

import json
import math

import pytest
import torch

from engine import NOISY
from expunge import SeededNoise
from expunge.certificates.hashing import INDEX, hash_weights
from expunge.certificates.record import RunRecord
from expunge.errors import CertificateError, UnlearningError
from expunge.noisy.sharded_vector import check_spans, locate_spans
from expunge.processes.group import Processes, lose
from expunge.training.shares import locate_share
from ranks import HERE, finish_ranks, start_ranks

CLOSE = 1e-6
# What describes a run, and what holds the last bits of its weights or a salt.
DESCRIPTION = ("created", "digest", "record")


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    ranks = start_ranks(2, [str(HERE / "distributed_driver.py"), str(folder)])
    for code, _, err in finish_ranks(ranks, timeout=240):
        assert code == 0, err
    found = [json.loads((folder / f"report-{rank}.json").read_text()) for rank in range(2)]
    return found, folder


@pytest.mark.parametrize("name", NOISY)
def test_two_processes_give_the_weights_of_one(reports, name):
    for report in reports[0]:
        run = report["runs"][name]
        assert run["replicated"] <= CLOSE
        assert run["sharded"] <= CLOSE
        assert run["scale"] > 0.1
        assert run["parameters"]
        assert run["evaluations"]
        assert run["before"]


@pytest.mark.parametrize("name", NOISY)
def test_the_noise_is_exactly_that_of_one_process(reports, name):
    first, second = (report["runs"][name] for report in reports[0])
    assert first["noise_same"]
    assert second["noise_same"]
    own = [first["noise_own"], second["noise_own"]]
    assert own[0]
    assert own[1]
    assert not own[0].keys() & own[1].keys()
    used = {key: first["noise_alone"][key] for key in own[0].keys() | own[1].keys()}
    assert own[0] | own[1] == used
    steps = {key.split(",")[0] for key in used}
    assert len(used) == len(steps) * first["certificates"][0]["parameters"]
    one, two, parts = first["noise_norms"]
    assert one == two
    assert all(math.isclose(a, b, rel_tol=1e-12) for a, b in zip(one, parts, strict=True))


@pytest.mark.parametrize("name", NOISY)
def test_the_certificate_is_the_same_but_for_the_description_of_the_run(reports, name):
    run = reports[0][0]["runs"][name]
    plain = []
    for certificate in run["certificates"]:
        text = json.dumps({k: v for k, v in certificate.items() if k not in DESCRIPTION})
        for which in ("noisy", "after"):
            text = text.replace(certificate["weights"][which], "the weights")
        plain.append(json.loads(text))
    assert plain[0] == plain[1] == plain[2]
    layouts = [None if told is None else told["layout"] for told in run["processes"]]
    assert layouts == [None, "replicated", "sharded"]
    assert run["processes"][1]["check_every"] == 2
    assert run["processes"][1]["checks"] >= 1


def test_every_process_returns_the_same_record(reports):
    first, second = reports[0]
    for name in NOISY:
        assert first["runs"][name]["digests"] == second["runs"][name]["digests"]


def test_however_the_data_are_read_and_however_few_are_left(reports):
    for report in reports[0]:
        found = report["loaders"]
        assert found.pop("same centre") is True
        assert set(found) == {"loader", "list", "one left", "centre"}
        assert all(difference <= CLOSE for difference in found.values())


def test_stopped_and_resumed_it_is_the_same_run_and_says_so(reports):
    for report in reports[0]:
        for found in report["resume"].values():
            assert found["same"]
            assert found["trace"]
            assert found["resumed"] == [1, 2]
            assert found["left"] == ["state.safetensors", "step-7-key-2"]
            assert "belongs to another run: its recipe is" in found["other"]


def test_the_key_is_in_no_checkpoint(reports):
    key = SeededNoise(1).begin().export_key()
    files = [path for path in reports[1].rglob("*") if path.is_file()]
    assert len(files) > 10
    assert not [path for path in files if key in path.read_bytes()]


def test_processes_that_should_agree_and_do_not_are_stopped(reports):
    first, second = (report["told"] for report in reports[0])
    assert first == second
    told = dict(line.split(": ", 1) for line in first)
    assert told["nothing"] == "not noticed"
    assert "rank 1 has recipe {'method': 'model-clipping'" in told["recipe"]
    bent = "rank 1 and rank 0 disagree on parameters at step 2"
    assert told["one bit of one weight"].startswith(bent)
    assert "nothing is certified" in told["one bit of one weight"]
    assert "disagree on data order and noise key" in told["another key"]
    assert told["versions"].startswith("rank 1 has torch version '2.0.0' and rank 0 has")
    assert told["batch"].startswith("batch_size is 9; it must be a multiple of 2")
    assert told["few"].startswith("there are 1 retained examples and 2 processes")
    assert "statistics of a share of a batch" in told["buffers"]


def test_the_noise_of_two_shards_is_independent_and_the_test_would_see_if_not(reports):
    for report in reports[0]:
        assert abs(report["correlation"]) < 5.0
        assert report["wrong"] > 50.0


def test_shards_have_the_hash_of_the_whole_in_memory_and_in_files(reports):
    found, folder = reports
    for report in found:
        assert report["files"]["together"] == report["files"]["whole"]
    index = folder / "shards" / INDEX
    digest, layouts = hash_weights(index)
    assert digest == found[0]["files"]["whole"]
    assert sorted(layouts) == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for change in (index, folder / "shards" / "model-00002-of-00002.safetensors"):
        kept = change.read_bytes()
        for place in (len(kept) // 2, len(kept) - 2):
            change.write_bytes(kept[:place] + bytes([kept[place] ^ 1]) + kept[place + 1 :])
            assert hash_or_none(index) != digest
        change.write_bytes(kept)
    assert hash_weights(index)[0] == digest


def hash_or_none(index):
    try:
        return hash_weights(index)[0]
    except CertificateError:
        return None


def test_a_record_tells_of_its_processes_and_reads_back(reports):
    run = reports[0][0]["runs"]["gradient-clipping"]
    record = make_record(processes=run["processes"][1])
    assert RunRecord.from_dict(record.to_dict()) == record
    assert record.processes == run["processes"][1]
    assert "processes" not in make_record().to_dict()


def make_record(**more):
    from expunge import OutputPerturbation
    from expunge.noisy.run import unlearn

    recipe = OutputPerturbation(start_clip=0.5, noise_std=1.5)
    record = unlearn(torch.nn.Linear(2, 2), [], recipe, noise=SeededNoise(0), centre="zero").record
    return RunRecord.from_dict(record.to_dict() | more)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_shares_and_spans_are_partitions(size):
    shapes = [torch.Size(s) for s in ([7, 3], [1], [4, 2, 2], [2, 5])]
    total = sum(shape.numel() for shape in shapes)
    spans = [locate_spans(shapes, rank, size) for rank in range(size)]
    check_spans([[(s.position, s.length) for s in part] for part in spans], total)
    for count in range(1, 12):
        shares = [locate_share(count, rank, size) for rank in range(size)]
        assert sum(counted for _, _, counted in shares) == count
        covered = [i for start, stop, counted in shares if counted for i in range(start, stop)]
        assert covered == list(range(count))


def test_a_position_that_nobody_holds_is_noticed():
    with pytest.raises(UnlearningError, match="position 3 of the vector is held by no process"):
        check_spans([[(0, 3)], [(4, 1)]], 5)
    with pytest.raises(UnlearningError, match="hold 4 of 5 positions"):
        check_spans([[(0, 4)], []], 5)


def test_a_lost_process_is_one_sentence():
    error = lose(0, 2, "summing gradients", RuntimeError("[pair.cc:5] Read error: reset. GLHF"))
    assert "\n" not in str(error)
    assert "rank 0 of 2 lost another process while summing gradients" in str(error)
    assert "nothing is certified" in str(error)
    assert Processes(1, 2, 50).leads is False
