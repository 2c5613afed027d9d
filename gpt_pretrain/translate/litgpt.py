"""litgpt's pretraining YAML: `model_name` or `model_config`, `train`, `eval`, `optimizer`, with `--train.max_tokens=…`.

Defaults are those of `litgpt/pretrain.py`, `args.py` and `config.py`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

from gpt_pretrain.config.derived import padded_rows
from gpt_pretrain.translate.common import set_init, set_preset, set_saves, set_sharding, set_sizes
from gpt_pretrain.translate.hugging_face import preset_named
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
    becomes,
    defaults,
    names,
    table,
)

_MLP = {"LLaMAMLP": "swiglu", "LLaMAMoE": "swiglu", "GptNeoxMLP": "gelu"}
_TABLE: Mapping[str, Row] = {
    **becomes("""
    model_config.n_layer=model.num_layers .n_embd=model.hidden_size .n_head=model.num_attention_heads
    .block_size=model.max_position_embeddings .norm_eps=model.layernorm_epsilon .norm_qk=model.qk_layernorm
    .final_logit_softcapping=model.final_logit_softcapping
    .bias=model.bias .rotary_percentage=model.rotary_percentage .moe_intermediate_size=model.moe_ffn_hidden_size
    train.micro_batch_size=model.micro_batch_size .global_batch_size=model.global_batch_size
    .log_interval=trainer.log_every_n_steps .lr_warmup_steps=model.optim.sched.warmup_steps
    .max_norm=trainer.gradient_clip_val .min_lr=model.optim.sched.min_lr eval.interval=trainer.val_check_interval
    .initial_validation=trainer.validate_at_start optimizer.init_args.lr=model.optim.lr
    .weight_decay=model.optim.weight_decay .betas=model.optim.betas .eps=model.optim.eps seed=model.seed
    log.project=logging.wandb_project
    """),
    "model_config.norm_class_name": Becomes("model.normalization", {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}),
    "model_config.rope_base": Becomes("model.rotary_base", int),
    "model_config.n_expert": Becomes("model.num_moe_experts", lambda experts: experts or None),
    "model_config.n_expert_per_token": Becomes("model.moe_router_topk", lambda experts: experts or None),
    "model_config.parallel_residual": NotHere("attention and MLP ran side by side", ANOTHER_MODEL),
    "model_config.rope_condense_ratio": NotHere("rope's positions were divided by it", ANOTHER_MODEL, (1,)),
    "model_config.sliding_window_size": WINDOW,
    "model_config.name .hf_config* .shared_attention_norm": NoNeed("a name, or a detail of running side by side"),
    "model_config.*": NotHere("layers had it", ANOTHER_MODEL, (None, False, True, [], {}, "default")),
    "train.lr_warmup_fraction": NotHere("the warmup was a share of an epoch", "model.optim.sched.warmup_steps counts"),
    "train.max_time": Becomes(
        "trainer.max_time",
        lambda seconds: seconds and f"00:{seconds // 3600:02.0f}:{seconds // 60 % 60:02.0f}:{seconds % 60:02.0f}",
    ),
    "train.tie_embeddings": Becomes("model.share_embeddings_and_output_weights", bool),
    "train.epochs": NotHere("epochs were counted", "trainer.max_steps counts steps"),
    "eval.final_validation": NoNeed("the last step is validated"),
    "eval.max_new_tokens eval.evaluate_example": NoNeed("sample.prompt shows what the model writes"),
    "optimizer.init_args.fused": NoNeed("Adam is fused here"),
    "num_nodes": Becomes("trainer.num_nodes", only_given=True),
    "initial_checkpoint_dir": NotHere("weights came from there", "import_hf imports published ones"),
    "resume": NoNeed("a run resumes from its own run_dir (checkpoint.resume)"),
    "log.*": NoNeed("RUN_DIR has every record"),
    """
    model_name model_config.vocab_size .padded_vocab_size .padding_multiple .head_size .n_query_groups .attn_bias
    .intermediate_size .mlp_class_name .gelu_approximate model_config train.save_interval .max_tokens .max_steps
    .max_seq_length eval.max_iters optimizer optimizer.class_path precision devices data data.* tokenizer_dir out_dir
    logger_name
    """: TOGETHER,
}
_LAYERS = defaults("""
n_layer=16 n_embd=4096 n_head=32 block_size=4096 vocab_size=50254 padding_multiple=512 norm_class_name=LayerNorm
norm_eps=1e-5 norm_qk=false bias=true attn_bias=false rotary_percentage=0.25 rope_base=10000 parallel_residual=true
mlp_class_name=GptNeoxMLP gelu_approximate=none lm_head_bias=false
""")
_LLAMA = """
rotary_percentage=1.0 parallel_residual=false bias=false norm_class_name=RMSNorm mlp_class_name=LLaMAMLP
block_size=2048 vocab_size=32000 padding_multiple=64 intermediate_size=5632 n_query_groups=4
"""
_NAMED = {
    name: defaults(f"{_LLAMA} {more}")
    for name, more in (
        ("tiny-llama-1.1b", "n_layer=22 n_head=32 n_embd=2048"),
        ("micro-llama-300M", "n_layer=12 n_head=16 n_embd=1024"),
    )
}
DEFAULTS = defaults("""
train.save_interval=1000 .log_interval=1 .global_batch_size=512 .micro_batch_size=4 .max_tokens=3000000000000
.max_norm=1.0 .min_lr=4e-5 .lr_warmup_steps=2000 .tie_embeddings=false eval.interval=1000 .max_iters=100
.initial_validation=false optimizer.init_args.lr=0.001 .weight_decay=0.01 .betas=[0.9,0.999] .eps=1e-8 seed=42
""")
NUMBERS = names("""
model_config.vocab_size .padded_vocab_size .padding_multiple .head_size .n_query_groups .intermediate_size
train.save_interval .max_tokens .max_steps .max_seq_length eval.max_iters
""")


def _newer(name: str) -> str:
    """Today's name of a setting of 2024."""
    if name.startswith("model."):
        return name.replace("model.", "model_config.", 1)
    return {f"train.{old}": f"optimizer.init_args.{new}" for old, new in _OF_OPTIMIZER.items()}.get(name, name)


_OF_OPTIMIZER = {"learning_rate": "lr", "weight_decay": "weight_decay"}


def _with_layers(source: Source, translation: Translation) -> Source:
    """The values of a model that is given, or whose name is known here, with the defaults of all models."""
    values = {_newer(name): value for name, value in source.values.items()}
    given = {_newer(name): text for name, text in source.given.items()}
    if "train.beta1" in values:
        values["optimizer.init_args.betas"] = [values.pop("train.beta1"), values.pop("train.beta2", 0.95)]
        given["optimizer.init_args.betas"] = given.pop("train.beta1") + ", " + given.pop("train.beta2", "")
    layers = {name: value for name, value in values.items() if name.startswith("model_config.") and value is not None}
    named = _NAMED.get(str(values.get("model_name")))
    if layers or named is not None:
        whole = {f"model_config.{name}": value for name, value in {**_LAYERS, **(named or {})}.items()}
        values = {**values, **whole, **layers}
    return replace(source, values=values, given=given)


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    if source.get("model_config.n_layer") is None:
        set_preset(translation, preset_named(str(source.get("model_name"))), "model_name")
    else:
        _layers(source, translation)
    length = source.get("train.max_seq_length") or source.get("model_config.block_size")
    if length:
        translation.derive("model.encoder_seq_length", length, "train.max_seq_length", "model_config.block_size")
    _run(source, translation, length)
    _precision(source, translation)
    kind = str(source.get("optimizer.class_path") or source.get("optimizer") or "AdamW").rpartition(".")[2]
    translation.derive("model.optim.name", "adam", "optimizer.class_path", "optimizer")
    if kind != "AdamW":
        translation.lose(f"optimizer={kind}", "the optimizer", "adam takes its place")
    set_saves(translation, source.get("train.save_interval"), "train.save_interval", saves=True)
    if source.get("logger_name") == "wandb":
        translation.derive("logging.wandb", True, "logger_name")
    given = {
        "model.data.text_files": ("files of text (data=text) or tokens (data=mmap)", "data"),
        "model.tokenizer.model": (
            "the folder's tokenizer.json (model.tokenizer.library=file)",
            "tokenizer_dir",
        ),
        "run_dir": ("where the run writes", "out_dir"),
    }
    for key, (why, name) in given.items():
        if told := [text for each, text in source.given.items() if each == name or each.startswith(f"{name}.")]:
            translation.up_to_you.append((key, f"{why} ({', '.join(told)})"))


def _layers(source: Source, translation: Translation) -> None:
    section = "model_config."
    set_sizes(translation, f"{section}intermediate_size", f"{section}head_size", f"{section}n_query_groups")
    translation.derive("model.position_embedding_type", "rope", f"{section}rotary_percentage", how="all its models do")
    mlp, tanh = source.get(f"{section}mlp_class_name"), source.get(f"{section}gelu_approximate") == "tanh"
    if mlp in _MLP:
        value = "gelu_tanh" if mlp == "GptNeoxMLP" and tanh else _MLP[mlp]
        translation.derive("model.activation", value, f"{section}mlp_class_name", f"{section}gelu_approximate")
    else:
        translation.lose(source.shown(f"{section}mlp_class_name"), "the MLP", ANOTHER_MODEL)
    bias = bool(source.get(f"{section}attn_bias")) and not source.get(f"{section}bias")
    translation.derive("model.qkv_bias", bias, f"{section}attn_bias")
    tokens, rows = source.get(f"{section}vocab_size"), source.get(f"{section}padded_vocab_size")
    multiple = source.get(f"{section}padding_multiple")
    padded = rows or padded_rows(tokens, multiple)
    how = f"{padded:,} rows"
    translation.derive("model.vocab_size", padded, f"{section}padded_vocab_size", f"{section}vocab_size", how=how)
    translation.derive("model.make_vocab_size_divisible_by", 1, f"{section}padding_multiple", how=how)
    layers, hidden = source.get(f"{section}n_layer"), source.get(f"{section}n_embd")
    std, output = math.sqrt(2 / (5 * hidden)), 1 / math.sqrt(hidden) / layers
    set_init(translation, layers, std, output, f"{section}n_embd", f"{section}n_layer")


def _run(source: Source, translation: Translation, length: int | None) -> None:
    batch = source.get("train.global_batch_size")
    tokens, steps = source.get("train.max_tokens"), source.get("train.max_steps")
    if tokens and length:
        most = tokens // (batch * length)
        if steps and steps < most:
            translation.take("trainer.max_steps", "train.max_steps")
            translation.derive("model.optim.sched.decay_steps", most, "train.max_tokens", how="the decay's own end")
        else:
            how = f"{tokens:,} tokens / ({batch:,} × {length:,})"
            translation.derive("trainer.max_steps", most, "train.max_tokens", how=how)
    else:
        translation.take("trainer.max_tokens", "train.max_tokens")
        translation.derive("trainer.max_steps", steps, "train.max_steps")
    translation.set("model.optim.sched.name", "cosine", "litgpt has no other schedule", given=False)
    if isinstance(source.get("devices"), int):
        translation.take("trainer.devices", "devices")
    devices, nodes = translation.value("trainer.devices"), translation.value("trainer.num_nodes") or 1
    if devices:
        set_sharding(translation, "optim_grads_params" if devices * nodes > 1 else None, "devices")
        if devices > 1 and nodes > 1:
            how = "FSDP's HYBRID_SHARD: each node is a group"
            translation.derive("model.num_distributed_optimizer_instances", nodes, "num_nodes", how=how)
    batches, micro = source.get("eval.max_iters"), source.get("train.micro_batch_size")
    if batches and devices:
        samples = batches * micro * devices * nodes
        how = f"{batches} × {micro} samples of {devices * nodes} ranks / {batch}"
        translation.derive("trainer.limit_val_batches", max(1, round(samples / batch)), "eval.max_iters", how=how)
    elif batches:
        why = f"{batches} microbatches of every rank, in global batches ({source.shown('eval.max_iters')})"
        translation.up_to_you.append(("trainer.limit_val_batches", why))


def _precision(source: Source, translation: Translation) -> None:
    kind = str(source.get("precision") or "bf16-true")
    translation.derive("trainer.precision", "fp32" if kind.startswith("32") else "bf16", "precision")
    there = {
        "bf16-mixed": "weights stayed fp32, and autocast cast them for each product",
        "bf16-true": "weights and the optimizer's states were BF16 alone",
    }.get(kind)
    if there or not kind.startswith("32"):
        translation.lose(
            f"precision={kind}", there or "numbers were of that kind", "weights are BF16 with fp32 masters"
        )


PROGRAM = Program(
    name="litgpt",
    rows=table(_TABLE),
    derive=derive,
    marks=("train", "out_dir model_name model_config tokenizer_dir"),
    prepare=_with_layers,
    defaults=DEFAULTS,
    numbers=NUMBERS,
)
