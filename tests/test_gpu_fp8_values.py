"""The proof of numbers for Transformer Engine's own layers: what they computed is compared with the plan."""

from functools import partial

import pytest
import torch

from gpt_pretrain.fp8.comparisons import OPERANDS_OF_WGRAD
from gpt_pretrain.fp8.gemms import Phase
from gpt_pretrain.fp8.proof import Proof, ProofError
from tests import te_training as te
from tests.emulated_training import RECOMPUTED
from tests.sabotages import LAYER, layer_of, prove, prove_steps, told_by_proof

pytestmark = pytest.mark.gpu

STORED = "model.fp8_params=true"
FUSED, SEPARATE = (f"model.activation_cast_fusion={fused}" for fused in ("true", "false"))
GPT2 = ("model=gpt2_124m", "model.num_layers=2")
EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=256", "model.init_method_std=0.05")
FC1, FC2, PROJ, QKV = "mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj", "self_attention.linear_qkv"


@pytest.mark.parametrize(
    "overrides",
    [
        *((f"fp8={recipe}",) for recipe in ("delayed", "tensorwise", "blockwise")),
        *((f"fp8={recipe}", STORED) for recipe in ("delayed", "tensorwise", "blockwise")),
        *((f"fp8={recipe}", *GPT2) for recipe in ("delayed", "tensorwise", "blockwise")),
        *((f"fp8={recipe}", *RECOMPUTED) for recipe in ("delayed", "tensorwise", "blockwise")),
        ("fp8=delayed", SEPARATE),
        ("fp8=tensorwise", FUSED),
        ("fp8=delayed", "model.fp8_hybrid=false", "model.fp8_e4m3=true"),
        ("fp8=delayed", "model.fp8_margin=3", "model.fp8_amax_history_len=3"),
        ("fp8=delayed", "model.fp8_amax_history_len=4", "model.fp8_amax_compute_algo=most_recent"),
        ("fp8=tensorwise", *EXPERTS),
        ("fp8=blockwise", *EXPERTS),
        ("fp8=tensorwise", "model.fp8_exclude=['*.1.mlp.linear_fc1']"),
        ("fp8=tensorwise", "model.gradient_accumulation_fusion=false"),
    ],
    ids=" ".join,
)
def test_no_step_of_a_sound_training_differs(overrides):
    with te.te_training(*overrides) as training:
        for step in range(1, 4):
            if step == 3:
                with training.trainable.model.gathered_parameters():
                    training.validate()
            prove(training, step=step)


def scale_of(layer, value):
    """The scale of the layer's input is what it is told, once its own has been set."""
    return te.after_updates(lambda: value(layer.fp8_meta["scaling_fwd"].scale[0]))


def history_of(layer, change):
    return te.after_updates(lambda: change(layer.fp8_meta["scaling_fwd"].amax_history))


def too_large(gemm, a, b, given):
    out, *rest = gemm(a, b, **given)
    return out * 1.05, *rest


def not_accumulated(gemm, a, b, given):
    return gemm(a, b, **{**given, "accumulate": False})


# A sabotage of one layer: the recipe, what is done after a step, which returns what ends it, and where it shows.
OF_A_LAYER = {
    "frozen scale": (
        "delayed",
        FC1,
        lambda layer: scale_of(layer, lambda scale: scale.fill_(1.0)),
        "input: next scale",
    ),
    "another margin": (
        "delayed",
        PROJ,
        lambda layer: scale_of(layer, lambda scale: scale.div_(2)),
        "input: next scale",
    ),
    "stale amax": (
        "delayed",
        QKV,
        lambda layer: history_of(layer, lambda history: history[-1].copy_(history[-2])),
        "input: newest amax of the history",
    ),
    "forgetful history": (
        "delayed",
        FC2,
        lambda layer: history_of(layer, lambda history: history[:-1].zero_()),
        "input: amax history after 2 passes",
    ),
    "powers of two": (
        "tensorwise",
        FC1,
        lambda layer: setattr(te.quantizer(layer), "force_pow_2_scales", True),
        "scale of the input",
    ),
    "powers of two for gradients": (
        "tensorwise",
        PROJ,
        lambda layer: setattr(te.quantizer(layer, "bwd"), "force_pow_2_scales", True),
        "scale of the output gradient",
    ),
    "lower bound of amaxes": (
        "tensorwise",
        PROJ,
        lambda layer: setattr(te.quantizer(layer), "amax_epsilon", 100.0),
        "scale of the input",
    ),
    "any scales of blocks": (
        "blockwise",
        FC1,
        lambda layer: setattr(te.quantizer(layer), "force_pow_2_scales", False),
        "scale of the input",
    ),
    "lower bound of blocks": (
        "blockwise",
        FC2,
        lambda layer: setattr(te.quantizer(layer, "bwd"), "amax_epsilon", 1.0),
        "scale of the output gradient",
    ),
    "blocks of another shape": ("blockwise", PROJ, te.cast_weight_in_rows, "scales of the weight in forward"),
    "other values": (
        "tensorwise",
        PROJ,
        lambda layer: te.change_values(layer, lambda values: values.flip(0).contiguous()),
        "codes of the input in forward",
    ),
    "stale weight": ("tensorwise", FC1, te.keep_weight, "codes of the weight in forward"),
    "stale weight of delayed": ("delayed", FC2, te.keep_weight, "codes of the weight in forward"),
    "layer in BF16": ("tensorwise", FC1, te.leave_fp8, "forward"),
    "another recipe": (
        "tensorwise",
        PROJ,
        partial(te.change_recipe, name="Float8BlockScaling"),
        "scales of the input in forward",
    ),
    "delayed in place of tensorwise": ("tensorwise", FC1, partial(te.change_recipe, name="DelayedScaling"), "recipe"),
    "tensorwise in place of delayed": (
        "delayed",
        PROJ,
        partial(te.change_recipe, name="Float8CurrentScaling"),
        "recipe",
    ),
    "another output": (
        "tensorwise",
        PROJ,
        lambda layer: layer.register_forward_hook(lambda *given: (given[2][0] * 1.01, *given[2][1:])).remove,
        "output",
    ),
}


@pytest.mark.parametrize("name", OF_A_LAYER)
def test_one_layer_that_is_wrong_is_named(name):
    recipe, kind, sabotage, what = OF_A_LAYER[name]
    with te.te_training(f"fp8={recipe}", SEPARATE) as training:
        training.step()
        prove(training, step=2)
        end = sabotage(layer_of(training, kind))
        try:
            with pytest.raises(ProofError) as error:
                prove_steps(training, (3, 5))
        finally:
            if callable(end):
                end()
    assert {each.module for each in error.value.differences} == {f"{LAYER}.{kind}"}
    assert what in {each.what for each in error.value.differences}


# A sabotage of the products of all layers of a kind.
OF_PRODUCTS = {
    "forward": ("tensorwise", "layernorm_linear", Phase.forward, too_large),
    "dgrad": ("blockwise", "linear", Phase.dgrad, too_large),
    "wgrad": ("delayed", "linear", Phase.wgrad, not_accumulated),
}


@pytest.mark.parametrize("name", OF_PRODUCTS)
def test_products_of_other_numbers_are_found(name, monkeypatch):
    recipe, place, phase, change = OF_PRODUCTS[name]
    with te.te_training(f"fp8={recipe}", SEPARATE) as training:
        prove(training, step=1)
        te.change_product(monkeypatch, place, phase, change)
        told = told_by_proof(training, step=3)
    kinds = {"linear": {PROJ, FC2}, "layernorm_linear": {QKV, FC1}}[place]
    assert any(f"result of {phase.value}" in row for row in told), told
    assert all(any(kind in row for kind in kinds) for row in told), told


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_the_input_of_another_microbatch_in_a_weight_gradient_is_found(recipe, monkeypatch):
    """As Transformer Engine reports it: the operand that cuBLAS gets is another microbatch's."""
    kept = []

    def earlier(gemm, a, b, given):
        stored = [each for each in (a._data, a._transpose) if each is not None]
        kept.append([each.clone() for each in stored])
        # Two layers' linear_proj and linear_fc2 in each microbatch.
        if len(kept) > 4:
            for codes, others in zip(stored, kept[-5], strict=True):
                codes.copy_(others)
        return gemm(a, b, **given)

    with te.te_training(f"fp8={recipe}") as training:
        trainable = training.trainable
        proof = Proof(trainable.model, trainable.optimizer, 1)
        with proof.watching():
            te.change_product(monkeypatch, "linear", Phase.wgrad, earlier)
            training.step()
            monkeypatch.undo()
        with pytest.raises(ProofError) as error:
            proof.judge()
    told = [each for each in error.value.differences if each.comparison == OPERANDS_OF_WGRAD]
    assert {each.module for each in told} == {
        f"decoder.layers.{layer}.{kind}" for layer in (0, 1) for kind in (PROJ, FC2)
    }


def test_a_stored_weight_with_another_scale_is_found():
    with te.te_training("fp8=tensorwise", STORED) as training:
        prove(training, step=1)
        with torch.no_grad():
            layer_of(training, FC1).weight._data.zero_()
        with pytest.raises(ProofError) as error:
            prove(training, step=2)
    rows = {each.what for each in error.value.differences if each.module == f"{LAYER}.{FC1}"}
    assert "largest code of the weight in forward" in rows
