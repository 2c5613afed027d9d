"""`python -m gpt_pretrain.plan`: what a training command would do, on a machine without a GPU.

    command line → training's gate → the planned machine → plan → tables, and plan.json in the run directory

It takes every command line that `python -m gpt_pretrain` takes, sweeps included. What a run would be refused for is
told in the same words with exit code 2; otherwise the exit code is 0. `plan.gpu` and `plan.num_gpus` name the machine.
"""

import sys
from collections.abc import Sequence

from gpt_pretrain.commands.command_line import Request, check_request, parse_command_line, run_hydra, show_help
from gpt_pretrain.commands.door import exit_code, print_job
from gpt_pretrain.commands.help import PLAN
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.launch.environment import prepare_libraries
from gpt_pretrain.launch.run_dir import check_run_dir, make_run_dir
from gpt_pretrain.plan.world import NO_LAUNCHER, planned_launch, planned_problems
from gpt_pretrain.rules.gate import Job


def plan_jobs(jobs: Sequence[Job]) -> None:
    """Plans each job of a checked command line.

    Raises:
        ConfigError: The planned machine refuses one of them.
        UserError: A run directory cannot be written.
    """
    for job in jobs:
        check_run_dir(job.config)
    prepare_libraries()
    # torch and megatron-core take seconds to load: not before the gate has let the command line through.
    from gpt_pretrain.plan.console import print_plan
    from gpt_pretrain.plan.document import write_plan
    from gpt_pretrain.plan.forecast import build_plan
    from gpt_pretrain.plan.machine import platform_problems

    names = [" ".join(job.overrides) for job in jobs]
    problems = [
        problem + (f" [{name}]" if len(jobs) > 1 else "")
        for job, name in zip(jobs, names, strict=True)
        for problem in platform_problems(job.config, planned_launch(job.config))
    ]
    if problems:
        raise ConfigError(problems)
    for number, job in enumerate(jobs):
        print_job(number, names)
        run_dir = make_run_dir(job.config)
        plan = build_plan(job.config, planned_launch(job.config))
        print_plan(plan)
        sys.stdout.write(f"\nwritten: {write_plan(plan, run_dir)}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Plans a command line and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.plan`; `sys.argv` when not given.
    """

    def read_and_plan() -> None:
        request: Request = parse_command_line(sys.argv[1:] if arguments is None else arguments)
        jobs = check_request(request, NO_LAUNCHER, planned_problems)
        if request.runs:
            plan_jobs(jobs)
        else:
            show_help(request, PLAN) if request.options.help else run_hydra(request, lambda _: None)

    return exit_code(read_and_plan)
