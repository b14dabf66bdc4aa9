"""Builders of a mixture of experts: router, permutations, the experts' GEMMs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from profiler import functions
from profiler.builders.built import Built, Request, differentiated
from profiler.grouped import spread_evenly


def grouped_gemm(request: Request) -> Built:
    """m tokens, spread evenly over as many weights as there are experts on this rank."""
    m, k, n, bias, experts = request.sizes("m", "k", "n", "bias", "experts")
    x, weight, grad = request.normal(m, k), request.weight(experts, n, k), request.normal(m, n)
    main, offset = request.main_grad(experts, n, k), request.weight(experts, n) if bias else None
    counts, way = spread_evenly(m, experts), request.choices.experts
    repeats = torch.tensor(counts, device=request.device)
    ends = repeats.cumsum(0).to(torch.int32)

    def forward() -> Tensor:
        return functions.add_expert_bias(way.forward(x, weight, counts, ends), offset, repeats)

    def input_grad() -> tuple[Tensor]:
        return (way.input_grad(grad, weight, counts, ends),)

    def weight_grad() -> tuple[Tensor, ...]:
        way.accumulate(main, grad, x, counts, ends)
        return (main, torch.stack([part.sum(dim=0) for part in grad.split_with_sizes(counts)])) if bias else (main,)

    tensors = {"input": x, "weight": weight, "grad_out": grad, "main_grad": main}
    return Built(forward, input_grad, weight_grad, tensors=tensors | ({} if offset is None else {"bias": offset}))


def router(request: Request) -> Built:
    """Logits, fp32 softmax, top-k, and the probabilities of those chosen put back in their places."""
    tokens, hidden, experts, topk = request.sizes("tokens", "hidden", "experts", "topk")
    tensors = {"input": request.leaf(tokens, hidden), "weight": request.weight_leaf(experts, hidden)}
    x, weight = tensors.values()
    return differentiated(request.kernel, lambda: functions.route(x, weight, topk), tensors, *tensors)


def _uniform_ids(request: Request, tokens: int, experts: int, topk: int) -> Tensor:
    """k different experts for each token, all equally likely: (tokens, k)."""
    return torch.rand(tokens, experts, device=request.device).topk(topk, dim=-1).indices


def arrival_orders(request: Request) -> tuple[Tensor, Tensor] | None:
    """Where a permutation puts the rows that arrived, and the way back; None where they need no sorting."""
    rows, job = request.kernel.shape["sorted"], request.job
    if not rows:
        return None
    return functions.chunk_orders(rows, job.tp * job.ep, job.model.num_experts // job.ep, request.device)


def _arrived(request: Request, back: bool = False) -> tuple[dict[str, Tensor], Callable[[], tuple[Tensor, ...]]]:
    """Rows in the order of their ranks and the call that sorts them by expert; with `back`, the reverse."""
    orders = arrival_orders(request)
    if orders is None:
        return {}, tuple
    arrived = request.leaf(*request.sizes("sorted", "hidden"))
    to, fro = reversed(orders) if back else orders
    return {"arrived": arrived}, lambda: (functions.reorder(arrived, to, fro),)


def permute(request: Request) -> Built:
    """Sort the copies of the tokens by expert and gather their rows; then sort those that arrived by expert."""
    tokens, hidden, experts, topk = request.sizes("tokens", "hidden", "experts", "topk")
    x, ids = request.leaf(tokens, hidden), _uniform_ids(request, tokens, experts, topk)
    arrived, sort = _arrived(request)
    tensors = {"input": x, "ids": ids, **arrived}
    return differentiated(request.kernel, lambda: (*functions.permute(x, ids), *sort()), tensors, "input", *arrived)


def unpermute(request: Request) -> Built:
    """Put the experts' rows back in the order of their ranks; weigh the rows that return, add each token's k copies."""
    tokens, hidden, experts, topk = request.sizes("tokens", "hidden", "experts", "topk")
    ids = _uniform_ids(request, tokens, experts, topk)
    order = ids.flatten().argsort(stable=True)
    x = request.leaf(tokens * topk, hidden)
    probabilities = request.normal(tokens, topk).softmax(dim=-1).requires_grad_()
    arrived, sort = _arrived(request, back=True)
    tensors = {"input": x, "probabilities": probabilities, **arrived}

    def forward() -> tuple[Tensor, ...]:
        return functions.unpermute(x, probabilities, order), *sort()

    return differentiated(request.kernel, forward, {**tensors, "order": order}, *tensors)
