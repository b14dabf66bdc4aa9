"""Turns each entry of `aicb.step.kernels.kernel_table` into tensors and calls to time: one builder for each op."""

from __future__ import annotations

from collections.abc import Callable

import torch

from aicb.config.job import Job
from aicb.step.kernels import Kernel
from profiler.builders import attention, dense, experts, training
from profiler.builders.built import Built, Request
from profiler.implementations import Choices

__all__ = ["OPS", "Built", "Request", "build"]


OPS: dict[str, Callable[[Request], Built]] = {
    "embedding": dense.embedding,
    "norm": dense.norm,
    "gemm": dense.gemm,
    "grouped_gemm": experts.grouped_gemm,
    "rope": dense.rope,
    "latent_rope": dense.latent_rope,
    "flash_attention": attention.flash_attention,
    "scores": attention.scores,
    "softmax": attention.softmax,
    "context": attention.context,
    "residual": dense.residual,
    "activation": dense.activation,
    "router": experts.router,
    "permute": experts.permute,
    "unpermute": experts.unpermute,
    "cross_entropy": training.cross_entropy,
    "grad_zero": training.grad_zero,
    "grad_scale": training.grad_scale,
    "grad_clip": training.grad_clip,
    "optimizer": training.optimizer,
}


def build(kernel: Kernel, job: Job, device: torch.device, choices: Choices, memory: int | None = None) -> Built:
    """Create `kernel`'s tensors on `device`, of `memory` free bytes (None: enough), and the calls to time.

    Raises KeyError for an op without a builder, UserError when a backward has no graph to run on.
    """
    request = Request(kernel=kernel, job=job, device=device, choices=choices, memory=memory)
    return OPS[kernel.op](request)
