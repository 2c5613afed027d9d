"""What Linux says of any process in /proc (proc(5)); elsewhere nothing is known of others."""

from pathlib import Path


def start_of(process: int) -> int | None:
    """When a process started, in clock ticks since the host's boot; None if it has ended, or /proc is missing."""
    fields = _stat(process)
    # A zombie has ended; its parent has not asked for its exit code yet.
    return None if not fields or fields[0] in "ZX" else int(fields[19])


def parent_of(process: int) -> int:
    """The number of a process's parent; 0 if it has none that can be seen."""
    fields = _stat(process)
    return int(fields[1]) if fields else 0


def environment_of(process: int) -> dict[str, str]:
    """The variables that a process was started with; none if it belongs to another user."""
    try:
        variables = Path(f"/proc/{process}/environ").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return dict(variable.partition("=")[::2] for variable in variables.split("\0") if variable)


def _stat(process: int) -> list[str]:
    """The fields of /proc/N/stat from the third, the state; none if there is no such process."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The second is the program's name in parentheses, which may hold anything.
    return stat.rpartition(")")[2].split()
