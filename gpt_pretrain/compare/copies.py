"""Which lines of a log are copies: of a step that another rank has printed, too.

Each rank prints its steps in order, but the lines of several mix: 10 10 20 10 20 30 20 … A program that resumed from a
checkpoint also goes back, and what it prints from there on replaces the old lines. Two things tell copies from a
restart: the rank in front of the line, which a launcher writes (`[rank3]:`, `[default3]:`, `3: `), and without it the
number of times that most steps come, because ranks wait for each other and hardly get ahead.
"""

import re
import statistics
from collections.abc import Iterable

_RANK = re.compile(r"\s*(?:\[[a-z]+(\d+)\]:|(\d+): )")
# Of a log's steps; fewer repeat where a program resumed.
_SHARE_REPEATED = 0.75


def rank_of(line: str) -> str | None:
    """The rank that a launcher wrote in front of a line; None without one."""
    match = _RANK.match(line)
    return None if match is None else match[1] or match[2]


def usual_copies(steps: Iterable[int]) -> int:
    """How often most steps come in a log whose lines tell no ranks; 1 where one rank prints."""
    finished: list[int] = []
    counts: dict[int, int] = {}
    before = last = -1
    for step in steps:
        if step > last:
            before, last = last, step
        elif step < before or step not in counts:
            # Further back than a rank can lag: a restart.
            finished += counts.values()
            counts, before, last = {}, -1, step
        counts[step] = counts.get(step, 0) + 1
    finished += counts.values()
    repeated = sum(count - 1 for count in finished)
    return statistics.median_low(finished) if finished and repeated >= _SHARE_REPEATED * len(finished) else 1


class Copies:
    """Recognizes copies line by line; `usual` is of `usual_copies`."""

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self._first: dict[int, tuple[str | None, int]] = {}
        self._last = -1

    def is_copy(self, rank: str | None, step: int) -> bool:
        """Whether the next line, of this rank and step, is a copy of an earlier one."""
        first, count = self._first.get(step, (None, 0))
        if count and (rank != first if rank is not None else self._is_usual(step, count)):
            self._first[step] = first, count + 1
            return True
        # In the order of steps, as what follows a restart replaces what it goes back behind.
        while self._first and next(reversed(self._first)) >= step:
            self._first.popitem()
        self._first[step] = rank, 1
        self._last = step
        return False

    def _is_usual(self, step: int, count: int) -> bool:
        return count < self._usual or (self._usual > 1 and step == self._last)
