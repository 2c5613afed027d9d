"""GPT-NeoX's YAML: Megatron-LM's arguments of 2021 under names of their own, and DeepSpeed's settings among them.

Files follow each other (`125M.yml local_setup.yml`). Defaults are those of `megatron/neox_arguments/neox_args.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpt_pretrain.translate import deepspeed, megatron_lm
from gpt_pretrain.translate.common import set_init
from gpt_pretrain.translate.megatron_arguments import megatron_parser
from gpt_pretrain.translate.megatron_options import ROWS
from gpt_pretrain.translate.translation import (
    ANOTHER_MODEL,
    TOGETHER,
    WINDOW,
    Becomes,
    NoNeed,
    NotHere,
    Program,
    Row,
    Source,
    Translation,
    defaults,
    names,
    table,
)

# Its names of Megatron-LM's arguments.
_ARGUMENTS = dict(
    word.split("=")
    for word in names("""
    rotary_pct=rotary_percent rotary_emb_base=rotary_base no_weight_tying=untie_embeddings_and_output_weights
    num_kv_heads=num_query_groups model_parallel_size=tensor_model_parallel_size use_qk_layernorm=qk_layernorm
    pipe_parallel_size=pipeline_model_parallel_size optimizer.params.lr=lr optimizer.params.eps=adam_eps
    warmup=lr_warmup_fraction gradient_clipping=clip_grad
    moe_num_experts=num_experts moe_top_k=moe_router_topk moe_expert_parallel_size=expert_model_parallel_size
    checkpoint_factor=save_interval wandb_team=wandb_entity wandb_run_name=wandb_exp_name
    """)
)
_POSITIONS = {"rotary": "rope", "learned": "learned_absolute"}
_NORMS = {"layernorm": "LayerNorm", "te_layernorm": "LayerNorm", "rmsnorm": "RMSNorm", "te_rmsnorm": "RMSNorm"}
_TABLE: Mapping[str, Row] = {
    **ROWS,
    **deepspeed.rows(""),
    "keep_last_n_checkpoints": Becomes("checkpoint.keep_last"),
    "z_loss": Becomes("model.z_loss_coeff"),
    "gpt_j_residual gpt_j_tied": NotHere("attention and MLP ran side by side", ANOTHER_MODEL),
    "sliding_window_width": WINDOW,
    "te_fp8_mha": NotHere("attention alone multiplied in FP8", "all layers do with fp8=delayed, and none without"),
    "moe_expert_interval": NotHere("some layers had no experts", ANOTHER_MODEL, (1,)),
    "moe_router_type": NotHere("a router of that kind chose experts", "the largest scores choose them", ("topk",)),
    "checkpoint_scale": NotHere("saves came ever more rarely", "they come every checkpoint.save_interval", ("linear",)),
    "extra_save_iters": NotHere("these steps were saved, too", "saves are regular"),
    "num_unique_layers": NotHere("layers shared weights", ANOTHER_MODEL),
    "weight_by_num_documents": NotHere("documents weighed the data sets", "weights are given with the paths"),
    "output_layer_parallelism": NoNeed("the LM head is split over the vocabulary"),
    "checkpoint_in_cpu": NotHere("activations went to the host's memory", "they stay on the GPU"),
    "train_epochs lr_decay_fraction": NotHere("epochs or a share of them were counted", "steps are"),
    """
    norm use_bias_in_norms rms_norm_epsilon scalenorm_epsilon pos_emb activation mlp_type intermediate_size
    expansion_factor mlp_multiple_of use_bias_in_attn_linear use_bias_in_mlp init_method output_layer_init_method
    attention_config precision fp16.type optimizer.params.betas checkpoint_activations checkpoint_num_layers
    fp32_allreduce train_data_paths train_data_weights valid_data_paths valid_data_weights test_data_paths
    test_data_weights
    """: TOGETHER,
    """
    scaled_upper_triang_masked_softmax_fusion scaled_masked_softmax_fusion layernorm_fusion rmsnorm_fusion rope_fusion
    use_flashattn_swiglu te_*
    """: NoNeed("kernels are chosen here, and are Transformer Engine's"),
    """
    partition_activations synchronize_each_layer
    override_lr_scheduler use_checkpoint_lr_scheduler
    contiguous_checkpointing deepspeed_activation_checkpointing data_impl
    data_types.* deepspeed* launcher hostfile include exclude num_nodes num_gpus master_* distributed_backend
    mmap_warmup
    """: NoNeed("a detail of its start, its engine or its files"),
    "log_dir tensorboard* wandb* comet* use_wandb use_comet peak_*": NoNeed("RUN_DIR has every record"),
    "text_gen_* maximum_tokens temperature top_* eval_tasks prompt_end sample_*": NoNeed("training does not read it"),
}
DEFAULTS = defaults("""
pipe_parallel_size=0 model_parallel_size=1 norm=layernorm layernorm_epsilon=1e-5 rms_norm_epsilon=1e-8 pos_emb=learned
rotary_pct=1.0 rotary_emb_base=10000 no_weight_tying=false make_vocab_size_divisible_by=128 activation=gelu
bias_gelu_fusion=false init_method=normal init_method_std=0.02 output_layer_init_method=scaled_normal mlp_multiple_of=1
use_bias_in_attn_linear=true use_bias_in_mlp=true lr_decay_style=linear min_lr=0.0 warmup=0.01 log_interval=100
seed=1234 eval_iters=100 eval_interval=1000 num_workers=2 attention_dropout=0.0 hidden_dropout=0.0 weight_decay=0.1
gradient_clipping=1.0 optimizer.params.lr=0.001 optimizer.params.betas=[0.9,0.999] optimizer.params.eps=1e-8
""")
NUMBERS = names("""
intermediate_size expansion_factor mlp_multiple_of rms_norm_epsilon checkpoint_num_layers pipe_parallel_size
model_parallel_size num_kv_heads warmup lr_decay_iters train_iters hidden_size num_layers num_attention_heads seq_length
""")


def _as_arguments(source: Source, translation: Translation) -> Source:
    """Its settings by Megatron-LM's names, the derived ones included."""
    theirs = {name.replace("-", "_"): value for name, value in source.values.items()}
    written = {name.replace("-", "_"): text for name, text in source.given.items()}
    source = replace(source, values={**DEFAULTS, **theirs}, given=written)
    values = {_ARGUMENTS.get(name, name): value for name, value in source.values.items()}
    given = {_ARGUMENTS.get(name, name): text for name, text in written.items()}
    for argument, (value, *because) in _derived(source).items():
        values[argument] = value
        if told := [written[name] for name in because if name in written]:
            given = {name: text for name, text in given.items() if name not in because}
            given[argument] = ", ".join(told)
    return replace(source, values=vars(megatron_parser().parse_known_args([])[0]) | values, given=given)


def _derived(source: Source) -> dict[str, tuple[Any, ...]]:
    """Arguments that its settings stand for together, each with the settings that say so."""
    get = source.get
    betas, experts = get("optimizer.params.betas"), get("moe_num_experts") or 1
    bf16 = get("precision") == "bfloat16" or bool(get("bf16.enabled")) or get("fp16.type") == "bfloat16"
    epsilon = "rms_norm_epsilon" if "rms" in str(get("norm")) else "layernorm_epsilon"
    reduced = get("fp32_allreduce") or get("data_types.grad_accum_dtype") == "fp32"
    found: dict[str, tuple[Any, ...]] = {
        "swiglu": (_is_gated(source), "activation", "mlp_type"),
        "ffn_hidden_size": (_ffn(source), "intermediate_size", "expansion_factor", "mlp_multiple_of", "mlp_type"),
        "add_bias_linear": (bool(get("use_bias_in_mlp")), "use_bias_in_mlp"),
        "add_qkv_bias": (bool(get("use_bias_in_attn_linear")), "use_bias_in_attn_linear"),
        "position_embedding_type": (_POSITIONS.get(get("pos_emb"), get("pos_emb")), "pos_emb"),
        "normalization": (_NORMS.get(get("norm"), get("norm")), "norm"),
        "layernorm_epsilon": (get(epsilon), epsilon),
        "group_query_attention": (get("num_kv_heads") is not None, "num_kv_heads"),
        "pipeline_model_parallel_size": (max(1, get("pipe_parallel_size")), "pipe_parallel_size"),
        "num_experts": (experts if experts > 1 else None, "moe_num_experts"),
        "bf16": (bf16, "precision", "bf16.enabled", "fp16.type"),
        "fp16": (not bf16 and (get("precision") == "fp16" or bool(get("fp16.enabled"))), "precision", "fp16.enabled"),
        "grad_reduce_in_bf16": (bf16 and not reduced, "fp32_allreduce", "data_types.grad_accum_dtype"),
        "micro_batch_size": (get("train_micro_batch_size_per_gpu"),),
        "adam_beta1": (betas[0], "optimizer.params.betas"),
        "adam_beta2": (betas[1], "optimizer.params.betas"),
    }
    if get("checkpoint_activations"):
        found |= {f"recompute_{name}": (value, "checkpoint_activations") for name, value in _RECOMPUTED.items()}
        found["recompute_num_layers"] = get("checkpoint_num_layers") or 1, "checkpoint_num_layers"
    for kind in ("train", "valid", "test"):
        paths, weights = get(f"{kind}_data_paths"), get(f"{kind}_data_weights")
        if paths:
            words = [word for pair in zip(map(str, weights), paths, strict=True) for word in pair] if weights else paths
            found[f"{kind}_data_path"] = words, f"{kind}_data_paths", f"{kind}_data_weights"
    if get("data_path"):
        found["data_path"] = [get("data_path")], "data_path"
    return found


_RECOMPUTED = {"granularity": "full", "method": "uniform"}


def _is_gated(source: Source) -> bool:
    return "swiglu" in (source.get("activation"), {"llama": "swiglu"}.get(source.get("mlp_type", "")))


def _ffn(source: Source) -> int | None:
    """The MLP's width in multiples of `mlp_multiple_of`; a gated one of two thirds has two of half of it."""
    hidden, multiple = source.get("hidden_size"), source.get("mlp_multiple_of") or 1
    width = source.get("intermediate_size") or (source.get("expansion_factor") or 4) * (hidden or 0)
    if source.get("mlp_type") == "llama":
        width, multiple = int(2 * hidden * 4 / 3), 256
    elif _is_gated(source):
        width = int(width * 2 / 3) // 2
    return math.ceil(width / multiple) * multiple or None


def derive(source: Source, translation: Translation) -> None:
    """What Megatron-LM's arguments become, and what only GPT-NeoX has."""
    megatron_lm.derive(source, translation)
    ranks = [source.get(f"{kind}_model_parallel_size") for kind in ("tensor", "pipeline")]
    deepspeed.set_batch(source, translation, "", math.prod(ranks))
    translation.take("trainer.log_every_n_steps", "log_interval")
    deepspeed.set_zero(source, translation, "")
    kind = source.get("activation")
    if kind not in ("gelu", "swiglu") and not _is_gated(source):
        translation.lose(source.shown("activation"), "the MLP's activation", ANOTHER_MODEL)
    if source.get("add_qkv_bias") != source.get("add_bias_linear"):
        there = "attention's projections and the MLP's differed in having a bias"
        translation.lose(f"use_bias_in_attn_linear={source.get('add_qkv_bias')}", there, ANOTHER_MODEL)
    if source.get("normalization") == "LayerNorm" and source.get("use_bias_in_norms") is False:
        translation.lose(source.shown("use_bias_in_norms"), "norms had no bias", "LayerNorms have one")
    if source.get("normalization") not in _NORMS.values():
        translation.lose(source.shown("normalization"), "the norm was of that kind", ANOTHER_MODEL)
    if {each for each in _leaves(source.get("attention_config")) if isinstance(each, str)} - {"flash", "global", "all"}:
        translation.lose(source.shown("attention_config"), "layers attended in other ways", ANOTHER_MODEL)
    hidden, layers, std = source.get("hidden_size"), source.get("num_layers"), source.get("init_method_std")
    if hidden and layers:
        stds = {"normal": std, "small_init": math.sqrt(2 / (5 * hidden)), "wang_init": 2 / layers / math.sqrt(hidden)}
        output = {**stds, "scaled_normal": std / math.sqrt(2 * layers)}
        kinds = source.get("init_method"), source.get("output_layer_init_method")
        set_init(
            translation, layers, stds.get(kinds[0]), output.get(kinds[1]), "init_method", "output_layer_init_method"
        )
    if source.get("lr_decay_style") in ("linear", "cosine"):
        translation.notes.append(
            "GPT-NeoX's rate falls towards 0 for lr_decay_iters from the end of the warmup on, and is never below "
            "min_lr; here it reaches min_lr at model.optim.sched.decay_steps"
        )
    translation.derive("model.optim.name", "adam", "optimizer.type")
    if str(source.get("optimizer.type", "adam")).lower() not in ("adam", "adamw"):
        translation.lose(source.shown("optimizer.type"), "the optimizer", "adam takes its place")


def _leaves(value: Any) -> list[Any]:
    return [leaf for each in value for leaf in _leaves(each)] if isinstance(value, list) else [value]


PROGRAM = Program(
    name="GPT-NeoX",
    rows=table(_TABLE),
    derive=derive,
    marks=("pipe_parallel_size pipe-parallel-size model_parallel_size model-parallel-size",),
    prepare=_as_arguments,
    numbers=NUMBERS,
)
