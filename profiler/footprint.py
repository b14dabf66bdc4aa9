"""How much memory a kernel or a layer takes, found before anything is allocated: the same calls, without data.

PyTorch's fake tensors have a shape, a type and a device; what they would hold at once is counted. For flash attention,
which has no fake form everywhere, what FlashAttention-2 allocates stands in; for norms PyTorch's; nothing is compiled.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from aicb.config.job import Job
from aicb.step.kernels import Kernel, kernel_table
from profiler.accumulation import ApexWgrad, add_in_gemm
from profiler.attention import Unfused
from profiler.builders import Built, build
from profiler.fusion import Elementwise
from profiler.grouped import Grouped
from profiler.implementations import EPSILON, Choices
from profiler.layer import build_layer

MARGIN, WORKSPACE = 1.1, 64 * 2**20
"""On top of what tensors hold: an allocator's rounding; bytes that cuBLAS and its like take once."""
_UNKNOWN = 0


class PeakMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes that tensors made inside held at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and count the storage of what it returns."""
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
        self._alive = {key: held for key, held in self._alive.items() if not held[0].expired()}  # type: ignore[no-untyped-call]
        self.peak = max(self.peak, sum(size for _, size in self._alive.values()))
        return out


def kernel_bytes(kernel: Kernel, job: Job, device: torch.device, choices: Choices) -> int:
    """Return the memory that `kernel`'s builder, forward and backward take; 0 where it cannot be told."""
    return _peak(lambda standing_in: build(kernel, job, device, standing_in), job, device, choices)


def layer_bytes(job: Job, device: torch.device, choices: Choices, index: int) -> int:
    """Return the memory that one whole layer takes, forward and backward; 0 where it cannot be told."""
    return _peak(lambda standing_in: build_layer(job, device, standing_in, index), job, device, choices)


def _peak(make: Callable[[Choices], Built], job: Job, device: torch.device, choices: Choices) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode

    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # what fails is no news to the user
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), one_thread(), PeakMemory() as memory:
            call_all(make(_standing_in(job, device, choices)))
    except Exception:  # noqa: BLE001 (an operator without a fake form raises anything; running out is an error too)
        return _UNKNOWN
    return int(MARGIN * memory.peak) + (WORKSPACE if device.type == "cuda" else 0)


def one_thread() -> AbstractContextManager[None]:
    """Backward in the thread that asks for it: a card's own thread frees when it comes to it, and peaks differ."""
    return cast("AbstractContextManager[None]", torch.autograd.set_multithreading_enabled(False))


def call_all(built: Built) -> None:
    """Run what is timed of it, once each."""
    for call in (built.forward, built.input_grad, built.weight_grad):
        if call is not None:
            call()


def _standing_in(job: Job, device: torch.device, choices: Choices) -> Choices:
    """Return the choices with PyTorch's own operators in place of extensions and compiled code."""
    norm = partial(getattr(nn, job.model.normalization), eps=EPSILON, device=device)
    dtype = getattr(torch, job.training.dtype)
    widths = {kernel.shape["width"] for kernel in kernel_table(job) if kernel.op == "norm"}
    return replace(
        choices,
        attend=Unfused(job.model.attention_dropout) if isinstance(choices.attend, Unfused) else _flash,
        norms={width: partial(norm, width, dtype=dtype) for width in widths},
        accumulate=add_in_gemm if isinstance(choices.accumulate, ApexWgrad) else choices.accumulate,
        experts=Grouped(_grouped) if isinstance(choices.experts, Grouped) else choices.experts,
        fused=Elementwise(),
    )


def _grouped(one: Tensor, other: Tensor, offs: Tensor) -> Tensor:
    """(m, k) x (E, k, n) -> (m, n), or (n, m) x (m, k) -> (E, n, k)."""
    size = (one.size(0), other.size(2)) if other.dim() == 3 else (offs.numel(), one.size(0), other.size(1))
    return one.new_empty(size)


class _Flash(torch.autograd.Function):
    """FlashAttention-2's memory: output and log-sum-exp; gradients, an fp32 sum of dQ, dK and dV of all query heads."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = torch.empty_like(query)
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, *_ = ctx.saved_tensors
        summed = query.new_empty(query.shape, dtype=torch.float32)
        of_heads = [] if key.shape == query.shape else [torch.empty_like(query), torch.empty_like(query)]
        found = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del summed, of_heads, grads
        return found


def _flash(query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
    """V is padded to the width of Q, as FlashAttention-2 wants it."""
    v = value.size(-1)
    value = nn.functional.pad(value, (0, query.size(-1) - v))
    return cast("Tensor", _Flash.apply(query, key, value))[..., :v]  # type: ignore[no-untyped-call]
