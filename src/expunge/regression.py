"""Softmax regression over clipped features: the model whose constants are computed, not assumed."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from expunge.errors import InputError
from expunge.precision import norm_margin
from expunge.problems import Problem

ROWS = 8192


class SoftmaxRegression(nn.Module):
    """Logits W a: a is the flattened input with a 1 appended, clipped to norm ``feature_clip``.

    In float64, and started at zero: a public start.

    >>> model = SoftmaxRegression(features=2, classes=3, feature_clip=1.0)
    >>> model.clip_features(torch.tensor([[2.0, 2.0], [0.0, 0.0]])).norm(dim=1).round(decimals=9)
    tensor([1., 1.], dtype=torch.float64)
    """

    def __init__(self, features: int, classes: int, *, feature_clip: float) -> None:
        super().__init__()
        self.problem = Problem("softmax-regression", feature_clip, features + 1, classes)
        self.weight = nn.Parameter(torch.zeros(classes, features + 1, dtype=torch.float64))

    def clip_features(self, inputs: Tensor) -> Tensor:
        """min(1, B/‖a‖) a with a = (input, 1), rounded so that no true norm exceeds B.

        A row that is not finite stays so.
        """
        B, width = self.problem.feature_clip, self.weight.shape[1]
        assert B is not None
        flat = inputs.reshape(len(inputs), -1).to(self.weight.device, torch.float64)
        if flat.shape[1] + 1 != width:
            raise InputError.of("number of features", flat.shape[1], f"{width - 1}")
        a = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
        norms = torch.linalg.vector_norm(a, dim=1, keepdim=True) * (1 + norm_margin(width))
        return a * torch.where(norms <= B, 1.0, B / norms * (1 - 2.0**-50))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.clip_features(inputs) @ self.weight.T

    def extra_repr(self) -> str:
        classes, width = self.weight.shape
        return f"features={width - 1}, classes={classes}, feature_clip={self.problem.feature_clip}"


@torch.no_grad()
def softmax_gradient(weight: Tensor, features: Tensor, targets: Tensor) -> Tensor:
    """(1/n) Σ (p_i - e_i) ⊗ a_i in float64, the operations that ``bound_gradient_error`` counts.

    >>> weight = torch.zeros(2, 1, dtype=torch.float64)
    >>> softmax_gradient(weight, torch.ones(1, 1, dtype=torch.float64), torch.tensor([1])).tolist()
    [[0.5], [-0.5]]
    """
    total = torch.zeros_like(weight)
    for start in range(0, len(features), ROWS):
        a, y = features[start : start + ROWS], targets[start : start + ROWS]
        z = a @ weight.T
        p = z.sub_(z.amax(1, keepdim=True)).exp_()
        p.div_(p.sum(1, keepdim=True))
        p[torch.arange(len(y), device=p.device), y] -= 1
        total.addmm_(p.T, a)
    return total.div_(len(features))
