"""One run: refuse what cannot work, set up, train, sum up."""

import gc
import shlex
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.directory import latest_checkpoint
from gpt_pretrain.checkpoint.save import PlaceProblem
from gpt_pretrain.config.derived import max_time_s, save_interval_s
from gpt_pretrain.config.errors import RunError, override_word
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.keys import flatten
from gpt_pretrain.config.load import config_to_dict, config_to_yaml
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE
from gpt_pretrain.extend.registry import registered
from gpt_pretrain.launch.environment import library_versions
from gpt_pretrain.launch.run_dir import HeldDirectory, make_run_dir, run_lock
from gpt_pretrain.megatron.own_optimizer import check_own_optimizer
from gpt_pretrain.megatron.parallel import (
    check_extensions_agree,
    check_ranks_agree,
    on_rank_zero,
    process_groups,
    user_buffers,
)
from gpt_pretrain.megatron.whole_layers import release_graphs
from gpt_pretrain.plan.out_of_memory import check_states_fit
from gpt_pretrain.report.console import RunConsole
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.report.mlflow import MlflowSink
from gpt_pretrain.report.records import DONE, EndReason, Record
from gpt_pretrain.report.sinks import MetricsSinks, RegisteredSink
from gpt_pretrain.report.summary import build_summary
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.generation import check_prompt, write_sample
from gpt_pretrain.training.header import open_console
from gpt_pretrain.training.setup import Setup, set_up
from gpt_pretrain.training.stop import EXIT_CODES, StopRequest
from gpt_pretrain.training.trainer import AfterStep, Trainer
from gpt_pretrain.training.watchdog import LEARNING_STEPS, Watchdog


def train(spec: RunSpec, after_step: AfterStep | None = None) -> EndReason:
    """Runs a checked configuration on this rank, after `megatron.cpu.install_cpu_device`.

    Returns:
        Why it ended, the same on all ranks; `training.stop.EXIT_CODES` has the exit code.

    Raises:
        UserError: The machine, the data, the run directory or a checkpoint does not allow the run.
        RunError: Loss, gradient or FP8 tensors were not finite too often, or a checkpoint could not be saved.
    """
    config, launch = spec.config, spec.launch
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    if torch.cuda.is_initialized():
        # After an earlier job of a sweep, whose objects refer to each other and whose peak is not this job's.
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    check_machine(spec)
    check_states_fit(spec)
    corpus = prepare_corpus(config, show_progress=launch.is_rank_zero)
    check_prompt(config, corpus)
    with process_groups(config.model, launch, spec.platform), user_buffers(spec), ExitStack() as stack:
        check_ranks_agree(dict(flatten(config_to_dict(config))))
        check_extensions_agree()
        check_own_optimizer(config)

        # Rank 0 alone holds the run directory.
        held: list[HeldDirectory] = []

        def hold_run_dir() -> Path:
            run_dir = make_run_dir(config.run_dir, config.name)
            held.append(stack.enter_context(run_lock(run_dir)))
            return run_dir

        def place_problem() -> str | None:
            return held[0].problem() if held else None

        run_dir = on_rank_zero(hold_run_dir)
        # The host waits for the GPU when a step is logged: two logged steps show how long a step takes.
        learning_steps = max(LEARNING_STEPS, 2 * config.trainer.log_every_n_steps)
        watchdog = stack.enter_context(
            Watchdog(config.trainer.hang_timeout, learning_steps=learning_steps, launch=launch, run_dir=run_dir)
        )
        setup = set_up(spec, corpus, run_dir)
        stack.callback(release_graphs, setup.trainable.model.gpt_chunks)
        console = stack.enter_context(open_console(setup, held[0].note)) if launch.is_rank_zero else None
        if setup.progress.step >= setup.last_step:
            return "max_steps"
        return _train(setup, watchdog, console, after_step, place_problem=place_problem)


def _train(
    setup: Setup,
    watchdog: Watchdog,
    console: RunConsole | None,
    after_step: AfterStep | None,
    *,
    place_problem: PlaceProblem,
) -> EndReason:
    """Trains and sums up; every rank calls it, rank 0 with a console and to ask for `place_problem`."""
    config = setup.config
    with ExitStack() as stack:
        sinks: list[MetricsSinks] = []
        on_rank_zero(lambda: sinks.append(stack.enter_context(_open_sinks(setup))))

        def log(record: Record) -> None:
            for sink in sinks:
                sink.write(record)
            if console is not None:
                console.show(record)

        trainer = Trainer(setup, log=log, watchdog=watchdog, after_step=after_step, place_problem=place_problem)
        # We handle the signals until the summary is written.
        stop = stack.enter_context(StopRequest(max_time_s(config.trainer), save_interval_s(config.checkpoint)))
        if console is not None:
            console.start_live()
        began = time.monotonic()
        reason = trainer.train(stop)
        wall_time_s = time.monotonic() - began
        if console is not None:
            console.stop_live()
        with watchdog.busy("writing the text sample"):
            sample = write_sample(config, setup.corpus, setup.trainable.model) if reason in DONE else None
        if console is not None:
            if (problem := place_problem()) is not None:
                # Its log is elsewhere.
                raise RunError(problem)
            _sum_up(setup, trainer, reason, console=console, sinks=sinks[0], wall_time_s=wall_time_s, sample=sample)
        if trainer.problem is not None:
            raise RunError(trainer.problem)
    return reason


def _open_sinks(setup: Setup) -> MetricsSinks:
    """Writes the files that describe the whole run, and opens those for its records."""
    config, run_dir = setup.config, setup.run_dir
    write_file(run_dir / "config.yaml", config_to_yaml(config))
    if setup.corpus.tokenizer is not None:
        # Exporting and generating need the tokenizer when the corpus is not at hand.
        write_file(run_dir / TOKENIZER_FILE, setup.corpus.tokenizer.to_json())
    return MetricsSinks(
        run_dir,
        config.logging,
        config.name,
        start_step=setup.progress.step,
        config=config_to_dict(config),
        command=shlex.join(["python", *sys.orig_argv[1:]]),
        versions=", ".join(library_versions()),
        more=[
            partial(RegisteredSink, each, run_dir, config, start_step=setup.progress.step)
            for each in registered("sink")
            if each.value is not MlflowSink or config.logging.mlflow
        ],
    )


def _sum_up(
    setup: Setup,
    trainer: Trainer,
    reason: EndReason,
    *,
    console: RunConsole,
    sinks: MetricsSinks,
    wall_time_s: float,
    sample: str | None,
) -> None:
    config, progress = setup.config, trainer.progress
    metrics = load_metrics(setup.run_dir)
    newest = latest_checkpoint(setup.checkpoints)
    summary = build_summary(
        metrics,
        step=progress.step,
        consumed_samples=progress.consumed_samples,
        consumed_tokens=progress.consumed_tokens(config.model.encoder_seq_length),
        num_gpus=setup.spec.launch.world_size,
        end_reason=reason,
        exit_code=EXIT_CODES[reason],
        wall_time_s=wall_time_s,
        checkpoint=None if newest is None else str(newest),
        sample_prompt=None if sample is None else config.sample.prompt,
        sample_text=sample,
        has_fp8=setup.spec.fp8 is not None,
    )
    sinks.write(summary)
    places = {"run directory": str(setup.run_dir)}
    if newest is not None:
        places["checkpoint"] = str(newest)
    if reason != "max_steps" and newest is not None:
        places["continue with"] = f"the same command again with {override_word('run_dir', str(setup.run_dir))}"
        if config.checkpoint.resume != "auto":
            places["continue with"] += " checkpoint.resume=auto"
    console.print_summary(summary, places)
