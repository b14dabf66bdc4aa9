"""Builders of core attention: one flash kernel, or scores, softmax and context apart."""

from __future__ import annotations

from torch import Tensor

from profiler import functions
from profiler.builders.built import Built, Request, differentiated


def flash_attention(request: Request) -> Built:
    """Causal attention by the chosen implementation, on (b, s, heads, width) as flash kernels want them."""
    batch, seq, heads, groups, qk, v = request.sizes("batch", "seq", "heads", "groups", "qk_width", "v_width")
    query, key = request.leaf(batch, seq, heads, qk), request.leaf(batch, seq, groups, qk)
    value, attend = request.leaf(batch, seq, groups, v), request.choices.attend
    tensors = {"query": query, "key": key, "value": value}
    return differentiated(request.kernel, lambda: attend(query, key, value), tensors, *tensors)


def scores(request: Request) -> Built:
    """Q Kᵀ scaled, the full square; K is repeated for every query head, as Megatron-Core does."""
    batch, seq, heads, groups, width = request.sizes("batch", "seq", "heads", "groups", "qk_width")
    query, key = request.leaf(seq, batch, heads, width), request.leaf(seq, batch, groups, width)
    tensors = {"query": query, "key": key}
    return differentiated(request.kernel, lambda: functions.scores(query, key), tensors, *tensors)


def softmax(request: Request) -> Built:
    """Causal mask and softmax over the full square; dropout, where the model has it."""
    batch, seq, heads = request.sizes("batch", "seq", "heads")
    x, mask = request.leaf(batch * heads, seq, seq), functions.causal_mask(seq, request.device)
    fused, dropout = request.choices.fused, request.job.model.attention_dropout

    def forward() -> Tensor:
        return functions.drop(fused.causal_softmax(x, mask), dropout)

    return differentiated(request.kernel, forward, {"input": x, "mask": mask}, "input")


def context(request: Request) -> Built:
    """Probabilities times V, the full square; V is repeated for every query head."""
    batch, seq, heads, groups, width = request.sizes("batch", "seq", "heads", "groups", "v_width")
    mask = functions.causal_mask(seq, request.device)
    probabilities = functions.causal_softmax(request.normal(batch * heads, seq, seq), mask).requires_grad_()
    value = request.leaf(seq, batch, groups, width)
    tensors = {"probabilities": probabilities, "value": value}
    return differentiated(request.kernel, lambda: functions.context(probabilities, value), tensors, *tensors)
