"""What a network is before any data: drawn from a seed, or public.

What ``build()`` does not draw from its seed could hold anything, the old model too: such tensors
must be declared public, and are compared bit for bit where a source is given.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from expunge.certificates.record import PublicTensors
from expunge.errors import InputError
from expunge.forgettable.constituents import Plan, list_every
from expunge.noisy.model import Public, is_source, match_public, read_source
from expunge.processes.weights import hash_weights

_SAME = 0.5


def find_public(plan: Plan, public: Public | None) -> PublicTensors | None:
    """The tensors that the seed does not draw, which must be public; refused by name."""
    model = plan.make(0)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    names = tuple(dict.fromkeys([*find_fixed(plan), *frozen]))
    if not names:
        return None
    every, covered = list_every(model), set[str]()
    if public is not None:
        covered = set(names) if is_source(public) else match_public(every, public)
    missing = [name for name in names if name not in covered]
    if missing:
        raise InputError(
            f"build() does not draw {', '.join(missing[:5])} from its seed, so the old model "
            "could be in there; pass public= (a state_dict, module or file to compare with, or "
            "names and patterns that you declare public)"
        )
    source, compared = "declared public by the operator", False
    if public is not None and is_source(public):
        given, source = read_source(cast(Any, public))
        compared = True
        for name in names:
            if name not in given or not _has_same_bits(given[name], every[name]):
                raise InputError(
                    f"{name} of build() is not that of the public tensors ({source}); what the "
                    "seed does not draw must be public bit for bit"
                )
    return PublicTensors(names, compared, source, hash_weights({n: every[n] for n in names}))


def find_fixed(plan: Plan) -> tuple[str, ...]:
    """The tensors of ``build()`` that its seed does not draw: public, or not explained.

    A constant of at most three digits (zeros, ones, 0.25) is hardly information. Whatever else is
    the same, or correlated, under two seeds was there before: weights of an earlier training, data,
    or a table.
    """
    one, two = list_every(plan.make(0)), list_every(plan.make(plan.assignment.shards))
    if one.keys() != two.keys():
        raise InputError("build() gives another network under another seed; it must not")
    return tuple(name for name in one if _is_fixed(one[name], two[name]))


def _is_fixed(one: Tensor, two: Tensor) -> bool:
    if one.shape != two.shape or one.numel() == 0:
        return False
    x, y = one.double().flatten(), two.double().flatten()
    if bool((x == y).all()):
        return not (bool((x == x[0]).all()) and _is_plain(one.flatten()[0]))
    if x.numel() < 64:
        return False
    x, y = x - x.mean(), y - y.mean()
    return abs(float(x @ y)) > _SAME * float(x.norm() * y.norm())


def _is_plain(value: Tensor) -> bool:
    """Whether a number is one of at most three decimal digits, as its own dtype writes it."""
    return bool(torch.tensor(float(f"{float(value):.3g}"), dtype=value.dtype) == value)


def _has_same_bits(one: Tensor, two: Tensor) -> bool:
    return hash_weights({"": one.detach()}) == hash_weights({"": two})
