"""Small jobs of every kind, float64 references of every op, and what compares with them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from aicb.config.job import Job
from aicb.config.model import make_model
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig
from aicb.step.kernels import Kernel, kernel_table
from profiler.builders import Built
from profiler.implementations import Choices, choose

torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
CPU = torch.device("cpu")
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}
_LLAMA = {"normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False, "position_embedding_type": "rope"}
_LATENT = {
    **_LLAMA,
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_dim": 16,
    "qk_rope_dim": 8,
    "v_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "moe_grouped_gemm": True}
_SPLIT = {"tensor_model_parallel_size": 2, "enable_sequence_parallel": True}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt": ({}, {}),
    "gpt_tp": ({"squared_relu": True}, {"tensor_model_parallel_size": 2}),
    "llama_gqa": ({"num_query_groups": 2, **_LLAMA}, {}),
    "gqa_qk_norm_sp": ({"num_query_groups": 2, "qk_layernorm": True, **_LLAMA}, _SPLIT),
    "one_head": ({}, {"tensor_model_parallel_size": 4}),
    "gpt_dropout": ({"hidden_dropout": 0.25, "attention_dropout": 0.25}, {}),
    "partial_rotary": ({**_LLAMA, "rotary_percent": 0.5}, {}),
    "mla": (_LATENT, {}),
    "mla_no_q_lora_sp": ({**_LATENT, "q_lora_rank": 0}, _SPLIT),
    "moe_bias": (_EXPERTS, {"expert_model_parallel_size": 2}),
    "moe_loop_shared_sp": (
        {**_EXPERTS, **_LLAMA, "moe_grouped_gemm": False, "moe_shared_expert_intermediate_size": 32},
        {**_SPLIT, "expert_model_parallel_size": 2},
    ),
    "mla_moe": ({**_EXPERTS, **_LATENT, "n_dense_layers": 1}, {}),
}


def small_job(
    kind: str, dtype: str = "float32", flash: bool = False, model: Mapping[str, Any] | None = None, batch: int = 2
) -> Job:
    """Two layers, hidden 64, 4 heads of 16, sequence 24, vocabulary 256."""
    base = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 250}
    typed, split = JOBS[kind]
    return Job(
        model=make_model(base, {**typed, **(model or {})}),
        parallel=ParallelConfig(world_size=8, **{"tensor_model_parallel_size": 1, **split}),
        training=TrainingConfig(global_batch=64, micro_batch=batch, seq_length=24, dtype=dtype, use_flash_attn=flash),
    )


def kernels(job: Job) -> dict[str, Kernel]:
    """The kernel table by name."""
    return {kernel.name: kernel for kernel in kernel_table(job)}


@cache
def chosen(job: Job) -> Choices:
    """What is chosen for `job` on the CPU; each once, as nothing changes between the tests that use it."""
    return choose(job, CPU)


def assert_close(actual: object, expected: Tensor, tolerance: float, what: str) -> None:
    """Relative error over the whole tensor; shapes must agree."""
    assert isinstance(actual, Tensor)
    assert actual.shape == expected.shape, what
    assert torch.linalg.norm(expected) > 0, f"{what}: nothing to compare"
    error = torch.linalg.norm(actual.detach().double() - expected.detach()) / torch.linalg.norm(expected.detach())
    assert error < tolerance, f"{what}: relative error {error:.2e}"


def gradients(ready: Built) -> list[Tensor]:
    """All gradients, the inputs' first; of main gradients, what was added to them."""
    mains = [tensor.mul_(0.01) for name, tensor in ready.tensors.items() if "main_grad" in name]  # else fp32 rounds
    before = {id(tensor): tensor.clone() for tensor in mains}
    assert all(tensor.dtype == torch.float32 for tensor in mains)
    calls = [call for call in (ready.input_grad, ready.weight_grad) if call is not None]
    found = [gradient for call in calls for gradient in cast("Sequence[Tensor]", call())]
    return [gradient - before[id(gradient)] if id(gradient) in before else gradient for gradient in found]


def as_double(tensors: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """The same values in float64, `wanted` to be differentiated."""
    wanted = set(wanted)
    return {
        name: tensor.detach().double().requires_grad_(name in wanted) if tensor.is_floating_point() else tensor
        for name, tensor in tensors.items()
    }


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention, head by head: (s, heads, qk), (s, groups, qk), (s, groups, v) -> (s, heads, v)."""
    seq, heads, width = query.shape
    each = heads // key.size(1)
    future = torch.ones(seq, seq).triu(1).bool()
    out = []
    for head in range(heads):
        logits = query[:, head] @ key[:, head // each].T / width**0.5
        out.append(torch.softmax(logits.masked_fill(future, -1e30), dim=1) @ value[:, head // each])
    return torch.stack(out, dim=1)


def rotate(x: Tensor, seq_dim: int) -> Tensor:
    """Element i and i + width/2 of each head are a complex number, turned by position x 10000^(-2i/width)."""
    half = x.size(-1) // 2
    angles = [[p * 10000.0 ** (-i / half) for i in range(half)] for p in range(x.size(seq_dim))]
    size = [1] * x.dim()
    size[seq_dim], size[-1] = x.size(seq_dim), half
    turn = torch.polar(torch.ones(x.size(seq_dim), half, dtype=torch.float64), torch.tensor(angles).double())
    turned = torch.complex(x[..., :half], x[..., half:]) * turn.view(size)
    return torch.cat((turned.real, turned.imag), dim=-1)


def rotate_part(x: Tensor, seq_dim: int, width: int) -> Tensor:
    """The first `width` elements of each head turn."""
    return torch.cat((rotate(x[..., :width], seq_dim), x[..., width:]), dim=-1)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """LayerNorm with a bias, RMSNorm without."""
    centred = x if bias is None else x - x.mean(dim=-1, keepdim=True)
    out = centred / ((centred**2).mean(dim=-1, keepdim=True) + 1e-5).sqrt() * weight
    return out if bias is None else out + bias


def activation(x: Tensor, gates: int, squared_relu: int) -> Tensor:
    if gates == 2:
        gate, up = x[..., : x.size(-1) // 2], x[..., x.size(-1) // 2 :]
        return gate / (1 + torch.exp(-gate)) * up
    if squared_relu:
        return torch.where(x > 0, x**2, torch.zeros_like(x))
    return 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


Reference = Callable[[dict[str, Tensor], Mapping[str, int]], Tensor]


def _embedding(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    zero = torch.zeros(shape["hidden"], dtype=torch.float64)
    sequences = []
    for row in t["ids"].tolist():
        found = torch.stack([t["weight"][i] if i < shape["vocab"] else zero for i in row])
        sequences.append(found + t["positions"] if "positions" in t else found)
    return torch.stack(sequences)


def _grouped(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    rows = t["input"].tensor_split(shape["experts"])
    out = [part @ weight.T for part, weight in zip(rows, t["weight"], strict=True)]
    return torch.cat([part + t["bias"][e] if "bias" in t else part for e, part in enumerate(out)])


def _flash(t: dict[str, Tensor], _: Mapping[str, int]) -> Tensor:
    return torch.stack([attention(*qkv) for qkv in zip(t["query"], t["key"], t["value"], strict=True)])


def _scores(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    each, width = shape["heads"] // shape["groups"], shape["qk_width"]
    return torch.stack(
        [
            t["query"][:, b, head] @ t["key"][:, b, head // each].T / width**0.5
            for b in range(shape["batch"])
            for head in range(shape["heads"])
        ]
    )


def _softmax(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    seen = torch.ones(shape["seq"], shape["seq"]).tril()
    exponents = torch.exp(t["input"] - t["input"].detach().amax()) * seen
    return exponents / exponents.sum(dim=-1, keepdim=True)


def _context(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    heads, each = shape["heads"], shape["heads"] // shape["groups"]
    out = [
        torch.cat([t["probabilities"][b * heads + h] @ t["value"][:, b, h // each] for h in range(heads)], dim=1)
        for b in range(shape["batch"])
    ]
    return torch.stack(out, dim=1)


def _router(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    exponents = torch.exp(t["input"] @ t["weight"].T)
    probabilities = exponents / exponents.sum(dim=1, keepdim=True)
    rank = probabilities.argsort(dim=1, descending=True).argsort(dim=1)
    return probabilities * (rank < shape["topk"])


def _latent_query(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    """DeepSeek-V2 (2405.04434), section 2.1: q = [q_C; RoPE(q_R)] in every head."""
    nope = shape["nope"]
    heads = [
        torch.cat([head[..., :nope], rotate(head[..., nope:], seq_dim=0)], dim=-1) for head in t["query"].unbind(2)
    ]
    return torch.stack(heads, dim=2)


def _latent_key(t: dict[str, Tensor], _: Mapping[str, int]) -> Tensor:
    """The same for keys: k = [k_C; RoPE(k_R)], k_R shared."""
    shared = rotate(t["rotary"].squeeze(2), seq_dim=0)
    return torch.stack([torch.cat([head, shared], dim=-1) for head in t["key"].unbind(2)], dim=2)


def _permute(t: dict[str, Tensor], _: Mapping[str, int]) -> Tensor:
    copies = sorted((expert, token) for token, row in enumerate(t["ids"].tolist()) for expert in row)
    return torch.stack([t["input"][token] for _, token in copies])


def _unpermute(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    topk = shape["topk"]
    out = [torch.zeros(shape["hidden"], dtype=torch.float64) for _ in range(shape["tokens"])]
    for row, copy in enumerate(t["order"].tolist()):
        out[copy // topk] = out[copy // topk] + t["probabilities"][copy // topk, copy % topk] * t["input"][row]
    return torch.stack(out)


def _by_expert(shape: Mapping[str, int]) -> list[int]:
    """The rows that arrived, by expert, then by rank: each rank sent one chunk for each expert.

    Where rows are sorted in the small jobs, EP is 2.
    """
    tp, local = shape["sorted"] // (shape["tokens"] * shape["topk"]), shape["experts"] // 2
    chunk = shape["sorted"] // (2 * tp * local)
    return sorted(range(shape["sorted"]), key=lambda row: (row // chunk % local, row))


def _sorted(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    return torch.stack([t["arrived"][row] for row in _by_expert(shape)])


def _put_back(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    places = _by_expert(shape)
    return torch.stack([t["arrived"][places.index(row)] for row in range(shape["sorted"])])


def _cross_entropy(t: dict[str, Tensor], shape: Mapping[str, int]) -> Tensor:
    losses = []
    for row, target in zip(t["input"], t["target"].tolist(), strict=True):
        shifted = row - row.detach().max()
        loss = torch.exp(shifted).sum().log()
        losses.append(loss - shifted[target] if target < shape["vocab"] else loss)
    return torch.stack(losses)


REFERENCES: dict[str, Reference] = {
    "embedding": _embedding,
    "norm": lambda t, _: norm(t["input"], t["weight"], t.get("bias")),
    "gemm": lambda t, _: t["input"] @ t["weight"].T + t.get("bias", torch.zeros(1, dtype=torch.float64)),
    "grouped_gemm": _grouped,
    "rope": lambda t, shape: rotate_part(t["input"], 0, shape.get("turned", shape["width"])),
    "latent_rope": _latent_query,
    "flash_attention": _flash,
    "scores": _scores,
    "softmax": _softmax,
    "context": _context,
    "residual": lambda t, _: t["input"] + t["branch"] + t.get("bias", torch.zeros(1, dtype=torch.float64)),
    "activation": lambda t, shape: activation(
        t["input"] + t.get("bias", torch.zeros(1, dtype=torch.float64)), shape["gates"], shape["squared_relu"]
    ),
    "router": _router,
    "permute": _permute,
    "unpermute": _unpermute,
    "cross_entropy": _cross_entropy,
}
SECOND_OUTPUTS: dict[str, Reference] = {"latent_rope": _latent_key, "permute": _sorted, "unpermute": _put_back}
"""Of the ops that have one; the permutations only where rows that arrived are sorted."""
