"""Element-wise kernels: each PyTorch call apart, or fused by torch.compile as Megatron fuses them by default.

Megatron-Core 0.13.1 (core/fusions, core/jit.py) compiles bias + activation, SwiGLU and bias + dropout + add, and calls
fused kernels for rotary positions and for mask + softmax.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from aicb.config.job import Job
from profiler import functions
from profiler.candidates import Choice, RefusedError, Wanted, first_working

COMPILED_DEVICES = ("cuda",)
"""Where Megatron trains; on a CPU, compiling takes longer than what it saves."""
_SHAPES_MAX = 1024
"""Of one function in one run: beyond, torch.compile would run it unfused and say so in a log alone."""


@dataclass(frozen=True, slots=True)
class Elementwise:
    """The functions of profiler.functions that can be fused."""

    activate: Callable[[Tensor, int, bool, Tensor | None], Tensor] = functions.activate
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor] = functions.rotate
    rotate_part: Callable[[Tensor, Tensor, Tensor], Tensor] = functions.rotate_part
    latent_heads: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = functions.latent_heads
    add_residual: Callable[[Tensor, Tensor, Tensor | None, float], Tensor] = functions.add_residual
    causal_softmax: Callable[[Tensor, Tensor], Tensor] = functions.causal_softmax


def compiled(backend: str = "inductor") -> Elementwise:
    """Return all of them compiled, each for the shapes it meets."""
    import torch._dynamo.utils
    import torch._functorch.config

    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # its own reading
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = _SHAPES_MAX
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    torch._functorch.config.donated_buffer = False  # one graph is differentiated many times
    plain = Elementwise()
    return Elementwise(
        *(
            torch.compile(getattr(plain, field.name), dynamic=False, fullgraph=True, backend=backend)
            for field in fields(Elementwise)
        )
    )


def choose_fusion(job: Job, device: torch.device, wanted: Wanted) -> tuple[Choice, Elementwise]:
    """Compile where Megatron's kernels would be, if it works here."""
    if not wanted.fusion:
        return Choice("none", "--fusion is off"), Elementwise()
    dtype = getattr(torch, job.training.dtype)

    def probe(fused: Elementwise) -> Iterable[Tensor]:
        x, bias = (torch.randn(*size, 64, device=device, dtype=dtype, requires_grad=True) for size in ((32,), ()))
        out = fused.add_residual(x, fused.activate(x, 1, False, bias), bias, job.model.hidden_dropout)
        return [out, *torch.autograd.grad(out, [x, bias], torch.randn_like(out))]

    def by_compiler() -> tuple[str, Elementwise]:
        if device.type not in COMPILED_DEVICES:
            raise RefusedError(f"not fused on {device.type}")
        return f"torch.compile {torch.__version__}", compiled()

    return first_working([by_compiler, lambda: ("none", Elementwise())], probe)
