"""The watchdog where ranks wait for each other in NCCL, with its real times: gone within a minute, stacks written."""

import os
import signal
import time

import pytest

from gpt_pretrain.training.watchdog import EXIT_CODE
from tests.forked_runs import run_parent
from tests.launching import SHARE_GPU, gpu_environment
from tests.runs import SMALL_GPU_RUN, small_run_arguments

pytestmark = pytest.mark.gpu(count=2)

SIGKILL = -9
# From step 20 on the watchdog knows how long a step takes.
FAULT_STEP = 30
PROMISED_S = 60


@pytest.fixture(scope="module")
def parent():
    with run_parent(gpu_environment(2), has_imported=False) as opened:
        yield opened


@pytest.mark.parametrize(
    ("fault", "codes", "why"),
    [
        ("die_at_step", {0: EXIT_CODE, 1: SIGKILL}, " died\n"),
        ("sleep_at_step", {0: EXIT_CODE, 1: EXIT_CODE}, f"s in step {FAULT_STEP} (trainer.hang_timeout=1800)"),
        ("stop_at_step", {0: EXIT_CODE}, "has given no sign of life for 40 s"),
    ],
    ids=["dead", "hung", "stopped"],
)
def test_ranks_in_nccl_end_within_a_minute_of_another_ones_end(fault, codes, why, *, parent, tmp_path, cache_dir):
    arguments = small_run_arguments(
        tmp_path / "run", cache_dir, [*SMALL_GPU_RUN, "parallelism=dp", "trainer.max_steps=100000"]
    )
    run = parent.start(arguments[2:], tmp_path / "output", num_ranks=2, faults={1: [[fault, FAULT_STEP]]})
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 150
        while not metrics.exists() or f'"step":{FAULT_STEP - 2},' not in metrics.read_text().replace(" ", ""):
            assert time.monotonic() < deadline, run.text()
            assert not run.poll(), run.text()
            time.sleep(0.1)
        faulty_since = time.monotonic()
        while not run.poll() and run.codes.keys() != codes.keys():
            assert time.monotonic() < faulty_since + PROMISED_S, run.text()
            time.sleep(0.1)
        print(f"{fault}: the run had ended {time.monotonic() - faulty_since:.1f} s later")
        stacks = (tmp_path / "run" / "stacks" / "rank_0.txt").read_text()
        if SHARE_GPU in os.environ and run.codes[0] == -signal.SIGABRT:
            # Over sockets NCCL may notice first, and torch aborts where a second error meets the first one's unwinding.
            codes, why = {**codes, 0: -signal.SIGABRT}, "Fatal Python error: Aborted"
        assert run.codes == codes, run.text()
        assert why in stacks
        assert "gpt_pretrain/__main__.py" in stacks
    finally:
        run.kill()
