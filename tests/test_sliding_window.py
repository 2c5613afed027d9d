"""Sliding windows: what is counted of their attention, and what a checkpoint's model is without one."""

from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.utils import get_sliding_window_causal_mask

from gpt_pretrain.checkpoint.state import describe_weights, differences
from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.rules.machine import machine_problems
from gpt_pretrain.run.products import resolve
from gpt_pretrain.training.header import describe_positions
from tests.planning import plan_of
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly

LENGTH, LEFT = 64, 15
LOCAL = "model.transformer_engine=false"


def model_of(*overrides):
    sizes = [f"model.encoder_seq_length={LENGTH}", f"model.max_position_embeddings={LENGTH}"]
    return compose_quickly(["data=mock", *sizes, *overrides]).model


def seen_in_window():
    """Pairs of a token and one that it sees, in the mask of megatron-core's own attention."""
    install_cpu_device()
    return int((~get_sliding_window_causal_mask(LENGTH, LENGTH, (LEFT, 0))).sum())


@pytest.mark.parametrize("layers", [None, [1, 0, 0, 1], [0, 1, 0, 0]])
def test_operations_are_counted_of_what_windows_show(layers):
    whole = model_of()
    model = replace(whole, window_size=[LEFT, 0], window_attn_skip_freq=layers)
    in_window = model.num_layers if layers is None else sum(layers)
    hidden = LENGTH * (LENGTH + 1) / 2 - seen_in_window()
    assert hidden == (LENGTH - LEFT - 1) * (LENGTH - LEFT) / 2
    width = model.num_attention_heads * (model.hidden_size // model.num_attention_heads)
    # Two products, forward and twice backward, of 2 operations a pair and channel.
    less = 3 * in_window * 4 * width * hidden / LENGTH
    # The formula takes n²/2 for the n(n + 1)/2 pairs of a triangle.
    of_triangle = (LENGTH - LEFT - 1) / (LENGTH - LEFT)
    assert flops_per_token(whole) - flops_per_token(model) == pytest.approx(less * of_triangle)


def test_a_window_as_long_as_the_sequence_hides_nothing():
    assert flops_per_token(model_of(f"model.window_size=[{LENGTH - 1},0]")) == flops_per_token(model_of())


def test_the_plan_forecasts_less_attention_and_the_benchmark_a_larger_share_of_fp8():
    base = ("model=mistral_7b", "fp8=delayed", "model.encoder_seq_length=32768", "plan.gpu=h200")
    whole, window = (plan_of(*base, *more) for more in ((), ("model.window_size=[4095,0]",)))
    # 3 × 32 layers × 2 × 4,096 × (32,768 - 8,192 + 512) of what follows from 4,096 of 32,768 tokens.
    assert whole.flops_per_token - window.flops_per_token == 3 * 32 * 2 * 4096 * (32768 - 8192 + 512)
    assert window.speed.run.tokens_per_s_per_gpu > 1.2 * whole.speed.run.tokens_per_s_per_gpu
    shares = [resolve(plan.spec.config).fp8_flops_share for plan in (whole, window)]
    assert shares[0] < shares[1]


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ([], ["rope"]),
        (["model.window_size=[15,0]"], ["rope, windows of 16 tokens in all layers"]),
        (["model.window_size=[15,0]", "model.window_attn_skip_freq=[1,0,0,1]"], ["16 tokens in 2 layers"]),
        (["model.rope_scaling_factor=4", "model.yarn_original_max_position_embeddings=4096"], ["4,096", "YaRN"]),
    ],
)
def test_the_header_tells_what_a_token_sees(overrides, told):
    text = describe_positions(model_of(*overrides))
    assert [each for each in told if each not in text] == []
    assert ("window" in text, "YaRN" in text) == ("window" in str(overrides), "yarn" in str(overrides))


def test_windows_make_another_model():
    without, other = (
        {k: str(v) for k, v in describe_weights(model_of(*o)).items()} for o in ((), ("model.window_size=[31,0]",))
    )
    assert "model.window_size=[31,0]" in differences(other, without)
    assert "model.window_size=null" in differences(without, other)
    assert differences(other, other) == ""


@pytest.mark.parametrize(
    ("platform", "overrides", "chosen"),
    [
        (H200, ["model.transformer_engine=false"], True),
        (H200, ["model.transformer_engine=false", "model.kv_channels=36"], False),
        (CPU, [], False),
    ],
)
def test_pytorchs_attention_takes_windows_where_its_kernel_does(platform, overrides, chosen):
    spec = spec_of(compose_quickly(["data=mock", "model.window_size=[15,0]", *overrides]), platform)
    assert spec.kernels.torch_attention is chosen


def test_dropout_of_attention_is_refused_in_te_layers_alone():
    for platform, number in ((H200, 1), (CPU, 0)):
        overrides = ["data=mock", "model.window_size=[15,0]", "model.attention_dropout=0.1"]
        told = [each for each in machine_problems(spec_of(compose_quickly(overrides), platform)) if "window" in each]
        assert len(told) == number
        assert all("model.attention_dropout=0" in each for each in told)


def test_the_mask_is_that_of_the_window():
    """megatron-core's own attention on the CPU: the token itself and `LEFT` before it."""
    install_cpu_device()
    hidden = get_sliding_window_causal_mask(LENGTH, LENGTH, (LEFT, 0))
    assert torch.equal(~hidden, torch.ones(LENGTH, LENGTH).tril().triu(-LEFT).bool())
