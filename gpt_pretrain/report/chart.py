"""The loss curve as text, drawn by plotext: a line for training, points for validation."""

import math
from collections.abc import Sequence

from gpt_pretrain.report.records import TrainRecord, ValidationRecord

VALIDATION_MARKER = "●"

type Point = tuple[float, float]


def draw_loss_chart(
    train: Sequence[TrainRecord], validation: Sequence[ValidationRecord], *, width: int, height: int = 14
) -> str | None:
    """Draws loss over steps, without colours.

    Args:
        train: Training records, by step.
        validation: Validation records, by step.
        width: Columns of the drawing.
        height: Lines of the drawing.

    Returns:
        Lines of at most `width` columns; None with fewer than two finite training losses, which make no curve.
    """
    line = [(record.step, record.loss) for record in train if math.isfinite(record.loss)]
    points = [(record.step, record.loss) for record in validation if math.isfinite(record.loss)]
    if len(line) < 2:
        return None
    # Imported late: it loads a native library that only the end of a run needs.
    import plotext

    # The width is the console's business, which knows what it writes to; plotext would ask the terminal itself.
    plotext.terminal.limit(False, False)
    figure = plotext.figure
    figure.clear()
    figure.theme("colorless")
    figure.plot_size(width, height)
    for side_axis in ("x", "y"):
        figure.axes(False, axis=side_axis, side=1)
    # A braille character is two dots wide: more points than that would turn noise into a band.
    steps, losses = zip(*_average_to(line, 2 * width), strict=True)
    figure.draw(figure.signal(list(steps), list(losses), marker="braille").lines())
    if points:
        steps, losses = zip(*points, strict=True)
        figure.draw(figure.signal(list(steps), list(losses), marker=VALIDATION_MARKER))
    all_steps = [step for step, _ in (*line, *points)]
    ticks = _step_ticks(min(all_steps), max(all_steps))
    figure.ruler("x").ticks(ticks, [str(tick) for tick in ticks])
    drawn = str(figure.build().string(colorless=True))
    return "\n".join(row.rstrip() for row in drawn.rstrip("\n").splitlines())


def _average_to(points: Sequence[Point], num_points: int) -> list[Point]:
    """At most `num_points` points, each the mean of as many neighbours."""
    per_point = math.ceil(len(points) / num_points)
    groups = [points[start : start + per_point] for start in range(0, len(points), per_point)]
    # The last step stays where it is, so that the axis ends where the run did.
    return [(group[-1][0], math.fsum(loss for _, loss in group) / len(group)) for group in groups]


def _step_ticks(first: int, last: int, num_intervals: int = 5) -> list[int]:
    """First and last step, and round numbers (1, 2 or 5 times a power of ten apart) between them."""
    span = max(last - first, 1)
    magnitude = 10 ** math.floor(math.log10(span / num_intervals)) if span > num_intervals else 1
    spacing = next(multiple * magnitude for multiple in (1, 2, 5, 10) if span <= multiple * magnitude * num_intervals)
    inner = range(math.ceil(first / spacing) * spacing, last, spacing)
    # A tick closer to an end than half the spacing would print its number over the end's.
    return [first, *(step for step in inner if min(step - first, last - step) >= spacing / 2), last]
