"""What settings of torchtitan become that belong together; `torchtitan_settings` has the table."""

import math

from gpt_pretrain.translate.common import set_betas, set_full_recomputation, set_preset, set_sharding
from gpt_pretrain.translate.torchao_fp8 import set_torchao
from gpt_pretrain.translate.torchtitan_settings import DEFAULTS, NUMBERS, PRESETS, RENAMED, ROWS, SIZES
from gpt_pretrain.translate.translation import Program, Source, Translation


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
    rows=ROWS,
    derive=derive,
    # Its files are the only ones in TOML.
    marks=("job training",),
    defaults=DEFAULTS,
    renamed=RENAMED,
    numbers=NUMBERS,
)
