"""A run from start to end: refuse what cannot work, prepare data, build, restore, train, sum up."""

import gc
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.directory import latest_checkpoint
from gpt_pretrain.checkpoint.durable import write_durably
from gpt_pretrain.checkpoint.load import Restored, load_checkpoint, load_weights
from gpt_pretrain.checkpoint.save import CheckpointSaver
from gpt_pretrain.checkpoint.start import Start, choose_start
from gpt_pretrain.checkpoint.state import Progress, Trainable
from gpt_pretrain.config.derived import max_time_s, num_train_samples
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict, config_to_yaml
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.corpus import Corpus, prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE
from gpt_pretrain.fp8.emulation.layers import emulated_layers
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import make_run_dir
from gpt_pretrain.launch.run_lock import run_lock
from gpt_pretrain.megatron.agreement import check_ranks_agree
from gpt_pretrain.megatron.graphs import release_graphs
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import on_rank_zero, process_groups
from gpt_pretrain.megatron.user_buffers import user_buffers
from gpt_pretrain.plan.out_of_memory import check_states_fit
from gpt_pretrain.report.console import RunConsole
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.report.records import EndReason, Record
from gpt_pretrain.report.sinks import MetricsSinks
from gpt_pretrain.report.summary import build_summary
from gpt_pretrain.rules.machine import check_machine, machine_notes
from gpt_pretrain.spec.platform import detect_platform
from gpt_pretrain.spec.run_spec import RunSpec, build_run_spec
from gpt_pretrain.training.header import describe_changes, describe_data, describe_run, describe_steps
from gpt_pretrain.training.rewind import Rewinds
from gpt_pretrain.training.sample import check_prompt, write_sample
from gpt_pretrain.training.stop import EXIT_CODES, StopRequest
from gpt_pretrain.training.trainer import AfterStep, Trainer
from gpt_pretrain.training.watchdog import LEARNING_STEPS, Watchdog


def train(config: Config, launch: Launch, after_step: AfterStep | None = None) -> EndReason:
    """Runs a checked configuration on this rank, where `megatron.cpu.install_cpu_device` has been called.

    Args:
        config: From `config.load`, all rules passed.
        launch: This process's place in the run.
        after_step: See `Trainer`.

    Returns:
        Why it ended, the same on all ranks; `training.stop.EXIT_CODES` has the exit code.

    Raises:
        UserError: The machine, the data, the run directory or a checkpoint do not allow the run.
        RunError: Loss or gradient were not finite too often, or a checkpoint could not be saved.
    """
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    if torch.cuda.is_initialized():
        # An earlier job of a sweep: its objects refer to each other, and its peak is not this job's.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    platform = detect_platform()
    spec = build_run_spec(config, launch, platform)
    check_machine(spec)
    check_states_fit(config, launch, platform)
    corpus = prepare_corpus(config, show_progress=launch.is_rank_zero)
    check_prompt(config, corpus)
    with process_groups(config.model, launch, platform), user_buffers(spec), ExitStack() as stack:
        # A default run directory is named by the clock, and rank 0's counts.
        check_ranks_agree(dict(flatten(config_to_dict(replace(config, run_dir=None)))))
        run_dir, lock_note = on_rank_zero(lambda: _open_run_dir(config, stack))
        watchdog = stack.enter_context(_watchdog(config, launch, run_dir))
        start = choose_start(config.checkpoint, run_dir / "checkpoints")
        run = _Run(spec, corpus, watchdog, run_dir=run_dir, start=start)
        return run.run(lock_note, after_step)


def _open_run_dir(config: Config, stack: ExitStack) -> tuple[Path, str | None]:
    """Makes the run directory, given or named by the time of the start, and locks it until the stack is closed.

    Returns:
        The directory, and what to tell of a lock that an earlier run left there.

    Raises:
        UserError: The directory cannot be written, or another run writes to it.
    """
    run_dir = make_run_dir(config)
    return run_dir, stack.enter_context(run_lock(run_dir))


def _watchdog(config: Config, launch: Launch, run_dir: Path) -> Watchdog:
    # The host waits for the GPU where a step is logged: two of those show how long a step takes.
    learning_steps = max(LEARNING_STEPS, 2 * config.trainer.log_every_n_steps)
    return Watchdog(config.trainer.hang_timeout, learning_steps=learning_steps, launch=launch, run_dir=run_dir)


class _Run:
    """The objects of one run on this rank, and what rank 0 shows of them."""

    def __init__(
        self,
        spec: RunSpec,
        corpus: Corpus,
        watchdog: Watchdog,
        *,
        run_dir: Path,
        start: Start | None,
    ) -> None:
        config = spec.config
        self._spec = spec
        self._config = config
        self._launch = spec.launch
        self._platform = spec.platform
        self._corpus = corpus
        self._watchdog = watchdog
        self._run_dir = run_dir
        self._start_from = start
        self._checkpoints = run_dir / "checkpoints"
        model = build_model(spec, emulated_layers(spec))
        optimizer = build_optimizer(model)
        self._trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
        self._restored = self._restore()
        self._start = self._restored.progress
        self._train_data, self._valid_data = build_datasets(
            config,
            corpus,
            num_train_samples=num_train_samples(
                config,
                step=self._start.step,
                consumed_samples=self._start.consumed_samples,
                passed_over=sum(num_samples for _, num_samples in self._start.passed_over),
            ),
            num_valid_samples=config.trainer.limit_val_batches * config.model.global_batch_size,
        )

    def _restore(self) -> Restored:
        start = self._start_from
        if start is None:
            return Restored(progress=Progress(step=0, consumed_samples=0), notes=())
        load = load_weights if start.weights_only else load_checkpoint
        return load(start.checkpoint, self._trainable, self._config, self._corpus.fingerprints)

    @property
    def _is_done(self) -> bool:
        return self._start.step >= self._config.trainer.max_steps

    def run(self, lock_note: str | None, after_step: AfterStep | None) -> EndReason:
        """Trains and sums up; every rank calls it.

        Args:
            lock_note: What to tell of the run directory's lock.
            after_step: See `Trainer`.
        """
        with ExitStack() as stack:
            stack.callback(release_graphs, self._trainable.model.gpt_chunks)
            console = stack.enter_context(self._open_console()) if self._launch.is_rank_zero else None
            if console is not None and lock_note is not None:
                console.note(lock_note)
            if self._is_done:
                if console is not None:
                    console.note(
                        f"the run has done {self._start.step} steps, and trainer.max_steps="
                        f"{self._config.trainer.max_steps}; raise it to go on"
                    )
                return "max_steps"
            sinks: list[MetricsSinks] = []

            def open_sinks() -> None:
                (self._run_dir / "config.yaml").write_text(config_to_yaml(self._config), encoding="utf-8")
                if self._corpus.tokenizer is not None:
                    # Exports and text from a checkpoint need it where the corpus is not.
                    write_durably(self._run_dir / TOKENIZER_FILE, self._corpus.tokenizer.to_json())
                sinks.append(stack.enter_context(self._build_sinks()))

            on_rank_zero(open_sinks)

            def log(record: Record) -> None:
                for sink in sinks:
                    sink.write(record)
                if console is not None:
                    console.show(record)

            trainer = Trainer(
                self._config,
                launch=self._launch,
                platform=self._platform,
                trainable=self._trainable,
                train_data=self._train_data,
                valid_data=self._valid_data,
                progress=self._start,
                saver=CheckpointSaver(self._checkpoints, self._trainable, self._config, self._corpus.fingerprints),
                rewinds=self._rewinds(),
                dumps=self._run_dir / "dumps",
                log=log,
                watchdog=self._watchdog,
                after_step=after_step,
            )
            # The signals stay ours until the summary is written.
            stop = stack.enter_context(StopRequest(max_time_s(self._config.trainer)))
            if console is not None:
                console.start_live()
            began = time.monotonic()
            reason = trainer.train(stop)
            wall_time_s = time.monotonic() - began
            if console is not None:
                console.stop_live()
            with self._watchdog.busy("writing the text sample"):
                sample = None
                if reason == "max_steps":
                    sample = write_sample(self._config, self._corpus, self._trainable.model)
            if console is not None:
                self._sum_up(
                    console,
                    sinks[0],
                    progress=trainer.progress,
                    reason=reason,
                    wall_time_s=wall_time_s,
                    sample=sample,
                )
            if trainer.problem is not None:
                raise RunError(trainer.problem)
        return reason

    def _rewinds(self) -> Rewinds | None:
        if self._config.trainer.max_spike_rewinds is None:
            return None
        return Rewinds(
            self._checkpoints,
            self._trainable,
            self._config,
            self._corpus.fingerprints,
            num_samples=len(self._train_data),
        )

    def _build_sinks(self) -> MetricsSinks:
        return MetricsSinks(
            self._run_dir,
            self._config.logging,
            self._config.name,
            start_step=self._start.step,
            config=config_to_dict(self._config),
        )

    def _open_console(self) -> RunConsole:
        config = self._config
        console = RunConsole(max_steps=config.trainer.max_steps, start_step=self._start.step)
        places = {"directory": str(self._run_dir), "steps": describe_steps(self._start.step, config.trainer.max_steps)}
        start = self._start_from
        if start is not None:
            places["weights from" if start.weights_only else "resumed from"] = str(start.checkpoint.path)
        console.print_header(
            config.name,
            describe_run(
                self._spec,
                num_parameters=self._trainable.model.num_parameters,
                data=describe_data(config, self._corpus, self._train_data),
                places=places,
            ),
        )
        for note in machine_notes(self._spec):
            console.warning(note)
        for warning in () if start is None else start.warnings:
            console.warning(warning)
        for note in (*(() if start is None else start.notes), *self._restored.notes):
            console.note(note)
        if start is not None and not start.weights_only:
            changes = describe_changes(config, start.checkpoint.path)
            if changes is not None:
                console.note(changes)
            if config.checkpoint.reset_fp8_state:
                console.warning(
                    "FP8 scales and amax histories start anew at every resume: checkpoint.reset_fp8_state=true"
                )
        if self._corpus.tokenizer is None and config.sample.max_new_tokens > 0:
            console.note("no text sample at the end: model.tokenizer.library=none has no text")
        return console

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
        newest = latest_checkpoint(self._checkpoints)
        summary = build_summary(
            metrics,
            step=progress.step,
            consumed_samples=progress.consumed_samples,
            consumed_tokens=progress.consumed_samples * self._config.model.encoder_seq_length,
            num_gpus=self._launch.world_size,
            end_reason=reason,
            exit_code=EXIT_CODES[reason],
            wall_time_s=wall_time_s,
            checkpoint=None if newest is None else str(newest),
            sample_prompt=None if sample is None else self._config.sample.prompt,
            sample_text=sample,
        )
        sinks.write(summary)
        places = {"run directory": str(self._run_dir)}
        if newest is not None:
            places["checkpoint"] = str(newest)
        if reason != "max_steps" and newest is not None:
            places["go on with"] = f"the same command again with run_dir={self._run_dir}"
            if self._config.checkpoint.resume != "auto":
                places["go on with"] += " checkpoint.resume=auto"
        console.print_summary(summary, metrics, places)
