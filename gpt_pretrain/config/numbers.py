"""Numbers in messages: the divisors of one, the multiples near one, how they are listed, and sizes of files."""

import math
from collections.abc import Sequence


def one_of(values: Sequence[object]) -> str:
    """Values as a message offers them: "1, 2 or 4"."""
    shown = list(values) if len(values) <= 12 else [*values[:11], values[-1]]
    return " or ".join(filter(None, [", ".join(map(str, shown[:-1])), str(shown[-1])]))


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def multiples_near(number: int, of: int) -> list[int]:
    """The multiples of `of` on both sides of `number`; the lower one only if it is positive."""
    below = number // of * of
    return [value for value in (below, below + of) if value > 0]


def format_bytes(num_bytes: int) -> str:
    """A size on a disk with three significant digits, in units of powers of two: 512 B, 1.5 MiB, 19.6 GiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"
