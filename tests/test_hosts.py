"""Two hosts with a torchrun each train as one process does; when one is lost, the other ends and can go on alone."""

import functools
import os
import re

import pytest

from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.training.watchdog import GRACE_S, SILENT_S
from tests.emulated_training import emulate
from tests.hosts import NAMES, go_on_alone, train_on_two_hosts, train_until_a_host_is_killed
from tests.rounding import fp8_anew_tolerance
from tests.runs import SMALL_RUN, run_small

STEPS, SAVED = 8, 4
SHORT = (
    "model.micro_batch_size=2",
    f"trainer.max_steps={STEPS}",
    f"model.optim.sched.decay_steps={STEPS}",
    "trainer.limit_val_batches=0",
    "logging.fp8_proof_interval=3",
)
DELAYED = emulate("delayed")
# All four experts: of scores that FP8 rounds, a token's two best may be others in each layout.
EXPERTS = (*emulate("tensorwise"), "model.num_moe_experts=4", "model.moe_ffn_hidden_size=96", "model.moe_router_topk=4")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory, cache_dir):
    """Losses of one process."""

    def trained(*overrides):
        run_dir = tmp_path_factory.mktemp("one") / "run"
        return losses(run_small(1, run_dir, cache_dir, [*SHORT, *overrides]))

    return functools.cache(trained)


def losses(metrics):
    return {record.step: record.loss for record in metrics.train}


def check_losses(seen, expected, *overrides):
    model = load_config([*SMALL_RUN, *SHORT, *overrides]).model
    assert list(seen) == list(expected)
    for step, loss in expected.items():
        assert seen[step] == pytest.approx(loss, rel=fp8_anew_tolerance(model, step)), step


@pytest.mark.parametrize("killed", [NAMES[1], pytest.param(NAMES[0], marks=pytest.mark.slow)])
def test_when_a_host_is_lost_the_other_ends_with_its_stacks_and_goes_on_alone(killed, tmp_path, cache_dir, one_process):
    """Tensor parallel ranks share a host, data parallel ones are on both; what goes on is data parallel alone."""
    saved = [*SHORT, *DELAYED, f"checkpoint.save_interval={SAVED}", "checkpoint.async_save=false"]
    lived_s = train_until_a_host_is_killed(
        tmp_path, cache_dir, [*saved, "parallelism=tp2"], killed=killed, step=STEPS - 1, on_gpus=False
    )
    # A watchdog hears nothing for a while; then traces are written, and torchrun asks what is left to end.
    assert lived_s < SILENT_S + GRACE_S + 15
    survivors = (0, 1) if killed == NAMES[1] else (2, 3)
    for rank in survivors:
        stacks = (tmp_path / "run" / "stacks" / f"rank_{rank}.txt").read_text()
        assert "gpt_pretrain/training/trainer.py" in stacks
        assert re.search(rf"rank {rank} on {'host-a' if rank < 2 else 'host-b'}, process", stacks)
    if killed == NAMES[0]:
        # Its lock on the run directory is valid until it is old.
        os.utime(tmp_path / "run" / "lock", (0, 0))
    resumed = go_on_alone(
        tmp_path, cache_dir, [*saved, "parallelism=dp"], name=next(iter({*NAMES} - {killed})), on_gpus=False
    )
    assert [start.step for start in resumed.starts] == [0, SAVED]
    assert resumed.fp8_coverage.gemm_flops_share > 0
    check_losses(losses(resumed), one_process(*DELAYED), *DELAYED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        pytest.param(DELAYED, ["parallelism=dp"], id="DP4"),
        pytest.param(DELAYED, ["parallelism=pp2"], id="PP2·DP2"),
        pytest.param(EXPERTS, ["parallelism=ep2", "model.expert_model_parallel_size=4"], id="EP4"),
        pytest.param(EXPERTS, ["parallelism=tp2_sp", "model.expert_model_parallel_size=2"], id="TP2+SP·EP2"),
    ],
)
def test_two_hosts_train_as_one_process(model, layout, tmp_path, cache_dir, one_process):
    metrics = train_on_two_hosts(tmp_path, cache_dir, [*SHORT, *model, *layout], on_gpus=False)
    assert metrics.fp8_coverage.gemm_flops_share > 0
    check_losses(losses(metrics), one_process(*model), *model)
