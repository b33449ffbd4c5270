"""What processes compare: the sentence names rank, thing and both values, and only rank 0 tells."""

import pytest
import torch

from expunge import InputError, UnlearningError
from expunge.noisy.noise import SeededNoise
from expunge.processes.agreement import (
    check_start,
    check_step,
    digest_bytes,
    digest_key,
    digest_tensor,
)
from expunge.processes.group import Processes


class Told(Processes):
    """Two processes of which the other one says what it is given here."""

    def __init__(self, other, rank=0):
        super().__init__(rank, 2)
        self.other = other

    def gather(self, value):
        return [value, self.other] if self.rank == 0 else [self.other, value]


def test_a_process_alone_agrees_with_itself():
    one = Processes()
    check_start(one, {"recipe": {"steps": 3}, "versions": {"torch": "2"}})
    check_step(one, {"step": "1", "trace": "a"})
    assert one.checks == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_difference_at_the_start_is_named_with_both_values(rank):
    facts = {"recipe": {"steps": 3}, "versions": {"torch": "2"}}
    same = {"recipe": {"steps": 3}, "torch version": "2"}
    check_start(Told(same, rank), facts)
    with pytest.raises(InputError) as caught:
        check_start(Told(same | {"torch version": "1"}, rank), facts)
    mine, other = ("'2'", "'1'") if rank == 0 else ("'1'", "'2'")
    assert str(caught.value).startswith(
        f"rank 1 has torch version {other} and rank 0 has {mine}; all processes"
    )
    assert caught.value.told_by_another is (rank == 1)


def test_a_fact_that_only_one_of_them_has_is_a_difference():
    with pytest.raises(InputError, match="rank 1 has centre 'c' and rank 0 has None"):
        check_start(Told({"recipe": 1, "centre": "c"}), {"recipe": 1})


def test_every_difference_at_a_step_is_named():
    facts = {"step": "4", "trace": "a", "noise key": "k", "parameters": "p"}
    check_step(Told(dict(facts)), facts)
    with pytest.raises(UnlearningError, match="disagree on noise key and parameters at step 4"):
        check_step(Told(facts | {"noise key": "x", "parameters": "y"}), facts)


def test_facts_are_compared_as_json_says_them():
    check_start(Told({"steps": [1, 2]}), {"steps": (1, 2)})


def test_a_digest_of_a_key_is_neither_the_key_nor_its_plain_hash():
    key = SeededNoise(0).begin().export_key()
    assert digest_key(key) != digest_bytes(key)
    assert digest_key(key) != digest_key(SeededNoise(1).begin().export_key())
    assert key.hex()[:8] not in digest_key(key)


def test_one_bit_of_a_tensor_changes_its_digest():
    a = torch.randn(5, 3)
    b = a.clone()
    b[4, 2] = torch.nextafter(b[4, 2], torch.tensor(9.0))
    assert digest_tensor(a) != digest_tensor(b)
    assert digest_tensor(a.t()) == digest_tensor(a.t().contiguous())
