"""How numbers are written for people: a few significant digits, a unit, `–` for what was not measured."""

import math

UNKNOWN = "–"


def format_count(value: float | None) -> str:
    """A count or a rate with three significant digits: 987, 12.3k, 1.5M, 2.25B."""
    if value is None:
        return UNKNOWN
    if not math.isfinite(value):
        return str(value)
    # A value that would round up to 1000 of a unit is written in the next one: 999,960 is 1M, not 1000k.
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            return _three_digits(value / unit) + name
    return _three_digits(value)


def format_rate(value: float | None) -> str:
    """A measurement such as TFLOP/s with three significant digits, without a unit: 0.052, 12.3, 712."""
    if value is None:
        return UNKNOWN
    return _three_digits(value) if math.isfinite(value) else str(value)


def _three_digits(value: float) -> str:
    if value == 0:
        return "0"
    decimals = 2 - math.floor(math.log10(abs(value)))
    rounded = round(value, decimals)
    return f"{rounded:.{max(decimals, 0)}f}".rstrip("0").rstrip(".") if decimals > 0 else f"{rounded:.0f}"


def format_loss(value: float | None) -> str:
    """A loss with four decimals: the noise between runs of the same seed shows in the fifth."""
    return UNKNOWN if value is None else f"{value:.4f}"


def format_percent(share: float | None) -> str:
    """A share between 0 and 1 as a percentage."""
    return UNKNOWN if share is None else f"{100 * share:.1f}%"


def format_share(share: float | None) -> str:
    """A share between 0 and 1, however small, as a percentage with two digits: 31%, 0.12%, <0.001%."""
    if share is None:
        return UNKNOWN
    percent = 100 * share
    if 0 < percent < 1e-3:
        return "<0.001%"
    return f"{percent:.1f}%" if percent >= 10 else f"{percent:.2g}%"


def format_magnitude(value: float | None) -> str:
    """A number of any size with three significant digits: 0.0312, 448, 1.2e+06."""
    return UNKNOWN if value is None else f"{value:.3g}"


def format_gib(value: float | None) -> str:
    """Memory."""
    return UNKNOWN if value is None else f"{value:.1f} GiB"


def format_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds, with days from the second day on: 0:01:23, 3d 04:05:06."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"
