"""Constituents as one model, and as folders that load where the model lives."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors.torch import save as save_bytes
from torch import Tensor, nn

from expunge.certificates.certificate import Certificate
from expunge.certificates.release import CERTIFICATE, WEIGHTS, Contents
from expunge.errors import InputError
from expunge.exact.shards_constituents import Build, Tensors, load_own
from expunge.networks.adapters import CONFIG, FILE, list_adapters
from expunge.networks.building import call_build
from expunge.networks.releases import ADAPTER, list_contents, read_verified
from expunge.networks.tensors import list_tensors

Combination = Literal["logits", "probabilities"]


class Ensemble(nn.Module):
    """Networks of one kind that answer together: one base, and what each has of its own.

    ``logits``: the mean of their outputs (regression too); ``probabilities``: the logarithm of the
    mean of their softmaxes, so that a softmax of the answer is that mean. Outputs may be tensors,
    tuples or mappings of them, or those of transformers, whose ``logits`` (and ``loss``) are
    combined. Its tensors are ``constituents.k.NAME``; what is public stays in ``base`` and is no
    part of a release.
    """

    base: nn.Module

    def __init__(
        self, base: nn.Module, constituents: Mapping[int, Tensors], combination: Combination
    ) -> None:
        super().__init__()
        self.combination: Combination = combination
        self.__dict__["base"] = base.eval()  # no submodule: it is public and not released
        self.constituents = nn.Module()
        for number, tensors in constituents.items():
            for name, tensor in tensors.items():
                _register(self.constituents, f"{number}.{name}", tensor)
        self.numbers = tuple(constituents)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The combined answer to a batch."""
        call = torch.func.functional_call
        self.base.train(self.training)
        each = [call(self.base, self.read(k), inputs, named) for k in self.numbers]
        return _combine(each, self.combination)

    def read(self, number: int) -> Tensors:
        """The tensors of one constituent, by the network's own names."""
        prefix = f"{number}."
        tensors = (*self.constituents.named_parameters(), *self.constituents.named_buffers())
        return {name.removeprefix(prefix): t for name, t in tensors if name.startswith(prefix)}

    def load(self, number: int) -> nn.Module:
        """The base with the tensors of one constituent in it: until the next call of this."""
        load_own(self.base, self.read(number))
        return self.base

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ensemble:
        self.base._apply(fn, recurse)  # pyright: ignore[reportPrivateUsage]
        return super()._apply(fn, recurse)


def _combine(each: list[Any], combination: Combination) -> Any:
    first = each[0]
    if isinstance(first, Tensor):
        if combination == "logits" or not first.ndim:
            return torch.stack(each).mean(dim=0)
        scores = torch.log_softmax(torch.stack(each), dim=-1)
        return torch.logsumexp(scores, dim=0) - math.log(len(each))
    if hasattr(first, "logits"):
        loss = getattr(first, "loss", None)
        answer = {"logits": _combine([one.logits for one in each], combination)}
        if loss is not None:
            answer["loss"] = torch.stack([one.loss for one in each]).mean()
        return type(first)(**answer)
    if isinstance(first, Mapping):
        names = cast("Mapping[str, Any]", first)
        return {name: _combine([one[name] for one in each], combination) for name in names}
    if isinstance(first, tuple | list):
        parts = zip(*each, strict=True)
        return tuple(_combine(list(part), combination) for part in parts)
    raise InputError.of("the network's output", type(first).__name__, "tensors, or have logits")


def _register(root: nn.Module, name: str, tensor: Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in dict(root.named_children()):
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if tensor.is_floating_point():
        root.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))
    else:
        root.register_buffer(last, tensor.clone())


def list_ensemble(model: Any) -> Contents:
    """What is released of an ensemble: its tensors, and the folder of every constituent.

    An adapter of PEFT lies in ``adapters/k`` as PEFT reads it, to be loaded beside the others and
    chosen by ``set_adapter``; a model of transformers in ``constituents/k`` for
    ``from_pretrained``.
    """
    if not isinstance(model, Ensemble):
        raise InputError.of("model", type(model).__name__, "the ensemble of a release")
    before = {name: t.clone() for name, t in list_tensors(model.base).items()}
    files = dict[str, bytes | Mapping[str, Any]]()
    has_files = list_adapters(model.base) or hasattr(model.base, "save_pretrained")
    for number in model.numbers if has_files else ():
        found = list_contents(model.load(number))
        adapter = cast("Mapping[str, Tensor] | None", found.files.get(f"{ADAPTER}/{FILE}"))
        if adapter is not None:
            folder = f"adapters/{number}"
            files[f"{folder}/{CONFIG}"] = cast(bytes, found.files[f"{ADAPTER}/{CONFIG}"])
            files[f"{folder}/{FILE}"] = _to_file(adapter)
        elif "config.json" in found.files:
            folder = f"constituents/{number}"
            files |= {f"{folder}/{name}": data for name, data in found.files.items()}
            files[f"{folder}/{WEIGHTS}"] = _to_file(found.tensors)
    load_own(model.base, before)
    return Contents({name: t.detach() for name, t in model.state_dict().items()}, files)


def _to_file(tensors: Mapping[str, Tensor]) -> bytes:
    """A safetensors file; transformers asks for the note."""
    own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    return save_bytes(own, {"format": "pt"})


def load_ensemble(run: str | Path, build: Build) -> Ensemble:
    """The released ensemble: ``build()`` under the run's seed, with the tensors of ``run``."""
    folder = Path(run)
    certificate = Certificate.load(folder / CERTIFICATE)
    if certificate.sharding is None:
        raise InputError.of("run", str(run), "a release of shards; expunge.load_model reads others")
    parts = dict[int, Tensors]()
    for name, tensor in read_verified(folder / WEIGHTS, certificate.weights.after).items():
        _, number, own = name.split(".", 2)
        parts.setdefault(int(number), {})[own] = tensor
    combination: Combination = certificate.sharding.combination
    ordered = {number: parts[number] for number in sorted(parts)}
    return Ensemble(call_build(build, int(certificate.seed)), ordered, combination).eval()
