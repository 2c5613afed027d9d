"""From what a log tells, point by point, to a run's record: tokens, GPU-seconds, rates, and bounds on what is read."""

import math
import stat
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from gpt_pretrain.compare.document import Curve, Format, RunRecord, Setting
from gpt_pretrain.compare.statistics import interpolate
from gpt_pretrain.config.errors import UserError, format_bytes
from gpt_pretrain.report.records import Fp8Record

# Logs are not ours to trust: beyond these a file is refused, not read.
MAX_BYTES = 1 << 29
MAX_POINTS = 1_000_000
# Points of a curve in the document; neighbours of longer ones are averaged.
KEPT_POINTS = 5_000
_MAX_TEXT = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One logged step; None where the log does not tell."""

    step: int
    loss: float
    samples: int | None = None
    tokens: int | None = None
    """Seen so far."""
    step_s: float | None = None
    """Seconds per step since the point before."""
    tokens_per_s_per_gpu: float | None = None


@dataclass(kw_only=True, slots=True)
class Series:
    """What one log tells of one run, in the order of its lines."""

    source: str
    format: Format
    label: str = ""
    """What tells the run from the others of its file; empty where it is the only one."""
    points: list[Point] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    """Step to loss."""
    settings: dict[str, str] = field(default_factory=dict)
    """In our keys."""
    num_gpus: int | None = None
    memory_gib: float | None = None
    skipped_steps: int | None = None
    max_steps: int | None = None
    """Steps of the whole run."""
    starts: list[int] = field(default_factory=list)
    """Steps after which a process started: the next point has its warm-up."""

    def add(self, point: Point, place: str) -> None:
        """Adds a point; one at an earlier step replaces all from there on, as a resumed run does.

        Raises:
            UserError: There are too many.
        """
        if self.points and point.step <= self.points[-1].step:
            while self.points and self.points[-1].step >= point.step:
                self.points.pop()
            self.starts.append(point.step - 1)
        self.points.append(point)
        if len(self.points) > MAX_POINTS:
            raise UserError(f"{place}: more than {MAX_POINTS:,} logged steps; log fewer, or cut the file")

    def build(self) -> RunRecord:
        """The record; its name, variant and role follow later from what tells it from other runs."""
        points = self.points
        tokens = self._tokens()
        rates = self._gpu_s_per_step(tokens)
        steps = tuple(point.step for point in points)
        per_s = None
        if rates and tokens:
            # Tokens of a step over the GPU-seconds of the median step.
            per_step = (tokens[-1] - tokens[0]) / (steps[-1] - steps[0]) if steps[-1] > steps[0] else tokens[0]
            per_s = per_step / statistics.median(rates) * self.num_gpus if self.num_gpus else None
        training = Curve(
            steps=steps,
            losses=tuple(point.loss for point in points),
            tokens=tokens,
            gpu_seconds=accumulated(steps, rates),
        )
        return RunRecord(
            name=printable(self.label),
            variant="",
            role="seed",
            seed=read_seed(self.settings),
            source=self.source,
            format=self.format,
            state="finished" if self.max_steps is not None and steps[-1] >= self.max_steps else "end unknown",
            num_gpus=self.num_gpus,
            training=thinned(training),
            validation=validated(self.validation, training),
            tokens_per_s=per_s,
            memory_gib=self.memory_gib,
            skipped_steps=self.skipped_steps,
            fp8_share=None,
            fp8=(),
            configuration=as_settings(self.settings),
            versions=None,
            command=None,
        )

    def _tokens(self) -> tuple[int, ...]:
        """Tokens at each point, as logged or from samples or steps; empty where some are not known."""
        length = read_number(self.settings.get("model.encoder_seq_length"))
        batch = read_number(self.settings.get("model.global_batch_size"))
        told = [
            point.tokens
            if point.tokens is not None
            else _times(point.samples, length)
            if point.samples is not None
            else _times(_times(point.step, batch), length)
            for point in self.points
        ]
        known = [each for each in told if each is not None]
        return tuple(known) if len(known) == len(told) else ()

    def _gpu_s_per_step(self, tokens: Sequence[int]) -> list[float]:
        """GPU-seconds per step at each point, the warm-up of each start at the pace of the others; empty if unknown."""
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
        # The first point has the warm-up of the first start.
        return [pace, *(pace if index in warm_ups else rate for index, rate in enumerate(known, start=1))]


def _times[Number: (int, float)](value: Number | None, factor: Number | None) -> Number | None:
    return None if value is None or factor is None else value * factor


def read_number(text: str | None) -> int | None:
    """A whole number above zero, if it is one."""
    # Python refuses to read very many digits.
    return int(text) if text is not None and text.isdecimal() and len(text) < 12 and int(text) > 0 else None


def read_seed(settings: Mapping[str, str]) -> int | None:
    """The seed, if it is known."""
    text = settings.get("model.seed", "")
    return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def printable(text: str) -> str:
    """A log's text as it may be shown: it must not steer the terminal, nor fill the screen."""
    shown = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text[:_MAX_TEXT])
    return f"{shown}…" if len(text) > _MAX_TEXT else shown


def as_settings(values: Mapping[str, str]) -> tuple[Setting, ...]:
    """Key and value, as the document has them."""
    return tuple(Setting(key=printable(key), value=printable(value)) for key, value in values.items())


def previous_step(steps: Sequence[int]) -> int:
    """The step before the first point's interval: as far back as the next point is ahead, and not before the start."""
    spacing = steps[1] - steps[0] if len(steps) > 1 else 1
    # A log that begins at step 0 counts steps begun, not done.
    return max(steps[0] - spacing, min(0, steps[0] - 1))


def accumulated(steps: Sequence[int], gpu_s_per_step: Sequence[float]) -> tuple[float, ...]:
    """GPU-seconds from the start of training to each point."""
    if not gpu_s_per_step:
        return ()
    total, sums, before = 0.0, [], previous_step(steps)
    for step, rate in zip(steps, gpu_s_per_step, strict=True):
        total += (step - before) * rate
        sums.append(total)
        before = step
    return tuple(sums)


def validated(losses: Mapping[int, float], training: Curve) -> Curve:
    """Validation losses by step, with the tokens and GPU-seconds that the training curve has at those steps."""
    steps, begin = sorted(losses), previous_step(training.steps)
    positions = [begin, *training.steps]
    tokens: list[float] = []
    if training.tokens:
        first = training.tokens[0] * begin / training.steps[0] if begin > 0 else 0
        tokens = [interpolate(positions, [first, *training.tokens], step) for step in steps]
    seconds: list[float] = []
    if training.gpu_seconds:
        seconds = [interpolate(positions, [0, *training.gpu_seconds], step) for step in steps]
    return Curve(
        steps=tuple(steps),
        losses=tuple(losses[step] for step in steps),
        tokens=tuple(map(round, tokens)),
        gpu_seconds=tuple(seconds),
    )


def thinned(curve: Curve) -> Curve:
    """At most `KEPT_POINTS` points: the mean loss of as many neighbours, at the last one's place."""
    per_point = math.ceil(len(curve.steps) / KEPT_POINTS)
    if per_point <= 1:
        return curve
    ends = [*range(per_point, len(curve.steps), per_point), len(curve.steps)]

    def mean(losses: Sequence[float]) -> float:
        """Of the finite losses: one skipped step does not spoil its neighbours. Not finite where none is."""
        finite = list(filter(math.isfinite, losses))
        return statistics.fmean(finite) if finite else losses[-1]

    return Curve(
        steps=tuple(curve.steps[end - 1] for end in ends),
        losses=tuple(mean(curve.losses[max(0, end - per_point) : end]) for end in ends),
        tokens=tuple(curve.tokens[end - 1] for end in ends) if curve.tokens else (),
        gpu_seconds=tuple(curve.gpu_seconds[end - 1] for end in ends) if curve.gpu_seconds else (),
    )


def thinned_records(records: Sequence[Fp8Record]) -> tuple[Fp8Record, ...]:
    """At most 60 steps of FP8 statistics, evenly spread, the last among them."""
    with_tensors = [record for record in records if record.tensors]
    every = math.ceil(len(with_tensors) / 60) or 1
    return tuple(reversed(with_tensors[::-1][::every]))


def check_size(path: Path) -> None:
    """Refuses a file that is too large to be read, and anything else than a file: reading a pipe would wait.

    Raises:
        UserError: It is one of these, or cannot be read at all.
    """
    try:
        status = path.stat()
        if stat.S_ISREG(status.st_mode):
            path.open("rb").close()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path} cannot be read: it is no regular file; write it to one")
    if status.st_size > MAX_BYTES:
        size, most = format_bytes(status.st_size), format_bytes(MAX_BYTES)
        raise UserError(f"{path} has {size}; at most {most} are read, so cut it")


def first_known(names: Iterable[str], values: Mapping[str, str]) -> str | None:
    """The first of several names that a log uses."""
    return next((name for name in names if name in values), None)
