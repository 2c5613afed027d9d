"""The gate: what a comparison must show for a script to go on, as `compare.max_loss_gap` and `compare.min_speedup` say.

A demand is met where the whole confidence interval meets it. So a gate that nobody can answer is missed, too.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from gpt_pretrain.compare.document import Answer, Gate
from gpt_pretrain.config.schema import GateConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What is demanded of every variant; None: nothing."""

    max_loss_gap: float | None
    """Relative: 0.005 is 0.5%."""
    min_speedup: float | None

    @classmethod
    def read(cls, config: GateConfig) -> Self:
        """Those of a configuration without problems."""
        text = config.max_loss_gap
        return cls(
            max_loss_gap=None if text is None else float(text.removesuffix("%")) / 100, min_speedup=config.min_speedup
        )


def gate_problems(config: GateConfig) -> Iterator[str]:
    """What is wrong with the keys of the gate."""
    text = config.max_loss_gap
    if text is not None and not re.fullmatch(r"\d+(\.\d+)?%", text):
        number = re.fullmatch(r"\d+(\.\d+)?", text)
        meant = f"{text}%" if number else "0.5%"
        yield f"compare.max_loss_gap={text} is not a percentage; write compare.max_loss_gap={meant}"
    if config.min_speedup is not None and not (config.min_speedup > 0 and math.isfinite(config.min_speedup)):
        yield f"compare.min_speedup={config.min_speedup:g} is no ratio of times; use a number above 0, such as 1.2"


def check_gate(answers: Sequence[Answer], demands: Demands) -> Gate | None:
    """The outcome; None where nothing is demanded."""
    if demands.max_loss_gap is None and demands.min_speedup is None:
        return None
    missed = [problem for answer in answers for problem in _missed(answer, demands)]
    return Gate(max_loss_gap=demands.max_loss_gap, min_speedup=demands.min_speedup, missed=tuple(missed))


def _missed(answer: Answer, demands: Demands) -> Iterator[str]:
    limit, gap = demands.max_loss_gap, answer.loss_gap
    if limit is not None:
        key = f"{answer.variant}: compare.max_loss_gap={100 * limit:g}%"
        if gap is None or gap.high is None:
            yield f"{key} is not shown: {answer.sentence}"
        elif gap.high > limit:
            yield f"{key} is missed: the gap is {100 * gap.value:+.2f}%, its interval reaches {100 * gap.high:+.2f}%"
    least, speedup = demands.min_speedup, answer.speedup
    if least is not None:
        key = f"{answer.variant}: compare.min_speedup={least:g}"
        if speedup is None or speedup.low is None:
            yield f"{key} is not shown: {'no time to loss' if speedup is None else 'one run each tells no spread'}"
        elif speedup.low < least:
            yield f"{key} is missed: the speedup is {speedup.value:.3f}, its interval begins at {speedup.low:.3f}"
