"""NeMo 1.x: `examples/nlp/language_modeling/conf/megatron_*_config.yaml` with Hydra's overrides.

Many keys are ours by name and place. What a file leaves out has the default of NeMo's own model class.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.translation import (
    ANOTHER_MODEL,
    TOGETHER,
    Becomes,
    NoNeed,
    NotHere,
    Row,
    Untranslatable,
)


def _steps(value: Any) -> Any:
    """A number of steps; a fraction is of an epoch."""
    if isinstance(value, float) and not value.is_integer():
        raise Untranslatable("it is counted in steps, of which an epoch has an unknown number")
    return value if value is None else int(value)


def _optional(value: Any) -> Any:
    return value or None


_BY_NAME = (
    "trainer.devices",
    "trainer.num_nodes",
    "trainer.max_steps",
    "trainer.max_time",
    "trainer.log_every_n_steps",
    "model.micro_batch_size",
    "model.global_batch_size",
    "model.tensor_model_parallel_size",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.context_parallel_size",
    "model.expert_model_parallel_size",
    "model.encoder_seq_length",
    "model.max_position_embeddings",
    "model.num_layers",
    "model.hidden_size",
    "model.num_attention_heads",
    "model.init_method_std",
    "model.hidden_dropout",
    "model.attention_dropout",
    "model.layernorm_epsilon",
    "model.bias",
    "model.qk_layernorm",
    "model.share_embeddings_and_output_weights",
    "model.rotary_percentage",
    "model.rotary_base",
    "model.seed",
    "model.activations_checkpoint_granularity",
    "model.activations_checkpoint_method",
    "model.activations_checkpoint_num_layers",
    "model.fp8_margin",
    "model.fp8_interval",
    "model.fp8_amax_history_len",
    "model.fp8_amax_compute_algo",
    "model.fp8_hybrid",
    "model.fp8_dot_product_attention",
    "model.fp8_wgrad",
    "model.num_moe_experts",
    "model.moe_router_topk",
    "model.moe_router_load_balancing_type",
    "model.moe_aux_loss_coeff",
    "model.moe_z_loss_coeff",
    "model.moe_token_dispatcher_type",
    "model.moe_ffn_hidden_size",
    "model.data.num_workers",
    "model.data.eod_mask_loss",
    "model.optim.lr",
    "model.optim.weight_decay",
    "model.optim.eps",
)
# Faster or slower ways to the same numbers: this program chooses, unless they are asked for on the command line.
KERNELS = (
    "model.bias_dropout_add_fusion",
    "model.masked_softmax_fusion",
    "model.gradient_accumulation_fusion",
    "model.apply_rope_fusion",
    "model.use_flash_attention",
    "model.cross_entropy_loss_fusion",
    "model.moe_grouped_gemm",
    "model.moe_permute_fusion",
)

ROWS: Mapping[str, Row] = {
    **{name: Becomes(name) for name in _BY_NAME},
    **dict.fromkeys(KERNELS, TOGETHER),
    "name": NoNeed("the run's name"),
    "restore_from_path": NotHere("weights came from a .nemo file", "import_megatron imports distributed ones"),
    "trainer.precision": TOGETHER,
    "trainer.val_check_interval": Becomes("trainer.val_check_interval", _steps, there="validations by epoch"),
    "trainer.limit_val_batches": Becomes(
        "trainer.limit_val_batches", _steps, there="a share of the validation set, or all of it"
    ),
    "trainer.gradient_clip_val": Becomes("trainer.gradient_clip_val", lambda value: value or 0.0),
    "trainer.accumulate_grad_batches": NotHere(
        "batches were accumulated", "model.global_batch_size says how many", (1,)
    ),
    "trainer.max_epochs": NoNeed("trainer.max_steps ends the run"),
    **dict.fromkeys(
        (
            "trainer.accelerator",
            "trainer.logger",
            "trainer.enable_checkpointing",
            "trainer.replace_sampler_ddp",
            "trainer.use_distributed_sampler",
            "trainer.benchmark",
            "trainer.enable_model_summary",
            "trainer.limit_test_batches",
        ),
        NoNeed("Lightning's; there is no Lightning here"),
    ),
    "trainer.strategy": NoNeed("Lightning's; there is no Lightning here"),
    # Layers
    "model.ffn_hidden_size": TOGETHER,
    "model.kv_channels": TOGETHER,
    "model.num_query_groups": TOGETHER,
    "model.normalization": TOGETHER,
    "model.activation": TOGETHER,
    "model.bias_activation_fusion": TOGETHER,
    "model.openai_gelu": TOGETHER,
    "model.position_embedding_type": Becomes(
        "model.position_embedding_type",
        {"learned_absolute": "learned_absolute", "rope": "rope"},
        there="positions were of that kind",
        here=ANOTHER_MODEL,
    ),
    "model.seq_len_interpolation_factor": NotHere("rope's positions were divided by it", ANOTHER_MODEL),
    "model.rotary_interleaved": NotHere("rope rotated neighbouring channels", ANOTHER_MODEL),
    "model.scale_positional_embedding": Becomes("model.rope_scaling_factor", {True: 8.0, False: None}),
    "model.make_vocab_size_divisible_by": TOGETHER,
    "model.override_vocab_size": TOGETHER,
    "model.apply_query_key_layer_scaling": NoNeed("scores that are divided and multiplied again are the same"),
    "model.use_scaled_init_method": NotHere("output projections began like the others", "they begin smaller", (True,)),
    "model.ffn_dropout": NotHere("the MLP had a dropout inside", "it has none", (0.0, None)),
    "model.do_layer_norm_weight_decay": NotHere("norm weights decayed", "they do not"),
    "model.transformer_block_type": NotHere("norms came elsewhere", ANOTHER_MODEL, ("pre_ln",)),
    "model.headscale": NotHere("heads were scaled", ANOTHER_MODEL),
    "model.normalize_attention_scores": NotHere("scores were not divided", ANOTHER_MODEL, (True,)),
    "model.attention_type": NotHere("attention was of another kind", ANOTHER_MODEL, ("multihead",)),
    "model.window_size": NotHere("attention saw a sliding window", "it sees the whole sequence"),
    "model.layernorm_zero_centered_gamma": TOGETHER,
    "model.mcore_customization_config.parallel_attention": NotHere("attention and MLP ran side by side", ANOTHER_MODEL),
    "model.moe_expert_capacity_factor": NotHere("experts dropped tokens beyond their capacity", "no token is dropped"),
    "model.moe_pad_expert_input_to_capacity": NotHere("experts were padded to their capacity", "nothing is padded"),
    "model.rampup_batch_size": Becomes("model.rampup_batch_size", _optional),
    "model.deterministic_mode": Becomes("trainer.deterministic", bool),
    "model.fsdp": TOGETHER,
    "model.fsdp_sharding_strategy": TOGETHER,
    "model.fsdp_grad_reduce_dtype": TOGETHER,
    "model.fsdp_sharded_checkpoint": NoNeed("checkpoints are written by all ranks"),
    "model.fp32_residual_connection": NotHere("the residual stream was fp32", "it has the type of the weights"),
    "model.fp16_lm_cross_entropy": NotHere("the loss was computed in FP16", "it is computed in fp32"),
    # Numbers and layout
    "model.megatron_amp_O2": TOGETHER,
    "model.grad_reduce_in_fp32": Becomes("model.grad_reduce_in_fp32"),
    "model.optim.grad_sync_dtype": TOGETHER,
    "model.transformer_engine": Becomes("model.transformer_engine", {True: True, False: None}),
    "model.fp8": TOGETHER,
    "model.fp8_e4m3": Becomes("model.fp8_e4m3", _optional),
    "model.fp8_params": Becomes("model.fp8_params", bool),
    "model.reduce_amax": NotHere("ranks kept amaxes of their own", "they are reduced", (True, None)),
    "model.sequence_parallel": TOGETHER,
    "model.ub_tp_comm_overlap": Becomes("model.tp_comm_overlap", bool),
    "model.overlap_p2p_comm": NoNeed("decided by the schedule"),
    "model.batch_p2p_comm": NoNeed("decided by the schedule"),
    "model.num_micro_batches_with_partial_activation_checkpoints": NotHere(
        "some microbatches were recomputed in part", "all are treated alike"
    ),
    "model.activations_checkpoint_layers_per_pipeline": NotHere(
        "later stages recomputed fewer layers", "all stages recompute alike"
    ),
    **dict.fromkeys(
        (
            "model.native_amp_init_scale",
            "model.native_amp_growth_interval",
            "model.hysteresis",
        ),
        NoNeed("BF16 needs no loss scaling"),
    ),
    **dict.fromkeys(
        (
            "model.mcore_gpt",
            "model.pre_process",
            "model.post_process",
            "model.persist_layer_norm",
            "model.grad_allreduce_chunk_size_mb",
            "model.grad_div_ar_fusion",
            "model.async_grad_allreduce",
            "model.gradient_as_bucket_view",
            "model.use_cpu_initialization",
            "model.onnx_safe",
            "model.apex_transformer_log_level",
            "model.get_attention_mask_from_fusion",
            "model.sync_batch_comm",
            "model.use_emha",
            "model.gc_interval",
            "model.precision",
            "model.target",
            "model.nemo_version",
        ),
        NoNeed("a detail of NeMo's implementation"),
    ),
    # Data
    "model.data.data_prefix": TOGETHER,
    "model.data.data_prefix.train": TOGETHER,
    "model.data.data_prefix.validation": TOGETHER,
    "model.data.data_prefix.test": TOGETHER,
    "model.data.splits_string": TOGETHER,
    "model.data.data_impl": TOGETHER,
    "model.data.index_mapping_dir": Becomes("model.data.cache_dir"),
    "model.data.seq_length": NoNeed("model.encoder_seq_length says it"),
    "model.data.reset_position_ids": TOGETHER,
    "model.data.reset_attention_mask": TOGETHER,
    "model.data.dataloader_type": NotHere("samples came in another order", "in megatron-core's (single)", ("single",)),
    "model.data.shuffle_documents": NotHere("documents kept their order", "they are shuffled", (True,)),
    **dict.fromkeys(
        (
            "model.data.skip_warmup",
            "model.data.validation_drop_last",
            "model.data.no_seqlen_plus_one_input_tokens",
            "model.data.pad_samples_to_global_batch_size",
            "model.data.exchange_indices_distributed",
        ),
        NoNeed("a detail of NeMo's data sets"),
    ),
    # Optimizer
    "model.optim.name": TOGETHER,
    "model.optim.betas": Becomes("model.optim.betas"),
    "model.optim.overlap_grad_sync": TOGETHER,
    "model.optim.overlap_param_sync": TOGETHER,
    **dict.fromkeys(
        ("model.optim.bucket_cap_mb", "model.optim.contiguous_grad_buffer"), NoNeed("buckets are sized here")
    ),
    "model.optim.contiguous_param_buffer": NoNeed("buckets are sized here"),
    "model.optim.sched.name": TOGETHER,
    "model.optim.sched.warmup_steps": TOGETHER,
    "model.optim.sched.constant_steps": TOGETHER,
    "model.optim.sched.min_lr": TOGETHER,
    "model.resume_from_checkpoint": NotHere("training went on from it", "NeMo's checkpoints are not read"),
    # Logs and saves
    "exp_manager.name": NoNeed("the run's name"),
    "exp_manager.explicit_log_dir": TOGETHER,
    "exp_manager.exp_dir": TOGETHER,
    "exp_manager.create_wandb_logger": TOGETHER,
    "exp_manager.wandb_logger_kwargs.project": TOGETHER,
    "exp_manager.create_checkpoint_callback": TOGETHER,
    "exp_manager.checkpoint_callback_params.every_n_train_steps": TOGETHER,
    "exp_manager.checkpoint_callback_params.save_top_k": TOGETHER,
    "exp_manager.checkpoint_callback_params.async_save": Becomes("checkpoint.async_save"),
    "exp_manager.max_time_per_run": Becomes("trainer.max_time"),
}
PREFIXES: Mapping[str, Row] = {
    "exp_manager.": NoNeed("a run writes metrics.jsonl and TensorBoard, and resumes from its own directory"),
    "model.nsys_profile": NoNeed("python -m gpt_pretrain.benchmark benchmark.profile=true profiles a run"),
    "model.tokenizer.": TOGETHER,
    "run.": NoNeed("the launcher's"),
    "model.ub_tp_comm_overlap_cfg": NoNeed("chosen by Transformer Engine"),
    "hydra.": NoNeed("Hydra's own"),
    "defaults": NoNeed("Hydra's own"),
}
NUMBERS = (
    "trainer.val_check_interval",
    "trainer.limit_val_batches",
    "trainer.gradient_clip_val",
    "model.ffn_hidden_size",
    "model.kv_channels",
    "model.num_query_groups",
    "model.make_vocab_size_divisible_by",
    "model.override_vocab_size",
    "model.optim.sched.warmup_steps",
    "model.optim.sched.constant_steps",
    "model.optim.sched.min_lr",
)
# NeMo's `cfg.get(name, default)`, for what a file leaves out.
DEFAULTS: Mapping[str, Any] = {
    "model.hidden_dropout": 0.1,
    "model.attention_dropout": 0.1,
    "model.normalization": "layernorm",
    "model.activation": "gelu",
    "model.bias": True,
    "model.bias_activation_fusion": True,
    "model.position_embedding_type": "learned_absolute",
    "model.share_embeddings_and_output_weights": True,
    "model.layernorm_epsilon": 1e-5,
    "model.init_method_std": 0.02,
    "model.make_vocab_size_divisible_by": 128,
    "model.seed": 1234,
    "model.tensor_model_parallel_size": 1,
    "model.pipeline_model_parallel_size": 1,
    "model.sequence_parallel": False,
    "model.fp8": False,
    "model.fp8_e4m3": False,
    "model.fp8_hybrid": True,
    "model.fp8_margin": 0,
    "model.fp8_amax_history_len": 1024,
    "model.fp8_amax_compute_algo": "max",
    "model.optim.weight_decay": 0.01,
    "model.optim.betas": [0.9, 0.999],
    "model.optim.eps": 1e-8,
    "trainer.gradient_clip_val": None,
    "trainer.precision": 32,
    "exp_manager.create_checkpoint_callback": True,
}


def rows_of(names: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of all settings of a file."""
    by_prefix = {name: row for prefix, row in PREFIXES.items() for name in names if name.startswith(prefix)}
    return {**by_prefix, **ROWS}
