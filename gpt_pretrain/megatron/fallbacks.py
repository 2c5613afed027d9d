"""What megatron-core's attention and its parallel linear layers look for under names that are not installed."""

from types import SimpleNamespace

from gpt_pretrain.kernels.cross_entropy import accumulate_weight_gradient
from gpt_pretrain.launch.patches import SPLIT, WEIGHT_GRADIENTS, patch


def install_split() -> None:
    """Gives attention Transformer Engine's split of queries, keys and values, unless it found one itself."""
    if SPLIT.owner().SplitAlongDim is None:
        from transformer_engine.pytorch.utils import SplitAlongDim

        patch(SPLIT, SplitAlongDim=SplitAlongDim.apply)


def install_weight_gradients() -> None:
    """Lets column- and row-parallel layers, LM head included, add weight gradients to the main gradient without apex.

    Transformer Engine's layers need no help with `gradient_accumulation_fusion`.
    """
    if not WEIGHT_GRADIENTS.owner()._grad_accum_fusion_available:
        # apex has a function for each type of main gradient.
        module = SimpleNamespace(
            wgrad_gemm_accum_fp32=accumulate_weight_gradient, wgrad_gemm_accum_fp16=accumulate_weight_gradient
        )
        patch(WEIGHT_GRADIENTS, fused_weight_gradient_mlp_cuda=module, _grad_accum_fusion_available=True)
