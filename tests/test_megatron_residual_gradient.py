"""The residual stream's gradient added in the norm's backward kernel: autograd's order, and where it is left out."""

import pytest
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.residual_gradient import ResidualGradient, sum_beside_norm
from gpt_pretrain.kernels import residual_gradient
from gpt_pretrain.kernels.residual_gradient import adding_what_waits
from gpt_pretrain.megatron.layers import TorchNorm
from gpt_pretrain.rules.machine import check_machine
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly

ASKED = "model.residual_gradient_fusion=true"
KEY = "residual_gradient_fusion"
LLAMA = ("model=llama3_8b", "data=mock", "model.num_layers=2")


def norm_backward(gradient, inputs, factor):
    return gradient * factor, (gradient * inputs).sum()


def add_backward(gradient, inputs, beside, factor):
    assert beside.shape == gradient.shape == inputs.shape
    of_inputs, of_factor = norm_backward(gradient, inputs, factor)
    return of_inputs + beside, of_factor


class NormLinear(torch.autograd.Function):
    """As Transformer Engine's: it keeps its input, flat, and calls the norm's kernel where its backward pass ends."""

    kernel = staticmethod(norm_backward)
    copies_inputs = False

    @staticmethod
    def forward(ctx, inputs, factor):
        flat = inputs.view(-1, inputs.size(-1))
        ctx.save_for_backward(flat.clone() if NormLinear.copies_inputs else flat, factor)
        return inputs * factor

    @staticmethod
    def backward(ctx, gradient):
        flat, factor = ctx.saved_tensors
        of_inputs, of_factor = NormLinear.kernel(gradient.reshape(flat.shape), flat, factor)
        return of_inputs.view(gradient.shape), of_factor


def layers(stream, factors, add):
    """Two parts in each layer, with nodes of other kinds between norm and sum."""
    for factor in factors:
        stream = add((torch.sin(NormLinear.apply(stream, factor)) * 2, None), stream, 0.0)
    return stream


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel ran."""
    counts = {"norm": 0, "add": 0}

    def counting(name, function):
        def call(*arguments):
            counts[name] += 1
            return function(*arguments)

        return call

    fused = adding_what_waits(counting("norm", norm_backward), counting("add", add_backward))
    monkeypatch.setattr(NormLinear, "kernel", staticmethod(fused))
    yield counts
    residual_gradient._waiting.clear()


def gradients_of(add, *, microbatches=1):
    generator = torch.Generator().manual_seed(1)
    first = [torch.randn(4, 2, 3, generator=generator, dtype=torch.float64) for _ in range(microbatches)]
    factors = [torch.randn((), generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(4)]
    streams = [each.requires_grad_() for each in first]
    # A pipeline runs several microbatches forward before the first goes backward.
    ends = [layers(stream, factors, add) for stream in streams]
    for end in ends:
        end.square().sum().backward()
    return [each.grad for each in (*streams, *factors)]


@pytest.mark.parametrize("microbatches", [1, 3])
def test_gradients_are_those_of_separate_sums_and_no_sum_is_separate(microbatches, calls):
    plain = gradients_of(lambda outputs, stream, _: outputs[0] + stream, microbatches=microbatches)
    assert calls == {"norm": 4 * microbatches, "add": 0}
    fused = gradients_of(sum_beside_norm(True, False), microbatches=microbatches)
    torch.testing.assert_close(fused, plain, rtol=1e-14, atol=1e-14)
    assert calls == {"norm": 4 * microbatches, "add": 4 * microbatches}


def test_without_gradients_nothing_waits(calls):
    with torch.no_grad():
        gradient_free = layers(torch.ones(2, 1, 3), [torch.tensor(0.5)], sum_beside_norm(False, False))
    assert not gradient_free.requires_grad
    # The first layer's input has no gradient where embeddings are frozen.
    factor = torch.tensor(0.5, requires_grad=True)
    layers(torch.ones(2, 1, 3), [factor], sum_beside_norm(True, False)).sum().backward()
    assert calls == {"norm": 1, "add": 0}


@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_gradient_that_no_norm_takes_is_an_error(microbatches, calls, monkeypatch):
    monkeypatch.setattr(NormLinear, "copies_inputs", True)
    with pytest.raises(RuntimeError, match=r"model\.residual_gradient_fusion=false"):
        gradients_of(sum_beside_norm(True, False), microbatches=microbatches)


def test_a_lost_gradient_is_found_at_the_next_forward_pass(calls, monkeypatch):
    monkeypatch.setattr(NormLinear, "copies_inputs", True)
    add, factor = sum_beside_norm(True, False), torch.tensor(0.5, requires_grad=True)
    layers(torch.ones(2, 1, 3, requires_grad=True), [factor], add).sum().backward()
    with pytest.raises(RuntimeError, match=r"model\.residual_gradient_fusion=false"):
        layers(torch.ones(2, 1, 3, requires_grad=True), [factor], add)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model.normalization=layernorm",), "model.normalization=layernorm"),
        (("model.activations_checkpoint_granularity=selective",), "model.activations_checkpoint_granularity=selective"),
        (("model.transformer_engine=false",), "model.transformer_engine=false"),
        (("model.cuda_graph_impl=local",), "model.cuda_graph_impl=local"),
    ],
)
def test_refused_beside_what_it_does_not_go_with_and_left_out_by_null(check_excluded, overrides, named):
    check_excluded(KEY, LLAMA, overrides, named)


def test_null_asks_for_it_in_transformer_engines_layers_on_hopper():
    assert spec_of(compose_quickly(LLAMA), H200).kernels.features[KEY]
    assert not spec_of(compose_quickly([*LLAMA, "model.normalization=layernorm"]), H200).kernels.features[KEY]
    assert not spec_of(compose_quickly(LLAMA), CPU).kernels.features[KEY]
    for other in ("parallelism=tp2_sp", "parallelism=pp2", "parallelism=fsdp", "model=mixtral_8x7b"):
        assert not spec_of(compose_quickly([*LLAMA, other]), H200).kernels.features[KEY]
        assert spec_of(compose_quickly([*LLAMA, other, ASKED]), H200).kernels.features[KEY]
    with pytest.raises(ConfigError, match=f"{ASKED} needs Transformer Engine layers"):
        check_machine(spec_of(compose_quickly([*LLAMA, ASKED]), CPU))


@pytest.mark.parametrize("before_mlp", [IdentityOp, TorchNorm], ids=["in fc1", "before experts"])
def test_sums_behind_norms_of_linear_layers_are_replaced(before_mlp):
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attn_bda=get_bias_dropout_add, pre_mlp_layernorm=before_mlp, mlp_bda=get_bias_dropout_add
        ),
    )
    ResidualGradient().build_into_layer(layer, compose_quickly(LLAMA).model)
    assert layer.submodules.self_attn_bda is sum_beside_norm
    assert layer.submodules.mlp_bda is (sum_beside_norm if before_mlp is IdentityOp else get_bias_dropout_add)
