"""Every option of the command line, as data: one list for `generate` and `profile`, the README and the tests."""

from __future__ import annotations

from typing import NamedTuple


class Option(NamedTuple):
    """One option. It has no default here: what the user did not type is None."""

    name: str
    """With underscores, as Megatron-LM's scripts write it; the dashed spelling works too."""
    type: type
    """bool: a switch, also as --no-NAME."""
    group: str
    help: str
    aliases: tuple[str, ...] = ()
    several: bool = False
    """Takes a list such as 1,2,4 too: with --profile_only, a profile for each."""


MODEL, SPLIT, TRAINING = "Model", "Split over GPUs", "Training"
EXPERTS, LATENT = "Mixture of experts", "Multi-latent attention"
TIMES, MEASURING, OUTPUT = "Compute times", "Measuring (aicb profile, or --aiob_enable alone)", "Output"
KERNELS = "Kernels that are measured"
SEVERAL = True
_TENSOR = ("--tp", "--tp_num")
_PIPELINE = ("--pp", "--pipeline_model_parallel_size", "--pp_num")

OPTIONS = (
    Option("model_size", str, MODEL, "preset, config.json or .toml (default 13; see: aicb models)", ("-m", "--model")),
    Option("args_file", str, MODEL, "read arguments from a training script or YAML file; what is typed wins"),
    Option("model_name", str, MODEL, "name in the file name and the summary"),
    Option("frame", str, MODEL, "Megatron (default), or DeepSeek for latent attention", ("--comm_frame",)),
    Option("num_layers", int, MODEL, "transformer layers"),
    Option("hidden_size", int, MODEL, "width of the hidden state"),
    Option("ffn_hidden_size", int, MODEL, "width of the dense MLP (default 4 h; int(8h/3/64) x 64 with SwiGLU)"),
    Option("num_attention_heads", int, MODEL, "query heads"),
    Option("num_query_groups", int, MODEL, "key/value heads (default: as many as query heads)"),
    Option("group_query_attention", bool, MODEL, "key/value heads are --num_query_groups, 1 unless given"),
    Option("kv_channels", int, MODEL, "width of a head (default hidden_size / heads)"),
    Option("vocab_size", int, MODEL, "unpadded (default 50257)"),
    Option("make_vocab_size_divisible_by", int, MODEL, "vocabulary padded to a multiple of this x TP (default 128)"),
    Option("max_position_embeddings", int, MODEL, "rows of the learned position table (default 4096, or the sequence)"),
    Option("position_embedding_type", str, MODEL, "rope, learned_absolute or none"),
    Option("rotary_percent", float, MODEL, "part of each head that rotary positions turn (default 1)"),
    Option("normalization", str, MODEL, "LayerNorm or RMSNorm"),
    Option("swiglu", bool, MODEL, "gated SiLU MLP"),
    Option("squared_relu", bool, MODEL, "squared ReLU in place of GELU"),
    Option("add_bias_linear", bool, MODEL, "biases on the linear layers"),
    Option("add_qkv_bias", bool, MODEL, "a bias on QKV alone (Qwen2)"),
    Option("qk_layernorm", bool, MODEL, "norms on query and key"),
    Option("untie_embeddings_and_output_weights", bool, MODEL, "the head has weights of its own"),
    Option("hidden_dropout", float, MODEL, "of what is added to the hidden state (default: the preset's, else 0)"),
    Option("attention_dropout", float, MODEL, "of attention probabilities (default: the preset's, else 0)"),
    Option("world_size", int, SPLIT, "GPUs of the simulated cluster (default 32)"),
    Option("tensor_model_parallel_size", int, SPLIT, "TP ranks (default: the preset's, else 8)", _TENSOR, SEVERAL),
    Option("pipeline_model_parallel", int, SPLIT, "stages (default 1)", _PIPELINE),
    Option("expert_model_parallel_size", int, SPLIT, "EP ranks (default 1)", ("--ep", "--ep_num")),
    Option("expert_tensor_parallel_size", int, SPLIT, "only equal to TP"),
    Option("context_parallel_size", int, SPLIT, "only 1: the format cannot say more", ("--cp",)),
    Option("enable_sequence_parallel", bool, SPLIT, "sequence parallelism", ("--sp", "--sequence_parallel")),
    Option("num_layers_per_virtual_pipeline_stage", int, SPLIT, "layers of one model chunk (default 1)"),
    Option("decoder_first_pipeline_num_layers", int, SPLIT, "layers of the first stage"),
    Option("decoder_last_pipeline_num_layers", int, SPLIT, "layers of the last stage"),
    Option("global_batch", int, TRAINING, "sequences in one iteration (default 1024)", ("--global_batch_size",)),
    Option("micro_batch", int, TRAINING, "sequences in one micro-batch (default 1)", ("--micro_batch_size",), SEVERAL),
    Option("seq_length", int, TRAINING, "tokens in a sequence (default 4096)", (), SEVERAL),
    Option("epoch_num", int, TRAINING, "iterations written to the file (default 1)"),
    Option("dtype", str, TRAINING, "bfloat16 (default), float16 or float32"),
    Option("use_distributed_optimizer", bool, TRAINING, "optimizer state sharded over DP (default on)"),
    Option("use_flash_attn", bool, TRAINING, "flash attention (default on, but for float32)", ("--flash_attn",)),
    Option("recompute_activations", bool, TRAINING, "as --recompute_granularity selective", ("--recompute",)),
    Option("recompute_granularity", str, TRAINING, "none (default), selective (core attention) or full"),
    Option("moe_enable", bool, EXPERTS, "accepted with --num_experts, which is what decides"),
    Option("num_experts", int, EXPERTS, "experts of a layer; 0: dense", ("--experts",)),
    Option("moe_router_topk", int, EXPERTS, "experts of a token (default 2)", ("--topk",)),
    Option("moe_grouped_gemm", bool, EXPERTS, "all experts in one GEMM", ("--grouped_gemm",)),
    Option("moe_ffn_hidden_size", int, EXPERTS, "width of one expert (default: ffn_hidden_size)"),
    Option("moe_shared_expert_intermediate_size", int, EXPERTS, "width of the shared experts together (default: none)"),
    Option("n_shared_expert", int, EXPERTS, "the same as a number of experts", ("--n_shared_experts",)),
    Option("moe_layer_freq", str, EXPERTS, "every Nth layer has experts, or a list such as [0,1,1]"),
    Option("n_dense_layers", int, EXPERTS, "first layers without experts", ("--n_dense_layer",)),
    Option("moe_router_load_balancing_type", str, EXPERTS, "aux_loss (default) or none (no router statistics)"),
    Option("moe_aux_loss_coeff", float, EXPERTS, "weight of the balancing loss; 0: not computed, no router statistics"),
    Option("moe_router_dtype", str, EXPERTS, "fp32 or fp64: of probabilities (default: that of the model)"),
    Option("moe_router_enable_expert_bias", bool, EXPERTS, "the router's bias: token counts are summed once a step"),
    Option("moe_load_imbalance", float, EXPERTS, "tokens of the busiest rank over the mean (default 1: uniform)"),
    Option("multi_latent_attention", bool, LATENT, "low-rank keys and values, as in DeepSeek"),
    Option("q_lora_rank", int, LATENT, "rank of the queries; 0: no low-rank queries"),
    Option("kv_lora_rank", int, LATENT, "rank of keys and values"),
    Option("qk_nope_dim", int, LATENT, "width of a head, rotary part apart", ("--qk_nope_head_dim", "--qk_head_dim")),
    Option("qk_rope_dim", int, LATENT, "width of the rotary part", ("--qk_rope_head_dim", "--qk_pos_emb_head_dim")),
    Option("v_head_dim", int, LATENT, "width of a value head"),
    Option("aiob_enable", bool, TIMES, "measured compute times: from --comp_filepath, or of this machine", ("--aiob",)),
    Option("comp_filepath", str, TIMES, "compute profile to take the times from (implies --aiob_enable)"),
    Option("allow_profile_mismatch", bool, TIMES, "use a profile of another slice, with a warning"),
    Option("fixed_compute_ns", int, TIMES, "placeholder where there is no profile, ns (default 1)"),
    Option("train_iter", int, MEASURING, "samples of each kernel, at least (default 10)"),
    Option("device", str, MEASURING, "auto (default: the GPU), cuda or cpu"),
    Option("l2", str, MEASURING, "cold (default: flushed before each call) or hot"),
    Option("time_budget", float, MEASURING, "seconds for all measuring of a rank"),
    Option("min_time", float, MEASURING, "seconds each measurement samples at least (default 0.1 on GPUs, else 0)"),
    Option("sustained", float, MEASURING, "seconds under load before the samples of a measurement count (default 0)"),
    Option("resume", bool, MEASURING, "measure only what an earlier try did not"),
    Option("profile_only", bool, MEASURING, "stop after the profile"),
    Option("profile_dir", str, MEASURING, "folder of the profile (default results/aiob_outputs)"),
    Option("attention_backend", str, KERNELS, "auto (default: as Transformer Engine), cudnn, fa3, fa2, sdpa, unfused"),
    Option("fusion", bool, KERNELS, "element-wise kernels fused by torch.compile on GPUs (default on)"),
    Option("gradient_accumulation_fusion", bool, KERNELS, "GEMMs add to fp32 gradients (default on for 16-bit types)"),
    Option("pp_rank", str, OUTPUT, "stage to write (default 0), all, or slowest"),
    Option("min_comm_bytes", int, OUTPUT, "leave out smaller collectives, for ns-3 (default 0)"),
    Option("micro_batches_written", int, OUTPUT, "write rows of this many micro-batches, in place of all (ga)"),
    Option("short", bool, OUTPUT, "write 1 and 17 micro-batches, to simulate and extrapolate (aicb extrapolate)"),
    Option("gpu_type", str, OUTPUT, "GPU name at the start of the file name"),
    Option("result_dir", str, OUTPUT, "folder of the workload (default results/workload)"),
    Option("force", bool, OUTPUT, "replace a file that holds a different workload"),
    Option("json", bool, OUTPUT, "print the summary as JSON"),
    Option("quiet", bool, OUTPUT, "print the file's path alone"),
)  # fmt: skip
