"""The processes of a benchmark or a comparison: `run_task` starts them, waits for them and reads their results.

Each process, or rank, is `python -m gpt_pretrain.benchmark.worker TASK.json`, never started by hand. It writes its
result, or why it failed, beside the task; what it prints goes to a file.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gpt_pretrain.benchmark.results import Failure, MachineSeen, Measured, PlatformSeen
from gpt_pretrain.benchmark.variants import PROFILED_STEPS
from gpt_pretrain.config.derived import attended_length
from gpt_pretrain.config.errors import ConfigError, RunError, UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.config.schema import Config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.environment import prepare_libraries, set_environment
from gpt_pretrain.launch.ranks import Launch, read_launch, start_command, without_launcher
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.extensions import extended_loader
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.run_spec import RunSpec

TASK, OUTPUT, TRACE, KERNELS = "task.json", "output.txt", "trace.json.gz", "kernels.txt"


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What a process is started for."""

    kind: str
    """app or bare (see `Variant.loop`): train and measure; train: as `python -m gpt_pretrain` does; platform: look up
    the machine; gemm: also measure its products."""
    overrides: list[str]
    config_name: str
    config_path: str
    config_dir: str | None
    profiled: bool
    launched_unix: float
    """Seconds since 1970-01-01 UTC."""

    def load_config(self) -> Config:
        """The run's configuration."""
        config_dir = None if self.config_dir is None else Path(self.config_dir)
        source = Source(config_name=self.config_name, config_path=Path(self.config_path), config_dir=config_dir)
        # A new process imports the extensions that the benchmark's process imported.
        extended_loader(self.overrides, source)
        return load_config(self.overrides, source)


def _answer_path(task: Path, what: Literal["result", "failure"], rank: int) -> Path:
    return task.with_name(f"{what}.{rank}.json")


def run_task[Result: JsonObject](
    kind: str,
    result: type[Result],
    folder: Path,
    *,
    source: Source,
    overrides: Sequence[str],
    num_processes: int = 1,
    profiled: bool = False,
) -> tuple[Result, ...]:
    """Runs a task in processes of its own, with its files in a new `folder`; returns each rank's result, rank 0 first.

    Raises `RunError` with why the task failed, from the rank that failed first.
    """
    folder.mkdir(parents=True)
    path = folder / TASK
    task = Task(
        kind=kind,
        overrides=list(overrides),
        config_name=source.config_name,
        config_path=str(source.config_path),
        config_dir=None if source.config_dir is None else str(source.config_dir),
        profiled=profiled,
        launched_unix=time.time(),
    )
    write_file(path, json.dumps(asdict(task), indent=2, ensure_ascii=False), wait_for_disk=False)
    code = _run_processes(path, folder / OUTPUT, num_processes)
    failures = _read_all(Failure, [_answer_path(path, "failure", rank) for rank in range(num_processes)])
    results = _read_all(result, [_answer_path(path, "result", rank) for rank in range(num_processes)])
    if failures:
        raise RunError(min(failures, key=lambda failure: failure.time_unix).problem)
    if code or len(results) < num_processes:
        # torchrun writes which signal ended a rank.
        was_killed = code == -signal.SIGKILL or b"SIGKILL" in (folder / OUTPUT).read_bytes()
        why = " (SIGKILL: memory may have run out)" if was_killed else ""
        raise RunError(f"ended with exit code {code}{why}; what it printed: {folder / OUTPUT}")
    return tuple(results)


def _read_all[Result: JsonObject](kind: type[Result], paths: Sequence[Path]) -> list[Result]:
    return [kind.from_json(json.loads(path.read_text(encoding="utf-8"))) for path in paths if path.exists()]


def _run_processes(task: Path, output: Path, num_processes: int) -> int:
    command = [*start_command(num_processes), "-m", "gpt_pretrain.benchmark.worker", str(task)]
    env = without_launcher(os.environ)
    with output.open("wb") as file:
        process = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        try:
            return process.wait()
        except BaseException:
            # Only torchrun itself can end its ranks, which are sessions of their own.
            process.terminate()
            process.wait()
            raise


def _train(spec: RunSpec, after_step: Callable[..., None] | None = None) -> None:
    """Trains to the last step, from the run directory's newest checkpoint if it has one."""
    from gpt_pretrain.training.run import train

    reason = train(spec, after_step)
    if reason != "max_steps":
        raise RunError(f"the run ended early: {reason}")


def _measure_run(task: Task, folder: Path, spec: RunSpec) -> Measured:
    from gpt_pretrain.benchmark.measure import StepProfiler, Stopwatch, run_bare_loop
    from gpt_pretrain.megatron.core_fields import params_dtype

    config, platform = spec.config, spec.platform
    profiler = None
    if task.profiled and spec.launch.is_rank_zero:
        profiler = StepProfiler(folder / TRACE, folder / KERNELS, PROFILED_STEPS, cuda=platform.cuda)
    watch = Stopwatch(config.benchmark, platform=platform, launched_unix=task.launched_unix, profiler=profiler)
    if task.kind == "bare":
        run_bare_loop(spec, watch.after_step)
    else:
        _train(spec, watch.after_step)
    assert watch.first_step_s is not None
    assert watch.memory_gib is not None
    step_tokens = spec.model.global_batch_size * spec.model.encoder_seq_length
    return Measured(
        first_step_s=watch.first_step_s,
        step_times_s=tuple(watch.step_times_s),
        memory_gib=watch.memory_gib,
        loss=watch.loss,
        dtype=params_dtype(spec).value,
        attended=None if watch.squared_lengths is None else attended_length(watch.squared_lengths, step_tokens),
    )


def _do(task: Task, folder: Path, launch: Launch) -> Measured | PlatformSeen:
    config = task.load_config()
    if task.kind not in ("gemm", "platform") and (problems := config_problems(config, launch)):
        raise ConfigError(problems)
    set_environment(config)
    prepare_libraries()
    from gpt_pretrain.features.resolve import build_run_spec, detect_platform
    from gpt_pretrain.megatron.cpu import install_cpu_device

    install_cpu_device()
    platform = detect_platform()
    if task.kind == "platform":
        return PlatformSeen(platform=platform)
    if task.kind == "gemm":
        from gpt_pretrain.benchmark.measure import describe_machine

        return MachineSeen(platform=platform, machine=describe_machine(platform))
    spec = build_run_spec(config, launch, platform)
    try:
        if task.kind != "train":
            return _measure_run(task, folder, spec)
        _train(spec)
        # The run directory has everything else.
        return PlatformSeen(platform=platform)
    except Exception as error:
        from gpt_pretrain.plan.out_of_memory import explain_out_of_memory, ran_out_of_memory

        if not ran_out_of_memory(error):
            raise
        traceback.print_exc()
        raise UserError(explain_out_of_memory(spec, error)) from error


def main(arguments: list[str]) -> int:
    """Carries out a task and returns the exit code."""
    path = Path(arguments[0])
    launch = read_launch()
    try:
        result = _do(Task(**json.loads(path.read_text(encoding="utf-8"))), path.parent, launch)
    except Exception as error:
        known = isinstance(error, UserError | RunError)
        if not known:
            traceback.print_exc()
        problem = str(error) if known else f"{type(error).__name__}: {error}"
        _write(_answer_path(path, "failure", launch.rank), Failure(time_unix=time.time(), problem=problem))
        return 1
    _write(_answer_path(path, "result", launch.rank), result)
    return 0


def _write(path: Path, result: JsonObject) -> None:
    write_file(path, json.dumps(result.to_json(), allow_nan=False), wait_for_disk=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
