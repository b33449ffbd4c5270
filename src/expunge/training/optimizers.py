"""Stochastic gradient descent on a list of parameters, and any torch optimizer behind one face.

:class:`Sgd` is the arithmetic of ``torch.optim.SGD``, operation by operation, so that both give
the same bits; what it leaves out is the bookkeeping around it, a quarter of a small network's step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Sgd:
    """v ← m v + g + λ x; x ← x - γ v, with v = g + λ x where the momentum m is 0.

    >>> x = nn.Parameter(torch.tensor([1.0]))
    >>> descent = Sgd([x], learning_rate=0.5, momentum=0.0, weight_decay=1.0)
    >>> (3 * x).backward()
    >>> descent.step(factor=0.5)
    >>> x.item(), x.grad, descent.describe()
    (0.0, None, 'SGD(weight_decay=1.0)')
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> None:
        self.parameters, self.learning_rate = parameters, learning_rate
        self.momentum, self.weight_decay = momentum, weight_decay
        self.momenta: list[Tensor | None] = [None] * len(parameters)

    def clear(self) -> None:
        """Forget the gradients."""
        for x in self.parameters:
            x.grad = None

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One step at ``factor`` times the learning rate; the gradients are used up."""
        rate = self.learning_rate * factor
        for i, x in enumerate(self.parameters):
            v, x.grad = x.grad, None
            if v is None:
                continue
            if self.weight_decay != 0:
                v = v.add(x, alpha=self.weight_decay)
            if self.momentum != 0:
                held = self.momenta[i]
                v = v.clone() if held is None else held.mul_(self.momentum).add_(v)
                self.momenta[i] = v
            x.add_(v, alpha=-rate)

    def describe(self) -> str:
        """The name and what is not zero among the settings."""
        return _describe("SGD", {"momentum": self.momentum, "weight_decay": self.weight_decay})


class Scheduled:
    """A torch optimizer whose learning rates a schedule scales."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates = [float(group["lr"]) for group in optimizer.param_groups]

    def clear(self) -> None:
        """Forget the gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, factor: float) -> None:
        """One step at ``factor`` times every learning rate; the gradients are used up."""
        for group, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            group["lr"] = rate * factor
        self.optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        self.clear()

    def describe(self) -> str:
        """The name and what is not zero among the usual settings."""
        group = self.optimizer.param_groups[0]
        names = ("momentum", "weight_decay", "betas")
        settings = {name: group.get(name) for name in names}
        return _describe(type(self.optimizer).__name__, settings)


Optimizing = Sgd | Scheduled


def _describe(name: str, settings: Mapping[str, object]) -> str:
    shown = [f"{key}={value}" for key, value in settings.items() if value]
    return name + (f"({', '.join(shown)})" if shown else "")
