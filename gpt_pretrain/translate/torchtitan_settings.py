"""torchtitan's TOML of all generations, and its `--section.name=value` options.

Older names become the newer ones first (`RENAMED`): 2024's had batch size and parallel degrees in `[training]`.
Defaults are those of `torchtitan/config/job_config.py`.
"""

from collections.abc import Mapping

from gpt_pretrain.translate.translation import TOGETHER, Becomes, NoNeed, NotHere, Row, defaults, table

_DEGREES = (
    "data_parallel_shard_degree",
    "data_parallel_replicate_degree",
    "tensor_parallel_degree",
    "pipeline_parallel_degree",
    "pipeline_parallel_schedule",
    "pipeline_parallel_microbatches",
    "context_parallel_degree",
    "enable_async_tensor_parallel",
    "enable_loss_parallel",
)
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
    **{
        f"float8.{name}": f"quantize.linear.float8.{name}"
        for name in (
            "recipe_name",
            "enable_fsdp_float8_all_gather",
            "precompute_float8_dynamic_scale_for_fsdp",
            "force_recompute_fp8_weight_in_bwd",
            "filter_fqns",
            "emulate",
            "enable_float8_linear",
        )
    },
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
    "model.norm_type": NotHere("the norm was of that kind", "it is the preset's", ("rmsnorm", "fused_rmsnorm")),
    "model.print_after_conversion": NoNeed("python -m gpt_pretrain.plan shows the matrix products"),
    "optimizer.name": Becomes(
        "model.optim.name",
        {"AdamW": "adam", "Adam": "adam", "Muon": "muon"},
        there="the optimizer",
        here="adam takes its place",
    ),
    "optimizer.lr": Becomes("model.optim.lr"),
    "optimizer.eps": Becomes("model.optim.eps"),
    "optimizer.weight_decay": Becomes("model.optim.weight_decay"),
    "optimizer.early_step_in_backward": NotHere("weights were updated in the backward pass", "after it"),
    "optimizer.fused .foreach .implementation": NoNeed("Adam is fused here"),
    "lr_scheduler.warmup_steps": Becomes("model.optim.sched.warmup_steps"),
    "lr_scheduler.total_steps": Becomes("model.optim.sched.decay_steps"),
    "training.seq_len": Becomes("model.encoder_seq_length"),
    "training.steps": Becomes("trainer.max_steps"),
    "training.max_norm": Becomes("trainer.gradient_clip_val"),
    "training.gc_freq": Becomes("trainer.gc_interval"),
    "training.seed": Becomes("model.seed", only_given=True),
    "training.deterministic": Becomes("trainer.deterministic"),
    "training.mixed_precision_param": Becomes("trainer.precision", {"bfloat16": "bf16", "float32": "fp32"}),
    "training.mixed_precision_reduce": Becomes("model.grad_reduce_in_fp32", {"float32": True, "bfloat16": False}),
    "training.dtype": NotHere("weights and optimizer states had that type", "masters are fp32", ("float32",)),
    "training.enable_cpu_offload": NotHere("weights and states were in the host's memory", "they are on the GPU"),
    "parallelism.tensor_parallel_degree": Becomes("model.tensor_model_parallel_size"),
    "parallelism.pipeline_parallel_degree": Becomes("model.pipeline_model_parallel_size"),
    "parallelism.context_parallel_degree": Becomes("model.context_parallel_size"),
    "parallelism.expert_parallel_degree": Becomes("model.expert_model_parallel_size"),
    "parallelism.expert_tensor_parallel_degree": Becomes("model.expert_tensor_parallel_size"),
    "parallelism.pipeline_parallel_schedule": NotHere(
        "stages worked by that schedule",
        "by 1F1B, interleaved with model.virtual_pipeline_model_parallel_size",
        ("1F1B", "1f1b", "Interleaved1F1B"),
    ),
    """
    parallelism.pipeline_parallel_split_points .pipeline_parallel_layers_per_stage
    """: NotHere("stages were split there", "each has the same number of layers", (None, [], "")),
    "parallelism.context_parallel_rotate_method": NoNeed("keys pass around in a ring"),
    "parallelism.enable_async_tensor_parallel": Becomes("model.tp_comm_overlap"),
    "parallelism.enable_loss_parallel .disable_loss_parallel": NoNeed("the loss is split over tensor-parallel ranks"),
    "parallelism.enable_compiled_autograd": NoNeed("nothing is compiled"),
    "compile.enable .components": NoNeed("fused kernels stand for compilation"),
    "metrics.log_freq": Becomes("trainer.log_every_n_steps"),
    "metrics.enable_wandb": Becomes("logging.wandb"),
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
ROWS = table(_TABLE)
