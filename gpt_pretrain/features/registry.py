"""All features, in the order in which null is resolved and in which rules report their obstacles."""

from collections.abc import Iterable, Iterator, Sequence

from gpt_pretrain.features.activation_cast import ActivationCast
from gpt_pretrain.features.compile import Compile
from gpt_pretrain.features.cuda_graphs import CudaGraphs
from gpt_pretrain.features.document_masking import DocumentMasking
from gpt_pretrain.features.embedding_gradient import EmbeddingGradient
from gpt_pretrain.features.feature import Feature, FusedKernel
from gpt_pretrain.features.flash_attention import FlashAttention
from gpt_pretrain.features.fp8_attention import Fp8Attention
from gpt_pretrain.features.moe_permute import MoePermute
from gpt_pretrain.features.mup import Mup
from gpt_pretrain.features.of_extensions import extension_features
from gpt_pretrain.features.qkv_rope import QkvRope
from gpt_pretrain.features.sharded_gradients import ShardedGradients, ShardedWeights
from gpt_pretrain.features.small_states import SmallStates
from gpt_pretrain.features.user_buffers import UserBuffers
from gpt_pretrain.run.platform import Library
from gpt_pretrain.run.run_spec import RunSpec

_KERNELS = (ActivationCast(), EmbeddingGradient(), QkvRope(), FlashAttention(), MoePermute())
_OWN: tuple[Feature, ...] = (
    CudaGraphs(),
    Compile(),
    DocumentMasking(),
    *_KERNELS,
    Fp8Attention(),
    UserBuffers(),
    SmallStates(),
    ShardedGradients(),
    ShardedWeights(),
    Mup(),
)
LIBRARIES: tuple[Library, ...] = tuple(feature.library for feature in _OWN if feature.library is not None)


class _WithExtensions[F: Feature](Iterable[F | FusedKernel]):
    """Some of the program's own, and those that extensions have registered by now."""

    def __init__(self, own: Sequence[F]) -> None:
        self._own = own

    def __iter__(self) -> Iterator[F | FusedKernel]:
        yield from self._own
        yield from extension_features()


KERNELS: Iterable[FusedKernel] = _WithExtensions(_KERNELS)
FEATURES: Iterable[Feature] = _WithExtensions(_OWN)


def used_features(spec: RunSpec) -> Iterator[Feature]:
    """The features that a run uses."""
    return (feature for feature in FEATURES if feature.is_used(spec))
