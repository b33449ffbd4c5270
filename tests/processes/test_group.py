"""A process alone is a group of one; several stop together, and a lost one is a RunError."""

import pytest
import torch

from expunge import CertificateError, InputError, RunError, UnlearningError
from expunge.processes.group import Processes, find_processes, joined, lose


def test_everything_is_an_identity_for_one_process():
    one, tensors = find_processes(), [torch.ones(2, dtype=torch.bfloat16)]
    assert (one.rank, one.size, one.leads, one.alone) == (0, 1, True, True)
    assert one.sum([1.5]) == one.find_largest([1.5]) == [1.5]
    assert one.add_up(tensors)[0] is tensors[0]
    assert one.gather({"a": 1}) == [{"a": 1}]
    assert one.share_key(b"k" * 32) == b"k" * 32
    assert one.describe("replicated") is None
    one.wait()
    with joined(1.0, 7) as same:
        assert (same.size, same.check_every) == (1, 7)


def test_one_process_raises_its_own_errors():
    for error in (InputError("a"), CertificateError("b"), ZeroDivisionError()):
        with pytest.raises(type(error)), Processes().together():
            raise error


@pytest.mark.parametrize("kind", [InputError, UnlearningError, RunError, CertificateError])
def test_what_one_refuses_all_refuse_with_the_same_error(kind):
    class Two(Processes):
        def gather(self, value):
            return [value, ("no", kind.__name__)]

    with pytest.raises(kind, match=r"^rank 1: no$") as caught, Two(0, 2).together():
        pass
    assert type(caught.value) is kind


def test_bad_arguments():
    with pytest.raises(InputError, match="distributed is 3"):
        find_processes(3)
    with pytest.raises(InputError, match="check_every is 0"):
        find_processes(None, check_every=0)
    with pytest.raises(InputError, match="there is no process group"):
        find_processes(True)


def test_a_lost_process_may_be_tried_again():
    error = lose(0, 2, "summing gradients", RuntimeError("[pair.cc:5] Read error: reset. GLHF"))
    assert isinstance(error, RunError)
    assert error.exit_code == 3
    sentence = "lost another process while waiting"
    with pytest.raises(RunError, match=sentence), Processes(0, 2).listening("waiting"):
        raise RuntimeError("Connection closed by peer")
