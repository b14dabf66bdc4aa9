"""The experts' GEMMs, as many as there are experts on a rank: in one grouped kernel, or one after another.

Rows of the same expert are neighbours: counts[i] of them, and `ends` is the running sum of the counts (int32, on the
device). Weights are (E, n, k), and so are their fp32 main gradients.
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
        """(m, k), (E, n, k) -> (m, n)."""

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:
        """(m, n), (E, n, k) -> (m, k)."""

    def accumulate(self, main: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int], ends: Tensor) -> None:
        """Add the weight gradients of (m, n), (m, k) to `main` (E, n, k)."""


def spread_evenly(rows: int, experts: int) -> list[int]:
    """Rows of each expert under uniform routing; the first get what is left over."""
    each, rest = divmod(rows, experts)
    return [each + (expert < rest) for expert in range(experts)]


class Loop:
    """One GEMM after another, as Megatron-Core's SequentialMLP; each accumulates as the dense GEMMs do."""

    def __init__(self, accumulate: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        self._accumulate = accumulate

    def forward(self, x: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, n)."""
        parts = zip(x.split_with_sizes(list(counts)), weight.unbind(), strict=True)
        return torch.cat([functional.linear(part, expert) for part, expert in parts])

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, k)."""
        parts = zip(grad.split_with_sizes(list(counts)), weight.unbind(), strict=True)
        return torch.cat([part @ expert for part, expert in parts])

    def accumulate(self, main: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int], ends: Tensor) -> None:  # noqa: ARG002
        """Add each expert's."""
        grads, rows = grad.split_with_sizes(list(counts)), x.split_with_sizes(list(counts))
        for expert, part, row in zip(main.unbind(), grads, rows, strict=True):
            self._accumulate(expert, part, row)


class Grouped:
    """PyTorch's grouped matmul; it has no form that adds to fp32, so the main gradient is added to after it."""

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        self._multiply = multiply

    def forward(self, x: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, n)."""
        return self._multiply(x, weight.transpose(1, 2), offs=ends)

    def input_grad(self, grad: Tensor, weight: Tensor, counts: Sequence[int], ends: Tensor) -> Tensor:  # noqa: ARG002
        """Return (m, k)."""
        return self._multiply(grad, weight, offs=ends)

    def accumulate(self, main: Tensor, grad: Tensor, x: Tensor, counts: Sequence[int], ends: Tensor) -> None:  # noqa: ARG002
        """Add all experts' at once."""
        main.add_(self._multiply(grad.t(), x, offs=ends))
