"""All features: those of this package's modules, and those that extensions have registered by now."""

from collections.abc import Iterator
from functools import cache

from gpt_pretrain.extend.registry import import_modules
from gpt_pretrain.features.feature import Feature, FusedKernel
from gpt_pretrain.features.of_extensions import extension_features
from gpt_pretrain.run.platform import Library
from gpt_pretrain.run.run_spec import RunSpec


@cache
def _own_features() -> tuple[Feature, ...]:
    """One of each class with a key in a module of this package; what a module imports precedes what it defines."""
    modules = import_modules(__name__.rpartition(".")[0])
    found = (each for module in modules for each in vars(module).values() if isinstance(each, type))
    kinds = dict.fromkeys(each for each in found if issubclass(each, Feature) and hasattr(each, "key"))
    return tuple(kind() for kind in kinds)


def all_features() -> Iterator[Feature]:
    """The features in the order in which rules report their obstacles."""
    yield from _own_features()
    yield from extension_features()


def own_kernels() -> list[FusedKernel]:
    """The program's own fused kernels, whose keys `config.own` adds to `model`."""
    return [feature for feature in _own_features() if isinstance(feature, FusedKernel)]


def fused_kernels() -> Iterator[FusedKernel]:
    """Features with a null, in the order in which it is resolved."""
    yield from own_kernels()
    yield from extension_features()


def used_features(spec: RunSpec) -> Iterator[Feature]:
    """The features that a run uses."""
    return (feature for feature in all_features() if feature.is_used(spec))


def libraries() -> list[Library]:
    """The optional libraries that the program's own features call."""
    return [feature.library for feature in _own_features() if feature.library is not None]
