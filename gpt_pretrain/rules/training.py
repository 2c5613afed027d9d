"""Cross-field rules outside the architecture: optimizer and schedule, data, trainer, checkpoints and logging.

Each rule yields one message: the keys and values in conflict, the rule, and legal values.
"""

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
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
)
from gpt_pretrain.config.errors import ConfigError, how_to_install, one_of
from gpt_pretrain.config.schema import CheckpointConfig, Config, DataConfig, OptimConfig, TrainerConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.spec.optimizers import OPTIMIZERS, names_with
from gpt_pretrain.spec.products import Resolved
from gpt_pretrain.spec.recipes import recipes_for

# The 256 bytes and the end-of-document token.
SMALLEST_BPE = 257
_ASKED = "model.optim.use_precision_aware_optimizer=true"
# Half of the gap between a number of the type and the next, divided by the number: two to minus this, at most.
_HALF_STEP = {MomentDtype.bf16: 8, MomentDtype.fp16: 11, MomentDtype.fp8: 4}
# Types whose blocks of values share a scale.
_SCALED = (MomentDtype.fp16, MomentDtype.fp8)


def training_problems(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """All problems outside the architecture; without `launch`, the rules about the world size are left out."""
    config = run.config
    yield from _optimizer(config)
    yield from _small_states(run)
    yield from _schedule(config)
    yield from _corpus(config.model.data)
    yield from _splits(config)
    yield from _tokenizer(config)
    yield from _trainer(config.trainer)
    yield from _rewinds(config)
    yield from _determinism(config)
    yield from _files(config)
    yield from _start(config.checkpoint)
    yield from _reports(config)
    if launch is not None:
        yield from _launched(config.trainer, launch)


def _optimizer(config: Config) -> Iterator[str]:
    """Ranges of the optimizer, and what the distributed one supports."""
    optim = config.model.optim
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"model.optim.betas={optim.betas} are not two numbers of at least 0 and below 1; use [0.9,0.95] or others"
    # `rules.fp8` has FP8 parameters, which need the distributed optimizer.
    if not OPTIMIZERS[optim.name].has_distributed_form and config.model.use_distributed_optimizer:
        also = " with overlap_param_gather=false" * config.model.overlap_param_gather
        also += " with use_precision_aware_optimizer=false" * optim.use_precision_aware_optimizer
        yield (
            f"model.optim.name={optim.name.name} has no distributed form in megatron-core, and "
            "model.use_distributed_optimizer=true; use "
            f"{' or '.join(names_with('has_distributed_form'))}, or use_distributed_optimizer=false{also}"
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
            f"use 0 to {decay - 1}, or set a longer decay_steps"
        )
    for name, value in (("min_lr", min_lr(optim)), ("init_lr", sched.init_lr)):
        if not 0 <= value <= optim.lr:
            yield f"model.optim.sched.{name}={value} is not between 0 and model.optim.lr={optim.lr}; set both together"
    wsd, phase = sched.name is ScheduleName.wsd, sched.wsd_decay_steps
    if wsd and phase is None:
        yield (
            "model.optim.sched.name=wsd needs model.optim.sched.wsd_decay_steps, the length of its last phase; "
            f"use wsd_decay_steps=1 to {max(1, decay - warmup)}"
        )
    if wsd and phase is not None and phase > decay - warmup > 0:
        yield (
            f"model.optim.sched.wsd_decay_steps={phase} is longer than the steps that warmup leaves of {decay_key}; "
            f"use 1 to {decay - warmup}"
        )


def _moments(optim: OptimConfig) -> Iterator[str]:
    """Types too coarse for the decay of an average in one step: it would grow with the gradients and never fall."""
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
    feature = "fp8_params with use_precision_aware_optimizer"
    if run.fp8 is not None and run.fp8.params and (why := run.fp8.recipe.why_not(feature)) is not None:
        yield (
            f"{_ASKED} with model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}: {why}; "
            f"use fp8={one_of(recipes_for('fp8_params', feature))}, or "
            "use_precision_aware_optimizer=false"
        )
    by_place = {
        "main_params_dtype": optim.main_params_dtype is MainParamsDtype.fp16,
        "exp_avg_dtype": optim.exp_avg_dtype in _SCALED,
        "exp_avg_sq_dtype": optim.exp_avg_sq_dtype in _SCALED,
    }
    if model.share_embeddings_and_output_weights and model.pipeline_model_parallel_size > 1:
        # The two stages split their buffers at different places.
        for name in (name for name, is_so in by_place.items() if is_so):
            yield (
                f"model.optim.{name}={getattr(optim, name).name} with model.share_embeddings_and_output_weights=true "
                f"and model.pipeline_model_parallel_size={model.pipeline_model_parallel_size}: its rounding depends on "
                "the place in a rank's part, and the copies on the first and the last stage would diverge; use "
                f"{'fp32' if name == 'main_params_dtype' else 'bf16 or fp32'}, or pipeline_model_parallel_size=1"
            )


def _small_states(run: Resolved) -> Iterator[str]:
    """What the precision-aware optimizer needs."""
    config, model, optim = run.config, run.model, run.model.optim
    if not optim.use_precision_aware_optimizer:
        return
    if not OPTIMIZERS[optim.name].has_small_states:
        names = " or ".join(names_with("has_small_states"))
        also = " with use_distributed_optimizer=false" * bool(model.use_distributed_optimizer)
        yield (
            f"{_ASKED} is a form of {names}, and model.optim.name={optim.name.name}; use optim.name={names}, or "
            f"use_precision_aware_optimizer=false{also}"
        )
    if not uses_distributed_optimizer(model):
        yield (
            f"{_ASKED} is a form of the distributed optimizer, and model.use_distributed_optimizer="
            f"{'null comes to false' if model.use_distributed_optimizer is None else 'false'}; "
            "use use_distributed_optimizer=true (on one GPU, too), or use_precision_aware_optimizer=false"
        )
    if config.trainer.precision is Precision.fp32:
        yield (
            f"{_ASKED} is for weights in BF16 or FP8 with masters beside them, and trainer.precision=fp32 has no "
            "masters; use precision=bf16, or false"
        )
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
    elif not all(math.isfinite(float(weight)) and float(weight) > 0 for weight in weights):
        yield f"model.data.data_prefix={shown} has a weight that is not positive; leave that path out"


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
    if not re.fullmatch(r"\s*\d*\.?\d+\s*(,\s*\d*\.?\d+\s*){0,2}", text):
        yield (
            f"model.data.splits_string={text!r} is not one to three shares of 0 or more, separated by commas; "
            'use shares such as "900,50,50"'
        )
        return
    shares = [*map(float, text.split(",")), 0.0, 0.0]
    if shares[0] == 0:
        yield f"model.data.splits_string={text!r} leaves nothing to train on; the first share must be positive"
    if shares[1] == 0 and validates:
        yield (
            f"model.data.splits_string={text!r} leaves nothing to validate on, and trainer.limit_val_batches="
            f"{config.trainer.limit_val_batches}; use a positive second share, or limit_val_batches=0"
        )


def _tokenizer(config: Config) -> Iterator[str]:
    """Which tokenizer a corpus needs."""
    tok, impl = config.model.tokenizer, config.model.data.data_impl
    if tok.library is TokenizerLibrary.none and not impl.has_tokens:
        yield (
            f"model.tokenizer.library=none cannot read text, and model.data.data_impl={impl.name} is text; "
            "use bpe, or file with its path in model.tokenizer.model"
        )
    if tok.library is TokenizerLibrary.bpe and impl.has_tokens:
        yield (
            f"model.tokenizer.library=bpe has no text to train on with model.data.data_impl={impl.name}; "
            "use none, or file with the tokenizer that made the tokens in model.tokenizer.model"
        )
    if tok.library is TokenizerLibrary.file and not tok.model:
        yield "model.tokenizer.library=file names no file; give model.tokenizer.model, the path of a tokenizer.json"
    if tok.library is TokenizerLibrary.bpe and not SMALLEST_BPE <= tok.vocab_size <= config.model.vocab_size:
        yield (
            f"model.tokenizer.vocab_size={tok.vocab_size} is not between {SMALLEST_BPE} (every byte and the end of a "
            f"document) and model.vocab_size={config.model.vocab_size}; use {SMALLEST_BPE} to {config.model.vocab_size}"
        )


def _trainer(section: TrainerConfig) -> Iterator[str]:
    """Lengths and intervals of the run."""
    try:
        limit = max_time_s(section)
    except ConfigError as error:
        yield from error.problems
    else:
        if limit == 0:
            yield f"trainer.max_time={section.max_time!r} leaves no time to train; use null for no limit"


def _rewinds(config: Config) -> Iterator[str]:
    """Going back before a loss spike needs a threshold, and checkpoints that still exist."""
    maximum, margin = config.trainer.max_spike_rewinds, config.trainer.spike_margin
    if maximum is None:
        return
    key, off = f"trainer.max_spike_rewinds={maximum}", "max_spike_rewinds=null"
    if config.trainer.spike_threshold is None:
        yield f"{key} needs spikes, and trainer.spike_threshold=null finds none; use spike_threshold=10, or {off}"
    interval, kept = config.checkpoint.save_interval, config.checkpoint.keep_last
    if interval is None:
        yield (
            f"{key} goes back to checkpoints, and checkpoint.save_interval=null leaves open how many steps lie between "
            f"them; set it, or {off}"
        )
    # The checkpoints that may lie within the margin, and one before them.
    needed = 1 if interval is None or interval < 1 else -(-margin // interval) + 1
    if kept is not None and 1 <= kept < needed:
        yield (
            f"{key} goes back to a checkpoint trainer.spike_margin={margin} steps before a spike, which may be the "
            f"last but {needed - 1}, and checkpoint.keep_last={kept}; use keep_last={needed} or more, or null for all"
        )
    if config.checkpoint.reset_fp8_state:
        yield (
            f"{key} restores FP8 scales with everything else, and checkpoint.reset_fp8_state=true drops them; use "
            f"{off} until a checkpoint is saved, then reset_fp8_state=false"
        )


def _launched(section: TrainerConfig, launch: Launch) -> Iterator[str]:
    """`trainer.devices` and `trainer.num_nodes` start nothing: they must agree with the launcher."""
    if section.devices is not None and section.devices != launch.local_world_size:
        yield (
            f"trainer.devices={section.devices}, and the launcher started {launch.local_world_size} on each node; "
            f"start with torchrun --nproc-per-node {section.devices} -m gpt_pretrain …, or leave trainer.devices out"
        )
    if section.num_nodes is not None and section.num_nodes != launch.num_nodes:
        yield (
            f"trainer.num_nodes={section.num_nodes}, and the launcher started {launch.num_nodes}; "
            f"start with torchrun --nnodes {section.num_nodes} …, or leave trainer.num_nodes out"
        )


def _determinism(config: Config) -> Iterator[str]:
    """A kernel requested by name whose result varies from run to run."""
    if config.trainer.deterministic and config.model.cross_entropy_fusion_impl is CrossEntropyFusion.native:
        yield (
            "trainer.deterministic=true excludes model.cross_entropy_fusion_impl=native, whose result varies from run "
            "to run; use cross_entropy_fusion_impl=null or linear"
        )


def _files(config: Config) -> Iterator[str]:
    """Where the run writes."""
    # os.path, because Path raises where a parent folder may not be read.
    if config.run_dir is not None and os.path.exists(config.run_dir) and not os.path.isdir(config.run_dir):
        yield f"run_dir={config.run_dir!r} is a file; name a directory"
    if config.run_dir == "":
        yield "run_dir is empty; name a directory, or null for outputs/DATE/TIME_NAME"
    if not config.name or "/" in config.name:
        yield f"name={config.name!r} becomes part of a directory's name; use at least one character, and no slash"
    if config.checkpoint.keep_every is not None and config.checkpoint.keep_last is None:
        yield (
            f"checkpoint.keep_every={config.checkpoint.keep_every} exempts checkpoints from deletion, and "
            "checkpoint.keep_last=null keeps them all; set keep_last, or keep_every=null"
        )


def _start(section: CheckpointConfig) -> Iterator[str]:
    """What the run starts from; a missing path never means a fresh start."""
    resume, init_from = section.resume, section.init_from
    if resume not in ("auto", "never") and not os.path.isdir(resume):
        yield f"checkpoint.resume={resume!r} is not an existing directory; name a checkpoint, or use auto or never"
    if init_from is not None and not os.path.isdir(init_from):
        yield f"checkpoint.init_from={init_from!r} is not an existing directory; name a checkpoint, or null"
    if init_from is not None and resume not in ("auto", "never"):
        yield (
            f"checkpoint.init_from={init_from!r} takes the weights of a checkpoint, and checkpoint.resume={resume!r} "
            "everything; use one of the two: resume=auto or never, or init_from=null"
        )


def _reports(config: Config) -> Iterator[str]:
    """Logging and the text sample."""
    # A folder wandb/, as W&B leaves where it runs, could be imported, too.
    if config.logging.wandb and not list(importlib.metadata.distributions(name="wandb")):
        yield (
            "logging.wandb=true needs the package wandb, which is not installed; "
            f"{how_to_install('wandb')}, or use logging.wandb=false"
        )
    sample = config.sample
    if sample.max_new_tokens > 0 and not sample.prompt:
        yield (
            f"sample.prompt is empty, and sample.max_new_tokens={sample.max_new_tokens}; "
            "give a text to continue, or max_new_tokens=0"
        )
