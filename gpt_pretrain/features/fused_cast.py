"""What kernels have in common that compute values and cast them to FP8 for Transformer Engine's linear layers."""

from collections.abc import Iterator
from typing import ClassVar, override

from gpt_pretrain.features.feature import FusedKernel, Lack, Obstacle, Resolved, RunSpec
from gpt_pretrain.run.fp8 import local_layers


class FusedCast(FusedKernel):
    """A kernel that writes FP8 codes and their transpose, with one scale per tensor."""

    changes_te_layers = True
    nothing_to_cast: ClassVar[str]
    """Why it is of no use without FP8."""

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        if run.fp8 is None:
            yield "model.fp8=false", self.nothing_to_cast
        elif cause := local_layers(run.model):
            yield cause, "these layers cast for themselves"
        elif run.fp8.recipe.numerics.block is not None:
            yield f"model.fp8_recipe={run.fp8.recipe.name}", "it has one scale for each block of a tensor"
        yield from self.needs(run.model, "not tested with recomputation", activations_checkpoint_granularity=None)

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        if spec.platform.cuda and not spec.platform.is_hopper:
            yield "Hopper, whose products read the layout it writes", f"this is {spec.platform.gpu}"
