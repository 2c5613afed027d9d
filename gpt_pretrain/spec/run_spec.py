"""What a configuration comes to: everything that follows from it and from the machine, resolved once.

    Config → `resolve` → Resolved → rules
                                  → `build_run_spec`, with the machine → RunSpec → model, optimizer, training, plan

Code that needs the FP8 of a run, its kernels, its layout or its matrix products takes a `RunSpec`; nothing computes
them a second time.
"""

from dataclasses import dataclass

from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.kernels import Kernels, plan_kernels
from gpt_pretrain.spec.layout import Layout, plan_layout
from gpt_pretrain.spec.platform import Platform
from gpt_pretrain.spec.products import Linear, fp8_flops_share
from gpt_pretrain.spec.resolved import resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """A checked run on a machine: the one answer to what it is."""

    config: Config
    launch: Launch
    platform: Platform
    fp8: Fp8Settings | None
    """None: the run has no FP8."""
    kernels: Kernels
    """Which implementation each part runs on."""
    layout: Layout
    linears: tuple[Linear, ...]
    """The linear layers of the whole model in forward order, the LM head last."""

    @property
    def model(self) -> ModelConfig:
        """The section `model` of the configuration."""
        return self.config.model

    @property
    def fp8_flops_share(self) -> float:
        """Share of a step's matrix operations that run in FP8; the whole has attention and the LM head in it."""
        return fp8_flops_share(self.model, self.fp8, self.linears)

    @property
    def te_fp8(self) -> Fp8Settings | None:
        """The FP8 of Transformer Engine's layers; None also where it is emulated."""
        return None if self.fp8 is None or self.fp8.emulate else self.fp8


def build_run_spec(config: Config, launch: Launch, platform: Platform) -> RunSpec:
    """Resolves a run on a machine.

    Args:
        config: A configuration that breaks no rule.
        launch: The run's processes.
        platform: The machine; `rules.machine` checks whether it can do what is requested.
    """
    resolved = resolve(config)
    return RunSpec(
        config=config,
        launch=launch,
        platform=platform,
        fp8=resolved.fp8,
        kernels=plan_kernels(resolved, platform, launch.world_size),
        layout=plan_layout(config.model, launch),
        linears=resolved.linears(),
    )
