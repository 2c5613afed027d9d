"""The one door of all commands: arguments in; messages and exit codes out.

    run_with_config     a command line that Hydra composes: train, plan, prepare_data, benchmark, compare
    run_with_arguments  a few `key=value` of a dataclass: export, import_hf, generate, checkpoint, doctor, picture

A command is what `python -m` starts: a module beside the packages, or a package's `__main__`. Its docstring, which ends
with a section of examples, is its `--help`. A user's mistake ends it with `error: …` lines instead of a traceback. Exit
codes of every command, besides its own:

      0  done
      1  a crash, or a `RunError`
      2  a mistake in what was given
     75  SIGTERM or SIGUSR1 came: start it again
    130  Ctrl-C

Nothing here imports Hydra, OmegaConf or torch before a command needs them: the doctor works without them.
"""

import io
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gpt_pretrain.commands.arguments import defaults_of, print_help, read_arguments
from gpt_pretrain.config.errors import ConfigError, RunError, UserError, visible
from gpt_pretrain.config.keys import section_keys
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.environment import (
    INTERRUPTED,
    ended_by_signals,
    ended_while_importing,
    limit_met,
    prepare_libraries,
)
from gpt_pretrain.launch.ranks import Launch, rank_zero_of, read_launch

if TYPE_CHECKING:
    from gpt_pretrain.commands.command_line import Request
    from gpt_pretrain.rules.gate import Job

CRASH, USER_ERROR = 1, 2
# The launch of a single-process command, whatever started its shell.
ALONE = rank_zero_of(1, local_world_size=1, launcher="none")
# Longer than a launcher needs to end the other ranks once rank 0 has exited with the error.
RANK_ZERO_FIRST_S = 3.0


def print_error(error: UserError | RunError, who: str = "") -> None:
    """Prints `error: …` lines, one for each problem, without a traceback."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    for problem in problems:
        sys.stderr.write(f"error{who}: " + visible(problem, keep="\n").replace("\n", "\n       ") + "\n")
    sys.stderr.flush()


def print_error_after_rank_zero(error: UserError | RunError, launch: Launch) -> None:
    """Prints an error of training on rank 0 at once, and on other ranks only if rank 0 does not end the run first.

    So an error of all ranks is printed once, and an error of a single rank (a file missing on its node) is not lost.
    """
    if launch.is_rank_zero:
        print_error(error)
    else:
        time.sleep(RANK_ZERO_FIRST_S)
        print_error(error, of_rank(launch))


def of_rank(launch: Launch | None) -> str:
    """The rank, for errors that each rank meets by itself; empty for a single process."""
    return "" if launch is None or launch.world_size == 1 else f" (rank {launch.rank})"


@contextmanager
def importing_torch() -> Iterator[None]:
    """For a command's imports of modules that need torch; without a GPU the CPU stands in for one."""
    with ended_while_importing():
        from gpt_pretrain.megatron.cpu import install_cpu_device

        install_cpu_device()
        yield


def print_job(number: int, jobs: "Sequence[Job]") -> None:
    """Announces a job of a sweep."""
    if len(jobs) > 1:
        sys.stdout.write(f"\nrun {number + 1} of {len(jobs)}: {visible(jobs[number].name)}\n")
        sys.stdout.flush()


def _run(command: Callable[[Launch], int | None], launch: Launch | None = None) -> int:
    """Runs a command and returns its exit code; see `run_with_config` for the arguments."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As for stderr: an encoding other than UTF-8 gets \u2026 for characters it lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with ended_by_signals():
            launch = launch or read_launch()
            code = command(launch) or 0
            sys.stdout.flush()
            return code
    except (UserError, RunError) as error:
        # Every rank finds the same, and one reports it.
        if launch is None or launch.is_rank_zero:
            print_error(error)
        return USER_ERROR if isinstance(error, UserError) else CRASH
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        problem = limit_met(error)
        if isinstance(error, BrokenPipeError):
            problem = f"{error.strerror}: what reads the output has ended"
        if problem is None:
            raise
        try:
            sys.stdout.flush()
        except OSError:
            # Drops the rest: Python would try to write it at exit, and print another error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print_error(RunError(problem), of_rank(launch))
        return CRASH


def run_with_config(
    doc: str,
    command: Callable[["Request", "list[Job]", Launch], int | None],
    arguments: Sequence[str] | None,
    *,
    launch: Launch | None = None,
    rules: Callable[[Config], Iterable[str]] | None = None,
    refuse: Callable[["Request", Launch], None] | None = None,
    name: str | None = None,
) -> int:
    """Checks a command line that Hydra composes, runs it or shows what it asks to see, and returns the exit code.

    Args:
        doc: The docstring of the command's module.
        command: Runs the checked jobs and returns the exit code, None for 0; it imports torch itself.
        arguments: What follows the command's name; by default from `sys.argv`.
        launch: The process's place in the run; by default from the launcher's variables.
        rules: The cross-field rules; by default those of training.
        refuse: Raises `ConfigError` for what the command never does, whatever the configuration.
        name: The command, to refuse keys that only others read; None accepts all.
    """

    def check_and_run(launch: Launch) -> int | None:
        from gpt_pretrain.commands.command_line import check_request, parse_command_line, show

        request = parse_command_line(sys.argv[1:] if arguments is None else arguments)
        if refuse is not None:
            refuse(request, launch)
        jobs = check_request(request, launch, rules, name)
        if request.runs:
            return command(request, jobs, launch)
        if launch.is_rank_zero:
            show(request, doc)
        return None

    return _run(check_and_run, launch)


def run_with_arguments[Arguments](
    doc: str,
    kind: type[Arguments],
    command: Callable[[Arguments], int | None],
    arguments: Sequence[str] | None,
    *,
    plain: Sequence[str] = (),
) -> int:
    """Reads a command's own few arguments, the fields of `kind`, runs it, and returns the exit code.

    The values of the keys in `plain` may be given without their keys, in this order.
    """
    given = sys.argv[1:] if arguments is None else arguments

    def read_and_run(_: Launch) -> int | None:
        if {"-h", "--help"} & set(given):
            print_help(doc, section_keys(kind), defaults_of(kind))
            return None
        chosen = read_arguments(kind, given, plain)
        prepare_libraries()
        return command(chosen)

    return _run(read_and_run, ALONE)


def refuse_launcher_and_sweep(request: "Request", launch: Launch, what: str, variants: str) -> None:
    """Refuses launchers and sweeps for a command, named `what`, that starts processes for the `variants` of that key.

    Raises:
        ConfigError: A launcher started this process, or `-m` was given.
    """
    if launch.world_size > 1:
        problem = f"{what} starts its processes itself, and {launch.launcher} started this one"
        raise ConfigError([f"{problem}; start it plainly, with trainer.devices={launch.local_world_size}"])
    if request.options.multirun:
        raise ConfigError([f"-m: {what} compares {variants}=[…] and takes no sweep"])
