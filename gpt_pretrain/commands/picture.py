"""`python -m gpt_pretrain.benchmark.picture RUN_DIR/benchmark.json step.svg`: one step of each variant, drawn."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpt_pretrain.benchmark.drawing import draw, read_steps
from gpt_pretrain.commands.door import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Draws what a benchmark left and returns the exit code.

    Args:
        arguments: What follows the module's name; `sys.argv` when not given.
    """
    parser = argparse.ArgumentParser(
        prog="python -m gpt_pretrain.benchmark.picture", description="Draws one step of each variant."
    )
    parser.add_argument("benchmark", type=Path, help="benchmark.json of a benchmark with benchmark.profile=true")
    parser.add_argument("picture", type=Path, help="file to draw into: .svg, .png or .pdf")
    given: Any = parser.parse_args(arguments)
    return exit_code(lambda: draw(read_steps(given.benchmark), given.picture))
