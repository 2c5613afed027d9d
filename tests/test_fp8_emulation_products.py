"""The three products of an emulated layer against products of tensors that were quantized block by block in loops."""

import math
from dataclasses import replace

import pytest
import torch

from gpt_pretrain.fp8.casts import stateless_cast
from gpt_pretrain.fp8.gemms import Fp8Operand, Phase, Role
from gpt_pretrain.fp8.linear_products import LinearProducts
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.run.fp8 import resolve_fp8

TOKENS, IN, OUT = 132, 144, 136  # not multiples of 128: blocks at the edges are smaller
DTYPES = {"e4m3": (torch.float8_e4m3fn, 448.0), "e5m2": (torch.float8_e5m2, 57344.0)}

# From a block's amax and the largest code to its scale.
SCALES = {
    "tensorwise": lambda amax, largest: largest / amax,
    "blockwise": lambda amax, largest: 2.0 ** math.floor(math.log2(largest / amax)),
    "mxfp8": lambda amax, largest: 2.0 ** -math.ceil(math.log2(amax / largest)),
}
WHOLE = (10**6, 10**6)
# Blocks of (tensors that the product sums over their columns, over their rows).
BLOCKS = {
    ("tensorwise", Role.input): (WHOLE, WHOLE),
    ("tensorwise", Role.weight): (WHOLE, WHOLE),
    ("blockwise", Role.input): ((1, 128), (128, 1)),
    ("blockwise", Role.weight): ((128, 128), (128, 128)),
    ("mxfp8", Role.input): ((1, 32), (32, 1)),
    ("mxfp8", Role.weight): ((1, 32), (32, 1)),
}


def quantized(x, recipe, role, format, *, sums_over_rows):
    """The tensor as its codes stand for it, float64."""
    kind = Role.weight if role is Role.weight else Role.input
    height, width = BLOCKS[recipe, kind][sums_over_rows]
    dtype, largest = DTYPES[format]
    result = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            part = x[i : i + height, j : j + width].float()
            scale = torch.tensor(SCALES[recipe](part.abs().max().item(), largest), dtype=torch.float32)
            codes = (part * scale).clamp(-largest, largest).to(dtype)
            result[i : i + height, j : j + width] = codes.double() / scale.double()
    return result


@pytest.fixture
def tensors():
    install_cpu_device()
    generator = torch.Generator().manual_seed(5)

    def draw(*shape):
        return torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 2)

    return draw(TOKENS, IN), draw(OUT, IN), torch.randn(OUT, generator=generator), draw(TOKENS, OUT) * 1e-3


def run(settings, tensors, listeners=()):
    """Output and gradients of input, weight and bias; the tokens come as [sequence, batch]."""
    x, weight, bias, dy = tensors
    products = LinearProducts(settings, stateless_cast(settings))
    leaves = [tensor.clone().requires_grad_() for tensor in (x.view(-1, 2, IN), weight, bias)]
    y = products(*leaves, is_first_microbatch=True, listeners=listeners)
    y.backward(dy.view(-1, 2, OUT))
    return y.detach().view(-1, OUT), leaves[0].grad.view(-1, IN), leaves[1].grad, leaves[2].grad


def error(got, expected):
    return (torch.linalg.vector_norm(got.double() - expected) / torch.linalg.vector_norm(expected)).item()


@pytest.mark.parametrize(
    ("precision", "gradient_format"),
    [(torch.float32, "e4m3"), (torch.float32, "e5m2"), (torch.bfloat16, "e5m2")],
    ids=["fp32-e4m3", "fp32-e5m2", "bf16-e5m2"],
)
@pytest.mark.parametrize("recipe", SCALES)
def test_products_are_those_of_tensors_quantized_in_loops(recipe, gradient_format, precision, tensors, compose_config):
    settings = resolve_fp8(compose_config(f"fp8={recipe}").model)
    settings = replace(settings, gradient_format=gradient_format)
    x, weight, bias, dy = (tensor.to(precision) for tensor in tensors)
    y, dx, dw, db = run(settings, (x, weight, bias, dy))

    def operand(tensor, role, sums_over_rows):
        format = gradient_format if role is Role.output_gradient else "e4m3"
        return quantized(tensor, recipe, role, format, sums_over_rows=sums_over_rows)

    expected_y = operand(x, Role.input, False) @ operand(weight, Role.weight, False).t() + bias.double()
    expected_dx = operand(dy, Role.output_gradient, False) @ operand(weight, Role.weight, True)
    expected_dw = operand(dy, Role.output_gradient, True).t() @ operand(x, Role.input, True)
    assert {y.dtype, dx.dtype, dw.dtype} == {precision}
    tolerance = 1e-6 if precision is torch.float32 else 3e-3
    assert error(y, expected_y) < tolerance
    assert error(dx, expected_dx) < tolerance
    assert error(dw, expected_dw) < tolerance
    assert error(db, dy.double().sum(dim=0)) < tolerance
    # Quantized they are: the products of the values lie further off.
    assert error(y, x.double() @ weight.double().t() + bias.double()) > 5e-3


def test_weight_gradient_from_the_values_leaves_the_other_products_in_fp8(tensors, compose_config):
    settings = resolve_fp8(compose_config("fp8=tensorwise").model)
    x, _, _, dy = tensors
    y, dx, dw, _ = run(settings, tensors)
    other_y, other_dx, other_dw, _ = run(replace(settings, wgrad=False), tensors)
    assert torch.equal(other_y, y)
    assert torch.equal(other_dx, dx)
    assert error(other_dw, dy.double().t() @ x.double()) < 1e-6
    assert error(dw, dy.double().t() @ x.double()) > 5e-3


def test_codes_of_the_weight_last_until_the_next_first_microbatch(tensors, compose_config):
    settings = resolve_fp8(compose_config("fp8=tensorwise").model)
    x, weight, bias, _ = tensors
    products = LinearProducts(settings, stateless_cast(settings))

    def output(weight, is_first):
        return products(x, weight, bias, is_first_microbatch=is_first)

    first = output(weight, True)
    assert torch.equal(output(2 * weight, False), first)
    assert not torch.equal(output(2 * weight, True), first)


@pytest.mark.parametrize("recipe", SCALES)
@pytest.mark.parametrize("wgrad", [True, False])
def test_the_listener_is_told_what_each_product_reads(recipe, wgrad, tensors, compose_config):
    settings = replace(resolve_fp8(compose_config(f"fp8={recipe}").model), wgrad=wgrad, gradient_format="e5m2")
    told = []
    run(settings, tensors, listeners=[told.append])
    assert [product.phase for product in told] == [Phase.forward, Phase.dgrad, Phase.wgrad]
    forward, dgrad, weight_gradient = told
    assert forward.formats == ("e4m3", "e4m3")
    assert dgrad.formats == ("e5m2", "e4m3")
    assert weight_gradient.formats == (("e5m2", "e4m3") if wgrad else ("float32", "float32"))
    amaxes = {
        role: tensor.abs().max().item() for role, tensor in zip(Role, (tensors[0], tensors[1], tensors[3]), strict=True)
    }
    for product in told:
        for operand in product.operands:
            if not isinstance(operand, Fp8Operand):
                continue
            assert operand.codes.dtype is DTYPES[operand.format][0]
            assert operand.amax.tolist() == pytest.approx([amaxes[operand.role]])
            assert operand.scale.dtype is torch.float32
            assert (operand.scale.numel() == 1) == (recipe == "tensorwise")


def test_a_recipe_without_a_cast_is_an_error(compose_config):
    settings = resolve_fp8(compose_config("fp8=delayed", "model.fp8_emulate=true").model)
    with pytest.raises(NotImplementedError, match=r"model\.fp8_recipe=delayed.*tensorwise, blockwise, mxfp8"):
        stateless_cast(settings)
