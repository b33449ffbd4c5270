"""``torch.compile`` as all of this package uses it: whole functions, once per process."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Generator
from typing import Any, Literal

import torch

Backend = Literal["inductor", "aot_eager"]

KINDS = 200


@functools.cache
def make_compiled(
    function: Callable[..., Any], backend: Backend = "inductor"
) -> Callable[..., Any]:
    """The function captured whole, once per process; torch keeps one version per kind of model.

    "inductor" compiles what was captured, the calls between the kernels too, with random numbers
    drawn by the operations that draw them uncompiled; "aot_eager" runs it operation by operation,
    without autograd around it.
    """
    inductor = {"fallback_random": True, "cpp_wrapper": True}
    options: dict[str, Any] | None = inductor if backend == "inductor" else None
    return torch.compile(function, fullgraph=True, dynamic=False, backend=backend, options=options)


@contextlib.contextmanager
def allow_compiling() -> Generator[None]:
    """For a first call: torch by itself stops after eight kinds of model, and warns of trifles."""
    import torch._dynamo

    with warnings.catch_warnings(), torch._dynamo.config.patch(recompile_limit=KINDS):
        warnings.simplefilter("ignore")
        yield


def forbid_recompiling() -> Any:
    """All chunks are alike: a second compilation means that the model changes as it runs."""
    import torch._dynamo

    return torch._dynamo.config.patch(error_on_recompile=True)


def explain(error: Exception) -> str:
    """One line of what torch says, its explanation if it has one."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line.partition(":")[2].strip() for line in lines if line.startswith("Explanation:")]
    return f"{type(error).__name__}: {(told or lines or [''])[0]}"[:200]


class CheckedCode:
    """How much torch had compiled in this process when a check of it was last passed.

    A check of what is compiled need not be repeated by every run, only when there is more of it; a
    check that failed, or could not be made, is made again.
    """

    def __init__(self) -> None:
        self._count = 0

    def covers(self) -> bool:
        """Whether nothing was compiled since."""
        return 0 < self._count == count_compiled()

    def extend(self) -> None:
        """All that is compiled by now has passed."""
        self._count = count_compiled()


def count_compiled() -> int:
    """How many functions torch has captured in this process; 0 if it does not say."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]
