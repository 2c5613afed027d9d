"""Muon on GPUs, with FP8 weights: proven, learning, resumed bit for bit, and the same however states are sharded."""

import pytest
import torch

from tests.runs import SMALL_GPU_RUN, run_small
from tests.test_gpu_resume import DISTRIBUTED, check_resume

pytestmark = pytest.mark.gpu

STEPS, CUT = 20, 10
FP8_WEIGHTS = ("fp8=delayed", "model.fp8_params=true", DISTRIBUTED)
MUON = (
    *SMALL_GPU_RUN,
    "optimizer=muon",
    "checkpoint.save_at_end=true",
    "trainer.deterministic=true",
    f"model.optim.sched.decay_steps={STEPS}",
)
# GPT-2 124M, but for its vocabulary.
GPT2 = (
    "model.num_layers=12",
    "model.hidden_size=768",
    "model.ffn_hidden_size=3072",
    "model.num_attention_heads=12",
    "model.encoder_seq_length=512",
    "model.max_position_embeddings=512",
    "model.optim.lr=6e-4",
)


@pytest.mark.parametrize(
    "precision",
    [[], FP8_WEIGHTS, ("fp8=tensorwise", "model.fp8_params=true", DISTRIBUTED), ("fp8=blockwise", DISTRIBUTED)],
    ids=["bf16", "delayed weights", "tensorwise weights", "blockwise"],
)
def test_gpt2_learns_is_proven_and_resumes_bit_for_bit(precision, tmp_path, cache_dir):
    uncut = check_resume(tmp_path, cache_dir, [*MUON, *GPT2, *precision], cut=CUT, end=STEPS)
    losses = [record.loss for record in uncut.train]
    assert losses[-1] < losses[0] - 1
    # A proof that finds FP8 other than planned ends a run.
    assert bool(uncut.fp8_proofs) is bool(precision)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize(
    "layout",
    [
        ["parallelism=dp"],
        ["parallelism=zero2"],
        ["parallelism=tp2_sp"],
        ["parallelism=tp2_sp", "model.optim.muon_tp_mode=distributed"],
        ["parallelism=pp2"],
    ],
    ids=" ".join,
)
def test_two_gpus_train_as_one(layout, tmp_path, cache_dir):
    overrides = [*MUON, "fp8=delayed", "model.fp8_params=true", f"trainer.max_steps={STEPS}"]
    one = run_small(1, tmp_path / "one", cache_dir, [*overrides, DISTRIBUTED], on_gpus=True)
    two = run_small(2, tmp_path / "two", cache_dir, [*overrides, *layout], on_gpus=True)
    assert two.train[-1].loss == pytest.approx(one.train[-1].loss, rel=0.02)
    assert two.train[-1].loss < two.train[0].loss - 0.5


def test_an_update_never_makes_the_host_wait():
    """torch would raise where the host reads from the device."""
    from tests.te_training import te_training

    with te_training("optimizer=muon", DISTRIBUTED) as training:
        training.step()
        training.gradients()
        (part,) = training.trainable.optimizer.chained_optimizers
        part.prepare_grads()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            part.optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
