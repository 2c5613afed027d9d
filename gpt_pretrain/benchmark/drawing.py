"""One step of each variant as a picture.

It reads what a benchmark with `benchmark.profile=true` left behind, on any machine, and needs matplotlib (the extra
`plot`). A bar is a step; its colours are the kinds of work, and the time in which the GPU was idle.
"""

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path

from gpt_pretrain.benchmark.results import KINDS
from gpt_pretrain.config.errors import UserError, how_to_install

# The palette of Okabe and Ito (2008), which colour-blind people can tell apart; idle is grey.
_COLOURS = ("#CC79A7", "#E69F00", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#F0E442", "#BBBBBB")
_DARK = ("#0072B2", "#D55E00", "#009E73")
# Narrower parts have no room for their number.
_NARROWEST_WITH_TEXT = 0.04
# A variant without a name of its own is labelled with its overrides, which are long.
_LABEL_WIDTH = 32


def read_steps(path: Path) -> dict[str, dict[str, float]]:
    """Variant to kind to milliseconds per step, in the order of the benchmark.

    Raises:
        UserError: The file cannot be read, does not come from a benchmark, or has no profiled step of a GPU.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        variants = [(row["name"], row["figures"]) for row in document["variants"]]
        steps = {
            name: {part["kind"]: float(part["time_ms"]) for part in figures["parts"]}
            for name, figures in variants
            if figures is not None
        }
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(
            f"{path} is not what a benchmark of this version leaves behind; give RUN_DIR/benchmark.json of a benchmark "
            "with benchmark.profile=true"
        ) from error
    steps = {name: parts for name, parts in steps.items() if parts}
    if not steps:
        raise UserError(f"{path} has no profiled step of a GPU; run the benchmark with benchmark.profile=true on one")
    return steps


def draw(steps: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws the steps into a file whose ending says the format (.svg, .png, .pdf).

    Args:
        steps: Variant to kind to milliseconds.
        path: The file.

    Raises:
        UserError: matplotlib is missing or does not know the ending, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError(f"a picture needs matplotlib; {how_to_install('plot')}") from error
    figure = Figure(figsize=(10, 1.4 + 0.6 * len(steps)), layout="constrained")
    axes = figure.add_subplot()
    names = list(steps)
    labels = [textwrap.fill(name, _LABEL_WIDTH, break_long_words=False, break_on_hyphens=False) for name in names]
    longest = max(sum(parts.values()) for parts in steps.values())
    left = dict.fromkeys(names, 0.0)
    for kind, colour in zip(KINDS, _COLOURS, strict=True):
        times = [steps[name].get(kind, 0.0) for name in names]
        if not any(times):
            continue
        bars = axes.barh(range(len(names)), times, left=list(left.values()), color=colour, label=kind, height=0.62)
        texts = [f"{time:.0f}" if time > _NARROWEST_WITH_TEXT * longest else "" for time in times]
        axes.bar_label(bars, texts, label_type="center", color="white" if colour in _DARK else "black")
        for name, time in zip(names, times, strict=True):
            left[name] += time
    axes.set_yticks(range(len(names)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.02 * longest)
    axes.set_xlabel("milliseconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    print(f"written: {path}")
