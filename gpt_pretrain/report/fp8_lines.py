"""FP8 statistics on the screen: the tensors that FP8 treats worst, few enough to be read at every interval."""

import re

from rich.table import Table
from rich.text import Text

from gpt_pretrain.report.numbers import UNKNOWN, format_magnitude, format_share
from gpt_pretrain.report.records import Fp8CoverageRecord, Fp8Record, Fp8Tensor

NUM_SHOWN = 3


def worst_tensors(record: Fp8Record, count: int = NUM_SHOWN) -> list[Fp8Tensor]:
    """The tensors with the largest share of saturated values, and among equals of flushed ones."""
    return sorted(record.tensors, key=lambda tensor: (-(tensor.saturated or 0.0), -tensor.flushed))[:count]


def plain_fp8_lines(record: Fp8Record, max_steps: int) -> list[str]:
    """A line of `name value` pairs for each of the worst tensors, the worst first; `-` where not measured."""

    def value(number: float | None, form: str) -> str:
        return "-" if number is None else format(number, form)

    lines = []
    for rank, tensor in enumerate(worst_tensors(record), start=1):
        pairs = (
            ("step", f"{record.step}/{max_steps}"),
            ("worst", f"{rank}/{len(record.tensors)}"),
            ("layer", tensor.layer),
            ("tensor", tensor.tensor),
            ("saturated", value(tensor.saturated, ".3g")),
            ("flushed", value(tensor.flushed, ".3g")),
            ("amax", value(tensor.amax, ".3e")),
            ("scale_min", value(tensor.scale_min, ".3e")),
            ("scale_max", value(tensor.scale_max, ".3e")),
            ("amax_history_used", value(tensor.amax_history_used, "d")),
        )
        lines.append("fp8 " + " ".join(f"{name} {text}" for name, text in pairs))
    return lines


def fp8_table(record: Fp8Record, max_steps: int, width: int) -> Table:
    """The worst tensors as a small table under the step."""
    table = Table(
        box=None,
        padding=(0, 1),
        pad_edge=False,
        header_style="dim",
        title=Text.assemble(
            (f"step {record.step}/{max_steps}", "dim"), f"  FP8, worst {NUM_SHOWN} of {len(record.tensors)} tensors"
        ),
        title_justify="left",
        title_style="",
        width=width,
    )
    table.add_column("layer", overflow="fold", ratio=1)
    table.add_column("tensor", no_wrap=True)
    for name in ("saturated", "flushed", "amax", "scale"):
        table.add_column(name, justify="right", no_wrap=True)
    for tensor in worst_tensors(record):
        table.add_row(
            _short_name(tensor.layer),
            tensor.tensor.replace("_", " "),
            Text(format_share(tensor.saturated), style="bold yellow" if tensor.saturated else ""),
            format_share(tensor.flushed),
            format_magnitude(tensor.amax),
            _scale(tensor),
        )
    return table


def _short_name(layer: str) -> str:
    """The number of the transformer layer and the linear layer in it, for narrow terminals."""
    match = re.fullmatch(r"decoder\.layers\.(\d+)\..*?(\w+)", layer)
    return f"{match[1]} {match[2]}" if match else layer


def _scale(tensor: Fp8Tensor) -> str:
    smallest, largest = format_magnitude(tensor.scale_min), format_magnitude(tensor.scale_max)
    return smallest if smallest == largest or UNKNOWN in (smallest, largest) else f"{smallest}…{largest}"


def plain_coverage_line(record: Fp8CoverageRecord) -> str:
    """How much of the model runs in FP8, as one line of `name value` pairs."""
    return (
        f"fp8_coverage step {record.step} gemm_flops_share {record.gemm_flops_share:.4f} "
        f"parameter_bytes_share {record.parameter_bytes_share:.4f}"
    )


def coverage_sentence(record: Fp8CoverageRecord) -> Text:
    """The same for people."""
    return Text.assemble(
        "FP8: ",
        (format_share(record.gemm_flops_share), "bold"),
        " of the FLOPs of matrix products, ",
        (format_share(record.parameter_bytes_share), "bold"),
        " of the parameters' bytes",
    )
