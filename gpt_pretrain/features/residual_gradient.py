"""`model.residual_gradient_fusion`: RMSNorm's backward kernel adds the gradient of the residual stream beside it.

`kernels.residual_gradient` says how. It concerns norms that Transformer Engine computes as part of the linear layer
behind them; where experts follow, the norm before them is a layer of its own and keeps the separate sum.
"""

from collections.abc import Callable, Iterator
from typing import Any, override

from gpt_pretrain.config.choices import LayerName, Normalization
from gpt_pretrain.config.derived import is_whole
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import FusedKernel, Kernels, Obstacle, Platform, Resolved


class ResidualGradient(FusedKernel):
    """Add the residual's gradient in RMSNorm's backward kernel; null: in dense models whole on each Hopper GPU."""

    key = "residual_gradient_fusion"
    after = "bias_dropout_add_fusion"
    changes_te_layers = True

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        why = "Transformer Engine's kernel that adds is RMSNorm's"
        yield from self.needs(model, why, normalization=Normalization.rmsnorm)
        yield from self.needs(model, "not tested with recomputation", activations_checkpoint_granularity=None)
        yield from self.needs(
            model, "not tested with experts' overlapped passes", overlap_moe_expert_parallel_comm=False
        )
        if model.layer is not LayerName.gpt:
            yield f"model.layer={model.layer.name}", "layers of extensions may have their norms elsewhere"

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        model = run.model
        # Other layouts, and experts, have not run on GPUs with it.
        ran = is_whole(model) and model.num_moe_experts is None
        return ran and kernels.transformer_engine and platform.is_hopper

    @override
    def prepare(self) -> None:
        from gpt_pretrain.kernels.residual_gradient import wrapped_norm_backward
        from gpt_pretrain.launch.patches import RESIDUAL_GRADIENTS, patch

        patch(RESIDUAL_GRADIENTS, rmsnorm_bwd=wrapped_norm_backward())

    @override
    def build_into_layer(self, layer: Any, model: ModelConfig) -> None:
        from megatron.core.transformer.identity_op import IdentityOp

        parts = layer.submodules
        if parts.input_layernorm is IdentityOp:
            parts.self_attn_bda = sum_beside_norm
        if parts.pre_mlp_layernorm is IdentityOp:
            parts.mlp_bda = sum_beside_norm


def sum_beside_norm(training: bool, fused: bool) -> Callable[..., Any]:
    """megatron-core's `get_bias_dropout_add`, but the gradient of the residual stream waits for the norm's."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

    from gpt_pretrain.kernels.residual_gradient import let_wait

    add = get_bias_dropout_add(training, fused)
    return lambda outputs, residual, dropout: add(outputs, let_wait(residual), dropout)
