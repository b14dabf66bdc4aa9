"""Weight gradients as Megatron computes them: added to an fp32 main gradient, by the GEMM itself or after it.

Megatron-Core's linear layers call apex's kernel where it is built; Transformer Engine's GEMMs do the same inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn import functional

from aicb.config.job import Job
from profiler.candidates import Choice, RefusedError, Wanted, extension, first_working
from profiler.grouped import GroupedGemm


class Accumulate(Protocol):
    """main += gradᵀ x: (n, k) fp32, (m, n), (m, k)."""

    def __call__(self, main: Tensor, grad: Tensor, x: Tensor, /) -> object:
        """Add in place."""


THEN_ADD = "GEMM, then add"


def gemm_then_add(main: Tensor, grad: Tensor, x: Tensor) -> None:
    """Both apart, as Megatron's data-parallel hook adds a gradient that a layer returned."""
    main.add_(grad.t() @ x)


def add_in_gemm(main: Tensor, grad: Tensor, x: Tensor) -> None:
    """PyTorch's GEMM of 16-bit operands that adds to fp32: aten::addmm.dtype_out (CUDA, PyTorch 2.9)."""
    torch.ops.aten.addmm.dtype_out(main, grad.t(), x, torch.float32, out=main)


def add_in_gemm_fp32(main: Tensor, grad: Tensor, x: Tensor) -> None:
    """The same where all three are fp32."""
    main.addmm_(grad.t(), x)


class ApexWgrad:
    """apex's `wgrad_gemm_accum_fp32(input, grad_output, main_grad)`, Megatron-Core's own choice."""

    def __init__(self, function: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        self._function = function

    def __call__(self, main: Tensor, grad: Tensor, x: Tensor, /) -> None:
        """Add in place."""
        self._function(x, grad, main)


def choose_accumulation(job: Job, device: torch.device, wanted: Wanted) -> tuple[Choice, Accumulate]:
    """Choose how the weight gradient of a GEMM reaches its main gradient."""
    name, fused = job.training.dtype, wanted.gradient_accumulation_fusion
    if fused is False:
        return Choice(THEN_ADD, "--gradient_accumulation_fusion is off"), gemm_then_add
    if fused is None and name == "float32":
        return Choice(
            THEN_ADD, "--gradient_accumulation_fusion is on for 16-bit types only, unless typed"
        ), gemm_then_add
    dtype = getattr(torch, name)

    def probe(accumulate: Accumulate) -> Iterable[Tensor]:
        main = torch.zeros(32, 16, device=device)
        accumulate(
            main, torch.randn(64, 32, device=device, dtype=dtype), torch.randn(64, 16, device=device, dtype=dtype)
        )
        return [main]

    def apex() -> tuple[str, Accumulate]:
        found = extension("fused_weight_gradient_mlp_cuda", "apex's fused weight gradient", device)
        function = getattr(found, "wgrad_gemm_accum_fp32", None)
        if function is None:
            raise RefusedError("apex has no wgrad_gemm_accum_fp32")
        return "apex wgrad_gemm_accum_fp32", ApexWgrad(function)

    own: tuple[str, Accumulate] = ("torch addmm into fp32", add_in_gemm)
    if name == "float32":
        own = ("torch addmm in place", add_in_gemm_fp32)
    return first_working([apex, lambda: own, lambda: (THEN_ADD, gemm_then_add)], probe)


class _Linear(torch.autograd.Function):
    """x Wᵀ (+ b) whose backward adds the weight gradient to a main gradient; W is no part of the graph."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, weight: Tensor, main: Tensor, accumulate: Accumulate
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main, ctx.accumulate = main, accumulate
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None, None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        ctx.accumulate(ctx.main, grad, x)
        return grad @ weight, grad.sum(dim=0) if ctx.needs_input_grad[1] else None, None, None, None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, main: Tensor, accumulate: Accumulate) -> Tensor:
    """(m, k), (n, k), (n,) -> (m, n); differentiable by x and bias, and W's gradient goes to `main` (n, k)."""
    return cast("Tensor", _Linear.apply(x, bias, weight, main, accumulate))  # type: ignore[no-untyped-call]


class _GroupedLinear(torch.autograd.Function):
    """The same for the experts of a rank."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, main: Tensor, way: GroupedGemm, counts: Sequence[int], ends: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.main, ctx.way, ctx.counts, ctx.ends = main, way, counts, ends
        return way.forward(x, weight, counts, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None, None, None, None]:
        (grad,), (x, weight) = grads, ctx.saved_tensors
        ctx.way.accumulate(ctx.main, grad, x, ctx.counts, ctx.ends)
        return ctx.way.input_grad(grad, weight, ctx.counts, ctx.ends), None, None, None, None, None


def grouped_linear(
    x: Tensor, weight: Tensor, main: Tensor, way: GroupedGemm, counts: Sequence[int], ends: Tensor
) -> Tensor:
    """(m, k), (E, n, k) -> (m, n); differentiable by x, and the weights' gradients go to `main` (E, n, k)."""
    apply = partial(_GroupedLinear.apply, x, weight, main)
    return cast("Tensor", apply(way, counts, ends))
