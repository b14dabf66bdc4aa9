"""Megatron-LM's own command line, as data: what is used, what says nothing about the workload, what is refused.

Every flag of the argument parser of Megatron-LM with Megatron-Core 0.13 (megatron/training/arguments.py), by name with
underscores, and what follows it. Flags that options.py has are not repeated here.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str, follows: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), follows)


SWITCH, VALUE, VALUES = "", "1", "+"
"""What follows a flag: nothing, one value, or one and more."""

# No effect on what a training step computes or sends, in kind and size: when, where from, and what is logged.
NO_EFFECT: Mapping[str, str] = {
    # optimizer and learning rate
    **_names(
        """adam_beta1 adam_beta2 adam_eps clip_grad decoupled_lr decoupled_min_lr end_weight_decay head_lr_mult
        hysteresis init_method_std initial_loss_scale loss_scale loss_scale_window lr lr_decay_iters
        lr_decay_samples lr_decay_style lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples
        lr_wsd_decay_iters lr_wsd_decay_samples lr_wsd_decay_style min_loss_scale min_lr
        no_weight_decay_cond_type optimizer_offload_fraction seed sgd_momentum start_weight_decay warmup
        weight_decay weight_decay_incr_style""",
        VALUE,
    ),
    **_names(
        """apply_wd_to_qk_layernorm data_parallel_random_init init_method_xavier_uniform inference_rng_tracker
        override_opt_param_scheduler overlap_cpu_optimizer_d2h_h2d no_pin_cpu_grads no_pin_cpu_params
        te_rng_tracker use_checkpoint_opt_param_scheduler use_torch_optimizer_for_cpu_offload""",
        SWITCH,
    ),
    # how long, how often, how many
    **_names(
        """adlr_autoresume_interval check_weight_hash_across_dp_replicas_interval error_injection_rate
        error_injection_type eval_interval eval_iters exit_duration_in_mins exit_interval manual_gc_interval
        rerun_mode recompute_num_layers result_rejected_tracker_filename train_iters train_samples train_sync_interval
        empty_unused_memory_level""",
        VALUE,
    ),
    **_names("iterations_to_skip rampup_batch_size", VALUES),
    **_names(
        """adlr_autoresume check_for_large_grads check_for_spiky_loss decrease_batch_size_if_needed
        deterministic_mode exit_signal_handler full_validation manual_gc multiple_validation_sets
        no_check_for_nan_in_loss_and_grad no_manual_gc_eval skip_train test_mode""",
        SWITCH,
    ),
    # checkpoints
    **_names(
        """ckpt_convert_format ckpt_convert_save ckpt_format ckpt_step dist_ckpt_format dist_ckpt_strictness
        load non_persistent_ckpt_type non_persistent_global_ckpt_dir non_persistent_local_ckpt_algo
        non_persistent_local_ckpt_dir non_persistent_save_interval persistent_save_interval
        pretrained_checkpoint replication_factor replication_jump save save_interval save_retain_interval""",
        VALUE,
    ),
    **_names(
        """async_save auto_detect_ckpt_format ckpt_assume_constant_structure
        ckpt_convert_update_legacy_dist_opt_format ckpt_fully_parallel_load ckpt_fully_parallel_save
        exit_on_missing_checkpoint finetune load_main_params_from_ckpt load_model_opt_format
        no_ckpt_fully_parallel_save no_initialization no_load_optim no_load_rng no_save_optim no_save_rng
        no_use_tokenizer_model_from_checkpoint_args replication use_dist_ckpt use_persistent_ckpt_worker""",
        SWITCH,
    ),
    # data and tokenizer
    **_names(
        """data_args_path data_cache_path dataloader_type mask_prob merge_file mid_level_dataset_surplus
        num_dataset_builder_threads num_workers object_storage_cache_path per_split_data_args_path
        retriever_seq_length sample_rate sft_tokenizer_prompt_format short_seq_prob split
        tiktoken_num_special_tokens tiktoken_pattern tokenizer_metadata tokenizer_model
        tokenizer_prompt_format tokenizer_type vocab_extra_ids vocab_file s3_cache_path""",
        VALUE,
    ),
    **_names("data_path test_data_path tiktoken_special_tokens train_data_path valid_data_path", VALUES),
    **_names(
        """eod_mask_loss legacy_tokenizer mock_data no_create_attention_mask_in_dataloader no_data_sharding
        no_mmap_bin_files reset_attention_mask reset_position_ids sft""",
        SWITCH,
    ),
    # logging, profiling, restarting
    **_names(
        """app_tag_run_name app_tag_run_version config_logger_dir ft_num_warmup_iters
        inprocess_active_world_size inprocess_barrier_timeout inprocess_completion_timeout
        inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval
        inprocess_heartbeat_timeout inprocess_last_call_wait inprocess_max_iterations
        inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_soft_timeout inprocess_termination_grace_time
        log_interval logging_level memory_snapshot_path one_logger_project one_logger_run_name
        profile_step_end profile_step_start straggler_ctrlr_port straggler_minmax_count tensorboard_dir
        tensorboard_log_interval tensorboard_queue_size timing_log_level timing_log_option wandb_entity
        wandb_exp_name wandb_project wandb_save_dir""",
        VALUE,
    ),
    **_names("profile_ranks", VALUES),
    **_names(
        """calc_ft_timeouts disable_straggler_on_startup enable_ft_package enable_msc disable_msc
        inprocess_empty_cuda_cache inprocess_restart log_batch_size_to_tensorboard log_energy
        log_loss_scale_to_tensorboard log_memory_to_tensorboard log_num_zeros_in_grad log_params_norm
        log_progress log_straggler log_throughput log_timers_to_tensorboard
        log_validation_ppl_to_tensorboard log_world_size_to_tensorboard no_barrier_with_level_1_timing
        no_log_learnig_rate_to_tensorboard no_log_learning_rate_to_tensorboard
        no_log_loss_scale_to_tensorboard no_one_logger one_logger_async profile record_memory_history
        run_workload_inspector_server use_pytorch_profiler enable_experimental enable_one_logger""",
        SWITCH,
    ),
    # how a kernel is fused, which library runs it, in which precision inside
    **_names(
        """cross_entropy_fusion_impl cuda_graph_scope cuda_graph_warmup_steps layernorm_epsilon
        moe_deepep_num_sms norm_epsilon transformer_impl symmetric_ar_type""",
        VALUE,
    ),
    **_names(
        """apply_layernorm_1p apply_query_key_layer_scaling apply_residual_connection_post_layernorm
        attention_softmax_in_fp32 bias_gelu_fusion bias_swiglu_fusion clone_scatter_output_in_embedding
        disable_bf16_reduced_precision_matmul enable_cuda_graph external_cuda_graph masked_softmax_fusion
        memory_efficient_layer_norm moe_permute_fusion moe_router_fusion moe_use_legacy_grouped_gemm
        no_bias_dropout_fusion no_bias_gelu_fusion no_bias_swiglu_fusion
        no_masked_softmax_fusion no_persist_layer_norm no_rope_fusion onnx_safe openai_gelu
        use_te_activation_func use_mcore_models use_cpu_initialization init_model_with_meta_device cpu_init""",
        SWITCH,
    ),
    # positions: the same work with other angles
    **_names(
        """beta_fast beta_slow mscale mscale_all_dim rope_scaling_factor rope_type rotary_base
        rotary_scaling_factor rotary_seq_len_interpolation_factor""",
        VALUE,
    ),
    **_names("rotary_interleaved use_rope_scaling", SWITCH),
    # routing: who goes where, not how much
    **_names(
        """moe_input_jitter_eps moe_router_bias_update_rate moe_router_group_topk moe_router_num_groups
        moe_router_score_function moe_router_topk_scaling_factor moe_token_drop_policy
        moe_upcycling_granularity moe_z_loss_coeff mtp_loss_scaling_factor""",
        VALUE,
    ),
    **_names(
        """moe_apply_probs_on_input moe_per_layer_logging moe_router_force_load_balancing
        moe_router_padding_for_fp8 moe_router_pre_softmax moe_use_upcycling""",
        SWITCH,
    ),
    # when things are sent, and by which library; the file says what is sent
    **_names(
        """ddp_bucket_size ddp_num_buckets distributed_backend distributed_timeout_minutes local_rank
        microbatch_group_size_per_virtual_pipeline_stage microbatch_group_size_per_vp_stage
        nccl_communicator_config_path pipeline_model_parallel_comm_backend sharp_enabled_group
        suggested_communication_unit_size tp_comm_bootstrap_backend tp_comm_overlap_cfg wgrad_deferral_limit""",
        VALUE,
    ),
    **_names("cp_comm_type high_priority_stream_groups", VALUES),
    **_names(
        """accumulate_allreduce_grads_in_fp32 align_grad_reduce ddp_average_in_collective
        ddp_pad_buckets_for_high_nccl_busbw defer_embedding_wgrad_compute delay_wgrad_compute
        disable_tp_comm_bulk_dgrad disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag
        disable_tp_comm_overlap_rs disable_tp_comm_split_ag disable_tp_comm_split_rs
        enable_gloo_process_groups disable_gloo_process_groups fsdp_double_buffer
        keep_fp8_transpose_cache_when_using_custom_fsdp lazy_mpu_init no_align_grad_reduce
        no_align_param_gather no_async_tensor_model_parallel_allreduce no_gradient_reduce_div_fusion
        no_overlap_p2p_communication no_scatter_gather_tensors_in_pipeline overlap_grad_reduce
        overlap_moe_expert_parallel_comm overlap_p2p_communication_warmup_flush overlap_param_gather
        overlap_param_gather_with_optimizer_step tp_comm_overlap tp_comm_overlap_rs_dgrad use_nccl_ub
        use_ring_exchange_p2p use_sharp use_tp_pp_dp_mapping""",
        SWITCH,
    ),
    # fp8's details; what switches it on is refused
    **_names(
        """fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_recipe
        num_layers_at_end_in_bf16 num_layers_at_start_in_bf16""",
        VALUE,
    ),
    **_names("first_last_layers_bf16 no_fp8_wgrad reuse_grad_buf_for_mxfp8_param_ag", SWITCH),
    # inference and other programs of the repository: BERT, retrieval, vision
    **_names(
        """bert_embedder_type bert_load biencoder_projection_dim block_data_path classes_fraction
        data_per_class_fraction dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size
        dino_local_crops_number dino_local_img_size dino_teacher_temp dino_warmup_teacher_temp
        dino_warmup_teacher_temp_epochs embedding_path evidence_data_path ict_head_size ict_load img_h img_w
        indexer_batch_size indexer_log_interval inference_batch_times_seqlen_threshold
        inference_dynamic_batching_buffer_guaranteed_fraction
        inference_dynamic_batching_buffer_overflow_factor inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_chunk_size inference_dynamic_batching_max_requests_override
        inference_dynamic_batching_max_tokens_override inference_dynamic_batching_num_cuda_graphs
        inference_max_requests inference_max_seq_length iter_per_epoch mamba_head_dim mamba_num_groups
        mamba_num_heads mamba_state_dim mask_factor mask_type max_tokens_to_oom mlp_chunks_for_prefill
        num_channels num_classes patch_dim query_in_block_prob relative_attention_max_distance
        relative_attention_num_buckets retro_attention_gate retro_cyclic_train_iters
        retro_encoder_attention_dropout retro_encoder_hidden_dropout retro_encoder_layers
        retro_num_neighbors retro_num_retrieved_chunks retro_project_dir swin_backbone_type titles_data_path
        vision_backbone_type vision_pretraining_type""",
        VALUE,
    ),
    **_names("mrope_section retriever_report_topk_accuracies", VALUES),
    **_names(
        """bert_no_binary_head biencoder_shared_query_context_model cache_mla_latents dino_norm_last_layer
        disable_mamba_mem_eff_path enable_chunked_prefill flash_decode inference_dynamic_batching
        output_bert_embeddings retriever_score_scaling retro_no_verify_neighbor_count use_one_sent_docs""",
        SWITCH,
    ),
    # the first tool's scripts and launchers
    **_names("activation_func master_addr master_port nnodes node_rank nproc_per_node padded_vocab_size rank", VALUE),
    **_names("log_dir max_restarts rdzv_backend rdzv_conf rdzv_endpoint rdzv_id redirects tee", VALUE),
    **_names("standalone", SWITCH),
    **_names("computation_enable enable_visual overlap_version workload_only", SWITCH),
}

# These change what is computed or sent, and no workload here says it yet. What follows the flag, the values that are
# assumed anyway, and what is assumed.
_ASSUMED: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {
    SWITCH: {
        "account_for_embedding_in_pipeline_split": ((), "the embedding counts as no layer"),
        "account_for_loss_in_pipeline_split": ((), "the loss counts as no layer"),
        "calculate_per_token_loss": ((), "the loss is averaged on each rank"),
        "checkpoint_activations": ((), "Megatron-LM has --recompute_granularity in its place"),
        "cross_entropy_loss_fusion": ((), "the unfused cross-entropy's three all-reduces are written"),
        "distribute_saved_activations": ((), "saved activations stay whole"),
        "fp16_lm_cross_entropy": ((), "the loss is computed in fp32"),
        "fp32_residual_connection": ((), "residuals have the model's precision"),
        "fp8_param_gather": ((), "parameters are gathered in the model's precision"),
        "grad_reduce_in_bf16": ((), "gradients are reduced in fp32"),
        "is_hybrid_model": ((), "every layer is attention and an MLP"),
        "moe_enable_deepep": ((), "the alltoall dispatcher is written"),
        "moe_extended_tp": ((), "experts are split over TP and EP"),
        "moe_layer_recompute": ((), "use --recompute_granularity"),
        "moe_pad_expert_input_to_capacity": ((), "no token is dropped or padded"),
        "moe_shared_expert_overlap": ((), "the shared experts run after the routed ones"),
        "optimizer_cpu_offload": ((), "the optimizer runs on the GPU"),
        "qk_l2_norm": ((), "use --qk_layernorm"),
        "quick_geglu": ((), "GELU, SwiGLU and squared ReLU are known"),
        "retro_add_retriever": ((), "decoders alone are known"),
        "standalone_embedding_stage": ((), "the embedding is on the first stage with its layers"),
        "use_checkpoint_args": ((), "the model must be typed, not in a checkpoint"),
        "use_custom_fsdp": ((), "parameters are whole on each data-parallel rank"),
        "use_legacy_models": ((), "models are Megatron-Core's"),
        "use_megatron_fsdp": ((), "parameters are whole on each data-parallel rank"),
        "use_mp_args_from_checkpoint_args": ((), "the split must be typed, not in a checkpoint"),
        "use_precision_aware_optimizer": ((), "the optimizer's state is fp32"),
        "use_torch_fsdp2": ((), "parameters are whole on each data-parallel rank"),
        "vision_pretraining": ((), "decoders of text alone are known"),
    },
    VALUE: {
        "batch_size": ((), "Megatron-LM has --micro_batch_size in its place"),
        "cpu_offloading_num_layers": (("0",), "activations stay on the GPU"),
        "data_parallel_sharding_strategy": (("no_shard",), "parameters are whole on each data-parallel rank"),
        "decoder_num_layers": ((), "use --num_layers"),
        "decoder_seq_length": ((), "use --seq_length"),
        "encoder_num_layers": ((), "use --num_layers"),
        "encoder_pipeline_model_parallel_size": (("0",), "decoders alone are known"),
        "encoder_seq_length": ((), "use --seq_length"),
        "encoder_tensor_model_parallel_size": (("0",), "decoders alone are known"),
        "exp_avg_dtype": (("fp32",), "the optimizer's state is fp32"),
        "exp_avg_sq_dtype": (("fp32",), "the optimizer's state is fp32"),
        "fp4_format": ((), "GEMMs run in the model's precision"),
        "fp8": ((), "GEMMs run in the model's precision"),
        "fp8_format": ((), "GEMMs run in the model's precision"),
        "heterogeneous_layers_config_encoded_json": ((), "layers are alike"),
        "heterogeneous_layers_config_path": ((), "layers are alike"),
        "hybrid_attention_ratio": (("0", "0.0"), "every layer is attention and an MLP"),
        "hybrid_mlp_ratio": (("0", "0.0"), "every layer is attention and an MLP"),
        "hybrid_override_pattern": ((), "every layer is attention and an MLP"),
        "main_grads_dtype": (("fp32",), "main gradients are fp32"),
        "main_params_dtype": (("fp32",), "main parameters are fp32"),
        "model_parallel_size": ((), "Megatron-LM has --tensor_model_parallel_size in its place"),
        "moe_expert_capacity_factor": ((), "no token is dropped or padded"),
        "moe_router_topk_limited_devices": ((), "a token's experts are on any device"),
        "moe_token_dispatcher_type": (("alltoall",), "the alltoall dispatcher is written"),
        "mtp_num_layers": (("0",), "multi-token prediction is not known"),
        "no_rope_freq": (("0",), "rotary positions are in every layer"),
        "num_distributed_optimizer_instances": (("1",), "the optimizer is sharded over all of DP"),
        "num_virtual_stages_per_pipeline_rank": ((), "use --num_layers_per_virtual_pipeline_stage"),
        "optimizer": (("adam",), "the optimizer is Adam"),
        "pipeline_model_parallel_layout": ((), "use --decoder_first_pipeline_num_layers and _last_"),
        "pipeline_model_parallel_split_rank": ((), "decoders alone are known"),
        "recompute_method": (("uniform",), "full recompute is of every layer"),
        "window_attn_skip_freq": ((), "attention is over the whole sequence"),
        "yaml_cfg": ((), "use --args_file"),
    },
    VALUES: {
        "hierarchical_context_parallel_sizes": ((), "no context parallelism"),
        "recompute_modules": (("core_attn",), "selective recompute is of core attention"),
        "spec": (("local",), "layers are Megatron-Core's own"),
        "window_size": ((), "attention is over the whole sequence"),
    },
}
REFUSED: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    name: (follows, neutral, assumed)
    for follows, table in _ASSUMED.items()
    for name, (neutral, assumed) in table.items()
}

# Other words for what options.py has. The value, where there is one, follows.
TRANSLATED: Mapping[str, tuple[str, ...]] = {
    "disable_bias_linear": ("--no-add_bias_linear",),
    "no_add_bias_linear": ("--no-add_bias_linear",),
    "use_rotary_position_embeddings": ("--position_embedding_type", "rope"),
    "no_position_embedding": ("--position_embedding_type", "rope"),  # Megatron-LM takes it with nothing else
    "bf16": ("--dtype", "bfloat16"),
    "fp16": ("--dtype", "float16"),
}
