"""Every rule of the configuration: what breaks it is one line that names the flags, the values and the rule."""

from __future__ import annotations

from typing import Any

import pytest

from aicb.config.configure import configure
from aicb.errors import UserError

MIXTRAL = {"model_size": "moe", "enable_sequence_parallel": True}
RULES: list[tuple[dict[str, Any], list[str]]] = [
    ({"model_size": "7", "tensor_model_parallel_size": 3, "world_size": 3, "global_batch": 3},
     ["--num_attention_heads 32", "--tensor_model_parallel_size 3"]),
    ({"model_size": "llama3-8b", "tensor_model_parallel_size": 16}, ["--num_query_groups 8", "size 16", "not fewer"]),
    ({"model_size": "7", "ffn_hidden_size": 1001}, ["--ffn_hidden_size 1001", "--tensor_model_parallel_size 4"]),
    ({"model_size": "7", "pipeline_model_parallel": 10, "world_size": 80}, ["--num_layers 36", "model_parallel 10"]),
    ({"model_size": "7", "world_size": 10}, ["--world_size 10", "--tensor_model_parallel_size 4", "parallel 1"]),
    ({"model_size": "7", "tensor_model_parallel_size": 2, "world_size": 16, "global_batch": 2},
     ["--global_batch 2", "--micro_batch 1", "8 data-parallel ranks"]),
    ({"model_size": "7", "micro_batch": 3}, ["--global_batch 1024", "--micro_batch 3"]),
    ({"model_size": "7", "enable_sequence_parallel": True, "seq_length": 4095}, ["--seq_length 4095", "size 4"]),
    ({"model_size": "7", "max_position_embeddings": 64}, ["--max_position_embeddings 64", "--seq_length 4096"]),
    ({"model_size": "7", "hidden_size": 100}, ["--hidden_size 100", "--num_attention_heads 32", "--kv_channels"]),
    ({"model_size": "7", "num_query_groups": 5}, ["--num_attention_heads 32", "--num_query_groups 5"]),
    ({"model_size": "7", "kv_channels": 3, "position_embedding_type": "rope"}, ["--kv_channels 3 must be even"]),
    ({"model_size": "7", "context_parallel_size": 2}, ["--context_parallel_size 2", "only 1"]),
    ({"model_size": "7", "num_layers_per_virtual_pipeline_stage": 5}, ["virtual_pipeline_stage 5", "36 layers"]),
    ({"model_size": "7", "decoder_first_pipeline_num_layers": 3}, ["first_pipeline_num_layers 3", "at least 2"]),
    ({"model_size": "7", "pipeline_model_parallel": 4, "decoder_first_pipeline_num_layers": 5},
     ["first_pipeline_num_layers 5", "other 31", "--num_layers 36", "parallel 4"]),
    ({"model_size": "7", "pipeline_model_parallel": 2, "decoder_first_pipeline_num_layers": 5,
      "decoder_last_pipeline_num_layers": 5}, ["first_pipeline_num_layers 5", "last_pipeline_num_layers 5"]),
    ({"model_size": "7", "dtype": "float32", "use_flash_attn": True}, ["--use_flash_attn", "--dtype"]),
    ({"model_size": "7", "attention_backend": "unfused", "use_flash_attn": True},
     ["--attention_backend unfused", "--use_flash_attn", "exclude each other"]),
    ({"model_size": "7", "attention_backend": "fa2", "use_flash_attn": False},
     ["--attention_backend fa2", "--no-use_flash_attn", "exclude each other"]),
    ({"model_size": "7", "attention_backend": "cudnn", "dtype": "float32"}, ["--attention_backend cudnn", "--dtype"]),
    ({"model_size": "7", "hidden_dropout": 1.0}, ["--hidden_dropout 1.0", "at least 0 and less than 1"]),
    ({"model_size": "7", "attention_dropout": -0.1}, ["--attention_dropout -0.1", "at least 0 and less than 1"]),
    ({"model_size": "7", "dtype": "fp8"}, ["--dtype fp8", "bfloat16, float16, float32"]),
    ({"model_size": "7", "recompute_granularity": "block"}, ["--recompute_granularity block", "selective, full"]),
    ({"model_size": "7", "recompute_granularity": "full", "recompute_activations": True}, ["exclude each other"]),
    ({"model_size": "7", "swiglu": True, "squared_relu": True}, ["--swiglu", "--squared_relu"]),
    ({"model_size": "7", "normalization": "BatchNorm"}, ["--normalization BatchNorm", "LayerNorm, RMSNorm"]),
    ({"model_size": "7", "position_embedding_type": "alibi"}, ["--position_embedding_type alibi", "rope"]),
    ({"model_size": "7", "expert_model_parallel_size": 2}, ["--expert_model_parallel_size 2", "--num_experts"]),
    ({"model_size": "7", "moe_router_topk": 2}, ["--moe_router_topk 2", "--num_experts"]),
    ({"model_size": "7", "moe_enable": True}, ["--moe_enable", "--num_experts"]),
    ({"model_size": "7", "moe_grouped_gemm": True}, ["--moe_grouped_gemm", "--num_experts"]),
    ({"model_size": "7", "n_shared_expert": 2}, ["--n_shared_expert 2", "--num_experts"]),
    ({"model_size": "7", "moe_load_imbalance": 1.5}, ["--moe_load_imbalance 1.5", "--num_experts"]),
    ({"model_size": "7", "kv_lora_rank": 64}, ["--kv_lora_rank 64", "--multi_latent_attention"]),
    ({"model_size": "7", "frame": "DeepSeek"}, ["--frame DeepSeek", "gpt_7B"]),
    ({"model_size": "7", "frame": "DeepSpeed"}, ["--frame DeepSpeed", "Megatron"]),
    ({"model_size": "deepseek16", "num_query_groups": 4}, ["--num_query_groups", "latent attention"]),
    ({"model_size": "moe", "tensor_model_parallel_size": 2},
     ["--num_experts", "--tensor_model_parallel_size 2", "--enable_sequence_parallel"]),
    ({"model_size": "deepseek16", "tensor_model_parallel_size": 2, "num_experts": 0},
     ["--multi_latent_attention", "--tensor_model_parallel_size 2", "--enable_sequence_parallel"]),
    ({**MIXTRAL, "expert_model_parallel_size": 16}, ["--expert_model_parallel_size 16", "8 data-parallel ranks"]),
    ({**MIXTRAL, "num_experts": 6, "expert_model_parallel_size": 4}, ["--num_experts 6", "parallel_size 4"]),
    ({**MIXTRAL, "add_bias_linear": True}, ["--add_bias_linear", "--num_experts"]),
    ({**MIXTRAL, "moe_router_topk": 9}, ["--moe_router_topk 9", "--num_experts 8"]),
    ({**MIXTRAL, "moe_ffn_hidden_size": 1001}, ["--moe_ffn_hidden_size 1001", "--tensor_model_parallel_size 4"]),
    ({**MIXTRAL, "n_shared_expert": 1, "moe_shared_expert_intermediate_size": 64}, ["exclude each other"]),
    ({**MIXTRAL, "n_dense_layers": 1, "moe_layer_freq": "2"}, ["exclude each other"]),
    ({**MIXTRAL, "n_dense_layers": 32}, ["--n_dense_layers 32", "--num_layers 32"]),
    ({**MIXTRAL, "moe_router_load_balancing_type": "sinkhorn"}, ["sinkhorn", "aux_loss, none"]),
    # EP 1: every rank holds all experts, so no rank can get more than the mean.
    ({**MIXTRAL, "moe_load_imbalance": 1.1}, ["--moe_load_imbalance 1.1", "at most 1"]),
    # EP 8, one expert a rank, top 2: at best every token's first copy comes here, 8 x 1/2 times the mean.
    ({**MIXTRAL, "expert_model_parallel_size": 8, "moe_load_imbalance": 4.5}, ["at most 4", "topk 2"]),
    ({**MIXTRAL, "moe_load_imbalance": 0.5}, ["--moe_load_imbalance 0.5", "at least 1"]),
    ({**MIXTRAL, "moe_load_imbalance": float("nan")}, ["--moe_load_imbalance nan"]),
    ({"model_size": "7", "model_name": "a/b"}, ["--model_name", "file name"]),
    ({"hidden_size": 64, "num_layers": 2, "num_attention_heads": 0}, ["--num_attention_heads 0", "at least 1"]),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "named"), RULES)
def test_a_broken_rule_is_one_line_that_names_it(typed: dict[str, Any], named: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        configure(typed)
    message = str(caught.value)
    assert "\n" not in message
    for fragment in named:
        assert fragment in message


@pytest.mark.parametrize(
    "option",
    ["world_size", "global_batch", "micro_batch", "seq_length", "epoch_num", "num_layers", "hidden_size", "vocab_size"],
)
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_are_at_least_one(option: str, value: int) -> None:
    with pytest.raises(UserError, match=f"--{option} {value} must be at least 1"):
        configure({"model_size": "7", option: value})


@pytest.mark.parametrize(
    ("typed", "layers"),
    [
        ({}, [9, 9, 9, 9]),
        ({"decoder_first_pipeline_num_layers": 6}, [6, 10, 10, 10]),
        ({"decoder_last_pipeline_num_layers": 3}, [11, 11, 11, 3]),
        ({"decoder_first_pipeline_num_layers": 7, "decoder_last_pipeline_num_layers": 9}, [7, 10, 10, 9]),
    ],
)
def test_stages_cover_every_layer_once(typed: dict[str, int], layers: list[int]) -> None:
    job = configure({"model_size": "7", "pipeline_model_parallel": 4, **typed}).job
    ranges = [job.at(rank).layers for rank in range(4)]
    assert [len(one) for one in ranges] == layers
    assert [layer for one in ranges for layer in one] == list(range(36))


def test_sequence_parallel_has_no_effect_with_one_tp_rank_and_says_so() -> None:
    configured = configure({"model_size": "7", "tensor_model_parallel_size": 1, "enable_sequence_parallel": True})
    assert not configured.job.sp
    assert any("no effect" in note for note in configured.notes)


def test_float32_needs_no_word_about_flash_attention() -> None:
    assert not configure({"model_size": "7", "dtype": "float32"}).job.training.use_flash_attn
