"""Cross-field rules outside the architecture: optimizer and schedule, data, trainer, checkpoints and logging."""

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from gpt_pretrain.config.choices import (
    CrossEntropyFusion,
    MainParamsDtype,
    MomentDtype,
    Precision,
    ScheduleName,
    TokenizerLibrary,
)
from gpt_pretrain.config.derived import (
    decay_steps,
    is_weight,
    max_time_s,
    min_lr,
    uses_distributed_optimizer,
    warmup_steps,
    weight_of,
)
from gpt_pretrain.config.errors import ConfigError, how_to_install, show
from gpt_pretrain.config.recipes import Use, recipes_for
from gpt_pretrain.config.schema import Config, DataConfig, OptimConfig, TrainerConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.model import refusal, refusals
from gpt_pretrain.run.fp8 import Obstacle
from gpt_pretrain.run.optimizers import OPTIMIZERS, names_with
from gpt_pretrain.run.products import Resolved

# The 256 bytes and the end-of-document token.
SMALLEST_BPE = 257
_ASKED = "model.optim.use_precision_aware_optimizer=true"
# Half of the relative gap between neighboring numbers of a type is at most two to the minus this.
_HALF_STEP = {MomentDtype.bf16: 8, MomentDtype.fp16: 11, MomentDtype.fp8: 4}
# Types whose blocks of values share a scale.
_SCALED = (MomentDtype.fp16, MomentDtype.fp8)


def training_problems(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """All problems outside the architecture; without `launch`, none about the world size."""
    config = run.config
    yield from _optimizer(config)
    yield from _small_states(run)
    yield from _schedule(config)
    yield from _corpus(config.model.data)
    yield from _splits(config)
    yield from _tokenizer(config)
    yield from _trainer(config)
    yield from _rewinds(config)
    yield from _files(config)
    yield from _start(config)
    yield from _reports(config)
    if launch is not None:
        yield from _launched(config.trainer, launch)


def _optimizer(config: Config) -> Iterator[str]:
    """Adam's decay rates, and optimizers that the distributed one does not support."""
    optim = config.model.optim
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"model.optim.betas={optim.betas} are not two numbers of at least 0 and below 1; use [0.9,0.95] or others"
    # `rules.fp8` has FP8 parameters, which need the distributed optimizer.
    if not OPTIMIZERS[optim.name].has_distributed_form and config.model.use_distributed_optimizer:
        off = "model.use_distributed_optimizer=false"
        if config.model.overlap_param_gather:
            off += " with model.overlap_param_gather=false"
        if optim.use_precision_aware_optimizer:
            off += " with model.optim.use_precision_aware_optimizer=false"
        asked, why = f"model.optim.name={optim.name.name}", "megatron-core has no distributed form of it"
        ways = names_with("has_distributed_form"), off
        yield refusal(asked, "model.use_distributed_optimizer=true", why, *ways)
    tp = config.model.tensor_model_parallel_size
    if OPTIMIZERS[optim.name].needs_whole_matrices and tp > 1:
        why = "it needs whole matrices, which tensor parallelism cuts"
        yield refusal(
            f"model.optim.name={optim.name.name}",
            f"model.tensor_model_parallel_size={tp}",
            why,
            "model.optim.name=adam",
            "model.tensor_model_parallel_size=1",
        )


def _schedule(config: Config) -> Iterator[str]:
    """What OptimizerParamScheduler asserts."""
    optim, sched = config.model.optim, config.model.optim.sched
    decay, warmup = decay_steps(config), warmup_steps(config)
    decay_key = f"model.optim.sched.decay_steps={decay}"
    if sched.decay_steps is None:
        decay_key = f"trainer.max_steps={decay} (decay_steps=null)"
    if 0 < decay <= warmup:
        yield (
            f"model.optim.sched.warmup_steps={warmup} is not below {decay_key}; "
            f"use {'0' if decay == 1 else f'0 to {decay - 1}'}, or set a longer decay_steps"
        )
    for name, value in (("min_lr", min_lr(optim)), ("init_lr", sched.init_lr)):
        if not 0 <= value <= optim.lr:
            yield f"model.optim.sched.{name}={value} is not between 0 and model.optim.lr={optim.lr}; set both together"
    wsd, phase = sched.name is ScheduleName.wsd, sched.wsd_decay_steps
    if wsd and phase is None:
        yield (
            "model.optim.sched.name=wsd needs model.optim.sched.wsd_decay_steps, the length of its last phase; "
            f"use model.optim.sched.wsd_decay_steps=1 to {max(1, decay - warmup)}"
        )
    if wsd and phase is not None and phase > decay - warmup > 0:
        yield (
            f"model.optim.sched.wsd_decay_steps={phase} is longer than the steps that warmup leaves of {decay_key}; "
            f"use 1 to {decay - warmup}"
        )


def _moments(optim: OptimConfig) -> Iterator[str]:
    """Types too coarse for one step's decay of a moving average, which would grow with the gradients and never fall."""
    never_falls = "rounded to the nearest in each step, it grows with the gradients and never falls again"
    dtypes = {"exp_avg_dtype": optim.exp_avg_dtype, "exp_avg_sq_dtype": optim.exp_avg_sq_dtype}
    if dtypes["exp_avg_sq_dtype"] is MomentDtype.fp8:
        yield (
            "model.optim.exp_avg_sq_dtype=fp8: E4M3 has 4 bits, too few for a second moment with usual "
            f"betas: {never_falls}; use fp16, bf16 or fp32"
        )
        del dtypes["exp_avg_sq_dtype"]
    # Another rule checks the number and the range of betas.
    for (name, dtype), beta in zip(dtypes.items(), optim.betas, strict=False):
        bits = _HALF_STEP.get(dtype)
        if bits is None or 1 - beta >= 2.0**-bits:
            continue
        wider = [other.name for other, more in _HALF_STEP.items() if more > bits and 1 - beta >= 2.0**-more]
        yield (
            f"model.optim.{name}={dtype.name} with a beta of {beta:g} (model.optim.betas): a step removes "
            f"{1 - beta:.2g} of the average, less than half of the gap between two numbers of {dtype.name} (up to "
            f"2^-{bits}): {never_falls}; use {', '.join([*wider, 'fp32'])}, or a beta of at most {1 - 2.0**-bits}"
        )


def _untested(run: Resolved) -> Iterator[str]:
    """Combinations that no test has shown to train."""
    model, optim = run.model, run.model.optim
    use = Use.fp8_params_and_precision_aware_optimizer
    if run.fp8 is not None and run.fp8.params and (why := run.fp8.recipe.why_not(use)) is not None:
        fp8 = f"model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}"
        ways = f"fp8={recipes_for(Use.fp8_params, use)}", "model.optim.use_precision_aware_optimizer=false"
        yield refusal(_ASKED, fp8, why, *ways)
    if not (model.share_embeddings_and_output_weights and model.pipeline_model_parallel_size > 1):
        return
    shared = (
        "model.share_embeddings_and_output_weights=true and "
        f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}"
    )
    # The two stages split their buffers at different places.
    why = "rounding depends on the place in a rank's part, and the copies on the first and last stage would diverge"
    for name, is_rounded, wider in (
        ("main_params_dtype", optim.main_params_dtype is MainParamsDtype.fp16, "fp32"),
        ("exp_avg_dtype", optim.exp_avg_dtype in _SCALED, "bf16 or fp32"),
        ("exp_avg_sq_dtype", optim.exp_avg_sq_dtype in _SCALED, "bf16 or fp32"),
    ):
        if is_rounded:
            asked = f"model.optim.{name}={getattr(optim, name).name}"
            yield refusal(asked, shared, why, wider, "model.pipeline_model_parallel_size=1")


def _small_states(run: Resolved) -> Iterator[str]:
    """What the precision-aware optimizer needs."""
    model, optim, off = run.model, run.model.optim, "model.optim.use_precision_aware_optimizer=false"
    if not optim.use_precision_aware_optimizer:
        return
    if not OPTIMIZERS[optim.name].has_small_states:
        names = names_with("has_small_states")
        unsharded = not OPTIMIZERS[optim.name].has_distributed_form and model.use_distributed_optimizer
        also = " with model.use_distributed_optimizer=false" if unsharded else ""
        asked = f"model.optim.name={optim.name.name}"
        yield refusal(_ASKED, asked, f"it is a form of {names}", f"model.optim.name={names}", off + also)
    if not uses_distributed_optimizer(model):
        why = "it is a form of the distributed optimizer"
        if model.use_distributed_optimizer is None:
            why += ", which null leaves out here"
        sharded = f"model.use_distributed_optimizer={show(model.use_distributed_optimizer)}"
        yield refusal(_ASKED, sharded, why, "model.use_distributed_optimizer=true (on one GPU, too)", off)
    if run.config.trainer.precision is Precision.fp32:
        why = "it needs weights in BF16 or FP8 with masters beside them"
        yield refusal(_ASKED, "trainer.precision=fp32", why, "trainer.precision=bf16", off)
    yield from _moments(optim)
    yield from _untested(run)


def _prefixes(prefixes: list[Any]) -> Iterator[str]:
    """Paths alone, or weights and paths alternating (megatron-core's get_blend_from_list)."""
    if not any(is_weight(entry) for entry in prefixes):
        return
    weights, paths = prefixes[::2], prefixes[1::2]
    shown = "[" + ",".join(map(str, prefixes)) + "]"
    if len(weights) != len(paths) or not all(map(is_weight, weights)) or any(map(is_weight, paths)):
        yield (
            f"model.data.data_prefix={shown} mixes weights and paths; "
            "give paths alone, or alternate weights and paths: [0.7,web,0.3,code]"
        )
    elif not all(0 < (weight_of(weight) or 0) < math.inf for weight in weights):
        yield f"model.data.data_prefix={shown} has a weight that is not positive, or endless; leave that path out"


def _corpus(data: DataConfig) -> Iterator[str]:
    """Each kind of corpus needs its own key."""
    name = data.data_impl.files_key
    if name is not None and not getattr(data, name):
        yield f"model.data.data_impl={data.data_impl.name} has no corpus; name it in model.data.{name}=[…]"
    yield from _prefixes(data.data_prefix)
    if not data.text_key:
        yield "model.data.text_key is empty; name the field that holds the text"


def _splits(config: Config) -> Iterator[str]:
    """Shares of training, validation and test."""
    text, validates = config.model.data.splits_string, config.trainer.limit_val_batches > 0
    # megatron-core picks the numbers out of any string ("-5" becomes 5); here it is read whole.
    if not re.fullmatch(r"\s*\d*\.?\d+\s*(,\s*\d*\.?\d+\s*){0,2}", text, re.ASCII):
        yield (
            f"model.data.splits_string={text!r} is not one to three shares of 0 or more, separated by commas; "
            'use shares such as "900,50,50"'
        )
        return
    shares = [*map(float, text.split(",")), 0.0, 0.0]
    if math.isinf(sum(shares)):
        yield 'model.data.splits_string is beyond any number; use shares such as "900,50,50"'
        return
    if shares[0] == 0:
        yield f"model.data.splits_string={text!r} leaves nothing to train on; the first share must be positive"
    if shares[1] == 0 and validates:
        yield (
            f"model.data.splits_string={text!r} leaves nothing to validate on, and trainer.limit_val_batches="
            f"{config.trainer.limit_val_batches}; use a positive second share, or trainer.limit_val_batches=0"
        )


def _tokenizer(config: Config) -> Iterator[str]:
    """Which tokenizer a corpus needs."""
    tok, impl = config.model.tokenizer, config.model.data.data_impl
    data = f"model.data.data_impl={impl.name}"
    if tok.library is TokenizerLibrary.none and not impl.has_tokens:
        ways = "bpe", "file with its path in model.tokenizer.model"
        yield refusal("model.tokenizer.library=none", data, "it cannot read text", *ways)
    if tok.library is TokenizerLibrary.bpe and impl.has_tokens:
        ways = "none", "file with the tokenizer that made the tokens in model.tokenizer.model"
        yield refusal("model.tokenizer.library=bpe", data, "there is no text to train it on", *ways)
    if tok.library is TokenizerLibrary.file and not tok.model:
        yield "model.tokenizer.library=file names no file; give model.tokenizer.model, the path of a tokenizer.json"
    if tok.library is TokenizerLibrary.bpe and not SMALLEST_BPE <= tok.vocab_size <= config.model.vocab_size:
        yield (
            f"model.tokenizer.vocab_size={tok.vocab_size} is not between {SMALLEST_BPE} (every byte and the end of a "
            f"document) and model.vocab_size={config.model.vocab_size}; use {SMALLEST_BPE} to {config.model.vocab_size}"
        )


def _trainer(config: Config) -> Iterator[str]:
    """The time limit, and a kernel requested by name whose result varies from run to run."""
    try:
        if max_time_s(config.trainer) == 0:
            yield f"trainer.max_time={config.trainer.max_time!r} leaves no time to train; use null for no limit"
    except ConfigError as error:
        yield from error.problems
    if config.trainer.deterministic and config.model.cross_entropy_fusion_impl is CrossEntropyFusion.native:
        native, why = "model.cross_entropy_fusion_impl=native", "its result varies from run to run"
        yield refusal("trainer.deterministic=true", native, why, "model.cross_entropy_fusion_impl=null or linear")


def _rewinds(config: Config) -> Iterator[str]:
    """Rewinding before a loss spike needs a threshold, and checkpoints that still exist."""
    if config.trainer.max_spike_rewinds is not None:
        asked = f"trainer.max_spike_rewinds={config.trainer.max_spike_rewinds}"
        yield from refusals(asked, _rewind_obstacles(config), "trainer.max_spike_rewinds=null")


def _rewind_obstacles(config: Config) -> Iterator[Obstacle]:
    if config.trainer.spike_threshold is None:
        yield "trainer.spike_threshold=null", "no spikes are found", "trainer.spike_threshold=10"
    margin, interval, kept = config.trainer.spike_margin, config.checkpoint.save_interval, config.checkpoint.keep_last
    if interval is None:
        why = "the number of steps between checkpoints must be known"
        yield "checkpoint.save_interval=null", why, "a number for save_interval"
    # The checkpoints that may lie within the margin, and one before them.
    needed = 1 if interval is None or interval < 1 else -(-margin // interval) + 1
    if kept is not None and 1 <= kept < needed:
        why = f"the checkpoint trainer.spike_margin={margin} steps before a spike may be the last but {needed - 1}"
        yield f"checkpoint.keep_last={kept}", why, f"checkpoint.keep_last={needed} or null"
    if config.checkpoint.reset_fp8_state:
        way = "checkpoint.reset_fp8_state=false once a checkpoint is saved"
        yield "checkpoint.reset_fp8_state=true", "a rewind restores FP8 scales with everything else", way


def asked_launch(section: TrainerConfig, launch: Launch) -> Launch:
    """The launch that `trainer.devices` and `trainer.num_nodes` ask for.

    The layout and the batch have to fit this one: if another was started, its number of processes is the only mistake.
    """
    devices = max(1, section.devices or launch.local_world_size)
    num_nodes = max(1, section.num_nodes or launch.num_nodes)
    return replace(launch, local_world_size=devices, world_size=devices * num_nodes)


def _launched(section: TrainerConfig, launch: Launch) -> Iterator[str]:
    """`trainer.devices` and `trainer.num_nodes` start nothing: they must agree with the launcher."""
    asked = asked_launch(section, launch)
    if asked.local_world_size != launch.local_world_size:
        yield (
            f"trainer.devices={section.devices}, and the launcher started {launch.local_world_size} on each node; "
            f"start with torchrun --nproc-per-node {section.devices} -m gpt_pretrain …, or set trainer.devices=null"
        )
    if asked.num_nodes != launch.num_nodes:
        yield (
            f"trainer.num_nodes={section.num_nodes}, and the launcher started {launch.num_nodes}; "
            f"start with torchrun --nnodes {section.num_nodes} …, or set trainer.num_nodes=null"
        )


def _files(config: Config) -> Iterator[str]:
    """Where the run writes."""
    # os.path, because Path raises if a parent folder is not readable.
    if config.run_dir is not None and os.path.exists(config.run_dir) and not os.path.isdir(config.run_dir):
        yield f"run_dir={config.run_dir!r} is a file; name a directory"
    if config.run_dir == "":
        yield "run_dir is empty; name a directory, or null for outputs/DATE/TIME_NAME"
    if not config.name or "/" in config.name:
        yield f"name={config.name!r} becomes part of a directory's name; use at least one character, and no slash"
    if config.checkpoint.keep_every is not None and config.checkpoint.keep_last is None:
        yield (
            f"checkpoint.keep_every={config.checkpoint.keep_every} exempts checkpoints from deletion, and "
            "checkpoint.keep_last=null keeps them all; set keep_last, or checkpoint.keep_every=null"
        )


def _start(config: Config) -> Iterator[str]:
    """What the run starts from; a missing path never means a fresh start."""
    resume, init_from = config.checkpoint.resume, config.checkpoint.init_from
    # A run with checkpoints decides itself: it may have gone on from one that is not kept any more.
    has_own = config.run_dir is not None and os.path.isdir(os.path.join(config.run_dir, "checkpoints"))
    if resume not in ("auto", "never") and not has_own and not os.path.isdir(resume):
        yield f"checkpoint.resume={resume!r} is not an existing directory; name a checkpoint, or use auto or never"
    if init_from is not None and not has_own and not os.path.isdir(init_from):
        yield f"checkpoint.init_from={init_from!r} is not an existing directory; name a checkpoint, or null"
    if init_from is not None and resume not in ("auto", "never"):
        why = "the one takes only the weights of a checkpoint, the other everything"
        ways = "checkpoint.resume=auto or never", "checkpoint.init_from=null"
        yield refusal(f"checkpoint.init_from={init_from!r}", f"checkpoint.resume={resume!r}", why, *ways)


def _reports(config: Config) -> Iterator[str]:
    """Logging and the text sample."""
    # An import could find a folder wandb/ that W&B has left.
    if config.logging.wandb and not list(importlib.metadata.distributions(name="wandb")):
        yield (
            "logging.wandb=true needs the package wandb, which is not installed; "
            f"{how_to_install('wandb')}, or use logging.wandb=false"
        )
    sample = config.sample
    if sample.max_new_tokens > 0 and not sample.prompt:
        yield (
            f"sample.prompt is empty, and sample.max_new_tokens={sample.max_new_tokens}; "
            "give a text to continue, or sample.max_new_tokens=0"
        )
