"""What every command goes through: arguments in; messages and exit codes out.

    run_with_config     a command line that Hydra composes: train, plan, prepare_data, benchmark, compare,
                        coordinate_check
    run_with_arguments  a few `key=value` of a dataclass: export, import_hf, import_megatron, import_torchtitan,
                        generate, checkpoint, doctor
    run_alone           another program's arguments: translate

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
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from traceback import format_exception_only
from typing import TYPE_CHECKING

from gpt_pretrain.commands.arguments import defaults_of, print_help, read_arguments
from gpt_pretrain.config.errors import ConfigError, RankError, RunError, UserError, list_argument, visible
from gpt_pretrain.config.keys import section_keys
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.environment import limit_met, path_refused, prepare_libraries
from gpt_pretrain.launch.ranks import Launch, rank_zero_of, read_launch
from gpt_pretrain.launch.signals import INTERRUPTED, decided, ended_at_once, ended_by_signals
from gpt_pretrain.launch.told import tell_once, tell_torchrun

if TYPE_CHECKING:
    from gpt_pretrain.commands.command_line import Request
    from gpt_pretrain.rules.jobs import Job

CRASH, USER_ERROR = 1, 2
# The launch of a single-process command, whatever started its shell.
ALONE = rank_zero_of(1, local_world_size=1, launcher="none")


def _lines(error: UserError | RunError) -> list[str]:
    """What follows `error: `, for each problem."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    return [visible(problem, keep="\n").replace("\n", "\n       ") + "\n" for problem in problems]


def print_error(error: UserError | RunError) -> None:
    """Prints `error: …` lines, one for each problem, without a traceback; the process goes on."""
    sys.stderr.write("".join(f"error: {line}" for line in _lines(error)))
    sys.stderr.flush()


def _end_with(error: UserError | RunError) -> int:
    """Says why the process ends, once for all ranks of its node that find the same, and returns its exit code."""
    code = USER_ERROR if isinstance(error, UserError) else CRASH
    with decided(code):
        try:
            # The launch of this process: a command may have been given that of a single process.
            launch = read_launch()
        except ConfigError:
            tell_once(_lines(error), "error: ")
        else:
            if launch.world_size == 1:
                tell_torchrun("".join(f"error: {line}" for line in _lines(error)).rstrip())
                print_error(error)
            else:
                tell_once(_lines(error), f"error{_who(error, launch)}: ")
    return code


def _who(error: UserError | RunError, launch: Launch) -> str:
    """The rank or the host that has the error; empty if all ranks may have it, as each node tells its own."""
    if isinstance(error, RankError):
        return f" (rank {launch.rank})"
    return "" if launch.rank == launch.local_rank else f" ({socket.gethostname()})"


@contextmanager
def importing_torch() -> Iterator[None]:
    """For a command's imports of modules that need torch; without a GPU the CPU stands in for one."""
    with ended_at_once():
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
        # As for stderr: characters that the output's encoding lacks become escapes such as \u2026.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = command(launch or read_launch()) or 0
        sys.stdout.flush()
        return code
    except (UserError, RunError) as error:
        return _end_with(error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        refused, problem = path_refused(error), limit_met(error)
        if refused is not None:
            return _end_with(UserError(refused))
        if isinstance(error, BrokenPipeError):
            problem = f"{error.strerror}: what reads the output has ended"
        if problem is None:
            tell_torchrun("".join(format_exception_only(error)).rstrip())
            raise
        try:
            sys.stdout.flush()
        except OSError:
            # Drops what was not written: Python would try again at exit, and print another error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _end_with(RankError(problem))


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
            with ended_by_signals():
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
        if names := getattr(chosen, "extensions", []):
            from gpt_pretrain.rules.extensions import import_extensions

            import_extensions(names, list_argument("extensions", names))
        prepare_libraries()
        with ended_by_signals():
            return command(chosen)

    return _run(read_and_run, ALONE)


def run_alone(doc: str, command: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None) -> int:
    """Runs a command that reads its arguments itself, or prints `doc` for `--help`, and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments

    def read_and_run(_: Launch) -> int | None:
        if {"-h", "--help"} & set(given[:1]):
            sys.stdout.write(doc)
            return None
        prepare_libraries()
        with ended_by_signals():
            return command(given)

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
