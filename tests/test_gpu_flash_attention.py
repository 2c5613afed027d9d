"""FlashAttention-4 on a GPU: what it computes, that layers train on it, and that its order can be fixed."""

from unittest.mock import Mock, patch

import pytest
import torch

from gpt_pretrain.megatron import flash_attention, platform
from tests.attention import SCALE, Shape, check_against_fp64, make_inputs
from tests.test_gpu_parity import CASES, TE_BF16
from tests.transformers_reference import build_reference, built_training, map_weights, te_names, train_ours

pytestmark = [
    pytest.mark.gpu,
    # FlashAttention 2 has a module of the same name; one that is there and does not load is no reason to skip.
    pytest.mark.skipif(platform.flash_attention() == (None, None), reason="flash-attn-4 is not installed"),
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


@pytest.mark.parametrize("by", ["torch", "environment"])
def test_the_same_bits_again_where_deterministic_algorithms_are_asked_for(by, monkeypatch):
    """As long as this, with as many queries to a key, no two gradients are the same otherwise."""
    shape = Shape(length=4096, batch=2, heads=16, groups=4, width=128)
    *inputs, gradient = make_inputs(shape, torch.bfloat16, "cuda")
    for each in inputs:
        each.requires_grad_()

    def attend():
        out = flash_attention.causal_attention(*inputs, SCALE)
        return out.detach(), *torch.autograd.grad(out, inputs, gradient)

    if by == "environment":
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    else:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    first, *others = (attend() for _ in range(4))
    assert all(each.isfinite().all() for each in first)
    assert all(torch.equal(one, again) for other in others for one, again in zip(first, other, strict=True))
