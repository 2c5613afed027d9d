"""Options of Megatron-LM that belong together: what `validate_args` and the schedule derive is derived here as well.

The sources are megatron-core 0.19.2's `megatron/training/arguments.py`, `argument_utils.py` and `training.py`.
"""

import math
import shlex

from gpt_pretrain.translate.common import GPT2_TOKENS, blend, set_vocabulary_rows
from gpt_pretrain.translate.megatron_options import ROWS
from gpt_pretrain.translate.megatron_schedule import schedule
from gpt_pretrain.translate.translation import ANOTHER_MODEL, TOGETHER, Source, Translation


def derive(source: Source, translation: Translation) -> None:
    """What depends on several options."""
    _architecture(source, translation)
    _vocabulary(source, translation)
    _precision(source, translation)
    _fp8(source, translation)
    _layout(source, translation)
    _batch_and_length(source, translation)
    schedule(source, translation)
    _data(source, translation)
    _saves(source, translation)


def _architecture(source: Source, translation: Translation) -> None:
    heads, hidden = source.get("num_attention_heads"), source.get("hidden_size")
    gated = bool(source.get("swiglu"))
    ffn, how = source.get("ffn_hidden_size"), ""
    if ffn is None and hidden:
        # validate_args keeps the number of weights, in multiples of 64.
        ffn = int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden
        how = "8/3 × hidden size, in multiples of 64" if gated else "4 × hidden size"
    if ffn:
        translation.derive("model.ffn_hidden_size", ffn, "ffn_hidden_size", how=how)
    if source.get("num_experts") and ffn:
        width = source.get("moe_ffn_hidden_size") or ffn
        translation.derive("model.moe_ffn_hidden_size", width, "moe_ffn_hidden_size")
        if source.get("moe_router_dtype") != "fp32":
            there = "the router computed in that type or its weights'"
            translation.lose(source.shown("moe_router_dtype"), there, "it computes in fp32")
    if heads:
        grouped = source.get("group_query_attention")
        groups = source.get("num_query_groups") if grouped else heads
        translation.derive("model.num_query_groups", groups, "num_query_groups", "group_query_attention")
        if not grouped and "num_query_groups" in source.given:
            translation.notes.append(f"{source.given['num_query_groups']} does nothing without --group-query-attention")
    if heads and hidden:
        channels = source.get("kv_channels") or hidden // heads
        translation.derive("model.kv_channels", channels, "kv_channels")
    _positions(source, translation)
    _window(source, translation)
    fused = "bias_swiglu_fusion" if gated else "bias_gelu_fusion"
    # megatron-core's fused bias and GELU is the tanh form; without it torch's is exact.
    tanh = source.get("add_bias_linear") and source.get("bias_gelu_fusion")
    squared = bool(source.get("squared_relu"))
    activation = "swiglu" if gated else "squared_relu" if squared else "gelu_tanh" if tanh else "gelu"
    gelu = f"GELU's {'tanh form, which its fused kernel computes' if tanh else 'exact form'}"
    how = "" if gated or squared else gelu
    translation.derive("model.activation", activation, "swiglu", "squared_relu", "bias_gelu_fusion", how=how)
    if fused in source.given:
        translation.take("model.bias_activation_fusion", fused)
    bias = bool(source.get("add_qkv_bias")) and not source.get("add_bias_linear")
    translation.derive("model.qkv_bias", bias, "add_qkv_bias")


def _window(source: Source, translation: Translation) -> None:
    window, layers = source.get("window_size"), source.get("window_attn_skip_freq")
    if isinstance(layers, int):
        # is_layer_window_attention counts from 1 on.
        layers = [int(layer % layers != 0) for layer in range(1, source.get("num_layers") + 1)]
    if window is None or window[0] < 0 or (layers is not None and 1 not in layers):
        return
    # Causal attention has no window to the right, whatever is given.
    translation.derive("model.window_size", [window[0], 0], "window_size")
    some = layers if layers is not None and 0 in layers else None
    translation.derive("model.window_attn_skip_freq", some, "window_attn_skip_freq")


def _positions(source: Source, translation: Translation) -> None:
    kind = "rope" if source.get("use_rotary_position_embeddings") else source.get("position_embedding_type")
    names = ("position_embedding_type", "use_rotary_position_embeddings")
    if kind == "yarn":
        _yarn(source, translation)
        return
    if kind in ("rope", "learned_absolute"):
        translation.derive("model.position_embedding_type", kind, *names)
    else:
        translation.lose(source.shown(names[0]), f"positions were {kind}", ANOTHER_MODEL)
    factor = source.get("rope_scaling_factor") if source.get("use_rope_scaling") else None
    translation.derive("model.rope_scaling_factor", factor, "use_rope_scaling", "rope_scaling_factor")


def _yarn(source: Source, translation: Translation) -> None:
    """As `_apply_yarn_config_from_args` reads its options; each that is not the paper's makes another model."""
    translation.derive("model.position_embedding_type", "rope", "position_embedding_type")
    factor, length = source.get("rotary_scaling_factor"), source.get("yarn_original_max_position_embeddings")
    if factor > 1:
        translation.derive("model.rope_scaling_factor", factor, "rotary_scaling_factor")
        key = "model.yarn_original_max_position_embeddings"
        translation.derive(key, length or 4096, "yarn_original_max_position_embeddings")
    for name, values in _OF_YARN.items():
        if source.get(name) not in values:
            translation.lose(source.shown(name), "YaRN stretched rope in another way", ANOTHER_MODEL)


# Options of YaRN, with the values that are the paper's.
_OF_YARN = {
    "yarn_beta_fast": (None, 32.0),
    "yarn_beta_slow": (None, 1.0),
    "yarn_correction_range_round_to_int": (None, True),
    "mscale": (1.0,),
    "mscale_all_dim": (0.0,),
}
_OF_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")


def _vocabulary(source: Source, translation: Translation) -> None:
    tokenizer, tokens = source.get("tokenizer_type"), source.get("vocab_size")
    of_gpt2 = tokenizer == "GPT2BPETokenizer" or (tokenizer is None and source.get("vocab_file") is not None)
    if source.get("padded_vocab_size"):
        tokens = source.get("padded_vocab_size")
        translation.derive("model.vocab_size", tokens, "padded_vocab_size")
    elif tokens:
        translation.derive("model.vocab_size", tokens, "vocab_size")
    elif of_gpt2:
        tokens = GPT2_TOKENS
        how = "GPT-2's BPE has 50,257 tokens"
        translation.derive("model.vocab_size", tokens, "tokenizer_type", "vocab_file", how=how)
    else:
        why = "the number of tokens of the tokenizer that made the files: translate again with --vocab-size N"
        translation.up_to_you.append(("model.vocab_size", why))
    if tokenizer == "NullTokenizer":
        translation.notes.append("NullTokenizer of older versions of Megatron-LM added one token to --vocab-size")
    elif names := [name for name in _OF_TOKENIZER if name in source.given]:
        why = "only text needs a tokenizer, as a Hugging Face tokenizer.json; indexed files do without"
        translation.up_to_you.append(("model.tokenizer.model", f"{why} ({', '.join(map(source.shown, names))})"))
    tp = "tensor_model_parallel_size"
    set_vocabulary_rows(source, translation, tokens, "make_vocab_size_divisible_by", tp)


def _precision(source: Source, translation: Translation) -> None:
    if source.get("fp16"):
        there = "weights were FP16, with loss scaling and its skipped steps"
        translation.lose(source.shown("fp16"), there, "they are BF16, which needs no scaling (trainer.precision=bf16)")
    low = bool(source.get("bf16") or source.get("fp16"))
    translation.derive("trainer.precision", "bf16" if low else "fp32", "bf16", "fp16")
    # Without --bf16 gradients have the weights' type, fp32.
    in_bf16 = low and bool(source.get("grad_reduce_in_bf16"))
    names = ("grad_reduce_in_bf16", "accumulate_allreduce_grads_in_fp32")
    if source.get("fp16") and not source.get("accumulate_allreduce_grads_in_fp32"):
        translation.notes.append("with --fp16 gradients were reduced in FP16; here in fp32 (model.grad_reduce_in_fp32)")
    translation.derive("model.grad_reduce_in_fp32", not in_bf16, *names)


def _fp8(source: Source, translation: Translation) -> None:
    format, recipe = source.get("fp8"), source.get("fp8_recipe")
    names = [name for name, row in ROWS.items() if row is TOGETHER and name.startswith("fp8_")]
    names += ["first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"]
    if format is None:
        translation.derive("model.fp8", False, "fp8")
        given = [source.given[name] for name in names if name in source.given]
        translation.notes += [f"{setting} does nothing without --fp8-format" for setting in given]
        return
    translation.derive("model.fp8", True, "fp8")
    if recipe == "custom":
        translation.lose(source.shown("fp8_recipe"), "a recipe of the user's own", "delayed scaling takes its place")
    else:
        translation.derive("model.fp8_recipe", recipe, "fp8_recipe")
    if recipe in ("delayed", "tensorwise") or format == "hybrid":
        translation.derive(f"model.fp8_{format}", True, "fp8")
    keys = {name: f"model.{name}" for name in names} | {"fp8_param_gather": "model.fp8_params"}
    for name, key in keys.items():
        if name != "fp8_recipe":
            translation.take(key, name)


def _layout(source: Source, translation: Translation) -> None:
    tp, pp = source.get("tensor_model_parallel_size"), source.get("pipeline_model_parallel_size")
    sequence = bool(source.get("sequence_parallel"))
    if sequence and tp == 1:
        translation.not_needed.append((source.shown("sequence_parallel"), "Megatron-LM turns it off at TP 1"))
    translation.derive("model.sequence_parallel", sequence and tp > 1, "sequence_parallel")
    per_stage, chunks = source.get("num_layers_per_virtual_pipeline_stage"), None
    layers = source.get("num_layers")
    name = "num_layers_per_virtual_pipeline_stage"
    how = ""
    if per_stage and layers and pp:
        chunks, how = layers // pp // per_stage, f"{layers} layers / {pp} stages / {per_stage}"
    elif source.get("num_virtual_stages_per_pipeline_rank"):
        name, chunks = "num_virtual_stages_per_pipeline_rank", source.get("num_virtual_stages_per_pipeline_rank")
    key = "model.virtual_pipeline_model_parallel_size"
    translation.derive(key, None if chunks == 1 else chunks, name, how=how)
    names = ("recompute_granularity", "recompute_activations")
    granularity = "selective" if source.get("recompute_activations") else source.get("recompute_granularity")
    translation.derive("model.activations_checkpoint_granularity", granularity, *names)
    _sharding(source, translation)


def _sharding(source: Source, translation: Translation) -> None:
    strategy, names = None, ("use_megatron_fsdp", "data_parallel_sharding_strategy")
    if source.get("use_torch_fsdp2"):
        strategy, names = "optim_grads_params", ("use_torch_fsdp2", "data_parallel_sharding_strategy")
    elif source.get("use_megatron_fsdp"):
        strategy = source.get("data_parallel_sharding_strategy")
    elif "data_parallel_sharding_strategy" in source.given:
        name = source.given["data_parallel_sharding_strategy"]
        translation.notes.append(f"{name} does nothing without --use-megatron-fsdp")
    shards = strategy in ("optim_grads", "optim_grads_params")
    translation.derive("model.data_parallel_sharding_strategy", strategy if shards else None, *names)
    distributed = bool(source.get("use_distributed_optimizer")) or shards or strategy == "optim"
    translation.derive("model.use_distributed_optimizer", distributed or None, "use_distributed_optimizer", *names)
    for name in ("overlap_grad_reduce", "overlap_param_gather"):
        value = bool(source.get(name)) or shards
        how = "sharding overlaps here in any case" if shards and not source.get(name) else ""
        translation.derive(f"model.{name}", value, name, *(names if shards else ()), how=how)
    instances = source.get("num_distributed_optimizer_instances")
    name = "num_distributed_optimizer_instances"
    if instances == 1 or shards:
        translation.derive(f"model.{name}", instances, name)
    else:
        there = "groups of ranks had the optimizer's states each"
        translation.lose(source.shown(name), there, "only model.data_parallel_sharding_strategy has groups")


def _batch_and_length(source: Source, translation: Translation) -> None:
    batch, micro, how = source.get("global_batch_size"), source.get("micro_batch_size"), ""
    steps = source.get("step_batch_size_schedule")
    if batch is None and isinstance(steps, str) and (last := steps.rpartition(":")[2].strip()).isdecimal():
        name = "step_batch_size_schedule"
        translation.derive("model.global_batch_size", int(last), name, how="its last batch")
        return
    devices, nodes = translation.value("trainer.devices"), translation.value("trainer.num_nodes") or 1
    if batch is None and micro and devices:
        sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
        ranks = devices * nodes // math.prod(source.get(size, 1) for size in sizes)
        batch, how = micro * ranks, f"{micro} × {ranks} data-parallel ranks"
    if batch is None:
        translation.up_to_you.append(("model.global_batch_size", "one microbatch of every data-parallel rank"))
        return
    translation.derive("model.global_batch_size", batch, "global_batch_size", "micro_batch_size", how=how)


def _data(source: Source, translation: Translation) -> None:
    paths, train = source.get("data_path"), source.get("train_data_path")
    key = "model.data.data_impl"
    if source.get("mock_data"):
        translation.derive(key, "mock", "mock_data")
    elif paths or train:
        name = "data_path" if paths else "train_data_path"
        translation.derive(key, "mmap", name)
        translation.derive("model.data.data_prefix", blend(paths or train), name)
        if source.get("valid_data_path"):
            prefix = blend(source.get("valid_data_path"))
            translation.derive("model.data.validation_prefix", prefix, "valid_data_path")
    else:
        names = [name for name in ("data_args_path", "per_split_data_args_path") if name in source.given]
        where = f"; {', '.join(map(source.shown, names))} names a file, which is not read" if names else ""
        translation.up_to_you.append(
            ("model.data.data_prefix", f"the paths of the indexed files (with data=mmap){where}")
        )
    split = source.get("split")
    if split is not None or paths:
        # validate_args has this default for --data-path.
        text = "969,30,1" if split is None else str(split).strip("'\"").replace(" ", "")
        how = "" if split is not None else "969, 30, 1 where --data-path stands alone"
        translation.derive("model.data.splits_string", text, "split", how=how)
    positions, mask = source.get("reset_position_ids"), source.get("reset_attention_mask")
    masking = ("reset_attention_mask", "dataloader_inter_document_masking", "reset_position_ids")
    masked = bool(mask or source.get(masking[1]))
    translation.derive("model.data.inter_document_masking", masked, *masking)
    if positions and not masked:
        there = "positions began anew in each document, and attention crossed them"
        translation.lose(
            source.shown(masking[2]), there, "neither happens (model.data.inter_document_masking does both)"
        )
    elif masked and not positions:
        translation.notes.append("model.data.inter_document_masking also starts positions at 0 in each document")


def _saves(source: Source, translation: Translation) -> None:
    saves = source.get("save") is not None
    interval = source.get("save_interval") if saves else None
    translation.derive("checkpoint.save_interval", interval, "save_interval", "save")
    how = "saves go by steps alone" if saves else "without --save nothing is saved"
    translation.derive("checkpoint.save_interval_minutes", None, "save", how=how)
    translation.derive("checkpoint.save_at_end", saves, "save")
    if source.get("save_retain_interval"):
        translation.take("checkpoint.keep_every", "save_retain_interval")
        translation.derive("checkpoint.keep_last", 1, "save_retain_interval")
    translation.derive("trainer.validate_at_start", False, "eval_iters", how="it never validates before step 1")
    project = source.get("wandb_project")
    if project:
        translation.derive("logging.wandb", True, "wandb_project")
        translation.derive("logging.wandb_project", project, "wandb_project")
    if source.get("wandb_exp_name"):
        translation.name = str(source.get("wandb_exp_name"))
    if saves:
        why = f"where the run writes; null: outputs/DATE/TIME_{translation.name} ({source.shown('save')})"
        translation.up_to_you.append(("run_dir", why))
    loads = [name for name in ("load", "pretrained_checkpoint") if source.get(name) is not None]
    loads = [name for name in loads if source.get(name) != source.get("save")]
    if loads:
        shown = ", ".join(source.shown(name) for name in loads)
        more = [source.given[name] for name in ("finetune", "no_load_optim", "no_load_rng") if name in source.given]
        there = f"training went on from that checkpoint{' with ' if more else ''}{', '.join(more)}"
        here = "python -m gpt_pretrain.import_megatron imports its weights, for checkpoint.init_from"
        translation.lose(shown, there, here)
    elif (folder := source.get("load")) is not None:
        # Their runs resume from there, too; ours from their run_dir.
        imports = f"python -m gpt_pretrain.import_megatron path={shlex.quote(str(folder))} out=start"
        # A checkpoint has the padded rows: without the number of tokens the run would refuse it as another model.
        if (tokens := translation.value("model.vocab_size", None)) is not None:
            imports += f" 'overrides=[model.vocab_size={tokens}]'"
        why = (
            f"if {source.shown('load')} holds a checkpoint of Megatron-LM: start, made by {imports}; null: new weights"
        )
        translation.up_to_you.append(("checkpoint.init_from", why))
    if not loads:
        given = [source.given[name] for name in ("finetune", "no_load_optim", "no_load_rng") if name in source.given]
        translation.not_needed += [(setting, "nothing is loaded") for setting in given]
