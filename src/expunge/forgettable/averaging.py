"""Constituents as one model: the average of their probabilities, logits or votes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from expunge.errors import InputError

Combination = Literal["probabilities", "logits", "votes"]
COMBINATIONS: tuple[Combination, ...] = ("probabilities", "logits", "votes")


class Ensemble(nn.Module):
    """Networks of one kind that answer together.

    ``probabilities``: the logarithm of the mean of their softmaxes, so that a softmax of the answer
    is that mean; ``logits``: the mean of their outputs (regression too); ``votes``: the part of
    the networks that choose each class. Its tensors are ``constituents.k.…``, those that differ;
    what is public and frozen stays in ``template`` and is not copied into a release.

    >>> net = nn.Linear(2, 3)
    >>> tensors = {name: p.detach() for name, p in net.named_parameters()}
    >>> ensemble = Ensemble(net, {0: tensors, 4: tensors})
    >>> list(ensemble.state_dict()), ensemble(torch.zeros(5, 2)).shape
    (['constituents.0.weight', 'constituents.0.bias', 'constituents.4.weight', \
'constituents.4.bias'], torch.Size([5, 3]))
    """

    def __init__(
        self,
        template: nn.Module,
        constituents: Mapping[int, Mapping[str, Tensor]],
        combination: Combination = "probabilities",
    ) -> None:
        super().__init__()
        if combination not in COMBINATIONS:
            raise InputError.of("combination", combination, "one of " + ", ".join(COMBINATIONS))
        if not constituents:
            raise InputError("an ensemble needs at least one constituent")
        self.combination: Combination = combination
        self._held, self._mapped = (template.eval(),), True
        self.constituents = nn.Module()
        for number, tensors in constituents.items():
            for name, tensor in tensors.items():
                _place(self.constituents, f"{number}.{name}", tensor)
        self.numbers = tuple(constituents)

    @property
    def template(self) -> nn.Module:
        """The network whose tensors are replaced by each constituent's."""
        return self._held[0]

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """The combined answer to a batch."""
        each = self._answer(inputs, named)
        match self.combination:
            case "probabilities":
                return torch.logsumexp(torch.log_softmax(each, dim=-1), dim=0) - _log(len(each))
            case "logits":
                return each.mean(dim=0)
            case "votes":
                chosen = each.argmax(dim=-1)
                return nn.functional.one_hot(chosen, each.shape[-1]).to(each.dtype).mean(dim=0)

    def _answer(self, inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
        """Every constituent's scores, mapped over them where the network allows it."""

        def call(tensors: dict[str, Tensor]) -> Tensor:
            return read_scores(torch.func.functional_call(self.template, tensors, inputs, named))

        each = [self.read_constituent(number) for number in self.numbers]
        if self._mapped and len(each) > 1:
            stacked = {name: torch.stack([part[name] for part in each]) for name in each[0]}
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error")  # "performance drop": mapped one by one inside
                    return torch.func.vmap(call)(stacked)
            except (RuntimeError, ValueError, NotImplementedError, UserWarning):
                self._mapped = False
        return torch.stack([call(part) for part in each])

    def read_constituent(self, number: int) -> dict[str, Tensor]:
        """The tensors of one constituent, by the network's own names."""
        prefix = f"{number}."
        held = (*self.constituents.named_parameters(), *self.constituents.named_buffers())
        return {name.removeprefix(prefix): t for name, t in held if name.startswith(prefix)}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Ensemble:
        self.template._apply(fn, recurse)  # pyright: ignore[reportPrivateUsage]
        return super()._apply(fn, recurse)


def read_scores(output: Any) -> Tensor:
    """The scores of a network: a tensor, or the ``logits`` of what it returns."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if not isinstance(found, Tensor):
        raise InputError.of("network's output", type(output).__name__, "a tensor, or have logits")
    return found


def _place(root: nn.Module, name: str, tensor: Tensor) -> None:
    """Register a tensor under a dotted name."""
    *path, last = name.split(".")
    for part in path:
        children: Sequence[str] = list(root._modules)  # pyright: ignore[reportPrivateUsage]
        if part not in children:
            root.add_module(part, nn.Module())
        root = cast(nn.Module, root._modules[part])  # pyright: ignore[reportPrivateUsage]
    if tensor.is_floating_point():
        root.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=False))
    else:
        root.register_buffer(last, tensor.clone())


def _log(count: int) -> float:
    return float(torch.log(torch.tensor(float(count))))
