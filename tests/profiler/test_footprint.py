"""The memory that a job is refused for is what it would take, found without taking it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from aicb.step.kernels import STEP_END, Kernel, kernel_table
from profiler import footprint
from profiler.builders import build
from profiler.footprint import PeakMemory, call_all, kernel_bytes, layer_bytes
from profiler.layer import build_layer
from tests.profiler.numerics import CPU, JOBS, TOLERANCES, chosen, kernels, small_job


def test_the_peak_is_of_what_is_held_at_once() -> None:
    """Two of 4 kB are held, a third comes and goes, views and work in place take nothing."""
    with PeakMemory() as memory:
        one, other = torch.ones(1024), torch.ones(1024)
        torch.ones(512).view(2, 256).mul_(2.0)
        torch.ones(1024).neg_()
        held = one[:10], other.view(32, 32)
    assert memory.peak == 3 * 4096
    assert len(held) == 2


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", JOBS)
def test_a_kernel_takes_what_was_said(kind: str, dtype: str) -> None:
    """One that takes more ends in an out-of-memory error halfway; one that takes much less is refused for nothing."""
    job = small_job(kind, dtype, flash=dtype != "float32")
    choices = chosen(job)
    for kernel in kernel_table(job):
        if kernel.name in STEP_END:
            continue
        with PeakMemory() as memory:
            call_all(build(kernel, job, CPU, choices))
        said = kernel_bytes(kernel, job, CPU, choices)
        # The flash kernel of a CPU is not FlashAttention-2, whose fp32 sums stand in for what it allocates itself.
        most = 2.5 if kernel.op == "flash_attention" else 1.5
        assert memory.peak <= said <= most * memory.peak, kernel.name


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", JOBS)
def test_a_layer_takes_what_was_said(kind: str, dtype: str) -> None:
    job = small_job(kind, dtype, flash=dtype != "float32")
    choices = chosen(job)
    for index in range(2):
        with PeakMemory() as memory:
            call_all(build_layer(job, CPU, choices, index))
        assert memory.peak <= layer_bytes(job, CPU, choices, index) <= 1.5 * memory.peak


def test_nothing_is_allocated_however_large_the_job() -> None:
    """A GEMM of 2^24 tokens, 2^20 wide: x, W, dY and the fp32 main gradient; the output, dX or a 16-bit dW on top."""
    job = small_job("gpt", "bfloat16")
    m, k, n = 2**24, 2**20, 2**18
    kernel = Kernel(name="huge", op="gemm", rows=(), shape={"m": m, "k": k, "n": n, "bias": 0}, gradients="gemm")
    said = kernel_bytes(kernel, job, CPU, chosen(job))
    assert said == pytest.approx(footprint.MARGIN * (2 * (m * k + k * n + m * n) + 4 * k * n + 2 * m * k), rel=1e-6)


def test_heads_too_wide_for_flash_kernels_hold_their_squares() -> None:
    """Head dim 264 runs unfused: scores and probabilities are held, s = 1024."""
    job = small_job("gpt", "bfloat16", flash=True, model={"kv_channels": 264})
    kernel = kernels(job)["atten_flash"]
    kernel = replace(kernel, shape={**kernel.shape, "batch": 1, "seq": 1024})
    with PeakMemory() as memory:
        call_all(build(kernel, job, CPU, chosen(job)))
    assert memory.peak <= kernel_bytes(kernel, job, CPU, chosen(job))
    assert memory.peak > 4 * 2 * 4 * 1024**2  # four squares of 4 heads in bfloat16


def test_what_cannot_be_told_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of a library that has no fake form."""

    def refuse(*_: object) -> None:
        raise NotImplementedError("no fake form")

    job = small_job("gpt")
    monkeypatch.setattr(footprint, "build", refuse)
    monkeypatch.setattr(footprint, "build_layer", refuse)
    assert kernel_bytes(kernels(job)["Emb"], job, CPU, chosen(job)) == 0
    assert layer_bytes(job, CPU, chosen(job), 0) == 0
