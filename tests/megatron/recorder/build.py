"""Build what the recorder runs from a configuration: ranks, model, wrapped model and optimizer."""

from typing import Any

import stand_ins

import torch
import torch.nn.functional
from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_local_spec,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch.testing._internal.distributed.fake_pg import FakeStore

Config = dict[str, Any]

DEFAULTS: dict[str, Any] = {
    "tp": 1, "pp": 1, "pp_stage": 0, "cp": 1, "ep": 1, "etp": None, "dp": 1, "sp": False,
    "layers": 4, "hidden": 320, "heads": 8, "kv_heads": None, "ffn": 1280, "swiglu": False,
    "norm": "LayerNorm", "bias": True, "seq": 192, "mbs": 3, "vocab": 1168,
    "num_microbatches": 1, "untied": True, "rope": True, "bf16": True, "recompute": None,
    "recompute_method": None, "recompute_num_layers": None, "dist_opt": False,
    "grad_fp32": True, "moe": None, "topk": 3, "moe_ffn": None, "dispatcher": "alltoall",
    "shared_expert": None, "moe_layer_freq": None, "mla": False, "q_lora": None,
    "qk_layernorm": False, "aux_loss": True,
}  # fmt: skip
# Beyond the handed-over recordings: written to the JSON only where they differ from this.
EXTRAS: dict[str, Any] = {
    "position_embedding": None,  # "none", against "rope" (rope) and learned (not rope)
    "squared_relu": False,
    "qkv_bias": False,
    "first_stage_layers": None,
    "last_stage_layers": None,
    "kv_channels": None,
    "rotary_percent": 1.0,
    "router_dtype": None,  # fp32 or fp64
    "aux_type": None,  # another load balancing than aux_loss
    "aux_coefficient": None,  # another than 0.01
    "mla_down_proj": "replicated",  # or "column", what the layer specs of 0.13.1 really choose
}
MLA_SIZES = {"kv_lora_rank": 72, "qk_head_dim": 24, "qk_pos_emb_head_dim": 16, "v_head_dim": 56}


def start_rank(config: Config) -> int:
    """Start the fake process group as the first rank of the pipeline stage; return that rank."""
    world = config["tp"] * config["pp"] * config["cp"] * config["dp"]
    rank = config["pp_stage"] * world // config["pp"]
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=config["tp"],
        pipeline_model_parallel_size=config["pp"],
        context_parallel_size=config["cp"],
        expert_model_parallel_size=config["ep"],
        expert_tensor_parallel_size=config["etp"],
        create_gloo_process_groups=False,
    )
    return rank


def activation(config: Config) -> Any:
    if config["squared_relu"]:
        return lambda x: torch.pow(torch.nn.functional.relu(x), 2)
    return torch.nn.functional.silu if config["swiglu"] else torch.nn.functional.gelu


def moe_options(config: Config) -> dict[str, Any]:
    if config["moe"] is None:
        return {}
    coefficient = 0.01 if config["aux_loss"] else 0.0
    if config["aux_coefficient"] is not None:
        coefficient = config["aux_coefficient"]
    options = {
        "num_moe_experts": config["moe"],
        "moe_router_topk": config["topk"],
        "moe_router_pre_softmax": config["topk"] == 1,  # Megatron refuses one expert without it
        "moe_ffn_hidden_size": config["moe_ffn"],
        "moe_token_dispatcher_type": config["dispatcher"],
        "moe_shared_expert_intermediate_size": config["shared_expert"],
        "moe_router_load_balancing_type": config["aux_type"] or ("aux_loss" if config["aux_loss"] else "none"),
        "moe_aux_loss_coeff": coefficient,
        "moe_router_dtype": config["router_dtype"],
    }
    if config["moe_layer_freq"] is not None:
        options["moe_layer_freq"] = config["moe_layer_freq"]
    return options


def parallel_options(config: Config) -> dict[str, Any]:
    dtype = torch.bfloat16 if config["bf16"] else torch.float32
    return {
        "tensor_model_parallel_size": config["tp"],
        "pipeline_model_parallel_size": config["pp"],
        "context_parallel_size": config["cp"],
        "expert_model_parallel_size": config["ep"],
        "expert_tensor_parallel_size": config["etp"],
        "sequence_parallel": config["sp"],
        "num_layers_in_first_pipeline_stage": config["first_stage_layers"],
        "num_layers_in_last_pipeline_stage": config["last_stage_layers"],
        "bf16": config["bf16"],
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "gradient_accumulation_fusion": False,
        "use_cpu_initialization": True,
    }


def transformer_config(config: Config) -> TransformerConfig:
    options = {
        "num_layers": config["layers"],
        "hidden_size": config["hidden"],
        "num_attention_heads": config["heads"],
        "num_query_groups": config["kv_heads"],
        "kv_channels": config["kv_channels"],
        "ffn_hidden_size": config["ffn"],
        "normalization": config["norm"],
        "add_bias_linear": config["bias"],
        "add_qkv_bias": config["qkv_bias"],
        "gated_linear_unit": config["swiglu"],
        "activation_func": activation(config),
        "bias_activation_fusion": False,
        "qk_layernorm": config["qk_layernorm"],
        "recompute_granularity": config["recompute"],
        "recompute_method": config["recompute_method"],
        "recompute_num_layers": config["recompute_num_layers"],
    }
    options |= parallel_options(config) | moe_options(config)
    if config["mla"]:
        mla = {"multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": config["q_lora"]}
        return MLATransformerConfig(**options, **mla, **MLA_SIZES)
    return TransformerConfig(**options)


def layer_spec(config: Config, settings: TransformerConfig) -> Any:
    """Megatron's layers without Transformer Engine, except in latent attention."""
    if config["moe"] is None:
        spec = get_gpt_layer_local_spec(
            qk_layernorm=config["qk_layernorm"],
            multi_latent_attention=config["mla"],
            normalization=config["norm"],
        )
        layers = [spec]
    else:
        spec = get_gpt_decoder_block_spec(settings, False, normalization=config["norm"])
        layers = spec.layer_specs
    for layer in layers if config["mla"] else []:
        attention = layer.submodules.self_attention.submodules
        attention.core_attention = stand_ins.LatentAttention
        if config["mla_down_proj"] == "replicated":
            attention.linear_q_down_proj = stand_ins.ReplicatedLinear
            attention.linear_kv_down_proj = stand_ins.ReplicatedLinear
    return spec


def build_model(config: Config) -> GPTModel:
    settings = transformer_config(config)
    position = "rope" if config["rope"] else "learned_absolute"
    model = GPTModel(
        config=settings,
        transformer_layer_spec=layer_spec(config, settings),
        vocab_size=config["vocab"],
        max_sequence_length=config["seq"],
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=not config["untied"],
        position_embedding_type=config["position_embedding"] or position,
        rotary_percent=config["rotary_percent"],
    )
    if not config["untied"] and model.post_process:
        # The last stage's copy starts as zeros, and an all-reduce would have filled it.
        model.shared_embedding_or_output_weight().data.normal_(std=0.02)
    return model


def wrap(config: Config, model: GPTModel) -> tuple[DistributedDataParallel, Any]:
    """The model as the training loop of Megatron-LM wraps it, and its optimizer."""
    settings = model.config
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config["grad_fp32"], use_distributed_optimizer=config["dist_opt"]
    )
    inner = Float16Module(settings, model) if config["bf16"] else model
    wrapped = DistributedDataParallel(settings, ddp_config, inner)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            lr=1e-4,
            bf16=config["bf16"],
            params_dtype=settings.params_dtype,
            use_distributed_optimizer=config["dist_opt"],
        ),
        [wrapped],
        use_gloo_process_groups=False,
    )
    return wrapped, optimizer
