"""A batch that grows, on GPUs: resumed to the bit in FP8, proven at every size, and with CUDA graphs."""

import pytest
import torch

from gpt_pretrain.config.load import load_saved_config
from tests.rounding import loss_tolerance
from tests.runs import SMALL_GPU_RUN, run_small

pytestmark = pytest.mark.gpu

# Steps of 2, 2, 4, 6, 8 and 8 samples of 128 tokens.
GROWING = (
    *SMALL_GPU_RUN,
    "model.micro_batch_size=1",
    "model.rampup_batch_size=[2,2,12]",
    "trainer.max_steps=null",
    "trainer.max_tokens=3840",
    "model.optim.sched.name=wsd",
    "model.optim.sched.warmup_tokens=512",
    "model.optim.sched.decay_tokens=3840",
    "model.optim.sched.wsd_decay_tokens=2048",
)
SAMPLES = [2, 4, 8, 14, 22, 30]


@pytest.mark.parametrize(
    ("num_gpus", "layout"),
    [
        pytest.param(1, ["model.use_distributed_optimizer=true"], id="one GPU"),
        pytest.param(2, ["parallelism=dp"], id="DP2", marks=pytest.mark.gpu(count=2)),
        pytest.param(2, ["parallelism=zero2"], id="sharded gradients", marks=pytest.mark.gpu(count=2)),
    ],
)
@pytest.mark.parametrize("fp8", ["none", "delayed", "tensorwise"])
def test_a_run_that_is_cut_while_its_batch_grows_equals_the_uncut_run(num_gpus, layout, fp8, tmp_path, cache_dir):
    overrides = [
        *GROWING,
        *layout,
        f"fp8={fp8}",
        "trainer.deterministic=true",
        "checkpoint.save_at_end=true",
        *([] if fp8 == "none" else ["model.fp8_params=true", "logging.fp8_proof_interval=1"]),
    ]
    uncut = run_small(num_gpus, tmp_path / "uncut", cache_dir, overrides, on_gpus=True)
    run_small(num_gpus, tmp_path / "cut", cache_dir, [*overrides, "trainer.max_tokens=1000"], on_gpus=True)
    resumed = run_small(num_gpus, tmp_path / "cut", cache_dir, overrides, on_gpus=True)
    assert [start.step for start in resumed.starts] == [0, 3]
    assert [each.consumed_samples for each in uncut.train] == SAMPLES
    curves = [[(each.step, each.loss, each.grad_norm, each.lr) for each in run.train] for run in (uncut, resumed)]
    assert curves[0] == curves[1]


def test_graphs_replay_however_many_microbatches_a_step_has(tmp_path, cache_dir):
    """A graph holds a layer's pass for one microbatch; nothing in it counts them."""
    plain, graphs = (
        run_small(
            1, tmp_path / impl, cache_dir, [*GROWING, "fp8=delayed", f"model.cuda_graph_impl={impl}"], on_gpus=True
        )
        for impl in ("none", "local")
    )
    model = load_saved_config(tmp_path / "none" / "config.yaml").model
    for one, other in zip(graphs.train, plain.train, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=loss_tolerance(model, torch.bfloat16, one.step))
    assert [each.consumed_samples for each in graphs.train] == SAMPLES
