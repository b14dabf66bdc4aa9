"""The experts' GEMMs, as many as there are experts on a rank: in one grouped kernel, or one after another.

Rows of the same expert are neighbours: counts[i] of them, and `ends` is the running sum of the counts (int32, on the
device). Weights are (E, n, k).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional


class GroupedGemm(Protocol):
    """One way to run them."""

    def forward(self, x: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        """(m, k), (E, n, k) -> (m, n); differentiable."""

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        """(m, n), (E, n, k) -> (m, k)."""

    def weight_grad(self, grad: Tensor, x: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        """(m, n), (m, k) -> (E, n, k)."""


def spread_evenly(rows: int, experts: int) -> list[int]:
    """Rows of each expert under uniform routing; the first get what is left over."""
    each, rest = divmod(rows, experts)
    return [each + (expert < rest) for expert in range(experts)]


class Loop:
    """One GEMM after another, as Megatron-Core's SequentialMLP."""

    def forward(self, x: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, n)."""
        parts = zip(x.split_with_sizes(list(counts)), weight.unbind(), strict=True)
        return torch.cat([functional.linear(part, expert) for part, expert in parts])

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, k)."""
        parts = zip(grad.split_with_sizes(list(counts)), weight.unbind(), strict=True)
        return torch.cat([part @ expert for part, expert in parts])

    def weight_grad(self, grad: Tensor, x: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (E, n, k)."""
        out = grad.new_empty(len(counts), grad.size(1), x.size(1))
        for expert, part, rows in zip(
            out.unbind(), grad.split_with_sizes(list(counts)), x.split_with_sizes(list(counts)), strict=True
        ):
            torch.mm(part.t(), rows, out=expert)
        return out


class Grouped:
    """PyTorch's grouped matmul."""

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        self._multiply = multiply

    def forward(self, x: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, n)."""
        return self._multiply(x, weight.transpose(1, 2), offs=ends)

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, k)."""
        return self._multiply(grad, weight, offs=ends)

    def weight_grad(self, grad: Tensor, x: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (E, n, k)."""
        return self._multiply(grad.t(), x, offs=ends)
