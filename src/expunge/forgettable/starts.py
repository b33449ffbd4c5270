"""What a network is before any data: drawn from a seed, or public.

What ``build()`` does not draw from its seed could hold anything, the old model too: such tensors
must be declared public, and are compared bit for bit where a source is given.
"""

from __future__ import annotations

from typing import Any, cast

from expunge.certificates.record import PublicTensors
from expunge.errors import InputError
from expunge.forgettable.constituents import Plan, list_every
from expunge.noisy.fresh import find_fixed
from expunge.noisy.model import Public, is_source, match_public, read_source
from expunge.processes.weights import has_same_bits, hash_weights


def find_public(plan: Plan, public: Public | None) -> PublicTensors | None:
    """The tensors that the seed does not draw, which must be public; refused by name."""
    model = plan.make(0)
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    names = tuple(dict.fromkeys([*list_fixed(plan), *frozen]))
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
            if name not in given or not has_same_bits(given[name], every[name]):
                raise InputError(
                    f"{name} of build() is not that of the public tensors ({source}); what the "
                    "seed does not draw must be public bit for bit"
                )
    return PublicTensors(names, compared, source, hash_weights({n: every[n] for n in names}))


def list_fixed(plan: Plan) -> tuple[str, ...]:
    """The tensors of ``build()`` that its seed does not draw: public, or not explained."""
    one, two = list_every(plan.make(0)), list_every(plan.make(plan.assignment.shards))
    if one.keys() != two.keys():
        raise InputError("build() gives another network under another seed; it must not")
    return find_fixed(one, two)
