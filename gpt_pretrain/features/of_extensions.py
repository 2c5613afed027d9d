"""Features that extensions register: in use where `model.features` names them; their errors say whose they are."""

from collections.abc import Callable, Iterator
from functools import cache, wraps
from inspect import isfunction, isgenerator
from typing import Any, override

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.extend.registry import Registered, registered
from gpt_pretrain.features.feature import FusedKernel


class _OfExtension(FusedKernel):
    """What differs from the program's own features: nothing turns it on by itself."""

    off = "model.features without it"
    # Generation names no features.
    compiles_first = False

    @property
    @override
    def path(self) -> str:
        return "model.features"

    @override
    def setting(self, model: ModelConfig) -> str:
        return f"model.features=[{self.key}]"

    @property
    @override
    def unset(self) -> str:
        return self.off

    @override
    def wanted(self, model: ModelConfig) -> bool:
        return self.key in model.features


def extension_features() -> Iterator[FusedKernel]:
    """All that are registered, in the order of registration."""
    return map(_built, registered("feature"))


@cache
def _built(each: Registered) -> FusedKernel:
    """The feature that an extension's class describes; a UserError if that is no subclass of `FusedKernel`."""
    kind = each.value
    if not (isinstance(kind, type) and issubclass(kind, FusedKernel)):
        raise UserError(f"{each}: it is no subclass of gpt_pretrain.features.feature.FusedKernel")
    methods = {
        name: _named(each, value)
        for name, value in vars(kind).items()
        if isfunction(value) and name not in vars(_OfExtension)
    }
    feature: FusedKernel = type(kind.__name__, (_OfExtension, kind), {**methods, "key": each.name})()
    return feature


def _named(each: Registered, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with each.named(method.__name__):
            result = method(*args, **kwargs)
            # A generator would raise outside.
            return list(result) if isgenerator(result) else result

    return call
