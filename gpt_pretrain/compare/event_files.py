"""TensorBoard's event files: metrics by name and step, one run per folder.

`_NAMES` has the metrics' names in our runs, Megatron-LM and torchtitan, and plain ones.
"""

import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from gpt_pretrain.compare.series import MAX_BYTES, Point, Series, check_size
from gpt_pretrain.config.errors import UserError, format_bytes

type Columns = dict[str, dict[int, float]]
"""Metric → step → value."""

_NAMES = {
    "loss": ("train/loss", "lm loss", "loss_metrics/global_avg_loss", "train_loss", "loss"),
    "validation": ("validation/loss", "lm loss validation", "validation_metrics/loss", "val_loss", "eval_loss"),
    "tokens": ("train/consumed_tokens", "ntokens_seen"),
    "samples": ("train/consumed_samples",),
    "rate": ("train/tokens_per_s_per_gpu", "throughput(tps)"),
    "all GPUs": ("train/tokens_per_s",),
    "num_gpus": ("world-size",),
    "step_s": ("train/step_time_s", "iteration-time"),
    "memory": ("train/memory_gib", "memory/max_reserved(GiB)"),
    "skipped": ("train/skipped_steps",),
}
_MAX_FILES, MAX_DEPTH = 1000, 4
_EVENTS = "*tfevents*"


def _column(columns: Columns, what: str) -> dict[int, float]:
    """The column of a measurement under any of its names; empty without one."""
    by_lower = {name.lower(): column for name, column in columns.items()}
    return next((by_lower[name.lower()] for name in _NAMES[what] if name.lower() in by_lower), {})


def _series(columns: Columns, source: Path, label: str) -> Series | None:
    """A run from its columns; None without a loss."""
    losses = _column(columns, "loss")
    if not losses:
        return None
    series = Series(source=str(source), format="tensorboard", label=label)
    tokens, samples, rates, step_s = (_column(columns, what) for what in ("tokens", "samples", "rate", "step_s"))
    for step in sorted(losses):
        series.add(
            Point(
                step=step,
                loss=losses[step],
                samples=_whole(samples.get(step)),
                tokens=_whole(tokens.get(step)),
                step_s=_positive(step_s.get(step)),
                tokens_per_s_per_gpu=_positive(rates.get(step)),
            )
        )
    series.validation = _column(columns, "validation")
    together = _column(columns, "all GPUs")
    if both := [step for step in together if _positive(rates.get(step)) and _positive(together[step])]:
        series.num_gpus = max(1, round(together[both[0]] / rates[both[0]]))
    elif (counts := [*_column(columns, "num_gpus").values()]) and 1 <= counts[-1] < 1 << 20:
        series.num_gpus = round(counts[-1])
    finite = [value for value in _column(columns, "memory").values() if math.isfinite(value)]
    series.memory_gib = max(finite, default=None)
    if skipped := [value for value in _column(columns, "skipped").values() if math.isfinite(value)]:
        series.skipped_steps = round(math.fsum(skipped))
    return series


def _whole(value: float | None) -> int | None:
    return round(value) if value is not None and 0 <= value < 1 << 53 else None


def _positive(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None


def find_event_files(directory: Path) -> list[Path]:
    """TensorBoard's files in a directory and the folders in it; raises `UserError` if there are too many."""
    paths = (path for depth in range(MAX_DEPTH) for path in directory.glob("*/" * depth + _EVENTS))
    found = sorted(islice(paths, _MAX_FILES + 1))
    if len(found) > _MAX_FILES:
        raise UserError(f"{directory} has more than {_MAX_FILES} event files; give one run's folder")
    return found


def read_event_files(directory: Path, paths: Sequence[Path]) -> list[Series]:
    """The runs of TensorBoard's files, one per folder; raises `UserError` if files are too large or none has a loss."""
    for path in paths:
        check_size(path)
    if sum(path.stat().st_size for path in paths) > MAX_BYTES:
        raise UserError(f"{directory}: its event files have more than {format_bytes(MAX_BYTES)}; give one run's folder")
    found = []
    names: set[str] = set()
    # Writers such as add_scalars create a folder per tag; those without a loss are not runs.
    for place in dict.fromkeys(path.parent for path in paths) if directory.is_dir() else paths:
        columns = _event_columns(place)
        names |= set(columns)
        label = str(place.relative_to(directory)) if place != directory else ""
        series = _series(columns, directory, label)
        if series is not None:
            found.append(series)
    if not found:
        scalars = ", ".join(sorted(names)[:12]) or "none; the files are empty or damaged"
        raise UserError(
            f"{directory} has no scalar of a training loss; expected one of {', '.join(_NAMES['loss'])}; it has: "
            f"{scalars}"
        )
    return found


def _event_columns(place: Path) -> Columns:
    # Imported late: it takes a third of a second.
    from tensorboard.backend.event_processing.event_accumulator import DEFAULT_SIZE_GUIDANCE, SCALARS, EventAccumulator

    # 0 keeps everything; one image or histogram is enough.
    events = EventAccumulator(str(place), {**dict.fromkeys(DEFAULT_SIZE_GUIDANCE, 1), SCALARS: 0})
    events.Reload()
    return {
        tag: {int(event.step): float(event.value) for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]
    }
