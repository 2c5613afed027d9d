"""All features, in the order in which null is resolved and in which rules report their obstacles."""

from collections.abc import Iterator

from gpt_pretrain.features.activation_cast import ACTIVATION_CAST
from gpt_pretrain.features.embedding_gradient import EMBEDDING_GRADIENT
from gpt_pretrain.features.feature import Feature, FusedKernel
from gpt_pretrain.features.flash_attention import FLASH_ATTENTION
from gpt_pretrain.features.moe_permute import MOE_PERMUTE
from gpt_pretrain.features.qkv_rope import QKV_ROPE
from gpt_pretrain.run.platform import Library
from gpt_pretrain.run.run_spec import RunSpec

KERNELS: tuple[FusedKernel, ...] = (ACTIVATION_CAST, EMBEDDING_GRADIENT, QKV_ROPE, FLASH_ATTENTION, MOE_PERMUTE)
FEATURES: tuple[Feature, ...] = (*KERNELS,)
LIBRARIES: tuple[Library, ...] = tuple(feature.library for feature in FEATURES if feature.library is not None)


def used_features(spec: RunSpec) -> Iterator[Feature]:
    """The features that a run uses."""
    return (feature for feature in FEATURES if feature.is_used(spec))
