"""Batches that grow and schedules in tokens, against tables worked out by hand and megatron-core's calculator."""

import pytest
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.config.schedule import (
    NOTHING,
    RatePhases,
    Trained,
    batch_schedule,
    last_step,
    num_train_samples,
    rate_phases,
)
from tests.refusals import compose_quickly

LENGTH = 64
SMALL = ("data=mock", "model.micro_batch_size=1", "model.global_batch_size=8", f"model.encoder_seq_length={LENGTH}")
RAMP = "model.rampup_batch_size=[2,2,12]"
STEPS = "model.step_batch_size_schedule='0:2 500:4 1K:8'"
TOKENS = ("trainer.max_steps=null", "trainer.max_tokens=5120")


def config_of(*overrides):
    return compose_quickly([*SMALL, *overrides])


def batches(config, num_steps, trained=NOTHING):
    """The batch of each step, asked before each as a run asks."""
    schedule, found = batch_schedule(config.model), []
    for _ in range(num_steps):
        found.append(schedule.next_batch(trained))
        samples = trained.samples + found[-1]
        trained = Trained(trained.steps + 1, samples, trained.tokens + found[-1] * LENGTH)
    return found


@pytest.mark.parametrize(
    ("grows", "table"),
    [
        # Three increments in 12 samples: 2 up to sample 4, 4 up to 8, 6 up to 12; a step may pass an end.
        (RAMP, [2, 2, 4, 6, 8, 8]),
        ("model.rampup_batch_size=[2,6,7]", [2, 2, 2, 2, 8, 8]),
        # A step of 6 passes over the end of 7.
        ("model.rampup_batch_size=[6,1,2]", [6, 8, 8]),
        # 500 tokens are 7.8 samples, and megatron-core rounds down; 1,000 are 15.
        (STEPS, [2, 2, 2, 2, 4, 4, 8, 8]),
        ("model.global_batch_size=8", [8, 8]),
    ],
)
def test_the_batch_of_each_step(grows, table):
    assert batches(config_of(grows), len(table)) == table


def megatron_lm_ramp(start, increment, ramp_samples, last, num_steps):
    """`RampupBatchsizeNumMicroBatchesCalculator` of Megatron-LM and NeMo, which megatron-core 0.19 dropped."""
    per_increment = ramp_samples / ((last - start) // increment)
    consumed, found = 0, []
    for _ in range(num_steps):
        found.append(last if consumed > ramp_samples else start + int(consumed / per_increment) * increment)
        consumed += found[-1]
    return found


@pytest.mark.parametrize("ramp", [(16, 16, 5_859), (32, 32, 1000), (1, 1, 777), (8, 120, 4096)])
def test_a_ramp_is_that_of_megatron_lm(ramp):
    config = config_of("model.global_batch_size=128", f"model.rampup_batch_size=[{','.join(map(str, ramp))}]")
    assert batches(config, 400) == megatron_lm_ramp(*ramp, 128, 400)


@pytest.mark.parametrize("text", ["0:8 1K:16 0.01M:24 20000:128", "0:1,100:2,6.4k:128"])
def test_steps_by_tokens_are_those_of_megatron_core(text):
    config = config_of("model.global_batch_size=128", f"model.step_batch_size_schedule='{text}'")
    calculator = StepBatchsizeNumMicroBatchesCalculator(1, 1, False, 1, text, LENGTH)
    consumed, expected = 0, []
    for _ in range(100):
        calculator.update(consumed, consistency_check=True)
        expected.append(calculator.get_current_global_batch_size())
        consumed += expected[-1]
    assert batches(config, 100) == expected


@pytest.mark.parametrize("grows", [RAMP, STEPS, "model.rampup_batch_size=null"])
def test_steps_and_samples_are_counted_as_the_steps_are_taken(grows):
    config = config_of(grows)
    schedule, table = batch_schedule(config.model), batches(config, 12)
    for done in range(8):
        samples = sum(table[:done])
        trained = Trained(done, samples, samples * LENGTH)
        for more in range(5):
            assert schedule.samples_of(more, trained) == sum(table[done : done + more])
            assert schedule.steps_for(sum(table[done : done + more]), trained) == more
        assert schedule.steps_for(1, trained) == 1


@pytest.mark.parametrize(
    ("overrides", "steps", "samples"),
    [
        # 80 samples: 2 + 2 + 4 + 6 = 14 in four steps, 66 / 8 in nine.
        ((*TOKENS, RAMP), 13, 86),
        # 2 · 4 + 4 · 2 = 16 in six steps, 64 / 8 in eight.
        ((*TOKENS, STEPS), 14, 80),
        (TOKENS, 10, 80),
        (("trainer.max_steps=null", "trainer.max_tokens=5121"), 11, 88),
        ((RAMP, "trainer.max_steps=6"), 6, 30),
    ],
)
def test_a_run_ends_with_the_step_that_reaches_its_tokens(overrides, steps, samples):
    config = config_of(*overrides)
    assert (last_step(config), num_train_samples(config)) == (steps, samples)


def test_a_run_that_resumes_with_another_batch_ends_at_the_same_tokens():
    config = config_of(*TOKENS)
    # Four steps of 4 samples before, 64 samples left.
    assert last_step(config, Trained(4, 16, 16 * LENGTH)) == 12
    assert num_train_samples(config, Trained(4, 16, 16 * LENGTH)) == 80
    # An index is the same at each start.
    assert num_train_samples(config, Trained(4, 32, 32 * LENGTH), passed_over=6) == 86


def test_samples_that_a_rewind_passed_over_do_not_move_the_batch():
    progress = TrainingProgress(step=3, consumed_samples=30, passed_over=((4, 22),))
    assert progress.trained(LENGTH) == Trained(3, 8, 8 * LENGTH)
    assert batches(config_of(RAMP), 2, progress.trained(LENGTH)) == [6, 8]


def test_tokens_are_those_of_the_length_that_each_sample_had():
    """Ten samples of 32 tokens, then five of 64; of the three passed over, two were short."""
    progress = TrainingProgress(step=3, consumed_samples=15, earlier_lengths=((10, 32),), passed_over=((8, 3),))
    assert progress.consumed_tokens(64) == 640
    assert progress.trained(64) == Trained(3, 12, 512)


WSD = ("model.optim.sched.name=wsd",)


@pytest.mark.parametrize(
    ("overrides", "phases"),
    [
        (("trainer.max_steps=300",), (False, 30, 300, None)),
        (("trainer.max_steps=90000",), (False, 2000, 90000, None)),
        (TOKENS, (True, 512, 5120, None)),
        # 2,000 steps have 1,024,000 tokens, or with the ramp 18 samples less.
        (("trainer.max_steps=null", "trainer.max_tokens=1e9"), (True, 1_024_000, 10**9, None)),
        (("trainer.max_steps=null", "trainer.max_tokens=1e9", RAMP), (True, 1_024_000 - 18 * 64, 10**9, None)),
        ((*TOKENS, *WSD, "model.optim.sched.wsd_decay_tokens=1000"), (True, 512, 5120, 1000)),
        # Steps 1 to 3 have 8 samples. Of 13 steps the last five, of 8 samples each, begin after sample 46.
        (
            (*TOKENS, *WSD, RAMP, "model.optim.sched.warmup_steps=3", "model.optim.sched.wsd_decay_steps=5"),
            (True, 512, 5120, 5120 - 46 * 64),
        ),
        # Six steps have 30 samples.
        (("trainer.max_steps=6", RAMP, "model.optim.sched.warmup_tokens=100"), (True, 100, 1920, None)),
        ((RAMP, "trainer.max_steps=6"), (False, 0, 6, None)),
        ((*TOKENS, "model.optim.sched.decay_tokens=4000"), (True, 400, 4000, None)),
        ((*TOKENS, "model.optim.sched.decay_steps=5"), (True, 256, 2560, None)),
    ],
)
def test_the_phases_of_the_rate(overrides, phases):
    in_tokens, warmup, decay, wsd_decay = phases
    expected = RatePhases(in_tokens=in_tokens, warmup=warmup, decay=decay, wsd_decay=wsd_decay)
    assert rate_phases(config_of(*overrides)) == expected
