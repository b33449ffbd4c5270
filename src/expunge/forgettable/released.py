"""What a head releases: a working module, and the record of where its weights come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from expunge.certificates.identifiers import commit, read_ids
from expunge.certificates.record import (
    NO_NOISE,
    RunRecord,
    Statistics,
    Trace,
    list_versions,
)
from expunge.errors import InputError
from expunge.forgettable.features import Features, read_numbers
from expunge.processes.weights import hash_weights
from expunge.recipes import Execution, Recipe

Weights = npt.NDArray[np.float64]
PIECE = 4096


class HeadModel(nn.Module):
    """The public features, then one linear map: scores = (φ/U) W.

    Its tensors are the head's alone. The network is public, is named in the certificate by its
    hash, and is not copied into the release.
    """

    weight: Tensor

    def __init__(
        self, features: Features, weights: Weights, unit: float, scale: float = 1.0
    ) -> None:
        super().__init__()
        self.features, self.unit, self.scale = features, float(unit), float(scale)
        self.weight = nn.Parameter(torch.from_numpy(weights.copy()), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        phi = self.features.integers.expand(self.features.compute(inputs, again=False))
        a = torch.from_numpy(phi).to(self.weight.device, torch.float64) / self.unit
        return (a @ self.weight / self.scale).to(torch.float32)


def write_record(
    weights: Weights,
    *,
    recipe: Recipe,
    statistics: Statistics,
    before: str | None,
    forgotten: Sequence[str],
    samples: int = 0,
    grid: float = 0.0,
    execution: Execution | None = None,
    noise: Mapping[str, Any] = NO_NOISE,
    noise_norm: float | None = None,
) -> RunRecord:
    """The record of a release; ``before`` is the hash of the release before it, if any."""
    after = hash_head(weights)
    trace = Trace()
    if noise_norm is not None:
        std = float(getattr(recipe, "noise_std", 0.0))
        norm = float(np.linalg.norm(weights))
        trace = Trace((0.0,), (std,), (0.0,), (1.0,), (norm,), (noise_norm,), (False,))
    return RunRecord(
        recipe=recipe,
        parameters=weights.size,
        grid=grid,
        execution=execution or Execution(),
        noise=dict(noise),
        noise_keys=0 if noise_norm is None else 1,
        trace=trace,
        gradient_evaluations=0,
        weights_before=before or hash_head(np.zeros_like(weights)),
        weights_noisy=after,
        weights_after=after,
        device="cpu",
        dtype="float64",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        forget=commit(forgotten, samples=samples) if forgotten else None,
        start="model" if noise_norm is not None else "fresh",
        initialisation=None if noise_norm is not None else "zero",
        checked=True,
        statistics=statistics,
        versions=list_versions(),
    )


def hash_head(weights: Weights) -> str:
    """The hash of a head's one tensor, as in its released file."""
    return hash_weights({"weight": torch.from_numpy(np.ascontiguousarray(weights))})


def check_inputs(data: Any, ids: Any) -> tuple[Iterator[tuple[Any, Any]], list[str]]:
    """(inputs, targets) and the identifiers; a Dataset is read in pieces, arrays are one."""
    paired = isinstance(data, tuple | list)
    try:
        counts = {len(part) for part in data} if paired else {len(data)}
        whole = len(counts) == 1 and (not paired or len(data) == 2)
    except TypeError:
        counts, whole = set[int](), False
    if not whole:
        raise InputError("data must be (inputs, targets) of one length, or a Dataset of such pairs")
    names, count = list(read_ids(ids, ordered=True)), counts.pop()
    if len(names) != count:
        raise InputError.of("ids", len(names), f"one identifier per example: {count}")
    return iter([(data[0], data[1])] if paired else _read_pieces(data)), names


def _read_pieces(dataset: Any) -> Iterator[tuple[Any, Any]]:
    for start in range(0, len(dataset), PIECE):
        pairs = [dataset[i] for i in range(start, min(start + PIECE, len(dataset)))]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise InputError("data must be (inputs, targets), or a Dataset of such pairs")
        inputs = torch.stack([read_numbers(x) for x, _ in pairs])
        yield inputs, np.array([np.asarray(y).tolist() for _, y in pairs])
