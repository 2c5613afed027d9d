"""`python -m gpt_pretrain.benchmark`: variants of a run, measured on this machine under the same knobs.

    command line → training's gate → each variant in processes of its own → tables, benchmark.json and Markdown

It takes every command line that `python -m gpt_pretrain` takes, and starts torchrun itself: `trainer.devices` says how
many processes. Exit codes: 0 all variants were measured, 1 at least one was not, 2 a mistake in what was given.
"""

import sys
from collections.abc import Sequence

from rich.console import Console

from gpt_pretrain.benchmark.compare import Comparison
from gpt_pretrain.benchmark.document import WIDTH
from gpt_pretrain.benchmark.variants import benchmark_problems
from gpt_pretrain.commands.command_line import check_request, parse_command_line, run_hydra, show_help
from gpt_pretrain.commands.door import exit_code, print_error
from gpt_pretrain.commands.help import BENCHMARK
from gpt_pretrain.config.errors import ConfigError, RunError
from gpt_pretrain.launch.process import ended_by_signals
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.launch.run_dir import check_run_dir

FAILED = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what a command line asks for and returns the exit code.

    Args:
        arguments: What follows `python -m gpt_pretrain.benchmark`; `sys.argv` when not given.
    """
    measured_all = True

    def read_and_compare() -> None:
        nonlocal measured_all
        launch = read_launch()
        given = sys.argv[1:] if arguments is None else arguments
        request = parse_command_line(given)
        if launch.world_size > 1:
            problem = f"a benchmark starts its processes itself, and {launch.launcher} started this one"
            raise ConfigError([f"{problem}; start it plainly, with trainer.devices={launch.local_world_size}"])
        if request.options.multirun:
            raise ConfigError(["-m: a benchmark compares benchmark.variants=[…] and takes no sweep"])
        jobs = check_request(request, launch, benchmark_problems)
        if not request.runs:
            show_help(request, BENCHMARK) if request.options.help else run_hydra(request, lambda _: None)
            return
        check_run_dir(jobs[0].config)
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDTH)
        comparison = Comparison(jobs[0].config, request.source, request.overrides, given, console)
        with ended_by_signals():
            measured_all = comparison.run()

    try:
        code = exit_code(read_and_compare)
    except RunError as error:
        print_error(error)
        return FAILED
    return code or (0 if measured_all else FAILED)
