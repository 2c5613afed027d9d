"""How records and their numbers are written: a line of `name value` pairs for each record, and numbers for people.

A new measurement is a field in `records` and a line here.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from gpt_pretrain.config.errors import format_short
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.config.mixtures import ConsumedSource
from gpt_pretrain.report.records import (
    CheckpointRecord,
    EvaluationRecord,
    ExpertsRecord,
    Fp8CoverageRecord,
    Fp8Tensor,
    NormsRecord,
    Record,
    SourcesRecord,
    TrainRecord,
    ValidationRecord,
    ValidationTasksRecord,
)

UNKNOWN = "–"


def format_count(value: float | None) -> str:
    """A count or a rate with three significant digits: 987, 12.3k, 1.5M, 2.25B."""
    return UNKNOWN if value is None else format_short(value)


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


def _one_word(seconds: float) -> str:
    return format_duration(seconds).replace(" ", "")


def _by_kind(layers: tuple[str, ...]) -> str:
    """Linear layers by kind with their count: "mlp.linear_fc2×32"."""
    kinds = Counter(re.sub(r"^decoder\.layers\.\d+\.", "", layer) for layer in layers)
    return ",".join(f"{kind}×{count}" for kind, count in kinds.items()) or "none"


def _numbers(numbers: Mapping[str, float]) -> str:
    return ", ".join(f"{printable(name)} {value:.4g}" for name, value in numbers.items())


def _by_name(losses: Mapping[str, float]) -> str:
    """In one word: "web=3.1234,code=1.2345"."""
    return ",".join(f"{printable(name)}={value:.4f}" for name, value in losses.items())


def _epochs(sources: Mapping[str, ConsumedSource]) -> str:
    return _by_name({name: each.epochs for name, each in sources.items()})


# Of each record, or tensor in one, the fields in its line and how they are written: a format or a function.
COLUMNS: Mapping[type[JsonObject], Mapping[str, str | Callable[[Any], str]]] = {
    TrainRecord: {
        "loss": ".4f",
        "lr": ".3e",
        "decoupled_lr": ".3e",
        "hidden_lr": ".3e",
        "global_batch_size": "d",
        "grad_norm": ".3f",
        "max_attention_logit": ".2f",
        "step_time_s": ".4f",
        "tokens_per_s": ".0f",
        "tflops_per_gpu": ".2f",
        "mfu": ".4f",
        "memory_gib": ".2f",
        "eta_s": _one_word,
    },
    ExpertsRecord: {
        "load_balancing_loss": ".4f",
        "z_loss": ".4f",
        "busiest_expert": ".2f",
        "idlest_expert": ".2f",
        "idle_experts": "d",
    },
    ValidationRecord: {
        "loss": ".4f",
        "perplexity": ".2f",
        "num_samples": "d",
        "time_s": ".2f",
        "bits_per_byte": ".4f",
        "losses": _by_name,
        "set_bits_per_byte": _by_name,
        "ema_loss": ".4f",
    },
    ValidationTasksRecord: {"numbers": _numbers, "time_s": ".2f"},
    EvaluationRecord: {"numbers": _numbers, "standard_errors": _numbers, "time_s": ".2f"},
    SourcesRecord: {"sources": _epochs},
    NormsRecord: {"weight_norm": ".3f"},
    CheckpointRecord: {"num_bytes": "d", "stall_s": ".3f", "time_s": ".2f"},
    Fp8CoverageRecord: {"gemm_flops_share": ".4f", "parameter_bytes_share": ".4f", "layers_kept_out": _by_kind},
    Fp8Tensor: {
        "layer": "",
        "tensor": "",
        "saturated": ".3g",
        "flushed": ".3g",
        "amax": ".3e",
        "scale_min": ".3e",
        "scale_max": ".3e",
        "amax_history_used": "d",
    },
}
# Fields that a line has only where there is a value.
_OPTIONAL = {
    *("decoupled_lr", "hidden_lr", "global_batch_size", "max_attention_logit"),
    *("losses", "set_bits_per_byte", "ema_loss"),
}
# Names in a line that are not the field's.
_LOG_NAMES = {"eta_s": "eta", "num_bytes": "bytes", "sources": "epochs"}


def _written(value: Any, form: str | Callable[[Any], str]) -> str:
    if value is None:
        return "-"
    return format(value, form) if isinstance(form, str) else form(value)


def log_pairs(record: JsonObject) -> str:
    """A record's columns as `name value` pairs, with `-` for what was not measured."""
    return " ".join(
        f"{_LOG_NAMES.get(name, name)} {_written(getattr(record, name), form)}"
        for name, form in COLUMNS[type(record)].items()
        if name not in _OPTIONAL or getattr(record, name) is not None
    )


def place_of(record: Record, max_steps: int) -> str:
    """The step that a record is about, of how many."""
    step = record.saved_step if isinstance(record, CheckpointRecord) else record.step
    return f"step {step}/{max_steps}"


def log_line(record: Record, max_steps: int) -> str:
    """A record as one line of `name value` pairs, after its kind unless it is a training record."""
    kind = "" if isinstance(record, TrainRecord) else f"{record.kind} "
    return f"{kind}{place_of(record, max_steps)} {log_pairs(record)}"
