"""DeepSpeed's settings: a section or a file of Accelerate's, and among GPT-NeoX's own.

`section` ends in a dot, or is empty.
"""

from collections.abc import Mapping
from typing import Any

from gpt_pretrain.translate.common import data_parallel_ranks, set_sharding
from gpt_pretrain.translate.translation import TOGETHER, NoNeed, NotHere, Row, Source, Translation, table

OFFLOAD = NotHere(
    "weights or optimizer states were in the host's memory", "they are on the GPU", (None, False, "none", "None")
)
_STAGES = {2: "optim_grads", 3: "optim_grads_params"}
_TABLE: Mapping[str, Row] = {
    """
    zero_stage zero_optimization.stage optimizer.type .params.* scheduler.type .params.* bf16.enabled fp16.enabled
    data_types.grad_accum_dtype train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps
    gradient_clipping steps_per_print
    """: TOGETHER,
    "zero_optimization.*": NoNeed("buckets are sized here (model.ddp_bucket_size)"),
    "zero_optimization.offload_param* .offload_optimizer*": OFFLOAD,
    "fp16.* bf16.*": NoNeed("BF16 needs no loss scaling"),
    "wall_clock_breakdown*": NoNeed("python -m gpt_pretrain.benchmark times a run"),
    "flops_profiler*": NoNeed("every record has the throughput"),
    "tensorboard*": NoNeed("RUN_DIR/tensorboard is written"),
}


def rows(section: str) -> dict[str, Row]:
    """The rows of DeepSpeed's settings."""
    return {f"{section}{name}": row for name, row in table(_TABLE).items()}


def _known(source: Source, name: str) -> Any:
    """A value; None where the training script decides it."""
    return None if source.get(name) == "auto" else source.get(name)


def set_zero(source: Source, translation: Translation, section: str) -> bool:
    """Sharding by ZeRO's stages, and whether one is given."""
    name = source.first(f"{section}zero_stage", f"{section}zero_optimization.stage")
    if name:
        set_sharding(translation, _STAGES.get(source.get(name)), name)
        if source.get(name) == 1:
            for key in ("use_distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather"):
                translation.derive(f"model.{key}", True, name)
    return bool(name)


def set_batch(source: Source, translation: Translation, section: str, model_ranks: int) -> None:
    """The batch, of one microbatch or several of each data-parallel rank, and what else is counted."""
    names = [f"{section}{name}" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    micro, steps = map(source.get, names)
    whole, ranks = f"{section}train_batch_size", data_parallel_ranks(translation, model_ranks)
    if isinstance(micro, int):
        translation.derive("model.micro_batch_size", micro, names[0])
    if isinstance(source.get(whole), int):
        translation.take("model.global_batch_size", whole)
    elif isinstance(micro, int) and ranks:
        steps = steps if isinstance(steps, int) else 1
        how = f"{micro} × {steps} × {ranks} data-parallel ranks"
        translation.derive("model.global_batch_size", micro * steps * ranks, *names, how=how)
    elif isinstance(steps, int):
        why = f"microbatch × {steps} × data-parallel ranks ({source.shown(names[1])})"
        translation.up_to_you.append(("model.global_batch_size", why))
    for name, key in (("gradient_clipping", "gradient_clip_val"), ("steps_per_print", "log_every_n_steps")):
        value = source.get(f"{section}{name}")
        if isinstance(value, int | float) and not isinstance(value, bool):
            translation.derive(f"trainer.{key}", value, f"{section}{name}")


def set_optimizer(source: Source, translation: Translation, section: str) -> None:
    """Adam by its names there, and its numbers."""
    name = f"{section}optimizer.type"
    kind = source.get(name)
    if kind in ("AdamW", "Adam", "FusedAdam", "DeepSpeedCPUAdam"):
        translation.derive("model.optim.name", "adam", name)
        if kind == "Adam":
            # DeepSpeed's adam_w_mode is on by default.
            translation.notes.append("DeepSpeed's Adam is AdamW, as here")
    elif kind is not None:
        translation.lose(source.shown(name), "the optimizer", "adam takes its place")
    for number in ("lr", "betas", "eps", "weight_decay"):
        if _known(source, param := f"{section}optimizer.params.{number}") is not None:
            translation.take(f"model.optim.{number}", param)


def set_scheduler(source: Source, translation: Translation, section: str) -> None:
    """The rate's schedule, where DeepSpeed has it."""
    name = f"{section}scheduler.type"
    kinds = {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"}
    kind = source.get(name)
    if kind is None:
        return
    if kind not in kinds:
        translation.lose(source.shown(name), "the rate's schedule", "model.optim.sched.name chooses one")
    translation.derive("model.optim.sched.name", kinds.get(kind, "cosine"), name)
    params = {"warmup_num_steps": "warmup_steps", "total_num_steps": "decay_steps", "warmup_min_lr": "init_lr"}
    for theirs, ours in params.items():
        if _known(source, param := f"{section}scheduler.params.{theirs}") is not None:
            translation.take(f"model.optim.sched.{ours}", param)
    if kind == "WarmupDecayLR":
        translation.derive("model.optim.sched.min_lr", 0.0, name, how="it falls to zero")
