"""TorchAO's float8 products on a GPU, compiled: proven in training, and near the emulated ones.

The twins on a CPU are in `tests/test_fp8_torchao.py`, and of stored weights in `tests/test_fp8_stored_weights.py`.
"""

import pytest
import torch

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.fp8 import resolve_fp8
from tests import sabotages
from tests.emulated_training import emulated_training
from tests.fp8_gradients import MOST, SIZES, distances
from tests.stored_weights import distributed_optimizer, torchaos_cast

pytestmark = pytest.mark.gpu

RECIPES = [recipe.preset for recipe in recipes_of(Fp8Backend.torchao)]


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_proven_and_its_gradients_are_near_the_emulated_ones(recipe):
    with emulated_training(f"fp8={recipe}", *SIZES) as training:
        gradients = training.gradients()
        losses = [training.step()]
        for step in (2, 3):
            sabotages.prove(training, step=step)
        losses.append(training.step())
    assert losses[-1] < losses[0]
    found = distances(recipe, gradients)
    assert {name: distance for name, distance in found.items() if distance > MOST} == {}


def test_stored_weights_are_proven_and_the_codes_that_torchao_makes_of_their_masters():
    with emulated_training("fp8=torchao_tensorwise", "model.fp8_params=true", *SIZES) as training:
        losses = [training.step()]
        for step in (2, 3):
            sabotages.prove(training, step=step)
        losses.append(training.step())
        weights, masters, _ = distributed_optimizer(training)._get_fp8_params_and_shard_fp32_from_fp8()
        for weight, master in zip(weights, masters, strict=True):
            codes, scale = torchaos_cast(master)
            assert torch.equal(weight.codes.view(-1), codes)
            assert torch.equal(weight.scale, scale)
        assert len(weights) == len(training.layers())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_products_are_near_those_of_torchaos_layer(recipe):
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    from gpt_pretrain.fp8.torchao import TorchAO

    settings = resolve_fp8(load_config([f"fp8={recipe}"]).model)
    generator = torch.Generator("cuda").manual_seed(5)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    x, weight, dy = drawn(256, 512).requires_grad_(), drawn(384, 512), drawn(256, 384) * 1e-3
    plain = torch.nn.Linear(512, 384, bias=False, device="cuda", dtype=torch.bfloat16)
    plain.weight.data = weight
    module = torch.compile(Float8Linear.from_float(plain, Float8LinearConfig.from_recipe_name(settings.recipe.name)))
    y = module(x)
    y.backward(dy)
    engine = TorchAO(settings, compiled=True)
    inputs, weights, gradients = (
        engine.cast(each.detach(), role)
        for each, role in ((x, Role.input), (weight, Role.weight), (dy, Role.output_gradient))
    )
    products = {
        Phase.forward: (inputs.along_rows, weights.along_rows, y),
        Phase.dgrad: (gradients.along_rows, weights.along_columns, x.grad),
        Phase.wgrad: (gradients.along_columns, inputs.along_columns, plain.weight.grad),
    }
    for phase, (first, second, expected) in products.items():
        if phase is not Phase.wgrad or settings.wgrad:
            got = engine.multiply(phase, first, second, torch.bfloat16).double()
            # Two roundings to BF16 each.
            assert torch.linalg.vector_norm(got - expected.double()) <= 2**-7 * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("recipe", RECIPES)
def test_another_recipe_than_the_planned_one_is_found(recipe):
    other = next(name for name in RECIPES if name != recipe)
    with emulated_training(f"fp8={other}", *SIZES) as training, pytest.raises(ProofError):
        sabotages.prove(training, step=1, planned=(f"fp8={recipe}", *SIZES))
