"""How long a run is, in steps, samples and tokens, with a batch that may grow, and the phases of its learning rate.

`model.rampup_batch_size` (Megatron-LM, NeMo) and `model.step_batch_size_schedule` (megatron-core) say how the batch
grows to `model.global_batch_size`. The batch follows what was trained on, not the step: a run that resumes, with
another batch or after a rewind, finds its place in the schedule by itself. Nothing here depends on ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise

from gpt_pretrain.config.errors import ConfigError, divisors, one_of, refusal
from gpt_pretrain.config.schema import Config, ModelConfig

_RAMP = "model.rampup_batch_size"
_STEPS = "model.step_batch_size_schedule"
_STEPS_FORM = "pairs as in 0:256 10B:512 50B:1024"
_RAMP_FORM = "[start,increment,samples], such as [16,16,100000]"
# Suffixes of megatron-core's schedules.
_UNITS = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
# Megatron-LM's most, unless the schedule is short.
_MOST_WARMUP_STEPS = 2000
# Tokens or samples.
_LARGEST = 2**53
# GPT-3's ramp has 96; a schedule is walked through in every step.
_MOST_STAGES = 1000


@dataclass(frozen=True, slots=True)
class Trained:
    """What a run has trained on; samples that a rewind has passed over do not count."""

    steps: int = 0
    samples: int = 0
    tokens: int = 0


NOTHING = Trained()


@dataclass(frozen=True, slots=True)
class BatchStage:
    """A part of a run with steps of one size."""

    begin: int
    """Samples or tokens that are behind the run when it begins."""
    batch: int
    """Samples of a step."""


@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """The batch of each step; several stages begin and grow in order, the first of them at 0."""

    stages: tuple[BatchStage, ...]
    sequence_length: int
    in_tokens: bool
    """Whether stages begin after so many tokens; otherwise after samples."""

    def phases(self, trained: Trained = NOTHING) -> Iterator[tuple[int, int | None]]:
        """The batches that follow, each with the number of its steps; None: there is no other after it.

        A step takes the batch of its first sample (megatron-core's `update_num_microbatches` before each step).
        """
        position = trained.tokens if self.in_tokens else trained.samples
        for stage, following in pairwise(self.stages):
            size = stage.batch * (self.sequence_length if self.in_tokens else 1)
            if (num_steps := -((position - following.begin) // size)) > 0:
                yield stage.batch, num_steps
                position += num_steps * size
        yield self.stages[-1].batch, None

    def next_batch(self, trained: Trained) -> int:
        """Samples of the next step."""
        return next(self.phases(trained))[0]

    def samples_of(self, num_steps: int, trained: Trained = NOTHING) -> int:
        """Samples of the next steps together."""
        samples = 0
        for batch, most in self.phases(trained):
            steps = num_steps if most is None else min(most, num_steps)
            samples += steps * batch
            num_steps -= steps
        return samples

    def steps_for(self, num_samples: int, trained: Trained = NOTHING) -> int:
        """The fewest steps that have so many samples; 0 if none are wanted."""
        steps = 0
        for batch, most in self.phases(trained):
            needed = max(0, -(-num_samples // batch))
            if most is None or needed <= most:
                break
            steps += most
            num_samples -= most * batch
        return steps + needed


def batch_schedule(model: ModelConfig) -> BatchSchedule:
    """The batches of a model without `batch_problems`.

    Raises:
        ConfigError: `model.step_batch_size_schedule` is not of the form.
    """
    last, length, ramp = model.global_batch_size, model.encoder_seq_length, model.rampup_batch_size
    if model.step_batch_size_schedule is not None:
        return BatchSchedule(read_stages(model.step_batch_size_schedule, length), length, in_tokens=True)
    stages = [BatchStage(0, last)]
    if ramp is not None:
        start, increment, num_samples = ramp
        count = (last - start) // increment
        # Megatron-LM: start + int(consumed / (samples / count)) · increment.
        stages = [BatchStage(-(-n * num_samples // count), start + n * increment) for n in range(count + 1)]
    return BatchSchedule(tuple(stages), length, in_tokens=False)


def batch_grows(model: ModelConfig) -> bool:
    """Whether steps of a run have different batches."""
    return model.rampup_batch_size is not None or model.step_batch_size_schedule is not None


def read_stages(text: str, sequence_length: int) -> tuple[BatchStage, ...]:
    """The stages of `model.step_batch_size_schedule`, as megatron-core reads it: to whole samples, rounded down."""
    stages = []
    for entry in text.replace(",", " ").split():
        begin, _, batch = entry.partition(":")
        try:
            tokens, samples = _whole(begin), _whole(batch)
        except (ValueError, ArithmeticError):
            what = "TOKENS:SAMPLES in whole numbers"
            raise ConfigError([f"{_STEPS}: {entry!r:.60} is not {what}; write {_STEPS_FORM}"]) from None
        stages.append(BatchStage(tokens // sequence_length * sequence_length, samples))
    return tuple(stages)


def _whole(text: str) -> int:
    unit = _UNITS.get(text[-1:].upper())
    number = Decimal(text[:-1]) * unit if unit else Decimal(text)
    # The first is not so of infinity and NaN.
    if not abs(number) <= _LARGEST or number != int(number):
        raise ValueError(text)
    return int(number)


def batch_problems(model: ModelConfig) -> Iterator[str]:
    """What is wrong with how the batch grows, beside what depends on ranks."""
    last, ramp, text = model.global_batch_size, model.rampup_batch_size, model.step_batch_size_schedule
    if min(last, model.encoder_seq_length) < 1:
        # The ranges of these have a message.
        return
    if ramp is not None and text is not None:
        asked, setting = f"{_RAMP}={_shown(ramp)}", f"{_STEPS}={text!r}"
        yield refusal(asked, setting, "both say how the batch grows", f"{_RAMP}=null", f"{_STEPS}=null")
    elif ramp is not None:
        yield from _ramp_problems(ramp, last)
    elif text is not None:
        try:
            yield from _stage_problems(read_stages(text, model.encoder_seq_length), model)
        except ConfigError as error:
            yield from error.problems


def _shown(ramp: Sequence[int]) -> str:
    return f"[{','.join(map(str, ramp))}]"


def _ramp_problems(ramp: Sequence[int], last: int) -> Iterator[str]:
    asked = f"{_RAMP}={_shown(ramp)}"
    if len(ramp) != 3:
        yield f"{asked} is not three numbers; use {_RAMP_FORM}, or null"
        return
    start, increment, _ = ramp
    for name, value in zip(("start", "increment", "samples"), ramp, strict=True):
        if not 1 <= value <= _LARGEST:
            yield f"{asked} has {name}={value}, which must be 1 or more; use {_RAMP_FORM}, or null"
            return
    if start >= last:
        way = f"a start of 1 to {last - 1}, or " if last > 1 else ""
        yield f"{asked} does not start below model.global_batch_size={last}; use {way}null"
    elif (last - start) % increment:
        ways = one_of(divisors(last - start))
        yield (
            f"{asked} does not reach model.global_batch_size={last}: {last} - {start} = {last - start} is no multiple "
            f"of increment={increment}; use increments of {ways}"
        )
    elif (count := (last - start) // increment) > _MOST_STAGES:
        yield f"{asked} makes {count:,} increments; use increments that make {_MOST_STAGES:,} or fewer"


def _stage_problems(stages: Sequence[BatchStage], model: ModelConfig) -> Iterator[str]:
    last = model.global_batch_size
    asked = f"{_STEPS}={model.step_batch_size_schedule!r}"
    if not stages:
        yield f"{asked} has no batch; write {_STEPS_FORM}, or null"
    elif stages[0].begin != 0:
        yield f"{asked} says no batch for the first tokens; begin with 0:{max(1, stages[0].batch)}"
    elif stages[0].batch < 1:
        yield f"{asked} has a batch of {stages[0].batch} samples; use 1 or more"
    for one, following in pairwise(stages):
        if following.begin <= one.begin:
            yield (
                f"{asked}: its tokens do not rise, in samples of model.encoder_seq_length={model.encoder_seq_length}: "
                f"{following.begin:,} follows {one.begin:,}; use more than {one.begin + model.encoder_seq_length - 1:,}"
            )
        elif following.batch <= one.batch:
            # Memory, index and validation are sized for model.global_batch_size.
            yield f"{asked}: its batches do not rise: {following.batch} follows {one.batch}; use more than {one.batch}"
    if stages and stages[-1].batch != last:
        batch = stages[-1].batch
        way = f"model.global_batch_size={batch}, or " if batch > 0 else ""
        yield f"{asked} ends with {batch}, not model.global_batch_size={last}; use {way}a last batch of {last}"


def has_length(config: Config) -> bool:
    """Whether the keys that say how long a run is, and with which batches, are those of one that can start."""
    model, trainer = config.model, config.trainer
    has_end = (trainer.max_steps is None) is not (trainer.max_tokens is None)
    return has_end and min(model.global_batch_size, model.encoder_seq_length) >= 1 and not any(batch_problems(model))


def last_step(config: Config, trained: Trained = NOTHING) -> int:
    """Steps of the whole run, for one that has trained so far: `trainer.max_steps`, or what reaches `max_tokens`."""
    trainer = config.trainer
    if trainer.max_tokens is None:
        assert trainer.max_steps is not None, "rules.training demands one"
        return trainer.max_steps
    missing = -(-(trainer.max_tokens - trained.tokens) // config.model.encoder_seq_length)
    return trained.steps + batch_schedule(config.model).steps_for(missing, trained)


def num_train_samples(config: Config, trained: Trained = NOTHING, *, passed_over: int = 0) -> int:
    """Training samples of the whole run: the same at each start, so that it finds its sample indices again.

    A run that resumes has trained so far, also with another batch, and its rewinds have passed over samples. Each
    rewind may skip the samples of a save interval and the margin, because the checkpoint it returns to is no older.
    """
    steps_left = max(1, last_step(config, trained) - trained.steps)
    spare_steps = 0
    if config.trainer.max_spike_rewinds is not None and config.checkpoint.save_interval is not None:
        interval = config.checkpoint.save_interval + config.trainer.spike_margin
        spare_steps = config.trainer.max_spike_rewinds * interval
    spare = max(0, spare_steps * config.model.global_batch_size - passed_over)
    return trained.samples + passed_over + batch_schedule(config.model).samples_of(steps_left, trained) + spare


def rates_in_tokens(config: Config) -> bool:
    """Whether the learning rate follows tokens; otherwise it follows steps."""
    sched = config.model.optim.sched
    lengths = (config.trainer.max_tokens, sched.warmup_tokens, sched.decay_tokens, sched.wsd_decay_tokens)
    return any(length is not None for length in lengths)


@dataclass(frozen=True, kw_only=True, slots=True)
class RatePhases:
    """The phases of the learning rate, all in tokens or all in steps."""

    in_tokens: bool
    warmup: int
    decay: int
    """Where the rate reaches its minimum, warmup included."""
    wsd_decay: int | None
    """Length of the decay with name=wsd."""


def rate_phases(config: Config) -> RatePhases:
    """The phases as the configuration says them; in tokens, lengths in steps are those steps' tokens."""
    sched, model, trainer = config.model.optim.sched, config.model, config.trainer
    if not rates_in_tokens(config):
        decay = last_step(config) if sched.decay_steps is None else sched.decay_steps
        warmup = min(decay // 10, _MOST_WARMUP_STEPS) if sched.warmup_steps is None else sched.warmup_steps
        return RatePhases(in_tokens=False, warmup=warmup, decay=decay, wsd_decay=sched.wsd_decay_steps)
    batches = batch_schedule(model)

    def tokens_of(steps: int) -> int:
        return batches.samples_of(steps) * model.encoder_seq_length

    if sched.decay_tokens is not None:
        decay = sched.decay_tokens
    elif sched.decay_steps is None and trainer.max_tokens is not None:
        decay = trainer.max_tokens
    else:
        decay = tokens_of(last_step(config) if sched.decay_steps is None else sched.decay_steps)
    if sched.warmup_tokens is not None:
        warmup = sched.warmup_tokens
    elif sched.warmup_steps is not None:
        warmup = tokens_of(sched.warmup_steps)
    else:
        warmup = min(decay // 10, tokens_of(_MOST_WARMUP_STEPS))
    wsd_decay = sched.wsd_decay_tokens
    if wsd_decay is None and sched.wsd_decay_steps is not None:
        decayed_at = batches.steps_for(-(-decay // model.encoder_seq_length))
        wsd_decay = decay - tokens_of(max(0, decayed_at - sched.wsd_decay_steps))
    return RatePhases(in_tokens=True, warmup=warmup, decay=decay, wsd_decay=wsd_decay)
