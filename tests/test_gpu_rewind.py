"""Back behind a loss spike on a GPU: Transformer Engine's live scales, histories and FP8 weights go back, too."""

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import run_parent
from tests.launching import gpu_environment
from tests.runs import SMALL_GPU_RUN
from tests.test_faults import curve, weights
from tests.test_training_rewind import BAD_STEP, NO_REWINDS, Runs

pytestmark = pytest.mark.gpu

# Kernels that do not vary, so that equal means equal.
DETERMINISTIC = (
    *SMALL_GPU_RUN,
    "model.max_position_embeddings=128",
    "checkpoint.save_at_end=true",
    "trainer.deterministic=true",
)
DISTRIBUTED = "model.use_distributed_optimizer=true"


@pytest.fixture(scope="module")
def parent():
    with run_parent(gpu_environment(1), has_imported=False) as opened:
        yield opened


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param([DISTRIBUTED], id="bf16 distributed"),
        *(
            pytest.param([f"fp8={recipe}", f"model.fp8_params={params}", DISTRIBUTED], id=f"{recipe} params={params}")
            for recipe in ("delayed", "tensorwise")
            for params in ("false", "true")
        ),
    ],
)
def test_a_run_on_a_gpu_goes_back_as_if_the_samples_had_not_been(precision, parent, tmp_path):
    run = Runs(parent, tmp_path)
    codes, text = run("spiked", *DETERMINISTIC, *precision, faults={0: [BAD_STEP]})
    assert codes == [0], text
    (rewind,) = load_metrics(tmp_path / "spiked").rewinds
    assert (rewind.step, rewind.first_sample, rewind.num_samples) == (16, 64, 20)
    codes, text = run(
        "without", *DETERMINISTIC, *precision, base=NO_REWINDS, faults={0: [["leave_out_samples", 64, 20]]}
    )
    assert codes == [0], text
    assert curve(tmp_path / "spiked") == curve(tmp_path / "without")
    assert weights(tmp_path / "spiked") == weights(tmp_path / "without")
