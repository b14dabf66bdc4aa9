"""The recordings in tests/megatron as jobs and counts."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from aicb.config.job import Job
from aicb.config.model import make_model
from aicb.config.parallel import ParallelConfig
from aicb.config.training import TrainingConfig

FOLDER = Path(__file__).parent / "megatron"
Sent = Counter[tuple[str, str, str, int]]  # (column, kind, group, bytes)


def load(path: Path) -> dict[str, Any]:
    recording: dict[str, Any] = json.loads(path.read_text())
    return recording


def model_fields(config: dict[str, Any]) -> dict[str, Any]:
    """ModelConfig fields of a recorded run; the vocabulary was recorded padded."""
    positions = {True: "rope", False: "learned_absolute"}
    model: dict[str, Any] = {
        "name": "recording",
        "num_layers": config["layers"],
        "hidden_size": config["hidden"],
        "num_attention_heads": config["heads"],
        "num_query_groups": config["kv_heads"],
        "ffn_hidden_size": config["ffn"],
        "vocab_size": config["vocab"],
        "make_vocab_size_divisible_by": 1,
        "max_position_embeddings": config["seq"],
        "position_embedding_type": config.get("position_embedding") or positions[config["rope"]],
        "kv_channels": config.get("kv_channels"),
        "rotary_percent": config.get("rotary_percent") or 1.0,
        "normalization": config["norm"],
        "swiglu": config["swiglu"],
        "squared_relu": config.get("squared_relu", False),
        "add_bias_linear": config["bias"],
        "add_qkv_bias": config.get("qkv_bias", False),
        "untie_embeddings_and_output_weights": config["untied"],
        "qk_layernorm": config["qk_layernorm"],
    }
    if config["moe"]:
        model |= {
            "num_experts": config["moe"],
            "moe_router_topk": config["topk"],
            "moe_ffn_hidden_size": config["moe_ffn"],
            "moe_shared_expert_intermediate_size": config["shared_expert"] or 0,
            "moe_layer_freq": config["moe_layer_freq"] or 1,
            "moe_router_load_balancing_type": config.get("aux_type") or ("aux_loss" if config["aux_loss"] else "none"),
            "moe_aux_loss_coeff": config.get("aux_coefficient"),
            "moe_router_dtype": config.get("router_dtype") or "",
        }
    if config["mla"]:  # the widths behind the recorded mla_shapes
        model |= {"multi_latent_attention": True, "q_lora_rank": config["q_lora"] or 0, "kv_lora_rank": 72}
        model |= {"qk_nope_dim": 24, "qk_rope_dim": 16, "v_head_dim": 56}
    return model


def job_of(config: dict[str, Any]) -> Job:
    parallel = ParallelConfig(
        world_size=config["tp"] * config["pp"] * config["dp"],
        tensor_model_parallel_size=config["tp"],
        pipeline_model_parallel=config["pp"],
        expert_model_parallel_size=config["ep"],
        enable_sequence_parallel=config["sp"],
        decoder_first_pipeline_num_layers=config.get("first_stage_layers"),
        decoder_last_pipeline_num_layers=config.get("last_stage_layers"),
    )
    training = TrainingConfig(
        global_batch=config["mbs"] * config["dp"] * config["num_microbatches"],
        micro_batch=config["mbs"],
        seq_length=config["seq"],
        dtype="bfloat16" if config["bf16"] else "float32",
        use_flash_attn=config["bf16"],
        recompute_granularity=config["recompute"] or "none",
        use_distributed_optimizer=config["dist_opt"],
    )
    return Job(
        model=make_model(model_fields(config), {}), parallel=parallel, training=training, pp_rank=config["pp_stage"]
    )


def recorded(recording: dict[str, Any]) -> Sent:
    counts: Sent = Counter()
    for sent in recording["collectives"]:
        counts[sent["column"], sent["kind"], sent["group"], sent["bytes"]] += sent["count"]
    return counts
