"""An MLP's activation computed with its cast: the kernels, interpreted, and where they are asked for or left out."""

from dataclasses import replace

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.activation_cast import check_arguments, mlp_class
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron import layers
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.layers import LocalLayers
from gpt_pretrain.megatron.model import translate_transformer
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.machine import check_machine
from tests.forked_runs import interpret_kernels
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly
from tests.test_megatron_platform import launched

ASKED = "model.activation_cast_fusion=true"

# Triton's interpreter rounds FP16 as GPUs do, and FP8 not.
INTERPRETED = """
import torch
from tests.activation_casts import check_that_nan_leaves_amax_and_codes_alone, share_of_codes_that_differ
for activation, biased, scale in (
    ("swiglu", False, 3.0), ("swiglu", False, None), ("gelu_tanh", True, 3.0), ("gelu_tanh", False, None),
    ("squared_relu", True, 3.0), ("squared_relu", False, 3.0), ("squared_relu", False, None),
):
    case = {"activation": activation, "biased": biased, "scale": scale}
    share = share_of_codes_that_differ("cpu", torch.float32, torch.float16, **case)
    # A product is rounded once, as torch rounds it.
    assert share <= (0 if activation == "squared_relu" and not biased else 0.01), (case, share)
    check_that_nan_leaves_amax_and_codes_alone("cpu", torch.float32, torch.float16, **case)
"""


def test_the_kernels_interpreted_compute_what_torch_does():
    interpret_kernels(INTERPRETED)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ((), "model.fp8=false"),
        (("fp8=delayed", "model.fp8_emulate=true"), "model.fp8_emulate=true"),
        (("fp8=blockwise",), "model.fp8_recipe=blockwise"),
        (("fp8=delayed", "model.activation=gelu"), "model.activation=gelu"),
        (("fp8=delayed", "model.bias=true"), "model.bias=true"),
        (("fp8=delayed", "model.bias_activation_fusion=false"), "model.bias_activation_fusion=false"),
        (("fp8=tensorwise", "model=moe_small"), "model.num_moe_experts=4"),
        (
            ("fp8=delayed", "model.activations_checkpoint_granularity=selective"),
            "model.activations_checkpoint_granularity=selective",
        ),
        (("fp8=tensorwise", "model.cuda_graph_impl=local"), "model.cuda_graph_impl=local"),
        *(
            ((recipe, *kept_out), said)
            for recipe, kept_out, said in (
                ("fp8=delayed", ("model.fp8_exclude=['*linear_fc2']",), "model.fp8_exclude=['*linear_fc2']"),
                ("fp8=delayed", ("model.fp8_exclude=['*.mlp.linear_fc1']",), "model.fp8_exclude=['*.mlp.linear_fc1']"),
                # Each layer has one of them, and both occur.
                (
                    "fp8=delayed",
                    ("model.fp8_exclude=['*.0.mlp.linear_fc1','*.1.mlp.linear_fc2']",),
                    "model.fp8_exclude=['*.0.mlp.linear_fc1', '*.1.mlp.linear_fc2']",
                ),
                (
                    "fp8=tensorwise",
                    (
                        "model.num_layers=3",
                        "model.first_last_layers_bf16=true",
                        "model.fp8_exclude=['*.1.mlp.linear_fc2']",
                    ),
                    "model.fp8_exclude=['*.1.mlp.linear_fc2'] and model.first_last_layers_bf16=true",
                ),
            )
        ),
    ],
)
def test_refused_beside_what_it_does_not_go_with_and_left_out_by_null(check_excluded, overrides, named):
    start = "model=llama3_8b", "data=mock", "model.num_layers=2"
    check_excluded("activation_cast_fusion", start, overrides, named)


def test_one_layer_with_both_projections_in_fp8_is_enough(broken_rules):
    start = "model=llama3_8b", "data=mock", "model.num_layers=3", ASKED
    assert broken_rules(*start, "fp8=tensorwise", "model.first_last_layers_bf16=true") == []
    assert broken_rules(*start, "fp8=delayed", "model.fp8_exclude=['*.[01].mlp.linear_fc2']") == []
    # What a rank multiplies is not asked for where sizes are none.
    (message,) = broken_rules(*start, "fp8=delayed", "model.tensor_model_parallel_size=0")
    assert message.startswith("model.tensor_model_parallel_size=0")


@pytest.mark.parametrize("fused", [True, False])
def test_layers_have_the_casting_mlp_where_it_is_planned_alone(monkeypatch, fused):
    """On local layers in place of Transformer Engine's, which are not everywhere; both name their MLP the same way."""
    monkeypatch.setattr(layers, "get_gpt_layer_with_transformer_engine_spec", lambda **_: get_gpt_layer_local_spec())
    install_cpu_device()
    config = compose_quickly(
        ["model=gpt3_1_3b", "data=mock", "fp8=delayed", "model.num_layers=2", f"model.activation_cast_fusion={fused}"]
    )
    run = spec_of(config, H200)
    assert run.kernels.transformer_engine
    with process_groups(config.model, read_launch({}), CPU):
        spec = layers.build_layer_spec(run, translate_transformer(run), LocalLayers(apex_layer_norm=False), None)
    mlps = [layer.submodules.mlp for layer in spec.layer_specs]
    assert [mlp.func.__self__ for mlp in mlps] == [mlp_class(config.model.activation) if fused else MLP] * 2
    assert all(mlp.func.__func__ is MLP.as_mlp_submodule.__func__ for mlp in mlps)
    assert all(mlp.keywords["submodules"].linear_fc1 is not None for mlp in mlps)


@pytest.mark.parametrize("given", ["per_token_scale", "padding_mask"])
def test_what_only_the_separate_activation_knows_is_refused(given):
    check_arguments({"per_token_scale": None, "padding_mask": None})
    with pytest.raises(AssertionError, match=given):
        check_arguments({"per_token_scale": None, "padding_mask": None, given: torch.ones(2)})


@pytest.mark.parametrize(
    "model",
    [
        ["model=llama3_8b"],
        ["model=gpt3_1_3b"],
        ["model=llama3_8b", "model.activation=squared_relu"],
        ["model=gpt3_1_3b", "model.activation=squared_relu"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_planned_where_it_is_asked_for(model, recipe):
    by_itself = compose_quickly(["data=mock", *model, f"fp8={recipe}"])
    assert spec_of(by_itself, H200).kernels.features["activation_cast_fusion"]
    config = compose_quickly(["data=mock", *model, f"fp8={recipe}", ASKED])
    check_machine(spec_of(config, H200, launched()))
    assert spec_of(config, H200).kernels.features["activation_cast_fusion"]
    blackwell = replace(H200, device_name="NVIDIA B200", compute_capability=(10, 0))
    with pytest.raises(ConfigError) as refused:
        check_machine(spec_of(config, blackwell, launched()))
    message = str(refused.value)
    assert message.startswith("model.activation_cast_fusion=true ")
    assert "NVIDIA B200, compute capability 10.0" in message
    assert message.endswith("use null or false")
