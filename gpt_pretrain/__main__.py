"""gpt_pretrain: pretrain a GPT on megatron-core, configured by Hydra.

Examples:
    python -m gpt_pretrain                            a tiny GPT on real text
    python -m gpt_pretrain trainer.max_steps=50 model.optim.lr=1e-3
    torchrun --nproc-per-node 8 -m gpt_pretrain experiment=llama3_8b_8gpu
    python -m gpt_pretrain data=text 'model.data.text_files=["corpus/*.jsonl"]'
    python -m gpt_pretrain -m model.seed=1,2,3        one run after another
    python -m gpt_pretrain --config-dir my_conf --config-name my_run
    python -m gpt_pretrain --cfg job model=gpt2_124m  show keys, run nothing
"""
# command line → gate (rules/gate.py) → Hydra → one job, or each of a sweep → training.run.train
#                                     → sbatch for each job of a sweep with hydra/launcher=slurm
#
# Torch is imported only after the gate has accepted the command line. docs/checkpoints.md lists a run's exit codes;
# torchrun itself exits with 1 after any of them but 0.

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from omegaconf import DictConfig

from gpt_pretrain.commands.command_line import Request, run_hydra
from gpt_pretrain.commands.door import (
    CRASH,
    USER_ERROR,
    importing_torch,
    print_error,
    print_job,
    run_with_config,
)
from gpt_pretrain.config.errors import ConfigError, RankError, RunError, UserError, list_argument, shell_word, visible
from gpt_pretrain.launch.environment import limit_met, prepare_libraries, set_environment
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir, check_run_lock
from gpt_pretrain.launch.signals import ended_at_once, ended_by_signals
from gpt_pretrain.launch.slurm import submit
from gpt_pretrain.rules.gate import Job, read_job


def run_jobs(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
    """Runs every job of a checked command line under Hydra, and returns the largest of their exit codes.

    Raises:
        Exception: Whatever the only job raised; a sweep tells it and goes on.
    """
    codes: list[int] = []
    ended: list[Exception] = []

    def job(composed: DictConfig) -> None:
        print_job(len(codes), jobs)
        try:
            config = read_job(composed)
            set_environment(config)
            prepare_libraries()
            with importing_torch():
                from gpt_pretrain.training.run import train
                from gpt_pretrain.training.stop import ASKED_FOR, EXIT_CODES

            with ended_by_signals():
                reason = train(config, launch)
        except (UserError, RunError) as error:
            if request.options.multirun:
                print_error(error)
            else:
                ended.append(error)
            codes.append(USER_ERROR if isinstance(error, UserError) else CRASH)
        except Exception as error:
            out_of_memory = None
            # Memory may have been too short even for torch.
            if "torch" in sys.modules:
                from gpt_pretrain.plan.out_of_memory import explain_out_of_memory, ran_out_of_memory

                out_of_memory = explain_out_of_memory(config, launch, error) if ran_out_of_memory(error) else None
            problem = out_of_memory or limit_met(error)
            told = error if problem is None else RankError(problem)
            # A traceback tells nothing about limits other than memory: any line may meet them first.
            if out_of_memory is not None or (problem is None and request.options.multirun):
                traceback.print_exc()
            # What a sweep kept of an error would keep the memory of its job, too.
            if not request.options.multirun:
                ended.append(told)
            elif isinstance(told, RankError):
                print_error(told)
            codes.append(CRASH)
        else:
            if request.options.multirun and reason in ASKED_FOR:
                # Ctrl-C and signals end the sweep, not only the job that they hit.
                raise SystemExit(EXIT_CODES[reason])
            codes.append(EXIT_CODES[reason])

    with ended_at_once():
        run_hydra(request, job)
    if ended:
        # Not through Hydra, which would say something of its own.
        raise ended[0]
    failed = [f"  run {n + 1}: {visible(jobs[n].name)} (exit code {code})" for n, code in enumerate(codes) if code]
    if len(jobs) > 1 and failed:
        sys.stderr.write("\n".join([f"error: {len(failed)} of {len(jobs)} runs of the sweep failed", *failed]) + "\n")
    if len(jobs) > 1 and not failed:
        runs = list_argument("runs", [str(job.config.run_dir) for job in jobs])
        sys.stdout.write(f"compare them with: python -m gpt_pretrain.compare {shell_word(runs)}\n")
    return max(codes, default=0)


def check_sweep(jobs: Sequence[Job], launch: Launch) -> None:
    """Refuses a sweep before its first job trains if this machine cannot run all of its jobs.

    Raises:
        ConfigError: Names the jobs.
    """
    set_environment(jobs[0].config)
    prepare_libraries()
    from gpt_pretrain.features.resolve import build_run_spec, detect_platform
    from gpt_pretrain.rules.machine import machine_problems

    platform = detect_platform()
    problems = [
        f"{problem} [{job.name}]"
        for job in jobs
        for problem in machine_problems(build_run_spec(job.config, launch, platform))
    ]
    if problems:
        raise ConfigError(problems)


def submit_jobs(request: Request, jobs: Sequence[Job]) -> None:
    """Submits the runs of a checked sweep to Slurm and prints their job numbers.

    Raises:
        UserError: Slurm refuses one; those before it stay in its queue.
    """
    for job in jobs:
        assert job.submission is not None, "a sweep runs here or under Slurm, not both"
        assert job.config.run_dir is not None, "each job of a sweep has its own directory"
        run_dir = Path(job.config.run_dir)
        number = submit(job.submission, run_dir, [*request.source_options, *job.arguments])
        sys.stdout.write(f"job {number}: {visible(job.name)}\n    log: {visible(str(run_dir))}/slurm-{number}.out\n")
        sys.stdout.flush()


def start(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
    """Runs a checked command line, or submits its jobs to Slurm; returns the exit code.

    Raises:
        UserError: A run directory cannot be written, is in use or has another command's files; or Slurm, or for a sweep
            this machine, refuses a job.
    """
    # Rank 0 makes the directories; another node may not see them.
    for job in jobs if launch.is_rank_zero else []:
        check_run_dir(job.config, "a run")
        if job.config.run_dir is not None:
            check_run_lock(Path(job.config.run_dir).absolute())
    if any(job.submission is not None for job in jobs):
        submit_jobs(request, jobs)
        return 0
    if len(jobs) > 1:
        check_sweep(jobs, launch)
    return run_jobs(request, jobs, launch)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_config(__doc__, start, arguments, name="train")


if __name__ == "__main__":
    raise SystemExit(main())
