"""What a builder is given and what it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from aicb.config.job import Job
from aicb.errors import UserError
from aicb.step.kernels import WEIGHT, Kernel
from profiler.implementations import Choices

WEIGHT_SCALE = 0.02


@dataclass(frozen=True, slots=True)
class Built:
    """One kernel ready to be timed; the calls hold its tensors."""

    forward: Callable[[], object]
    """Returns the output (a tuple where there are several; those with a graph are differentiated)."""
    input_grad: Callable[[], object] | None = None
    """Returns the gradients, a tuple. GEMM: the dgrad matmul; others: the whole backward, through autograd."""
    weight_grad: Callable[[], object] | None = None
    """Adds to the fp32 main gradients and returns them, and a bias' gradient. GEMM: the wgrad matmul and the bias sum;
    embedding: the whole backward."""
    scale: float = 1.0
    """Measured time x scale = the kernel's time."""
    note: str = ""
    """What the profile must say about it."""
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """By name: input, weight, bias, grad_out, ..."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to build, and for what."""

    kernel: Kernel
    job: Job
    device: torch.device
    choices: Choices
    memory: int | None = None
    """Free bytes of the device; None: enough."""

    @property
    def dtype(self) -> torch.dtype:
        """Of parameters and activations."""
        dtype: torch.dtype = getattr(torch, self.job.training.dtype)
        return dtype

    def sizes(self, *names: str) -> list[int]:
        """Return the kernel's sizes of these names."""
        return [self.kernel.shape[name] for name in names]

    def normal(self, *size: int) -> Tensor:
        """Random values of both signs: zeros and constants draw less power, so they run faster than real data."""
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def leaf(self, *size: int) -> Tensor:
        """Return the same, to be differentiated."""
        return self.normal(*size).requires_grad_()

    def weight(self, *size: int) -> Tensor:
        """Return a weight or bias as models start with: it keeps the values of what follows sane."""
        return self.normal(*size) * WEIGHT_SCALE

    def weight_leaf(self, *size: int) -> Tensor:
        """Return the same, to be differentiated."""
        return self.weight(*size).requires_grad_()

    def main_grad(self, *size: int) -> Tensor:
        """Return an fp32 main gradient that others have been added to."""
        return torch.randn(size, device=self.device)

    def ids(self, count: int, *size: int) -> Tensor:
        """Random integers from 0 to `count` less 1."""
        return torch.randint(count, size, device=self.device)


def differentiated(
    kernel: Kernel, forward: Callable[[], Tensor | tuple[Tensor, ...]], tensors: dict[str, Tensor], *wanted: str
) -> Built:
    """Build `forward` and, through autograd on one kept graph, the gradients of its outputs by `wanted` of `tensors`.

    The first output's gradient is named grad_out, a second one's grad_out_2. Raises UserError when a wanted tensor, or
    every output, takes no part in a graph.
    """
    result = forward()
    outs = [out for out in ((result,) if isinstance(result, Tensor) else result) if out.requires_grad]
    inputs = [tensors[name] for name in wanted]
    lacking = [name for name in wanted if not tensors[name].requires_grad]
    if lacking or not outs:
        raise UserError(
            f"{kernel.name}: requires_grad missing on {', '.join(lacking) or 'the output'}: its backward cannot be "
            "measured (is torch.no_grad or torch.inference_mode in effect?)"
        )
    grads = [torch.randn(out.shape, device=out.device, dtype=out.dtype) for out in outs]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, inputs, grads, retain_graph=True)

    backward()  # what compiles when it is first called does so before anything is timed
    tensors = {**tensors, **dict(zip(("grad_out", "grad_out_2"), grads, strict=False))}
    if kernel.gradients == WEIGHT:
        return Built(forward, weight_grad=backward, tensors=tensors)
    return Built(forward, input_grad=backward, tensors=tensors)
