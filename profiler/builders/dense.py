"""Builders of what every transformer has: embedding, norms, GEMMs, rotary positions, residual adds, activations.

Beside each stands the device memory it takes, an upper estimate in bytes: its tensors, the kept graph of the backward,
and the largest forward or backward on top. `d` is the bytes of an element.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import functions
from profiler.builders.built import WEIGHT_SCALE, Built, Request, differentiated

Shape = Mapping[str, int]


def embedding(request: Request) -> Built:
    """Look up ids of the whole vocabulary in this rank's shard; rows of other shards are zero; plus positions."""
    tokens, seq, vocab, hidden, tp = request.sizes("tokens", "seq", "vocab", "hidden", "tp")
    ids = request.ids(vocab * tp, tokens // seq, seq)  # (b, s)
    tensors, wanted, positions = {"weight": request.weight_leaf(vocab, hidden)}, ["weight"], None
    if request.kernel.shape["learned_positions"]:
        positions = tensors["positions"] = request.weight_leaf(seq, hidden)
        wanted.append("positions")

    def forward() -> Tensor:
        return functions.embed(ids, tensors["weight"], positions, split=tp > 1)

    return differentiated(request.kernel, forward, {**tensors, "ids": ids}, *wanted)


def embedding_bytes(shape: Shape, d: int) -> int:
    """Return bytes."""
    tokens, hidden = shape["tokens"], shape["hidden"]
    return d * hidden * (2 * shape["vocab"] + 2 * shape["seq"] + 5 * tokens) + 48 * tokens


def randomised(module: nn.Module, request: Request) -> nn.Module:
    """Return a norm's module on the device, with weights about 1 and biases about 0, not constants."""
    module = module.to(device=request.device, dtype=request.dtype)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.normal_(1.0 if name == "weight" else 0.0, WEIGHT_SCALE)
    return module


def norm(request: Request) -> Built:
    """LayerNorm or RMSNorm, the chosen implementation for this width."""
    tokens, width = request.sizes("tokens", "width")
    module = randomised(request.choices.norms[width](), request)
    tensors = {"input": request.leaf(tokens, width), **dict(module.named_parameters())}
    wanted = [name for name in ("input", "weight", "bias") if name in tensors]

    def forward() -> Tensor:
        out: Tensor = module(tensors["input"])
        return out

    return differentiated(request.kernel, forward, tensors, *wanted)


def norm_bytes(shape: Shape, d: int) -> int:
    """Return bytes; before PyTorch 2.9 an RMSNorm keeps fp32 copies."""
    return (5 * d + 24) * shape["tokens"] * shape["width"] + 8 * d * shape["width"] + 48 * shape["tokens"]


def gemm(request: Request) -> Built:
    """Y = x Wᵀ (+ b), dgrad and wgrad as matmuls on the layouts that PyTorch's autograd and Megatron-Core use."""
    m, k, n, bias = request.sizes("m", "k", "n", "bias")
    x, weight, grad = request.normal(m, k), request.weight(n, k), request.normal(m, n)
    offset = request.weight(n) if bias else None

    def forward() -> Tensor:
        return functional.linear(x, weight, offset)

    def input_grad() -> tuple[Tensor]:
        return (grad @ weight,)

    def weight_grad() -> tuple[Tensor, ...]:
        return (grad.t() @ x, grad.sum(dim=0)) if bias else (grad.t() @ x,)

    tensors = {"input": x, "weight": weight, "grad_out": grad} | ({} if offset is None else {"bias": offset})
    return Built(forward, input_grad, weight_grad, tensors=tensors)


def gemm_bytes(shape: Shape, d: int) -> int:
    """Return bytes: each matrix once as an operand and once as a result."""
    m, k, n = shape["m"], shape["k"], shape["n"]
    return 2 * d * (m * k + n * k + m * n + 2 * n)


def rope(request: Request) -> Built:
    """Rotate halves of every head, or of its first part, (s, b, heads, width), in the model's precision, unfused."""
    batch, seq, heads, width = request.sizes("batch", "seq", "heads", "width")
    turned = request.kernel.shape.get("turned", width)
    cos, sin = functions.rope_tables(seq, turned, request.device, request.dtype)
    cos, sin = cos[:, None, None], sin[:, None, None]
    x = request.leaf(seq, batch, heads, width)
    turn = functions.rotate if turned == width else functions.rotate_part
    return differentiated(request.kernel, lambda: turn(x, cos, sin), {"input": x}, "input")


def rope_bytes(shape: Shape, d: int) -> int:
    """Return bytes."""
    row = shape["seq"] * shape["width"]
    copies = 14 if "turned" in shape else 11
    return copies * d * row * shape["batch"] * shape["heads"] + 40 * row


def latent_rope(request: Request) -> Built:
    """Turn latent attention's rotary parts and put its queries and keys together, (s, b, heads, nope + width)."""
    batch, seq, heads, nope, width = request.sizes("batch", "seq", "heads", "nope", "width")
    cos, sin = functions.rope_tables(seq, width, request.device, request.dtype)
    cos, sin = cos[:, None, None], sin[:, None, None]
    query, key = request.leaf(seq, batch, heads, nope + width), request.leaf(seq, batch, heads, nope)
    tensors = {"query": query, "key": key, "rotary": request.leaf(seq, batch, 1, width)}

    def forward() -> tuple[Tensor, Tensor]:
        return functions.latent_heads(query, key, tensors["rotary"], cos, sin)

    return differentiated(request.kernel, forward, tensors, *tensors)


def latent_rope_bytes(shape: Shape, d: int) -> int:
    """Return bytes."""
    tokens, heads, width = shape["batch"] * shape["seq"], shape["heads"], shape["width"]
    of_a_token = heads * (9 * shape["nope"] + 14 * width) + 10 * width
    return d * tokens * of_a_token + 40 * shape["seq"] * width


def residual(request: Request) -> Built:
    """X + f (+ bias). Backward: the gradient past the branch and the one through it are added; the bias' is a sum."""
    tokens, width, bias = request.sizes("tokens", "width", "bias")
    names = ("input", "branch", "grad_out", "grad_branch")
    tensors = {name: request.normal(tokens, width) for name in names}
    x, branch, grad, through = (tensors[name] for name in names)
    offset = request.weight(width) if bias else None

    def input_grad() -> tuple[Tensor, ...]:
        return (grad + through, grad.sum(dim=0)) if bias else (grad + through,)

    if offset is not None:
        tensors["bias"] = offset
    return Built(lambda: functions.add_residual(x, branch, offset), input_grad, tensors=tensors)


def residual_bytes(shape: Shape, d: int) -> int:
    """Return bytes."""
    return 6 * d * shape["tokens"] * shape["width"] + 3 * d * shape["width"]


def activation(request: Request) -> Built:
    """SwiGLU of a packed (tokens, 2 width), or GELU or squared ReLU of (tokens, width)."""
    tokens, width, gates, squared_relu = request.sizes("tokens", "width", "gates", "squared_relu")
    x = request.leaf(tokens, gates * width)
    return differentiated(
        request.kernel, lambda: functions.activate(x, gates, bool(squared_relu)), {"input": x}, "input"
    )


def activation_bytes(shape: Shape, d: int) -> int:
    """Return bytes."""
    return d * shape["tokens"] * shape["width"] * (12 if shape["gates"] == 2 else 8)
