"""Forward computations that are more than one PyTorch call: the builders time them apart, a layer composes them.

Letters in shapes: b micro batch, s sequence, h hidden, k router top-k, E experts.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

ROPE_BASE = 10000.0


def rope_tables(seq: int, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, each (s, width): RoFormer (2104.09864), halves paired as in GPT-NeoX."""
    frequencies = ROPE_BASE ** -(torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(seq, device=device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions; `cos` and `sin` must broadcast to `x`."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_part(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions of the first elements of each head, as many as the tables have; the others pass."""
    turning, still = x.split_with_sizes([cos.size(-1), x.size(-1) - cos.size(-1)], dim=-1)
    return torch.cat((rotate(turning, cos, sin), still), dim=-1)


def latent_heads(query: Tensor, key: Tensor, rotary: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Latent attention's (.., heads, nope + width), (.., heads, nope), (.., 1, width) -> queries and keys, rotated.

    The last `width` of each query turns; all heads' keys end in the one rotary key, turned.
    """
    still, turning = query.split_with_sizes([key.size(-1), rotary.size(-1)], dim=-1)
    shared = rotate(rotary, cos, sin).expand(*key.shape[:-1], -1)
    return torch.cat((still, rotate(turning, cos, sin)), dim=-1), torch.cat((key, shared), dim=-1)


def repeat_groups(x: Tensor, heads: int) -> Tensor:
    """(s, b, groups, width) -> (s, b, heads, width): one copy of a key or value for each query head it serves."""
    groups = x.size(2)
    return x if groups == heads else x.repeat_interleave(heads // groups, dim=2)


def causal_mask(seq: int, device: torch.device) -> Tensor:
    """Return what a position must not see, (s, s)."""
    return torch.ones(seq, seq, dtype=torch.bool, device=device).triu(1)


def scores(query: Tensor, key: Tensor) -> Tensor:
    """(s, b, heads, width) x (s, b, groups, width) -> (b heads, s, s), scaled by width^-0.5, as Megatron-Core does."""
    seq, batch, heads, width = query.shape
    query = query.reshape(seq, batch * heads, width).transpose(0, 1)
    key = repeat_groups(key, heads).reshape(seq, batch * heads, width).permute(1, 2, 0)
    ignored = query.new_empty(1, 1, 1)  # beta=0: never read
    return torch.baddbmm(ignored, query, key, beta=0.0, alpha=width**-0.5)


def causal_softmax(x: Tensor, mask: Tensor) -> Tensor:
    """(b heads, s, s) -> the same, each row over the positions that `mask` leaves."""
    return x.masked_fill(mask, float("-inf")).softmax(dim=-1)


def context(probabilities: Tensor, value: Tensor) -> Tensor:
    """(b heads, s, s) x (s, b, groups, width) -> (s, b, heads width)."""
    seq, batch = value.shape[:2]
    heads = probabilities.size(0) // batch
    value = repeat_groups(value, heads).reshape(seq, batch * heads, -1).transpose(0, 1)
    out = torch.bmm(probabilities, value)
    return out.transpose(0, 1).contiguous().view(seq, batch, -1)


def drop(x: Tensor, dropout: float) -> Tensor:
    """Zero each element with probability `dropout`, and scale the others up; the same tensor where it is 0."""
    return functional.dropout(x, dropout) if dropout else x


def add_residual(x: Tensor, branch: Tensor, bias: Tensor | None, dropout: float) -> Tensor:
    """X + f (+ the bias that the row-parallel linear left out), f and its bias under dropout."""
    return x + drop(branch if bias is None else branch + bias, dropout)


def activate(x: Tensor, gates: int, squared_relu: bool, bias: Tensor | None) -> Tensor:
    """SwiGLU of packed (tokens, 2 width) halves; or squared ReLU or GELU (tanh form) of (tokens, width).

    The bias that the column-parallel linear left out, as wide as x, is added first.
    """
    x = x if bias is None else x + bias
    if gates == 2:
        gate, up = x.chunk(2, dim=-1)
        return functional.silu(gate) * up
    return functional.relu(x).square() if squared_relu else functional.gelu(x, approximate="tanh")


def embed(ids: Tensor, table: Tensor, positions: Tensor | None, split: bool) -> Tensor:
    """(b, s) ids of the whole vocabulary -> (b, s, h), zero where `split` and another rank holds the row.

    The table is the first shard, as every shard costs the same; `positions` (s, h) are added.
    """
    if split:
        elsewhere = ids >= table.size(0)
        out = functional.embedding(ids.masked_fill(elsewhere, 0), table)
        out = out.masked_fill_(elsewhere.unsqueeze(-1), 0.0)
    else:
        out = functional.embedding(ids, table)
    return out if positions is None else out + positions


def route(x: Tensor, weight: Tensor, topk: int) -> tuple[Tensor, Tensor]:
    """(tokens, h) -> fp32 probabilities (tokens, E), zero but for the k chosen; and the ids chosen (tokens, k)."""
    probabilities = functional.linear(x, weight).softmax(dim=-1, dtype=torch.float32)
    chosen, ids = probabilities.topk(topk, dim=-1)
    return torch.zeros_like(probabilities).scatter(1, ids, chosen), ids


def add_expert_bias(x: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """(m, n) rows in expert order, `counts` of each (on the device), plus their expert's row of (E, n)."""
    return x if bias is None else x + bias.repeat_interleave(counts, dim=0, output_size=x.size(0))


def permute(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """(tokens, h), (tokens, k) -> k copies of each token in the order of their experts (tokens k, h); that order."""
    order = ids.flatten().argsort(stable=True)
    return x.index_select(0, order // ids.size(1)), order


def unpermute(x: Tensor, probabilities: Tensor, order: Tensor) -> Tensor:
    """(tokens k, h) in expert order, weighted by probabilities (tokens, k) -> their sums (tokens, h)."""
    tokens, topk = probabilities.shape
    weighted = x * probabilities.flatten().index_select(0, order).unsqueeze(1)
    return x.new_zeros(tokens, x.size(1)).index_add(0, order // topk, weighted)


def chunk_orders(rows: int, sources: int, experts: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where rows that came from `sources` ranks, each rank's sorted by expert, stand in expert order; and the way back.

    Each source has about as many rows for each of this rank's experts.
    """
    chunks = torch.arange(rows, device=device).tensor_split(sources * experts)
    order = torch.cat([chunk for expert in range(experts) for chunk in chunks[expert::experts]])
    return order, order.argsort()


class _Reorder(torch.autograd.Function):
    """Gathers in both directions; index_select's own backward would add into zeros, as its rows might repeat."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(back)
        return x.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None, None]:
        (back,) = ctx.saved_tensors
        return grads[0].index_select(0, back), None, None


def reorder(x: Tensor, order: Tensor, back: Tensor) -> Tensor:
    """(rows, h) -> the same rows in `order`, (rows,) ids; `back` is its inverse."""
    return cast("Tensor", _Reorder.apply(x, order, back))  # type: ignore[no-untyped-call]


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Megatron-Core's vocabulary-parallel cross-entropy on the first shard, with its three all-reduces left out."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor) -> Tensor:  # (tokens, vocab), (tokens,) -> (tokens,)
        x = logits.float()
        x = x - x.amax(dim=-1, keepdim=True)
        elsewhere = target >= x.size(1)
        local = target.masked_fill(elsewhere, 0).unsqueeze(1)
        predicted = x.gather(1, local).squeeze(1).masked_fill(elsewhere, 0.0)
        exponents = x.exp_()
        total = exponents.sum(dim=-1)
        ctx.save_for_backward(exponents.div_(total.unsqueeze(1)), elsewhere, local)
        ctx.dtype = logits.dtype
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        softmax, elsewhere, local = ctx.saved_tensors
        grad = grads[0].unsqueeze(1)
        out = softmax * grad  # Megatron works in place; here the softmax must outlive many backward calls
        out.scatter_add_(1, local, grad.masked_fill(elsewhere.unsqueeze(1), 0.0).neg())
        return out.to(ctx.dtype), None


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """(tokens, vocab shard) logits, (tokens,) ids of the whole vocabulary -> this shard's fp32 loss (tokens,)."""
    return cast("Tensor", _VocabParallelCrossEntropy.apply(logits, target))  # type: ignore[no-untyped-call]
