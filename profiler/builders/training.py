"""Builders of the loss and of the optimizer's step. Memory as in builders.dense."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from profiler import functions
from profiler.builders.built import WEIGHT_SCALE, Built, Request, differentiated

Shape = Mapping[str, int]
LARGEST_TENSOR = 2**28
"""Elements; the shard is many parameters in truth, and some fused kernels count elements in 32 bits."""
_MEMORY_SHARE = 0.9


def cross_entropy(request: Request) -> Built:
    """Vocabulary-parallel fp32 cross-entropy on this rank's shard, as Megatron-Core's, without communication."""
    tokens, vocab, tp = request.sizes("tokens", "vocab", "tp")
    logits, target = request.leaf(tokens, vocab), request.ids(vocab * tp, tokens)
    tensors = {"input": logits, "target": target}
    return differentiated(request.kernel, lambda: functions.cross_entropy(logits, target), tensors, "input")


def cross_entropy_bytes(shape: Shape, d: int) -> int:
    """Return bytes: logits, kept softmax, and two fp32 copies in a forward."""
    return shape["tokens"] * ((2 * d + 12) * shape["vocab"] + 96)


def optimizer_bytes(shape: Shape, d: int) -> int:
    """Return bytes: fp32 parameter, gradient, two moments; the copy in the model's precision; step counts."""
    return shape["elements"] * _element_bytes(shape["copy"], d) + 1024


def _element_bytes(copy: int, d: int) -> int:
    return 16 + (d if copy else 0)


def optimizer(request: Request) -> Built:
    """Adam on fp32 tensors, then the copy to the model's precision; on a part of the shard where it does not fit."""
    elements, copy = request.sizes("elements", "copy")
    each = _element_bytes(copy, request.job.element_bytes)
    fitting = elements if request.memory is None else max(1, int(_MEMORY_SHARE * request.memory) // each)
    measured = min(elements, fitting)
    parameters = [torch.randn(size, device=request.device) for size in _pieces(measured)]
    for parameter in parameters:
        parameter.mul_(WEIGHT_SCALE).grad = torch.randn_like(parameter)
    copies = [torch.empty_like(parameter, dtype=request.dtype) for parameter in parameters] if copy else []
    adam = request.choices.make_optimizer(parameters)

    def forward() -> tuple[Tensor, ...]:
        adam.step()
        for parameter, copied in zip(parameters, copies, strict=False):
            copied.copy_(parameter)
        return (*parameters, *copies)

    note = f"measured on {measured:,} of {elements:,} parameters, scaled" if measured < elements else ""
    return Built(forward, scale=elements / measured, note=note, tensors={"parameter": parameters[0]})


def _pieces(elements: int) -> list[int]:
    whole, rest = divmod(elements, LARGEST_TENSOR)
    return [LARGEST_TENSOR] * whole + ([rest] if rest else [])
