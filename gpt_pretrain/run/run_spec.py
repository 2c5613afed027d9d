"""Everything that follows from a configuration and a machine, resolved once.

    Config → `resolve` → Resolved → rules
                                  → `build_run_spec`, with the machine → RunSpec → model, optimizer, training, plan

Code that needs a run's FP8, kernels, layout or matrix products takes a `RunSpec`; nothing computes them again.
`features.resolve` has `build_run_spec`, because kernels follow from features.
"""

from dataclasses import dataclass

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.derived import data_parallel_size, expert_tensor_parallel_size, num_microbatches
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.run.fp8 import Fp8Settings, local_layers
from gpt_pretrain.run.kernels import Kernels
from gpt_pretrain.run.platform import Platform
from gpt_pretrain.run.products import Resolved


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the run is spread over GPUs."""

    tp: int
    pp: int
    vp: int
    cp: int
    dp: int
    ep: int
    etp: int
    """Ranks that share each expert's matrices."""
    num_microbatches: int
    """Per data-parallel rank and optimizer step of `model.global_batch_size` samples."""
    instances: int
    """Groups of data-parallel ranks with the same shards."""
    gpus_per_node: int

    @property
    def shards(self) -> int:
        """Ranks over which optimizer states can be sharded: DP · CP / instances."""
        return self.dp * self.cp // self.instances

    @property
    def expert_shards(self) -> int:
        """The same for parameters of experts: a stage's ranks / (EP · expert tensor parallel · instances)."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp * self.instances)

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return self.tp * self.pp * self.cp * self.dp


@dataclass(frozen=True, kw_only=True)
class RunSpec(Resolved):
    """A checked run on a machine."""

    launch: Launch
    platform: Platform
    kernels: Kernels
    layout: Layout

    def microbatches_of(self, num_samples: int) -> int:
        """Forward-backward passes of each data-parallel rank for a step of so many samples."""
        return num_samples // (self.model.micro_batch_size * self.layout.dp)

    @property
    def te_fp8(self) -> Fp8Settings | None:
        """The FP8 of Transformer Engine's layers; None if local layers compute it."""
        return None if self.fp8 is None or self.fp8.in_local_layers else self.fp8

    @property
    def stored_fp8(self) -> Fp8Settings | None:
        """The FP8 of layers that store their weights in it; None: weights have high precision."""
        # Emulated TE layers keep high-precision weights (`rules.fp8`).
        stores = self.fp8 is not None and (self.fp8.backend is Fp8Backend.torchao or not self.fp8.emulate)
        return self.fp8 if stores and self.model.fp8_params else None


def plan_layout(model: ModelConfig, launch: Launch) -> Layout:
    """The layout of a checked configuration."""
    world_size = launch.world_size
    return Layout(
        tp=model.tensor_model_parallel_size,
        pp=model.pipeline_model_parallel_size,
        vp=model.virtual_pipeline_model_parallel_size or 1,
        cp=model.context_parallel_size,
        dp=data_parallel_size(model, world_size),
        ep=model.expert_model_parallel_size,
        etp=expert_tensor_parallel_size(model),
        num_microbatches=num_microbatches(model, world_size),
        instances=model.num_distributed_optimizer_instances,
        gpus_per_node=launch.local_world_size,
    )


def why_local_layers(spec: RunSpec) -> str:
    """Why a run without Transformer Engine layers has none."""
    if spec.platform.transformer_engine is None:
        return f"{spec.platform.why_no_transformer_engine} (python -m gpt_pretrain.doctor tells what this machine has)"
    setting = "model.compile=true" if spec.model.compile else "model.transformer_engine=false"
    return f"{local_layers(spec.model) or setting} excludes them"
