"""`model.activation_cast_fusion`: the activation of an MLP is computed together with its cast to FP8.

`kernels.activation_cast` says how. Layers whose projections are not both in FP8 keep megatron-core's activation.
"""

from collections.abc import Iterator
from functools import cache, partial
from typing import Any, override

from gpt_pretrain.config.choices import Activation
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import Kernels, Obstacle, Platform, Recipe, Resolved
from gpt_pretrain.features.fused_cast import FusedCast
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import FC1, FC2


class ActivationCast(FusedCast):
    """One kernel for the MLP's activation and its cast to FP8, another for the gradients; null: on Hopper."""

    key = "activation_cast_fusion"
    after = "bias_activation_fusion"
    nothing_to_cast = "there is no cast to compute an activation with"

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model, settings = run.model, run.fp8
        yield from super().own_obstacles(run, sizes_known=sizes_known)
        if settings is not None and model.tp_comm_overlap and not settings.recipe.keeps_history:
            yield "model.tp_comm_overlap=true", "tested with user buffers under delayed scaling only"
        if model.activation is Activation.gelu:
            yield "model.activation=gelu", "it computes GELU's tanh form"
        if model.activation is Activation.swiglu and model.bias:
            yield "model.bias=true", "it adds no bias to a SwiGLU"
        if model.bias_activation_fusion is False:
            yield "model.bias_activation_fusion=false", "that asks for an unfused activation"
        if model.num_moe_experts is not None:
            yield f"model.num_moe_experts={model.num_moe_experts}", "experts have their own MLP"
        elif settings is not None and sizes_known:
            yield from _no_layer_to_fuse_in(run, settings)

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        return kernels.transformer_engine and platform.is_hopper and run.fp8 is not None

    @override
    def build_into_layer(self, layer: Any, model: ModelConfig) -> None:
        layer.submodules.mlp = partial(mlp_class(model.activation).as_mlp_submodule, **layer.submodules.mlp.keywords)

    @override
    def cast_bytes(self, kind: str, recipe: Recipe, of_input: float, of_gradient: float) -> tuple[float, float]:
        # The kernels write their two bytes in place of the BF16 that the plan counts for an unfused activation. What
        # remains is to read the activation's inputs, and its gradient, once more for a scale.
        if kind == FC1:
            return of_input, 4 * recipe.cost.searches_amax
        return (2 * recipe.cost.searches_amax if kind == FC2 else of_input), of_gradient


def _no_layer_to_fuse_in(run: Resolved, settings: Fp8Settings) -> Iterator[Obstacle]:
    """Settings that leave no layer whose activation lies between two FP8 products."""
    in_fp8 = {(linear.layer, linear.kind) for linear in run.linears if linear.precision == "fp8"}
    model = run.model
    if any({(layer, FC1), (layer, FC2)} <= in_fp8 for layer in range(model.num_layers)):
        return
    causes = [f"model.fp8_exclude={model.fp8_exclude}"] if settings.exclude else []
    causes += ["model.first_last_layers_bf16=true"] if model.first_last_layers_bf16 else []
    yield " and ".join(causes), "no layer has both projections of its MLP in FP8"


@cache
def mlp_class(activation: Activation) -> Any:
    """megatron-core's MLP with the fused kernels; it is built, stored and loaded in the same way."""
    from megatron.core.transformer.mlp import MLP

    from gpt_pretrain.kernels import activation_cast

    class CastingMLP(MLP):  # type: ignore[misc]  # megatron-core has no types
        @override
        def forward(self, hidden_states: Any, per_token_scale: Any = None, **kwargs: Any) -> Any:
            if not activation_cast.multiply_in_fp8(self.linear_fc1, self.linear_fc2):
                return super().forward(hidden_states, per_token_scale, **kwargs)
            check_arguments({"per_token_scale": per_token_scale, **kwargs})
            return activation_cast.pass_through(self, activation.value, hidden_states)

    return CastingMLP


def check_arguments(arguments: dict[str, Any]) -> None:
    """Asserts that all are None: the fused activation has no scales of tokens and no mask of experts."""
    given = [name for name, value in arguments.items() if value is not None]
    assert not given, f"the fused activation does not know {given}"
