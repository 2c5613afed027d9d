"""How much memory a process may have on this machine: what there is, or what its container or Slurm job leaves it."""

import os
from collections.abc import Iterator
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_MEMORY = Path("/proc/meminfo")


def host_memory_bytes() -> tuple[int, str]:
    """The bytes, swap included, and whose they are: "this machine" or "this process's control group"."""
    installed, swap = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), _swap_bytes()
    limit = min(_limits(), default=installed)
    if limit < installed:
        return limit + swap, "this process's control group"
    return installed + swap, "this machine"


def _swap_bytes() -> int:
    if _MEMORY.is_file():
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0


def _limits() -> Iterator[int]:
    """Limits of this process's control group and of those that it is in, as Linux's cgroup v2 and v1 write them."""
    if not _OWN_GROUPS.is_file():
        return
    for line in _OWN_GROUPS.read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        if not controllers:
            root, name = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's, and only the root is there.
        group = root / own.lstrip("/")
        for folder in (group, *(parent for parent in group.parents if parent.is_relative_to(root))):
            file = folder / name
            if file.is_file() and (said := file.read_text().strip()).isdigit():
                yield int(said)
