"""What the entry point tells on the terminal about errors and sweeps."""

import sys
import time
from collections.abc import Callable, Sequence

from gpt_pretrain.config.errors import ConfigError, RunError, UserError
from gpt_pretrain.launch.ranks import Launch

USER_ERROR, INTERRUPTED = 2, 130
# Longer than a launcher needs to end the other ranks once rank 0 has told the error and left.
RANK_ZERO_FIRST_S = 3.0


def print_error(error: UserError | RunError, who: str = "") -> None:
    """Prints `error: …` lines, one for each problem, without a traceback."""
    problems = error.problems if isinstance(error, ConfigError) else (str(error),)
    for problem in problems:
        sys.stderr.write(f"error{who}: " + problem.replace("\n", "\n       ") + "\n")
    sys.stderr.flush()


def exit_code(command: Callable[[], None]) -> int:
    """Runs a command of a single process: 0, 2 with `error: …` for what a user can mend, 130 after Ctrl-C."""
    try:
        command()
    except UserError as error:
        print_error(error)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def print_error_after_rank_zero(error: UserError | RunError, launch: Launch) -> None:
    """Prints an error that training raised: on rank 0 at once, elsewhere only if rank 0 does not end the run first.

    An error that all ranks find is so told once, and one that a single rank finds (a file missing on its node) is not
    lost.
    """
    if not launch.is_rank_zero:
        time.sleep(RANK_ZERO_FIRST_S)
    print_error(error, "" if launch.is_rank_zero else f" (rank {launch.rank})")


def print_job(number: int, names: Sequence[str]) -> None:
    """Announces a job of a sweep; a single run announces itself."""
    if len(names) > 1:
        sys.stdout.write(f"\nrun {number + 1} of {len(names)}: {names[number]}\n")
        sys.stdout.flush()


def print_sweep_result(names: Sequence[str], codes: Sequence[int]) -> None:
    """Lists the jobs of a sweep that failed, at its end."""
    failed = [f"  run {n + 1}: {names[n]} (exit code {code})" for n, code in enumerate(codes) if code]
    if len(names) > 1 and failed:
        sys.stderr.write("\n".join([f"error: {len(failed)} of {len(names)} runs of the sweep failed", *failed]) + "\n")
