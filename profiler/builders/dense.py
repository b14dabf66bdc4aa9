"""Builders of what every transformer has: embedding, norms, GEMMs, rotary positions, residual adds, activations."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from profiler import functions
from profiler.builders.built import WEIGHT_SCALE, Built, Request, differentiated


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

    built = differentiated(request.kernel, forward, {**tensors, "ids": ids}, *wanted)
    backward, mains = built.weight_grad, [request.main_grad(*tensors[name].shape) for name in wanted]
    assert backward is not None

    def weight_grad() -> tuple[Tensor, ...]:
        for main, grad in zip(mains, cast("tuple[Tensor, ...]", backward()), strict=True):
            main.add_(grad)
        return tuple(mains)

    main_grads = {f"main_grad_{name}": main for name, main in zip(wanted, mains, strict=True)}
    return replace(built, weight_grad=weight_grad, tensors={**built.tensors, **main_grads})


def randomised(module: nn.Module, request: Request) -> nn.Module:
    """Return a norm's module on the device, with weights about 1 and biases about 0, not constants."""
    if any((own.device, own.dtype) != (request.device, request.dtype) for own in module.parameters()):
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


def gemm(request: Request) -> Built:
    """Y = x Wᵀ (+ b), dgrad as a matmul and wgrad added to the fp32 main gradient, on the layouts of Megatron-Core."""
    m, k, n, bias = request.sizes("m", "k", "n", "bias")
    x, weight, grad = request.normal(m, k), request.weight(n, k), request.normal(m, n)
    main, accumulate = request.main_grad(n, k), request.choices.accumulate
    offset = request.weight(n) if bias else None

    def forward() -> Tensor:
        return functional.linear(x, weight, offset)

    def input_grad() -> tuple[Tensor]:
        return (grad @ weight,)

    def weight_grad() -> tuple[Tensor, ...]:
        accumulate(main, grad, x)
        return (main, grad.sum(dim=0)) if bias else (main,)

    tensors = {"input": x, "weight": weight, "grad_out": grad, "main_grad": main}
    return Built(forward, input_grad, weight_grad, tensors=tensors | ({} if offset is None else {"bias": offset}))


def rope(request: Request) -> Built:
    """Rotate halves of every head, or of its first part, (s, b, heads, width), in the model's precision."""
    batch, seq, heads, width = request.sizes("batch", "seq", "heads", "width")
    turned = request.kernel.shape.get("turned", width)
    cos, sin = functions.rope_tables(seq, turned, request.device, request.dtype)
    cos, sin = cos[:, None, None], sin[:, None, None]
    x = request.leaf(seq, batch, heads, width)
    fused = request.choices.fused
    turn = fused.rotate if turned == width else fused.rotate_part
    return differentiated(request.kernel, lambda: turn(x, cos, sin), {"input": x}, "input")


def latent_rope(request: Request) -> Built:
    """Turn latent attention's rotary parts and put its queries and keys together, (s, b, heads, nope + width)."""
    batch, seq, heads, nope, width = request.sizes("batch", "seq", "heads", "nope", "width")
    cos, sin = functions.rope_tables(seq, width, request.device, request.dtype)
    cos, sin = cos[:, None, None], sin[:, None, None]
    query, key = request.leaf(seq, batch, heads, nope + width), request.leaf(seq, batch, heads, nope)
    tensors = {"query": query, "key": key, "rotary": request.leaf(seq, batch, 1, width)}

    def forward() -> tuple[Tensor, Tensor]:
        return request.choices.fused.latent_heads(query, key, tensors["rotary"], cos, sin)

    return differentiated(request.kernel, forward, tensors, *tensors)


def residual(request: Request) -> Built:
    """X + dropout(f (+ bias)). Backward: x's gradient, the sum of those past and through it; branch's and bias'."""
    tokens, width, bias = request.sizes("tokens", "width", "bias")
    x, through = request.normal(tokens, width), request.normal(tokens, width)
    tensors = {"branch": request.leaf(tokens, width)} | ({"bias": request.weight_leaf(width)} if bias else {})
    branch, offset, dropout = tensors["branch"], tensors.get("bias"), request.job.model.hidden_dropout

    def forward() -> Tensor:
        return request.choices.fused.add_residual(x, branch, offset, dropout)

    built = differentiated(request.kernel, forward, tensors, *tensors)
    backward, grad = built.input_grad, built.tensors["grad_out"]
    assert backward is not None

    def input_grad() -> tuple[Tensor, ...]:
        return grad + through, *cast("tuple[Tensor, ...]", backward())

    return replace(built, input_grad=input_grad, tensors={"input": x, "grad_branch": through, **built.tensors})


def activation(request: Request) -> Built:
    """SwiGLU of a packed (tokens, 2 width), or GELU or squared ReLU of (tokens, width); a bias added first."""
    tokens, width, gates, squared_relu = request.sizes("tokens", "width", "gates", "squared_relu")
    tensors = {"input": request.leaf(tokens, gates * width)}
    if "bias" in request.kernel.shape:
        tensors["bias"] = request.weight_leaf(gates * width)
    x, bias = tensors["input"], tensors.get("bias")

    def forward() -> Tensor:
        return request.choices.fused.activate(x, gates, bool(squared_relu), bias)

    return differentiated(request.kernel, forward, tensors, *tensors)
