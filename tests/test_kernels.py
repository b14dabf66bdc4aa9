"""The one table of kernels: names, rows, shapes, FLOPs and bytes against numbers worked by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, NamedTuple

import pytest

from aicb.config.configure import configure
from aicb.config.job import Job
from aicb.config.model import ModelConfig
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig
from aicb.step.kernels import STEP_END, Kernel, kernel_table, optimizer_elements, slice_of
from aicb.times.profile import KernelTime, Profile, mismatches


class Expected(NamedTuple):
    op: str
    rows: str
    """Separated by blanks."""
    shape: Mapping[str, int]
    flops: int
    bytes: int
    gradients: str = "input"


# Grouped-query attention with 8 heads of 64 over 4 key/value groups; 2 layers; 2 x 64 = 128 tokens; 2 bytes an element.
GQA: dict[str, Any] = {
    "num_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_query_groups": 4, "kv_channels": 64,
    "ffn_hidden_size": 1024, "vocab_size": 1000, "normalization": "RMSNorm", "swiglu": True, "add_bias_linear": False,
    "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True, "micro_batch": 2, "seq_length": 64,
    "dtype": "bfloat16", "tensor_model_parallel_size": 1, "world_size": 1, "global_batch": 64,
}  # fmt: skip


def job_of(**typed: Any) -> Job:
    return configure({**GQA, **typed}).job


def table(job: Job) -> dict[str, Kernel]:
    kernels = kernel_table(job)
    by_name = {kernel.name: kernel for kernel in kernels}
    assert len(by_name) == len(kernels), "a kernel exists once"
    return by_name


def check(job: Job, expected: dict[str, Expected]) -> None:
    kernels = table(job)
    assert list(kernels) == list(expected)
    for name, kernel in kernels.items():
        ours = Expected(
            kernel.op, " ".join(kernel.rows), dict(kernel.shape), kernel.flops, kernel.bytes, kernel.gradients
        )
        assert ours == expected[name], name


def gemm(m: int, k: int, n: int, bias: int = 0) -> dict[str, int]:
    return {"m": m, "k": k, "n": n, "bias": bias}


def norm(tokens: int, width: int, bias: int = 0) -> dict[str, int]:
    return {"tokens": tokens, "width": width, "bias": bias}


def core(heads: int, groups: int, qk: int = 64, v: int = 64) -> dict[str, int]:
    return {"batch": 2, "seq": 64, "heads": heads, "groups": groups, "qk_width": qk, "v_width": v}


def activation(width: int, gates: int = 2, tokens: int = 128) -> dict[str, int]:
    return {"tokens": tokens, "width": width, "gates": gates, "squared_relu": 0}


# --- TP 1: the vocabulary is padded to 1024, a multiple of 128. One hidden state is 128 x 512 = 65536 elements. ---

TP1 = {
    # 128 ids of 8 bytes = 1024; a row read and a row written for each token: 2 x 2 B x 65536 = 262144
    "Emb": Expected(
        "embedding", "embedding_layer",
        {"tokens": 128, "seq": 64, "vocab": 1024, "hidden": 512, "learned_positions": 0, "tp": 1}, 0, 263168, "weight",
    ),
    # in and out 2 x 65536, 512 weights: 131584 elements of 2 B
    "layernorm": Expected("norm", "attention_layer", norm(128, 512), 0, 263168),
    # n = (8 + 2 x 4) heads x 64 = 1024; 2 x 128 x 512 x 1024 = 2^27; 2 B x (65536 + 524288 + 131072)
    "atten_qkv": Expected("gemm", "attention_layer", gemm(128, 512, 1024), 134217728, 1441792, "gemm"),
    # 8 + 4 heads: 2 x 2 B x 128 x 12 x 64 = 393216; two tables of 64 x 64, 2 B each: 16384
    "atten_rope": Expected(
        "rope", "attention_layer", {"batch": 2, "seq": 64, "heads": 12, "width": 64}, 0, 409600
    ),
    # QK and PV: 2 matmuls x 2 x (2 x 8 x 64 x 64) x 64 = 2^24, causal half 2^23; q 65536, k and v 32768 each, out 65536
    "atten_flash": Expected("flash_attention", "attention_layer", core(8, 4), 8388608, 393216),
    # 2 x 128 x 512 x 512 = 2^26; 2 B x (65536 + 262144 + 65536)
    "atten_linear": Expected("gemm", "attention_layer", gemm(128, 512, 512), 67108864, 786432, "gemm"),
    # two read, one written: 3 x 2 B x 65536
    "atten_residual": Expected("residual", "attention_layer", norm(128, 512), 0, 393216),
    "layernorm2": Expected("norm", "mlp_layer", norm(128, 512), 0, 263168),
    # gate and up: n = 2 x 1024; 2 x 128 x 512 x 2048 = 2^28; 2 B x (65536 + 1048576 + 262144)
    "mlp_linear_1": Expected("gemm", "mlp_layer", gemm(128, 512, 2048), 268435456, 2752512, "gemm"),
    # gate and up read, one written: 3 x 2 B x 128 x 1024
    "mlp_gelu": Expected("activation", "mlp_layer", activation(1024), 0, 786432),
    # 2 x 128 x 1024 x 512 = 2^27; 2 B x (131072 + 524288 + 65536)
    "mlp_linear_2": Expected("gemm", "mlp_layer", gemm(128, 1024, 512), 134217728, 1441792, "gemm"),
    "mlp_residual": Expected("residual", "mlp_layer", norm(128, 512), 0, 393216),
    "layernorm_post": Expected("norm", "final_layer", norm(128, 512), 0, 263168),
    # 2 x 128 x 512 x 1024 = 2^27; 2 B x (65536 + 524288 + 131072)
    "logit_time": Expected("gemm", "final_layer", gemm(128, 512, 1024), 134217728, 1441792, "gemm"),
    # bf16 logits read, fp32 softmax written: 6 B x 128 x 1024 = 786432; labels 8 B x 128. No cross_entropy row at TP 1.
    "cross_entropy": Expected("cross_entropy", "final_layer", {"tokens": 128, "vocab": 1024, "tp": 1}, 0, 787456),
    # Embedding and head 2 x 1024 x 512 = 1048576; a layer 2 x 512 + 1024 x 512 + 512 x 512 + 2048 x 512 + 512 x 1024
    # = 2360320, twice; final norm 512: 5769728 parameters (a multiple of 128). Adam: p, g, m, v read, p, m, v written
    # in fp32, 28 B; copy to bf16, 4 + 2 B.
    # Passes over 5769728 fp32 gradients: written, 4 B; read and written, 8 B (not at DP 1); read twice and written.
    "grad_zero": Expected("grad_zero", "grad_param_compute", {"elements": 5769728}, 0, 23078912, "none"),
    "grad_scale": Expected("grad_scale", "", {"elements": 5769728}, 0, 46157824, "none"),
    "grad_clip": Expected("grad_clip", "grad_param_compute", {"elements": 5769728}, 0, 69236736, "none"),
    "param_time": Expected("optimizer", "grad_param_compute", {"elements": 5769728, "copy": 1}, 0, 196170752, "none"),
}  # fmt: skip


def test_tp_1() -> None:
    check(job_of(), TP1)


# --- TP 4 with SP: 2 heads, 1 group, 32 local tokens; vocabulary 1024 (a multiple of 512), 256 a rank ---

TP4_SP = {
    # The vocabulary is split; every rank looks up all tokens.
    "Emb": Expected(
        "embedding", "embedding_layer",
        {"tokens": 128, "seq": 64, "vocab": 256, "hidden": 512, "learned_positions": 0, "tp": 4}, 0, 263168, "weight",
    ),
    # 2 B x (2 x 32 x 512 + 512)
    "layernorm": Expected("norm", "attention_column", norm(32, 512), 0, 66560),
    # n = (2 + 2 x 1) x 64 = 256; 2 x 128 x 512 x 256 = 2^25; 2 B x (65536 + 131072 + 32768)
    "atten_qkv": Expected("gemm", "attention_column", gemm(128, 512, 256), 33554432, 458752, "gemm"),
    # 3 heads: 2 x 2 B x 128 x 3 x 64 = 98304, + 16384
    "atten_rope": Expected("rope", "attention_row", {"batch": 2, "seq": 64, "heads": 3, "width": 64}, 0, 114688),
    # a quarter of TP 1
    "atten_flash": Expected("flash_attention", "attention_row", core(2, 1), 2097152, 98304),
    # 2 x 128 x 128 x 512 = 2^24; 2 B x (16384 + 65536 + 65536)
    "atten_linear": Expected("gemm", "attention_row", gemm(128, 128, 512), 16777216, 294912, "gemm"),
    # 3 x 2 B x 32 x 512
    "atten_residual": Expected("residual", "attention_row", norm(32, 512), 0, 98304),
    "layernorm2": Expected("norm", "mlp_column", norm(32, 512), 0, 66560),
    # n = 2 x 256; 2 x 128 x 512 x 512 = 2^26; 2 B x (65536 + 262144 + 65536)
    "mlp_linear_1": Expected("gemm", "mlp_column", gemm(128, 512, 512), 67108864, 786432, "gemm"),
    # 3 x 2 B x 128 x 256
    "mlp_gelu": Expected("activation", "mlp_row", activation(256), 0, 196608),
    # 2 x 128 x 256 x 512 = 2^25; 2 B x (32768 + 131072 + 65536)
    "mlp_linear_2": Expected("gemm", "mlp_row", gemm(128, 256, 512), 33554432, 458752, "gemm"),
    "mlp_residual": Expected("residual", "mlp_row", norm(32, 512), 0, 98304),
    "layernorm_post": Expected("norm", "final_column", norm(32, 512), 0, 66560),
    # 2 x 128 x 512 x 256 = 2^25; 2 B x (65536 + 131072 + 32768)
    "logit_time": Expected("gemm", "final_column", gemm(128, 512, 256), 33554432, 458752, "gemm"),
    # 6 B x 128 x 256 + 8 B x 128
    "cross_entropy": Expected("cross_entropy", "cross_entropy1", {"tokens": 128, "vocab": 256, "tp": 4}, 0, 197632),
    # Embedding and head 2 x 256 x 512 = 262144; a layer 2 x 512 + 256 x 512 + 512 x 128 + 512 x 512 + 512 x 256 =
    # 590848, twice; final norm 512: 1444352 parameters (a multiple of 128), 34 B each.
    "grad_zero": Expected("grad_zero", "grad_param_compute", {"elements": 1444352}, 0, 5777408, "none"),
    "grad_scale": Expected("grad_scale", "", {"elements": 1444352}, 0, 11554816, "none"),
    "grad_clip": Expected("grad_clip", "grad_param_compute", {"elements": 1444352}, 0, 17332224, "none"),
    "param_time": Expected("optimizer", "grad_param_compute", {"elements": 1444352, "copy": 1}, 0, 49107968, "none"),
}  # fmt: skip


def test_tp_4_with_sequence_parallelism() -> None:
    check(job_of(tensor_model_parallel_size=4, world_size=4, enable_sequence_parallel=True), TP4_SP)


# --- GPT style at TP 2 without SP: LayerNorm, GELU, biases, learned positions, tied head; vocabulary 512 a rank. ---

TP2_GPT = {
    # 263168 as above, and the position table read once: 2 B x 64 x 512 = 65536
    "Emb": Expected(
        "embedding", "embedding_layer",
        {"tokens": 128, "seq": 64, "vocab": 512, "hidden": 512, "learned_positions": 1, "tp": 2}, 0, 328704, "weight",
    ),
    # all 128 tokens; weight and bias: 2 B x (131072 + 1024)
    "layernorm": Expected("norm", "attention_layer", norm(128, 512, 1), 0, 264192),
    # n = (4 + 2 x 2) x 64 = 512; 2^26; 2 B x (65536 + 262144 + 512 + 65536)
    "atten_qkv": Expected("gemm", "attention_layer", gemm(128, 512, 512, 1), 67108864, 787456, "gemm"),
    # no rotary positions; 4 heads, 2 groups: half of TP 1
    "atten_flash": Expected("flash_attention", "attention_layer", core(4, 2), 4194304, 196608),
    # 2 x 128 x 256 x 512 = 2^25; 2 B x (32768 + 131072 + 65536); its bias is added with the residual
    "atten_linear": Expected("gemm", "attention_layer", gemm(128, 256, 512), 33554432, 458752, "gemm"),
    # 2 B x (3 x 65536 + 512)
    "atten_residual": Expected("residual", "attention_layer", norm(128, 512, 1), 0, 394240),
    "layernorm2": Expected("norm", "mlp_layer", norm(128, 512, 1), 0, 264192),
    # one projection: n = 512; 2^26; 2 B x (65536 + 262144 + 65536); its bias is added with the activation
    "mlp_linear_1": Expected("gemm", "mlp_layer", gemm(128, 512, 512), 67108864, 786432, "gemm"),
    # one read, one written: 2 x 2 B x 128 x 512; the bias 2 B x 512
    "mlp_gelu": Expected("activation", "mlp_layer", {**activation(512, gates=1), "bias": 1}, 0, 263168),
    # 2 x 128 x 512 x 512 = 2^26; 2 B x (65536 + 262144 + 65536)
    "mlp_linear_2": Expected("gemm", "mlp_layer", gemm(128, 512, 512), 67108864, 786432, "gemm"),
    "mlp_residual": Expected("residual", "mlp_layer", norm(128, 512, 1), 0, 394240),
    "layernorm_post": Expected("norm", "final_layer", norm(128, 512, 1), 0, 264192),
    "logit_time": Expected("gemm", "final_layer", gemm(128, 512, 512), 67108864, 786432, "gemm"),
    # 6 B x 128 x 512 + 1024
    "cross_entropy": Expected("cross_entropy", "cross_entropy1", {"tokens": 128, "vocab": 512, "tp": 2}, 0, 394240),
    # Embedding 512 x 512 = 262144 (tied, so no head), positions 64 x 512 = 32768; a layer: two norms 2048, QKV
    # 512 x 513 = 262656, output 512 x 256 + 512 = 131584, fc1 262656, fc2 262656 = 921600, twice; final norm 1024:
    # 2139136 parameters (a multiple of 128), 34 B each.
    "grad_zero": Expected("grad_zero", "grad_param_compute", {"elements": 2139136}, 0, 8556544, "none"),
    "grad_scale": Expected("grad_scale", "", {"elements": 2139136}, 0, 17113088, "none"),
    "grad_clip": Expected("grad_clip", "grad_param_compute", {"elements": 2139136}, 0, 25669632, "none"),
    "param_time": Expected("optimizer", "grad_param_compute", {"elements": 2139136, "copy": 1}, 0, 72730624, "none"),
}  # fmt: skip
GPT: dict[str, Any] = {
    "normalization": "LayerNorm", "swiglu": False, "add_bias_linear": True,
    "position_embedding_type": "learned_absolute", "max_position_embeddings": 64,
    "untie_embeddings_and_output_weights": False,
}  # fmt: skip


def test_gpt_style_at_tp_2_without_sequence_parallelism() -> None:
    check(job_of(**GPT, tensor_model_parallel_size=2, world_size=2), TP2_GPT)


# --- variants ---


def test_unfused_attention_computes_the_full_square() -> None:
    kernels = table(job_of(use_flash_attn=False))
    assert [name for name in TP1 if name not in kernels] == ["atten_flash"]
    # One matmul over the full square of 2 x 8 x 64 x 64 = 65536 scores: 2 x 65536 x 64 = 2^23.
    expected = {
        # q 65536 and k 32768 read, 65536 scores written, 2 B each
        "atten_core_qk": Expected("scores", "attention_layer", core(8, 4), 8388608, 327680),
        # scores read and written
        "atten_core_softmax": Expected("softmax", "attention_layer", core(8, 4), 0, 262144),
        # scores 65536 and v 32768 read, 65536 written
        "atten_core_contex": Expected("context", "attention_layer", core(8, 4), 8388608, 327680),
    }
    for name, want in expected.items():
        kernel = kernels[name]
        assert (kernel.op, " ".join(kernel.rows), dict(kernel.shape)) == want[:3]
        assert (kernel.flops, kernel.bytes, kernel.gradients) == want[3:]
    for name in set(TP1) - {"atten_flash"}:
        assert kernels[name] == table(job_of())[name]


def test_core_attention_is_what_selective_recompute_repeats() -> None:
    assert [kernel.name for kernel in kernel_table(job_of()) if kernel.core_attention] == ["atten_flash"]
    unfused = [kernel.name for kernel in kernel_table(job_of(use_flash_attn=False)) if kernel.core_attention]
    assert unfused == ["atten_core_qk", "atten_core_softmax", "atten_core_contex"]


def test_gradient_flops() -> None:
    """A GEMM's dgrad (and wgrad) is its forward again; flash backward is 5 matmuls to the forward's 2."""
    fused, unfused = table(job_of()), table(job_of(use_flash_attn=False))
    assert fused["atten_qkv"].gradient_flops() == 134217728
    assert fused["atten_flash"].gradient_flops() == 20971520  # 2^23 x 5 / 2
    assert unfused["atten_core_qk"].gradient_flops() == 16777216  # two matmuls of 2^23


def test_flash_gradient_flops_where_value_is_narrower() -> None:
    """The widths of DeepSeek: a query and key of 128 + 64, a value of 128."""
    widths = {"multi_latent_attention": True, "kv_lora_rank": 72, "qk_nope_dim": 128, "qk_rope_dim": 64}
    kept = {name: value for name, value in GQA.items() if name not in ("num_query_groups", "kv_channels")}
    flash = table(configure({**kept, **widths, "v_head_dim": 128}).job)["atten_flash"]
    # 2 sequences x 8 heads x 64 x 64 = 65536; forward 192 + 128 = 320; backward 3 x 192 + 2 x 128 = 832
    assert flash.flops == 20971520
    assert flash.gradient_flops() == 54525952


def test_norms_on_query_and_key_run_per_head() -> None:
    kernels = table(
        job_of(qk_layernorm=True, tensor_model_parallel_size=4, world_size=4, enable_sequence_parallel=True)
    )
    # 128 tokens x 2 heads and x 1 group, width 64; they run after the gather, so on all tokens
    for name, tokens in (("atten_q_layernorm", 256), ("atten_k_layernorm", 128)):
        kernel = kernels[name]
        assert (kernel.op, kernel.rows, dict(kernel.shape)) == ("norm", ("attention_row",), norm(tokens, 64))
        assert not kernel.required


def test_a_bias_on_qkv_alone() -> None:
    kernels = table(job_of(add_qkv_bias=True))
    assert [name for name, kernel in kernels.items() if kernel.shape.get("bias")] == ["atten_qkv"]
    assert kernels["atten_qkv"].bytes == 1443840  # 1441792 + 2 B x 1024


def test_squared_relu_has_one_gate() -> None:
    kernel = table(job_of(swiglu=False, squared_relu=True))["mlp_gelu"]
    assert dict(kernel.shape) == {"tokens": 128, "width": 1024, "gates": 1, "squared_relu": 1}
    assert kernel.bytes == 524288  # 2 x 2 B x 128 x 1024


def test_float32_moves_4_bytes_and_copies_nothing() -> None:
    kernels = table(job_of(dtype="float32", use_flash_attn=False))
    assert kernels["atten_qkv"].bytes == 2883584  # twice 1441792
    assert kernels["cross_entropy"].bytes == 1049600  # 8 B x 131072 + 1024
    assert kernels["param_time"].bytes == 161552384  # 5769728 x 28 B
    assert kernels["param_time"].shape["copy"] == 0


def test_what_a_first_generation_profile_lacks_is_not_required() -> None:
    """compute-profile.md lists the sections required of any file; the rest is our own."""
    optional = {kernel.name for kernel in kernel_table(job_of()) if not kernel.required}
    assert optional == {
        *("atten_rope", "atten_residual", "mlp_residual", "cross_entropy"),
        *("grad_zero", "grad_scale", "grad_clip"),
    }


# --- mixture of experts: 8 experts, top 2, one shared, first layer dense; EP 4, TP 2 with SP: 64 local tokens ---

MOE: dict[str, Any] = {
    "num_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 256, "moe_shared_expert_intermediate_size": 512,
    "n_dense_layers": 1, "expert_model_parallel_size": 4, "tensor_model_parallel_size": 2, "world_size": 8,
    "enable_sequence_parallel": True,
}  # fmt: skip
ROUTED = {"tokens": 64, "hidden": 512, "experts": 8, "topk": 2}
MOE_TAIL = {
    # The norm before the MLP is the same work before a dense MLP and before the router.
    "layernorm2": ("norm", "mlp_column mlp_moelayer:router", norm(64, 512)),
    # The dense layers' MLP, 1024 / 2 wide on a rank, under names of its own
    "dense_linear_1": ("gemm", "mlp_column", gemm(128, 512, 1024)),
    "dense_gelu": ("activation", "mlp_row", activation(512)),
    "dense_linear_2": ("gemm", "mlp_row", gemm(128, 512, 512)),
    "moe_router": ("router", "mlp_moelayer:router", ROUTED),
    # 2 x 4 ranks send to 2 experts: all 128 tokens x 2 copies are sorted
    "moe_permute": ("permute", "mlp_moelayer:dispatch", {**ROUTED, "sorted": 256}),
    "moe_unpermute": ("unpermute", "mlp_moelayer:combine", {**ROUTED, "sorted": 256}),
    # 8 / 4 = 2 experts of width 256 / 2 = 128; 128 tokens x 2 copies under uniform routing
    "mlp_linear_1": ("grouped_gemm", "mlp_moelayer:experts", {**gemm(256, 512, 256), "experts": 2}),
    "mlp_gelu": ("activation", "mlp_moelayer:experts", activation(128, tokens=256)),
    "mlp_linear_2": ("grouped_gemm", "mlp_moelayer:experts", {**gemm(256, 128, 512), "experts": 2}),
    # 512 / 2 = 256 wide on a rank
    "mlp_shared_linear_1": ("gemm", "mlp_shared_column", gemm(128, 512, 512)),
    "mlp_shared_gelu": ("activation", "mlp_shared_row", activation(256)),
    "mlp_shared_linear_2": ("gemm", "mlp_shared_row", gemm(128, 256, 512)),
    "mlp_shared_residual": ("residual", "mlp_shared_row", norm(64, 512)),
    "mlp_residual": ("residual", "mlp_row mlp_moelayer:combine", norm(64, 512)),
}


def test_mixture_of_experts() -> None:
    kernels = table(job_of(**MOE))
    attention = ["Emb", "layernorm", "atten_qkv", "atten_rope", "atten_flash", "atten_linear", "atten_residual"]
    head = ["layernorm_post", "logit_time", "cross_entropy"]
    end = ["grad_zero", "grad_scale", "grad_clip", "param_time"]
    assert list(kernels) == [*attention, *MOE_TAIL, *head, *end]
    for name, expected in MOE_TAIL.items():
        kernel = kernels[name]
        assert (kernel.op, " ".join(kernel.rows), dict(kernel.shape)) == expected, name
    assert [name for name, kernel in kernels.items() if kernel.routed] == ["mlp_linear_1", "mlp_gelu", "mlp_linear_2"]
    # Expert GEMM: 2 x 256 x 512 x 256 = 2^26; 2 B x (256 x 512 + 2 experts x 512 x 256 + 256 x 256)
    assert (kernels["mlp_linear_1"].flops, kernels["mlp_linear_1"].bytes) == (67108864, 917504)
    assert kernels["moe_router"].flops == 524288  # 2 x 64 x 512 x 8
    # 2 B x 512 x (64 tokens and 128 copies, read and written either way; 256 rows read and written)
    assert kernels["moe_permute"].bytes == kernels["moe_unpermute"].bytes == 720896
    assert kernels["mlp_shared_residual"].bytes == 196608  # 3 x 2 B x 64 x 512
    assert not kernels["mlp_shared_residual"].required


@pytest.mark.parametrize(
    ("tp", "ep", "rows", "size"),
    [
        (1, 1, 0, 393216),  # all from this rank: 2 B x 512 x (128 + 256)
        (1, 8, 0, 393216),  # one expert
        (2, 8, 0, 196608),  # one expert: 2 B x 512 x (64 + 128)
        (1, 4, 256, 917504),  # 393216 + 2 B x 512 x 2 x 256
        (2, 1, 256, 720896),  # 196608 + 524288: gathered over TP alone, for 8 experts
    ],
)
def test_arrived_rows_are_sorted_for_several_experts_from_several_ranks(tp: int, ep: int, rows: int, size: int) -> None:
    split = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "enable_sequence_parallel": tp > 1}
    kernels = table(job_of(**{**MOE, **split, "world_size": 16}))
    for name in ("moe_permute", "moe_unpermute"):
        assert (kernels[name].shape["sorted"], kernels[name].bytes) == (rows, size)


def test_experts_on_every_layer_leave_no_dense_mlp() -> None:
    kernels = table(job_of(**{**MOE, "n_dense_layers": 0, "moe_shared_expert_intermediate_size": 0}))
    assert not [name for name in kernels if name.startswith(("dense_", "mlp_shared"))]
    assert kernels["layernorm2"].rows == ("mlp_moelayer:router",)
    assert kernels["mlp_residual"].rows == ("mlp_moelayer:combine",)


# --- multi-latent attention: TP 2 with SP, 4 heads a rank ---

MLA: dict[str, Any] = {
    "multi_latent_attention": True, "q_lora_rank": 96, "kv_lora_rank": 72, "qk_nope_dim": 32, "qk_rope_dim": 16,
    "v_head_dim": 40, "qk_layernorm": True, "tensor_model_parallel_size": 2, "world_size": 2,
    "enable_sequence_parallel": True,
}  # fmt: skip
MLA_ATTENTION = {
    "layernorm": ("norm", "attention_linear_q_lora", norm(64, 512)),
    # Down-projections are replicated: all their outputs, on the 64 local tokens
    "attention_linear_q_lora": ("gemm", "attention_linear_q_lora", gemm(64, 512, 96)),
    "atten_q_layernorm": ("norm", "attention_q_column", norm(64, 96)),
    # 4 heads x (32 + 16)
    "attention_q_column": ("gemm", "attention_q_column", gemm(128, 96, 192)),
    # 72 + 16 for the shared rotary key
    "attention_linear_kv_lora": ("gemm", "attention_linear_kv_lora", gemm(64, 512, 88)),
    "atten_kv_layernorm": ("norm", "attention_kv_column", norm(64, 72)),
    # 4 heads x (32 + 40)
    "attention_kv_column": ("gemm", "attention_kv_column", gemm(128, 72, 288)),
    "atten_rope": ("latent_rope", "attention_o_row", {"batch": 2, "seq": 64, "heads": 4, "nope": 32, "width": 16}),
    "atten_flash": ("flash_attention", "attention_o_row", core(4, 4, qk=48, v=40)),
    # 4 heads x 40
    "attention_o_row": ("gemm", "attention_o_row", gemm(128, 160, 512)),
    "atten_residual": ("residual", "attention_o_row", norm(64, 512)),
}


def mla_job(**typed: Any) -> Job:
    base = {name: value for name, value in GQA.items() if name not in ("num_query_groups", "kv_channels")}
    return configure({**base, **MLA, **typed}).job


def test_multi_latent_attention() -> None:
    kernels = table(mla_job())
    assert list(kernels)[1 : 1 + len(MLA_ATTENTION)] == list(MLA_ATTENTION)
    for name, expected in MLA_ATTENTION.items():
        kernel = kernels[name]
        assert (kernel.op, " ".join(kernel.rows), dict(kernel.shape)) == expected, name
    # A token: q read and written, 2 x 4 x 48 = 384; the keys' own part and the shared one read, 4 x 32 + 16 = 144; k
    # written, 4 x 48 = 192: 720. 128 tokens: 92160; two tables of 64 x 16: 2048; 2 B each
    assert kernels["atten_rope"].bytes == 188416
    # 2 x 4 x 64 x 64 scores x (48 + 40), causal half of 2 x 2 flops; k and v of all 4 heads
    assert kernels["atten_flash"].flops == 2883584
    assert kernels["atten_flash"].bytes == 180224  # 2 B x 128 tokens x 4 heads x (48 + 48 + 40 + 40)


def test_multi_latent_attention_without_query_lora() -> None:
    kernels = table(mla_job(q_lora_rank=0))
    assert "attention_linear_q_lora" not in kernels
    assert "atten_q_layernorm" not in kernels
    assert kernels["layernorm"].rows == ("attention_q_column",)
    assert dict(kernels["attention_q_column"].shape) == gemm(128, 512, 192)


# --- the optimizer's share ---

# hidden 24, 2 heads of 12, one layer, ffn 32, vocabulary 100, RMSNorm, no biases, tied: sizes that need padding.
ODD: dict[str, Any] = {
    "num_layers": 1, "hidden_size": 24, "num_attention_heads": 2, "ffn_hidden_size": 32, "vocab_size": 100,
    "make_vocab_size_divisible_by": 1, "normalization": "RMSNorm", "add_bias_linear": False, "seq_length": 16,
    "position_embedding_type": "rope", "tensor_model_parallel_size": 1, "world_size": 3, "global_batch": 6,
}  # fmt: skip


def test_the_distributed_optimizer_updates_a_share_of_the_padded_buffer() -> None:
    # Rounded up to 64 each: embedding 2400 -> 2432; QKV 72 x 24 = 1728; output 576; fc1 768; fc2 768; three norms of
    # 24 -> 64: 6464. To a multiple of lcm(3 ranks, 128) = 384: 17 x 384 = 6528. A third is 2176.
    assert optimizer_elements(configure(ODD).job) == 2176


def test_gradients_are_zeroed_and_scaled_whole_and_clipped_where_they_are_updated() -> None:
    """DP 4: buffers of 5769728 elements, a shard of a quarter; and 1/DP is not one."""
    kernels = table(job_of(world_size=4))
    sizes = {name: kernels[name].shape["elements"] for name in ("grad_zero", "grad_scale", "grad_clip", "param_time")}
    assert sizes == {"grad_zero": 5769728, "grad_scale": 5769728, "grad_clip": 1442432, "param_time": 1442432}
    assert kernels["grad_scale"].rows == ("grad_param_compute",)
    assert kernels["grad_clip"].bytes == 17309184  # 12 B
    plain = table(job_of(world_size=4, use_distributed_optimizer=False))
    assert plain["grad_clip"].shape["elements"] == 5769728


def test_a_plain_optimizer_updates_all_that_the_rank_holds() -> None:
    # 2400 + 1728 + 576 + 768 + 768 + 3 x 24, nothing padded
    assert optimizer_elements(configure({**ODD, "use_distributed_optimizer": False}).job) == 6312


def test_a_quarter_of_the_gqa_model_on_four_data_parallel_ranks() -> None:
    assert optimizer_elements(job_of(world_size=4)) == 1442432  # 5769728 / 4
    assert optimizer_elements(job_of(world_size=4, use_distributed_optimizer=False)) == 5769728


def test_each_stage_updates_its_own_parameters() -> None:
    job = job_of(pipeline_model_parallel=2, world_size=2)
    assert optimizer_elements(job) == 2884608  # embedding 524288 + layer 2360320
    assert optimizer_elements(job.at(1)) == 2885120  # layer 2360320 + final norm 512 + head 524288


def test_experts_are_shared_over_their_own_replicas() -> None:
    # World 8, TP 2: 4 data-parallel ranks = EP 2 x 2 replicas. A rank holds 4 of the 8 experts of the one expert layer:
    # 4 x (256 x 512 + 512 x 128) = 786432, half of it 393216. Dense, with the vocabulary at 512 a rank: embedding and
    # head 2 x 262144; attention of 2 layers 2 x (512 x 512 + 512 x 256) = 786432; dense MLP 1024 x 512 + 512 x 512 =
    # 786432; shared expert 512 x 512 + 512 x 256 = 393216; router 8 x 512 = 4096; 5 norms of 512 = 2560. Together
    # 2497024, a multiple of 128; a quarter is 624256.
    job = job_of(**{**MOE, "expert_model_parallel_size": 2})
    assert optimizer_elements(job) == 624256 + 393216
    assert optimizer_elements(replace(job, training=replace(job.training, use_distributed_optimizer=False))) == (
        2497024 + 786432
    )


# --- slice_of ---

GQA_SP = {"tensor_model_parallel_size": 2, "world_size": 8, "enable_sequence_parallel": True, "global_batch": 128}
BASES = {
    "gpt": job_of(**GPT, tensor_model_parallel_size=2, world_size=8, global_batch=128),
    "gqa": job_of(**GQA_SP),
    "moe": job_of(**MOE),
    "mla": mla_job(world_size=8),
}
# One other value for every field; {} where no single change of the field alone makes a kernel's shape.
MODEL_CHANGES: dict[str, list[Any]] = {
    "name": ["other"],
    "num_layers": [4],
    "hidden_size": [1024],
    "num_attention_heads": [16],
    "num_query_groups": [8, 2],
    "kv_channels": [128],
    "ffn_hidden_size": [2048],
    "vocab_size": [2000],
    "make_vocab_size_divisible_by": [1, 1024],
    "max_position_embeddings": [8192],
    "position_embedding_type": ["rope", "learned_absolute", "none"],
    "rotary_percent": [0.5],
    "normalization": ["LayerNorm", "RMSNorm"],
    "swiglu": [True, False],
    "squared_relu": [True],
    "add_bias_linear": [True, False],
    "add_qkv_bias": [True],
    "qk_layernorm": [True, False],
    "untie_embeddings_and_output_weights": [True, False],
    "hidden_dropout": [0.1],
    "attention_dropout": [0.1],
    "num_experts": [16, 4, 0],
    "moe_router_topk": [4],
    "moe_ffn_hidden_size": [512],
    "moe_shared_expert_intermediate_size": [0, 1024],
    "moe_layer_freq": [(1, 1), (0, 1)],
    "moe_router_load_balancing_type": ["none"],
    "moe_router_dtype": ["fp32"],
    "moe_router_enable_expert_bias": [True],
    "moe_grouped_gemm": [True],
    "multi_latent_attention": [True, False],
    "q_lora_rank": [0, 64],
    "kv_lora_rank": [64],
    "qk_nope_dim": [64],
    "qk_rope_dim": [32],
    "v_head_dim": [64],
}
PARALLEL_CHANGES: dict[str, list[Any]] = {
    "world_size": [16],
    "tensor_model_parallel_size": [1, 4],
    "pipeline_model_parallel": [2],
    "expert_model_parallel_size": [1, 2],
    "context_parallel_size": [],  # only 1 exists
    "enable_sequence_parallel": [True, False],
    "num_layers_per_virtual_pipeline_stage": [2],
    "decoder_first_pipeline_num_layers": [],  # no kernel knows its stage, but the optimizer
    "decoder_last_pipeline_num_layers": [],
}
TRAINING_CHANGES: dict[str, list[Any]] = {
    "global_batch": [256],
    "micro_batch": [1, 4],
    "seq_length": [128],
    "epoch_num": [2],
    "dtype": ["float16", "float32"],
    "recompute_granularity": ["full"],
    "use_distributed_optimizer": [False],
    "use_flash_attn": [],  # another set of names: the other form is used with a warning (tests/test_times.py)
    "moe_load_imbalance": [1.5],  # times are scaled; shapes are those of uniform routing
}
CHANGES = {
    ("model", ModelConfig): MODEL_CHANGES,
    ("parallel", ParallelConfig): PARALLEL_CHANGES,
    ("training", TrainingConfig): TRAINING_CHANGES,
}
SINGLE = [
    (base, part, field, value)
    for base in BASES
    for (part, _), changes in CHANGES.items()
    for field, values in changes.items()
    for value in values
]


def work(job: Job) -> dict[str, tuple[str, dict[str, int], int]]:
    """What a profile of `job` measured: op, shape, bytes (they hold the element size); what ends a step left out."""
    kernels = kernel_table(job)
    return {
        kernel.name: (kernel.op, dict(kernel.shape), kernel.bytes) for kernel in kernels if kernel.name not in STEP_END
    }


def changed(base: str, part: str, field: str, value: Any) -> Job | None:
    """The base with one field changed; None where the rules forbid it, or nothing changes."""
    job = BASES[base]
    config = getattr(job, part)
    if getattr(config, field) == value:
        return None
    more: dict[str, Any] = {}
    if value == "float32":
        more["use_flash_attn"] = False
    try:
        return replace(job, **{part: replace(config, **{field: value}, **more)})
    except ValueError:
        return None


@pytest.mark.parametrize(("config", "changes"), [(config, changes) for (_, config), changes in CHANGES.items()])
def test_every_field_has_a_change_to_try(config: type[Any], changes: dict[str, list[Any]]) -> None:
    """A new field must be thought of here: does it change what is measured?"""
    assert list(changes) == [field.name for field in fields(config)]


def test_a_profile_of_another_slice_is_refused_whatever_field_differs() -> None:
    """Where a kernel of both jobs differs in its work, a profile of one that states its slice does not fit the other.

    (A kernel of one job alone is another matter: its missing section is an error.)
    """
    tried: set[str] = set()
    unnoticed = []
    for base, part, field, value in SINGLE:
        job = changed(base, part, field, value)
        if job is None:
            continue
        for measured, asked in ((BASES[base], job), (job, BASES[base])):
            before, after = work(measured), work(asked)
            if not any(before[name] != after[name] for name in before.keys() & after.keys()):
                continue
            tried.add(field)
            if after.keys() - before.keys() - {"atten_rope", "atten_q_layernorm", "atten_k_layernorm"}:
                continue  # sections are missing
            profile = Profile("", 1, slice_of(measured), {"Emb": KernelTime(1)})
            if not mismatches(profile, slice_of(asked)):
                unnoticed.append(f"{base}: {field} {getattr(getattr(measured, part), field)} used for {value}")
    assert unnoticed == []
    assert {"hidden_size", "num_query_groups", "vocab_size", "swiglu", "q_lora_rank", "qk_nope_dim"} <= tried
    assert {"num_experts", "tensor_model_parallel_size", "enable_sequence_parallel", "seq_length", "dtype"} <= tried


def test_a_profile_of_experts_does_not_serve_a_dense_model() -> None:
    """Both have sections mlp_linear_1, mlp_gelu and mlp_linear_2, of different sizes, and nothing is missing."""
    split = {"tensor_model_parallel_size": 2, "world_size": 8, "enable_sequence_parallel": True}
    experts, dense = job_of(**{**MOE, "expert_model_parallel_size": 1}), job_of(**split)
    assert table(experts)["mlp_linear_1"].shape != table(dense)["mlp_linear_1"].shape
    assert table(dense).keys() <= table(experts).keys()
    assert mismatches(Profile("", 1, slice_of(experts), {"Emb": KernelTime(1)}), slice_of(dense))


def test_what_changes_no_work_leaves_the_slice_alone() -> None:
    """One profile serves every world size, batch, pipeline, iteration count, recompute and name."""
    for base in ("gpt", "gqa", "moe", "mla"):
        for part, field, value in (
            ("model", "name", "other"),
            ("model", "moe_router_load_balancing_type", "none"),
            ("parallel", "world_size", 16),
            ("parallel", "pipeline_model_parallel", 2),
            ("training", "global_batch", 256),
            ("training", "epoch_num", 2),
            ("training", "recompute_granularity", "full"),
            ("training", "use_distributed_optimizer", False),
        ):
            job = changed(base, part, field, value)
            if job is not None:
                assert slice_of(job) == slice_of(BASES[base])
