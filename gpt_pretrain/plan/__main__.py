"""gpt_pretrain.plan: what a training command would do, without a GPU.

It takes every argument of python -m gpt_pretrain and trains nothing. It shows
where each setting lands, which linear layers run in FP8, memory per GPU and
the predicted speed on the machine that plan.gpu and plan.num_gpus name, and
writes plan.json into run_dir (outputs/DATE/TIME_NAME where none is given).

Exit codes: 0 planned; 2 training would be refused, with the same errors;
1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.plan                       the tiny GPT on one H200
    python -m gpt_pretrain.plan model=llama3_8b parallelism=dp plan.num_gpus=8
    python -m gpt_pretrain.plan model=gpt3_1_3b fp8=delayed plan.gpu=h100
    python -m gpt_pretrain.plan -m fp8=none,delayed,tensorwise   one plan each
"""

import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpt_pretrain.commands.command import ALONE, print_job, run_with_config
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.config.errors import ConfigError, visible
from gpt_pretrain.config.schedule import batch_grows, rates_in_tokens
from gpt_pretrain.launch.environment import prepare_libraries
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir, make_run_dir
from gpt_pretrain.plan.machine import planned_problems, platform_problems
from gpt_pretrain.rules.jobs import Job

if TYPE_CHECKING:
    from gpt_pretrain.plan.forecast import Plan


def plan_jobs(request: Request, jobs: Sequence[Job], launch: Launch) -> None:
    """Plans each job of a checked command line.

    Raises:
        UserError: The planned machine refuses one of them, or a run directory cannot be written.
    """
    for job in jobs:
        check_run_dir(job.config)
    # Tables take a while to load: not before the command line is accepted.
    from gpt_pretrain.plan.document import WIDTH, print_plan, write_plan
    from gpt_pretrain.plan.forecast import build_plan
    from gpt_pretrain.report.console import console_of_width

    if problems := [
        problem + (f" [{job.name}]" if len(jobs) > 1 else "")
        for job in jobs
        for problem in platform_problems(job.config)
    ]:
        raise ConfigError(problems)
    for number, job in enumerate(jobs):
        print_job(number, jobs)
        run_dir = make_run_dir(job.config.run_dir, job.config.name)
        plan = build_plan(job.config)
        print_plan(plan, console_of_width(WIDTH))
        sys.stdout.write(f"\nwritten: {visible(str(write_plan(plan, run_dir)))}\n")
        if batch_grows(job.config.model) or rates_in_tokens(job.config):
            sys.stdout.write(f"written: {visible(str(write_picture(plan, run_dir)))}\n")


def write_picture(plan: "Plan", run_dir: Path) -> Path:
    """Writes `schedule.html`: learning rate and batch over tokens. The batch of a point is that of the step to it."""
    from gpt_pretrain.compare.comparison import write_result
    from gpt_pretrain.compare.page import build_plot, html_page
    from gpt_pretrain.plan.schedule import rate_curve

    prepare_libraries()
    tokens, rates = zip(*rate_curve(plan.spec.config, plan.schedule), strict=True)
    stages = plan.schedule.stages
    ends = [*(stage.begin_tokens for stage in stages), plan.schedule.num_tokens]
    batches = [*(stage.global_batch_size for stage in stages), stages[-1].global_batch_size]
    traces: dict[str, tuple[str, dict[str, Any]]] = {
        "learning rate": ("model.optim.lr", {"x": tokens, "y": rates, "mode": "lines"}),
        "batch": ("samples a step", {"x": ends, "y": batches, "mode": "lines", "line": {"shape": "hv"}}),
    }
    plots = [(name, build_plot(name, [trace], "tokens", unit)) for name, (unit, trace) in traces.items()]
    above = f"<p>{escape(plan.schedule.rates)}; {plan.schedule.num_steps:,} steps</p>\n"
    return write_result(run_dir / "schedule.html", html_page(f"{plan.spec.config.name}: schedule", above, plots, ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_config(__doc__, plan_jobs, arguments, launch=ALONE, rules=planned_problems, name="plan")


if __name__ == "__main__":
    raise SystemExit(main())
