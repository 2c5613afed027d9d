"""The steps of a run: its stages of equal batches with their tokens and time, and its learning rate over tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from gpt_pretrain.config.choices import ScheduleName
from gpt_pretrain.config.errors import format_short
from gpt_pretrain.config.schedule import NOTHING, Trained, batch_schedule, last_step, rate_phases
from gpt_pretrain.config.schema import Config
from gpt_pretrain.run.run_spec import RunSpec

# Of a curve.
_POINTS = 400
# Stages that a line or a table lists at either end of many.
_FIRST, _LAST = 6, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOfSteps:
    """Steps of one batch."""

    first_step: int
    """Counted from 1."""
    num_steps: int
    global_batch_size: int
    num_microbatches: int
    """Per data-parallel rank and step."""
    begin_tokens: int
    """Training tokens behind the run when it begins."""
    num_tokens: int
    time_s: float | None
    """None where no measurement supports a prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSchedule:
    """All steps of a run, or those that are left of it."""

    stages: tuple[StageOfSteps, ...]
    num_steps: int
    """Of the whole run."""
    num_tokens: int
    time_s: float | None
    """Of the stages, without validations and saves."""
    rates: str
    unfinished: str
    """That the run ends before its batch has grown; empty if it has."""


def plan_steps(spec: RunSpec, step_s: Callable[[int], float] | None = None, trained: Trained = NOTHING) -> RunSchedule:
    """The steps of a checked configuration that follow what was trained on; `step_s` has the time of a batch's step."""
    model, last = spec.model, last_step(spec.config, trained)
    stages, step, tokens = [], trained.steps, trained.tokens
    for batch, most in batch_schedule(model).phases(trained):
        num_steps = last - step if most is None else min(most, last - step)
        if num_steps <= 0:
            break
        num_tokens = num_steps * batch * model.encoder_seq_length
        stages.append(
            StageOfSteps(
                first_step=step + 1,
                num_steps=num_steps,
                global_batch_size=batch,
                num_microbatches=spec.microbatches_of(batch),
                begin_tokens=tokens,
                num_tokens=num_tokens,
                time_s=None if step_s is None else num_steps * step_s(batch),
            )
        )
        step, tokens = step + num_steps, tokens + num_tokens
    unfinished = ""
    if stages and (end := stages[-1].global_batch_size) < model.global_batch_size:
        unfinished = (
            f"the run ends with batches of {end} samples, before they reach model.global_batch_size="
            f"{model.global_batch_size}"
        )
    return RunSchedule(
        stages=tuple(stages),
        num_steps=last,
        num_tokens=tokens,
        time_s=None if step_s is None else sum(stage.time_s or 0.0 for stage in stages),
        rates=describe_rates(spec.config),
        unfinished=unfinished,
    )


def shortened[T](stages: Sequence[T]) -> Iterator[T | None]:
    """The stages, or the first and last of many with None between them."""
    if len(stages) <= _FIRST + _LAST + 1:
        yield from stages
    else:
        yield from (*stages[:_FIRST], None, *stages[-_LAST:])


def describe_batches(schedule: RunSchedule) -> str:
    """The stages in a line: "8 samples from step 1, 16 from step 11 (20.5k tokens)"."""
    parts = [
        "…"
        if stage is None
        else f"{stage.global_batch_size} from step {stage.first_step:,} ({format_short(stage.begin_tokens)} tokens)"
        for stage in shortened(schedule.stages)
    ]
    return ", ".join(parts)


def describe_rates(config: Config) -> str:
    """The phases of the learning rate in a line, in tokens or in steps."""
    name, phases = config.model.optim.sched.name, rate_phases(config)

    def at(place: int) -> str:
        return f"{format_short(place)} tokens" if phases.in_tokens else f"step {place:,}"

    parts = [f"warmup to {at(phases.warmup)}"] if phases.warmup else []
    if name is ScheduleName.constant:
        return ", ".join([*parts, "constant"])
    if phases.wsd_decay is None or name is not ScheduleName.wsd:
        return ", ".join([*parts, f"{name.name} to {at(phases.decay)}"])
    style = config.model.optim.sched.wsd_decay_style.name
    begin = phases.decay - phases.wsd_decay
    parts += [f"constant to {at(begin)}"] if begin > phases.warmup else []
    return ", ".join([*parts, f"{style} decay to {at(phases.decay)}"])


def rate_curve(config: Config, schedule: RunSchedule) -> list[tuple[int, float]]:
    """Tokens after a step, and its learning rate: first and last steps of each stage, and some between them."""
    # Takes seconds.
    from gpt_pretrain.megatron.optimizer import build_scheduler

    group: dict[str, Any] = {}
    scheduler = build_scheduler(config, SimpleNamespace(param_groups=[group]))
    in_tokens, points = rate_phases(config).in_tokens, []
    for stage in schedule.stages:
        per_step = stage.num_tokens // stage.num_steps
        share = max(1, _POINTS * stage.num_tokens // schedule.num_tokens)
        for number in sorted({1, stage.num_steps, *range(1, stage.num_steps, max(1, stage.num_steps // share))}):
            tokens = stage.begin_tokens + number * per_step
            scheduler.num_steps = tokens if in_tokens else stage.first_step - 1 + number
            points.append((tokens, float(scheduler.get_lr(group))))
    return points
