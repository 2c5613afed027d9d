"""What a run trains: built in `training/setup.py`, trained by `training/step.py`, saved and loaded by `checkpoint/`."""

from dataclasses import dataclass

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from gpt_pretrain.megatron.model import Model


@dataclass(kw_only=True, slots=True)
class Trainable:
    """A model with the optimizer of its weights and the schedule of the optimizer's learning rate."""

    model: Model
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
