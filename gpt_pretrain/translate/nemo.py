"""What settings of NeMo 1.x become that belong together; `nemo_settings` has the table."""

from typing import Any

from gpt_pretrain.translate.common import GPT2_TOKENS, blend, set_sharding, set_sizes, set_vocabulary_rows
from gpt_pretrain.translate.nemo_settings import DEFAULTS, KERNELS, NUMBERS, ROWS
from gpt_pretrain.translate.structured_files import with_overrides
from gpt_pretrain.translate.translation import ANOTHER_MODEL, Program, Source, Translation


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    _layers(source, translation)
    _numbers(source, translation)
    _optimizer(source, translation)
    _data(source, translation)
    _run(source, translation)


def _layers(source: Source, translation: Translation) -> None:
    set_sizes(translation, "model.ffn_hidden_size", "model.kv_channels", "model.num_query_groups")
    norm = str(source.get("model.normalization"))
    known = {"layernorm": "layernorm", "layernorm1p": "layernorm", "rmsnorm": "rmsnorm"}
    translation.derive("model.normalization", known.get(norm, "layernorm"), "model.normalization")
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
    translation.derive("model.activation", activation, *names[: 1 if kind == "swiglu" else 3])
    for name in KERNELS:
        if name in source.given and not source.given[name].startswith(f"{name}="):
            translation.take(name, name)
        elif name in source.given:
            translation.not_needed.append((source.given[name], "chosen here (null): the numbers are the same"))
    _vocabulary(source, translation)


def _vocabulary(source: Source, translation: Translation) -> None:
    library, tokens = source.get("model.tokenizer.type"), source.get("model.override_vocab_size")
    if tokens:
        translation.derive("model.vocab_size", tokens, "model.override_vocab_size")
    elif library == "GPT2BPETokenizer":
        tokens = GPT2_TOKENS
        how = "GPT-2's BPE has 50,257 tokens"
        translation.derive("model.vocab_size", tokens, "model.tokenizer.type", how=how)
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
    translation.derive("trainer.precision", "bf16" if low else "fp32", name)
    if low and not source.get("model.megatron_amp_O2"):
        there = "weights stayed fp32, and autocast cast them for each product"
        translation.lose(source.shown("model.megatron_amp_O2"), there, "weights are BF16 with fp32 masters, as with O2")
    elif "model.megatron_amp_O2" in source.given:
        translation.not_needed.append((source.given["model.megatron_amp_O2"], "weights are BF16 with fp32 masters"))
    dtype = source.get("model.optim.grad_sync_dtype")
    if dtype is not None:
        value = str(dtype) not in ("bf16", "torch.bfloat16")
        translation.derive("model.grad_reduce_in_fp32", value, "model.optim.grad_sync_dtype")
    fp8 = source.get("model.fp8")
    translation.derive("model.fp8", bool(fp8), "model.fp8")
    if fp8:
        # NeMo 1.x has no other recipe.
        translation.set("model.fp8_recipe", "delayed", source.shown("model.fp8"), given=False)
    if isinstance(fp8, str):
        translation.derive("model.fp8_hybrid", fp8 == "hybrid", "model.fp8")
        translation.derive("model.fp8_e4m3", fp8 == "e4m3", "model.fp8")
    sequence = bool(source.get("model.sequence_parallel")) and source.get("model.tensor_model_parallel_size", 1) > 1
    translation.derive("model.sequence_parallel", sequence, "model.sequence_parallel")


_SCHEDULES = {"CosineAnnealing": "cosine", "WarmupHoldPolicy": "constant", None: "constant"}


def _optimizer(source: Source, translation: Translation) -> None:
    name = str(source.get("model.optim.name"))
    distributed = name in ("distributed_fused_adam", "mcore_distributed_optim")
    if distributed or name in ("fused_adam", "adamw", "adam", "sgd"):
        value = "sgd" if name == "sgd" else "adam"
        translation.derive("model.optim.name", value, "model.optim.name")
    else:
        translation.lose(source.shown("model.optim.name"), "the optimizer", "adam takes its place")
    if name == "adam":
        translation.notes.append("torch's adam adds weight decay to the gradient; here it is decoupled (AdamW)")
    translation.derive("model.use_distributed_optimizer", distributed or None, "model.optim.name")
    overlaps = {"overlap_grad_reduce": "overlap_grad_sync", "overlap_param_gather": "overlap_param_sync"}
    for key, theirs in overlaps.items():
        overlaps_there = distributed and bool(source.get(f"model.optim.{theirs}", False))
        translation.derive(f"model.{key}", overlaps_there, f"model.optim.{theirs}")
    if source.get("model.fsdp"):
        kinds = {"full": "optim_grads_params", "hybrid": "optim_grads_params", "grad": "optim_grads"}
        strategy = kinds.get(str(source.get("model.fsdp_sharding_strategy")), "optim_grads_params")
        set_sharding(translation, strategy, "model.fsdp", "model.fsdp_sharding_strategy")
    _schedule(source, translation)


def _schedule(source: Source, translation: Translation) -> None:
    prefix, key = "model.optim.sched", "model.optim.sched"
    kind, steps = source.get(f"{prefix}.name"), source.get("trainer.max_steps")
    if kind not in _SCHEDULES:
        translation.lose(source.shown(f"{prefix}.name"), "the rate's schedule", "a cosine takes its place")
    translation.derive(f"{key}.name", _SCHEDULES.get(kind, "cosine"), f"{prefix}.name")
    warmup = source.get(f"{prefix}.warmup_steps") or 0
    translation.derive(f"{key}.warmup_steps", warmup, f"{prefix}.warmup_steps")
    translation.derive(f"{key}.min_lr", source.get(f"{prefix}.min_lr") or 0.0, f"{prefix}.min_lr")
    constant = source.get(f"{prefix}.constant_steps") or 0
    if isinstance(steps, int) and isinstance(constant, int) and 0 < constant < steps:
        # WarmupAnnealHoldPolicy: decay_steps = max_steps - constant_steps - warmup_steps, after the warmup.
        how = f"{steps:,} steps less the constant {constant:,} at the end"
        translation.derive(f"{key}.decay_steps", steps - constant, f"{prefix}.constant_steps", how=how)


def _data(source: Source, translation: Translation) -> None:
    split = {
        name: source.get(f"model.data.data_prefix.{name}")
        for name in ("train", "validation", "test")
        if f"model.data.data_prefix.{name}" in source.values
    }
    prefix, name = source.get("model.data.data_prefix"), "model.data.data_prefix"
    impl, key = source.get("model.data.data_impl", "mmap"), "model.data.data_impl"
    if impl == "mock":
        translation.derive(key, "mock", key)
    elif split:
        translation.derive(key, "mmap", key)
        translation.derive(name, _list(split.get("train")), f"{name}.train")
        if split.get("validation"):
            prefix_key = "model.data.validation_prefix"
            translation.derive(prefix_key, _list(split["validation"]), f"{name}.validation")
        if split.get("test"):
            translation.lose(source.shown(f"{name}.test"), "a test set was scored", "there is no test set")
    elif prefix and prefix != "???":
        translation.derive(key, "mmap", key)
        translation.derive(name, _list(prefix), name)
    else:
        translation.derive(key, "mmap", key)
        translation.up_to_you.append((name, "the paths of the indexed files"))
    if source.get("model.data.splits_string"):
        key = "model.data.splits_string"
        translation.take(key, key)
    resets = ("model.data.reset_attention_mask", "model.data.reset_position_ids")
    mask, positions = (bool(source.get(each)) for each in resets)
    translation.derive("model.data.inter_document_masking", mask, *resets)
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
    translation.derive("checkpoint.save_interval", interval if saves else None, *names, how=how)
    translation.derive("checkpoint.save_interval_minutes", None, names[1], how="saves go by steps alone")
    translation.derive("checkpoint.save_at_end", saves, names[1])
    top = "exp_manager.checkpoint_callback_params.save_top_k"
    if saves and source.get(top) not in (None, -1):
        translation.lose(source.shown(top), "the best by validation were kept", "all are, or checkpoint.keep_last=…")
    if source.get("exp_manager.create_wandb_logger"):
        translation.derive("logging.wandb", True, "exp_manager.create_wandb_logger")
        project = source.get("exp_manager.wandb_logger_kwargs.project")
        if project:
            translation.derive("logging.wandb_project", project, "exp_manager.wandb_logger_kwargs.project")
    for name in ("exp_manager.explicit_log_dir", "exp_manager.exp_dir"):
        if source.get(name):
            translation.up_to_you.append(("run_dir", f"where the run writes ({source.shown(name)})"))
    start = "trainer.validate_at_start"
    translation.set(start, False, "NeMo starts with two batches of validation at most", given=False)


PROGRAM = Program(
    name="NeMo",
    rows=ROWS,
    derive=derive,
    marks=("trainer", "model.micro_batch_size .encoder_seq_length .megatron_amp_O2"),
    words=with_overrides,
    defaults=DEFAULTS,
    numbers=NUMBERS,
)
