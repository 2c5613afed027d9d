"""What Linux says of any process in /proc (proc(5)); elsewhere nothing is known of others."""

from pathlib import Path


def start_of(process: int) -> int | None:
    """When a process started, in clock ticks since the host's boot; None if it has ended, or /proc is missing."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # From the third field, the state. The second is the program's name in parentheses, which may hold anything.
    fields = stat.rpartition(")")[2].split()
    # A zombie has ended; its parent has not asked for its exit code yet.
    return None if fields[0] in "ZX" else int(fields[19])
