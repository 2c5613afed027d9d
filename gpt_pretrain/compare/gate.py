"""The gate, for scripts: what every variant must show. Only the whole confidence interval meets a demand."""

import math
import re
from collections.abc import Iterator

from gpt_pretrain.compare.comparison import Answer, Gate
from gpt_pretrain.config.schema import GateConfig


def gate_problems(config: GateConfig) -> Iterator[str]:
    """Problems of the gate's keys."""
    text = config.max_loss_gap
    if text is not None and not (re.fullmatch(r"\d+(\.\d+)?%", text) and math.isfinite(float(text[:-1]))):
        number = re.fullmatch(r"\d+(\.\d+)?", text)
        meant = f"{text}%" if number else "0.5%"
        yield f"compare.max_loss_gap={text} is not a percentage; write compare.max_loss_gap={meant}"
    if config.min_speedup is not None and not (config.min_speedup > 0 and math.isfinite(config.min_speedup)):
        yield f"compare.min_speedup={config.min_speedup:g} is not a ratio of times; use a number above 0, such as 1.2"


def read_gate(config: GateConfig) -> Gate | None:
    """The demands of a configuration without `gate_problems`, if it has any."""
    text, least = config.max_loss_gap, config.min_speedup
    if text is None and least is None:
        return None
    return Gate(max_loss_gap=None if text is None else float(text.removesuffix("%")) / 100, min_speedup=least)


def missed_demands(answer: Answer, gate: Gate) -> Iterator[str]:
    """A sentence on each demand that an answer does not meet."""
    limit, gap = gate.max_loss_gap, answer.loss_gap
    if limit is not None:
        key = f"{answer.variant}: compare.max_loss_gap={100 * limit:g}%"
        if gap is None or gap.high is None:
            yield f"{key} is not shown: {answer.sentence}"
        elif gap.high > limit:
            yield f"{key} is missed: the gap is {100 * gap.value:+.2f}%, its interval reaches {100 * gap.high:+.2f}%"
    least, speedup = gate.min_speedup, answer.speedup
    if least is not None:
        key = f"{answer.variant}: compare.min_speedup={least:g}"
        if speedup is None or speedup.low is None:
            yield f"{key} is not shown: {'no time to loss' if speedup is None else 'one run each shows no spread'}"
        elif speedup.low < least:
            yield f"{key} is missed: the speedup is {speedup.value:.3f}, its interval begins at {speedup.low:.3f}"
