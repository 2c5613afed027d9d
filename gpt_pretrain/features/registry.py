"""All features, in the order in which null is resolved and in which rules report their obstacles."""

from collections.abc import Iterable, Iterator

from gpt_pretrain.features.activation_cast import ACTIVATION_CAST
from gpt_pretrain.features.embedding_gradient import EMBEDDING_GRADIENT
from gpt_pretrain.features.feature import Feature
from gpt_pretrain.features.flash_attention import FLASH_ATTENTION
from gpt_pretrain.features.moe_permute import MOE_PERMUTE
from gpt_pretrain.features.of_extensions import extension_features
from gpt_pretrain.features.qkv_rope import QKV_ROPE
from gpt_pretrain.run.kernels import Kernels
from gpt_pretrain.run.platform import Library

_OWN = (ACTIVATION_CAST, EMBEDDING_GRADIENT, QKV_ROPE, FLASH_ATTENTION, MOE_PERMUTE)
LIBRARIES: tuple[Library, ...] = tuple(feature.library for feature in _OWN if feature.library is not None)


class _Features(Iterable[Feature]):
    """The program's own, and those that extensions have registered by now."""

    def __iter__(self) -> Iterator[Feature]:
        yield from _OWN
        yield from extension_features()


FEATURES = _Features()


def used_features(kernels: Kernels) -> Iterator[Feature]:
    """The features that a run uses."""
    return (feature for feature in FEATURES if feature.is_used(kernels))
