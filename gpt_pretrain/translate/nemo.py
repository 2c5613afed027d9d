"""NeMo 1.x: `examples/nlp/language_modeling/conf/megatron_*_config.yaml` with Hydra's overrides.

Many keys are ours by name and place. What a file leaves out has the default of NeMo's own model class.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.common import GPT2_TOKENS, blend, set_sharding, set_vocabulary_rows
from gpt_pretrain.translate.translation import (
    ANOTHER_MODEL,
    TOGETHER,
    Becomes,
    NoNeed,
    NotHere,
    Row,
    Source,
    Translation,
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
_KERNELS = (
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
    **dict.fromkeys(_KERNELS, TOGETHER),
    "name": NoNeed("the run's name"),
    "restore_from_path": NotHere("weights came from a .nemo file", "checkpoint.init_from takes this program's own"),
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
    "model.rampup_batch_size": NotHere("the batch grew step by step", "every step has model.global_batch_size samples"),
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


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    _layers(source, translation)
    _numbers(source, translation)
    _optimizer(source, translation)
    _data(source, translation)
    _run(source, translation)


def _layers(source: Source, translation: Translation) -> None:
    hidden, heads = source.get("model.hidden_size"), source.get("model.num_attention_heads")
    if hidden and heads:
        ffn = source.get("model.ffn_hidden_size") or 4 * hidden
        translation.derive(source, "model.ffn_hidden_size", ffn, "model.ffn_hidden_size")
        channels = source.get("model.kv_channels") or hidden // heads
        translation.derive(source, "model.kv_channels", channels, "model.kv_channels")
        groups = source.get("model.num_query_groups") or heads
        translation.derive(source, "model.num_query_groups", groups, "model.num_query_groups")
    norm = str(source.get("model.normalization"))
    known = {"layernorm": "layernorm", "layernorm1p": "layernorm", "rmsnorm": "rmsnorm"}
    translation.derive(source, "model.normalization", known.get(norm, "layernorm"), "model.normalization")
    if norm == "layernorm1p":
        here = "they are stored as they are: the same function, and neither decays"
        translation.lose(source.shown("model.normalization"), "norm weights were stored minus one", here)
    elif norm not in known:
        translation.lose(source.shown("model.normalization"), "the norm was of that kind", "it is a LayerNorm")
    kind = str(source.get("model.activation")).removeprefix("fast-")
    if kind not in ("gelu", "swiglu"):
        translation.lose(source.shown("model.activation"), "the MLP's activation", ANOTHER_MODEL)
    # NeMo's fused bias and GELU is the tanh form; without it torch's is exact.
    tanh = source.get("model.openai_gelu") or (source.get("model.bias_activation_fusion") and source.get("model.bias"))
    activation = "swiglu" if kind == "swiglu" else "gelu_tanh" if tanh else "gelu"
    names = ("model.activation", "model.openai_gelu", "model.bias_activation_fusion")
    translation.derive(source, "model.activation", activation, *names[: 1 if kind == "swiglu" else 3])
    for name in _KERNELS:
        if name in source.given and not source.given[name].startswith(f"{name}="):
            translation.derive(source, name, source.get(name), name)
        elif name in source.given:
            translation.not_needed.append((source.given[name], "chosen here (null): the numbers are the same"))
    _vocabulary(source, translation)


def _vocabulary(source: Source, translation: Translation) -> None:
    library, tokens = source.get("model.tokenizer.type"), source.get("model.override_vocab_size")
    if tokens:
        translation.derive(source, "model.vocab_size", tokens, "model.override_vocab_size")
    elif library == "GPT2BPETokenizer":
        tokens = GPT2_TOKENS
        how = "GPT-2's BPE has 50,257 tokens"
        translation.derive(source, "model.vocab_size", tokens, "model.tokenizer.type", how=how)
    else:
        translation.up_to_you.append(("model.vocab_size", "the number of tokens of the tokenizer"))
    tp = "model.tensor_model_parallel_size"
    set_vocabulary_rows(source, translation, tokens, "model.make_vocab_size_divisible_by", tp)
    described = [name for name, value in source.values.items() if name.startswith("model.tokenizer.") and value]
    if described:
        why = "only text needs a tokenizer, as a Hugging Face tokenizer.json; indexed files do without"
        translation.up_to_you.append(("model.tokenizer.model", f"{why} ({', '.join(map(source.shown, described))})"))
    for name in source.given:
        if name.startswith("model.tokenizer.") and name not in described:
            translation.not_needed.append((source.given[name], "it asks for nothing"))


def _numbers(source: Source, translation: Translation) -> None:
    precision = str(source.get("trainer.precision"))
    name = "trainer.precision"
    if precision.startswith("16"):
        there = "weights were FP16 by autocast, with loss scaling"
        translation.lose(source.shown(name), there, "they are BF16, which needs no scaling (trainer.precision=bf16)")
    low = not precision.startswith("32")
    translation.derive(source, "trainer.precision", "bf16" if low else "fp32", name)
    if low and not source.get("model.megatron_amp_O2"):
        there = "weights stayed fp32, and autocast cast them for each product"
        translation.lose(source.shown("model.megatron_amp_O2"), there, "weights are BF16 with fp32 masters, as with O2")
    elif "model.megatron_amp_O2" in source.given:
        translation.not_needed.append((source.given["model.megatron_amp_O2"], "weights are BF16 with fp32 masters"))
    dtype = source.get("model.optim.grad_sync_dtype")
    if dtype is not None:
        value = str(dtype) not in ("bf16", "torch.bfloat16")
        translation.derive(source, "model.grad_reduce_in_fp32", value, "model.optim.grad_sync_dtype")
    fp8 = source.get("model.fp8")
    translation.derive(source, "model.fp8", bool(fp8), "model.fp8")
    if fp8:
        # NeMo 1.x has no other recipe.
        translation.set("model.fp8_recipe", "delayed", source.shown("model.fp8"), given=False)
    if isinstance(fp8, str):
        translation.derive(source, "model.fp8_hybrid", fp8 == "hybrid", "model.fp8")
        translation.derive(source, "model.fp8_e4m3", fp8 == "e4m3", "model.fp8")
    sequence = bool(source.get("model.sequence_parallel")) and source.get("model.tensor_model_parallel_size", 1) > 1
    translation.derive(source, "model.sequence_parallel", sequence, "model.sequence_parallel")


_SCHEDULES = {"CosineAnnealing": "cosine", "WarmupHoldPolicy": "constant", None: "constant"}


def _optimizer(source: Source, translation: Translation) -> None:
    name = str(source.get("model.optim.name"))
    distributed = name in ("distributed_fused_adam", "mcore_distributed_optim")
    if distributed or name in ("fused_adam", "adamw", "adam", "sgd"):
        value = "sgd" if name == "sgd" else "adam"
        translation.derive(source, "model.optim.name", value, "model.optim.name")
    else:
        translation.lose(source.shown("model.optim.name"), "the optimizer", "adam takes its place")
    if name == "adam":
        translation.notes.append("torch's adam adds weight decay to the gradient; here it is decoupled (AdamW)")
    translation.derive(source, "model.use_distributed_optimizer", distributed or None, "model.optim.name")
    overlaps = {"overlap_grad_reduce": "overlap_grad_sync", "overlap_param_gather": "overlap_param_sync"}
    for key, theirs in overlaps.items():
        overlaps_there = distributed and bool(source.get(f"model.optim.{theirs}", False))
        translation.derive(source, f"model.{key}", overlaps_there, f"model.optim.{theirs}")
    if source.get("model.fsdp"):
        kinds = {"full": "optim_grads_params", "hybrid": "optim_grads_params", "grad": "optim_grads"}
        strategy = kinds.get(str(source.get("model.fsdp_sharding_strategy")), "optim_grads_params")
        set_sharding(source, translation, strategy, "model.fsdp", "model.fsdp_sharding_strategy")
    _schedule(source, translation)


def _schedule(source: Source, translation: Translation) -> None:
    prefix, key = "model.optim.sched", "model.optim.sched"
    kind, steps = source.get(f"{prefix}.name"), source.get("trainer.max_steps")
    if kind not in _SCHEDULES:
        translation.lose(source.shown(f"{prefix}.name"), "the rate's schedule", "a cosine takes its place")
    translation.derive(source, f"{key}.name", _SCHEDULES.get(kind, "cosine"), f"{prefix}.name")
    warmup = source.get(f"{prefix}.warmup_steps") or 0
    translation.derive(source, f"{key}.warmup_steps", warmup, f"{prefix}.warmup_steps")
    translation.derive(source, f"{key}.min_lr", source.get(f"{prefix}.min_lr") or 0.0, f"{prefix}.min_lr")
    constant = source.get(f"{prefix}.constant_steps") or 0
    if isinstance(steps, int) and isinstance(constant, int) and 0 < constant < steps:
        # WarmupAnnealHoldPolicy: decay_steps = max_steps - constant_steps - warmup_steps, after the warmup.
        how = f"{steps:,} steps less the constant {constant:,} at the end"
        translation.derive(source, f"{key}.decay_steps", steps - constant, f"{prefix}.constant_steps", how=how)


def _data(source: Source, translation: Translation) -> None:
    split = {
        name: source.get(f"model.data.data_prefix.{name}")
        for name in ("train", "validation", "test")
        if f"model.data.data_prefix.{name}" in source.values
    }
    prefix, name = source.get("model.data.data_prefix"), "model.data.data_prefix"
    impl, key = source.get("model.data.data_impl", "mmap"), "model.data.data_impl"
    if impl == "mock":
        translation.derive(source, key, "mock", key)
    elif split:
        translation.derive(source, key, "mmap", key)
        translation.derive(source, name, _list(split.get("train")), f"{name}.train")
        if split.get("validation"):
            prefix_key = "model.data.validation_prefix"
            translation.derive(source, prefix_key, _list(split["validation"]), f"{name}.validation")
        if split.get("test"):
            translation.lose(source.shown(f"{name}.test"), "a test set was scored", "there is no test set")
    elif prefix and prefix != "???":
        translation.derive(source, key, "mmap", key)
        translation.derive(source, name, _list(prefix), name)
    else:
        translation.derive(source, key, "mmap", key)
        translation.up_to_you.append((name, "the paths of the indexed files"))
    if source.get("model.data.splits_string"):
        key = "model.data.splits_string"
        translation.derive(source, key, source.get(key), key)
    resets = ("model.data.reset_attention_mask", "model.data.reset_position_ids")
    mask, positions = (bool(source.get(each)) for each in resets)
    translation.derive(source, "model.data.inter_document_masking", mask, *resets)
    if positions and not mask:
        here = "neither happens (model.data.inter_document_masking does both)"
        translation.lose(source.shown(resets[1]), "positions began anew in each document", here)


def _list(value: Any) -> list[Any]:
    return blend(value if isinstance(value, list) else [value])


def _run(source: Source, translation: Translation) -> None:
    translation.name = str(source.get("exp_manager.name") or source.get("name") or translation.name)
    saves = bool(source.get("exp_manager.create_checkpoint_callback"))
    interval = source.get("exp_manager.checkpoint_callback_params.every_n_train_steps")
    names = ("exp_manager.checkpoint_callback_params.every_n_train_steps", "exp_manager.create_checkpoint_callback")
    how = ""
    if saves and interval is None:
        interval, how = translation.value("trainer.val_check_interval"), "saved at each validation"
    translation.derive(source, "checkpoint.save_interval", interval if saves else None, *names, how=how)
    translation.derive(source, "checkpoint.save_interval_minutes", None, names[1], how="saves go by steps alone")
    translation.derive(source, "checkpoint.save_at_end", saves, names[1])
    top = "exp_manager.checkpoint_callback_params.save_top_k"
    if saves and source.get(top) not in (None, -1):
        translation.lose(source.shown(top), "the best by validation were kept", "all are, or checkpoint.keep_last=…")
    if source.get("exp_manager.create_wandb_logger"):
        translation.derive(source, "logging.wandb", True, "exp_manager.create_wandb_logger")
        project = source.get("exp_manager.wandb_logger_kwargs.project")
        if project:
            translation.derive(source, "logging.wandb_project", project, "exp_manager.wandb_logger_kwargs.project")
    for name in ("exp_manager.explicit_log_dir", "exp_manager.exp_dir"):
        if source.get(name):
            translation.up_to_you.append(("run_dir", f"where the run writes ({source.shown(name)})"))
    start = "trainer.validate_at_start"
    translation.set(start, False, "NeMo starts with two batches of validation at most", given=False)
