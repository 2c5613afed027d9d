"""Parallel layouts on two GPUs, through NCCL, train as one GPU does."""

import pytest

from tests.runs import SMALL_GPU_RUN, run_small

pytestmark = pytest.mark.gpu(count=2)

SHORT = (*SMALL_GPU_RUN, "trainer.max_steps=10")


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory, cache_dir):
    return run_small(1, tmp_path_factory.mktemp("one") / "run", cache_dir, SHORT, on_gpus=True)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param("tp2", id="TP2"),
        pytest.param("tp2_sp", id="TP2+SP"),
        pytest.param("pp2", id="PP2"),
        pytest.param("pp2_vp2", id="PP2 interleaved"),
        pytest.param("dp", id="DP2 distributed optimizer"),
        pytest.param("cp2", id="CP2"),
    ],
)
def test_layout_trains_as_one_gpu(layout, tmp_path, cache_dir, one_gpu):
    metrics = run_small(2, tmp_path / "run", cache_dir, [*SHORT, f"parallelism={layout}"], on_gpus=True)
    expected = [record.loss for record in one_gpu.train]
    assert expected[-1] < expected[0] - 0.5
    assert [record.loss for record in metrics.train] == pytest.approx(expected, rel=5e-3)
