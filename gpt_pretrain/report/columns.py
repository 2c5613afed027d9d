"""How records are shown: one table of columns for log lines, terminals and TensorBoard's curves.

A column says how logs and terminals show one field of a record. A new measurement is a field in `records` and a line
here. Logs have `name value` pairs with all digits that scripts need; terminals show a few significant digits, a unit,
and `–` for what was not measured.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from rich.text import Text

from gpt_pretrain.config.errors import format_bytes, format_digits, format_short
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.report.records import (
    CheckpointRecord,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Tensor,
    Record,
    TrainRecord,
    ValidationRecord,
    ValidationTasksRecord,
)

UNKNOWN = "–"


def format_count(value: float | None) -> str:
    """A count or a rate with three significant digits: 987, 12.3k, 1.5M, 2.25B."""
    return UNKNOWN if value is None else format_short(value)


def format_rate(value: float | None) -> str:
    """A measurement such as TFLOP/s with three significant digits, without a unit: 0.052, 12.3, 712."""
    if value is None:
        return UNKNOWN
    return format_digits(value) if math.isfinite(value) else str(value)


def format_loss(value: float | None) -> str:
    """A loss with four decimals: the fifth is noise between runs of the same seed."""
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
    """Hours, minutes, seconds, and days if there are any: 0:01:23, 3d 04:05:06."""
    if seconds is None or not math.isfinite(seconds):
        return UNKNOWN
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}d {hour:02}:{minute:02}:{second:02}" if days else f"{hour}:{minute:02}:{second:02}"


def printable(text: str, keep: str = "") -> str:
    """Text without control characters except those in `keep`: logs and samples must not control the terminal."""
    return "".join(char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in text)


type _Form = str | Callable[[Any], str]
"""A format specification or a function; neither ever gets None."""


@dataclass(frozen=True, slots=True)
class Column:
    """How one field of a record is shown."""

    field: str
    _: KW_ONLY
    log: _Form | None = None
    """The value in a log; None leaves the column out."""
    optional: bool = False
    """A log has the column only where there is a value."""
    log_name: str = ""
    """The name in a log, if it is not the field's."""
    title: str = ""
    """On a terminal a table's heading, or a phrase with `{}` for the value; without one the column is not shown."""
    form: _Form = ""
    """The value on a terminal."""
    style: str = ""
    """Of the value on a terminal; for FP8 tensors only if the value is positive."""
    priority: int = 0
    """If a terminal is too narrow, the columns with the highest numbers are dropped first."""
    curve: str = ""
    """An FP8 tensor's curve in TensorBoard and W&B; of other records every number has one."""

    def shown(self, record: JsonObject) -> str:
        """The value on a terminal."""
        return _write(getattr(record, self.field), self.form, UNKNOWN)


def _write(value: Any, form: _Form, unknown: str) -> str:
    if value is None:
        return unknown
    return format(value, form) if isinstance(form, str) else form(value)


def _one_word(seconds: float) -> str:
    return format_duration(seconds).replace(" ", "")


def _layer_and_linear(layer: str) -> str:
    """The transformer layer's number and the linear layer in it, for narrow terminals."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\..*?(\w+)", layer)
    return f"{match[1]} {match[2]}" if match else layer


def _by_kind(layers: tuple[str, ...]) -> str:
    """Linear layers by kind with their count: "mlp.linear_fc2×32"."""
    kinds = Counter(re.sub(r"^decoder\.layers\.\d+\.", "", layer) for layer in layers)
    return ",".join(f"{kind}×{count}" for kind, count in kinds.items()) or "none"


def _numbers(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{printable(name)} {value:.4g}" for name, value in numbers.items())


def _range(bounds: tuple[float | None, float | None]) -> str:
    smallest, largest = map(format_magnitude, bounds)
    return smallest if smallest == largest or UNKNOWN in (smallest, largest) else f"{smallest}…{largest}"


COLUMNS: Mapping[type[JsonObject], tuple[Column, ...]] = {
    TrainRecord: (
        Column("loss", log=".4f", title="loss", form=format_loss, style="bold cyan"),
        Column("lr", log=".3e", title="lr", form=".2e", priority=4),
        Column("decoupled_lr", log=".3e", optional=True),
        Column("grad_norm", log=".3f", title="grad norm", form=".3f", priority=3),
        Column("step_time_s", log=".4f"),
        Column("tokens_per_s", log=".0f", title="tok/s", form=format_count, priority=1),
        Column("tflops_per_gpu", log=".2f", title="TFLOP/s", form=format_rate, priority=5),
        Column("mfu", log=".4f", title="MFU", form=format_percent, priority=7),
        Column("memory_gib", log=".2f", title="memory", form=format_gib, priority=6),
        Column("eta_s", log=_one_word, log_name="eta", title="ETA", form=format_duration, priority=2),
    ),
    ExpertsRecord: (
        Column("load_balancing_loss", log=".4f"),
        Column("z_loss", log=".4f"),
        Column("busiest_expert", log=".2f", title="busiest expert", form="{:.2f}×".format, priority=4),
        Column("idlest_expert", log=".2f"),
        Column("idle_experts", log="d"),
    ),
    ValidationRecord: (
        Column("loss", log=".4f", title="validation loss {}", form=format_loss, style="bold green"),
        Column("perplexity", log=".2f", title="perplexity {}", form=".2f"),
        Column("num_samples", log="d", title="{} samples", style="dim"),
        Column("time_s", log=".2f", title="in {} s", form=".1f", style="dim"),
        Column("bits_per_byte", log=".4f", title="bits/byte {}", form=".4f"),
    ),
    ValidationTasksRecord: (
        Column("numbers", log=_numbers, log_name="numbers", title="{}", form=_numbers, style="bold green"),
        Column("time_s", log=".2f", title="in {} s", form=".1f", style="dim"),
    ),
    CheckpointRecord: (
        Column("num_bytes", log="d", log_name="bytes", title="checkpoint of {}", form=format_bytes, style="bold green"),
        Column("stall_s", log=".3f", title="training stood still for {} s", form=".2f", style="dim"),
        Column("time_s", log=".2f", title="saved in {} s", form=".1f", style="dim"),
    ),
    Fp8CoverageRecord: (
        Column("gemm_flops_share", log=".4f", title="FP8: {} of matrix FLOPs", form=format_share, style="bold"),
        Column("parameter_bytes_share", log=".4f", title="{} of parameter bytes", form=format_share, style="bold"),
        Column("layers_kept_out", log=_by_kind, title="kept out: {}", form=_by_kind, style="dim"),
    ),
    Fp8Tensor: (
        Column("layer", log="", title="layer", form=_layer_and_linear),
        Column("tensor", log="", title="tensor", form=lambda name: name.replace("_", " ")),
        Column("saturated", log=".3g", title="saturated", form=format_share, style="bold yellow", curve="saturated"),
        Column("flushed", log=".3g", title="flushed", form=format_share, curve="flushed"),
        Column("amax", log=".3e", title="amax", form=format_magnitude, curve="amax"),
        Column("scale_min", log=".3e"),
        # If a tensor has many scales, the curve shows the largest; `metrics.jsonl` has the smallest, too.
        Column("scale_max", log=".3e", curve="scale"),
        Column("scales", title="scale", form=_range),
        Column("amax_history_used", log="d"),
    ),
}


def screen_columns(kind: type[JsonObject]) -> list[Column]:
    """The columns of a kind of record on a terminal."""
    return [column for column in COLUMNS[kind] if column.title]


def log_pairs(record: JsonObject) -> str:
    """A record's columns in a log, as `name value` pairs with `-` for what was not measured."""
    return " ".join(
        f"{column.log_name or column.field} {_write(getattr(record, column.field), column.log, '-')}"
        for column in COLUMNS[type(record)]
        if column.log is not None and not (column.optional and getattr(record, column.field) is None)
    )


def place_of(record: Record, max_steps: int) -> str:
    """The step that a record is about, of how many."""
    step = record.saved_step if isinstance(record, CheckpointRecord) else record.step
    return f"step {step}/{max_steps}"


def log_line(record: Record, max_steps: int) -> str:
    """A record as one line of `name value` pairs, after its kind unless it is a training record."""
    kind = "" if isinstance(record, TrainRecord) else f"{record.kind} "
    return f"{kind}{place_of(record, max_steps)} {log_pairs(record)}"


def screen_line(record: Record, max_steps: int) -> Text:
    """A record as one line for people, from columns whose titles are phrases."""
    line = Text(place_of(record, max_steps), style="dim")
    for column in screen_columns(type(record)):
        before, after = column.title.split("{}")
        line = Text.assemble(line, f"  {before}", (column.shown(record), column.style), after)
    return line
