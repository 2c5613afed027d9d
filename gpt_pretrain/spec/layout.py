"""How a run is spread over its GPUs."""

from dataclasses import dataclass

from gpt_pretrain.config.derived import data_parallel_size, expert_tensor_parallel_size, num_microbatches
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch


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
    """Per optimizer step and data-parallel rank."""
    gpus_per_node: int

    @property
    def shards(self) -> int:
        """Ranks that share optimizer states where they are sharded: DP · CP."""
        return self.dp * self.cp

    @property
    def expert_shards(self) -> int:
        """The same for the parameters of experts: what EP and their own tensor parallelism leave of a stage's ranks."""
        return self.tp * self.cp * self.dp // (self.ep * self.etp)

    @property
    def world_size(self) -> int:
        """GPUs of the run."""
        return self.tp * self.pp * self.cp * self.dp


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
        gpus_per_node=launch.local_world_size,
    )
