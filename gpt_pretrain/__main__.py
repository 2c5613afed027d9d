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
# command line → checked jobs (commands/command.py, rules/jobs.py) → `training.run.train` for each of them
#                                                               → sbatch for each, with hydra/launcher=slurm
#
# Torch is imported only after the command line is accepted. docs/checkpoints.md lists a run's exit codes; torchrun
# itself exits with 1 after any of them but 0.

import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpt_pretrain.commands.command import CRASH, USER_ERROR, importing_torch, print_error, print_job, run_with_config
from gpt_pretrain.commands.command_line import Request, hydra_settings, record_sweep
from gpt_pretrain.config.errors import ConfigError, RankError, RunError, UserError, list_argument, shell_word, visible
from gpt_pretrain.launch.environment import limit_met, prepare_libraries, set_environment
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir, check_run_lock
from gpt_pretrain.launch.signals import REQUEUE
from gpt_pretrain.launch.slurm import submit
from gpt_pretrain.launch.told import tell_torchrun
from gpt_pretrain.rules.jobs import Job

if TYPE_CHECKING:
    from gpt_pretrain.report.records import EndReason


def run_job(job: Job, launch: Launch) -> "EndReason":
    """Trains one job of a checked command line and returns why it ended.

    Raises:
        UserError: The machine, the data, the run directory or a checkpoint does not allow the run.
        RunError: The run failed; with a forecast and remedies if memory ran out.
    """
    with hydra_settings(job):
        set_environment(job.config)
        prepare_libraries()
        with importing_torch():
            from gpt_pretrain.features.resolve import build_run_spec, detect_platform
            from gpt_pretrain.plan.out_of_memory import explain_out_of_memory, ran_out_of_memory
            from gpt_pretrain.training.run import train

        spec = build_run_spec(job.config, launch, detect_platform())
        try:
            return train(spec)
        except Exception as error:
            # A RunError has said what failed.
            if isinstance(error, RunError) or not ran_out_of_memory(error):
                raise
            traceback.print_exc()
            raise RankError(explain_out_of_memory(spec, error)) from error


def run_sweep(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
    """Trains the jobs one after another, also after one that failed; returns the largest of their exit codes."""
    record_sweep(request)
    codes = []
    for number, job in enumerate(jobs):
        print_job(number, jobs)
        try:
            reason = run_job(job, launch)
        except (UserError, RunError) as error:
            print_error(error)
            codes.append(USER_ERROR if isinstance(error, UserError) else CRASH)
        except Exception as error:
            # A traceback tells nothing about limits other than memory: any line may meet them first.
            if (problem := limit_met(error)) is None:
                traceback.print_exc()
            else:
                print_error(RankError(problem))
            codes.append(CRASH)
        else:
            from gpt_pretrain.training.stop import ASKED_FOR, EXIT_CODES

            codes.append(EXIT_CODES[reason])
            if reason in ASKED_FOR:
                # Ctrl-C and signals end the sweep, not only the job that they hit.
                return EXIT_CODES[reason]
    failed = [f"  run {n + 1}: {visible(jobs[n].name)} (exit code {code})" for n, code in enumerate(codes) if code]
    if len(jobs) > 1 and failed:
        sys.stderr.write("\n".join([f"error: {len(failed)} of {len(jobs)} runs of the sweep failed", *failed]) + "\n")
    if len(jobs) > 1 and not failed:
        runs = list_argument("runs", [str(job.config.run_dir) for job in jobs])
        sys.stdout.write(f"compare them with: python -m gpt_pretrain.compare {shell_word(runs)}\n")
    return max(codes)


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


def train_jobs(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
    """Trains the jobs of a checked command line, or submits them to Slurm; returns the exit code.

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
    if request.options.multirun:
        return run_sweep(request, jobs, launch)
    reason = run_job(jobs[0], launch)
    from gpt_pretrain.report.summary import END_REASONS
    from gpt_pretrain.training.stop import EXIT_CODES

    code = EXIT_CODES[reason]
    if code and launch.is_rank_zero:
        again = "; start the same command again" if code == REQUEUE else ""
        tell_torchrun(f"{END_REASONS[reason]}{again}", is_cause=True)
    return code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_config(__doc__, train_jobs, arguments, name="train")


if __name__ == "__main__":
    raise SystemExit(main())
