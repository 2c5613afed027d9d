"""Queries, keys and values split and rotated in one kernel: what it computes, where it is refused and where planned."""

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.kernels.qkv_rope import split_and_rotate
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.plan.stages import layer_activations, plan_stages
from gpt_pretrain.rules.machine import check_machine
from tests.forked_runs import interpret_kernels
from tests.platforms import H200, spec_of
from tests.refusals import compose_quickly

# Triton's interpreter rounds FP16 as GPUs do, and cuts BF16 off.
INTERPRETED = """
import torch
from tests.qkv_ropes import check_against_fp64, check_sums_of_programs, check_training
check_against_fp64("cpu", torch.float32, {rtol}, normalizes={normalizes})
check_against_fp64("cpu", torch.float16, 1.01 * 2**-11, normalizes={normalizes})
check_against_fp64("cpu", torch.bfloat16, 1.01 * 2**-7, normalizes={normalizes})
check_training("model.num_query_groups=2", "model.rotary_percentage=0.5", "model.encoder_seq_length=16",
    "model.num_layers=1", "model.normalization=rmsnorm", normalizes={normalizes})
{more}
"""


def test_the_kernel_interpreted_rotates_and_trains_as_separate_operations_do():
    interpret_kernels(INTERPRETED.format(rtol=1e-6, normalizes=False, more=""))


def test_the_kernel_interpreted_normalizes_and_trains_as_separate_operations_do():
    interpret_kernels(INTERPRETED.format(rtol=2e-6, normalizes=True, more="check_sums_of_programs()"))


def test_the_kernel_interpreted_casts_what_it_rotates_back():
    """Triton's interpreter does not round FP8 as GPUs do."""
    program = """
import torch
from tests.qkv_ropes import CAST_SHAPES, share_of_cast_codes_that_differ
for scale in (3.0, None):
    share = share_of_cast_codes_that_differ("cpu", torch.float16, torch.float16, CAST_SHAPES, scale=scale)
    assert share <= 0.01, (scale, share)
"""
    interpret_kernels(program)


def test_tensor_parallel_ranks_get_the_gradients_of_separate_norms():
    program = "import sys; from tests.programs.normalized_layouts import main; sys.argv[1:] = [{!r}]; main()"
    interpret_kernels(program.format("trainer.precision=fp32"), num_ranks=2)


@pytest.mark.parametrize(
    "layout",
    [
        "parallelism=zero2",
        "parallelism=fsdp",
        "parallelism=dp model.num_moe_experts=4 model.moe_ffn_hidden_size=32 model.expert_model_parallel_size=2",
        "parallelism=dp model.activations_checkpoint_granularity=full model.activations_checkpoint_method=uniform "
        "model.activations_checkpoint_num_layers=1",
    ],
)
def test_two_ranks_learn_what_they_do_with_separate_norms(layout):
    program = "from tests.programs.normalized_layouts import check_losses; check_losses(*{!r})"
    interpret_kernels(program.format(layout.split()), num_ranks=2)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_second_half_of_the_angles_is_the_first(share):
    """The kernel reads one of them."""
    install_cpu_device()
    angles = RotaryEmbedding(kv_channels=24, rotary_percent=share, use_cpu_initialization=True)(9)
    assert angles.dtype is torch.float32
    assert angles.is_contiguous()
    first, second = angles.chunk(2, dim=-1)
    assert torch.equal(first, second)
    assert first.size(-1) == {1.0: 12, 0.3: 4}[share]


def test_what_the_kernel_would_read_wrongly_is_refused():
    mixed, angles = torch.ones(3, 1, 1, 3 * 4), torch.ones(3, 1, 1, 4)
    with pytest.raises(AssertionError, match="share their angles"):
        split_and_rotate(mixed, angles, angles.clone(), [4, 4, 4])
    for refused, message in (
        (angles.bfloat16(), "BF16"),
        (angles[:2], "each position"),
        (torch.ones(3, 1, 1, 5)[..., :4], "row by row"),
    ):
        with pytest.raises(AssertionError, match=message):
            split_and_rotate(mixed, refused, refused, [4, 4, 4])
    with pytest.raises(AssertionError, match="row by row"):
        split_and_rotate(torch.ones(3, 1, 1, 13)[..., :12], angles, angles, [4, 4, 4])


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model=gpt2_124m",), "model.position_embedding_type=learned_absolute"),
        (("model.apply_rope_fusion=false",), "model.apply_rope_fusion=false"),
        (("model.no_rope_freq=4",), "model.no_rope_freq=4"),
        (
            ("model.rope_scaling_factor=4", "model.yarn_original_max_position_embeddings=64"),
            "model.yarn_original_max_position_embeddings=64",
        ),
        (
            ("model.qk_layernorm=true", "model.normalization=layernorm"),
            "model.qk_layernorm=true with model.normalization=layernorm",
        ),
        (("model.cuda_graph_impl=local",), "model.cuda_graph_impl=local"),
    ],
)
def test_refused_beside_what_it_does_not_go_with_and_left_out_by_null(check_excluded, overrides, named):
    check_excluded("fused_single_qkv_rope", ("model=llama3_8b", "data=mock"), overrides, named)


@pytest.mark.parametrize("model", ["qwen3_8b", "qwen3_30b_a3b"])
def test_null_takes_it_with_norms_too_and_the_plan_counts_the_projection(model):
    specs = {
        asked: spec_of(compose_quickly([f"model={model}", "data=mock", f"model.fused_single_qkv_rope={asked}"]), H200)
        for asked in ("null", "false")
    }
    assert [spec.kernels.features["fused_single_qkv_rope"] for spec in specs.values()] == [True, False]
    layer = plan_stages(specs["null"])[0].layers[0]
    fused, separate = (layer_activations(spec, layer).attention_block for spec in specs.values())
    made = specs["null"].model
    tokens, values = made.micro_batch_size * made.encoder_seq_length, made.num_query_groups * made.kv_channels
    # The values in BF16 more; no statistic in fp32 of each head of queries and keys.
    assert fused - separate == tokens * (2 * values - 4 * (made.num_attention_heads + made.num_query_groups))


CAST = "qkv_cast_fusion"
LLAMA = ("model=llama3_8b", "data=mock", "model.num_layers=2")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), "model.fp8=false"),
        (("fp8=blockwise",), "model.fp8_recipe=blockwise"),
        (("fp8=delayed", "model.fused_single_qkv_rope=false"), "model.fused_single_qkv_rope=false"),
        (("fp8=delayed", "model.qk_layernorm=true"), "model.qk_layernorm=true"),
        (("fp8=delayed", "model.qkv_bias=true"), "model.qkv_bias=true"),
        (("fp8=delayed", "model.rotary_percentage=0.5"), "model.rotary_percentage=0.5"),
        (("fp8=delayed", "model.num_attention_heads=128"), "model.hidden_size / num_attention_heads=32"),
        (("fp8=delayed", "model.fp8_exclude=['*linear_qkv']"), "model.fp8_exclude=['*linear_qkv']"),
        (
            ("fp8=delayed", "model.activations_checkpoint_granularity=selective"),
            "model.activations_checkpoint_granularity=selective",
        ),
    ],
)
def test_the_cast_is_refused_beside_what_it_does_not_go_with_and_left_out_by_null(check_excluded, overrides, named):
    check_excluded(CAST, LLAMA, overrides, named)


def test_null_casts_with_the_kernel_that_rotates():
    asked = [*LLAMA, "fp8=delayed"]
    assert spec_of(compose_quickly(asked), H200).kernels.features[CAST]
    assert spec_of(compose_quickly([*LLAMA, "fp8=tensorwise"]), H200).kernels.features[CAST]
    assert not spec_of(compose_quickly([*asked, "parallelism=tp2_sp"]), H200).kernels.features[CAST]
    with pytest.raises(ConfigError, match=r"needs model\.fused_single_qkv_rope=true: null leaves that out"):
        check_machine(spec_of(compose_quickly(["model=gpt2_124m", *asked[1:], f"model.{CAST}=true"]), H200))
