r"""gpt_pretrain.coordinate_check: does a rate found at one width hold at others?

It takes every argument of python -m gpt_pretrain, and trains the model at each
of coordinate_check.widths for a few steps at the peak rate. The MLP grows as
hidden_size does; so do the heads, in width, or with model.kv_channels in number.
It prints the mean absolute value of each layer's output and of the logits, the
power of the width with which each grows, and a verdict, and writes
coordinate_check.json and coordinate_check.html to run_dir.

Exit codes: 0 sizes do not depend on the width; 4 they do; 2 a mistake in what
was given; 1 a crash; 130 Ctrl-C.

Examples:
    python -m gpt_pretrain.coordinate_check
    python -m gpt_pretrain.coordinate_check model.use_mup=true model.mup_base_hidden_size=64
    python -m gpt_pretrain.coordinate_check model=gpt2_124m model.use_mup=true \
        model.mup_base_hidden_size=192 coordinate_check.widths=[192,384,768]
"""

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import escape

from rich.console import Console
from rich.table import Table

from gpt_pretrain.commands.command import ALONE, importing_torch, refuse_launcher_and_sweep, run_with_config
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.compare.comparison import write_result
from gpt_pretrain.compare.page import COLORS, Figure, build_plot, html_page, text_as_html
from gpt_pretrain.config.errors import visible, written
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.launch.environment import prepare_libraries, set_environment
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.launch.run_dir import check_run_dir, make_run_dir
from gpt_pretrain.report.console import console_of_width, print_line
from gpt_pretrain.rules.check import config_problems, ranges
from gpt_pretrain.rules.jobs import Job

NOT_FLAT = 4
# Sizes that depend on the width do so by a power of 1/2 or more. A few steps of small models leave noise of 0.2.
FLAT = 0.35
_WIDTH = 120

type Sizes = Mapping[int, Sequence[Mapping[str, float]]]
"""By width and step, step 0 being before the first one, the size of each activation by name."""


def at_width(config: Config, width: int) -> Config:
    """The configuration with another `hidden_size`, and MLP and heads in proportion."""
    model = config.model
    share = width / model.hidden_size

    def grown(size: int | None) -> int | None:
        return None if size is None else round(size * share)

    model = replace(model, hidden_size=width, ffn_hidden_size=grown(model.ffn_hidden_size))
    if model.kv_channels is not None:
        heads, groups = round(model.num_attention_heads * share), grown(model.num_query_groups)
        model = replace(model, num_attention_heads=heads, num_query_groups=groups)
    return replace(config, model=model)


def coordinate_check_problems(config: Config) -> Iterator[str]:
    """The rules about the command's keys, and those about runs at each width."""
    given = config.coordinate_check.widths
    key = f"coordinate_check.widths={written(given)}"
    found = [*ranges(config)]
    if min(given, default=0) < 1 or len({*given}) < 2:
        found.append(f"{key} has no two widths to compare; give two or more, each 1 or more, such as [64,128,256]")
    yield from found
    if found:
        return
    for width in given:
        if fractions := [*_fractions(config.model, width)]:
            yield f"{key}: at {width} {' and '.join(fractions)}; use widths in which they are whole, or other sizes"
        else:
            yield from (f"{problem} [at width {width}]" for problem in config_problems(at_width(config, width), ALONE))


def _fractions(model: ModelConfig, width: int) -> Iterator[str]:
    """Sizes that would not be whole in proportion to the width."""
    of_heads = () if model.kv_channels is None else ("num_attention_heads", "num_query_groups")
    for name in ("ffn_hidden_size", *of_heads):
        size = getattr(model, name)
        if size is not None and size * width % model.hidden_size:
            grown = size * width / model.hidden_size
            yield f"model.{name}={size} of model.hidden_size={model.hidden_size} would be {grown:g}"


def growth(sizes: Mapping[int, float]) -> float:
    """The power of the width with which a size grows, by least squares; infinite unless all are finite and positive."""
    if not all(0 < size < math.inf for size in sizes.values()):
        return math.inf
    xs, ys = [math.log(width) for width in sizes], [math.log(size) for size in sizes.values()]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return covariance / sum((x - mean_x) ** 2 for x in xs)


def growths(sizes: Sizes, step: int) -> dict[str, float]:
    """Of each activation after a step."""
    names = next(iter(sizes.values()))[step]
    return {name: growth({width: steps[step][name] for width, steps in sizes.items()}) for name in names}


def verdict(sizes: Sizes) -> tuple[bool, str]:
    """Whether a rate transfers between the widths, and a sentence about it."""
    last = growths(sizes, -1)
    steps = len(next(iter(sizes.values()))) - 1
    if depending := [f"{name} ({power:+.2f})" for name, power in last.items() if abs(power) > FLAT]:
        return False, f"does not transfer: after {steps} steps these depend on the width: {', '.join(depending)}"
    largest = max(last.values(), key=abs)
    return True, f"transfers: after {steps} steps no size depends on the width (the largest power is {largest:+.2f})"


def _shown_steps(sizes: Sizes) -> list[int]:
    last = len(next(iter(sizes.values()))) - 1
    return sorted({0, 1, last // 2, last})


def print_sizes(sizes: Sizes, console: Console) -> None:
    """Prints the sizes after the last step, and their growth after some."""
    shown, last = _shown_steps(sizes), len(next(iter(sizes.values()))) - 1
    table = Table(title=f"mean |x| after {last} steps, and its growth in powers of the width", title_justify="left")
    for index, heading in enumerate(["", *(f"width {width}" for width in sizes), *(f"step {step}" for step in shown)]):
        table.add_column(heading, justify="right" if index else "left")
    powers = {step: growths(sizes, step) for step in shown}
    for name in powers[last]:
        row = [f"{steps[last][name]:.4g}" for steps in sizes.values()]
        table.add_row(name, *row, *(f"{powers[step][name]:+.2f}" for step in shown))
    console.print(table)
    print_line(console, verdict(sizes)[1])


def build_page(sizes: Sizes, command: str) -> str:
    """The same as HTML, with a plot of sizes over widths for each shown step."""
    plots = [(f"step {step}", _plot(sizes, step)) for step in _shown_steps(sizes)]
    text = text_as_html(lambda out: print_sizes(sizes, out))
    return html_page("Sizes of activations over widths", text, plots, f"<pre>{escape(command)}</pre>\n")


def _plot(sizes: Sizes, step: int) -> Figure:
    traces = [
        {
            "x": list(sizes),
            "y": [size if math.isfinite(size := steps[step][name]) else None for steps in sizes.values()],
            "name": f"{name} ({power:+.2f})",
            "mode": "lines+markers",
            "line": {"color": COLORS[index % len(COLORS)]},
        }
        for index, (name, power) in enumerate(growths(sizes, step).items())
    ]
    plot = build_plot(f"step {step}", traces, "hidden_size", "mean |x|")
    for axis in ("xaxis", "yaxis"):
        plot["layout"][axis]["type"] = "log"
    return plot


def check_coordinates(config: Config, launch: Launch, command: str) -> int:
    """Measures all widths, prints and writes what was found, and returns the exit code.

    Raises:
        UserError: The machine or the data does not allow a width, or the run directory cannot be written.
    """
    check_run_dir(config)
    set_environment(config)
    prepare_libraries()
    with importing_torch():
        from gpt_pretrain.features.resolve import build_run_spec, detect_platform
        from gpt_pretrain.training.coordinates import at_peak_rate, measure_sizes
    console, platform = console_of_width(_WIDTH), detect_platform()
    sizes = {}
    for width in sorted({*config.coordinate_check.widths}):
        print_line(console, f"training at width {width}")
        of_width = at_peak_rate(at_width(config, width), config.coordinate_check.steps)
        sizes[width] = measure_sizes(build_run_spec(of_width, launch, platform))
    print_sizes(sizes, console)
    run_dir = make_run_dir(config.run_dir, config.name)
    for name, text in (("json", json.dumps(sizes, indent=1)), ("html", build_page(sizes, command))):
        print_line(console, f"written: {visible(str(write_result(run_dir / f'coordinate_check.{name}', text)))}")
    return 0 if verdict(sizes)[0] else NOT_FLAT


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (`sys.argv` when not given) and returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", "gpt_pretrain.coordinate_check", *given])

    def check(request: Request, jobs: Sequence[Job], launch: Launch) -> int:
        return check_coordinates(jobs[0].config, launch, command)

    def refuse(request: Request, launch: Launch) -> None:
        refuse_launcher_and_sweep(request, launch, "a coordinate check", "coordinate_check.widths")

    return run_with_config(
        __doc__, check, given, rules=coordinate_check_problems, refuse=refuse, name="coordinate_check"
    )


if __name__ == "__main__":
    raise SystemExit(main())
