"""All features, in the order in which null is resolved and in which rules report their obstacles."""

from collections.abc import Iterator

from gpt_pretrain.features.activation_cast import ActivationCast
from gpt_pretrain.features.compile import Compile
from gpt_pretrain.features.cuda_graphs import CudaGraphs
from gpt_pretrain.features.embedding_gradient import EmbeddingGradient
from gpt_pretrain.features.feature import Feature, FusedKernel
from gpt_pretrain.features.flash_attention import FlashAttention
from gpt_pretrain.features.fp8_attention import Fp8Attention
from gpt_pretrain.features.moe_permute import MoePermute
from gpt_pretrain.features.qkv_rope import QkvRope
from gpt_pretrain.features.sharded_gradients import ShardedGradients
from gpt_pretrain.features.small_states import SmallStates
from gpt_pretrain.features.user_buffers import UserBuffers
from gpt_pretrain.run.platform import Library
from gpt_pretrain.run.run_spec import RunSpec

KERNELS: tuple[FusedKernel, ...] = (ActivationCast(), EmbeddingGradient(), QkvRope(), FlashAttention(), MoePermute())
FEATURES: tuple[Feature, ...] = (
    CudaGraphs(),
    Compile(),
    *KERNELS,
    Fp8Attention(),
    UserBuffers(),
    SmallStates(),
    ShardedGradients(),
)
LIBRARIES: tuple[Library, ...] = tuple(feature.library for feature in FEATURES if feature.library is not None)


def used_features(spec: RunSpec) -> Iterator[Feature]:
    """The features that a run uses."""
    return (feature for feature in FEATURES if feature.is_used(spec))
