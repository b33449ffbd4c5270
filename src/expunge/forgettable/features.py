"""A public frozen network as a map from an example to whole numbers.

What an example becomes must not depend on its batch-mates, not even through the shape of a batch,
which tells how many there were. Either one real row is evaluated at a time (**by construction**),
or batches have one fixed shape, padded with zeros, and a self-test on public noise found that
moving a row and replacing the others changes no bit (**tested**). Some machines pass it for some
networks and some do not (matrix products on AMD processors depend on the place in a batch), so it
runs wherever features are computed; ``choose_evaluation`` says which it is, and so does the
certificate. Either way the network must keep nothing from one call to the next: it is run on public
noise in two orders before its first row, and on that and a few real rows again after the last.

Measured here on one thread, EfficientNet-Lite0 at 96 pixels: single examples take 2.4 times as long
as batches of 32. In float64 they take 14 times as long, and gain only that machines agree more
often; so where the self-test fails, single examples run in the network's own precision.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from expunge.errors import InputError, UnlearningError
from expunge.forgettable.integers import Integers, Reals, Whole
from expunge.processes.weights import hash_weights, list_tensors
from expunge.progress import show_progress

Evaluation = Literal["by construction", "tested"]
FORMAT = "expunge-features-1"
_TRIALS, _AGAIN = 8, 4


class Features:
    """Public features: ``network`` in eval mode, or None where the inputs are vectors already.

    A certificate speaks of these very functions, so nobody else may derive classes from them.

    >>> features = Features(nn.Flatten().eval(), bits=6, lift=3, seed="a public string")
    >>> features.compute(torch.eye(4).reshape(4, 2, 2)).shape
    (4, 4)
    >>> features.describe()["lift"], features.describe()["bits"]
    (3, 6)
    """

    def __init__(
        self,
        network: nn.Module | None = None,
        *,
        bits: int = 8,
        lift: int = 0,
        seed: str = "",
        batch_size: int = 32,
        progress: bool = False,
    ) -> None:
        self.integers = Integers(bits, lift, seed)
        if type(batch_size) is not int or batch_size < 1:
            raise InputError.of("batch_size", batch_size, "a whole number >= 1")
        self.network, self.batch_size, self.progress = network, batch_size, progress
        self._hash = None if network is None else hash_network(network)
        self._code = None if network is None else hash_code(network)
        self._described: dict[str, Any] | None = None
        self._passed: dict[tuple[object, ...], bool] = {}
        self._noise: dict[tuple[object, ...], list[Reals]] = {}

    def __init_subclass__(cls) -> None:
        if (cls.__module__, cls.__qualname__) != ("expunge.forgettable.tangent", "TangentFeatures"):
            raise InputError.of("features", cls.__qualname__, "Features or TangentFeatures")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_passed": {}, "_noise": {}}  # another machine tests anew

    @classmethod
    def from_hash(
        cls, description: Mapping[str, Any], *, bits: int, lift: int, seed: str
    ) -> Features:
        """Features whose network is known by its description only: they cannot be computed."""
        features = Features(bits=bits, lift=lift, seed=seed)
        features._described = dict(description)
        return features

    def describe(self) -> dict[str, Any]:
        """The map as data: one description is one function, up to a machine's rounding."""
        if self._described is not None:
            return self._described
        return {
            "format": FORMAT,
            "network": self._hash,
            "code": self._code,
            "bits": self.integers.bits,
            "lift": self.integers.lift,
            "seed": self.integers.seed,
        }

    def compute(self, inputs: Any, only_single: bool = False, again: bool = True) -> Whole:
        """The stored integers of every row; ``only_single`` never relies on the self-test.

        ``again`` evaluates a few rows a second time; a released model leaves that out.
        """
        x = read_numbers(inputs)
        if x.ndim < 2:
            raise InputError.of("inputs", tuple(x.shape), "rows of numbers, one row per example")
        return self.integers.quantise(self._evaluate(x, only_single, again))

    def choose_evaluation(self, inputs: Any) -> Evaluation:
        """How rows like these are evaluated on this machine; nothing but their shape is read."""
        x = read_numbers(inputs)
        return "tested" if self.network is not None and self._passes(x) else "by construction"

    def _evaluate(self, x: Tensor, only_single: bool, again: bool) -> Reals:
        if self._described is not None and self._described["network"] is not None:
            raise InputError(
                "network is not given; features need it: expunge.load(path, network=...)"
            )
        if self.network is None:
            return x.reshape(len(x), -1).cpu().to(torch.float64).numpy()
        self._check_network()
        self._check_function(x)
        size = self.batch_size if not only_single and self._passes(x) else 1
        starts = range(0, len(x), size)
        shown = show_progress(starts, len(x), "features", self.progress)
        parts = [run_padded(self.network, x[at : at + size], size) for at in shown]
        found = np.concatenate(parts) if parts else np.empty((0, self._find_inputs(x)))
        if again:
            self._check_again(x, found, size)
        self._check_unchanged()
        return found

    def _check_network(self) -> None:
        assert self.network is not None
        training = [name or "the network" for name, m in self.network.named_modules() if m.training]
        if training:
            raise InputError(f"network is in train mode ({training[0]}); call network.eval() first")
        if hash_network(self.network) != self._hash:
            raise InputError("network has other weights than when these features were made")

    def _check_function(self, x: Tensor) -> None:
        key = _name_shape(x)
        if key not in self._noise:
            assert self.network is not None
            found = run_noise(self.network, x)
            self._check_unchanged()
            self._noise[key] = found

    def _check_unchanged(self) -> None:
        assert self.network is not None
        if hash_network(self.network) != self._hash:
            raise UnlearningError(
                "the network's tensors changed while features were computed; a row would depend on "
                "the rows before it"
            )

    def _check_again(self, x: Tensor, found: Reals, size: int) -> None:
        """Last, middle and first row once more, in batches of the same shape; and the noise."""
        assert self.network is not None
        if not _agree(self._noise[_name_shape(x)], run_noise(self.network, x)):
            raise UnlearningError(
                "network gives other features for public noise after these examples; a row depends "
                "on the rows before it"
            )
        for at in sorted({0, len(x) // 2, len(x) - 1} if len(x) else (), reverse=True):
            once_more = run_padded(self.network, x[at : at + 1], size)
            if not np.array_equal(once_more, found[at : at + 1], equal_nan=True):
                raise UnlearningError(
                    f"network gives other features for example {at} when it is run again; a row "
                    "depends on the rows before it"
                )

    def _find_inputs(self, x: Tensor) -> int:
        assert self.network is not None
        return run_padded(self.network, make_probe(x, 1), 1).shape[1]

    def _passes(self, x: Tensor) -> bool:
        key = _name_shape(x)
        if key not in self._passed:
            assert self.network is not None
            self._check_network()
            self._check_function(x)
            self._passed[key] = self.batch_size > 1 and is_invariant(
                self.network, x, self.batch_size
            )
        return self._passed[key]


def check_features(features: object) -> Features:
    """Nothing else may stand where a certificate says how features were computed."""
    if not isinstance(features, Features):
        raise InputError.of("features", features, "Features or TangentFeatures")
    return features


def _name_shape(x: Tensor) -> tuple[object, ...]:
    return tuple(x.shape[1:]), x.dtype, torch.get_num_threads()


def read_numbers(given: Any, name: str = "inputs") -> Tensor:
    """A dense tensor of real numbers, from whatever holds them; anything else is refused.

    >>> read_numbers([["a"]])
    Traceback (most recent call last):
    ...
    expunge.errors.InputError: inputs is a list; it must be a dense array or tensor of real numbers
    """
    kind = f"{given.dtype} array" if isinstance(given, np.ndarray) else type(given).__name__
    refused = InputError(f"{name} is a {kind}; it must be a dense array or tensor of real numbers")
    if isinstance(given, np.ma.MaskedArray):
        raise InputError(f"{name} is a masked array; it must be one with nothing masked")
    try:
        held = np.require(given, None, ["C", "W"]) if isinstance(given, np.ndarray) else given
        found = torch.as_tensor(held).detach()
    except (TypeError, ValueError, RuntimeError):
        raise refused from None
    if found.layout != torch.strided or found.is_complex():
        raise refused
    return found


def hash_network(network: nn.Module) -> str:
    """The hash of every tensor of a network, buffers that are not saved included."""
    return hash_weights(list_tensors(network) | dict(network.named_buffers()))


def hash_code(network: nn.Module) -> str:
    """SHA-256 of a network's tree of modules: names, names of classes, and what they print.

    It tells ReLU from Tanh, which have the same tensors. It does not see the code behind the name
    of a class, nor numbers that a module holds and does not print.

    >>> hash_code(nn.Sequential(nn.ReLU())) == hash_code(nn.Sequential(nn.Tanh()))
    False
    """
    tree = [(at, type(m).__qualname__, m.extra_repr()) for at, m in network.named_modules()]
    return hashlib.sha256(json.dumps(["expunge/code-1", tree]).encode()).hexdigest()


def run_padded(network: nn.Module, rows: Tensor, size: int) -> Reals:
    """The network on a batch of ``size`` rows, the missing ones zeros; one float64 row each."""
    device = next((t.device for t in network.parameters()), torch.device("cpu"))
    batch = torch.zeros((size, *rows.shape[1:]), dtype=rows.dtype, device=device)
    batch[: len(rows)] = rows.to(device)
    try:
        with torch.no_grad():
            out = cast(Callable[[Tensor], Any], network)(batch)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"network cannot be run on these inputs: {reason}") from error
    if not isinstance(out, Tensor) or len(out) != size or not out.dtype.is_floating_point:
        raise InputError("network must return one floating-point tensor with one row per example")
    return out.reshape(size, -1)[: len(rows)].to("cpu", torch.float64).numpy()


def make_probe(x: Tensor, rows: int, seed: int = 0) -> Tensor:
    """Public noise of the shape and dtype of ``x``'s rows."""
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, *x.shape[1:])
    if x.dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(x.dtype)
    most = 256 if x.dtype == torch.uint8 else 2
    return torch.randint(0, most, shape, generator=generator).to(x.dtype)


def run_noise(network: nn.Module, x: Tensor) -> list[Reals]:
    """Rows of public noise one by one; refused if one gets other bits after other rows."""
    rows = make_probe(x, _AGAIN)
    found = [run_padded(network, row[None], 1) for row in rows]
    backwards = [run_padded(network, row[None], 1) for row in rows.flip(0)][::-1]
    if not _agree(found, backwards):
        raise InputError("network gives other features when it is run again; it must be a function")
    return found


def _agree(one: list[Reals], other: list[Reals]) -> bool:
    return all(np.array_equal(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def is_invariant(network: nn.Module, x: Tensor, size: int) -> bool:
    """Whether rows keep their bits when they move and the others are replaced, on public noise."""
    rows = make_probe(x, size)
    before = run_padded(network, rows, size)
    if not np.array_equal(before, run_padded(network, rows, size), equal_nan=True):
        raise InputError("network gives other features when it is run again; it must be a function")
    for trial in range(_TRIALS):
        generator = torch.Generator().manual_seed(trial)
        order = torch.randperm(size, generator=generator)
        kept = torch.arange(size) % (trial + 1) == 0
        moved = torch.where(
            kept.reshape(-1, *[1] * (rows.ndim - 1)), rows[order], make_probe(x, size, trial + 1)
        )
        if trial % 2:
            moved[~kept] = 0
        after = run_padded(network, moved, size)
        if not np.array_equal(after[kept.numpy()], before[order[kept].numpy()], equal_nan=True):
            return False
    return True
