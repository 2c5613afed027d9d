"""Cross-field rules outside the architecture: optimizer and schedule, data, trainer, checkpoints and logging."""

import importlib.metadata
import math
import os
import re
from collections.abc import Iterator
from dataclasses import replace

from gpt_pretrain.config.choices import CrossEntropyFusion, OptimizerName, TokenizerLibrary
from gpt_pretrain.config.derived import max_time_s
from gpt_pretrain.config.errors import ConfigError, how_to_install, refusal, refusals, show
from gpt_pretrain.config.mixtures import mixture_problems
from gpt_pretrain.config.schema import Config, DataConfig, LoggingConfig, TrainerConfig
from gpt_pretrain.launch.environment import installed_version
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.evaluation import task_problems
from gpt_pretrain.rules.schedule import schedule_problems
from gpt_pretrain.run.fp8 import Obstacle
from gpt_pretrain.run.optimizers import names_with, optimizer_of

# The 256 bytes and the end-of-document token.
SMALLEST_BPE = 257
# Its iteration is no stable API.
TESTED_EMERGING_OPTIMIZERS = "0.3"


def training_problems(config: Config, launch: Launch | None) -> Iterator[str]:
    """All problems outside the architecture; without `launch`, none about the world size."""
    yield from _optimizer(config)
    yield from schedule_problems(config)
    yield from _corpus(config.model.data)
    yield from _splits(config)
    yield from _tokenizer(config)
    yield from _trainer(config)
    if (rewinds := config.trainer.max_spike_rewinds) is not None:
        asked, off = f"trainer.max_spike_rewinds={rewinds}", "trainer.max_spike_rewinds=null"
        yield from refusals(asked, _rewind_obstacles(config), off)
    yield from _files(config)
    yield from _start(config)
    yield from _reports(config)
    yield from task_problems(config.evaluation.tasks)
    if launch is not None:
        yield from _launched(config.trainer, launch)


def _optimizer(config: Config) -> Iterator[str]:
    """Adam's decay rates, and optimizers that the distributed one does not support."""
    optim = config.model.optim
    if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
        yield f"model.optim.betas={optim.betas} are not two numbers of at least 0 and below 1; use [0.9,0.95] or others"
    # `rules.fp8` has FP8 parameters, which need the distributed optimizer.
    if not optimizer_of(optim.name).has_distributed_form and config.model.use_distributed_optimizer:
        asked, why = f"model.optim.name={optim.name.name}", "megatron-core has no distributed form of it"
        ways = names_with("has_distributed_form"), "a layout without it (parallelism=single)"
        yield refusal(asked, "model.use_distributed_optimizer=true", why, *ways)
    if optim.name is OptimizerName.muon:
        yield from _missing_muon()
    tp = config.model.tensor_model_parallel_size
    if optimizer_of(optim.name).needs_whole_matrices and tp > 1:
        why = "it needs whole matrices, which tensor parallelism cuts"
        yield refusal(
            f"model.optim.name={optim.name.name}",
            f"model.tensor_model_parallel_size={tp}",
            why,
            "model.optim.name=adam",
            "model.tensor_model_parallel_size=1",
        )


def _missing_muon() -> Iterator[str]:
    version = installed_version("emerging-optimizers")
    if version is not None and version.startswith(f"{TESTED_EMERGING_OPTIMIZERS}."):
        return
    found = "it is not installed" if version is None else f"{version} is installed"
    yield (
        f"model.optim.name=muon needs emerging-optimizers {TESTED_EMERGING_OPTIMIZERS}, and {found}; "
        f"{how_to_install('muon')}, or use optimizer=adam"
    )


def _corpus(data: DataConfig) -> Iterator[str]:
    """Each kind of corpus needs its own key."""
    name = data.data_impl.files_key
    if name is not None and not getattr(data, name):
        yield f"model.data.data_impl={data.data_impl.name} has no corpus; name it in model.data.{name}=[…]"
    yield from mixture_problems(data)
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
    if shares[1] == 0 and validates and not config.model.data.validation_prefix:
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


def _rewind_obstacles(config: Config) -> Iterator[Obstacle]:
    """Rewinding before a loss spike needs a threshold, and checkpoints that still exist."""
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
    yield from _best(config)


def _best(config: Config) -> Iterator[str]:
    """The best checkpoint is known by a validation at the step of each save."""
    checkpoint, validated = config.checkpoint, config.trainer.val_check_interval
    if not checkpoint.keep_best:
        return
    if checkpoint.keep_last is None:
        yield (
            "checkpoint.keep_best=true exempts a checkpoint from deletion, and checkpoint.keep_last=null keeps them "
            "all; set keep_last, or checkpoint.keep_best=false"
        )
    if config.trainer.limit_val_batches == 0 or validated is None:
        key = "limit_val_batches=0" if validated is not None else "val_check_interval=null"
        yield f"checkpoint.keep_best=true needs validations, and trainer.{key}; set it, or checkpoint.keep_best=false"
    elif checkpoint.save_interval is None or checkpoint.save_interval % validated:
        saved = show(checkpoint.save_interval)
        yield (
            f"checkpoint.keep_best=true needs a validation at each save: checkpoint.save_interval={saved} is no "
            f"multiple of trainer.val_check_interval={validated}; use checkpoint.save_interval={validated}, or "
            "checkpoint.keep_best=false"
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


def _mlflow(logging: LoggingConfig) -> Iterator[str]:
    # The whole library brings the other one.
    if installed_version("mlflow-skinny") is None:
        yield (
            "logging.mlflow=true needs the package mlflow-skinny, which is not installed; "
            f"{how_to_install('mlflow')}, or use logging.mlflow=false"
        )
    if logging.mlflow_tracking_uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
        yield (
            "logging.mlflow=true needs a tracking server, and neither logging.mlflow_tracking_uri nor "
            "MLFLOW_TRACKING_URI of the environment names one; set logging.mlflow_tracking_uri=http://HOST:5000 or "
            "sqlite:////PATH/mlflow.db, or use logging.mlflow=false"
        )


def _reports(config: Config) -> Iterator[str]:
    """Logging and the text sample."""
    # An import could find a folder wandb/ that W&B has left.
    if config.logging.wandb and not list(importlib.metadata.distributions(name="wandb")):
        yield (
            "logging.wandb=true needs the package wandb, which is not installed; "
            f"{how_to_install('wandb')}, or use logging.wandb=false"
        )
    if config.logging.mlflow:
        yield from _mlflow(config.logging)
    sample = config.sample
    if sample.max_new_tokens > 0 and not sample.prompt:
        yield (
            f"sample.prompt is empty, and sample.max_new_tokens={sample.max_new_tokens}; "
            "give a text to continue, or sample.max_new_tokens=0"
        )
