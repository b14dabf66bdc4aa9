"""Builders of core attention: one flash kernel, or scores, softmax and context apart. Memory as in builders.dense."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from profiler import functions
from profiler.attention_choice import flash_refusal
from profiler.builders.built import Built, Request, differentiated

Shape = Mapping[str, int]


def _square(shape: Shape) -> int:
    return shape["batch"] * shape["heads"] * shape["seq"] ** 2


def _rows(shape: Shape) -> int:
    """Rows of width v or qk, all heads."""
    return shape["batch"] * shape["heads"] * shape["seq"]


def flash_attention(request: Request) -> Built:
    """Causal attention by the chosen implementation, on (b, s, heads, width) as flash kernels want them."""
    batch, seq, heads, groups, qk, v = request.sizes("batch", "seq", "heads", "groups", "qk_width", "v_width")
    query, key = request.leaf(batch, seq, heads, qk), request.leaf(batch, seq, groups, qk)
    value, attend = request.leaf(batch, seq, groups, v), request.choices.attend
    tensors = {"query": query, "key": key, "value": value}
    return differentiated(request.kernel, lambda: attend(query, key, value), tensors, *tensors)


def flash_attention_bytes(shape: Shape, d: int) -> int:
    """Return bytes, with K and V repeated for every head, V padded, and the fp32 dQ of flash-attn's backward.

    Where no flash kernel takes the heads, those of scores, softmax and context at once.
    """
    rows, qk, v = _rows(shape), shape["qk_width"], shape["v_width"]
    flash = rows * (d * 12 * (qk + max(qk, v)) + 8 * qk + 64)
    each = 5 * d + (2 * d + 1) * shape.get("dropout", 0)
    unfused = each * _square(shape) + 2 * shape["seq"] ** 2 if flash_refusal(qk, v) else 0
    return flash + unfused


def scores(request: Request) -> Built:
    """Q Kᵀ scaled, the full square; K is repeated for every query head, as Megatron-Core does."""
    batch, seq, heads, groups, width = request.sizes("batch", "seq", "heads", "groups", "qk_width")
    query, key = request.leaf(seq, batch, heads, width), request.leaf(seq, batch, groups, width)
    tensors = {"query": query, "key": key}
    return differentiated(request.kernel, lambda: functions.scores(query, key), tensors, *tensors)


def scores_bytes(shape: Shape, d: int) -> int:
    """Return bytes."""
    return d * (3 * _square(shape) + 10 * _rows(shape) * shape["qk_width"])


def softmax(request: Request) -> Built:
    """Causal mask and softmax over the full square; dropout, where the model has it."""
    batch, seq, heads = request.sizes("batch", "seq", "heads")
    x, mask = request.leaf(batch * heads, seq, seq), functions.causal_mask(seq, request.device)
    fused, dropout = request.choices.fused, request.job.model.attention_dropout

    def forward() -> Tensor:
        return functions.drop(fused.causal_softmax(x, mask), dropout)

    return differentiated(request.kernel, forward, {"input": x, "mask": mask}, "input")


def softmax_bytes(shape: Shape, d: int) -> int:
    """Return bytes; dropout keeps a byte a score, and the softmax beside its result."""
    dropped = (2 * d + 1) * shape.get("dropout", 0)
    return (6 * d + dropped) * _square(shape) + 2 * shape["seq"] ** 2


def context(request: Request) -> Built:
    """Probabilities times V, the full square; V is repeated for every query head."""
    batch, seq, heads, groups, width = request.sizes("batch", "seq", "heads", "groups", "v_width")
    mask = functions.causal_mask(seq, request.device)
    probabilities = functions.causal_softmax(request.normal(batch * heads, seq, seq), mask).requires_grad_()
    value = request.leaf(seq, batch, groups, width)
    tensors = {"probabilities": probabilities, "value": value}
    return differentiated(request.kernel, lambda: functions.context(probabilities, value), tensors, *tensors)


def context_bytes(shape: Shape, d: int) -> int:
    """Return bytes; the probabilities are made from random scores, so three squares are held for a moment."""
    return d * (3 * _square(shape) + 12 * _rows(shape) * shape["v_width"]) + 2 * shape["seq"] ** 2
