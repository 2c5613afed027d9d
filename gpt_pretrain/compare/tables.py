"""Metrics by name and step: TensorBoard's event files, and tables exported as CSV.

    W&B      a chart's export: `"Step","RUN - train/loss","RUN - train/loss__MIN",…`, several runs side by side
    others   one run: a column of steps, and columns with the names of known metrics

`_NAMES` has the metrics' names in our runs, Megatron-LM, NeMo, torchtitan, transformers and nanoGPT.
"""

import csv
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NoReturn

from gpt_pretrain.compare.comparison import Format
from gpt_pretrain.compare.series import MAX_BYTES, MAX_POINTS, Point, Series, check_size
from gpt_pretrain.config.errors import UserError, format_bytes

type Columns = dict[str, dict[int, float]]
"""Metric → step → value."""
type Rows = Iterator[tuple[int, list[str]]]
"""The number of a row's last line in the file, and its cells."""

_NAMES = {
    "loss": (
        "train/loss",
        "lm loss",
        "loss_metrics/global_avg_loss",
        "reduced_train_loss",
        "train_loss",
        "training_loss",
        "loss",
    ),
    "validation": (
        "validation/loss",
        "lm loss validation",
        "validation_metrics/loss",
        "val_loss",
        "val/loss",
        "eval/loss",
        "eval_loss",
        "validation_loss",
    ),
    "tokens": ("train/consumed_tokens", "ntokens_seen", "consumed_tokens", "train/tokens"),
    "samples": ("train/consumed_samples", "consumed_samples"),
    "rate": ("train/tokens_per_s_per_gpu", "throughput(tps)"),
    "all GPUs": ("train/tokens_per_s",),
    "num_gpus": ("world-size",),
    "step_s": ("train/step_time_s", "train_step_timing in s", "train_step_timing", "iteration-time"),
    "memory": ("train/memory_gib", "memory/max_reserved(GiB)"),
    "skipped": ("train/skipped_steps",),
}
_KNOWN = {name.lower() for names in _NAMES.values() for name in names}
_STEPS = ("step", "_step", "global_step", "trainer/global_step", "train/global_step", "iteration", "iter")
_MAX_FILES, MAX_DEPTH, _MAX_COLUMNS = 1000, 4, 10_000
_EVENTS = "*tfevents*"
_EXPECTED = f"a column of steps ({', '.join(_STEPS[:3])}, …) and one of losses ({', '.join(_NAMES['loss'])})"


def _column(columns: Columns, what: str) -> dict[int, float]:
    """The column of a measurement under any of its names; empty without one."""
    by_lower = {name.lower(): column for name, column in columns.items()}
    return next((by_lower[name.lower()] for name in _NAMES[what] if name.lower() in by_lower), {})


def _series(columns: Columns, source: Path, format_: Format, label: str) -> Series | None:
    """A run from its columns; None without a loss."""
    losses = _column(columns, "loss")
    if not losses:
        return None
    series = Series(source=str(source), format=format_, label=label)
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
            ),
            str(source),
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
        series = _series(columns, directory, "tensorboard", label)
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


def read_table(path: Path) -> list[Series]:
    """The runs of an exported table; empty if the first line is not its heading.

    Raises `UserError` if a row is damaged or no column is a loss.
    """
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        reader = csv.reader(file)
        # A quoted cell may span several lines.
        rows = ((reader.line_num, row) for row in reader)
        try:
            _, heading = next(rows, (0, []))
            lower = [name.strip().lower() for name in heading]
            if not 2 <= len(heading) <= _MAX_COLUMNS:
                return []
            if not {*_STEPS} & set(lower):
                if any(name.endswith("loss") for name in lower):
                    _refuse(path, 1, _EXPECTED)
                return []
            return _wide(path, [name.strip() for name in heading], rows)
        except csv.Error as error:
            _refuse(path, reader.line_num, f"a row of a table ({error})")


def _refuse(path: Path, line: int, expected: str) -> NoReturn:
    raise UserError(f"{path}:{line}: expected {expected}; remove the line, or export the table again")


def _cell(path: Path, line: int, name: str, text: str) -> float | None:
    """A number; None for an empty cell."""
    if not text.strip():
        return None
    try:
        return float(text)
    except ValueError:
        _refuse(path, line, f"a number in {name!r}, not {text[:40]!r}")


def _whole_rows(path: Path, width: int, rows: Rows) -> Rows:
    for line, row in rows:
        if not any(cell.strip() for cell in row):
            continue
        if len(row) != width:
            _refuse(path, line, f"{width} columns as in the heading, not {len(row)}")
        if line > MAX_POINTS:
            _refuse(path, line, f"at most {MAX_POINTS:,} rows")
        yield line, row


def _wide(path: Path, heading: Sequence[str], rows: Rows) -> list[Series]:
    """One metric per column; with headings `RUN - METRIC`, several runs side by side."""
    axis = next(index for index, name in enumerate(heading) if name.lower() in _STEPS)
    by_run: dict[str, dict[str, int]] = {}
    for index, name in enumerate(heading):
        run, _, metric = name.rpartition(" - ")
        if index != axis and not metric.endswith(("__MIN", "__MAX")):
            by_run.setdefault(run, {})[metric] = index
    columns: dict[str, Columns] = {run: {name: {} for name in metrics} for run, metrics in by_run.items()}
    for line, row in _whole_rows(path, len(heading), rows):
        step = _cell(path, line, heading[axis], row[axis])
        if step is None or _whole(step) != step:
            _refuse(path, line, f"a whole number in {heading[axis]!r}, not {row[axis][:40]!r}")
        for run, metrics in by_run.items():
            for name, index in metrics.items():
                # Unknown columns may hold anything.
                if name.lower() in _KNOWN and (value := _cell(path, line, name, row[index])) is not None:
                    columns[run][name][int(step)] = value
    found = [_series(each, path, "csv", run if len(columns) > 1 else "") for run, each in columns.items()]
    runs = [series for series in found if series is not None]
    if not runs:
        _refuse(path, 1, f"{_EXPECTED} with numbers; it has: {', '.join(heading[:12])}")
    return runs
