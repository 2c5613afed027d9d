"""What other codes print while they train: Megatron-LM, NeMo and torchtitan, recognised by their lines.

    Megatron-LM  megatron/training/training.py, training_log: ` iteration 10/ 500 | … | lm loss: 2.1E+00 | …`
    NeMo 1       Lightning's progress bar: `Epoch 0: … 40/40 […, reduced_train_loss=10.90, global_step=39.00, …]`
    NeMo 2       its progress printer: `Training epoch 0, iteration 28/99 | … | reduced_train_loss: 2.778 | …`
    torchtitan   components/metrics.py, MetricsProcessor.log: `step: 10  loss: 7.5  … tps: 7,034  …`, with colors

Anything may stand between those lines. A line that begins like one of them and goes on otherwise is damaged, and an
error rather than a gap in a curve. Only the last line of a file may be torn, as a running program leaves it.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path

from gpt_pretrain.compare.document import Format
from gpt_pretrain.compare.series import Point, Series, check_size, first_known
from gpt_pretrain.config.errors import UserError

# No code prints longer ones; patterns may take the square of it.
_MAX_LINE = 1 << 13
_MAX_NUMBER = 60
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|nan|inf(?:inity)?)"

_MEGATRON = re.compile(r"\biteration +(\d+)/ *(\d+) \|")
_NEMO_BAR = re.compile(r"\bEpoch \d+:.*\breduced_train_loss=")
_NEMO_LINE = re.compile(r"\bTraining epoch \d+, iteration (\d+)/(\d+) \|")
_TITAN = re.compile(r"(?<!validate )\bstep: +(\d+) +loss:")
_EXPECTED: Mapping[Format, str] = {
    "megatron": "` iteration N/ N | … | elapsed time per iteration (ms): N | … | lm loss: N | …`",
    "nemo": "`… | global_step: N | … | reduced_train_loss: N | …` or `[…, reduced_train_loss=N, global_step=N, …]`",
    "torchtitan": "`step: N  loss: N  … memory: NGiB(N%)  tps: N …`",
}

# Megatron-LM's arguments, and our keys for them.
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
    """A line that begins like one of a format and goes on otherwise."""


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


def _optional[Number](values: Mapping[str, str], name: str, read: Callable[[str | None], Number]) -> Number | None:
    return read(values[name]) if name in values else None


def _pairs(text: str, between: str, assign: str) -> dict[str, str]:
    """The `name: value` parts of a line."""
    parts = (part.partition(assign) for part in text.split(between))
    return {name.strip(): value.strip(" ]") for name, sign, value in parts if sign}


def read_megatron_line(series: Series, line: str, place: str) -> None:
    """Takes in a line that Megatron-LM printed; raises `_Damaged`."""
    if match := _MEGATRON.search(line):
        values = _pairs(line[match.end() :], "|", ":")
        loss = first_known(("lm loss", "loss"), values)
        milliseconds = _above_zero(values.get("elapsed time per iteration (ms)"))
        if loss is None:
            # There is no loss where every step of the interval was skipped.
            if "number of skipped iterations" not in values:
                raise _Damaged
        else:
            series.add(
                Point(
                    step=_whole(match[1]),
                    loss=_number(values[loss]),
                    samples=_optional(values, "consumed samples", _whole),
                    step_s=milliseconds / 1000,
                ),
                place,
            )
        if "global batch size" in values:
            series.settings["model.global_batch_size"] = str(_whole(values["global batch size"]))
        series.max_steps = _whole(match[2])
        skipped = _optional(values, "number of skipped iterations", _whole)
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


def read_nemo_line(series: Series, line: str, place: str) -> None:
    """Takes in a line that NeMo printed, in either version; raises `_Damaged`."""
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
    seconds = first_known(("train_step_timing in s", "train_step_timing"), values)
    # NeMo counts steps from zero, and draws a bar several times for each.
    done = _whole(step) + 1
    if series.points and series.points[-1].step == done:
        series.points.pop()
    series.add(
        Point(
            step=done,
            loss=_number(values.get("reduced_train_loss")),
            samples=_optional(values, "consumed_samples", _whole),
            # Rounded to three digits, and so perhaps to zero.
            step_s=None if seconds is None else _number(values[seconds]) or None,
        ),
        place,
    )
    if "val_loss" in values:
        series.validation.setdefault(done, _number(values["val_loss"]))
    if "global_batch_size" in values:
        series.settings["model.global_batch_size"] = str(_whole(values["global_batch_size"]))
    if "max_memory_allocated" in values:
        series.memory_gib = max(series.memory_gib or 0.0, _number(values["max_memory_allocated"]) / (1 << 30))


def read_torchtitan_line(series: Series, line: str, place: str) -> None:
    """Takes in a line that torchtitan printed; raises `_Damaged`."""
    if match := _TITAN.search(line):
        values = dict(re.findall(r"(\w+): +(\S+)", line[match.start() :]))
        # Its first versions called tokens words.
        rate = first_known(("tps", "wps"), values)
        memory = re.search(r"memory: *([\d.]+)GiB", line)
        if rate is None or memory is None:
            raise _Damaged
        series.memory_gib = max(series.memory_gib or 0.0, _number(memory[1]))
        point = Point(
            step=_whole(match[1]), loss=_number(values.get("loss")), tokens_per_s_per_gpu=_above_zero(values[rate])
        )
        series.add(point, place)
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


# What begins a code's lines, and their reader.
_CODES: Mapping[Format, tuple[re.Pattern[str], Callable[[Series, str, str], None]]] = {
    "nemo": (re.compile(f"{_NEMO_LINE.pattern}|{_NEMO_BAR.pattern}"), read_nemo_line),
    "megatron": (_MEGATRON, read_megatron_line),
    "torchtitan": (_TITAN, read_torchtitan_line),
}


def _lines(path: Path) -> Iterator[str]:
    """Lines without colors; a carriage return also ends a line: a progress bar draws its lines over each other."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            yield _COLORS.sub("", line[:_MAX_LINE].rstrip("\n"))


def read_console_log(path: Path) -> Series | None:
    """Reads what a code printed; None where no line is one of those that are known.

    Raises:
        UserError: A line is damaged; names the file, the line and what was expected.
    """
    check_size(path)
    format_ = next((name for line in _lines(path) for name, (start, _) in _CODES.items() if start.search(line)), None)
    if format_ is None:
        return None
    read = _CODES[format_][1]
    series = Series(source=str(path), format=format_)
    torn = None
    for number, line in enumerate(_lines(path), start=1):
        if torn is not None and line.strip():
            raise UserError(f"{torn}: damaged; expected {_EXPECTED[format_]}; remove the line, or restore the file")
        try:
            read(series, line, f"{path}:{number}")
        except _Damaged:
            torn = f"{path}:{number}"
    if not series.points:
        raise UserError(f"{path} has no whole line of {format_}; expected {_EXPECTED[format_]}")
    return series
