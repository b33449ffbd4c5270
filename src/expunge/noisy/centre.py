"""The public point that clips and weight decay pull towards, and the noise that fits it.

It is a fresh initialisation under a public seed, zero, or public weights that somebody gives. By
THEORY, section 6, a run at a small ε is a restart from there with the noise that is left on top of
it: so the noise should be well below what the centre itself holds in every layer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from expunge.certificates.record import CentreOrigin
from expunge.errors import InputError
from expunge.noisy.fresh import Initialisation, draw_fresh
from expunge.noisy.model import (
    CertifiedModel,
    copy_model,
    list_aliases,
    list_uncertified,
)
from expunge.processes.group import Processes
from expunge.processes.weights import cut_rows, is_multiple, to_local
from expunge.training.randomness import untouched_random

LOG = logging.getLogger("expunge")
FRACTION = 0.1


@dataclass(frozen=True, eq=False)
class PublicCentre:
    """A centre by the names of the certified parameters, None for zero, and what it is."""

    tensors: dict[str, Tensor] | None
    origin: CentreOrigin


Centre = Mapping[str, Tensor] | Initialisation | PublicCentre | Literal["initialisation", "zero"]


def find_centre(
    certified: CertifiedModel, centre: Centre, processes: Processes | None = None
) -> PublicCentre:
    """The centre of a run, on the device of its parameters; never the old model.

    >>> found = find_centre(copy_model(nn.Linear(2, 1)), "initialisation")
    >>> found.origin.seed, found.origin.drawn
    ('expunge', 'reset_parameters of every module')
    """
    processes = Processes() if processes is None else processes
    with processes.together():
        found = _choose(certified, centre)
        if found.tensors is None:
            warn_of_gains(certified.model)
    if found.tensors is not None:
        _check_old(certified.certified, found.tensors, found.origin, processes)
    return found


def _choose(certified: CertifiedModel, centre: Centre) -> PublicCentre:
    match centre:
        case "zero":
            return PublicCentre(None, CentreOrigin("zero"))
        case PublicCentre(tensors=given, origin=origin):
            return PublicCentre(None if given is None else match_centre(certified, given), origin)
        case "initialisation" | Initialisation():
            start = Initialisation() if centre == "initialisation" else centre
            origin = CentreOrigin("initialisation", str(start.seed), start.how)
            return PublicCentre(match_centre(certified, draw_fresh(certified, start)), origin)
        case Mapping():
            return PublicCentre(match_centre(certified, centre), CentreOrigin("public weights"))
        case _:
            raise InputError.of(
                "centre",
                centre,
                "'initialisation', 'zero', an Initialisation(seed, build) or a state_dict of "
                "public weights",
            )


def measure_scales(centre: Mapping[str, Tensor]) -> dict[str, float]:
    """The root mean square of every tensor, √(Σ c_i² / n): the standard deviation of one that was
    drawn around 0, the value of one that is constant, such as the gains of a normalisation.

    >>> measure_scales({"gain": torch.ones(3), "bias": torch.zeros(3)})
    {'gain': 1.0, 'bias': 0.0}
    """
    return {
        name: float(c.detach().double().square().mean().sqrt())
        for name, c in centre.items()
        if c.numel() > 0
    }


def choose_scale(centre: Mapping[str, Tensor] | None) -> float | None:
    """A tenth of the smallest scale among the centre's tensors: the noise that may be left.

    Tensors of zeros (biases, the B of a LoRA adapter) have no scale of their own, and take what the
    others allow. None if all are zeros: then nothing is known.

    >>> choose_scale({"weight": torch.full((2, 2), 0.5), "bias": torch.zeros(2)})
    0.05
    """
    scales = [] if centre is None else [s for s in measure_scales(centre).values() if s > 0]
    return FRACTION * min(scales) if scales else None


def find_scale(model: nn.Module, centre: Centre = "initialisation") -> float | None:
    """The ``scale`` for :func:`expunge.plan`: a tenth of the smallest layer of the public centre.

    It is a function of the architecture and the seed, or of public weights, and never of what
    ``model`` holds. None for the zero centre, of which nothing is known.

    >>> from expunge import plan
    >>> scale = find_scale(nn.Linear(100, 10))
    >>> 0.004 < scale < 0.006
    True
    >>> p = plan(epsilon=1.0, delta=1e-5, parameters=1010, scale=scale)
    """
    with torch.inference_mode(False), untouched_random():
        held = {name: t.detach() for name, t in list_uncertified(model).items()}
        certified = copy_model(model, public=held or None, buffers="reset")
        return choose_scale(_choose(certified, centre).tensors)


def list_gains(model: nn.Module) -> list[str]:
    """The normalisations whose gains are trained: a gain near 0 silences its layer.

    >>> list_gains(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    ['1']
    """
    return [
        path or "itself"
        for path, module in model.named_modules()
        if type(module).__name__.endswith(("Norm", "Norm1d", "Norm2d", "Norm3d"))
        and getattr(getattr(module, "weight", None), "requires_grad", False)
    ]


def warn_of_gains(model: nn.Module) -> None:
    if gains := list_gains(model):
        LOG.warning(
            "the centre is zero, and with it the gains of %d normalisations (%s …): such a network "
            "hardly trains again; use the centre 'initialisation', where gains are 1",
            len(gains), gains[0],
        )  # fmt: skip


def match_centre(
    certified: CertifiedModel, centre: Mapping[str, Tensor], what: str = "centre"
) -> dict[str, Tensor]:
    """The centre's tensors by the certified names, on the parameters' device.

    Tied weights may come under any of their names; entries for frozen parameters and buffers are
    ignored; anything missing, unknown or of another shape is refused by name.
    """
    aliases = list_aliases(certified.model)
    known = {name for names in aliases.values() for name in names}
    unknown = [name for name in centre if name not in known]
    if unknown:
        raise InputError.of(f"{what} key", unknown[0], "the name of a parameter of the model")
    matched: dict[str, Tensor] = {}
    for name, p in certified.certified.items():
        found = [alias for alias in aliases[id(p)] if alias in centre]
        if not found:
            raise InputError(f"{what} has no {name}; it must have every trainable parameter")
        tensor = centre[found[0]]
        if not isinstance(tensor, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError.of(f"{what}[{found[0]!r}]", tensor, "a tensor")
        if not tensor.is_floating_point() or not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{what}[{found[0]!r}] holds values that are not finite real numbers")
        for alias in found:
            if centre[alias].shape != p.shape:
                raise InputError.of(
                    f"{what}[{alias!r}].shape", tuple(centre[alias].shape), f"{tuple(p.shape)}"
                )
            if not torch.equal(centre[alias], tensor):
                raise InputError(
                    f"{what} has different values for the tied weights {found[0]} and {alias}"
                )
        matched[name] = tensor.detach().to(p.device, copy=True)
    return matched


def _check_old(
    certified: Mapping[str, Tensor],
    centre: Mapping[str, Tensor],
    origin: CentreOrigin,
    processes: Processes,
) -> None:
    """Refuse the old model, or a multiple of it, as its own centre."""
    old = [to_local(p.detach()) for p in certified.values()]
    new = [to_local(cut_rows(centre[name], p, processes)) for name, p in certified.items()]
    if is_multiple(old, new, processes):
        raise InputError(
            "centre is the old model, or as near to it or a multiple of it as a copy "
            f"({origin.kind}): the certificate would bound nothing; it must be public weights that "
            "never saw the forget data"
        )
