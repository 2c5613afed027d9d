"""A step in which a tensor of Transformer Engine's FP8 layers is infinite somewhere is skipped, as it is in BF16."""

import pytest
import torch

from gpt_pretrain.kernels.fp8_codes_triton import search_blocks
from gpt_pretrain.megatron.layers import GraphedLayer
from gpt_pretrain.megatron.whole_layers import release_graphs
from tests.emulated_training import RECOMPUTED
from tests.sabotages import layer_of
from tests.te_training import te_training

pytestmark = pytest.mark.gpu

SEPARATE = "model.activation_cast_fusion=false"
EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=256", "model.init_method_std=0.05")
RECIPES = {
    "none": (),
    "delayed": (SEPARATE,),
    "tensorwise": (),
    "blockwise": (),
    "delayed stored": (SEPARATE, "model.fp8_params=true"),
    "tensorwise stored": ("model.fp8_params=true",),
    "tensorwise fused": ("model.activation_cast_fusion=true",),
    "tensorwise experts": EXPERTS,
    "blockwise experts": EXPERTS,
    "tensorwise recomputed": RECOMPUTED,
}
FC1, FC2, PROJ = "mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj"


def spoil_input(layer, microbatch):
    """One value of its input is infinite in one microbatch; returns what ends that."""
    seen = []

    def spoil(module, arguments):
        seen.append(1)
        if len(seen) - 1 == microbatch:
            values = arguments[0].clone()
            values.view(-1)[5] = torch.inf
            return values, *arguments[1:]
        return None

    return layer.register_forward_pre_hook(spoil)


def spoil_gradient(layer, microbatch):
    """The same of its output's gradient."""
    seen = []

    def spoil(gradient):
        seen.append(1)
        if len(seen) - 1 == microbatch:
            gradient = gradient.clone()
            gradient.view(-1)[5] = -torch.inf
        return gradient

    def watch(module, arguments, output):
        if output[0].requires_grad:
            output[0].register_hook(spoil)

    return layer.register_forward_hook(watch)


def state(training):
    """Weights, histories and scales."""
    layers = training.layers()
    states = [each for layer in layers.values() for each in layer.fp8_meta.values() if hasattr(each, "amax_history")]
    weights = [each.detach().float().clone() for each in training.chunks[0].parameters()]
    return weights, [(each.amax_history.clone(), each.scale.clone()) for each in states]


@pytest.mark.parametrize(
    ("spoil", "place", "microbatch"),
    [(spoil_input, PROJ, 0), (spoil_input, FC2, 1), (spoil_gradient, FC1, 0), (spoil_gradient, FC2, 1)],
)
@pytest.mark.parametrize("name", RECIPES)
def test_a_step_with_an_infinity_is_skipped(name, spoil, place, microbatch):
    recipe = name.split()[0]
    if "experts" in name:
        place = place.replace("mlp.", "mlp.experts.")
    if "fused" in name and (spoil, place) in {(spoil_input, FC2), (spoil_gradient, FC1)}:
        pytest.skip("this tensor is only ever written as codes")
    if "recomputed" in name and spoil is spoil_input:
        # Each microbatch's is computed twice.
        microbatch *= 2
    with te_training(f"fp8={recipe}", *RECIPES[name]) as training:
        assert not training.result().skipped
        weights, histories = state(training)
        hook = spoil(layer_of(training, place), microbatch)
        result = training.result()
        hook.remove()
        assert result.skipped
        after, histories_after = state(training)
        assert all(map(torch.equal, weights, after))
        assert len(histories) == (16 if recipe == "delayed" else 0)
        for before, now in zip(histories, histories_after, strict=True):
            assert all(map(torch.equal, before, now))
        result = training.result()
        assert not result.skipped
        assert result.grad_norm.isfinite()


def test_a_cast_of_an_infinity_shows_in_nothing_else(monkeypatch):
    """The step would be trained on, if nobody looked at the casts."""
    from gpt_pretrain.fp8 import infinities

    monkeypatch.setattr(
        infinities.StepCasts, "met_infinity", lambda casts: torch.zeros((), dtype=torch.bool, device="cuda")
    )
    for recipe in ("delayed", "tensorwise", "blockwise"):
        with te_training(f"fp8={recipe}", SEPARATE) as training:
            training.result()
            hook = spoil_gradient(layer_of(training, FC1), 0)
            result = training.result()
            hook.remove()
            assert not result.skipped, recipe
            assert result.grad_norm.isfinite()


def test_an_infinity_of_a_validation_skips_no_step():
    with te_training("fp8=tensorwise") as training:
        training.result()
        hook = spoil_input(layer_of(training, PROJ), 0)
        training.validate()
        hook.remove()
        assert not training.result().skipped


def test_replayed_layers_show_an_infinity_too():
    gpt2 = ("model=gpt2_124m", "model.num_layers=2", "fp8=tensorwise", "model.cuda_graph_impl=local")
    with te_training(*gpt2) as training:
        assert any(isinstance(module, GraphedLayer) for module in training.chunks[0].modules())
        for _ in range(3):
            assert not training.result().skipped
        weight = layer_of(training, FC2).weight
        kept = weight.detach().clone()
        with torch.no_grad():
            weight[3, 5] = torch.inf
        assert training.result().skipped
        with torch.no_grad():
            weight.copy_(kept)
        assert not training.result().skipped
        release_graphs(training.chunks)


@pytest.mark.parametrize("shape", [(256, 384), (200, 144), (128, 3, 128)])
def test_blocks_of_scale_one_are_searched(shape):
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer
    from transformer_engine_torch import DType

    quantizer = Float8BlockQuantizer(DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=1)
    generator = torch.Generator("cuda").manual_seed(3)

    def found(values):
        flag = torch.zeros(1, device="cuda")
        search_blocks(values, quantizer(values)._rowwise_scale_inv, flag)
        return bool(flag)

    values = torch.randn(shape, device="cuda", generator=generator).bfloat16()
    # These blocks have scale 1, too: of an amax that E4M3 holds as it is, and of nothing.
    values.view(-1, shape[-1])[7] *= 448 / values.view(-1, shape[-1])[7].abs().max()
    values.view(-1, shape[-1])[9] = 0.0
    assert not found(values)
    for place in (0, shape[-1] - 1, values.numel() - 1):
        spoilt = values.clone()
        spoilt.view(-1)[place] = torch.inf if place else -torch.inf
        assert found(spoilt)
    values.view(-1)[11] = torch.nan
    assert not found(values)
