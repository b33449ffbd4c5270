"""Whether all processes of a run do the same run: at the start, and every so many steps.

At the start they compare versions, recipe, model and settings in full, and one that differs stops
all with a sentence. Later they compare short digests: of the step, of the trace so far (whose norms
are the same bits everywhere), of the noise key and, where every process holds the whole vector, of
all its coordinates. A digest of a key tells nothing about it, and goes no further than the key.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from expunge.errors import InputError, UnlearningError
from expunge.processes.group import Processes, mark_told
from expunge.processes.weights import view_bytes


def check_start(processes: Processes, facts: Mapping[str, Any]) -> None:
    """Refuse a run whose processes differ in any of ``facts``: versions, recipe, hashes, sets.

    The sentence names the first difference from rank 0, and both values.
    """
    plain = json.loads(json.dumps(_flatten(facts)))
    found = processes.gather(plain)
    for rank, other in enumerate(found):
        for name in sorted(found[0].keys() | other.keys()):
            if other.get(name) != found[0].get(name):
                raise mark_told(
                    InputError(
                        f"rank {rank} has {name} {other.get(name)!r} and rank 0 has "
                        f"{found[0].get(name)!r}; all processes of a run must have the same"
                    ),
                    processes.rank,
                )


def check_step(processes: Processes, facts: Mapping[str, str]) -> None:
    """Stop a run whose processes no longer do the same."""
    processes.checks += 1
    found = processes.gather(dict(facts))
    for rank, other in enumerate(found):
        differing = sorted(name for name in found[0] if other.get(name) != found[0][name])
        if differing:
            raise mark_told(
                UnlearningError(
                    f"rank {rank} and rank 0 disagree on {' and '.join(differing)} at step "
                    f"{found[0]['step']}; processes of one run must be bit for bit alike, so it "
                    "stops here and nothing is certified"
                ),
                processes.rank,
            )


def digest_tensor(tensor: Tensor) -> str:
    """SHA-256 of a tensor's bytes, shortened.

    >>> import torch
    >>> digest_tensor(torch.zeros(3)) == digest_tensor(torch.zeros(3))
    True
    >>> digest_tensor(torch.zeros(3)) == digest_tensor(torch.ones(3))
    False
    """
    return digest_bytes(view_bytes(tensor))


def digest_bytes(data: bytes | memoryview) -> str:
    """The first 16 hexadecimal digits of SHA-256."""
    return hashlib.sha256(data).hexdigest()[:16]


def digest_key(key: bytes) -> str:
    """What tells two keys apart without telling either."""
    return digest_bytes(b"expunge/agreement\0" + key)


def _flatten(facts: Mapping[str, Any]) -> dict[str, Any]:
    """One level: the versions by their own names."""
    flat = {name: value for name, value in facts.items() if name != "versions"}
    versions: Mapping[str, Any] = facts.get("versions", {})
    return flat | {f"{name} version": value for name, value in versions.items()}
