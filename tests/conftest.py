"""One hypothesis profile for all tests: no deadlines (the machine is shared), the same examples."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

collect_ignore = ["helpers"]  # what tests import, and processes that they start

settings.register_profile("house", deadline=None, derandomize=True)
settings.load_profile("house")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch on one thread: the same order of adding, and no team on a busy machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
