"""Products of many small experts in one kernel, interpreted, and when that is chosen; on a GPU: test_gpu_experts.py."""

from pathlib import Path

import pytest

from gpt_pretrain.config.choices import MoeGroupedKernel
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.megatron.core_fields import HighPrecision, transformer_fields
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.run.fp8 import MANY_EXPERTS, MAX_PRODUCT_FLOPS
from gpt_pretrain.run.kernels import describe_kernels
from gpt_pretrain.run.products import describe_kept_out
from tests.forked_runs import interpret_kernels
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly
from tests.test_megatron_platform import launched

CHECKS = {
    "uneven experts": "check_products('cpu')",
    "one expert has all": "check_products('cpu', ONE_HAS_ALL)",
    "widths of whole tiles": "check_products('cpu', out_features=256, in_features=128)",
    "sabotages": "check_sabotages_are_caught('cpu')",
    "moved weights": "check_moved_tensors_are_found('cpu')",
    "no rows": "check_no_rows('cpu')",
    "frozen weights": "check_frozen_weights('cpu')",
    "frozen inputs": "check_weights_are_trained_on_inputs_that_are_not('cpu')",
    "rows placed once": "check_rows_are_placed_once('cpu')",
}
PROGRAMS = Path(__file__).parent / "programs"
QWEN = ("model=qwen3_30b_a3b", "data=mock")
OF_TE = "model.moe_grouped_kernel=transformer_engine"
ONE_KERNEL = "model.moe_grouped_kernel=triton"


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_interpreted_compute_what_single_products_do(check):
    interpret_kernels(f"from tests.grouped_products import *\n{CHECKS[check]}")


def test_gradients_are_exchanged_behind_the_backward_pass():
    interpret_kernels((PROGRAMS / "exchanged_experts.py").read_text(), num_ranks=2)


def spec_for(*overrides, platform=H200):
    return spec_of(compose_quickly(["data=mock", *overrides]), platform)


@pytest.mark.parametrize(
    ("overrides", "kernel"),
    [
        (QWEN, "triton"),
        ((*QWEN, "fp8=tensorwise"), "triton"),
        ((*QWEN, OF_TE), "transformer_engine"),
        ((*QWEN, "model.grad_reduce_in_fp32=false"), "transformer_engine"),
        ((*QWEN, "model.gradient_accumulation_fusion=false"), "transformer_engine"),
        ((*QWEN, "model.moe_grouped_gemm=false"), None),
        ((*QWEN, "model.transformer_engine=false"), None),
        (("model=mixtral_8x7b",), "transformer_engine"),
        (("model=mixtral_8x7b", ONE_KERNEL), "triton"),
        (("model=moe_small", f"model.num_moe_experts={MANY_EXPERTS - 1}"), "transformer_engine"),
        (("model=moe_small", f"model.num_moe_experts={MANY_EXPERTS}"), "triton"),
        ((), None),
    ],
)
def test_many_small_experts_are_one_kernel(overrides, kernel):
    found = spec_for(*overrides).kernels.moe_grouped_kernel
    assert found is (kernel and MoeGroupedKernel[kernel])


@pytest.mark.parametrize(("times", "kernel"), [(0.9, "triton"), (1.1, "transformer_engine")])
def test_large_experts_are_left_to_cublas(times, kernel):
    """Of 8 tokens' worth of rows for each of 64 experts: 2 · rows · (2 · width) · hidden operations."""
    rows, hidden = 4096 * 8 // 64, 4096
    width = int(times * MAX_PRODUCT_FLOPS / (2 * rows * 2 * hidden))
    spec = spec_for(
        "model=mixtral_8x7b",
        "model.num_moe_experts=64",
        "model.moe_router_topk=8",
        "model.micro_batch_size=1",
        f"model.moe_ffn_hidden_size={width}",
    )
    assert spec.kernels.moe_grouped_kernel is MoeGroupedKernel[kernel]


def test_header_names_the_kernel():
    spec = spec_for(*QWEN)
    assert "moe_grouped_kernel (triton)" in describe_kernels(spec.kernels, spec.platform)["fused"]


@pytest.mark.parametrize("emulated", [(), ("model.fp8_emulate=true",)], ids=["FP8", "emulated"])
def test_fp8_leaves_out_experts_of_one_kernel_and_says_so(emulated):
    spec, of_te = (spec_for(*QWEN, "fp8=tensorwise", *emulated, *more) for more in ((), (OF_TE,)))
    names = {linear.module for linear in spec.kept_out}
    assert names == {linear.module for linear in spec.linears if ".mlp.experts." in linear.module}
    assert of_te.kept_out == ()
    assert 0 < spec.fp8_flops_share < of_te.fp8_flops_share
    (told,) = describe_kept_out(spec)
    assert "model.moe_grouped_kernel" in told
    assert describe_kept_out(of_te) == []
    if not emulated:
        (field,) = [field for field in transformer_fields(spec) if field.name == "quant_recipe"]
        assert field.value == HighPrecision(("*.mlp.experts.*",))


@pytest.mark.parametrize("asked", [ONE_KERNEL, OF_TE])
def test_a_machine_without_grouped_products_refuses_either_kernel(asked):
    with pytest.raises(ConfigError) as refused:
        check_machine(spec_of(compose_quickly(["model=moe_small", asked]), CPU, launched()))
    assert str(refused.value).startswith(asked)
