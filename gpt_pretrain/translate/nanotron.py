"""nanotron's YAML: `parallelism`, `tokens`, `optimizer`, `model.model_config` of its Llama or Qwen 2, `data_stages`.

Defaults are those of `nanotron/config/config.py` and `models_config.py`.
"""

from collections.abc import Mapping

from gpt_pretrain.translate.common import (
    set_betas,
    set_full_recomputation,
    set_saves,
    set_sizes,
    set_vocabulary_rows,
)
from gpt_pretrain.translate.hugging_face import FIELDS
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

_MODEL = "model.model_config."
_SCHEDULER = "optimizer.learning_rate_scheduler."
_SCHED = "model.optim.sched."

_TABLE: Mapping[str, Row] = {
    **becomes("""
    parallelism.tp=model.tensor_model_parallel_size .pp=model.pipeline_model_parallel_size
    .context_parallel_size=model.context_parallel_size .expert_parallel_size=model.expert_model_parallel_size
    tokens.micro_batch_size=model.micro_batch_size .sequence_length=model.encoder_seq_length
    .train_steps=trainer.max_steps optimizer.weight_decay=model.optim.weight_decay
    optimizer.optimizer_factory.adam_eps=model.optim.eps optimizer.learning_rate_scheduler.learning_rate=model.optim.lr
    .lr_warmup_steps=model.optim.sched.warmup_steps model.init_method.std=model.init_method_std
    model.model_config.no_rope_layer=model.no_rope_freq ._use_doc_masking=model.data.inter_document_masking
    model.model_config.moe_config.num_experts=model.num_moe_experts .top_k=model.moe_router_topk
    .moe_intermediate_size=model.moe_ffn_hidden_size .router_aux_loss_coef=model.moe_aux_loss_coeff
    .token_dispatcher_type=model.moe_token_dispatcher_type general.seed=model.seed
    logging.iteration_step_info_interval=trainer.log_every_n_steps
    """),
    **{f"{_MODEL}{name}": row for name, row in FIELDS.items()},
    "parallelism.tp_linear_async_communication": NoNeed("model.tp_comm_overlap overlaps more, and is chosen here"),
    "parallelism.pp_engine": NotHere("stages worked by that schedule", "they work by 1F1B", ("1f1b",)),
    "parallelism.moe_layer_recompute": NotHere("experts were recomputed", "all activations are kept"),
    "parallelism.tp_recompute_allgather": NoNeed("what is gathered is gathered again"),
    "tokens.limit_test_batches": NotHere("a test set was scored", "there is no test set", (0, None)),
    "optimizer.clip_grad": Becomes("trainer.gradient_clip_val", lambda value: value or 0.0),
    "optimizer.weight_decay_exclude_named_params": NotHere(
        "these weights did not decay", "all but biases and norms do", ([], None)
    ),
    "optimizer.zero_stage": Becomes("model.use_distributed_optimizer", {0: False, 1: True}, here="stages 0 and 1 are"),
    "optimizer.optimizer_factory.name": Becomes(
        "model.optim.name", {"adamW": "adam", "sgd": "sgd"}, there="the optimizer", here="adam takes its place"
    ),
    "optimizer.optimizer_factory.torch_adam_is_fused": NoNeed("Adam is fused here"),
    f"{_SCHEDULER}lr_warmup_style": NotHere("there was no warmup", "the rate grows linearly", ("linear",)),
    "model.dtype": Becomes("trainer.precision", {"bfloat16": "bf16", "float32": "fp32"}, here="they are BF16"),
    "model.init_method.scaling_method": NotHere(
        "output projections began that way", "they begin smaller by the root of twice the layers", ("NUM_LAYERS",)
    ),
    "model.init_method.use_mup": NotHere("widths scaled rates and initial weights", "nothing scales them"),
    "model.init_method.path": NotHere("weights came from there", "nanotron's checkpoints are not read"),
    f"{_MODEL}initializer_range": NoNeed("nanotron reads model.init_method.std"),
    f"{_MODEL}rope_interleaved {_MODEL}interleaved_rotary": NotHere("rope rotated neighbours", ANOTHER_MODEL),
    f"{_MODEL}sliding_window_size": WINDOW,
    f"{_MODEL}rope_seq_len_interpolation_factor": NotHere("rope's positions were divided by it", ANOTHER_MODEL),
    f"{_MODEL}moe_config.layers": NotHere("some layers had no experts", ANOTHER_MODEL, ([-1],)),
    f"{_MODEL}moe_config.enable_shared_expert": NotHere("an expert saw every token", ANOTHER_MODEL),
    "checkpoints.resume_checkpoint_path": NotHere("training went on from it", "nanotron's checkpoints are not read"),
    """
    parallelism.dp .tp_mode .recompute_layer tokens.batch_accumulation_per_replica .val_check_interval
    .limit_val_batches optimizer.accumulate_grad_in_fp32 optimizer.optimizer_factory.adam_beta1 .adam_beta2 data_stages
    optimizer.learning_rate_scheduler.lr_decay_style .lr_decay_steps .lr_decay_starting_step .min_decay_lr
    model.make_vocab_size_divisible_by model.model_config.z_loss_enabled .z_loss_coefficient .moe_config general.run
    checkpoints.checkpoint_interval .checkpoints_path .save_final_state tokenizer.tokenizer_name_or_path
    """: TOGETHER,
    "model.ddp_bucket_cap_mb": NoNeed("buckets are sized here (model.ddp_bucket_size)"),
    f"{_MODEL}* general.* logging.* metrics_logging.* tokenizer.*": NoNeed("training does not read it"),
    "checkpoints.* s3_upload.*": NoNeed("checkpoints have one format, in RUN_DIR/checkpoints"),
    "profiler.* lighteval.*": NoNeed("python -m gpt_pretrain.benchmark and evaluate do it"),
}
DEFAULTS = defaults("""
model.dtype=bfloat16 .make_vocab_size_divisible_by=1 model.model_config.rms_norm_eps=1e-6 .rope_theta=10000.0
.tie_word_embeddings=false .attention_bias=false general.seed=42 parallelism.tp_mode=ALL_REDUCE .pp_engine=afab
.context_parallel_size=1 .expert_parallel_size=1 tokens.val_check_interval=-1 .limit_val_batches=0
optimizer.learning_rate_scheduler.lr_warmup_steps=0 .lr_decay_style=linear checkpoints.save_final_state=true
""")
NUMBERS = names("""
parallelism.dp tokens.batch_accumulation_per_replica .val_check_interval .limit_val_batches
model.make_vocab_size_divisible_by optimizer.learning_rate_scheduler.lr_decay_steps .lr_decay_starting_step
.min_decay_lr optimizer.optimizer_factory.adam_beta1 .adam_beta2 checkpoints.checkpoint_interval
""")


def derive(source: Source, translation: Translation) -> None:
    """What depends on several settings."""
    fixed = {"normalization": "rmsnorm", "position_embedding_type": "rope", "qk_layernorm": False, "bias": False}
    for key, value in {**fixed, "activation": "swiglu", "rope_scaling_factor": None}.items():
        translation.set(f"model.{key}", value, "nanotron's Llama and Qwen 2 have no other", given=False)
    set_sizes(translation, f"{_MODEL}intermediate_size", f"{_MODEL}head_dim", f"{_MODEL}num_key_value_heads")
    tokens, divisor = source.get(f"{_MODEL}vocab_size"), "model.make_vocab_size_divisible_by"
    set_vocabulary_rows(source, translation, tokens, divisor, "parallelism.tp")
    if source.get(f"{_MODEL}z_loss_enabled"):
        translation.take("model.z_loss_coeff", f"{_MODEL}z_loss_coefficient")
    if source.get(experts := f"{_MODEL}moe_config.num_experts"):
        if not source.get(f"{_MODEL}moe_config.moe_intermediate_size"):
            how = "nanotron's default of moe_intermediate_size"
            translation.derive("model.moe_ffn_hidden_size", 1408, experts, how=how)
        there = "the softmax came before the choice of experts"
        translation.lose(source.shown(experts), there, "it comes after: another model")
    _batch(source, translation)
    _schedule(source, translation)
    _data(source, translation)
    interval, final = "checkpoints.checkpoint_interval", "checkpoints.save_final_state"
    set_saves(translation, source.get(interval), interval, saves=bool(source.get(interval)))
    translation.take("checkpoint.save_at_end", final)
    if source.get("checkpoints.checkpoints_path"):
        why = f"where the run writes ({source.shown('checkpoints.checkpoints_path')})"
        translation.up_to_you.append(("run_dir", why))


def _batch(source: Source, translation: Translation) -> None:
    tp, pp, dp = (source.get(f"parallelism.{each}") for each in ("tp", "pp", "dp"))
    steps, mode = "tokens.batch_accumulation_per_replica", "parallelism.tp_mode"
    micro = source.get("tokens.micro_batch_size")
    how = f"{micro} × {source.get(steps)} × {dp} replicas"
    batch = micro * source.get(steps) * dp
    translation.derive("model.global_batch_size", batch, "tokens.micro_batch_size", steps, "parallelism.dp", how=how)
    sequence = tp > 1 and str(source.get(mode)).upper() == "REDUCE_SCATTER"
    translation.derive("model.sequence_parallel", sequence, mode)
    processes = tp * pp * dp * source.get("parallelism.context_parallel_size")
    if "trainer.devices" not in translation.settings:
        translation.notes.append(f"the degrees make {processes} processes; trainer.devices and num_nodes are left open")
    if source.get("parallelism.recompute_layer"):
        set_full_recomputation(translation, "parallelism.recompute_layer")
    in_fp32 = "optimizer.accumulate_grad_in_fp32"
    translation.derive("model.grad_reduce_in_fp32", bool(source.get(in_fp32)), in_fp32)
    if source.get(in_fp32) is False:
        translation.lose(source.shown(in_fp32), "weights were updated in their own type", "masters are fp32")


def _schedule(source: Source, translation: Translation) -> None:
    """Warmup, a constant part where the decay begins later, and the decay, which nanotron counts by itself."""
    set_betas(translation, "optimizer.optimizer_factory.adam_beta1", "optimizer.optimizer_factory.adam_beta2")
    kind, decay, start, least = (
        f"{_SCHEDULER}{name}" for name in ("lr_decay_style", "lr_decay_steps", "lr_decay_starting_step", "min_decay_lr")
    )
    warmup, steps = source.get(f"{_SCHEDULER}lr_warmup_steps"), source.get("tokens.train_steps")
    begins = warmup if source.get(start) is None else source.get(start)
    length = steps - warmup if source.get(decay) is None else source.get(decay)
    how = f"{begins:,} + {length:,} steps of decay"
    translation.derive(f"{_SCHED}decay_steps", begins + length, decay, start, how=how)
    style = {"1-sqrt": "minus_sqrt"}.get(source.get(kind), source.get(kind))
    if begins > warmup or style == "minus_sqrt":
        translation.derive(f"{_SCHED}name", "wsd", start, kind)
        translation.derive(f"{_SCHED}wsd_decay_steps", length, decay)
        translation.derive(f"{_SCHED}wsd_decay_style", style, kind)
    else:
        translation.derive(f"{_SCHED}name", style, kind)
    value = source.get(f"{_SCHEDULER}learning_rate") if source.get(least) is None else source.get(least)
    translation.derive(f"{_SCHED}min_lr", value, least, how="" if source.get(least) is not None else "the rate itself")


def _data(source: Source, translation: Translation) -> None:
    stages = source.get("data_stages") or [{}]
    data = stages[0].get("data") or {}
    for stage in stages[1:]:
        there = f"from step {stage.get('start_training_step')} on data were others ({stage.get('name')})"
        translation.lose(f"data_stages: {stage.get('data')}", there, "one blend serves the whole run")
    if data.get("num_loading_workers") is not None:
        translation.derive("model.data.num_workers", data["num_loading_workers"], "data_stages")
    if data.get("dataset") is None:
        translation.derive("model.data.data_impl", "mock", "data_stages", how="without a dataset samples are random")
    else:
        why = "files of text (data=text) or megatron-core's indexed ones (data=mmap); nanotron's .ds files are neither"
        translation.up_to_you.append(("model.data.text_files", f"{why} ({data['dataset']})"))
    if tokenizer := source.get("tokenizer.tokenizer_name_or_path"):
        why = f"the tokenizer.json of {tokenizer}, for text"
        translation.up_to_you.append(
            ("model.tokenizer.model", f"{why} ({source.shown('tokenizer.tokenizer_name_or_path')})")
        )
    every, batches = "tokens.val_check_interval", "tokens.limit_val_batches"
    if source.get(every) > 0 and source.get(batches):
        translation.take("trainer.val_check_interval", every)
        translation.take("trainer.limit_val_batches", batches)
    else:
        translation.derive("trainer.limit_val_batches", 0, batches, every)


PROGRAM = Program(
    name="nanotron",
    rows=table(_TABLE),
    derive=derive,
    marks=("parallelism", "tokens", "optimizer"),
    defaults=DEFAULTS,
    numbers=NUMBERS,
)
