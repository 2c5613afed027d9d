"""gpt_pretrain.benchmark.picture: draws one step of each variant.

Examples:
    python -m gpt_pretrain.benchmark.picture RUN_DIR/benchmark.json step.svg
    python -m gpt_pretrain.benchmark.picture benchmark=RUN_DIR/benchmark.json picture=step.svg
"""
# A bar is a step; its colors are the kinds of work and the GPU's idle time. It needs matplotlib (the extra `plot`) and
# the benchmark.json of a benchmark with `benchmark.profile=true`, but no GPU.

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.benchmark.results import KINDS
from gpt_pretrain.commands.door import run_with_arguments
from gpt_pretrain.config.errors import UserError, how_to_install
from gpt_pretrain.config.files import ForeignFileError, read_foreign_json

# The palette of Okabe and Ito (2008) for color-blind readers; idle is gray.
_COLORS = ("#CC79A7", "#E69F00", "#0072B2", "#56B4E9", "#D55E00", "#009E73", "#882255", "#F0E442", "#BBBBBB")
_DARK = ("#0072B2", "#D55E00", "#009E73", "#882255")
# Narrower parts have no room for a number.
_NARROWEST_WITH_TEXT = 0.04
# Overrides as a variant's name are long.
_LABEL_WIDTH = 32


def read_steps(path: Path) -> dict[str, dict[str, float]]:
    """Variant → kind → milliseconds per step; raises `UserError` if the file is not a benchmark with a profiled GPU."""
    try:
        document = read_foreign_json(path)
        variants = [(row["name"], row["figures"]) for row in document["variants"]]
        steps = {
            name: {part["kind"]: float(part["time_ms"]) for part in figures["parts"]}
            for name, figures in variants
            if figures is not None
        }
        if unknown := {kind for parts in steps.values() for kind in parts} - {*KINDS}:
            raise ValueError(f"{unknown} are no kinds of work")
    except FileNotFoundError as error:
        raise UserError(f"{path}: {error.strerror}") from error
    except (ForeignFileError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is not what a benchmark of this version leaves behind; give RUN_DIR/benchmark.json of a benchmark "
            "with benchmark.profile=true"
        ) from error
    steps = {name: parts for name, parts in steps.items() if parts}
    if not steps:
        raise UserError(f"{path} has no profiled step of a GPU; run the benchmark with benchmark.profile=true on one")
    return steps


def draw(steps: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """Draws the steps from `read_steps` into a file whose ending gives the format (.svg, .png, .pdf).

    Raises `UserError` if matplotlib is missing or does not know the ending, or the file cannot be written.
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
    for kind, color in zip(KINDS, _COLORS, strict=True):
        times = [steps[name].get(kind, 0.0) for name in names]
        if not any(times):
            continue
        bars = axes.barh(range(len(names)), times, left=list(left.values()), color=color, label=kind, height=0.62)
        texts = [f"{time:.0f}" if time > _NARROWEST_WITH_TEXT * longest else "" for time in times]
        axes.bar_label(bars, texts, label_type="center", color="white" if color in _DARK else "black")
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
    except (ValueError, OSError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    print(f"written: {path}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureArguments:
    """The command's arguments; in this order also without the keys."""

    benchmark: str
    """benchmark.json of a benchmark with benchmark.profile=true."""
    picture: str
    """The picture to write: .svg, .png or .pdf."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""

    def read_and_draw(given: PictureArguments) -> None:
        draw(read_steps(Path(given.benchmark)), Path(given.picture))

    return run_with_arguments(__doc__, PictureArguments, read_and_draw, arguments, plain=("benchmark", "picture"))


if __name__ == "__main__":
    raise SystemExit(main())
