"""NeMo-Automodel's recipes: YAML with `step_scheduler`, `model`, `distributed`, `fp8`, `dataset`, `optimizer`.

Its models are those of `transformers`: a name on the hub becomes a preset, an inline configuration its keys. Recipes
that fine-tune start from published weights, which are imported here first.
"""

from collections.abc import Mapping

from gpt_pretrain.translate.common import (
    DECAY_STYLES,
    blend,
    set_full_recomputation,
    set_preset,
    set_saves,
    set_sharding,
)
from gpt_pretrain.translate.hugging_face import FIELDS, is_inline, preset_named
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
    names,
    table,
)

_CONFIG = "model.config"
_DTYPES = {"bf16": "bf16", "bfloat16": "bf16", "torch.bfloat16": "bf16", "fp32": "fp32", "float32": "fp32"}

_TABLE: Mapping[str, Row] = {
    **becomes("""
    step_scheduler.global_batch_size=model.global_batch_size .local_batch_size=model.micro_batch_size seed=model.seed
    rng.seed=model.seed dataset.index_mapping_dir=model.data.cache_dir dataloader.num_workers=model.data.num_workers
    optimizer.lr=model.optim.lr .betas=model.optim.betas .eps=model.optim.eps
    lr_scheduler.lr_warmup_steps=model.optim.sched.warmup_steps .lr_decay_steps=model.optim.sched.decay_steps
    .min_lr=model.optim.sched.min_lr .init_lr=model.optim.sched.init_lr
    clip_grad_norm.max_norm=trainer.gradient_clip_val wandb.project=logging.wandb_project .entity=logging.wandb_entity
    """),
    **{f"{_CONFIG}.{name}": row for name, row in FIELDS.items()},
    "model.torch_dtype": Becomes("trainer.precision", _DTYPES, there="weights had that type", here="they are BF16"),
    "checkpoint.restore_from": NotHere("training went on from it", "Automodel's checkpoints are not read"),
    "distributed.mp_policy.param_dtype": Becomes("trainer.precision", _DTYPES, here="they are BF16"),
    "optimizer.weight_decay": Becomes("model.optim.weight_decay", float),
    "lr_scheduler.lr_decay_style": Becomes(
        "model.optim.sched.name", DECAY_STYLES, there="the rate fell that way", here="by a cosine"
    ),
    """
    recipe peft checkpoint.enabled .checkpoint_dir dataset._target_ .paths .seq_length .split distributed.tp_size
    .cp_size .pp_size .ep_size .dp_size .dp_replicate_size .sequence_parallel .activation_checkpointing .strategy
    ._target_ distributed.mp_policy.reduce_dtype distributed_config.sequence_parallel ._target_ model._target_
    .pretrained_model_name_or_path model.config.pretrained_model_name_or_path optimizer._target_
    packed_sequence.packed_sequence_size step_scheduler.max_steps .num_epochs .ckpt_every_steps .val_every_steps
    validation_dataset._target_ .num_val_samples wandb.name
    """: TOGETHER,
    # By the beginning of their names
    "rng.*": NoNeed("seeds are the same function of the rank in every layout"),
    "dist_env.*": NoNeed("trainer.hang_timeout watches over exchanges"),
    "compile.*": NoNeed("fused kernels stand for compilation"),
    "loss_fn*": NoNeed("the loss is cross entropy"),
    "checkpoint.*": NoNeed("checkpoints have one format; python -m gpt_pretrain.export writes safetensors"),
    "model.backend.*": NoNeed("kernels are chosen here"),
    "distributed.*": NoNeed("a detail of its sharding"),
    "distributed_config.*": NoNeed("a detail of its sharding"),
    "dataloader.*": NoNeed("batches are megatron-core's"),
    "validation_dataloader.*": NoNeed("batches are megatron-core's"),
    "validation_dataset.*": NoNeed("validation takes the data's own split, or model.data.validation_prefix"),
    "packed_sequence.*": NoNeed("samples are always full: documents follow each other"),
    "optimizer.*": NoNeed("Adam's states are fp32 (model.optim.use_precision_aware_optimizer for others)"),
    "wandb.*": NoNeed("W&B's own"),
    "peft.*": NotHere("a few weights of adapters were trained", "all weights are", ()),
    "ci.*": NoNeed("of its tests"),
    **{
        f"model.{name}": NoNeed("of its own loading of models")
        for name in (
            "trust_remote_code",
            "load_base_model",
            "force_hf",
            "use_liger_kernel",
            "attn_implementation",
            "use_sdpa_patching",
            "output_hidden_states",
        )
    },
    "dataset.* fp8.*": TOGETHER,
}
NUMBERS = names("""
step_scheduler.max_steps .num_epochs .ckpt_every_steps .val_every_steps packed_sequence.packed_sequence_size
dataset.seq_length validation_dataset.num_val_samples
""")


def _present(source: Source, *names: str) -> str:
    """The first of several names that has a value, or the first."""
    return next((name for name in names if source.get(name) is not None), names[0])


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    _model(source, translation)
    _layout(source, translation)
    _optimizer(source, translation)
    _data(source, translation)
    _run(source, translation)
    if source.get("fp8.enabled"):
        set_torchao(source, translation, "fp8", "fp8.enabled")
    elif "fp8.enabled" in source.given:
        translation.derive("model.fp8", False, "fp8.enabled")


def _model(source: Source, translation: Translation) -> None:
    named = _present(source, "model.pretrained_model_name_or_path", f"{_CONFIG}.pretrained_model_name_or_path")
    if is_inline(source.values, _CONFIG):
        # Of transformers' classes; those of GPT-2 have other fields.
        kind = str(source.get(f"{_CONFIG}._target_"))
        translation.derive("model.qk_layernorm", "Qwen3" in kind, f"{_CONFIG}._target_")
        translation.derive("model.normalization", "rmsnorm", f"{_CONFIG}._target_")
    elif source.get(named):
        set_preset(translation, preset_named(str(source.get(named))), named)
    if str(source.get("model._target_")).endswith("from_pretrained"):
        here = (
            "they begin fresh; python -m gpt_pretrain.import_hf imports them, and checkpoint.init_from starts from them"
        )
        translation.lose(source.shown("model._target_"), "weights were the published ones", here)


def _layout(source: Source, translation: Translation) -> None:
    keys = {
        "tp": "tensor_model_parallel_size",
        "cp": "context_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size",
    }
    for size, key in keys.items():
        value = source.get(f"distributed.{size}_size")
        if isinstance(value, int):
            translation.derive(f"model.{key}", value, f"distributed.{size}_size")
    tp = source.get("distributed.tp_size") or 1
    sequence = _present(source, "distributed.sequence_parallel", "distributed_config.sequence_parallel")
    split = bool(source.get(sequence)) and tp != 1
    translation.derive("model.sequence_parallel", split, sequence)
    named = _present(source, "distributed.strategy", "distributed._target_", "distributed_config._target_")
    kind = str(source.get(named) or "fsdp2").lower()
    set_sharding(translation, None if "ddp" in kind else "optim_grads_params", named, "distributed.dp_size")
    replicas = source.get("distributed.dp_replicate_size")
    if isinstance(replicas, int) and "ddp" not in kind:
        name = "distributed.dp_replicate_size"
        translation.derive("model.num_distributed_optimizer_instances", replicas, name)
    if source.get("distributed.activation_checkpointing"):
        set_full_recomputation(translation, "distributed.activation_checkpointing")
    reduced = "distributed.mp_policy.reduce_dtype"
    if source.get(reduced):
        translation.derive("model.grad_reduce_in_fp32", "32" in str(source.get(reduced)), reduced)


def _optimizer(source: Source, translation: Translation) -> None:
    name = "optimizer._target_"
    kind = str(source.get(name)).rpartition(".")[2]
    if kind in ("AdamW", "Adam", "FusedAdam"):
        translation.derive("model.optim.name", "adam", name)
    elif name in source.given:
        translation.lose(source.shown(name), "the optimizer", "adam takes its place")
    if kind == "Adam" and source.get("optimizer.weight_decay"):
        translation.notes.append("torch's Adam adds weight decay to the gradient; here it is decoupled (AdamW)")
    defaults = {"betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0 if kind == "Adam" else 0.01}
    for key, value in defaults.items():
        if f"optimizer.{key}" not in source.values and kind in ("AdamW", "Adam"):
            translation.set(f"model.optim.{key}", value, f"torch's default of {kind}'s {key}", given=False)
    if not any(each.startswith("lr_scheduler.") for each in source.values):
        translation.set("model.optim.sched.name", "constant", "without lr_scheduler the rate is constant", given=False)
        translation.set("model.optim.sched.warmup_steps", 0, "without lr_scheduler there is no warmup", given=False)
    if "clip_grad_norm.max_norm" not in source.values:
        translation.set("trainer.gradient_clip_val", 1.0, "Automodel's default of clip_grad_norm", given=False)


def _data(source: Source, translation: Translation) -> None:
    kind = str(source.get("dataset._target_"))
    key, paths = "model.data.data_impl", source.get("dataset.paths")
    listed = [paths] if isinstance(paths, str) else list(paths or [])
    if "Mock" in kind:
        translation.derive(key, "mock", "dataset._target_")
    elif "MegatronPretraining" in kind:
        translation.derive(key, "mmap", "dataset._target_")
        if listed and not any("*" in str(each) for each in listed):
            translation.derive("model.data.data_prefix", blend(listed), "dataset.paths")
        else:
            why = f"the paths of the indexed files, without patterns ({source.shown('dataset.paths')})"
            translation.up_to_you.append(("model.data.data_prefix", why))
    elif kind != "None":
        given = [shown for name, shown in source.given.items() if name.startswith("dataset.")]
        why = f"files of text (data=text) or of tokens (data=mmap) ({', '.join(given)})"
        translation.up_to_you.append(("model.data.text_files", why))
    split = source.get("dataset.split")
    if isinstance(split, str) and split.count(",") == 2:
        translation.derive("model.data.splits_string", split.replace(" ", ""), "dataset.split")
    length = "dataset.seq_length" if source.get("dataset.seq_length") else "packed_sequence.packed_sequence_size"
    if source.get(length):
        translation.take("model.encoder_seq_length", length)
    else:
        translation.up_to_you.append(("model.encoder_seq_length", "samples had the lengths of their texts"))


def _run(source: Source, translation: Translation) -> None:
    prefix = "step_scheduler."
    if source.get(f"{prefix}max_steps"):
        translation.take("trainer.max_steps", f"{prefix}max_steps")
    else:
        why = f"an epoch has an unknown number of steps ({source.shown(f'{prefix}num_epochs')})"
        translation.up_to_you.append(("trainer.max_steps", why))
    validates = "validation_dataset._target_" in source.values
    every = f"{prefix}val_every_steps"
    if validates:
        translation.take("trainer.val_check_interval", every)
        samples, batch = source.get("validation_dataset.num_val_samples"), translation.value("model.global_batch_size")
        if samples and batch:
            how = f"{samples:,} samples / {batch:,}"
            name = "validation_dataset.num_val_samples"
            translation.derive("trainer.limit_val_batches", max(1, samples // batch), name, how=how)
    else:
        translation.set("trainer.limit_val_batches", 0, "there is no validation_dataset", given=False)
    saves, interval = bool(source.get("checkpoint.enabled")), source.get(f"{prefix}ckpt_every_steps")
    set_saves(translation, interval, f"{prefix}ckpt_every_steps", saves, "checkpoint.enabled")
    if source.get("checkpoint.checkpoint_dir"):
        translation.up_to_you.append(("run_dir", f"where the run writes ({source.shown('checkpoint.checkpoint_dir')})"))
    if source.get("wandb.project"):
        translation.derive("logging.wandb", True, "wandb.project")
    if source.get("wandb.name"):
        translation.name = str(source.get("wandb.name"))


PROGRAM = Program(
    name="NeMo-Automodel", rows=table(_TABLE), derive=derive, marks=("step_scheduler fp8.recipe_name",), numbers=NUMBERS
)
