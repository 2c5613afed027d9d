"""Averaged weights and Lion on GPUs: validated, invisible to training, resumed bit for bit, without a wait."""

import pytest
import torch

from tests.runs import SMALL_GPU_RUN, run_small
from tests.test_gpu_resume import DISTRIBUTED, check_resume

pytestmark = pytest.mark.gpu

STEPS, CUT = 12, 6
TENSORWISE = ("fp8=tensorwise", "model.fp8_params=true", DISTRIBUTED)
AVERAGED = ("model.optim.ema_decay=0.75",)
RUN = (
    *SMALL_GPU_RUN,
    "trainer.limit_val_batches=2",
    "trainer.val_check_interval=3",
    "checkpoint.save_at_end=true",
    "trainer.deterministic=true",
    f"model.optim.sched.decay_steps={STEPS}",
    f"trainer.max_steps={STEPS}",
)
PRECISIONS = {"bf16": (), "delayed": ("fp8=delayed",), "tensorwise weights": TENSORWISE}


@pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)
def test_training_does_not_see_the_average(precision, tmp_path, cache_dir):
    plain = run_small(1, tmp_path / "plain", cache_dir, [*RUN, *precision], on_gpus=True)
    averaged = run_small(1, tmp_path / "averaged", cache_dir, [*RUN, *precision, *AVERAGED], on_gpus=True)
    assert [record.loss for record in averaged.train] == [record.loss for record in plain.train]
    first, *others = averaged.validation
    assert first.ema_loss == pytest.approx(first.loss, rel=1e-3)
    assert all(record.ema_loss > record.loss for record in others), "it is behind while the loss falls"


@pytest.mark.parametrize("overrides", [(*TENSORWISE, *AVERAGED), ("optimizer=lion",)], ids=["averaged", "lion"])
def test_a_resume_is_bit_for_bit(overrides, tmp_path, cache_dir):
    check_resume(tmp_path, cache_dir, [*RUN, *overrides], cut=CUT, end=STEPS)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("layout", ["dp", "zero2", "fsdp", "tp2_sp"])
def test_two_gpus_average_as_one(layout, tmp_path, cache_dir):
    one = run_small(1, tmp_path / "one", cache_dir, [*RUN, *AVERAGED], on_gpus=True)
    two = run_small(2, tmp_path / "two", cache_dir, [*RUN, *AVERAGED, f"parallelism={layout}"], on_gpus=True)
    for record, expected in zip(two.validation, one.validation, strict=True):
        assert record.ema_loss == pytest.approx(expected.ema_loss, rel=1e-2)


@pytest.mark.parametrize("overrides", [AVERAGED, ("optimizer=lion",)], ids=["averaged", "lion"])
def test_an_update_never_makes_the_host_wait(overrides):
    """torch would raise where the host reads from the device."""
    from gpt_pretrain.megatron.weight_average import update_average
    from tests.te_training import te_training

    with te_training(*overrides, DISTRIBUTED) as training:
        training.step()
        training.gradients()
        optimizer = training.trainable.optimizer
        (part,) = optimizer.chained_optimizers
        part.prepare_grads()
        skipped = torch.zeros((), dtype=torch.bool, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            part.optimizer.step()
            if overrides is AVERAGED:
                update_average(optimizer, 0.75, skipped)
        finally:
            torch.cuda.set_sync_debug_mode("default")
