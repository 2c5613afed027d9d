"""Hugging Face Accelerate's YAML with its FP8 engines (TE, TorchAO, MS-AMP), and DeepSpeed's JSON.

Neither knows the model, the data or the length of the run: these are the training script's, and up to the user here.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.common import set_sharding
from gpt_pretrain.translate.torchao_fp8 import set_torchao
from gpt_pretrain.translate.translation import TOGETHER, Becomes, NoNeed, NotHere, Row, Source, Translation

DEEPSPEED = "deepspeed_config"
_OFFLOAD = NotHere(
    "weights or optimizer states were in the host's memory", "they are on the GPU", (None, False, "none", "None")
)
_LAUNCH = NoNeed("torchrun is told it")
_FSDP = NoNeed("a detail of its sharding")
_BUCKETS = NoNeed("buckets are sized here (model.ddp_bucket_size)")

ROWS: Mapping[str, Row] = {
    "distributed_type": TOGETHER,
    "num_processes": TOGETHER,
    "num_machines": TOGETHER,
    "mixed_precision": TOGETHER,
    "gradient_clipping": Becomes("trainer.gradient_clip_val"),
    **dict.fromkeys(
        (
            "compute_environment",
            "debug",
            "downcast_bf16",
            "enable_cpu_affinity",
            "gpu_ids",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "rdzv_backend",
            "same_network",
            "tpu_env",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "use_cpu",
        ),
        _LAUNCH,
    ),
    "fsdp_config.fsdp_sharding_strategy": TOGETHER,
    "fsdp_config.fsdp_reshard_after_forward": TOGETHER,
    "fsdp_config.fsdp_activation_checkpointing": TOGETHER,
    "fsdp_config.fsdp_offload_params": _OFFLOAD,
    "parallelism_config.parallelism_config_tp_size": Becomes("model.tensor_model_parallel_size"),
    "parallelism_config.parallelism_config_cp_size": Becomes("model.context_parallel_size"),
    "parallelism_config.parallelism_config_dp_replicate_size": TOGETHER,
    "parallelism_config.parallelism_config_dp_shard_size": NoNeed("the ranks that are left share"),
    "megatron_lm_config.megatron_lm_tp_degree": Becomes("model.tensor_model_parallel_size"),
    "megatron_lm_config.megatron_lm_pp_degree": Becomes("model.pipeline_model_parallel_size"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": Becomes("model.sequence_parallel"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": Becomes("model.use_distributed_optimizer"),
    "megatron_lm_config.megatron_lm_gradient_clipping": Becomes("trainer.gradient_clip_val"),
    "megatron_lm_config.megatron_lm_recompute_activations": Becomes(
        "model.activations_checkpoint_granularity", {True: "selective", False: None}
    ),
    **{f"fp8_config.{name}": TOGETHER for name in ("backend", "fp8_backend", "opt_level", "optimization_level")},
    # DeepSpeed's JSON, and the same names inside of Accelerate's YAML.
    f"{DEEPSPEED}.zero_stage": TOGETHER,
    f"{DEEPSPEED}.zero_optimization.stage": TOGETHER,
    f"{DEEPSPEED}.deepspeed_config_file": TOGETHER,
    f"{DEEPSPEED}.zero3_init_flag": NoNeed("weights are made where they are needed"),
    f"{DEEPSPEED}.zero3_save_16bit_model": NoNeed("python -m gpt_pretrain.export writes weights alone"),
    f"{DEEPSPEED}.train_batch_size": TOGETHER,
    f"{DEEPSPEED}.train_micro_batch_size_per_gpu": TOGETHER,
    f"{DEEPSPEED}.gradient_accumulation_steps": TOGETHER,
    f"{DEEPSPEED}.gradient_clipping": TOGETHER,
    f"{DEEPSPEED}.bf16.enabled": TOGETHER,
    f"{DEEPSPEED}.fp16.enabled": TOGETHER,
    f"{DEEPSPEED}.data_types.grad_accum_dtype": TOGETHER,
    f"{DEEPSPEED}.steps_per_print": TOGETHER,
    f"{DEEPSPEED}.optimizer.type": TOGETHER,
    f"{DEEPSPEED}.scheduler.type": TOGETHER,
    f"{DEEPSPEED}.msamp.enabled": TOGETHER,
    f"{DEEPSPEED}.msamp.opt_level": TOGETHER,
}
PREFIXES: Mapping[str, Row] = {
    "fp8_config.": TOGETHER,
    "fsdp_config.": _FSDP,
    "parallelism_config.": _FSDP,
    f"{DEEPSPEED}.zero_optimization.": _BUCKETS,
    f"{DEEPSPEED}.zero_optimization.offload_param": _OFFLOAD,
    f"{DEEPSPEED}.zero_optimization.offload_optimizer": _OFFLOAD,
    f"{DEEPSPEED}.offload_": _OFFLOAD,
    f"{DEEPSPEED}.fp16.": NoNeed("BF16 needs no loss scaling"),
    f"{DEEPSPEED}.optimizer.params.": TOGETHER,
    f"{DEEPSPEED}.scheduler.params.": TOGETHER,
    f"{DEEPSPEED}.wall_clock_breakdown": NoNeed("python -m gpt_pretrain.benchmark times a run"),
    f"{DEEPSPEED}.flops_profiler": NoNeed("every record has the throughput"),
    f"{DEEPSPEED}.tensorboard": NoNeed("RUN_DIR/tensorboard is written"),
}
_OPTIMIZER = {"lr": "lr", "betas": "betas", "eps": "eps", "weight_decay": "weight_decay"}
_STRATEGIES = {"FULL_SHARD": "optim_grads_params", "SHARD_GRAD_OP": "optim_grads", "NO_SHARD": None}
_STAGES = {2: "optim_grads", 3: "optim_grads_params"}


def rows_of(names: Mapping[str, Any]) -> dict[str, Row]:
    """The rows of all settings."""
    by_prefix = {name: row for prefix, row in PREFIXES.items() for name in names if name.startswith(prefix)}
    return {**by_prefix, **ROWS}


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    _processes(source, translation)
    _precision(source, translation)
    _sharding(source, translation)
    _batch(source, translation)
    _optimizer(source, translation)
    for key in ("model", "model.data", "trainer.max_steps"):
        translation.up_to_you.append((key, "the training script's; model=…, data=… and steps are chosen here"))
    for name, value in source.values.items():
        if value == "auto" and name in source.given:
            translation.up_to_you.append((name, "auto: the training script's (transformers.TrainingArguments)"))


def _processes(source: Source, translation: Translation) -> None:
    processes, machines = source.get("num_processes"), source.get("num_machines") or 1
    if isinstance(processes, int) and isinstance(machines, int) and machines and processes % machines == 0:
        names = ("num_processes", "num_machines")
        translation.derive(source, "trainer.devices", processes // machines, *names)
        translation.derive(source, "trainer.num_nodes", machines, *names[::-1])


def _precision(source: Source, translation: Translation) -> None:
    kind, name = str(source.get("mixed_precision", "no")).lower(), "mixed_precision"
    if name not in source.given and source.get(f"{DEEPSPEED}.bf16.enabled") is True:
        kind, name = "bf16", f"{DEEPSPEED}.bf16.enabled"
    elif name not in source.given and source.get(f"{DEEPSPEED}.fp16.enabled") is True:
        kind, name = "fp16", f"{DEEPSPEED}.fp16.enabled"
    if name not in source.given:
        return
    translation.derive(source, "trainer.precision", "fp32" if kind == "no" else "bf16", name)
    if kind == "fp16":
        there = "computation was FP16, with loss scaling"
        translation.lose(source.shown(name), there, "it is BF16, which needs no scaling (trainer.precision=bf16)")
    elif kind == "fp8":
        _fp8(source, translation)
    dtype = f"{DEEPSPEED}.data_types.grad_accum_dtype"
    if source.get(dtype):
        translation.derive(source, "model.grad_reduce_in_fp32", source.get(dtype) == "fp32", dtype)


def _fp8(source: Source, translation: Translation) -> None:
    backend = next((name for name in ("fp8_config.backend", "fp8_config.fp8_backend") if name in source.values), "")
    kind = str(source.get(backend) or "TE").upper().replace("-", "").replace("_", "")
    if kind in ("AO", "TORCHAO"):
        set_torchao(source, translation, "fp8_config", "mixed_precision", *([backend] if backend else []))
    elif kind == "MSAMP":
        _ms_amp(source, translation, backend)
    else:
        _transformer_engine(source, translation)
    if backend:
        translation.not_needed.append(
            (source.shown(backend), f"model.fp8_backend={'torchao' if 'AO' in kind else 'null'}")
        )


def _transformer_engine(source: Source, translation: Translation) -> None:
    """TERecipeKwargs: delayed scaling, unless block scaling is asked for."""
    translation.derive(source, "model.fp8", True, "mixed_precision")
    blocks = bool(source.get("fp8_config.use_mxfp8_block_scaling"))
    recipe = "mxfp8" if blocks else "delayed"
    translation.derive(source, "model.fp8_recipe", recipe, "fp8_config.use_mxfp8_block_scaling", "mixed_precision")
    format = str(source.get("fp8_config.fp8_format", "HYBRID")).upper()
    if format in ("HYBRID", "E4M3"):
        translation.derive(source, f"model.fp8_{format.lower()}", True, "fp8_config.fp8_format", "mixed_precision")
    else:
        translation.lose(
            source.shown("fp8_config.fp8_format"), "all tensors had that format", "there is no such recipe"
        )
    names = {
        "fp8_margin": ("margin",),
        "fp8_interval": ("interval",),
        "fp8_amax_history_len": ("amax_history_len", "amax_history_length"),
        "fp8_amax_compute_algo": ("amax_compute_algo", "amax_compute_algorithm"),
    }
    # Accelerate's own defaults (TERecipeKwargs) are a history of 1,024 and most_recent.
    values = {"fp8_margin": 0, "fp8_amax_history_len": 1024, "fp8_amax_compute_algo": "most_recent"}
    for key, theirs in names.items():
        name = next((f"fp8_config.{each}" for each in theirs if f"fp8_config.{each}" in source.values), "")
        if name:
            translation.derive(source, f"model.{key}", source.get(name), name)
        elif key in values:
            translation.set(f"model.{key}", values[key], f"Accelerate's default of {theirs[0]}", given=False)
    override = source.get("fp8_config.override_linear_precision")
    if isinstance(override, str):
        override = [part.strip().lower() == "true" for part in override.strip("()[]").split(",")]
    if override and any(override):
        there = "forward, input or weight gradients stayed out of FP8"
        translation.lose(source.shown("fp8_config.override_linear_precision"), there, "all three are in FP8")
    if source.get("fp8_config.use_autocast_during_eval") is False:
        there = "validation computed in BF16"
        translation.lose(
            source.shown("fp8_config.use_autocast_during_eval"), there, "it computes in FP8, as training does"
        )


def _ms_amp(source: Source, translation: Translation, because: str) -> None:
    """MS-AMP's levels (Peng et al. 2023, arXiv 2310.18313), and what stands for them here."""
    level_name = next(
        (
            name
            for name in ("fp8_config.opt_level", "fp8_config.optimization_level", f"{DEEPSPEED}.msamp.opt_level")
            if name in source.values
        ),
        because,
    )
    level = str(source.get(level_name) or "O2").upper()
    translation.derive(source, "model.fp8", True, because)
    translation.derive(source, "model.fp8_recipe", "tensorwise", because)
    translation.derive(source, "model.grad_reduce_in_fp32", False, level_name)
    translation.lose(source.shown(level_name), "gradients were kept and exchanged in FP8", "they are in BF16")
    if level == "O1":
        return
    optim = "model.optim."
    translation.derive(source, f"{optim}use_precision_aware_optimizer", True, level_name)
    translation.derive(source, f"{optim}exp_avg_dtype", "fp8", level_name, how="the first moment was FP8")
    translation.derive(source, f"{optim}exp_avg_sq_dtype", "fp16", level_name, how="the second moment was FP16")
    translation.derive(source, f"{optim}main_params_dtype", "fp16", level_name, how="master weights were FP16")
    translation.derive(source, "model.use_distributed_optimizer", True, level_name, how="small states need it here")


def _sharding(source: Source, translation: Translation) -> None:
    kind = str(source.get("distributed_type", "")).upper()
    stage_name = next(
        (name for name in (f"{DEEPSPEED}.zero_stage", f"{DEEPSPEED}.zero_optimization.stage") if name in source.values),
        "",
    )
    if kind == "FSDP" or any(name.startswith("fsdp_config.") for name in source.values):
        _fsdp(source, translation)
    elif stage_name:
        stage = source.get(stage_name)
        set_sharding(source, translation, _STAGES.get(stage), stage_name)
        if stage == 1:
            for key in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
                translation.derive(source, f"model.{key}", True, stage_name)
    elif kind == "MULTI_GPU":
        translation.derive(source, "model.overlap_grad_reduce", True, "distributed_type", how="as torch's DDP overlaps")
    file = f"{DEEPSPEED}.deepspeed_config_file"
    if source.get(file) and f"{DEEPSPEED}.zero_optimization.stage" in source.values:
        translation.not_needed.append((source.shown(file), "the JSON was given, too"))
    elif source.get(file):
        translation.up_to_you.append(("DeepSpeed's JSON", f"give it behind this file ({source.shown(file)})"))


def _fsdp(source: Source, translation: Translation) -> None:
    name = "fsdp_config.fsdp_sharding_strategy"
    reshard = "fsdp_config.fsdp_reshard_after_forward"
    strategy = str(source.get(name, "FULL_SHARD")).upper()
    named = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}
    strategy = named.get(strategy, strategy)
    if name not in source.values and isinstance(source.get(reshard), bool):
        # FSDP 2 says it by this alone.
        name, strategy = reshard, "FULL_SHARD" if source.get(reshard) else "SHARD_GRAD_OP"
    hybrid = strategy.startswith("HYBRID_SHARD")
    set_sharding(source, translation, _STRATEGIES.get(strategy, "optim_grads_params"), name, "distributed_type")
    replicas = source.get("parallelism_config.parallelism_config_dp_replicate_size")
    machines = source.get("num_machines") or 1
    if hybrid or replicas:
        count = replicas or machines
        how = "" if replicas else "each machine is a group"
        names = ("parallelism_config.parallelism_config_dp_replicate_size", name)
        translation.derive(source, "model.num_distributed_optimizer_instances", count, *names, how=how)
    if source.get("fsdp_config.fsdp_activation_checkpointing"):
        for key, value in (("granularity", "full"), ("method", "uniform"), ("num_layers", 1)):
            recompute = f"model.activations_checkpoint_{key}"
            translation.derive(source, recompute, value, "fsdp_config.fsdp_activation_checkpointing")


def _batch(source: Source, translation: Translation) -> None:
    micro, whole = f"{DEEPSPEED}.train_micro_batch_size_per_gpu", f"{DEEPSPEED}.train_batch_size"
    if isinstance(source.get(micro), int):
        translation.derive(source, "model.micro_batch_size", source.get(micro), micro)
    accumulation = f"{DEEPSPEED}.gradient_accumulation_steps"
    devices, nodes = translation.value("trainer.devices"), translation.value("trainer.num_nodes") or 1
    if isinstance(source.get(whole), int):
        translation.derive(source, "model.global_batch_size", source.get(whole), whole)
    elif isinstance(source.get(micro), int) and devices:
        steps = source.get(accumulation) if isinstance(source.get(accumulation), int) else 1
        tp = translation.value("model.tensor_model_parallel_size", 1) * translation.value(
            "model.context_parallel_size", 1
        )
        ranks = devices * nodes // tp
        how = f"{source.get(micro)} × {steps} × {ranks} data-parallel ranks"
        batch = source.get(micro) * steps * ranks
        translation.derive(source, "model.global_batch_size", batch, micro, accumulation, how=how)
    elif isinstance(source.get(accumulation), int):
        why = f"microbatch × {source.get(accumulation)} × data-parallel ranks ({source.shown(accumulation)})"
        translation.up_to_you.append(("model.global_batch_size", why))
    for name, key in (
        ("gradient_clipping", "trainer.gradient_clip_val"),
        ("steps_per_print", "trainer.log_every_n_steps"),
    ):
        value = source.get(f"{DEEPSPEED}.{name}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            translation.derive(source, key, value, f"{DEEPSPEED}.{name}")


def _optimizer(source: Source, translation: Translation) -> None:
    name = f"{DEEPSPEED}.optimizer.type"
    kind = source.get(name)
    if kind in ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam"):
        translation.derive(source, "model.optim.name", "adam", name)
        if kind == "Adam":
            # DeepSpeed's adam_w_mode is on by default.
            translation.notes.append("DeepSpeed's Adam is AdamW, as here")
    elif kind is not None:
        translation.lose(source.shown(name), "the optimizer", "adam takes its place")
    for theirs, ours in _OPTIMIZER.items():
        param = f"{DEEPSPEED}.optimizer.params.{theirs}"
        if source.get(param) not in (None, "auto"):
            translation.derive(source, f"model.optim.{ours}", source.get(param), param)
    kind_name = f"{DEEPSPEED}.scheduler.type"
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = source.get(kind_name)
    if kind is None:
        return
    if kind not in kinds:
        translation.lose(source.shown(kind_name), "the rate's schedule", "model.optim.sched.name chooses one")
    translation.derive(source, "model.optim.sched.name", kinds.get(kind, "cosine"), kind_name)
    params = {"warmup_num_steps": "warmup_steps", "total_num_steps": "decay_steps", "warmup_min_lr": "init_lr"}
    for theirs, ours in params.items():
        param = f"{DEEPSPEED}.scheduler.params.{theirs}"
        if source.get(param) not in (None, "auto"):
            translation.derive(source, f"model.optim.sched.{ours}", source.get(param), param)
    if kind == "WarmupDecayLR":
        translation.derive(source, "model.optim.sched.min_lr", 0.0, kind_name, how="it falls to zero")
