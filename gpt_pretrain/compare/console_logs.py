"""What other codes print while they train: Megatron-LM, NeMo and torchtitan, recognized by their lines.

    Megatron-LM  megatron/training/training.py, training_log: ` iteration 10/ 500 | … | lm loss: 2.1E+00 | …`
    NeMo 1       Lightning's progress bar: `Epoch 0: … 40/40 […, reduced_train_loss=10.90, global_step=39.00, …]`
    NeMo 2       its progress printer: `Training epoch 0, iteration 28/99 | … | reduced_train_loss: 2.778 | …`
    torchtitan   components/metrics.py, MetricsProcessor.log: `step: 10  loss: 7.5  … tps: 7,034  …`, with colors

Of a step that several ranks print, the first line counts (`copies`). Other lines in between are ignored. A line that
starts like one of them but continues differently is damaged: an error rather than a gap in a curve. Only the last line
of a file may be incomplete, because the program may still be running.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from gpt_pretrain.compare.comparison import Format
from gpt_pretrain.compare.copies import Copies, rank_of, usual_copies
from gpt_pretrain.compare.series import Point, Series
from gpt_pretrain.config.errors import UserError

# No code prints longer lines; a pattern may take quadratic time.
_MAX_LINE = 1 << 13
_MAX_NUMBER = 60
# And whatever else steers a terminal (ECMA-48), such as erasing the line.
_COLORS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"

_MEGATRON = re.compile(r"\biteration +(\d+)/ *(\d+) \|")
_NEMO_BAR = re.compile(r"\bEpoch \d+:.*\breduced_train_loss=")
_NEMO_LINE = re.compile(r"\bTraining epoch \d+, iteration (\d+)/(\d+) \|")
_TITAN = re.compile(r"(?<!validate )\bstep: +(\d+) +loss:")

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
    "padded_vocab_size": "padded_vocab_size",
    "tokenizer_type": "tokenizer_type",
    "fp8": "fp8",
    "fp8_recipe": "fp8_recipe",
    "tensor_model_parallel_size": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size": "model.pipeline_model_parallel_size",
    "context_parallel_size": "model.context_parallel_size",
    "world_size": "world_size",
}
_ARGUMENT = re.compile(r"^ *(?:\[[^\]]*\]:? *)?(\w+) \.{3,} (.+)$")


class _Damaged(Exception):
    """A line that starts like one of a format but continues differently."""


def _number(text: str | None) -> float:
    if text is None or len(text) > _MAX_NUMBER or not re.fullmatch(_NUMBER, text.strip(), re.IGNORECASE):
        raise _Damaged
    return float(text.strip().replace(",", ""))


def _above_zero(text: str | None) -> float:
    number = _number(text)
    if not 0 < number < math.inf:
        raise _Damaged
    return number


def _whole(text: str | None) -> int:
    number = _number(text)
    if not 0 <= number < 1 << 53:
        raise _Damaged
    return int(number)


def _gpus(text: str) -> int:
    number = _whole(text)
    if not 0 < number < 1 << 20:
        raise _Damaged
    return number


def _optional[Number](values: Mapping[str, str], read: Callable[[str], Number], *names: str) -> Number | None:
    """The number under the first of several names; None without any of them."""
    return next((read(values[name]) for name in names if name in values), None)


def _pairs(text: str, between: str, assign: str) -> dict[str, str]:
    """The `name: value` pairs of a line."""
    parts = (part.partition(assign) for part in text.split(between))
    return {name.strip(): value.strip(" ]") for name, sign, value in parts if sign}


def _read_megatron(series: Series, line: str, place: str) -> None:
    if match := _MEGATRON.search(line):
        values = _pairs(line[match.end() :], "|", ":")
        milliseconds = _above_zero(values.get("elapsed time per iteration (ms)"))
        if (loss := _optional(values, _number, "lm loss", "loss")) is not None:
            samples = _optional(values, _whole, "consumed samples")
            series.add(Point(step=_whole(match[1]), loss=loss, samples=samples, step_s=milliseconds / 1000), place)
        elif "number of skipped iterations" not in values:
            # A loss is missing only if every step of the interval was skipped.
            raise _Damaged
        if "global batch size" in values:
            series.settings["model.global_batch_size"] = str(_whole(values["global batch size"]))
        series.max_steps = _whole(match[2])
        skipped = _optional(values, _whole, "number of skipped iterations")
        if skipped is not None:
            series.skipped_steps = (series.skipped_steps or 0) + skipped
    elif match := re.search(rf"validation loss at iteration (\d+) .*?lm loss value: ({_NUMBER})", line):
        series.validation[_whole(match[1])] = _number(match[2])
    elif match := re.search(r"\bmax allocated: ([\d.]+)", line):
        series.memory_gib = max(series.memory_gib or 0.0, _number(match[1]) / 1024)
    elif match := _ARGUMENT.match(line):
        if match[1] in _ARGUMENTS:
            series.settings[_ARGUMENTS[match[1]]] = match[2].strip()
        if match[1] == "world_size":
            series.num_gpus = _gpus(match[2])
    elif match := re.search(r"using world size: (\d+)", line):
        series.num_gpus = _gpus(match[1])


def _read_nemo(series: Series, line: str, place: str) -> None:
    if match := _NEMO_LINE.search(line):
        values = _pairs(line[match.end() :], "|", ":")
        series.max_steps = _whole(match[2]) + 1
        step = values.get("global_step", match[1])
    elif match := _NEMO_BAR.search(line):
        values = _pairs(line[line.rfind("[") + 1 :], ",", "=")
        step = values.get("global_step", "")
    elif match := re.search(r"GLOBAL_RANK: \d+, MEMBER: \d+/(\d+)", line):
        series.num_gpus = _gpus(match[1])
        return
    else:
        return
    # NeMo counts steps from zero and draws each step's bar several times.
    done = _whole(step) + 1
    if series.points and series.points[-1].step == done:
        series.points.pop()
    series.add(
        Point(
            step=done,
            loss=_number(values.get("reduced_train_loss")),
            samples=_optional(values, _whole, "consumed_samples"),
            # Three digits may round to zero.
            step_s=_optional(values, _number, "train_step_timing in s", "train_step_timing") or None,
        ),
        place,
    )
    if "val_loss" in values:
        series.validation.setdefault(done, _number(values["val_loss"]))
    if "global_batch_size" in values:
        series.settings["model.global_batch_size"] = str(_whole(values["global_batch_size"]))
    if "max_memory_allocated" in values:
        series.memory_gib = max(series.memory_gib or 0.0, _number(values["max_memory_allocated"]) / (1 << 30))


def _read_torchtitan(series: Series, line: str, place: str) -> None:
    if match := _TITAN.search(line):
        values = dict(re.findall(r"(\w+): +(\S+)", line[match.start() :]))
        # Its first versions called tokens words.
        rate = _optional(values, _above_zero, "tps", "wps")
        memory = re.search(r"memory: *([\d.]+)GiB", line)
        if rate is None or memory is None:
            raise _Damaged
        series.memory_gib = max(series.memory_gib or 0.0, _number(memory[1]))
        series.add(Point(step=_whole(match[1]), loss=_number(values.get("loss")), tokens_per_s_per_gpu=rate), place)
    elif match := re.search(rf"validate step: +(\d+) +loss: +({_NUMBER})", line):
        series.validation[_whole(match[1])] = _number(match[2])
    elif match := re.search(
        r"local batch size (\d+), global batch size (\d+),.{,200}sequence length (\d+), total steps (\d+)", line
    ):
        keys = ("model.micro_batch_size", "model.global_batch_size", "model.encoder_seq_length")
        series.settings |= dict(zip(keys, match.groups(), strict=False))
        series.max_steps = _whole(match[4])
    elif match := re.search(r"Building device mesh with parallelism: (.+)", line):
        sizes = dict(re.findall(r"(\w+)=(\d+)", match[1]))
        series.num_gpus = prod(_gpus(sizes.get(name, "1")) for name in ("pp", "dp_replicate", "dp_shard", "cp", "tp"))
    elif match := re.search(r"Building \d+-D device mesh with \[[^\]]{,200}\], \[([\d, ]{,100})\]", line):
        series.num_gpus = prod(map(_gpus, match[1].split(",")))
    elif match := re.search(r"size: ([\d,]+) total parameters", line):
        series.settings["parameters"] = match[1].replace(",", "")


# For each code: how its lines start, with a step if ranks may print copies of it (a bar is drawn several times by one);
# what takes a line into a series or raises `_Damaged`; and a whole line.
_CODES: Mapping[Format, tuple[re.Pattern[str], Callable[[Series, str, str], None], str]] = {
    "nemo": (
        re.compile(f"{_NEMO_LINE.pattern}|{_NEMO_BAR.pattern}"),
        _read_nemo,
        "`… | global_step: N | … | reduced_train_loss: N | …` or `[…, reduced_train_loss=N, global_step=N, …]`",
    ),
    "megatron": (
        _MEGATRON,
        _read_megatron,
        "` iteration N/ N | … | elapsed time per iteration (ms): N | … | lm loss: N | …`",
    ),
    "torchtitan": (_TITAN, _read_torchtitan, "`step: N  loss: N  … memory: NGiB(N%)  tps: N …`"),
}


def _lines(path: Path) -> Iterator[str]:
    """Lines without colors. A carriage return also ends a line: a progress bar overwrites its own."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            yield _COLORS.sub("", line[:_MAX_LINE].rstrip("\n"))


def _step(start: re.Pattern[str], line: str) -> int | None:
    """The step of a line that ranks may print copies of; None for any other."""
    match = start.search(line)
    return int(match[1]) if match is not None and match[1] is not None and len(match[1]) < _MAX_NUMBER else None


def read_console_log(path: Path) -> Series | None:
    """Reads what a code printed; None if no line is known, `UserError` if one is damaged."""
    starts = {name: start for name, (start, *_) in _CODES.items()}
    format_ = next((name for line in _lines(path) for name, start in starts.items() if start.search(line)), None)
    if format_ is None:
        return None
    start, read, expected = _CODES[format_]
    series = Series(source=str(path), format=format_)
    copies = Copies(usual_copies(step for line in _lines(path) if (step := _step(start, line)) is not None))
    torn = None
    for number, line in enumerate(_lines(path), start=1):
        if torn is not None and line.strip():
            raise UserError(f"{torn}: damaged; expected {expected}; remove the line, or restore the file")
        step = _step(start, line)
        if step is not None and copies.is_copy(rank_of(line), step):
            continue
        try:
            read(series, line, f"{path}:{number}")
        except _Damaged:
            torn = f"{path}:{number}"
    if not series.points:
        raise UserError(f"{path} has no whole line of {format_}; expected {expected}")
    return series
