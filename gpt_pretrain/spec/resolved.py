"""What follows from a configuration without a machine: its FP8 and its linear layers. The rules read it."""

from dataclasses import dataclass

from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.spec.fp8 import Fp8Settings, resolve_fp8
from gpt_pretrain.spec.products import Linear, fp8_flops_share, linears


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolved:
    """What follows from the configuration alone, even one that breaks rules."""

    config: Config
    fp8: Fp8Settings | None
    """None: the run has no FP8."""

    @property
    def model(self) -> ModelConfig:
        """Its section `model`."""
        return self.config.model

    def linears(self) -> tuple[Linear, ...]:
        """The linear layers; sizes must be positive and divide as the layout asks."""
        return tuple(linears(self.config.model, self.fp8))

    @property
    def fp8_flops_share(self) -> float:
        """Share of a step's matrix operations that run in FP8; the whole has attention and the LM head in it."""
        return fp8_flops_share(self.model, self.fp8, self.linears())


def resolve(config: Config) -> Resolved:
    """Resolves what needs no machine."""
    return Resolved(config=config, fp8=resolve_fp8(config.model))
