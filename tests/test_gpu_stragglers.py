"""A slow host and a slow GPU are told by CUDA events in the passes of two GPUs."""

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import run_parent
from tests.launching import gpu_environment
from tests.runs import SMALL_GPU_RUN, small_run_arguments

pytestmark = pytest.mark.gpu(count=2)


@pytest.fixture(scope="module")
def parent():
    with run_parent(gpu_environment(2), has_imported=False) as opened:
        yield opened


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(["sleep_in_passes", 0.05], id="host"),
        # 20 ms and more at any clock.
        pytest.param(["spin_on_gpu_in_passes", 50_000_000], id="GPU"),
    ],
)
def test_a_slow_rank_is_named_with_its_host(fault, parent, tmp_path, cache_dir):
    overrides = [*SMALL_GPU_RUN, "parallelism=dp", "trainer.max_steps=40"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, overrides)[2:]
    judged = [["judge_soon", 0.5]]
    faults = {0: judged, 1: [*judged, ["on_host", "node2"], fault]}
    codes, text = parent.run(arguments, tmp_path / "output", num_ranks=2, faults=faults)
    assert codes == [0, 0], text
    metrics = load_metrics(tmp_path / "run")
    for record in metrics.rank_times[-5:]:
        slowest, other = record.slowest
        print(f"step {record.step}: {slowest.time_s:.4f} s, {other.time_s:.4f} s")
        assert (slowest.rank, slowest.host, slowest.is_slow) == (1, "node2", True)
        assert (other.rank, other.is_slow) == (0, False)
        # Two microbatches; what rank 0 waits is not in its passes.
        assert slowest.time_s > 0.02
        assert other.time_s < slowest.time_s / 2
    assert metrics.summary.slow_host == "node2"
