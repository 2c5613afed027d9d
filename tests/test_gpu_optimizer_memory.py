"""The precision-aware optimizer on a GPU: its kernel against torch, a skipped step, and a resumed run, bit for bit."""

import pytest
import torch

from gpt_pretrain.checkpoint.load import load_checkpoint, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from tests.emulated_training import build_training_of, emulated_training, save_checkpoint
from tests.optimizer_states import (
    LEAN,
    SMALLEST,
    assert_a_step_that_is_not_finite_changes_no_bit,
    assert_kernel_computes_what_torch_does,
    states,
)
from tests.runs import SMALL_GPU_RUN, run_small

pytestmark = pytest.mark.gpu

# Heads of 64, everything a multiple of 16.
ON_GPU = ("model.hidden_size=256", "model.ffn_hidden_size=512", "model.encoder_seq_length=128")
FP8_WEIGHTS = ("fp8=tensorwise", "model.fp8_params=true")


@pytest.mark.parametrize(
    ("master", "moments"),
    [
        (torch.int16, (torch.float32, torch.float32)),
        (torch.float16, (torch.float8_e4m3fn, torch.float16)),
        (torch.float32, (torch.float8_e4m3fn, torch.float32)),
        (torch.float16, (torch.float16, torch.bfloat16)),
    ],
)
def test_the_kernel_computes_what_torch_does(master, moments):
    assert_kernel_computes_what_torch_does("cuda", 1_000_007, master, moments)


@pytest.mark.parametrize("fp8", [(), FP8_WEIGHTS], ids=["bf16", "fp8"])
def test_a_step_that_is_not_finite_changes_no_bit(fp8):
    with emulated_training(*ON_GPU, *LEAN, *SMALLEST, *fp8) as training:
        assert_a_step_that_is_not_finite_changes_no_bit(training)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="bf16 with remainders"),
        pytest.param([*SMALLEST, *FP8_WEIGHTS], id="tensorwise"),
        pytest.param([*SMALLEST, "fp8=delayed", "model.fp8_params=true"], id="delayed"),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(overrides, tmp_path, monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    with emulated_training(*ON_GPU, *LEAN, "trainer.deterministic=true", *overrides) as training:
        for _ in range(3):
            training.step()
        saved = states(training)
        progress = TrainingProgress(step=3, consumed_samples=12)
        path = save_checkpoint(tmp_path, training.trainable, progress, training.config, {})
        expected = [training.step() for _ in range(3)]
        again = build_training_of(training.config)
        load_checkpoint(verify_checkpoint(path), again.trainable, again.config, {})
        assert all(map(torch.equal, states(again), saved))
        assert [again.step() for _ in range(3)] == expected


def test_the_application_proves_fp8_weights_of_fp16_masters_and_learns(tmp_path, cache_dir):
    metrics = run_small(1, tmp_path, cache_dir, [*SMALL_GPU_RUN, *LEAN, *SMALLEST, *FP8_WEIGHTS], on_gpus=True)
    losses = [record.loss for record in metrics.train]
    assert losses[-1] < losses[0] - 0.5
