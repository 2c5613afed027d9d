"""Emulated TorchAO against TorchAO itself: codes and scales bit for bit, products within the rounding of the run."""

import dataclasses
import math

import pytest
import torch
from torchao.float8 import Float8LinearConfig, ScalingGranularity, ScalingType
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import get_maybe_axiswise_dim, hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.fp8.casts import stateless_cast
from gpt_pretrain.fp8.gemms import CODE_TYPES, Role
from gpt_pretrain.fp8.linear_products import LinearProducts
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.run.fp8 import resolve_fp8

RECIPES = [recipe.name for recipe in recipes_of(Fp8Backend.torchao)]
TOKENS, IN, OUT = 96, 144, 80
# Role to TorchAO's casts of it for the product that sums over its columns, and for the one that sums over its rows.
CASTS = {
    Role.input: ("cast_config_input", "cast_config_input_for_grad_weight"),
    Role.weight: ("cast_config_weight", "cast_config_weight_for_grad_input"),
    Role.output_gradient: ("cast_config_grad_output", "cast_config_grad_output_for_grad_weight"),
}


def settings_of(recipe, compose_config):
    return resolve_fp8(compose_config(f"fp8=torchao_{recipe}", "model.fp8_emulate=true").model)


def drawn(*shape, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randn(shape, generator=generator) * 2)


def of_rows(values):
    """Each of the values as the largest of a row, and of a column."""
    matrix = drawn(len(values), len(values)).clamp(-1, 1) * 1e-3
    for index, value in enumerate(values):
        matrix[index, index] = value
    return matrix


# What makes scales unusual. 448/amax is a power of two where amax is 7·2^n, and next to one beside that.
NEAR = [7.0 * 2.0**n for n in (-30, -9, 0, 9, 30)]
EDGES = {
    "ordinary": drawn(TOKENS, IN),
    "zeros": torch.zeros(16, 32),
    "a row of zeros": torch.cat([torch.zeros(1, 32), drawn(15, 32)]),
    "smaller than the least amax": drawn(16, 32) * 1e-14,
    "around the least amax": of_rows([1e-12, 0.99e-12, 1.01e-12, 1e-13]) * 1e3,
    "huge": drawn(16, 32) * 1e37,
    "subnormal": torch.full((16, 32), 1e-40),
    "next to powers of two": of_rows(
        [
            near
            for each in map(torch.tensor, NEAR)
            for near in (each, *(each.nextafter(torch.tensor(x)) for x in (0, math.inf)))
        ]
    ),
    "an infinity": torch.cat([drawn(15, 32), torch.tensor([[math.inf, *[1.0] * 31]])]),
    "a NaN": torch.cat([drawn(15, 32), torch.tensor([[math.nan, *[1.0] * 31]])]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_and_scales_are_torchaos_bit_for_bit(recipe, edge, dtype, compose_config):
    settings, config = settings_of(recipe, compose_config), Float8LinearConfig.from_recipe_name(recipe)
    x = EDGES[edge].to(dtype)
    compared = 0
    for role, casts in CASTS.items():
        directions = stateless_cast(settings)(x, role)
        for ours, axis, cast in zip(
            (directions.along_rows, directions.along_columns),
            (-1, 0),
            (getattr(config, name) for name in casts),
            strict=True,
        ):
            if cast.scaling_type is ScalingType.DISABLED:
                assert not settings.wgrad
                continue
            theirs = hp_tensor_to_float8_dynamic(
                x,
                cast.target_dtype,
                LinearMMConfig(),
                scaling_granularity=cast.scaling_granularity,
                axiswise_dim=get_maybe_axiswise_dim(axis, cast.scaling_granularity),
                round_scales_to_power_of_2=config.round_scales_to_power_of_2,
            )
            assert CODE_TYPES[ours.format] is cast.target_dtype
            # A NaN has two codes, and a product of NaN any sign.
            exactly = {"rtol": 0, "atol": 0, "equal_nan": True}
            torch.testing.assert_close(ours.codes.float(), theirs._data.float(), **exactly)
            torch.testing.assert_close(ours.scale.reshape(theirs._scale.shape), theirs._scale, **exactly)
            assert (ours.block is None) == (cast.scaling_granularity is ScalingGranularity.TENSORWISE)
            compared += 1
    assert compared == (6 if settings.wgrad else 4)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_those_of_torchaos_module(recipe, dtype, bias, compose_config):
    install_cpu_device()
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    plain = torch.nn.Linear(IN, OUT, bias=bias, dtype=dtype)
    plain.weight.data = drawn(OUT, IN, seed=1).to(dtype)
    module = Float8Linear.from_float(plain, config)
    settings = settings_of(recipe, compose_config)
    products = LinearProducts(settings, stateless_cast(settings))
    dy = (drawn(TOKENS, OUT, seed=2) * 1e-3).to(dtype)

    def results(layer):
        x = drawn(TOKENS, IN, seed=3).to(dtype).requires_grad_()
        weights = [parameter.detach().clone().requires_grad_() for parameter in module.parameters()]
        y = layer(x, *weights)
        y.backward(dy)
        return [y.detach(), x.grad, *(weight.grad for weight in weights)]

    def theirs(x, *weights):
        return torch.func.functional_call(module, dict(zip(("weight", "bias"), weights, strict=False)), (x,))

    def ours(x, weight, bias=None):
        return products(x, weight, bias, is_first_microbatch=True)

    for got, expected in zip(results(ours), results(theirs), strict=True):
        assert got.dtype is dtype
        off = torch.linalg.vector_norm(got.double() - expected.double()) / torch.linalg.vector_norm(expected.double())
        assert off <= (1e-6 if dtype is torch.float32 else 2e-3)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_record_says_what_torchaos_recipe_is(recipe, compose_config):
    settings, config = settings_of(recipe, compose_config), Float8LinearConfig.from_recipe_name(recipe)
    record = settings.recipe.numerics
    assert CODE_TYPES[settings.forward_format] is config.cast_config_input.target_dtype
    assert CODE_TYPES[settings.gradient_format] is config.cast_config_grad_output.target_dtype
    assert record.powers_of_two == config.round_scales_to_power_of_2
    assert record.scales_tensors == (config.cast_config_input.scaling_granularity is ScalingGranularity.TENSORWISE)
    assert settings.wgrad == (config.cast_config_input_for_grad_weight.scaling_type is not ScalingType.DISABLED)
    whole = config.cast_config_weight_for_grad_input.scaling_granularity is ScalingGranularity.TENSORWISE
    assert (record.scales_tensors or record.scales_dgrad_weight_whole) == whole
