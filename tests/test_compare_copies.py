"""Logs in which several ranks print each step, in whatever order, next to restarts, which go back as well."""

import random
import time

import pytest

from gpt_pretrain.compare.copies import Copies, usual_copies
from gpt_pretrain.compare.sources import read_runs

RANKS = 8
MEGATRON = (
    " [2025-11-25 19:45:{step:02d}] iteration {step:8d}/     100 | consumed samples: {samples:12d} | elapsed time per "
    "iteration (ms): {ms:.1f} | learning rate: 1.0E-04 | global batch size:     8 | lm loss: {loss:.6E} | number of "
    "skipped iterations:   1 | number of nan iterations:   0 |"
)
TITAN = (
    "[titan] 2025-11-25 19:45:01,441 - root - INFO - \x1b[31mstep: {step:2d}  \x1b[32mloss: {loss:8.4f}  "
    "\x1b[38;2;54;234;195mmemory:  1.34GiB(0.96%)  \x1b[34mtps: {tps:,}  tflops: 21.55  mfu: 2.18%\x1b[39m"
)
NEMO = (
    "Training epoch 0, iteration {before}/99 | lr: 1e-4 | consumed_samples: {samples} | global_batch_size: 8 | "
    "global_step: {before} | reduced_train_loss: {loss:.4f} | train_step_timing in s: {s:.4f}"
)
HEADS = {
    "megatron": "using world size: 8\n  seq_length ...................................... 2048\n",
    "torchtitan": "[titan] Building device mesh with parallelism: pp=1, dp_shard=8, cp=1, tp=1\n"
    "[titan] Trainer is initialized with local batch size 1, global batch size 8, gradient accumulation steps 1, "
    "sequence length 2048, total steps 100\n",
    "nemo": "Initializing distributed: GLOBAL_RANK: 0, MEMBER: 1/8\n",
}
LINES = {"megatron": MEGATRON, "torchtitan": TITAN, "nemo": NEMO}
PREFIXES = {"none": "", "torchrun": "[rank{rank}]:", "tee": "[default{rank}]: ", "srun": "{rank}: "}
STEPS = range(1, 31)


def line(code, step, rank, prefix="none", more=0):
    # A little different on each rank, but for the step.
    ms = 1000 + step % 3 + rank / 10
    values = {
        "samples": 8 * step,
        "ms": ms,
        "s": ms / 1000,
        "loss": 9 - step / 10 + rank / 1000 + more,
        "tps": 2048 + rank,
    }
    return PREFIXES[prefix].format(rank=rank) + LINES[code].format(step=step, before=step - 1, **values)


def in_order(steps):
    return [(step, rank) for step in steps for rank in range(RANKS)]


def mixed(steps):
    """A rank may be one step ahead."""
    at = {(step, rank): step + random.Random(f"{step} {rank}").uniform(0, 1.6) for step, rank in in_order(steps)}
    return sorted(at, key=lambda each: (max(at[step, each[1]] for step in steps if step <= each[0]), each[0]))


def far_behind(steps):
    """Of one rank the pipe is emptied late."""
    return [(step, rank) for step, rank in in_order(steps) if rank != 3] + [(step, 3) for step in steps]


def read(tmp_path, code, lines, end="\n"):
    path = tmp_path / "log"
    path.write_bytes(end.join([*HEADS[code].splitlines(), *lines, ""]).encode())
    (run,) = read_runs([str(path)])
    return run


ORDERS = [(order, prefix) for order in (in_order, mixed) for prefix in PREFIXES] + [
    (far_behind, prefix) for prefix in PREFIXES if prefix != "none"
]


@pytest.mark.parametrize("code", LINES)
@pytest.mark.parametrize(("order", "prefix"), ORDERS)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_step_that_all_ranks_print_counts_once(code, order, prefix, end, tmp_path):
    alone = read(tmp_path, code, [line(code, step, 0) for step in STEPS])
    together = read(tmp_path, code, [line(code, step, rank, prefix) for step, rank in order(STEPS)], end)
    assert alone.training.steps == together.training.steps == tuple(STEPS)
    assert together.training.losses == pytest.approx(alone.training.losses, abs=0.01)
    if code != "nemo":
        assert together.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=0.01)
    assert together.training.gpu_seconds[-1] == pytest.approx(alone.training.gpu_seconds[-1], rel=0.01)
    assert together.skipped_steps == alone.skipped_steps == (len(STEPS) if code == "megatron" else None)


@pytest.mark.parametrize("code", LINES)
@pytest.mark.parametrize(("order", "prefix"), ORDERS)
@pytest.mark.parametrize("back_to", [1, 11, 19])
def test_all_ranks_go_back_to_a_checkpoint(code, order, prefix, back_to, tmp_path):
    first = [line(code, step, rank, prefix) for step, rank in order(range(1, 21))]
    again = [line(code, step, rank, prefix, more=10) for step, rank in order(range(back_to, 31))]
    run = read(tmp_path, code, [*first, *again])
    assert run.training.steps == tuple(STEPS)
    assert [loss > 10 for loss in run.training.losses] == [step >= back_to for step in STEPS]


@pytest.mark.parametrize("code", LINES)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_one_rank_goes_back_as_often_as_it_likes(code, prefix, tmp_path):
    first = [line(code, step, 0, prefix) for step in range(1, 21)]
    again = [line(code, step, 0, prefix, more=10) for step in range(19, 31)]
    run = read(tmp_path, code, [*first, *first[9:], *first[9:], *again])
    assert run.training.steps == tuple(STEPS)
    assert [loss > 10 for loss in run.training.losses] == [step >= 19 for step in STEPS]


@pytest.mark.parametrize("code", LINES)
def test_the_last_of_the_copies_may_be_torn(code, tmp_path):
    lines = [line(code, step, rank) for step, rank in in_order(STEPS)]
    run = read(tmp_path, code, [*lines[:-1], lines[-1][: len(lines[-1]) // 2]])
    assert run.training.steps == tuple(STEPS)


def test_what_erases_a_line_of_the_terminal_is_no_part_of_it(tmp_path):
    run = read(tmp_path, "torchtitan", ["\x1b[2K\x1b[?25l" + line("torchtitan", step, 0) for step in STEPS])
    assert run.training.steps == tuple(STEPS)


def test_a_log_of_nothing_but_restarts_is_read_in_time():
    start, copies = time.process_time(), Copies(1)
    steps = [*range(50_000), *[49_998, 49_999] * 50_000]
    usual_copies(steps)
    assert not any(copies.is_copy(None, step) for step in steps)
    assert time.process_time() - start < 5
