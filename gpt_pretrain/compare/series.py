"""From a log's points to a run's record: tokens, GPU-seconds, rates, and bounds on what is read."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np

from gpt_pretrain.compare.comparison import Curve, Format, RunRecord
from gpt_pretrain.config.errors import UserError, format_bytes
from gpt_pretrain.config.files import check_regular
from gpt_pretrain.report.columns import printable

# Logs are not to be trusted: files beyond this are refused, not read.
MAX_BYTES = 1 << 29
# Of a curve in the document; neighbors in longer ones are averaged.
KEPT_POINTS = 5_000
_MAX_TEXT = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One logged step; None is unknown."""

    step: int
    loss: float
    samples: int | None = None
    tokens: int | None = None
    """Seen so far, like samples."""
    step_s: float | None = None
    """Seconds per step since the previous point."""
    tokens_per_s_per_gpu: float | None = None


@dataclass(kw_only=True, slots=True)
class Series:
    """What a log says about one run."""

    source: str
    format: Format
    label: str = ""
    """Names the run in a file of several; otherwise empty."""
    points: list[Point] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    """Step to loss."""
    settings: dict[str, str] = field(default_factory=dict)
    """By our keys."""
    num_gpus: int | None = None
    memory_gib: float | None = None
    skipped_steps: int | None = None
    max_steps: int | None = None
    """Steps of the whole run."""
    starts: list[int] = field(default_factory=list)
    """Steps after which a process started; the next point includes its warm-up."""

    def add(self, point: Point) -> None:
        """Adds a point; one at an earlier step, where a run resumed, replaces everything from there on."""
        if self.points and point.step <= self.points[-1].step:
            while self.points and self.points[-1].step >= point.step:
                self.points.pop()
            self.starts.append(point.step - 1)
        self.points.append(point)

    def build(self) -> RunRecord:
        """The record; comparing it with other runs later gives it its name and variant."""
        tokens = self._tokens()
        rates = self._gpu_s_per_step(tokens)
        steps = tuple(point.step for point in self.points)
        per_s = None
        if rates and tokens:
            # Tokens of a step over the GPU-seconds of the median step.
            per_step = (tokens[-1] - tokens[0]) / (steps[-1] - steps[0]) if steps[-1] > steps[0] else tokens[0]
            per_s = per_step / statistics.median(rates) * self.num_gpus if self.num_gpus else None
        training = Curve(
            steps=steps,
            losses=tuple(point.loss for point in self.points),
            tokens=tokens,
            gpu_seconds=accumulated(steps, rates),
        )
        return RunRecord(
            name=_shown(self.label),
            variant="",
            seed=read_seed(self.settings),
            source=self.source,
            format=self.format,
            state="finished" if self.max_steps is not None and steps[-1] >= self.max_steps else "end unknown",
            num_gpus=self.num_gpus,
            training=thinned(training, KEPT_POINTS),
            validation=validated(self.validation, training),
            tokens_per_s=per_s,
            memory_gib=self.memory_gib,
            skipped_steps=self.skipped_steps,
            configuration=as_configuration(self.settings),
        )

    def _tokens(self) -> tuple[int, ...]:
        """Tokens at each point, as logged or from samples or steps; empty if some are unknown."""
        length = read_number(self.settings.get("model.encoder_seq_length"))
        batch = read_number(self.settings.get("model.global_batch_size"))
        tokens = []
        for point in self.points:
            samples = _times(point.step, batch) if point.samples is None else point.samples
            seen = _times(samples, length) if point.tokens is None else point.tokens
            if seen is None:
                return ()
            tokens.append(seen)
        return tuple(tokens)

    def _gpu_s_per_step(self, tokens: Sequence[int]) -> list[float]:
        """GPU-seconds per step at each point, with warm-ups at the median pace; empty if unknown."""
        rates: list[float | None] = []
        for index, (before, point) in enumerate(pairwise(self.points), start=1):
            if point.tokens_per_s_per_gpu and tokens:
                per_step = (tokens[index] - tokens[index - 1]) / (point.step - before.step)
                rates.append(per_step / point.tokens_per_s_per_gpu)
            else:
                rates.append(_times(point.step_s, self.num_gpus))
        warm_ups = {
            next((index for index, point in enumerate(self.points) if point.step > step), 0) for step in self.starts
        }
        known = [rate for rate in rates if rate is not None and 0 < rate < math.inf]
        usual = [rate for index, rate in enumerate(known, start=1) if index not in warm_ups]
        if not usual or len(known) < len(rates):
            return []
        pace = statistics.median(usual)
        # The first point includes the warm-up of the first start.
        return [pace, *(pace if index in warm_ups else rate for index, rate in enumerate(known, start=1))]


def _times[Number: (int, float)](value: Number | None, factor: Number | None) -> Number | None:
    return None if value is None or factor is None else value * factor


def read_number(text: str | None) -> int | None:
    """A positive whole number; None if the text is not one."""
    # Python refuses to read very many digits.
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 and int(text) > 0 else None


def read_seed(settings: Mapping[str, str]) -> int | None:
    """The seed, if known."""
    text = settings.get("model.seed", "")
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def _shown(text: str) -> str:
    return printable(text[:_MAX_TEXT]) + ("…" if len(text) > _MAX_TEXT else "")


def as_configuration(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings as a record holds them."""
    return {_shown(key): _shown(value) for key, value in settings.items()}


def previous_step(steps: Sequence[int]) -> int:
    """The step before the first point's interval: as far back as the next point is ahead, but at least step 0."""
    spacing = steps[1] - steps[0] if len(steps) > 1 else 1
    # A log whose first step is 0 counts started steps, not finished ones.
    return max(steps[0] - spacing, min(0, steps[0] - 1))


def accumulated(steps: Sequence[int], gpu_s_per_step: Sequence[float]) -> tuple[float, ...]:
    """GPU-seconds from the start of training to each point; empty without rates."""
    if not gpu_s_per_step:
        return ()
    intervals = pairwise([previous_step(steps), *steps])
    seconds = ((step - before) * rate for (before, step), rate in zip(intervals, gpu_s_per_step, strict=True))
    return tuple(accumulate(seconds))


def validated(losses: Mapping[int, float], training: Curve) -> Curve:
    """Validation losses by step, with tokens and GPU-seconds interpolated from the training curve."""
    steps, begin = sorted(losses), previous_step(training.steps)
    positions = [begin, *training.steps]

    def at_steps(first: float, values: Sequence[float]) -> list[float]:
        return list(np.interp(steps, positions, [first, *values])) if values else []

    first_tokens = training.tokens[0] * begin / training.steps[0] if training.tokens and begin > 0 else 0
    return Curve(
        steps=tuple(steps),
        losses=tuple(losses[step] for step in steps),
        tokens=tuple(map(round, at_steps(first_tokens, training.tokens))),
        gpu_seconds=tuple(at_steps(0, training.gpu_seconds)),
    )


def thinned(curve: Curve, num_points: int) -> Curve:
    """At most `num_points` points, each the mean loss of as many neighbors at the last one's step."""
    per_point = math.ceil(len(curve.steps) / num_points)
    if per_point <= 1:
        return curve
    ends = [*range(per_point, len(curve.steps), per_point), len(curve.steps)]

    def mean(losses: Sequence[float]) -> float:
        # One skipped step must not spoil its neighbors.
        finite = list(filter(math.isfinite, losses))
        return statistics.fmean(finite) if finite else losses[-1]

    return Curve(
        steps=tuple(curve.steps[end - 1] for end in ends),
        losses=tuple(mean(curve.losses[max(0, end - per_point) : end]) for end in ends),
        tokens=tuple(curve.tokens[end - 1] for end in ends) if curve.tokens else (),
        gpu_seconds=tuple(curve.gpu_seconds[end - 1] for end in ends) if curve.gpu_seconds else (),
    )


def check_size(path: Path) -> None:
    """Raises `UserError` for what cannot be read, is too large, or is no file: reading a pipe would block."""
    try:
        status = path.stat()
        check_regular(path, status)
        path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if status.st_size > MAX_BYTES:
        size, most = format_bytes(status.st_size), format_bytes(MAX_BYTES)
        raise UserError(f"{path} has {size}; at most {most} are read, so cut it")
