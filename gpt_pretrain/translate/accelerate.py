"""Hugging Face Accelerate's YAML with its FP8 engines (TE, TorchAO, MS-AMP), and DeepSpeed's JSON.

Neither knows the model, the data or the length of the run: these are the training script's, and up to the user here.
"""

import math
from collections.abc import Mapping

from gpt_pretrain.translate.common import set_full_recomputation, set_sharding
from gpt_pretrain.translate.deepspeed import OFFLOAD, rows, set_batch, set_optimizer, set_scheduler, set_zero
from gpt_pretrain.translate.torchao_fp8 import set_torchao
from gpt_pretrain.translate.translation import (
    TOGETHER,
    Becomes,
    NoNeed,
    Program,
    Row,
    Source,
    Translation,
    table,
)

DEEPSPEED = "deepspeed_config."

_TABLE: Mapping[str, Row] = {
    "gradient_clipping": Becomes("trainer.gradient_clip_val"),
    """
    compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids machine_rank main_process_ip main_process_port
    main_training_function rdzv_backend same_network tpu_env tpu_use_cluster tpu_use_sudo use_cpu
    """: NoNeed("torchrun is told it"),
    "fsdp_config.fsdp_offload_params": OFFLOAD,
    "parallelism_config.parallelism_config_tp_size": Becomes("model.tensor_model_parallel_size"),
    "parallelism_config.parallelism_config_cp_size": Becomes("model.context_parallel_size"),
    "parallelism_config.parallelism_config_dp_shard_size": NoNeed("the ranks that are left share"),
    "megatron_lm_config.megatron_lm_tp_degree": Becomes("model.tensor_model_parallel_size"),
    "megatron_lm_config.megatron_lm_pp_degree": Becomes("model.pipeline_model_parallel_size"),
    "megatron_lm_config.megatron_lm_sequence_parallelism": Becomes("model.sequence_parallel"),
    "megatron_lm_config.megatron_lm_use_distributed_optimizer": Becomes("model.use_distributed_optimizer"),
    "megatron_lm_config.megatron_lm_gradient_clipping": Becomes("trainer.gradient_clip_val"),
    "megatron_lm_config.megatron_lm_recompute_activations": Becomes(
        "model.activations_checkpoint_granularity", {True: "selective", False: None}
    ),
    "deepspeed_config.zero3_init_flag": NoNeed("weights are made where they are needed"),
    "deepspeed_config.zero3_save_16bit_model": NoNeed("python -m gpt_pretrain.export writes weights alone"),
    """
    distributed_type num_processes num_machines mixed_precision fp8_config.* deepspeed_config.deepspeed_config_file
    .msamp.enabled deepspeed_config.msamp.opt_level fsdp_config.fsdp_sharding_strategy .fsdp_reshard_after_forward
    .fsdp_activation_checkpointing parallelism_config.parallelism_config_dp_replicate_size
    """: TOGETHER,
    **rows(DEEPSPEED),
    f"{DEEPSPEED}offload_*": OFFLOAD,
    # By the beginning of their names
    "fsdp_config.* parallelism_config.*": NoNeed("a detail of its sharding"),
}
_STRATEGIES = {"FULL_SHARD": "optim_grads_params", "SHARD_GRAD_OP": "optim_grads", "NO_SHARD": None}


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    _processes(source, translation)
    _precision(source, translation)
    _sharding(source, translation)
    degrees = ("tensor_model_parallel_size", "context_parallel_size")
    set_batch(source, translation, DEEPSPEED, math.prod(translation.value(f"model.{each}", 1) for each in degrees))
    set_optimizer(source, translation, DEEPSPEED)
    set_scheduler(source, translation, DEEPSPEED)
    for key in ("model", "model.data", "trainer.max_steps"):
        translation.up_to_you.append((key, "the training script's; model=…, data=… and steps are chosen here"))
    for name, value in source.values.items():
        if value == "auto" and name in source.given:
            translation.up_to_you.append((name, "auto: the training script's (transformers.TrainingArguments)"))


def _processes(source: Source, translation: Translation) -> None:
    processes, machines = source.get("num_processes"), source.get("num_machines") or 1
    if isinstance(processes, int) and isinstance(machines, int) and machines and processes % machines == 0:
        names = ("num_processes", "num_machines")
        translation.derive("trainer.devices", processes // machines, *names)
        translation.derive("trainer.num_nodes", machines, *names[::-1])


def _precision(source: Source, translation: Translation) -> None:
    kind, name = str(source.get("mixed_precision", "no")).lower(), "mixed_precision"
    if name not in source.given and source.get(f"{DEEPSPEED}bf16.enabled") is True:
        kind, name = "bf16", f"{DEEPSPEED}bf16.enabled"
    elif name not in source.given and source.get(f"{DEEPSPEED}fp16.enabled") is True:
        kind, name = "fp16", f"{DEEPSPEED}fp16.enabled"
    if name not in source.given:
        return
    translation.derive("trainer.precision", "fp32" if kind == "no" else "bf16", name)
    if kind == "fp16":
        there = "computation was FP16, with loss scaling"
        translation.lose(source.shown(name), there, "it is BF16, which needs no scaling (trainer.precision=bf16)")
    elif kind == "fp8":
        _fp8(source, translation)
    dtype = f"{DEEPSPEED}data_types.grad_accum_dtype"
    if source.get(dtype):
        translation.derive("model.grad_reduce_in_fp32", source.get(dtype) == "fp32", dtype)


def _fp8(source: Source, translation: Translation) -> None:
    backend = source.first("fp8_config.backend", "fp8_config.fp8_backend")
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
    translation.derive("model.fp8", True, "mixed_precision")
    blocks = bool(source.get("fp8_config.use_mxfp8_block_scaling"))
    recipe = "mxfp8" if blocks else "delayed"
    translation.derive("model.fp8_recipe", recipe, "fp8_config.use_mxfp8_block_scaling", "mixed_precision")
    format = str(source.get("fp8_config.fp8_format", "HYBRID")).upper()
    if format in ("HYBRID", "E4M3"):
        translation.derive(f"model.fp8_{format.lower()}", True, "fp8_config.fp8_format", "mixed_precision")
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
        name = source.first(*(f"fp8_config.{each}" for each in theirs))
        if name:
            translation.take(f"model.{key}", name)
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
    names = ("fp8_config.opt_level", "fp8_config.optimization_level", f"{DEEPSPEED}msamp.opt_level")
    level_name = source.first(*names) or because
    level = str(source.get(level_name) or "O2").upper()
    translation.derive("model.fp8", True, because)
    translation.derive("model.fp8_recipe", "tensorwise", because)
    translation.derive("model.grad_reduce_in_fp32", False, level_name)
    translation.lose(source.shown(level_name), "gradients were kept and exchanged in FP8", "they are in BF16")
    if level == "O1":
        return
    optim = "model.optim."
    translation.derive(f"{optim}use_precision_aware_optimizer", True, level_name)
    translation.derive(f"{optim}exp_avg_dtype", "fp8", level_name, how="the first moment was FP8")
    translation.derive(f"{optim}exp_avg_sq_dtype", "fp16", level_name, how="the second moment was FP16")
    translation.derive(f"{optim}main_params_dtype", "fp16", level_name, how="master weights were FP16")
    translation.derive("model.use_distributed_optimizer", True, level_name, how="small states need it here")


def _sharding(source: Source, translation: Translation) -> None:
    kind = str(source.get("distributed_type", "")).upper()
    if kind == "FSDP" or any(name.startswith("fsdp_config.") for name in source.values):
        _fsdp(source, translation)
    elif not set_zero(source, translation, DEEPSPEED) and kind == "MULTI_GPU":
        translation.derive("model.overlap_grad_reduce", True, "distributed_type", how="as torch's DDP overlaps")
    file = f"{DEEPSPEED}deepspeed_config_file"
    if source.get(file) and f"{DEEPSPEED}zero_optimization.stage" in source.values:
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
    set_sharding(translation, _STRATEGIES.get(strategy, "optim_grads_params"), name, "distributed_type")
    replicas = source.get("parallelism_config.parallelism_config_dp_replicate_size")
    machines = source.get("num_machines") or 1
    if hybrid or replicas:
        count = replicas or machines
        how = "" if replicas else "each machine is a group"
        names = ("parallelism_config.parallelism_config_dp_replicate_size", name)
        translation.derive("model.num_distributed_optimizer_instances", count, *names, how=how)
    if source.get("fsdp_config.fsdp_activation_checkpointing"):
        set_full_recomputation(translation, "fsdp_config.fsdp_activation_checkpointing")


PROGRAM = Program(
    name="Accelerate",
    rows=table(_TABLE),
    derive=derive,
    marks=(
        """
    compute_environment distributed_type mixed_precision fp8_config zero_optimization train_micro_batch_size_per_gpu
    """,
    ),
    words=None,
    json_section=DEEPSPEED,
)
