"""What a run prints before it trains: model, layout, precision, batch, data, kernels, places, and what is unusual."""

from collections.abc import Mapping
from pathlib import Path

from gpt_pretrain.checkpoint.load import VerifiedCheckpoint
from gpt_pretrain.checkpoint.state import keeps_fp8_state
from gpt_pretrain.config.choices import Fp8ProofMode, LayerName
from gpt_pretrain.config.derived import (
    ffn_hidden_size,
    flops_per_token,
    layers_with_value_embeddings,
    moe_ffn_hidden_size,
    num_query_groups,
    padded_vocab_size,
    shards_gradients,
    shards_weights,
    uses_distributed_optimizer,
    uses_yarn,
)
from gpt_pretrain.config.errors import ConfigError, counted, show, written
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict, load_saved_config
from gpt_pretrain.config.mixtures import describe_lengths
from gpt_pretrain.config.schedule import batch_grows, rates_in_tokens
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.data.text_bytes import why_unknown
from gpt_pretrain.extend.code import unread_keys
from gpt_pretrain.extend.registry import REGISTERED
from gpt_pretrain.features.mup import describe_mup
from gpt_pretrain.features.small_states import describe_states
from gpt_pretrain.megatron.core_fields import params_dtype
from gpt_pretrain.plan.forecast import describe_saves
from gpt_pretrain.plan.schedule import RunSchedule, describe_batches, plan_steps
from gpt_pretrain.report.console import RunConsole
from gpt_pretrain.rules.machine import machine_notes
from gpt_pretrain.run.kernels import describe_kernels
from gpt_pretrain.run.products import describe_kept_out
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.setup import Setup

# Changed settings that a resume lists; the others are counted.
_MAX_CHANGES = 8
# Keys that may differ between the starts of one run without changing what it trains.
_OF_A_START = ("run_dir", "checkpoint.resume", "plan.", "benchmark.", "compare.", "coordinate_check.")


def open_console(setup: Setup, lock_note: str | None) -> RunConsole:
    """Prints the header of a run, its warnings and its notes; rank 0 calls it."""
    config, start, done = setup.config, setup.start, setup.progress.step
    console = RunConsole(max_steps=setup.last_step, start_step=done)
    console.print_header(config.name, describe_run(setup))
    for warning in (
        *machine_notes(setup.spec),
        *unread_keys(setup.config),
        *(() if start is None else start.warnings),
    ):
        console.warning(warning)
    for note in (*(() if start is None else start.notes), *setup.notes):
        console.note(note)
    if start is not None and not start.weights_only:
        changes = describe_changes(config, start.checkpoint.path)
        if changes is not None:
            console.note(changes)
        if config.checkpoint.reset_fp8_state:
            _tell_reset(console, setup.spec, start.checkpoint)
    if setup.corpus.tokenizer is None and config.sample.max_new_tokens > 0:
        console.note("no text sample at the end: model.tokenizer.library=none has no text")
    if lock_note is not None:
        console.note(lock_note)
    if unfinished := _left(setup).unfinished:
        console.warning(unfinished)
    if done >= setup.last_step:
        console.note(f"the run has done {done} steps, and {_end_key(config)}; raise it to continue")
    return console


def _end_key(config: Config) -> str:
    """The key that ends the run."""
    name = "max_steps" if config.trainer.max_tokens is None else "max_tokens"
    return f"trainer.{name}={getattr(config.trainer, name)}"


def _left(setup: Setup) -> RunSchedule:
    """The steps that this start trains."""
    return plan_steps(setup.spec, trained=setup.progress.trained(setup.spec.model.encoder_seq_length))


def _describe_batch(setup: Setup) -> dict[str, str]:
    spec, model, left = setup.spec, setup.spec.model, _left(setup)
    tokens = model.global_batch_size * model.encoder_seq_length
    described = {
        "global": f"{model.global_batch_size} samples × {model.encoder_seq_length} tokens = {tokens:,} tokens per step",
        "per rank": f"{counted(spec.layout.num_microbatches, 'microbatch', 'es')} of {model.micro_batch_size}",
    }
    if lengths := describe_lengths(model.data, model.encoder_seq_length):
        described["sequence length"] = lengths
    if batch_grows(model) and left.stages:
        described["schedule"] = describe_batches(left)
    if batch_grows(model) or rates_in_tokens(setup.config):
        described["all steps"] = f"{left.num_steps:,} steps, {left.num_tokens:,} tokens"
        described["learning rate"] = left.rates
    return described


def _tell_reset(console: RunConsole, spec: RunSpec, checkpoint: VerifiedCheckpoint) -> None:
    """What `checkpoint.reset_fp8_state` did; a run that has dropped its scales is requeued with the same command."""
    key, manifest = "checkpoint.reset_fp8_state=true", checkpoint.manifest
    if not manifest.fp8:
        console.note(f"{key} is ignored: the checkpoint holds no FP8 scales")
    elif keeps_fp8_state(checkpoint.path, spec.fp8, manifest.fp8, reset=True, was_reset=manifest.has_reset_fp8_state):
        console.note(
            f"{key} is ignored: an earlier start dropped the scales, and the checkpoint holds those collected since; "
            "to drop them again, save a checkpoint without it first"
        )
    else:
        console.warning(f"FP8 scales and amax histories of the checkpoint are dropped: {key}")


def describe_changes(config: Config, checkpoint: Path) -> str | None:
    """One line on the keys that changed since a checkpoint's run was last started; None if none did."""
    path = checkpoint.parent.parent / "config.yaml"
    try:
        saved = dict(flatten(config_to_dict(load_saved_config(path))))
    except ConfigError as error:
        # Another version's file. That is no reason to stop: what must be equal is in the checkpoint itself.
        more = f" (and {len(error.problems) - 1} more)" if len(error.problems) > 1 else ""
        return f"cannot tell what this start changes: {error.problems[0].partition(';')[0]}{more}"
    present = dict(flatten(config_to_dict(config)))
    changes = [
        f"{key}: {written(saved[key])} → {written(value)}"
        for key, value in present.items()
        if value != saved[key] and not key.startswith(_OF_A_START)
    ]
    if not changes:
        return None
    more = f", and {len(changes) - _MAX_CHANGES} more" if len(changes) > _MAX_CHANGES else ""
    return f"changed since the last start: {', '.join(changes[:_MAX_CHANGES])}{more}"


def describe_positions(model: ModelConfig) -> str:
    """Positions, what stretches them, and the windows that layers see of a sequence."""
    text = model.position_embedding_type.name
    if uses_yarn(model):
        text += f" ({model.yarn_original_max_position_embeddings:,} tokens stretched by YaRN)"
    if valued := layers_with_value_embeddings(model):
        text += f", {model.value_embedding_mult:g} × value embeddings in {counted(len(valued), 'layer')}"
    if model.window_size is not None:
        layers = "all" if (have_it := model.window_attn_skip_freq) is None else f"{sum(have_it)}"
        text += f", windows of {model.window_size[0] + 1:,} tokens in {layers} layers"
    return text


def _describe_flops(setup: Setup) -> str:
    model, attended = setup.spec.model, setup.train_data.attended
    lengths = "causal attention halved"
    if model.window_size is not None:
        lengths += ", what windows hide left out"
    if round(attended) != model.encoder_seq_length:
        lengths += f", to documents or pieces of samples of {attended:,.0f} tokens on average"
    return f"{flops_per_token(model, attended):.3g} ({lengths})"


def _describe_data(setup: Setup) -> dict[str, str]:
    model, corpus = setup.spec.model, setup.corpus
    # Presets for eight and more GPUs turn it off, because their default corpus is too small.
    off = {"validation": "off (trainer.limit_val_batches=0)"} if setup.config.trainer.limit_val_batches == 0 else {}
    if corpus.is_mock:
        return {"corpus": "random tokens", **off}
    epochs = setup.train_data.epochs
    of_sources = {
        f"source {source.name}": f"{source.size.num_tokens:,} tokens in {source.size.num_documents:,} documents, "
        f"{epochs[source.name]:.2f} epochs"
        for source in corpus.training.sources
    }
    described = {
        "corpus": f"{model.data.data_impl.name}, {counted(len(corpus.files), '.bin/.idx pair')}",
        "training": f"{corpus.train.num_tokens:,} tokens in {corpus.train.num_documents:,} documents, "
        f"{setup.train_data.num_epochs:.2f} epochs{' at most' if len(of_sources) > 1 else ''}",
        **(of_sources if len(of_sources) > 1 else {}),
        "validation": f"{corpus.valid.num_tokens:,} tokens in {corpus.valid.num_documents:,} documents",
        **off,
    }
    if corpus.tokenizer is not None:
        described["tokenizer"] = f"{model.tokenizer.library.name}, {corpus.tokenizer.vocab_size:,} tokens"
    if not off and (reason := why_unknown(corpus.tokenizer)) is not None:
        described["bits per byte"] = f"not known: {reason}"
    return described


def _describe_places(setup: Setup) -> dict[str, str]:
    done, last, start = setup.progress.step, setup.last_step, setup.start
    steps = f"{done} → {last}" if done < last else f"{done} done, {_end_key(setup.config)}"
    places = {"directory": str(setup.run_dir), "steps": steps}
    if REGISTERED:
        places["extensions"] = ", ".join(f"{each.kind} {each.name} ({each.module})" for each in REGISTERED)
    if start is not None:
        places["weights from" if start.weights_only else "resumed from"] = str(start.checkpoint.path)
    return places


def describe_fp8(spec: RunSpec) -> str:
    """A run's FP8 in one line: recipe, formats, coverage."""
    settings = spec.fp8
    if settings is None:
        return "off"
    parts = [settings.recipe.preset, "E4M3 forward, E5M2 gradients" if settings.hybrid else "E4M3"]
    if settings.recipe.keeps_history:
        parts.append(f"amax history {settings.amax_history_len} ({settings.amax_compute_algo.name})")
        parts += [f"margin {settings.margin}"] if settings.margin else []
    parts += ["weights stored and gathered in FP8"] if settings.params else []
    parts += ["FP8 attention"] if settings.dot_product_attention else []
    parts += [] if settings.wgrad else ["weight gradients not in FP8"]
    if spec.model.layer is LayerName.gpt:
        parts += describe_kept_out(spec)
        parts.append(f"{spec.fp8_flops_share:.1%} of the FLOPs of matrix products")
    else:
        parts.append(f"the proof finds the linear layers of model.layer={spec.model.layer.name}")
    if spec.config.logging.fp8_proof is Fp8ProofMode.never:
        parts.append("UNPROVEN (logging.fp8_proof=never)")
    elif spec.kernels.cuda_graph_impl is not None:
        # Chosen for a run of small layers, whatever logging.fp8_proof_interval says.
        parts.append("proven in the first step, and not watched in replayed ones (model.cuda_graph_impl=none: always)")
    return ("emulated, " if settings.emulate else "") + ", ".join(parts)


def _describe_sharding(model: ModelConfig) -> str:
    instances = model.num_distributed_optimizer_instances
    groups = f" in each of {instances} groups of ranks" if instances > 1 else ""
    if shards_weights(model):
        return f", weights, gradients and optimizer states sharded{groups}"
    if shards_gradients(model):
        return f", gradients and optimizer states sharded{groups}"
    return ", distributed optimizer" if uses_distributed_optimizer(model) else ""


def describe_run(setup: Setup) -> dict[str, Mapping[str, str]]:
    """Section → name → value, in the order of the header."""
    spec = setup.spec
    model, launch, platform = spec.model, spec.launch, spec.platform
    vp = model.virtual_pipeline_model_parallel_size
    layout = {
        "TP": str(model.tensor_model_parallel_size) + (" + sequence parallel" if model.sequence_parallel else ""),
        "PP": str(model.pipeline_model_parallel_size) + (f", interleaved × {vp}" if vp else ""),
        "CP": str(model.context_parallel_size),
        "EP": str(model.expert_model_parallel_size),
        "DP": str(spec.layout.dp) + _describe_sharding(model),
    }
    mlp = f"MLP {ffn_hidden_size(model)}"
    if model.num_moe_experts is not None:
        mlp = f"{model.num_moe_experts} experts {moe_ffn_hidden_size(model)}, {model.moe_router_topk} a token,"
    return {
        "model": {
            "layers": f"{model.num_layers} of width {model.hidden_size}, {model.normalization.name}, "
            f"{mlp} {model.activation.name}",
            "attention": f"{model.num_attention_heads} heads, {num_query_groups(model)} key/value groups, "
            f"{describe_positions(model)}",
            "vocabulary": f"{model.vocab_size:,}, padded to {padded_vocab_size(model):,}",
            "parameters": f"{setup.trainable.model.num_parameters:,}",
            **({"logits": f"capped at ±{show(cap)}"} if (cap := model.final_logit_softcapping) is not None else {}),
            **({"muP": describe_mup(model)} if model.use_mup else {}),
            "FLOPs per token": _describe_flops(setup),
        },
        "layout": {
            "processes": f"{launch.world_size} on {counted(launch.num_nodes, 'node')}, {platform.device_name}",
            "parallel": ", ".join(f"{name} {size}" for name, size in layout.items() if size != "1") or "none",
        },
        "precision": {
            "parameters": params_dtype(spec).value,
            "gradients": "float32" if model.grad_reduce_in_fp32 else "as parameters",
            "fp8": describe_fp8(spec),
            **({"optimizer": describe_states(model.optim)} if model.optim.use_precision_aware_optimizer else {}),
        },
        "checkpoints": {"saved": describe_saves(spec.config) or "never"},
        "batch": _describe_batch(setup),
        "data": _describe_data(setup),
        "kernels": describe_kernels(spec.kernels, platform),
        "run": _describe_places(setup),
    }
