"""Builders of the loss, and of what runs once a step: gradient passes, optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiler import functions
from profiler.builders.built import WEIGHT_SCALE, Built, Request, differentiated

LARGEST_TENSOR = 2**28
"""Elements; the shard is many parameters in truth, and some fused kernels count elements in 32 bits."""
_MEMORY_SHARE = 0.9


def cross_entropy(request: Request) -> Built:
    """Vocabulary-parallel fp32 cross-entropy on this rank's shard, as Megatron-Core's, without communication."""
    tokens, vocab, tp = request.sizes("tokens", "vocab", "tp")
    logits, target = request.leaf(tokens, vocab), request.ids(vocab * tp, tokens)
    tensors = {"input": logits, "target": target}
    return differentiated(request.kernel, lambda: functions.cross_entropy(logits, target), tensors, "input")


def _adam_bytes(copy: int, d: int) -> int:
    return 16 + (d if copy else 0)


def optimizer(request: Request) -> Built:
    """Adam on fp32 tensors, then the copy to the model's precision; on a part of the shard where it does not fit."""
    each = _adam_bytes(request.kernel.shape["copy"], request.job.element_bytes)
    part = _part(request, each)
    parameters = part.randoms(WEIGHT_SCALE)
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    has_copy = request.kernel.shape["copy"]
    copies = [torch.empty_like(parameter, dtype=request.dtype) for parameter in parameters] if has_copy else []
    adam = request.choices.make_optimizer(parameters)

    def forward() -> tuple[Tensor, ...]:
        adam.step()
        for parameter, copied in zip(parameters, copies, strict=False):
            copied.copy_(parameter)
        return (*parameters, *copies)

    return part.built(forward, {"parameter": parameters[0]})


def grad_zero(request: Request) -> Built:
    """Zero the fp32 gradient buffers."""
    part = _part(request, 4)
    grads = part.randoms()
    return part.built(lambda: [grad.zero_() for grad in grads], {"grad": grads[0]})


def grad_scale(request: Request) -> Built:
    """Scale the fp32 gradient buffers, by -1: the work of 1/DP, and no number dies of it in a thousand calls."""
    part = _part(request, 4)
    grads = part.randoms()
    return part.built(lambda: [grad.mul_(-1.0) for grad in grads], {"grad": grads[0]})


def grad_clip(request: Request) -> Built:
    """Clip the gradients of the optimizer's shard: norm, then scaling, as in a step that exceeds it."""
    part = _part(request, 8)
    parameters = part.randoms()
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    grads = {"grad": parameters[0].grad} if parameters[0].grad is not None else {}
    return part.built(lambda: nn.utils.clip_grad_norm_(parameters, max_norm=1.0), grads)


@dataclass(frozen=True, slots=True)
class _Part:
    """As many of a rank's elements as there is memory for."""

    elements: int
    measured: int
    device: torch.device

    def randoms(self, scale: float = 1.0) -> list[Tensor]:
        """Return the part in tensors of LARGEST_TENSOR elements and a rest."""
        whole, rest = divmod(self.measured, LARGEST_TENSOR)
        sizes = [LARGEST_TENSOR] * whole + ([rest] if rest else [])
        return [torch.randn(size, device=self.device).mul_(scale) for size in sizes]

    def built(self, forward: Callable[[], object], tensors: Mapping[str, Tensor]) -> Built:
        """Return the call that is scaled to all elements, and says so where they are more."""
        less = self.measured < self.elements
        note = f"measured on {self.measured:,} of {self.elements:,} parameters, scaled" if less else ""
        return Built(forward, scale=self.elements / self.measured, note=note, tensors=tensors)


def _part(request: Request, each: int) -> _Part:
    """Where an element takes `each` bytes."""
    elements = request.kernel.shape["elements"]
    fitting = elements if request.memory is None else max(1, int(_MEMORY_SHARE * request.memory) // each)
    return _Part(elements, min(elements, fitting), request.device)
