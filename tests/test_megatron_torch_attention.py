"""PyTorch's fused attention in layers without Transformer Engine: what it computes, and where it is chosen."""

from dataclasses import replace

import pytest
import torch

from gpt_pretrain.megatron.layers import causal_attention
from gpt_pretrain.plan.stages import layer_activations, plan_stages
from tests.attention import check_against_fp64
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly

LOCAL = "model.transformer_engine=false"
WITHOUT_TE = replace(H200, transformer_engine=None)


def test_it_is_causal_attention():
    check_against_fp64(causal_attention, "cpu", torch.float64, 1e-12)


@pytest.mark.gpu
def test_it_is_causal_attention_on_a_gpu():
    check_against_fp64(causal_attention, "cuda", torch.bfloat16, 2e-2)


@pytest.mark.parametrize(
    ("platform", "overrides", "chosen"),
    [
        (WITHOUT_TE, [], True),
        (H200, [LOCAL], True),
        (H200, ["fp8=tensorwise", "model.fp8_emulate=true"], True),
        (H200, [], False),
        (CPU, [], False),
        # References, and dropout from megatron-core's random states.
        (WITHOUT_TE, ["trainer.deterministic=true"], False),
        (H200, [LOCAL, "trainer.precision=fp32"], False),
        (WITHOUT_TE, ["model.attention_dropout=0.1"], False),
        (replace(WITHOUT_TE, apex_softmax=True), ["model.masked_softmax_fusion=true"], False),
        (replace(WITHOUT_TE, apex_softmax=True), [], True),
    ],
)
def test_where_null_chooses_it(platform, overrides, chosen):
    spec = spec_of(compose_quickly(["data=mock", *overrides]), platform)
    assert spec.kernels.torch_attention is chosen
    # Fused attention keeps no scores: a number for each token and head.
    (stage,) = plan_stages(spec)
    first = stage.layers[0]
    statistics = 4 * spec.model.num_attention_heads * first[0].tokens
    core = layer_activations(spec, first).attention_core
    assert (core == statistics) is (chosen or spec.kernels.transformer_engine)
