"""Cross-field rules about data, trainer, checkpoints and logging.

Each rule yields one message: the keys and values in conflict, the rule, and legal values.
"""

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from gpt_pretrain.config.choices import CrossEntropyFusion, TokenizerLibrary
from gpt_pretrain.config.derived import is_weight, max_time_s
from gpt_pretrain.config.errors import ConfigError, how_to_install
from gpt_pretrain.config.schema import CheckpointConfig, Config, DataConfig, TokenizerConfig, TrainerConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.optimizer import at_least

# The 256 bytes and the end-of-document token.
SMALLEST_BPE = 257


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


def corpus(data: DataConfig) -> Iterator[str]:
    """Each kind of corpus needs its own key."""
    name = data.data_impl.files_key
    if name is not None and not getattr(data, name):
        yield f"model.data.data_impl={data.data_impl.name} has no corpus; name it in model.data.{name}=[…]"
    yield from _prefixes(data.data_prefix)
    yield from at_least(data, "model.data", 0, "num_workers")
    yield from at_least(data, "model.data", 1, "num_dataset_builder_threads")
    if not data.text_key:
        yield "model.data.text_key is empty; name the field that holds the text"


def splits(config: Config) -> Iterator[str]:
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


def tokenizer(config: Config) -> Iterator[str]:
    """Which tokenizer a corpus needs."""
    tok: TokenizerConfig = config.model.tokenizer
    impl = config.model.data.data_impl
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


def trainer(section: TrainerConfig) -> Iterator[str]:
    """Lengths and intervals of the run."""
    yield from at_least(section, "trainer", 1, "max_steps", "log_every_n_steps", "val_check_interval", "hang_timeout")
    yield from at_least(section, "trainer", 0, "limit_val_batches", "gc_interval", "gradient_clip_val")
    yield from at_least(section, "trainer", 1, "max_skipped_steps", "spike_threshold")
    yield from at_least(section, "trainer", 1, "max_spike_rewinds", "spike_margin")
    try:
        limit = max_time_s(section)
    except ConfigError as error:
        yield from error.problems
    else:
        if limit == 0:
            yield f"trainer.max_time={section.max_time!r} leaves no time to train; use null for no limit"


def rewinds(config: Config) -> Iterator[str]:
    """What going back behind a loss spike needs: a threshold, and checkpoints that still exist."""
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
    # The checkpoints that can lie within the margin, and the one before them.
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


def launched(section: TrainerConfig, launch: Launch) -> Iterator[str]:
    """`trainer.devices` and `trainer.num_nodes` state what the launcher did; they start nothing."""
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


def determinism(config: Config) -> Iterator[str]:
    """Kernels requested by name whose results vary from run to run."""
    if config.trainer.deterministic and config.model.cross_entropy_fusion_impl is CrossEntropyFusion.native:
        yield (
            "trainer.deterministic=true excludes model.cross_entropy_fusion_impl=native, whose result varies from run "
            "to run; use cross_entropy_fusion_impl=null or linear"
        )


def files(config: Config) -> Iterator[str]:
    """Where the run writes."""
    # os.path, because Path raises where a parent folder may not be read.
    if config.run_dir is not None and os.path.exists(config.run_dir) and not os.path.isdir(config.run_dir):
        yield f"run_dir={config.run_dir!r} is a file; name a directory"
    if config.run_dir == "":
        yield "run_dir is empty; name a directory, or null for outputs/DATE/TIME_NAME"
    if not config.name or "/" in config.name:
        yield f"name={config.name!r} becomes part of a directory's name; use at least one character, and no slash"
    yield from at_least(config.checkpoint, "checkpoint", 1, "save_interval", "keep_last", "keep_every")
    minutes = config.checkpoint.save_interval_minutes
    if minutes is not None and not minutes > 0:
        yield f"checkpoint.save_interval_minutes={minutes} is not positive; use 30, or null for no such saves"
    if config.checkpoint.keep_every is not None and config.checkpoint.keep_last is None:
        yield (
            f"checkpoint.keep_every={config.checkpoint.keep_every} exempts checkpoints from deletion, and "
            "checkpoint.keep_last=null keeps them all; set keep_last, or keep_every=null"
        )


def start(section: CheckpointConfig) -> Iterator[str]:
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


def reports(config: Config) -> Iterator[str]:
    """Logging and the text sample."""
    # A folder wandb/, as W&B leaves where it runs, could be imported, too.
    if config.logging.wandb and not list(importlib.metadata.distributions(name="wandb")):
        yield (
            "logging.wandb=true needs the package wandb, which is not installed; "
            f"{how_to_install('wandb')}, or use logging.wandb=false"
        )
    if config.logging.peak_tflops is not None and config.logging.peak_tflops <= 0:
        yield f"logging.peak_tflops={config.logging.peak_tflops} is not positive; use null for the table's value"
    sample = config.sample
    yield from at_least(sample, "sample", 0, "max_new_tokens", "temperature")
    if sample.max_new_tokens > 0 and not sample.prompt:
        yield (
            f"sample.prompt is empty, and sample.max_new_tokens={sample.max_new_tokens}; "
            "give a text to continue, or max_new_tokens=0"
        )
