"""What each of Megatron-LM's options becomes: the table.

Names are the parser's (`--norm-epsilon` is `layernorm_epsilon`). Options that belong together are in `megatron_lm`, and
those that no row has are reported with the parser's own help.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.common import DECAY_STYLES
from gpt_pretrain.translate.translation import (
    ANOTHER_MODEL,
    TOGETHER,
    Becomes,
    NoNeed,
    NotHere,
    Row,
    Untranslatable,
    becomes,
    table,
)


def _one(value: Any) -> Any:
    """The only element of a list."""
    if isinstance(value, list):
        if len(value) != 1:
            raise Untranslatable("one of them is possible")
        return value[0]
    return value


def _load_balancing(value: Any) -> str:
    if _one(value) not in ("aux_loss", "seq_aux_loss", "none"):
        raise Untranslatable("aux_loss, seq_aux_loss and none are the kinds")
    return str(_one(value))


def _minutes(value: Any) -> str | None:
    if value is None:
        return None
    return f"{value // 1440:02d}:{value // 60 % 24:02d}:{value % 60:02d}:00"


def _interval(value: Any) -> int | None:
    """Every how many layers one has no rope; the other program also takes a list of them."""
    if value is None or isinstance(value, int):
        return value
    freq = value.index(1) + 1 if 1 in value else None
    if [freq is not None and (layer + 1) % freq == 0 for layer in range(len(value))] != [bool(x) for x in value]:
        raise Untranslatable("every n-th layer may be without rope")
    return freq


_OFF = {False: False}
_TABLE: Mapping[str, Row] = {
    **becomes("""
    num_layers=model.num_layers hidden_size=model.hidden_size num_attention_heads=model.num_attention_heads
    max_position_embeddings=model.max_position_embeddings rotary_base=model.rotary_base
    rotary_percent=model.rotary_percentage layernorm_epsilon=model.layernorm_epsilon add_bias_linear=model.bias
    qk_layernorm=model.qk_layernorm hidden_dropout=model.hidden_dropout attention_dropout=model.attention_dropout
    init_method_std=model.init_method_std moe_router_topk=model.moe_router_topk moe_z_loss_coeff=model.moe_z_loss_coeff
    moe_router_padding_for_quantization=model.moe_router_padding_for_quantization
    overlap_moe_expert_parallel_comm=model.overlap_moe_expert_parallel_comm micro_batch_size=model.micro_batch_size
    rampup_batch_size=model.rampup_batch_size step_batch_size_schedule=model.step_batch_size_schedule seed=model.seed
    min_lr=model.optim.sched.min_lr decoupled_lr=model.optim.decoupled_lr lr_warmup_init=model.optim.sched.init_lr
    lr_wsd_decay_style=model.optim.sched.wsd_decay_style adam_eps=model.optim.eps sgd_momentum=model.optim.momentum
    weight_decay=model.optim.weight_decay clip_grad=trainer.gradient_clip_val muon_momentum=model.optim.muon_momentum
    muon_nesterov=model.optim.muon_nesterov muon_split_qkv=model.optim.muon_split_qkv
    muon_num_ns_steps=model.optim.muon_num_ns_steps muon_coefficient_type=model.optim.muon_coefficient_type
    muon_scale_mode=model.optim.muon_scale_mode muon_extra_scale_factor=model.optim.muon_extra_scale_factor
    muon_tp_mode=model.optim.muon_tp_mode use_precision_aware_optimizer=model.optim.use_precision_aware_optimizer
    main_params_dtype=model.optim.main_params_dtype exp_avg_dtype=model.optim.exp_avg_dtype
    tensor_model_parallel_size=model.tensor_model_parallel_size
    pipeline_model_parallel_size=model.pipeline_model_parallel_size context_parallel_size=model.context_parallel_size
    expert_model_parallel_size=model.expert_model_parallel_size ddp_bucket_size=model.ddp_bucket_size
    tp_comm_overlap=model.tp_comm_overlap deterministic_mode=trainer.deterministic
    recompute_method=model.activations_checkpoint_method recompute_num_layers=model.activations_checkpoint_num_layers
    data_cache_path=model.data.cache_dir num_workers=model.data.num_workers
    num_dataset_builder_threads=model.data.num_dataset_builder_threads eod_mask_loss=model.data.eod_mask_loss
    eval_interval=trainer.val_check_interval log_interval=trainer.log_every_n_steps async_save=checkpoint.async_save
    """),
    # Layers
    "encoder_num_layers": Becomes("model.num_layers", only_given=True),
    "add_position_embedding": NoNeed("rope has no table anyway"),
    "no_rope_freq": Becomes("model.no_rope_freq", _interval),
    "rotary_interleaved": NotHere("rope rotated neighbouring channels", ANOTHER_MODEL),
    "rotary_seq_len_interpolation_factor": NotHere("rope's positions were divided by it", ANOTHER_MODEL),
    "normalization": Becomes("model.normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
    "layernorm_zero_centered_gamma": NotHere(
        "norm weights were stored minus one, a step finer in BF16",
        "they are stored as they are: the same function, and neither decays",
    ),
    "quick_geglu": NotHere("the MLP's activation was a gated quick GELU", ANOTHER_MODEL),
    "untie_embeddings_and_output_weights": Becomes(
        "model.share_embeddings_and_output_weights", {True: False, False: True}
    ),
    "embedding_init_method_std": NotHere("embeddings had a deviation of their own", "model.init_method_std sets it"),
    "init_method_xavier_uniform": NotHere("weights began by Xavier's rule", "they begin normal, by init_method_std"),
    "perform_initialization": NotHere("weights were not initialized", "they are", (True,)),
    "apply_query_key_layer_scaling": NotHere(
        "scores were divided by the layer's number and multiplied again in fp32", "that stays out: the same function"
    ),
    "apply_residual_connection_post_layernorm": NotHere("residuals branched off after the norm", ANOTHER_MODEL),
    "fp32_residual_connection": NotHere("the residual stream was fp32", "it has the type of the weights"),
    "multi_latent_attention": NotHere("attention was multi-latent (MLA)", ANOTHER_MODEL),
    "mtp_num_layers": NotHere("layers predicted further tokens (MTP)", ANOTHER_MODEL),
    "qk_l2_norm": NotHere("queries and keys were L2-normalized", ANOTHER_MODEL),
    "qk_clip": Becomes("model.qk_clip"),
    "qk_clip_alpha": Becomes("model.qk_clip_alpha", only_given=True),
    "qk_clip_threshold": Becomes("model.qk_clip_threshold", only_given=True),
    "log_max_attention_logit": Becomes("model.log_max_attention_logit"),
    "attention_output_gate": NotHere("attention's output was gated", ANOTHER_MODEL),
    "softmax_type": NotHere("attention had a sink", ANOTHER_MODEL, ("vanilla",)),
    "hybrid_layer_pattern": NotHere("layers were a hybrid of kinds", ANOTHER_MODEL),
    "experimental_attention_variant": NotHere("attention was of another kind", ANOTHER_MODEL),
    "use_mup": NotHere("widths scaled rates and initial weights (muP)", "nothing scales them"),
    "heterogeneous_layers_config_path": NotHere("layers differed from each other", ANOTHER_MODEL),
    # Experts
    "num_experts": Becomes("model.num_moe_experts", lambda value: value or None),
    "moe_router_load_balancing_type": Becomes(
        "model.moe_router_load_balancing_type", _load_balancing, there="tokens were balanced that way"
    ),
    "moe_aux_loss_coeff": Becomes("model.moe_aux_loss_coeff", _one),
    "moe_token_dispatcher_type": Becomes(
        "model.moe_token_dispatcher_type",
        {"allgather": "allgather", "alltoall": "alltoall"},
        there="tokens went to their experts by DeepEP or the like",
        here="alltoall takes them",
    ),
    "moe_grouped_gemm": Becomes("model.moe_grouped_gemm", only_given=True),
    "moe_permute_fusion": Becomes("model.moe_permute_fusion", only_given=True),
    "moe_router_padding_for_fp8": Becomes("model.moe_router_padding_for_quantization", only_given=True),
    "moe_router_pre_softmax": NotHere(
        "the softmax came before the choice of experts", "it comes after: another model for topk above 1"
    ),
    "moe_router_score_function": NotHere("scores were not a softmax", ANOTHER_MODEL, ("softmax",)),
    "moe_router_enable_expert_bias": NotHere("a bias balanced the experts", "the auxiliary loss does"),
    "moe_router_topk_scaling_factor": NotHere("the experts' weights were scaled", ANOTHER_MODEL),
    "moe_router_num_groups": NotHere("experts were chosen by groups", ANOTHER_MODEL),
    "moe_shared_expert_intermediate_size": NotHere("an expert saw every token", ANOTHER_MODEL),
    "moe_layer_freq": NotHere("some layers had no experts", ANOTHER_MODEL, (1,)),
    "moe_expert_capacity_factor": NotHere("experts dropped tokens beyond their capacity", "no token is dropped"),
    "moe_input_jitter_eps": NotHere("the router's input was jittered", "it is not"),
    "moe_use_upcycling": NotHere("a dense model became experts", "training starts from fresh weights"),
    "moe_router_force_load_balancing": NotHere("tokens were spread at random", "the router routes them"),
    # Batch and length
    "seq_length": Becomes("model.encoder_seq_length", only_given=True),
    "encoder_seq_length": Becomes("model.encoder_seq_length", only_given=True),
    "exit_interval": NotHere("the process ended at multiples of it", "a run ends at trainer.max_steps or max_time"),
    "exit_duration_in_mins": Becomes("trainer.max_time", _minutes),
    "exit_signal_handler": NoNeed("SIGTERM and SIGUSR1 end a run with a checkpoint"),
    # Optimizer and schedule
    "optimizer": Becomes(
        "model.optim.name",
        {"adam": "adam", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"},
        there="that optimizer",
        here="adam stays",
    ),
    "lr_decay_style": Becomes(
        "model.optim.sched.name",
        DECAY_STYLES,
        there="the rate fell with the root of the step",
        here="it falls by a cosine",
    ),
    "weight_decay_incr_style": NotHere("weight decay grew", "it stays model.optim.weight_decay", ("constant",)),
    "start_weight_decay": NoNeed("it belongs to --weight-decay-incr-style"),
    "end_weight_decay": NoNeed("it belongs to --weight-decay-incr-style"),
    "muon_fp32_matmul_prec": Becomes(
        "model.optim.muon_fp32_matmul_prec",
        {"medium": "medium", "high": "high"},
        there="Newton-Schulz multiplied that way",
        here="medium is the coarsest",
    ),
    "main_grads_dtype": NotHere("main gradients were BF16", "model.grad_reduce_in_fp32 sets their type", ("fp32",)),
    "exp_avg_sq_dtype": Becomes(
        "model.optim.exp_avg_sq_dtype",
        {"fp32": "fp32", "bf16": "bf16", "fp16": "fp16"},
        there="the second moment was FP8",
        here="it is fp32",
    ),
    "optimizer_cpu_offload": NotHere("optimizer states were in the host's memory", "they are on the GPU"),
    # Numbers
    "loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis": NoNeed("BF16 needs no loss scaling"),
    "fp16_lm_cross_entropy": NotHere("the loss was computed in FP16", "it is computed in fp32"),
    "attention_softmax_in_fp32": NoNeed("Transformer Engine's softmax is in fp32"),
    "calculate_per_token_loss": NoNeed("without masked tokens both means are the same; with them it is done anyway"),
    "fp8_output_proj": NotHere("the LM head multiplied in FP8", "it stays in the run's precision"),
    "fp4": NotHere("layers multiplied in FP4", "there is no FP4"),
    "keep_fp8_transpose_cache": NotHere("transposed FP8 weights were kept between microbatches", "they are made anew"),
    "reuse_grad_buf_for_mxfp8_param_ag": NoNeed("model.fp8_params decides how weights are gathered"),
    # Layout
    "cp_comm_type": NotHere("context-parallel ranks exchanged that way", "they pass keys around (p2p)", (["p2p"],)),
    "expert_tensor_parallel_size": Becomes("model.expert_tensor_parallel_size", only_given=True),
    "pipeline_model_parallel_layout": NotHere("stages had layers as listed", "each stage has the same number"),
    "decoder_first_pipeline_num_layers": NotHere("the first stage had other layers", "all stages have the same number"),
    "decoder_last_pipeline_num_layers": NotHere("the last stage had other layers", "all stages have the same number"),
    "account_for_embedding_in_pipeline_split": NotHere("the embedding counted as a layer", "layers alone are split"),
    "account_for_loss_in_pipeline_split": NotHere("the loss counted as a layer", "layers alone are split"),
    "ddp_average_in_collective": NoNeed("done where NCCL can"),
    "use_tp_pp_dp_mapping": NotHere("ranks were ordered TP, PP, DP", "they are ordered TP, CP, DP, PP"),
    "nccl_ub": NotHere("NCCL registered buffers", "it does not"),
    "distributed_backend": NoNeed("nccl on GPUs, gloo on a CPU"),
    "distributed_timeout_minutes": Becomes("trainer.hang_timeout", lambda minutes: 60.0 * minutes, only_given=True),
    # Kernels
    "transformer_impl": Becomes(
        "model.transformer_engine",
        {"transformer_engine": None, "local": False},
        there="layers for inference",
        here="layers are for training",
    ),
    "attention_backend use_flash_attn": NoNeed("Transformer Engine takes the fastest attention"),
    "masked_softmax_fusion": Becomes("model.masked_softmax_fusion", only_given=True),
    "bias_dropout_fusion": Becomes("model.bias_dropout_add_fusion", only_given=True),
    "apply_rope_fusion": Becomes("model.apply_rope_fusion", only_given=True),
    "gradient_accumulation_fusion": Becomes("model.gradient_accumulation_fusion", only_given=True),
    "cross_entropy_loss_fusion": Becomes("model.cross_entropy_loss_fusion", only_given=True),
    "cross_entropy_fusion_impl": Becomes(
        "model.cross_entropy_fusion_impl",
        {"native": "native"},
        only_given=True,
        there="Transformer Engine's loss",
        here="the linear loss is used",
    ),
    "cuda_graph_impl": Becomes(
        "model.cuda_graph_impl",
        {"none": "none", "local": "local"},
        only_given=True,
        there="graphs recorded that way",
        here="local graphs alone are known; none are used",
    ),
    "enable_cuda_graph": Becomes("model.cuda_graph_impl", {True: "local"}, only_given=True),
    "recompute_modules": NotHere(
        "these parts were recomputed", "selective means core attention", (None, ["core_attn"])
    ),
    "distribute_saved_activations": NotHere("saved activations were split over TP ranks", "each rank has all"),
    "fine_grained_activation_offloading": NotHere("activations went to the host's memory", "they stay on the GPU"),
    "cpu_offloading_num_layers": NotHere("activations went to the host's memory", "they stay on the GPU", (0,)),
    "empty_unused_memory_level": NoNeed("the allocator's cache is kept"),
    "manual_gc": NoNeed("collections run at the same step on all ranks"),
    "manual_gc_interval": Becomes("trainer.gc_interval", only_given=True),
    # Data
    "test_data_path": NotHere("a test set was scored at the end", "there is no test set"),
    "create_attention_mask_in_dataloader": NoNeed("attention is causal without a mask in memory"),
    "mmap_bin_files": NoNeed("files are mapped"),
    "dataloader_type": NotHere("samples came in another order", "in megatron-core's (single)", (None, "single")),
    "fim_data": NotHere("documents were rearranged to fill in the middle", "they stay as they are"),
    "tiktoken_pattern": NoNeed("indexed files hold token ids"),
    # Validation, saves, logs
    "eval_iters": Becomes("trainer.limit_val_batches", lambda value: value or 0),
    "eval_global_batch_size": NotHere("validation had a batch of its own", "it has training's"),
    "skip_train": NotHere("nothing was trained", "python -m gpt_pretrain trains"),
    "tensorboard_dir": NoNeed("RUN_DIR/tensorboard is written (logging.tensorboard)"),
    "wandb_entity": Becomes("logging.wandb_entity", only_given=True),
    "no_save_optim": NotHere("checkpoints had no optimizer states", "they have"),
    """
    ckpt_format auto_detect_ckpt_format use_dist_ckpt_deprecated dist_ckpt_format_deprecated
    """: NoNeed("checkpoints have one format, which every layout reads"),
    "ckpt_fully_parallel_save_deprecated": NoNeed("ranks always save in parallel"),
    "ckpt_fully_parallel_load": NoNeed("ranks always load in parallel"),
    "check_for_nan_in_loss_and_grad": NoNeed("such a step updates nothing (trainer.max_skipped_steps)"),
    "check_for_spiky_loss": NoNeed("trainer.spike_threshold warns of spikes"),
    "rerun_mode": NoNeed("logging.fp8_proof and the guards watch the numbers"),
    "deprecated_use_mcore_models": NoNeed("layers are megatron-core's"),
    "no_persist_layer_norm": NoNeed("norms are Transformer Engine's"),
    "use_cpu_initialization": NoNeed("weights are the same in every layout anyway"),
    """
    ffn_hidden_size group_query_attention num_query_groups kv_channels position_embedding_type
    use_rotary_position_embeddings use_rope_scaling rope_scaling_factor add_qkv_bias swiglu squared_relu openai_gelu
    moe_ffn_hidden_size moe_router_dtype global_batch_size train_iters train_samples lr decoupled_min_lr lr_decay_iters
    lr_decay_samples lr_wsd_decay_iters lr_wsd_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples
    adam_beta1 adam_beta2 bf16 fp16 accumulate_allreduce_grads_in_fp32 grad_reduce_in_bf16 fp8 fp8_recipe fp8_margin
    fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad fp8_param_gather first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 num_layers_per_virtual_pipeline_stage
    num_virtual_stages_per_pipeline_rank sequence_parallel use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2
    data_parallel_sharding_strategy num_distributed_optimizer_instances overlap_grad_reduce overlap_param_gather
    window_size window_attn_skip_freq rotary_scaling_factor yarn_original_max_position_embeddings
    bias_gelu_fusion bias_swiglu_fusion recompute_activations recompute_granularity data_path train_data_path
    valid_data_path data_args_path per_split_data_args_path mock_data split reset_position_ids reset_attention_mask
    dataloader_inter_document_masking vocab_size padded_vocab_size make_vocab_size_divisible_by tokenizer_type
    tokenizer_model vocab_file merge_file wandb_project wandb_exp_name save save_interval save_retain_interval load
    pretrained_checkpoint no_load_optim no_load_rng finetune
    """: TOGETHER,
    # By the beginning of their names
    "log_*": NoNeed("every record has what is worth logging"),
    "tensorboard_*": NoNeed("RUN_DIR/tensorboard is written (logging.tensorboard)"),
    "timing_*": NoNeed("python -m gpt_pretrain.benchmark times a run"),
    "profile*": NoNeed("python -m gpt_pretrain.benchmark benchmark.profile=true profiles a run"),
    "inference_*": NoNeed("training does not read it"),
    "one_logger*": NoNeed("there is no such logger"),
    "enable_one_logger*": NoNeed("there is no such logger"),
    "dist_ckpt*": NoNeed("checkpoints have one format, which every layout reads"),
    "fsdp_*": NoNeed("model.data_parallel_sharding_strategy decides how weights are gathered"),
    "app_tag*": NoNeed("training does not read it"),
}
ROWS = table(_TABLE)
