"""TorchAO as an engine: its casts and products in our layers, on the CPU as far as PyTorch computes them there.

On a GPU a kernel writes the codes, and `torch._scaled_mm` also takes scales of rows in the forward product, in whose
place stands TorchAO's own emulation here. `tests/test_gpu_torchao.py` has both.
"""

import dataclasses

import pytest
import torch
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.fp8.casts import stateless_cast
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.linear_products import LinearProducts
from gpt_pretrain.fp8.local_layers import Fp8ColumnParallelLinear
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.fp8.torchao import TorchAO
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.run.fp8 import resolve_fp8
from tests import sabotages
from tests.emulated_training import emulate as emulated
from tests.emulated_training import emulated_training, multiplies_fp8
from tests.forked_runs import interpret_kernels
from tests.fp8_gradients import MOST, SIZES, distances
from tests.platforms import H200, spec_of

RECIPES = [recipe.name for recipe in recipes_of(Fp8Backend.torchao)]
TOKENS, IN, OUT = 96, 144, 80
# Recipe, and whether products are TorchAO's emulation: a CPU has no forward product with scales of rows.
ENGINES = [("tensorwise", False), *((recipe, True) for recipe in RECIPES)]
needs_product = pytest.mark.skipif(not multiplies_fp8(), reason="PyTorch multiplies no FP8 codes on this CPU")


def settings_of(recipe, compose_config):
    return resolve_fp8(compose_config(f"fp8=torchao_{recipe}").model)


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def results(layer, parameters, dtype):
    """Output and gradients of input, weight and bias."""
    x = drawn(TOKENS, IN, seed=3).to(dtype).requires_grad_()
    leaves = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    y = layer(x, *leaves)
    y.backward((drawn(TOKENS, OUT, seed=2) * 1e-3).to(dtype))
    return [y.detach(), x.grad, *(leaf.grad for leaf in leaves)]


def compare_with_torchaos_layer(recipe, emulate, *, compiled, compose_config):
    install_cpu_device()
    emulate = emulate or not multiplies_fp8()
    dtype = torch.bfloat16
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=emulate)
    module = Float8Linear.from_float(torch.nn.Linear(IN, OUT, dtype=dtype), config)
    settings = settings_of(recipe, compose_config)
    engine = TorchAO(settings, compiled=compiled, emulate=emulate)
    products = LinearProducts(settings, engine.cast, engine.multiply)

    def theirs(x, weight, bias):
        return torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,))

    def ours(x, weight, bias):
        return products(x, weight, bias, is_first_microbatch=True)

    parameters = list(module.parameters())
    for got, expected in zip(results(ours, parameters, dtype), results(theirs, parameters, dtype), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize(("recipe", "emulate"), ENGINES)
def test_results_are_those_of_torchaos_layer_bit_for_bit(recipe, emulate, compose_config):
    compare_with_torchaos_layer(recipe, emulate, compiled=False, compose_config=compose_config)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("recipe", "emulate"), [("tensorwise", False), ("rowwise_with_gw_hp", True)])
def test_compiled_results_are_the_same(recipe, emulate, compose_config):
    compare_with_torchaos_layer(recipe, emulate, compiled=True, compose_config=compose_config)


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("recipe", RECIPES)
def test_casts_are_the_emulated_ones(recipe, role, compose_config):
    settings = settings_of(recipe, compose_config)
    x = drawn(TOKENS, IN, seed=1).to(torch.bfloat16)
    theirs, ours = TorchAO(settings, compiled=False).cast(x, role), stateless_cast(settings)(x, role)
    pairs = [(theirs.along_rows, ours.along_rows)]
    if settings.wgrad or role is Role.weight:
        pairs.append((theirs.along_columns, ours.along_columns))
    for one, other in pairs:
        assert (one.format, one.block, one.scale.shape) == (other.format, other.block, other.scale.shape)
        assert torch.equal(one.codes.float(), other.codes.float())
        assert torch.equal(one.scale, other.scale)
        assert torch.equal(one.amax, other.amax)


@needs_product
@pytest.mark.parametrize("phase", ["dgrad", "wgrad"])
def test_scaled_products_of_rows_are_near_those_of_their_codes(phase, compose_config):
    """What PyTorch computes on a CPU with scales of rows: without fast sums, the scales are applied to the result."""
    settings = settings_of("rowwise", compose_config)
    results_of = []
    for emulate in (False, True):
        engine = TorchAO(settings, compiled=False, emulate=emulate)
        x, weight, dy = (drawn(*shape, seed=4).bfloat16() for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
        gradients = engine.cast(dy, Role.output_gradient)
        operands = (
            (gradients.along_rows, engine.cast(weight, Role.weight).along_columns)
            if phase == "dgrad"
            else (gradients.along_columns, engine.cast(x, Role.input).along_columns)
        )
        results_of.append(engine.multiply(Phase(phase), *operands, torch.bfloat16).double())
    scaled, emulated = results_of
    # Rounded twice to BF16, and once.
    assert torch.linalg.vector_norm(scaled - emulated) <= (2 * 2**-9 + 2**-9) * torch.linalg.vector_norm(emulated)


def test_the_cast_kernel_interpreted_computes_what_torch_does():
    interpret_kernels("from tests.fp8_casts import check_amaxes, check_codes; check_amaxes(); check_codes()")


@pytest.mark.parametrize("recipe", ["torchao_tensorwise", "torchao_rowwise_with_gw_hp", "delayed"])
def test_weight_gradients_are_added_to_the_main_ones_once(recipe):
    gradients = []
    for fused in ("true", "false"):
        with emulated_training(*emulated(recipe, f"model.gradient_accumulation_fusion={fused}")) as training:
            training.step()
            layers = (module for _, module in whole_model_modules(training.chunks[0]))
            gradients.append(
                [layer.weight.main_grad.clone() for layer in layers if isinstance(layer, Fp8ColumnParallelLinear)]
            )
    fused, separate = gradients
    assert len(fused) > 0
    # The LM head's gradient, and with it the norm that all are divided by, is summed in another order.
    for one, other in zip(fused, separate, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=0)


@pytest.mark.parametrize(("recipe", "emulate"), ENGINES)
def test_training_is_proven(recipe, emulate):
    engine = {"compiled": False, "emulate": emulate}
    with emulated_training(f"fp8=torchao_{recipe}", "trainer.precision=bf16", torchao=engine) as training:
        losses = []
        for step in (1, 2, 3):
            sabotages.prove(training, step=step)
            losses.append(training.step())
    assert losses[-1] < losses[0]


# Of the multiplications: some CPUs take a second for each `torch._scaled_mm`.
QUARTER = ("model.num_layers=1", "model.micro_batch_size=1", "model.global_batch_size=2")


@pytest.mark.parametrize(("recipe", "emulate"), ENGINES)
def test_gradients_are_near_the_emulated_ones(recipe, emulate):
    """What `tests/test_gpu_torchao.py` asks of a GPU, with sums as inaccurate as there."""
    engine = {"compiled": False, "emulate": emulate}
    with emulated_training(f"fp8=torchao_{recipe}", *SIZES, *QUARTER, torchao=engine) as training:
        for module in training.layers().values():
            sabotages.blur_products(module, 3.3e-3)
        gradients = training.gradients()
    found = distances(f"torchao_{recipe}", gradients, *QUARTER)
    assert {name: distance for name, distance in found.items() if distance > MOST} == {}
    assert min(found.values()) > 0


@pytest.mark.parametrize("other", ["fp8=torchao_rowwise", "fp8=torchao_tensorwise model.fp8_exclude=['*.mlp.*']"])
def test_gradients_of_other_roundings_are_not_near(other):
    with emulated_training(*other.split(), "model.fp8_emulate=true", *SIZES, *QUARTER) as training:
        gradients = training.gradients()
    assert max(distances("torchao_tensorwise", gradients, *QUARTER).values()) > MOST


@needs_product
@pytest.mark.timeout(900)
def test_the_layers_of_a_run_compute_the_same_compiled():
    """As a run on a GPU builds them, but for what computes `torch._scaled_mm`."""
    overrides = ("fp8=torchao_tensorwise", "trainer.precision=bf16")
    with emulated_training(*overrides) as training:
        for step in (1, 2):
            sabotages.prove(training, step=step)
        compiled = [training.step() for _ in range(2)]
    with emulated_training(*overrides, torchao={"compiled": False}) as training:
        assert [training.step() for _ in range(4)][2:] == compiled


# The recipe, what is done to a layer, and where it shows.
WRONG = {
    "no rounding": ("tensorwise", sabotages.scale_products, "result of forward"),
    "a layer on another recipe": ("rowwise", sabotages.to_tensorwise, "scales of the input in forward"),
    "a layer without FP8": ("rowwise_with_gw_hp", sabotages.leave_fp8, "forward"),
    "wgrad in FP8": ("rowwise_with_gw_hp", sabotages.round_input_of_wgrad, "input in wgrad"),
    "codes of an older weight": ("tensorwise", sabotages.keep_codes, "codes of the weight in forward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_that_is_wrong_is_named(name):
    recipe, sabotage, what = WRONG[name]
    engine = {"compiled": False, "emulate": recipe != "tensorwise"}
    with emulated_training(f"fp8=torchao_{recipe}", "trainer.precision=bf16", torchao=engine) as training:
        training.step()
        sabotage(sabotages.layer_of(training, "mlp.linear_fc1", sabotages.OTHER))
        with pytest.raises(ProofError) as error:
            sabotages.prove(training, step=2)
    assert {each.module for each in error.value.differences} == {f"{sabotages.OTHER}.mlp.linear_fc1"}
    assert what in {each.what for each in error.value.differences}


def test_a_gpu_runs_it_in_local_layers(compose_config):
    config = compose_config("fp8=torchao_rowwise")
    kernels = spec_of(config, dataclasses.replace(H200, torchao="0.18.0")).kernels
    assert not kernels.transformer_engine
    assert kernels.torch_attention
    assert kernels.features["fused_single_qkv_rope"]
    assert kernels.gradient_accumulation_fusion


@pytest.mark.timeout(600)
def test_a_shape_too_many_ends_the_run_rather_than_its_gain(compose_config):
    # What other tests compiled would count, too.
    torch._dynamo.reset()
    engine = TorchAO(settings_of("rowwise", compose_config), compiled=True)
    # Scales of rows, and of columns.
    with torch._dynamo.config.patch(recompile_limit=2):
        engine.cast(drawn(16, 16, seed=1), Role.input)
        with pytest.raises(torch._dynamo.exc.FailOnRecompileLimitHit):
            engine.cast(drawn(32, 16, seed=1), Role.input)
