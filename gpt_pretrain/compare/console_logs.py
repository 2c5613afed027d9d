"""What other codes print while they train: Megatron-LM and torchtitan, recognized by their lines.

    Megatron-LM  megatron/training/training.py, training_log: ` iteration 10/ 500 | … | lm loss: 2.1E+00 | …`
    torchtitan   components/metrics.py, MetricsProcessor.log: `step: 10  loss: 7.5  … tps: 7,034  …`, with colors

Where a launcher has put each line's rank in front, the steps of the first rank count. Other lines in between are
ignored. A line that starts like one of them but continues differently is damaged: an error rather than a gap in a
curve. Only the last line of a file may be incomplete, because the program may still be running.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from gpt_pretrain.compare.comparison import Format
from gpt_pretrain.compare.series import Point, Series
from gpt_pretrain.config.errors import UserError

# No code prints longer lines; a pattern may take quadratic time.
_MAX_LINE = 1 << 13
# And whatever else steers a terminal (ECMA-48), such as erasing the line.
_COLORS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_COUNT = r"\d{1,15}"

_MEGATRON = re.compile(rf"\biteration +({_COUNT})/ *({_COUNT}) \|")
_TITAN = re.compile(rf"(?<!validate )\bstep: +({_COUNT}) +loss:")

# torchrun's and srun's.
_RANK = re.compile(r"\s*(?:\[[a-z]+\d+\]:|\d+: )")

# Megatron-LM's arguments and our keys for them.
_ARGUMENTS = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_attention_heads",
    "kv_channels": "model.kv_channels",
    "seq_length": "model.encoder_seq_length",
    "global_batch_size": "model.global_batch_size",
    "micro_batch_size": "model.micro_batch_size",
    "seed": "model.seed",
    "lr": "model.optim.lr",
    "data_path": "model.data.data_prefix",
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
}
_ARGUMENT = re.compile(r"^ *(?:\[[^\]]*\]:? *)?(\w+) \.{3,} (.+)$")


def _above_zero(text: str) -> float:
    number = float(text.replace(",", ""))
    if not 0 < number < math.inf:
        raise ValueError(text)
    return number


def _pairs(text: str) -> dict[str, str]:
    """The `name: value` pairs of a line."""
    parts = (part.partition(":") for part in text.split("|"))
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def _read_megatron(series: Series, line: str) -> None:
    if match := _MEGATRON.search(line):
        values = _pairs(line[match.end() :])
        step_s = _above_zero(values["elapsed time per iteration (ms)"]) / 1000
        skipped = values.get("number of skipped iterations")
        # A loss is missing only if every step of the interval was skipped.
        if "lm loss" in values or skipped is None:
            samples = int(values["consumed samples"]) if "consumed samples" in values else None
            series.add(Point(step=int(match[1]), loss=float(values["lm loss"]), samples=samples, step_s=step_s))
        if "global batch size" in values:
            series.settings["model.global_batch_size"] = values["global batch size"]
        series.max_steps = int(match[2])
        if skipped is not None:
            series.skipped_steps = (series.skipped_steps or 0) + int(skipped)
    elif match := re.search(rf"validation loss at iteration ({_COUNT}) .*?lm loss value: (\S+)", line):
        series.validation[int(match[1])] = float(match[2])
    elif match := re.search(r"\bmax allocated: ([\d.]+)", line):
        series.memory_gib = max(series.memory_gib or 0.0, float(match[1]) / 1024)
    elif match := _ARGUMENT.match(line):
        if match[1] in _ARGUMENTS:
            series.settings[_ARGUMENTS[match[1]]] = match[2].strip()
        if match[1] == "world_size":
            series.num_gpus = round(_above_zero(match[2]))


def _read_torchtitan(series: Series, line: str) -> None:
    if match := _TITAN.search(line):
        values = dict(re.findall(r"(\w+): +(\S+)", line[match.start() :]))
        rate, memory = _above_zero(values["tps"]), float(values["memory"].partition("GiB")[0])
        series.memory_gib = max(series.memory_gib or 0.0, memory)
        series.add(Point(step=int(match[1]), loss=float(values["loss"]), tokens_per_s_per_gpu=rate))
    elif match := re.search(rf"validate step: +({_COUNT}) +loss: +(\S+)", line):
        series.validation[int(match[1])] = float(match[2])
    elif match := re.search(
        rf"global batch size ({_COUNT}),.{{,200}}sequence length ({_COUNT}), total steps ({_COUNT})", line
    ):
        series.settings |= {"model.global_batch_size": match[1], "model.encoder_seq_length": match[2]}
        series.max_steps = int(match[3])
    elif match := re.search(r"Building device mesh with parallelism: (.+)", line):
        sizes = dict(re.findall(rf"(\w+)=({_COUNT})", match[1]))
        axes = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        series.num_gpus = prod(round(_above_zero(sizes.get(name, "1"))) for name in axes)


# For each code: how the line of a step starts, what takes a line into a series or fails, and a whole line.
_CODES: Mapping[Format, tuple[re.Pattern[str], Callable[[Series, str], None], str]] = {
    "megatron": (
        _MEGATRON,
        _read_megatron,
        "` iteration N/ N | … | elapsed time per iteration (ms): N | … | lm loss: N | …`",
    ),
    "torchtitan": (_TITAN, _read_torchtitan, "`step: N  loss: N  … memory: NGiB(N%)  tps: N …`"),
}


def _lines(path: Path) -> Iterator[str]:
    """Lines without colors."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            yield _COLORS.sub("", line[:_MAX_LINE].rstrip("\n"))


def read_console_log(path: Path) -> Series | None:
    """Reads what a code printed; None if no line is known, `UserError` if one is damaged."""
    starts = {name: start for name, (start, *_) in _CODES.items()}
    format_ = next((name for line in _lines(path) for name, start in starts.items() if start.search(line)), None)
    if format_ is None:
        return None
    start, read, expected = _CODES[format_]
    series = Series(source=str(path), format=format_)
    torn = first_rank = None
    for number, line in enumerate(_lines(path), start=1):
        if torn is not None and line.strip():
            raise UserError(f"{torn}: damaged; expected {expected}; remove the line, or restore the file")
        if start.search(line) and (rank := _RANK.match(line)):
            first_rank = first_rank or rank[0]
            if rank[0] != first_rank:
                continue
        try:
            read(series, line)
        except (ValueError, KeyError):
            torn = f"{path}:{number}"
    if not series.points:
        raise UserError(f"{path} has no whole line of {format_}; expected {expected}")
    return series
