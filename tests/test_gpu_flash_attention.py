"""FlashAttention-4 on a GPU: what it computes, that layers train on it, and that its order can be fixed."""

import importlib.util
from unittest.mock import Mock, patch

import pytest
import torch

from gpt_pretrain.megatron import flash_attention
from tests.attention import check_against_fp64
from tests.test_gpu_parity import CASES, TE_BF16
from tests.transformers_reference import build_reference, built_training, map_weights, te_names, train_ours

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn-4 is not installed"),
]

FLASH, CUDNN = (f"model.use_flash_attention={asked}" for asked in ("true", "false"))
STEPS = 10


def train(*overrides: str) -> tuple[tuple[list[float], list[float]], int]:
    """Losses and gradient norms of a small Llama in BF16, and how often it attended by FlashAttention."""
    case = CASES["llama3"]
    weights = te_names(map_weights(build_reference(case), case))
    calls = Mock(wraps=flash_attention.causal_attention)
    with (
        patch.object(flash_attention, "causal_attention", calls),
        built_training(case, weights, *TE_BF16, "model.optim.lr=2e-4", *overrides) as training,
    ):
        curves = train_ours(training, STEPS)
        passes = STEPS * case.layers * len(training.batches)
    assert calls.call_count in (0, passes)
    return curves, calls.call_count


def test_attends_as_written_out_in_fp64():
    # BF16's rounding is 2e-3 on average, of probabilities and of what comes out.
    check_against_fp64(flash_attention.causal_attention, "cuda", torch.bfloat16, 6e-3)


@pytest.mark.parametrize("precision", ["bf16", "delayed"])
def test_layers_train_as_with_cudnn(precision):
    fp8 = [] if precision == "bf16" else [f"fp8={precision}"]
    (losses, norms), calls = train(FLASH, *fp8)
    (cudnn_losses, cudnn_norms), cudnn_calls = train(CUDNN, *fp8)
    assert calls > 0
    assert cudnn_calls == 0
    assert losses[-1] < losses[0] - 1.0
    # The last losses are small, and what rounds in FP8 rounds otherwise where BF16 did.
    assert losses == pytest.approx(cudnn_losses, rel=5e-3 if precision == "bf16" else 2e-2)
    assert norms == pytest.approx(cudnn_norms, rel=5e-2)


def test_the_same_bits_again_where_deterministic_algorithms_are_asked_for(monkeypatch):
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    (first, calls), (again, _) = train(FLASH), train(FLASH)
    assert calls > 0
    assert first == again
