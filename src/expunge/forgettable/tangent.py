"""Tangent features: the network linearised at its public weights (THEORY, section 10).

    φ(x) = round(P ∇_θ Σ_k f_k(θ_0; x))

for chosen parameters θ at their public values θ_0 and a public random projection P of signs. It is
one gradient of the *summed* outputs per example, the pseudo-tangent kernel: with one output it is
the tangent kernel itself, with several it is cheaper than the true linearisation and not the same.

Nothing is compiled: torch.compile takes 5 to 25 seconds here and makes the gradient of the small
CIFAR net 1.0 to 1.3 times as fast, of a 512-32-32-10 head 4 times, where the projection takes most
of the time; 50,000 examples do not pay for it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.forgettable.features import Features

_PIECE = 1 << 16
_HELD = 1 << 27  # signs that are kept between batches, as floats: half a GB


class TangentFeatures(Features):
    """``dimension`` signs' worth of the gradient of ``network`` at its own weights.

    ``parameters`` are names or patterns of those the gradient is taken for; all of them by default.
    The projection is drawn in pieces from ``seed``, and held as a whole only where it is small.

    >>> features = TangentFeatures(nn.Linear(3, 1).eval(), 8, seed="public")
    >>> features.compute(torch.randn(2, 3)).shape, features.describe()["tangent"]
    ((2, 8), 8)
    """

    def __init__(
        self,
        network: nn.Module,
        dimension: int,
        *,
        parameters: Sequence[str] = ("*",),
        bits: int = 8,
        lift: int = 0,
        seed: str = "",
        batch_size: int = 32,
        progress: bool = False,
    ) -> None:
        if type(dimension) is not int or dimension < 1:
            raise InputError.of("dimension", dimension, "a whole number >= 1")
        chosen = [
            name
            for name, _ in network.named_parameters()
            if any(fnmatchcase(name, pattern) for pattern in parameters)
        ]
        if not chosen:
            raise InputError.of("parameters", list(parameters), "names of the network's parameters")
        self.dimension, self.parameters = dimension, chosen
        tangent = _Tangent(network, chosen, dimension, seed)
        super().__init__(
            tangent.train(network.training),
            bits=bits,
            lift=lift,
            seed=seed,
            batch_size=batch_size,
            progress=progress,
        )

    def describe(self) -> dict[str, Any]:
        """As of the network's own features, with the projection and the parameters."""
        return super().describe() | {
            "tangent": self.dimension,
            "parameters": " ".join(self.parameters),
        }


class _Tangent(nn.Module):
    """Each example's projected gradient, by ``torch.func``."""

    def __init__(self, network: nn.Module, names: list[str], dimension: int, seed: str) -> None:
        super().__init__()
        self.network, self.names = network, names
        self.dimension, self.seed = dimension, seed

    def forward(self, inputs: Tensor) -> Tensor:
        return self._project(self.differentiate(inputs))

    def differentiate(self, inputs: Tensor) -> Tensor:
        """∇_θ Σ_k f_k(θ_0; x) of every row."""
        known = dict(self.network.named_parameters()) | dict(self.network.named_buffers())
        known = {name: tensor.detach() for name, tensor in known.items()}
        chosen = {name: known.pop(name) for name in self.names}

        def score(theta: dict[str, Tensor], x: Tensor) -> Tensor:
            out = torch.func.functional_call(self.network, known | theta, (x[None],))
            return out.sum()

        gradients = torch.func.vmap(torch.func.grad(score), in_dims=(None, 0))(chosen, inputs)
        return torch.cat([gradients[name].flatten(1) for name in self.names], dim=1)

    def _project(self, flat: Tensor) -> Tensor:
        out = flat.new_zeros(len(flat), self.dimension)
        draw = _hold_signs if flat.shape[1] * self.dimension <= _HELD else _hold_signs.__wrapped__
        for piece, start in enumerate(range(0, flat.shape[1], _PIECE)):
            part = flat[:, start : start + _PIECE]
            shape = part.shape[1], self.dimension
            out += part @ draw(self.seed, piece, *shape, flat.device, flat.dtype)
        return out


@functools.lru_cache(maxsize=32)
def _hold_signs(
    seed: str, piece: int, rows: int, columns: int, device: torch.device, dtype: torch.dtype
) -> Tensor:
    return torch.from_numpy(_draw_signs(seed, piece, rows, columns)).to(device, dtype)


def _draw_signs(
    seed: str, piece: int, rows: int, columns: int
) -> np.ndarray[Any, np.dtype[np.int8]]:
    """Public signs: bits of SHAKE-256 of the seed and the piece's number."""
    name = b"expunge/tangent-1\0" + piece.to_bytes(8, "little")
    stream = hashlib.shake_256(name + seed.encode("utf-8", "surrogatepass"))
    bits = np.unpackbits(
        np.frombuffer(stream.digest(-(-rows * columns // 8)), np.uint8), count=rows * columns
    )
    return bits.reshape(rows, columns).astype(np.int8) * np.int8(2) - np.int8(1)
