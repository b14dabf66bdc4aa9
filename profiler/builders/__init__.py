"""Turns each entry of `aicb.kernels.kernel_table` into tensors and calls to time: one builder for each op.

Adding an op is one entry of OPS: its builder, and the bytes it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from aicb.config.job import Job
from aicb.step.kernels import Kernel
from profiler.builders import attention, dense, experts, training
from profiler.builders.built import Built, Request
from profiler.implementations import Choices

__all__ = ["OPS", "Built", "Op", "Request", "build", "needed_bytes"]


@dataclass(frozen=True, slots=True)
class Op:
    """How to build one op, and how many bytes that takes for a shape and an element's bytes."""

    build: Callable[[Request], Built]
    bytes: Callable[[Mapping[str, int], int], int]


OPS: dict[str, Op] = {
    "embedding": Op(dense.embedding, dense.embedding_bytes),
    "norm": Op(dense.norm, dense.norm_bytes),
    "gemm": Op(dense.gemm, dense.gemm_bytes),
    "grouped_gemm": Op(experts.grouped_gemm, experts.grouped_gemm_bytes),
    "rope": Op(dense.rope, dense.rope_bytes),
    "latent_rope": Op(dense.latent_rope, dense.latent_rope_bytes),
    "flash_attention": Op(attention.flash_attention, attention.flash_attention_bytes),
    "scores": Op(attention.scores, attention.scores_bytes),
    "softmax": Op(attention.softmax, attention.softmax_bytes),
    "context": Op(attention.context, attention.context_bytes),
    "residual": Op(dense.residual, dense.residual_bytes),
    "activation": Op(dense.activation, dense.activation_bytes),
    "router": Op(experts.router, experts.router_bytes),
    "permute": Op(experts.permute, experts.permutation_bytes),
    "unpermute": Op(experts.unpermute, experts.permutation_bytes),
    "cross_entropy": Op(training.cross_entropy, training.cross_entropy_bytes),
    "grad_zero": Op(training.grad_zero, training.gradient_bytes),
    "grad_scale": Op(training.grad_scale, training.gradient_bytes),
    "grad_clip": Op(training.grad_clip, training.clip_bytes),
    "optimizer": Op(training.optimizer, training.optimizer_bytes),
}


def build(kernel: Kernel, job: Job, device: torch.device, choices: Choices, memory: int | None = None) -> Built:
    """Create `kernel`'s tensors on `device`, of `memory` free bytes (None: enough), and the calls to time.

    Raises KeyError for an op without a builder, UserError when a backward has no graph to run on.
    """
    request = Request(kernel=kernel, job=job, device=device, choices=choices, memory=memory)
    return OPS[kernel.op].build(request)


def needed_bytes(kernel: Kernel, job: Job) -> int:
    """Return the device memory that `kernel`'s builder, forward and backward take together: an upper estimate.

    The optimizer's and the gradient passes' are for all they go over; their builders take less where less is free.
    """
    return OPS[kernel.op].bytes(kernel.shape, job.element_bytes)
