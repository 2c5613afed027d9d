"""`python -m gpt_pretrain.benchmark.picture RUN_DIR/benchmark.json step.svg`: one step of each variant, drawn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpt_pretrain.benchmark.document import draw, read_steps
from gpt_pretrain.commands.arguments import Program
from gpt_pretrain.commands.door import run_with_arguments

PROGRAM = Program(
    about="gpt_pretrain.benchmark.picture: one step of each variant, drawn.",
    examples="""\
python -m gpt_pretrain.benchmark.picture RUN_DIR/benchmark.json step.svg
python -m gpt_pretrain.benchmark.picture benchmark=RUN_DIR/benchmark.json picture=step.svg""",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureArguments:
    """What the command takes, in this order also without the keys."""

    benchmark: str
    """benchmark.json of a benchmark with benchmark.profile=true."""
    picture: str
    """The file to draw into: .svg, .png or .pdf."""


def draw_benchmark(arguments: PictureArguments) -> None:
    """Draws what a benchmark left."""
    draw(read_steps(Path(arguments.benchmark)), Path(arguments.picture))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    return run_with_arguments(PROGRAM, PictureArguments, draw_benchmark, arguments, plain=("benchmark", "picture"))
