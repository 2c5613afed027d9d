"""FlashAttention-4 on a GPU: what it computes, that layers train on it, and that its order can be fixed."""

from unittest.mock import Mock, patch

import pytest
import torch

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.kernels import flash_attention
from tests.attention import SCALE, Shape, check_against_fp64, make_inputs
from tests.test_gpu_parity import CASES, TE_BF16
from tests.transformers_reference import build_reference, built_training, map_weights, te_names, train_ours

pytestmark = [
    pytest.mark.gpu,
    # FlashAttention 2 has a module of the same name; one that is there and does not load is no reason to skip.
    pytest.mark.skipif("flash_attention" not in detect_platform().libraries, reason="flash-attn-4 is not installed"),
]

FLASH, CUDNN = (f"model.use_flash_attention={asked}" for asked in ("true", "false"))
STEPS = 10


def train(name: str, *overrides: str) -> tuple[tuple[list[float], list[float]], int]:
    """Losses and gradient norms of a small model in BF16, and how often it attended by FlashAttention."""
    case = CASES[name]
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


@pytest.mark.parametrize(
    ("model", "precision", "norms_apart"),
    [
        ("llama3", "bf16", 5e-2),
        ("llama3", "delayed", 5e-2),
        ("gpt2", "bf16", 5e-2),
        # 5.5% was seen at a norm of 0.95, where the first is 16.
        ("gpt2", "delayed", 0.1),
    ],
)
def test_layers_train_as_with_cudnn(model, precision, norms_apart):
    fp8 = [] if precision == "bf16" else [f"fp8={precision}"]
    (losses, norms), calls = train(model, FLASH, *fp8)
    (cudnn_losses, cudnn_norms), cudnn_calls = train(model, CUDNN, *fp8)
    assert calls > 0
    assert cudnn_calls == 0
    assert losses[-1] < losses[0] - 1.0
    # The last losses are small, and what rounds in FP8 rounds otherwise where BF16 did.
    assert losses == pytest.approx(cudnn_losses, rel=5e-3 if precision == "bf16" else 2e-2)
    assert norms == pytest.approx(cudnn_norms, rel=norms_apart)


def test_gradients_of_a_projection_are_those_of_its_parts_and_not_copied_together(monkeypatch):
    from transformer_engine.pytorch.utils import SplitAlongDim

    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    width = 128
    projected = torch.randn(2048, 2, 16, 3 * width, dtype=torch.bfloat16, device="cuda").requires_grad_()
    parts = SplitAlongDim.apply(projected, 3, [width] * 3)
    out = flash_attention.causal_attention(*parts, SCALE)
    gradient = torch.randn_like(out)
    with patch.object(torch, "cat", Mock(side_effect=AssertionError("copied"))):
        (found,) = torch.autograd.grad(out, projected, gradient)

    apart = [each.detach().contiguous().requires_grad_() for each in parts]
    expected = torch.autograd.grad(flash_attention.causal_attention(*apart, SCALE), apart, gradient)
    assert torch.equal(found, torch.cat(expected, dim=3))


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
