"""What the training loop costs over the bare megatron-core loop: both in this process, in turns, on the same model.

The clock leaves out the time in which the thread waited for a processor that others had, so that a busy machine
changes little: what is left is work and waiting of the loop's own. Both loops use one thread.
"""

import statistics
import time
from pathlib import Path

import pytest
import torch

from gpt_pretrain.benchmark.bare import build_bare_step
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.rules.gate import load_config
from gpt_pretrain.spec.platform import detect_platform
from gpt_pretrain.training.run import train

LIMIT = 1.05
STEPS = 4
# Lost in each step by the loops that the measure has to find: a third of a step, of a slow machine's a tenth.
LOST_S = 0.02
# The kernel's account of this thread: time on a processor, time waiting for one, both in nanoseconds.
SCHEDULE = Path("/proc/thread-self/schedstat")
# Steps of some 50 ms, each of four microbatches, logged as often as the clock is read.
MODEL = (
    "data=mock",
    "model.num_layers=2",
    "model.hidden_size=128",
    "model.ffn_hidden_size=384",
    "model.encoder_seq_length=128",
    "model.vocab_size=512",
    "model.micro_batch_size=2",
    "model.global_batch_size=8",
    "model.data.num_workers=0",
    "trainer.limit_val_batches=0",
    f"trainer.log_every_n_steps={STEPS}",
    "checkpoint.save_at_end=false",
    "sample.max_new_tokens=0",
)


def own_time_s():
    waited_ns = int(SCHEDULE.read_text().split()[1]) if SCHEDULE.exists() else 0
    return time.perf_counter() - waited_ns / 1e9


def measure_ratio(run_dir, num_pairs, loss_of_time=lambda: None):
    """Median of our loop's time over the bare loop's, of intervals that follow each other; the first warms up."""
    steps = STEPS * (num_pairs + 1)
    config, launch = load_config([*MODEL, f"trainer.max_steps={steps}", f"run_dir={run_dir}"]), read_launch({})
    pairs, bare_step, began = [], None, own_time_s()

    def after_step(step, result):
        nonlocal bare_step, began
        loss_of_time()
        if step % STEPS:
            return
        ours = own_time_s() - began
        if bare_step is None:
            bare_step = build_bare_step(config, launch, detect_platform())
        began = own_time_s()
        for _ in range(STEPS):
            bare_step()
        pairs.append((ours, own_time_s() - began))
        began = own_time_s()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        install_cpu_device()
        assert train(config, launch, after_step) == "max_steps"
    finally:
        torch.set_num_threads(threads)
    assert len(pairs) == num_pairs + 1
    return statistics.median(ours / bare for ours, bare in pairs[1:])


@pytest.mark.usefixtures("no_launcher")
def test_the_loop_costs_less_than_5_percent_over_the_bare_loop(tmp_path):
    ratios = []
    # Whatever disturbs a machine passes; what a loop costs does not.
    while len(ratios) < 4 and not any(ratio <= LIMIT for ratio in ratios):
        ratios.append(measure_ratio(tmp_path / str(len(ratios)), num_pairs=10))

    assert min(ratios) <= LIMIT, ratios


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("lose", ["sleep", "burn"])
def test_the_measure_sees_time_that_a_loop_loses(tmp_path, lose):
    def loss_of_time():
        if lose == "sleep":
            time.sleep(LOST_S)
        else:
            end = time.thread_time() + LOST_S
            while time.thread_time() < end:
                pass

    ratios = []
    # What disturbs a machine may hide it once.
    while len(ratios) < 4 and not any(ratio > LIMIT for ratio in ratios):
        ratios.append(measure_ratio(tmp_path / str(len(ratios)), 4, loss_of_time))

    assert max(ratios) > LIMIT, ratios
