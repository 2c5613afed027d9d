"""torchtitan's TOML of all generations, and its `--section.name=value` options.

Older names become the newer ones first (`RENAMED`): 2024's had batch size and parallel degrees in `[training]`.
Defaults are those of `torchtitan/config/job_config.py`.
"""

import math
from collections.abc import Mapping

from gpt_pretrain.translate.common import set_betas, set_full_recomputation, set_preset, set_sharding
from gpt_pretrain.translate.torchao_fp8 import set_torchao
from gpt_pretrain.translate.translation import (
    TOGETHER,
    Becomes,
    NoNeed,
    NotHere,
    Program,
    Row,
    Source,
    Translation,
    becomes,
    defaults,
    names,
    table,
)

_DEGREES = names("""
data_parallel_shard_degree data_parallel_replicate_degree tensor_parallel_degree pipeline_parallel_degree
pipeline_parallel_schedule pipeline_parallel_microbatches context_parallel_degree enable_async_tensor_parallel
enable_loss_parallel
""")
_FLOAT8 = names("""
recipe_name enable_fsdp_float8_all_gather precompute_float8_dynamic_scale_for_fsdp force_recompute_fp8_weight_in_bwd
filter_fqns emulate enable_float8_linear
""")
RENAMED: Mapping[str, str] = {
    **{f"{section}.{name}": f"parallelism.{name}" for section in ("training", "experimental") for name in _DEGREES},
    "training.data_parallel_degree": "parallelism.data_parallel_shard_degree",
    "training.batch_size": "training.local_batch_size",
    "training.warmup_steps": "lr_scheduler.warmup_steps",
    "training.compile": "compile.enable",
    "debug.seed": "training.seed",
    "debug.deterministic": "training.deterministic",
    "checkpoint.enable_checkpoint": "checkpoint.enable",
    "lr_scheduler.lr_min": "lr_scheduler.min_lr_factor",
    **{f"float8.{name}": f"quantize.linear.float8.{name}" for name in _FLOAT8},
}
DEFAULTS = defaults("""
model.name=llama3 .flavor=debugmodel optimizer.name=AdamW .lr=0.0008 .beta1=0.9 .beta2=0.95 .eps=1e-8
.weight_decay=0.1 lr_scheduler.warmup_steps=200 .decay_type=linear .min_lr_factor=0.0 training.local_batch_size=8
.global_batch_size=-1 .seq_len=2048 .max_norm=1.0 .steps=10000 .gc_freq=50 .mixed_precision_param=bfloat16
.deterministic=false parallelism.data_parallel_replicate_degree=1 .data_parallel_shard_degree=-1
.tensor_parallel_degree=1 .pipeline_parallel_degree=1 .context_parallel_degree=1 .expert_parallel_degree=1
metrics.log_freq=10 checkpoint.enable=false .interval=500 .keep_latest_k=10 .async_mode=disabled
activation_checkpoint.mode=selective validation.enabled=false .freq=10 .steps=-1
""")
NUMBERS = (
    *(name for name, value in DEFAULTS.items() if isinstance(value, int | float) and not isinstance(value, bool)),
    "lr_scheduler.decay_ratio",
    "parallelism.pipeline_parallel_microbatch_size",
)
# Flavors that are presets here, and sizes of those that are not (torchtitan/models/llama3/__init__.py).
PRESETS: Mapping[tuple[str, str], str] = {
    ("llama3", "8B"): "llama3_8b",
    ("llama3", "70B"): "llama3_70b",
    ("llama2", "7B"): "llama2_7b",
    ("qwen3", "8B"): "qwen3_8b",
    ("qwen3", "30B-A3B"): "qwen3_30b_a3b",
}
_LLAMA3 = {"vocab_size": 128256, "rotary_base": 500000, "max_position_embeddings": 131072}
SIZES: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("llama3", "debugmodel"): {
        **_LLAMA3,
        "num_layers": 6,
        "hidden_size": 256,
        # 8/3 × 256, in multiples of 256.
        "ffn_hidden_size": 768,
        "num_attention_heads": 16,
        "num_query_groups": 16,
        "vocab_size": 2048,
    },
    ("llama3", "405B"): {
        **_LLAMA3,
        "num_layers": 126,
        "hidden_size": 16384,
        # 1.2 × 8/3 × 16,384, in multiples of 4,096.
        "ffn_hidden_size": 53248,
        "num_attention_heads": 128,
        "num_query_groups": 8,
    },
}

_TABLE: Mapping[str, Row] = {
    **becomes("""
    optimizer.lr=model.optim.lr .eps=model.optim.eps .weight_decay=model.optim.weight_decay
    lr_scheduler.warmup_steps=model.optim.sched.warmup_steps .total_steps=model.optim.sched.decay_steps
    training.seq_len=model.encoder_seq_length .steps=trainer.max_steps .max_norm=trainer.gradient_clip_val
    .gc_freq=trainer.gc_interval .deterministic=trainer.deterministic
    parallelism.tensor_parallel_degree=model.tensor_model_parallel_size
    .pipeline_parallel_degree=model.pipeline_model_parallel_size .context_parallel_degree=model.context_parallel_size
    .expert_parallel_degree=model.expert_model_parallel_size
    .expert_tensor_parallel_degree=model.expert_tensor_parallel_size .enable_async_tensor_parallel=model.tp_comm_overlap
    metrics.log_freq=trainer.log_every_n_steps .enable_wandb=logging.wandb
    """),
    "model.norm_type": NotHere("the norm was of that kind", "it is the preset's", ("rmsnorm", "fused_rmsnorm")),
    "model.print_after_conversion": NoNeed("python -m gpt_pretrain.plan shows the matrix products"),
    "optimizer.name": Becomes(
        "model.optim.name",
        {"AdamW": "adam", "Adam": "adam", "Muon": "muon"},
        there="the optimizer",
        here="adam takes its place",
    ),
    "optimizer.early_step_in_backward": NotHere("weights were updated in the backward pass", "after it"),
    "optimizer.fused .foreach .implementation": NoNeed("Adam is fused here"),
    "training.seed": Becomes("model.seed", only_given=True),
    "training.mixed_precision_param": Becomes("trainer.precision", {"bfloat16": "bf16", "float32": "fp32"}),
    "training.mixed_precision_reduce": Becomes("model.grad_reduce_in_fp32", {"float32": True, "bfloat16": False}),
    "training.dtype": NotHere("weights and optimizer states had that type", "masters are fp32", ("float32",)),
    "training.enable_cpu_offload": NotHere("weights and states were in the host's memory", "they are on the GPU"),
    "parallelism.pipeline_parallel_schedule": NotHere(
        "stages worked by that schedule",
        "by 1F1B, interleaved with model.virtual_pipeline_model_parallel_size",
        ("1F1B", "1f1b", "Interleaved1F1B"),
    ),
    """
    parallelism.pipeline_parallel_split_points .pipeline_parallel_layers_per_stage
    """: NotHere("stages were split there", "each has the same number of layers", (None, [], "")),
    "parallelism.context_parallel_rotate_method": NoNeed("keys pass around in a ring"),
    "parallelism.enable_loss_parallel .disable_loss_parallel": NoNeed("the loss is split over tensor-parallel ranks"),
    "parallelism.enable_compiled_autograd": NoNeed("nothing is compiled"),
    "compile.enable .components": NoNeed("fused kernels stand for compilation"),
    "checkpoint.initial_load_path": NotHere("weights came from there", "import_torchtitan imports Llama 3"),
    "checkpoint.folder": NoNeed("a run writes to RUN_DIR/checkpoints"),
    """
    checkpoint.last_save_model_only .model_weights_only .export_dtype .last_save_in_hf
    """: NoNeed("checkpoints are whole; python -m gpt_pretrain.export writes weights alone"),
    "validation.local_batch_size": NoNeed("validation has training's batch"),
    "validation.seq_len": NoNeed("validation has training's length"),
    """
    activation_checkpoint.mode .selective_ac_option checkpoint.enable .interval .interval_type .keep_latest_k
    .async_mode job.dump_folder lr_scheduler.decay_ratio .decay_type .min_lr_factor model.name .flavor .converters
    .tokenizer_path .hf_assets_path optimizer.beta1 .beta2 parallelism.data_parallel_replicate_degree
    .data_parallel_shard_degree .fsdp_reshard_after_forward .pipeline_parallel_microbatch_size
    .pipeline_parallel_microbatches training.dataset .dataset_path .local_batch_size .global_batch_size
    validation.enabled .freq .steps
    """: TOGETHER,
    # By the beginning of their names
    "job.*": NoNeed("a description of the job"),
    "profiling.*": NoNeed("python -m gpt_pretrain.benchmark benchmark.profile=true profiles a run"),
    "metrics.*": NoNeed("RUN_DIR/tensorboard is written (logging.tensorboard)"),
    "comm.*": NoNeed("trainer.hang_timeout watches over exchanges"),
    "memory_estimation.*": NoNeed("python -m gpt_pretrain.plan forecasts memory"),
    "quantize.linear.float8.*": TOGETHER,
}


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    _model(source, translation)
    _layout(source, translation)
    _schedule(source, translation)
    _fp8(source, translation)
    _recomputation(source, translation)
    _data(source, translation)
    _saves(source, translation)


def _model(source: Source, translation: Translation) -> None:
    names = ("model.name", "model.flavor")
    flavor = str(source.get(names[0])), str(source.get(names[1]))
    for size, value in SIZES.get(flavor, {}).items():
        translation.derive(f"model.{size}", value, *names)
    if flavor not in SIZES:
        set_preset(translation, PRESETS.get(flavor), *names)
    if flavor[0] == "llama3":
        translation.notes.append(
            "torchtitan of 2025 and newer stretches rope as Llama 3.1 does; with it add model.rope_scaling_factor=8"
        )


def _layout(source: Source, translation: Translation) -> None:
    prefix = "parallelism."
    tp = source.get(f"{prefix}tensor_parallel_degree")
    how = "its tensor parallelism always splits the sequence, too" if tp > 1 else ""
    translation.derive("model.sequence_parallel", tp > 1, f"{prefix}tensor_parallel_degree", how=how)
    replicas, shards = (source.get(f"{prefix}data_parallel_{kind}_degree") for kind in ("replicate", "shard"))
    names = (f"{prefix}data_parallel_shard_degree", f"{prefix}fsdp_reshard_after_forward")
    keeps_weights = source.get(f"{prefix}fsdp_reshard_after_forward") == "never"
    strategy = None if shards == 1 else "optim_grads" if keeps_weights else "optim_grads_params"
    set_sharding(translation, strategy, *names)
    replicate = f"{prefix}data_parallel_replicate_degree"
    if strategy is not None:
        translation.derive("model.num_distributed_optimizer_instances", replicas, replicate)
    else:
        translation.derive("model.overlap_grad_reduce", replicas > 1, replicate)
    _batch(source, translation, replicas, shards)


def _batch(source: Source, translation: Translation, replicas: int, shards: int) -> None:
    degrees = [f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context")]
    model_ranks = math.prod(source.get(name) for name in degrees)
    world = translation.value("trainer.devices", 0) * (translation.value("trainer.num_nodes") or 1)
    ranks = shards * replicas if shards > 0 else world // model_ranks
    local, batch = source.get("training.local_batch_size"), source.get("training.global_batch_size")
    micro, name = local, "training.local_batch_size"
    if source.get("parallelism.pipeline_parallel_degree") > 1:
        name = "parallelism.pipeline_parallel_microbatch_size"
        micro = source.get(name, 1)
    translation.derive("model.micro_batch_size", micro, name)
    if batch > 0:
        translation.derive("model.global_batch_size", batch, "training.global_batch_size")
    elif ranks > 0:
        how = f"{local} × {ranks} data-parallel ranks"
        translation.derive("model.global_batch_size", local * ranks, "training.local_batch_size", how=how)
    else:
        why = f"{local} samples for each data-parallel rank; say how many processes there are with --env WORLD_SIZE=…"
        translation.up_to_you.append(
            ("model.global_batch_size", f"{why} ({source.shown('training.local_batch_size')})")
        )
    if not world and shards > 0:
        total = shards * replicas * model_ranks
        translation.notes.append(f"the degrees make {total} processes; trainer.devices and num_nodes are left open")


def _schedule(source: Source, translation: Translation) -> None:
    set_betas(translation, "optimizer.beta1", "optimizer.beta2")
    if source.get("optimizer.name") == "Adam":
        translation.notes.append("torch's Adam adds weight decay to the gradient; here it is decoupled (AdamW)")
    key, prefix = "model.optim.sched", "lr_scheduler."
    # Without the last bits of a product of decimal fractions.
    least = float(f"{source.get('optimizer.lr') * source.get(f'{prefix}min_lr_factor'):.12g}")
    how = f"{source.get('optimizer.lr'):g} × {source.get(f'{prefix}min_lr_factor'):g}"
    translation.derive(f"{key}.min_lr", least, f"{prefix}min_lr_factor", how=how)
    kind, ratio = source.get(f"{prefix}decay_type"), source.get(f"{prefix}decay_ratio")
    steps, warmup = source.get("training.steps"), source.get(f"{prefix}warmup_steps")
    if ratio is not None:
        phase = min(round(steps * ratio), steps - warmup)
        how = f"{ratio:g} × {steps:,} steps" + (", what the warmup leaves" if phase < round(steps * ratio) else "")
        translation.derive(f"{key}.name", "wsd", f"{prefix}decay_ratio")
        translation.derive(f"{key}.wsd_decay_steps", phase, f"{prefix}decay_ratio", how=how)
        style = {"sqrt": "minus_sqrt"}.get(kind, kind)
        translation.derive(f"{key}.wsd_decay_style", style, f"{prefix}decay_type")
    elif kind in ("linear", "cosine"):
        translation.derive(f"{key}.name", kind, f"{prefix}decay_type")
    else:
        here = "model.optim.sched.name=wsd has it (minus_sqrt); linear takes its place"
        translation.lose(source.shown(f"{prefix}decay_type"), "the rate fell with the root of the step", here)
        translation.derive(f"{key}.name", "linear", f"{prefix}decay_type")


def _fp8(source: Source, translation: Translation) -> None:
    section = "quantize.linear.float8"
    converters = source.get("model.converters") or []
    names = converters.split(",") if isinstance(converters, str) else [str(each) for each in converters]
    old = f"{section}.enable_float8_linear"
    on = [name for name in names if name.rpartition(".")[2] == "float8"]
    if on or source.get(old):
        set_torchao(source, translation, section, "model.converters" if on else old)
    elif "model.converters" in source.given or old in source.given:
        translation.derive("model.fp8", False, "model.converters", old)
    for name in names:
        if name and name not in on:
            translation.lose(
                f"{source.shown('model.converters')} ({name})", "layers were converted", "no such conversion"
            )


def _recomputation(source: Source, translation: Translation) -> None:
    name = "activation_checkpoint.mode"
    mode = source.get(name)
    if mode == "full":
        set_full_recomputation(translation, name)
        return
    translation.derive("model.activations_checkpoint_granularity", None, name)
    if mode == "selective":
        option = "activation_checkpoint.selective_ac_option"
        shown = ", ".join(source.shown(each) for each in (name, option) if each in source.values)
        here = "all activations are kept; model.activations_checkpoint_granularity=full saves the most memory"
        translation.lose(shown, "some operations or layers were recomputed, which changes no number", here)


def _data(source: Source, translation: Translation) -> None:
    data = [name for name in ("training.dataset", "training.dataset_path") if name in source.given]
    shown = f" ({', '.join(map(source.shown, data))})" if data else ""
    why = "torchtitan streams C4 from the hub; here it is files of text (data=text) or of tokens (data=mmap)"
    translation.up_to_you.append(("model.data.text_files", f"{why}{shown}"))
    tokenizers = [name for name in ("model.tokenizer_path", "model.hf_assets_path") if name in source.given]
    if tokenizers:
        why = "the model's tokenizer.json, with model.tokenizer.library=file"
        told = f"{why} ({', '.join(map(source.shown, tokenizers))})"
        translation.up_to_you.append(("model.tokenizer.model", told))
    if not source.get("validation.enabled"):
        translation.derive("trainer.limit_val_batches", 0, "validation.enabled")
        return
    translation.take("trainer.val_check_interval", "validation.freq")
    translation.derive("trainer.validate_at_start", False, "validation.enabled")
    if source.get("validation.steps") > 0:
        translation.take("trainer.limit_val_batches", "validation.steps")
    else:
        there = "the whole validation set was scored"
        translation.lose(source.shown("validation.steps"), there, "trainer.limit_val_batches of it")


def _saves(source: Source, translation: Translation) -> None:
    on = bool(source.get("checkpoint.enable"))
    by_time = source.get("checkpoint.interval_type") == "seconds"
    interval, names = source.get("checkpoint.interval"), ("checkpoint.interval", "checkpoint.enable")
    translation.derive("checkpoint.save_interval", interval if on and not by_time else None, *names)
    minutes = interval / 60 if on and by_time else None
    translation.derive("checkpoint.save_interval_minutes", minutes, *names)
    translation.derive("checkpoint.save_at_end", on, "checkpoint.enable")
    translation.derive(
        "checkpoint.keep_last", source.get("checkpoint.keep_latest_k") or None, "checkpoint.keep_latest_k"
    )
    asynchronous = source.get("checkpoint.async_mode") != "disabled"
    translation.derive("checkpoint.async_save", asynchronous, "checkpoint.async_mode")
    if "job.dump_folder" in source.given:
        translation.up_to_you.append(("run_dir", f"where the run writes ({source.shown('job.dump_folder')})"))


PROGRAM = Program(
    name="torchtitan",
    rows=table(_TABLE),
    derive=derive,
    # Its files are the only ones in TOML.
    marks=(),
    defaults=DEFAULTS,
    renamed=RENAMED,
    numbers=NUMBERS,
)
