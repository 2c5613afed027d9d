"""Two hosts of two GPUs through NCCL: proven FP8 trains as on one GPU, and one host goes on when the other is lost.

The hosts are two torchruns on one machine (`tests.hosts`); tests/test_hosts.py is the same on CPUs.
"""

import functools
import re

import pytest

from tests.hosts import NAMES, go_on_alone, train_on_two_hosts, train_until_a_host_is_killed
from tests.runs import SMALL_GPU_RUN, means_of_ten, run_small

pytestmark = pytest.mark.gpu(count=4)

STEPS, SAVED = 10, 5
# The state of a later step tells more than the first one's.
SHORT = (*SMALL_GPU_RUN, f"trainer.max_steps={STEPS}", "logging.fp8_proof_interval=5")
STORED = "model.fp8_params=true"
EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=256", "model.init_method_std=0.05")
# The watchdog's promise, and what torchrun takes to end.
PROMISED_S = 60


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory, cache_dir):
    """Losses of one GPU."""

    @functools.cache
    def trained(*overrides):
        run_dir = tmp_path_factory.mktemp("one") / "run"
        return losses(run_small(1, run_dir, cache_dir, [*SHORT, *overrides], on_gpus=True))

    return trained


def losses(metrics):
    return [record.loss for record in metrics.train]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param("delayed", ["parallelism=dp"], id="delayed DP4"),
        pytest.param("delayed", ["parallelism=dp", STORED], id="delayed DP4 stored"),
        pytest.param("delayed", ["parallelism=tp2_sp", STORED], id="delayed TP2+SP·DP2 stored"),
        pytest.param("delayed", ["parallelism=pp2", STORED], id="delayed PP2·DP2 stored"),
        pytest.param("blockwise", ["parallelism=pp2"], id="blockwise PP2·DP2"),
    ],
)
def test_layout_over_two_hosts_is_proven_and_trains_as_one_gpu(recipe, layout, tmp_path, cache_dir, one_gpu):
    """Ranks of a tensor parallel group share a host; stages and data parallel ranks are on both."""
    metrics = train_on_two_hosts(tmp_path, cache_dir, [*SHORT, f"fp8={recipe}", *layout], on_gpus=True)
    assert metrics.fp8_coverage.gemm_flops_share > 0.5
    assert (metrics.fp8_coverage.parameter_bytes_share > 0) == (STORED in layout)
    assert losses(metrics) == pytest.approx(one_gpu(f"fp8={recipe}"), rel=2e-2)


@pytest.mark.parametrize(
    "layout",
    [
        # The ranks of a host share each expert's matrices, and both hosts the experts.
        pytest.param(["parallelism=tp2_sp", "model.expert_model_parallel_size=2"], id="TP2+SP·EP2"),
        pytest.param(["parallelism=ep2", "model.expert_model_parallel_size=4"], id="EP4"),
    ],
)
def test_experts_on_two_hosts_are_proven_and_train_as_on_one_gpu(layout, tmp_path, cache_dir, one_gpu):
    experts = [*EXPERTS, "fp8=tensorwise"]
    metrics = train_on_two_hosts(tmp_path, cache_dir, [*SHORT, *experts, *layout], on_gpus=True)
    assert metrics.fp8_coverage.gemm_flops_share > 0.5
    assert means_of_ten(losses(metrics)) == pytest.approx(means_of_ten(one_gpu(*experts)), rel=3e-2)


RESUMED = (*SHORT, "fp8=delayed", STORED, f"checkpoint.save_interval={SAVED}", "checkpoint.async_save=false")


@pytest.fixture(scope="module")
def lost(tmp_path_factory, cache_dir):
    """A run that was cut when a host was lost, and how long the other one lived on."""
    folder = tmp_path_factory.mktemp("lost")
    overrides = [*RESUMED, "parallelism=dp"]
    lived_s = train_until_a_host_is_killed(folder, cache_dir, overrides, killed=NAMES[1], step=STEPS - 2, on_gpus=True)
    return folder, lived_s


def test_when_a_host_is_lost_the_other_one_ends_with_its_stacks(lost):
    folder, lived_s = lost
    print(f"the other host had ended {lived_s:.1f} s later")
    assert lived_s < PROMISED_S
    for rank in (0, 1):
        stacks = (folder / "run" / "stacks" / f"rank_{rank}.txt").read_text()
        assert "gpt_pretrain/training/trainer.py" in stacks
        # Torch may abort where NCCL notices first.
        assert re.search(rf"rank {rank} on {NAMES[0]}, process|Fatal Python error: Aborted", stacks)


def test_one_host_goes_on_with_the_losses_of_an_uncut_run(lost, cache_dir, one_gpu):
    folder, _ = lost
    resumed = go_on_alone(folder, cache_dir, [*RESUMED, "parallelism=dp"], name=NAMES[0], on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, SAVED]
    assert resumed.fp8_coverage.gemm_flops_share > 0.5
    assert resumed.fp8_coverage.parameter_bytes_share > 0
    assert losses(resumed) == pytest.approx(one_gpu("fp8=delayed"), rel=2e-2)
