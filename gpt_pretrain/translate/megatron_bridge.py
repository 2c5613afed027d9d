"""Megatron-Bridge's dumped configuration (`run_config.yaml`), as the arguments of Megatron-LM that its fields are.

Its sections hold the fields of megatron-core's own classes, most of them under the names of Megatron-LM's arguments.
A field of a layer that no table knows has megatron-core's default, or is without counterpart.
"""

import warnings
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gpt_pretrain.translate import megatron_lm
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from gpt_pretrain.translate.megatron_options import ROWS
from gpt_pretrain.translate.translation import (
    ANOTHER_MODEL,
    SAME,
    TOGETHER,
    Becomes,
    NoNeed,
    NotHere,
    Program,
    Row,
    Source,
    Translation,
    names,
    table,
)

# Sections whose fields are arguments by the same names, or by those below; - where another section has the field.
_SECTIONS = names("""
model train validation scheduler optimizer ddp dist logger checkpoint dataset tokenizer rng mixed_precision
""")
_ARGUMENTS = dict(
    word.split("=", 1)
    for word in names("""
    model.num_moe_experts=num_experts .seq_length=max_position_embeddings .scale_factor=rope_scaling_factor
    .rope_scaling=use_rope_scaling .virtual_pipeline_model_parallel_size=num_virtual_stages_per_pipeline_rank
    .num_layers_in_first_pipeline_stage=decoder_first_pipeline_num_layers .bf16=- .fp16=- .fp8=- .fp8_recipe=-
    .num_layers_in_last_pipeline_stage=decoder_last_pipeline_num_layers .cuda_graph_scope=- .use_cpu_initialization=-
    .embedding_init_method_std=- .microbatch_group_size_per_vp_stage=- .moe_deepep_num_sms=- .cuda_graph_warmup_steps=-
    train.exit_signal=- .manual_gc_eval=- scheduler.override_opt_param_scheduler=- logger.logging_level=-
    checkpoint.use_persistent_ckpt_worker=-
    dataset.sequence_length=seq_length .path_to_cache=data_cache_path .mock=mock_data ddp.fp8_param_gather=-
    .create_attention_mask=create_attention_mask_in_dataloader ddp.bucket_size=ddp_bucket_size
    ddp.average_in_collective=ddp_average_in_collective optimizer.use_distributed_optimizer=- .overlap_param_gather=-
    .bf16=- .fp16=- .fp8_recipe=- dist.use_megatron_fsdp=- mixed_precision.fp8_param=fp8_param_gather
    """)
)
_DTYPES = {"float32": "fp32", "bfloat16": "bf16", "half": "fp16", "float16": "fp16", "uint8": "fp8"}
_TABLE: Mapping[str, Row] = {
    **ROWS,
    "model.share_embeddings_and_output_weights": SAME,
    "checkpoint.most_recent_k": Becomes("checkpoint.keep_last", lambda kept: None if kept == -1 else kept),
    "checkpoint.save_optim": NotHere("checkpoints had no optimizer states", "they have", (True,)),
    "peft.*": NotHere("a few weights of adapters were trained", "all weights are", (None,)),
    "rng.data_parallel_random_init": NotHere("ranks began with weights of their own", "all begin alike"),
    "model.softmax_scale": NotHere("scores were multiplied by it", ANOTHER_MODEL),
    """
    model.gated_linear_unit .bias_activation_fusion .should_pad_vocab model.activation_func._target_ dataset.blend
    .blend_per_split ddp.grad_reduce_in_fp32 mixed_precision.grad_reduce_in_fp32
    """: TOGETHER,
    """
    _target_ comm_overlap* scheduler.* optimizer.* ddp.* mixed_precision.* model.bf16 .fp16 .fp8 .fp8_* .tp_comm_*
    .high_freq_factor .low_freq_factor .old_context_len .autocast_dtype* .params_dtype* .pipeline_dtype*
    """: NoNeed("its effect is in other fields"),
    """
    model._target_ .finalize_* .grad_* .no_sync_* .param_sync_* .timers* .transformer_layer_spec* .generation_config*
    .attention_backend* .init_method* .embedding_init_method* .moe_deepep_num_sms
    .output_layer_init_method* .cuda_graph_* .activation_func*
    .enable_cuda_graph .mamba_* .parallel_output .scatter_embedding_* .deallocate_* .restore_modelopt_state .test_mode
    .microbatch_group_* .clone_scatter_* .mlp_chunks_for_prefill .use_mamba_mem_eff_path .use_cpu_initialization
    """: NoNeed("made here, or not for training"),
    "checkpoint.*": NoNeed("checkpoints have one format, which every layout reads"),
    "logger.* profiling.* straggler.* nvrx_straggler.*": NoNeed("every record has what is worth logging"),
    "ft.* inprocess_restart.* rerun_state_machine.* train.* validation.*": NoNeed("this program has its own guards"),
    "dist.* rng.* dataset.* tokenizer.*": NoNeed("a detail of its start or its data sets"),
}


def _as_arguments(source: Source, translation: Translation) -> Source:
    """Fields by the names of arguments, with the parser's defaults for what no field says."""
    parser = vars(megatron_parser().parse_known_args([])[0])
    derived = _derived(source, translation)
    values: dict[str, Any] = {name: value for name, (value, _) in derived.items()}
    given = {name: source.given[origin] for name, (_, origin) in derived.items()}
    of_layers, unset = _layer_defaults(), []
    # Precision's own section counts last, as there.
    for name, there in sorted(source.values.items(), key=lambda item: item[0].startswith("mixed_precision.")):
        section, _, field = name.removesuffix("._target_").partition(".")
        own = _ARGUMENTS.get(f"{section}.{field}", field if section in _SECTIONS and field in parser else "-")
        value = _converted(field, there)
        if own != "-" and value is not None:
            values[own] = value
        if value == (of_layers if own == "-" and section == "model" else parser).get(field if own == "-" else own, ...):
            unset.append(source.given[name])
            given.pop(own, None)
        else:
            given[name if own == "-" else own] = source.given[name]
            values.setdefault(name if own == "-" else own, value if value is not None else parser.get(own))
    if unset:
        translation.not_needed.append((", ".join(unset), "megatron-core's defaults, and Megatron-LM's"))
    return replace(source, values=parser | values, given=given)


def _converted(field: str, value: Any) -> Any:
    """A value as the parser would have it."""
    if "dtype" in field and isinstance(value, str):
        return _DTYPES.get(value.rpartition(".")[2], value)
    return int(value) if field == "rotary_base" else value


def _layer_defaults() -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer import MLATransformerConfig
    return {each.name: each.default for each in fields(MLATransformerConfig)}


def _derived(source: Source, translation: Translation) -> dict[str, tuple[Any, str]]:
    """Arguments that fields stand for together, each with the field that tells it."""
    found: dict[str, tuple[Any, str]] = {}
    kind, gated = "model.activation_func._target_", bool(source.get("model.gated_linear_unit"))
    if kind in source.values:
        function = str(source.get(kind)).rpartition(".")[2]
        known = {("silu", True): "swiglu", ("squared_relu", False): "squared_relu", ("gelu", False): ""}
        if (function, gated) not in known:
            shown = f"{source.shown(kind)}, model.gated_linear_unit={gated}"
            translation.lose(shown, "the MLP's activation", ANOTHER_MODEL)
        elif known[function, gated]:
            found[known[function, gated]] = True, kind
        fused = f"bias_{'swiglu' if gated else 'gelu'}_fusion"
        if "model.bias_activation_fusion" in source.values:
            found[fused] = source.get("model.bias_activation_fusion"), "model.bias_activation_fusion"
    if source.get("model.num_query_groups"):
        found["group_query_attention"] = True, "model.num_query_groups"
    if source.get("model.scale_factor"):
        # Llama 3.1's providers stretch rope without a switch.
        found["use_rope_scaling"] = True, "model.scale_factor"
    if source.get(embeddings := "model.embedding_init_method_std") not in (None, source.get("model.init_method_std")):
        found["embedding_init_method_std"] = source.get(embeddings), embeddings
    if source.get("model.should_pad_vocab") is False:
        found["make_vocab_size_divisible_by"] = 1, "model.should_pad_vocab"
    if reduced := source.first("mixed_precision.grad_reduce_in_fp32", "ddp.grad_reduce_in_fp32"):
        found["grad_reduce_in_bf16"] = not source.get(reduced), reduced
    for name, keys in (("blend", ("data_path",)), ("blend_per_split", ("train_data_path", "valid_data_path"))):
        blends = source.get(f"dataset.{name}")
        for key, each in zip(keys, [blends] if name == "blend" else blends or [], strict=False):
            if each:
                paths, weights = each[0], each[1] if len(each) > 1 else None
                pairs = zip(map(str, weights), paths, strict=True) if weights else ((path,) for path in paths)
                found[key] = [word for pair in pairs for word in pair], f"dataset.{name}"
    return found


PROGRAM = Program(
    name="Megatron-Bridge",
    rows=table(_TABLE),
    derive=megatron_lm.derive,
    marks=("model._target_", "ddp mixed_precision rerun_state_machine"),
    prepare=_as_arguments,
    complete="model.num_layers",
)
