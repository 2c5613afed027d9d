"""A run from start to end: refuse what cannot work, prepare data, build, restore, train, sum up."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.store import Progress, Trainable, find_newest_checkpoint, load_checkpoint
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.launch import Launch
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import Corpus, prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.platform import (
    Platform,
    check_platform,
    detect_platform,
    plan_kernels,
    platform_notes,
)
from gpt_pretrain.report.console import RunConsole
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.report.records import EndReason, TrainRecord, ValidationRecord
from gpt_pretrain.report.sinks import MetricsSinks
from gpt_pretrain.report.summary import build_summary
from gpt_pretrain.training.generation import generate_tokens
from gpt_pretrain.training.header import describe_data, describe_run
from gpt_pretrain.training.trainer import Trainer

# 128 + the signal's number, as shells and schedulers expect it.
_EXIT_CODES: Mapping[EndReason, int] = {"max_steps": 0, "max_time": 0, "interrupted": 130, "terminated": 143}


def train(config: Config, launch: Launch) -> int:
    """Runs a checked configuration on this rank.

    Args:
        config: From `config.load`, all rules passed.
        launch: This process's place in the run.

    Returns:
        The exit code: 0 when the steps or the time are used up, 130 after Ctrl-C, 143 after SIGTERM.

    Raises:
        UserError: The machine, the data, the run directory or a checkpoint do not allow the run.
    """
    install_cpu_device()
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    platform = detect_platform()
    check_platform(config, platform, launch)
    corpus = prepare_corpus(config, show_progress=launch.is_rank_zero)
    with process_groups(config.model, launch, platform):
        run_dir = _shared_run_dir(config)
        reason = _Run(config, launch, platform, corpus, run_dir).run()
    return _EXIT_CODES[reason]


def _shared_run_dir(config: Config) -> Path:
    """The run directory, made by rank 0 and known to all: given, or named by the time of the start.

    Raises:
        UserError: It cannot be created, or it holds a run that `checkpoint.resume=never` would overwrite.
    """
    name = [config.run_dir or f"outputs/{datetime.now():%Y-%m-%d/%H-%M-%S}_{config.name}"]
    torch.distributed.broadcast_object_list(name, src=0, device=torch.device(torch.cuda.current_device()))
    run_dir = Path(name[0]).absolute()
    if torch.distributed.get_rank() == 0:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run_dir={run_dir} cannot be created: {error.strerror}; give another") from error
        if config.checkpoint.resume == "never" and find_newest_checkpoint(run_dir / "checkpoints") is not None:
            raise UserError(
                f"checkpoint.resume=never, but run_dir={run_dir} holds the checkpoints of a run; "
                "give another run_dir, or checkpoint.resume=auto to go on with it"
            )
    torch.distributed.barrier()
    return run_dir


class _Run:
    """The objects of one run on this rank, and what rank 0 shows of them."""

    def __init__(self, config: Config, launch: Launch, platform: Platform, corpus: Corpus, run_dir: Path) -> None:
        self._config = config
        self._launch = launch
        self._platform = platform
        self._corpus = corpus
        self._run_dir = run_dir
        self._checkpoints = run_dir / "checkpoints"
        self._kernels = plan_kernels(config, platform)
        model = build_model(config, platform, self._kernels)
        optimizer = build_optimizer(config, model, platform)
        self._trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
        self._resumed_from = self._checkpoint_to_resume()
        self._start = (
            Progress(step=0, consumed_samples=0)
            if self._resumed_from is None
            else load_checkpoint(self._resumed_from, self._trainable, config.model)
        )
        self._train_data, self._valid_data = build_datasets(
            config,
            corpus,
            num_train_samples=config.trainer.max_steps * config.model.global_batch_size,
            num_valid_samples=config.trainer.limit_val_batches * config.model.global_batch_size,
        )

    def _checkpoint_to_resume(self) -> Path | None:
        resume = self._config.checkpoint.resume
        if resume == "never":
            return None
        return find_newest_checkpoint(self._checkpoints) if resume == "auto" else Path(resume)

    @property
    def _is_done(self) -> bool:
        return self._start.step >= self._config.trainer.max_steps

    def run(self) -> EndReason:
        """Trains and sums up; every rank calls it."""
        if self._is_done and not self._launch.is_rank_zero:
            return "max_steps"
        with ExitStack() as stack:
            console, sinks = None, None
            if self._launch.is_rank_zero:
                console = stack.enter_context(
                    RunConsole(max_steps=self._config.trainer.max_steps, start_step=self._start.step)
                )
                self._print_header(console)
                if self._is_done:
                    console.note(f"the run has done its {self._start.step} steps; raise trainer.max_steps to go on")
                    return "max_steps"
                (self._run_dir / "config.yaml").write_text(config_to_yaml(self._config), encoding="utf-8")
                console.start_live()
                sinks = stack.enter_context(
                    MetricsSinks(self._run_dir, self._config.logging, self._config.name, start_step=self._start.step)
                )

            def log(record: TrainRecord | ValidationRecord) -> None:
                if console is None or sinks is None:
                    return
                sinks.write(record)
                if isinstance(record, TrainRecord):
                    console.train(record)
                else:
                    console.validation(record)

            trainer = Trainer(
                self._config,
                launch=self._launch,
                platform=self._platform,
                trainable=self._trainable,
                train_data=self._train_data,
                valid_data=self._valid_data,
                progress=self._start,
                checkpoints=self._checkpoints,
                log=log,
            )
            began = time.monotonic()
            reason = trainer.train()
            wall_time_s = time.monotonic() - began
            if console is not None:
                console.stop_live()
            sample = self._sample() if reason == "max_steps" else None
            if console is not None and sinks is not None:
                self._sum_up(
                    console,
                    sinks,
                    progress=trainer.progress,
                    reason=reason,
                    wall_time_s=wall_time_s,
                    sample=sample,
                )
        return reason

    def _print_header(self, console: RunConsole) -> None:
        config = self._config
        places = {"directory": str(self._run_dir), "steps": f"{self._start.step} → {config.trainer.max_steps}"}
        if self._resumed_from is not None:
            places["resumed from"] = str(self._resumed_from)
        console.print_header(
            config.name,
            describe_run(
                config,
                launch=self._launch,
                platform=self._platform,
                kernels=self._kernels,
                num_parameters=self._trainable.model.num_parameters,
                data=describe_data(config, self._corpus, self._train_data),
                places=places,
            ),
        )
        for note in platform_notes(config, self._platform):
            console.warning(note)

    def _sample(self) -> str | None:
        """What the model writes after `sample.prompt`; every rank takes part."""
        sample, tokenizer = self._config.sample, self._corpus.tokenizer
        if tokenizer is None or sample.max_new_tokens == 0:
            return None
        with self._trainable.model.gathered_parameters():
            tokens = generate_tokens(
                self._trainable.model,
                self._config.model,
                tokenizer.encode(sample.prompt),
                vocab_size=tokenizer.vocab_size,
                max_new_tokens=sample.max_new_tokens,
                temperature=sample.temperature,
                end_token=tokenizer.eod,
                seed=self._config.model.seed,
            )
        return tokenizer.decode(tokens)

    def _sum_up(
        self,
        console: RunConsole,
        sinks: MetricsSinks,
        *,
        progress: Progress,
        reason: EndReason,
        wall_time_s: float,
        sample: str | None,
    ) -> None:
        metrics = load_metrics(self._run_dir)
        newest = find_newest_checkpoint(self._checkpoints)
        summary = build_summary(
            metrics,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_samples * self._config.model.encoder_seq_length,
            num_gpus=self._launch.world_size,
            end_reason=reason,
            wall_time_s=wall_time_s,
            checkpoint=None if newest is None else str(newest),
            sample_prompt=None if sample is None else self._config.sample.prompt,
            sample_text=sample,
        )
        sinks.write(summary)
        places = {"run directory": str(self._run_dir)}
        if newest is not None:
            places["checkpoint"] = str(newest)
        if reason != "max_steps":
            places["go on with"] = f"run_dir={self._run_dir}"
        console.print_summary(summary, metrics, places)
