"""Chooses what runs: apex or torch norms and Adam, grouped GEMM or loop here; the rest in the modules it calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from aicb.config.job import Job
from aicb.step.kernels import kernel_table
from profiler.accumulation import Accumulate, choose_accumulation
from profiler.attention import Attend
from profiler.attention_choice import choose_attention
from profiler.candidates import Choice, RefusedError, Wanted, capability, extension, first_working
from profiler.fusion import Elementwise, choose_fusion
from profiler.grouped import Grouped, GroupedGemm, Loop

APEX_FAST_WIDTHS = frozenset(
    {1024, 1536, 2048, 2304, 3072, 3840, 4096, 5120, 6144, 8192, 10240, 12288}
    | {12800, 15360, 16384, 18432, 20480, 24576, 25600, 30720, 32768, 40960, 49152, 65536}
)  # Megatron-Core 0.13.1, fusions/fused_layer_norm.py
GROUPED_MM_CAPABILITIES = ((9, 0), (10, 0))
EPSILON = 1e-5
ADAM: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}


class Optimizer(Protocol):
    """What is timed of an optimizer."""

    def step(self) -> object:
        """Update the parameters from their gradients."""


MakeNorm = Callable[[], nn.Module]
MakeOptimizer = Callable[[list[Tensor]], Optimizer]


@dataclass(slots=True, kw_only=True)
class Choices:
    """The chosen implementations: what to write into the profile, and what to call."""

    attention: Choice
    norm: Choice
    grouped_gemm: Choice
    weight_grad: Choice
    elementwise: Choice
    optimizer: Choice
    attend: Attend
    norms: dict[int, MakeNorm]
    """By width: makes the norm's module, with `weight` and, for LayerNorm, `bias`."""
    experts: GroupedGemm
    accumulate: Accumulate
    fused: Elementwise
    make_optimizer: MakeOptimizer


def choose(job: Job, device: torch.device, wanted: Wanted = Wanted()) -> Choices:  # noqa: B008 (frozen)
    """Choose for every kernel of `job` on `device`, trying candidates there. Raises UserError when none works."""
    elementwise, fused = choose_fusion(job, device, wanted)
    attention, attend = choose_attention(job, device, wanted, fused)
    norm, norms = _choose_norms(job, device)
    weight_grad, accumulate = choose_accumulation(job, device, wanted)
    grouped_gemm, experts = _choose_grouped_gemm(job, device, weight_grad, accumulate)
    optimizer, make_optimizer = _choose_optimizer(device)
    return Choices(
        attention=attention,
        norm=norm,
        grouped_gemm=grouped_gemm,
        weight_grad=weight_grad,
        elementwise=elementwise,
        optimizer=optimizer,
        attend=attend,
        norms=norms,
        experts=experts,
        accumulate=accumulate,
        fused=fused,
        make_optimizer=make_optimizer,
    )


# Norms


def _choose_norms(job: Job, device: torch.device) -> tuple[Choice, dict[int, MakeNorm]]:
    widths = dict.fromkeys(kernel.shape["width"] for kernel in kernel_table(job) if kernel.op == "norm")
    chosen = {width: _choose_norm(job, width, device) for width in widths}
    names: dict[str, list[int]] = {}
    for width, (choice, _) in chosen.items():
        names.setdefault(choice.name, []).append(width)
    said = [name if len(names) == 1 else f"{name} ({', '.join(map(str, of))})" for name, of in names.items()]
    reasons = dict.fromkeys(choice.reason for choice, _ in chosen.values())
    return Choice(", ".join(said), "; ".join(reasons)), {width: make for width, (_, make) in chosen.items()}


def _choose_norm(job: Job, width: int, device: torch.device) -> tuple[Choice, MakeNorm]:
    dtype, layer_norm = getattr(torch, job.training.dtype), job.model.normalization == "LayerNorm"

    def probe(make: MakeNorm) -> Iterable[Tensor]:
        module = make().to(device=device, dtype=dtype)
        x = torch.randn(2, width, device=device, dtype=dtype, requires_grad=True)
        out = module(x)
        return torch.autograd.grad(out, [x, *module.parameters()], torch.randn_like(out))

    def apex(submodule: str, name: str) -> tuple[str, MakeNorm]:
        if name == "FastLayerNorm" and width not in APEX_FAST_WIDTHS:
            raise RefusedError(f"apex FastLayerNorm has no kernel for width {width}")
        found = getattr(extension(submodule, "apex", device), name, None)
        if found is None:
            raise RefusedError(f"apex has no {name}")
        return f"apex {name}", partial(found, width, eps=EPSILON)

    def plain() -> tuple[str, MakeNorm]:
        return f"torch {job.model.normalization}", partial(getattr(nn, job.model.normalization), width, eps=EPSILON)

    if layer_norm:
        fast = partial(apex, "apex.contrib.layer_norm", "FastLayerNorm")
        return first_working([fast, partial(apex, "apex.normalization", "FusedLayerNorm"), plain], probe)
    return first_working([partial(apex, "apex.normalization", "FusedRMSNorm"), plain], probe)


# Experts


def grouped_mm_refusal(dtype: torch.dtype, device: torch.device) -> str:
    """Say why PyTorch's grouped_mm has no kernel of its own here, or return an empty string.

    Elsewhere it copies the offsets to the host and runs one GEMM an expert, in silence (torch 2.13, GroupedBlas.cpp).
    """
    if device.type != "cuda":
        return ""  # a CPU has only the loop inside it, and nothing to wait for
    major, minor = capability(device)
    if dtype == torch.bfloat16 and (major, minor) in GROUPED_MM_CAPABILITIES:
        return ""
    where = f"{str(dtype).removeprefix('torch.')} on compute capability {major}.{minor}"
    known = ", ".join(f"{one}.{other}" for one, other in GROUPED_MM_CAPABILITIES)
    return f"torch grouped_mm has no kernel for {where}, only for bfloat16 on {known}: it would loop in silence"


def _choose_grouped_gemm(
    job: Job, device: torch.device, weight_grad: Choice, accumulate: Accumulate
) -> tuple[Choice, GroupedGemm]:
    loop, looped = Loop(accumulate), f"loop over experts, each {weight_grad.name}"
    if not job.model.num_experts:
        return Choice("none", "the model has no experts"), loop
    if not job.model.moe_grouped_gemm:
        return Choice(looped, "--moe_grouped_gemm is off"), loop
    dtype, shapes = getattr(torch, job.training.dtype), [k.shape for k in kernel_table(job) if k.op == "grouped_gemm"]

    def probe(experts: GroupedGemm) -> Iterable[Tensor]:
        counts, ends = [16, 16], torch.tensor([16, 32], device=device, dtype=torch.int32)
        for shape in shapes:
            k, n = (64 + shape[name] % 16 for name in ("k", "n"))  # aligned as the kernel's own
            x, grad = (torch.randn(32, size, device=device, dtype=dtype) for size in (k, n))
            weight, main = torch.randn(2, n, k, device=device, dtype=dtype), torch.zeros(2, n, k, device=device)
            yield experts.forward(x, weight, counts, ends)
            yield experts.input_grad(grad, weight, counts, ends)
            experts.accumulate(main, grad, x, counts, ends)
            yield main

    def grouped() -> tuple[str, GroupedGemm]:
        if refusal := grouped_mm_refusal(dtype, device):
            raise RefusedError(refusal)
        # functional.grouped_mm; torch._grouped_mm when it was new (2.8)
        found = getattr(functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if found is None:
            raise RefusedError(f"torch {torch.__version__} has no grouped matmul")
        return "torch grouped_mm, then add", Grouped(found)

    return first_working([grouped, lambda: (looped, loop)], probe)


# Optimizer


def _choose_optimizer(device: torch.device) -> tuple[Choice, MakeOptimizer]:
    def probe(make: MakeOptimizer) -> Iterable[Tensor]:
        parameter = torch.randn(8, device=device)
        parameter.grad = torch.randn_like(parameter)
        make([parameter]).step()
        return [parameter]

    def apex() -> tuple[str, MakeOptimizer]:
        fused = getattr(extension("apex.optimizers", "apex", device), "FusedAdam", None)
        if fused is None:
            raise RefusedError("apex has no FusedAdam")
        return "apex FusedAdam", partial(fused, **ADAM)

    def torch_adam(way: str) -> tuple[str, MakeOptimizer]:
        options = {**ADAM, way: True}
        return f"torch AdamW {way}", partial(torch.optim.AdamW, **options)

    return first_working([apex, partial(torch_adam, "fused"), partial(torch_adam, "foreach")], probe)
