"""NeMo 1.x: `examples/nlp/language_modeling/conf/megatron_*_config.yaml` with Hydra's overrides.

Many keys are ours by name and place. What a file leaves out has the default of NeMo's own model class.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.translation import (
    ANOTHER_MODEL,
    SAME,
    TOGETHER,
    Becomes,
    NoNeed,
    NotHere,
    Row,
    Untranslatable,
    defaults,
    names,
    table,
)


def _steps(value: Any) -> Any:
    """A number of steps; a fraction is of an epoch."""
    if isinstance(value, float) and not value.is_integer():
        raise Untranslatable("it is counted in steps, of which an epoch has an unknown number")
    return value if value is None else int(value)


def _optional(value: Any) -> Any:
    return value or None


# Faster or slower ways to the same numbers: this program chooses, unless they are asked for on the command line.
KERNELS = names("""
model.bias_dropout_add_fusion .masked_softmax_fusion .gradient_accumulation_fusion .apply_rope_fusion
.use_flash_attention .cross_entropy_loss_fusion .moe_grouped_gemm .moe_permute_fusion
""")

_TABLE: Mapping[str, Row] = {
    """
    model.micro_batch_size .global_batch_size .tensor_model_parallel_size .pipeline_model_parallel_size
    .virtual_pipeline_model_parallel_size .context_parallel_size .expert_model_parallel_size .encoder_seq_length
    .max_position_embeddings .num_layers .hidden_size .num_attention_heads .init_method_std .hidden_dropout
    .attention_dropout .layernorm_epsilon .bias .qk_layernorm .share_embeddings_and_output_weights .rotary_percentage
    .rotary_base .seed .activations_checkpoint_granularity .activations_checkpoint_method
    .activations_checkpoint_num_layers .fp8_margin .fp8_interval .fp8_amax_history_len .fp8_amax_compute_algo
    .fp8_hybrid .fp8_dot_product_attention .fp8_wgrad .num_moe_experts .moe_router_topk .moe_router_load_balancing_type
    .moe_aux_loss_coeff .moe_z_loss_coeff .moe_token_dispatcher_type .moe_ffn_hidden_size model.data.num_workers
    .eod_mask_loss model.optim.lr .weight_decay .eps trainer.devices .num_nodes .max_steps .max_time .log_every_n_steps
    """: SAME,
    **dict.fromkeys(KERNELS, TOGETHER),
    "name": NoNeed("the run's name"),
    "restore_from_path": NotHere("weights came from a .nemo file", "import_megatron imports distributed ones"),
    "trainer.val_check_interval": Becomes("trainer.val_check_interval", _steps, there="validations by epoch"),
    "trainer.limit_val_batches": Becomes(
        "trainer.limit_val_batches", _steps, there="a share of the validation set, or all of it"
    ),
    "trainer.gradient_clip_val": Becomes("trainer.gradient_clip_val", lambda value: value or 0.0),
    "trainer.accumulate_grad_batches": NotHere(
        "batches were accumulated", "model.global_batch_size says how many", (1,)
    ),
    "trainer.max_epochs": NoNeed("trainer.max_steps ends the run"),
    """
    trainer.accelerator .logger .enable_checkpointing .replace_sampler_ddp .use_distributed_sampler .benchmark
    .enable_model_summary .limit_test_batches
    """: NoNeed("Lightning's; there is no Lightning here"),
    "trainer.strategy": NoNeed("Lightning's; there is no Lightning here"),
    # Layers
    "model.position_embedding_type": Becomes(
        "model.position_embedding_type",
        {"learned_absolute": "learned_absolute", "rope": "rope"},
        there="positions were of that kind",
        here=ANOTHER_MODEL,
    ),
    "model.seq_len_interpolation_factor": NotHere("rope's positions were divided by it", ANOTHER_MODEL),
    "model.rotary_interleaved": NotHere("rope rotated neighbouring channels", ANOTHER_MODEL),
    "model.scale_positional_embedding": Becomes("model.rope_scaling_factor", {True: 8.0, False: None}),
    "model.apply_query_key_layer_scaling": NoNeed("scores that are divided and multiplied again are the same"),
    "model.use_scaled_init_method": NotHere("output projections began like the others", "they begin smaller", (True,)),
    "model.ffn_dropout": NotHere("the MLP had a dropout inside", "it has none", (0.0, None)),
    "model.do_layer_norm_weight_decay": NotHere("norm weights decayed", "they do not"),
    "model.transformer_block_type": NotHere("norms came elsewhere", ANOTHER_MODEL, ("pre_ln",)),
    "model.headscale": NotHere("heads were scaled", ANOTHER_MODEL),
    "model.normalize_attention_scores": NotHere("scores were not divided", ANOTHER_MODEL, (True,)),
    "model.attention_type": NotHere("attention was of another kind", ANOTHER_MODEL, ("multihead",)),
    "model.window_size": Becomes("model.window_size"),
    "model.mcore_customization_config.parallel_attention": NotHere("attention and MLP ran side by side", ANOTHER_MODEL),
    "model.moe_expert_capacity_factor": NotHere("experts dropped tokens beyond their capacity", "no token is dropped"),
    "model.moe_pad_expert_input_to_capacity": NotHere("experts were padded to their capacity", "nothing is padded"),
    "model.rampup_batch_size": Becomes("model.rampup_batch_size", _optional),
    "model.deterministic_mode": Becomes("trainer.deterministic", bool),
    "model.fsdp_sharded_checkpoint": NoNeed("checkpoints are written by all ranks"),
    "model.fp32_residual_connection": NotHere("the residual stream was fp32", "it has the type of the weights"),
    "model.fp16_lm_cross_entropy": NotHere("the loss was computed in FP16", "it is computed in fp32"),
    # Numbers and layout
    "model.grad_reduce_in_fp32": Becomes("model.grad_reduce_in_fp32"),
    "model.transformer_engine": Becomes("model.transformer_engine", {True: True, False: None}),
    "model.fp8_e4m3": Becomes("model.fp8_e4m3", _optional),
    "model.fp8_params": Becomes("model.fp8_params", bool),
    "model.reduce_amax": NotHere("ranks kept amaxes of their own", "they are reduced", (True, None)),
    "model.ub_tp_comm_overlap": Becomes("model.tp_comm_overlap", bool),
    "model.overlap_p2p_comm": NoNeed("decided by the schedule"),
    "model.batch_p2p_comm": NoNeed("decided by the schedule"),
    "model.num_micro_batches_with_partial_activation_checkpoints": NotHere(
        "some microbatches were recomputed in part", "all are treated alike"
    ),
    "model.activations_checkpoint_layers_per_pipeline": NotHere(
        "later stages recomputed fewer layers", "all stages recompute alike"
    ),
    "model.native_amp_init_scale .native_amp_growth_interval .hysteresis": NoNeed("BF16 needs no loss scaling"),
    """
    model.mcore_gpt .pre_process .post_process .persist_layer_norm .grad_allreduce_chunk_size_mb .grad_div_ar_fusion
    .async_grad_allreduce .gradient_as_bucket_view .use_cpu_initialization .onnx_safe .apex_transformer_log_level
    .get_attention_mask_from_fusion .sync_batch_comm .use_emha .gc_interval .precision .target .nemo_version
    """: NoNeed("a detail of NeMo's implementation"),
    # Data
    "model.data.index_mapping_dir": Becomes("model.data.cache_dir"),
    "model.data.seq_length": NoNeed("model.encoder_seq_length says it"),
    "model.data.dataloader_type": NotHere("samples came in another order", "in megatron-core's (single)", ("single",)),
    "model.data.shuffle_documents": NotHere("documents kept their order", "they are shuffled", (True,)),
    """
    model.data.skip_warmup .validation_drop_last .no_seqlen_plus_one_input_tokens .pad_samples_to_global_batch_size
    .exchange_indices_distributed
    """: NoNeed("a detail of NeMo's data sets"),
    # Optimizer
    "model.optim.betas": Becomes("model.optim.betas"),
    "model.optim.bucket_cap_mb .contiguous_grad_buffer": NoNeed("buckets are sized here"),
    "model.optim.contiguous_param_buffer": NoNeed("buckets are sized here"),
    "model.resume_from_checkpoint": NotHere("training went on from it", "NeMo's checkpoints are not read"),
    # Logs and saves
    "exp_manager.name": NoNeed("the run's name"),
    "exp_manager.checkpoint_callback_params.async_save": Becomes("checkpoint.async_save"),
    "exp_manager.max_time_per_run": Becomes("trainer.max_time"),
    """
    exp_manager.explicit_log_dir .exp_dir .create_wandb_logger .create_checkpoint_callback
    exp_manager.checkpoint_callback_params.every_n_train_steps .save_top_k exp_manager.wandb_logger_kwargs.project
    model.ffn_hidden_size .kv_channels .num_query_groups .normalization .activation .bias_activation_fusion .openai_gelu
    .make_vocab_size_divisible_by .override_vocab_size .layernorm_zero_centered_gamma .fsdp .fsdp_sharding_strategy
    .fsdp_grad_reduce_dtype .megatron_amp_O2 .fp8 .sequence_parallel model.data.data_prefix .splits_string .data_impl
    .reset_position_ids .reset_attention_mask model.data.data_prefix.train .validation .test model.optim.grad_sync_dtype
    .name .overlap_grad_sync .overlap_param_sync model.optim.sched.name .warmup_steps .constant_steps .min_lr
    trainer.precision
    """: TOGETHER,
    # By the beginning of their names
    "exp_manager.*": NoNeed("a run writes metrics.jsonl and TensorBoard, and resumes from its own directory"),
    "model.nsys_profile*": NoNeed("python -m gpt_pretrain.benchmark benchmark.profile=true profiles a run"),
    "run.*": NoNeed("the launcher's"),
    "model.ub_tp_comm_overlap_cfg*": NoNeed("chosen by Transformer Engine"),
    "hydra.*": NoNeed("Hydra's own"),
    "defaults*": NoNeed("Hydra's own"),
    "model.tokenizer.*": TOGETHER,
}
ROWS = table(_TABLE)
NUMBERS = names("""
model.ffn_hidden_size .kv_channels .num_query_groups .make_vocab_size_divisible_by .override_vocab_size
model.optim.sched.warmup_steps .constant_steps .min_lr trainer.val_check_interval .limit_val_batches
.gradient_clip_val
""")
# NeMo's `cfg.get(name, default)`, for what a file leaves out.
DEFAULTS = defaults("""
model.hidden_dropout=0.1 .attention_dropout=0.1 .normalization=layernorm .activation=gelu .bias=true
.bias_activation_fusion=true .position_embedding_type=learned_absolute .share_embeddings_and_output_weights=true
.layernorm_epsilon=1e-5 .init_method_std=0.02 .make_vocab_size_divisible_by=128 .seed=1234
.tensor_model_parallel_size=1 .pipeline_model_parallel_size=1 .sequence_parallel=false .fp8=false .fp8_e4m3=false
.fp8_hybrid=true .fp8_margin=0 .fp8_amax_history_len=1024 .fp8_amax_compute_algo=max model.optim.weight_decay=0.01
.betas=[0.9,0.999] .eps=1e-8 trainer.gradient_clip_val=null .precision=32
exp_manager.create_checkpoint_callback=true
""")
