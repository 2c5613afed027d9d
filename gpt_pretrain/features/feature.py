"""What a feature is: the questions that the rest of the application asks of each optional behaviour.

Rules ask for its obstacles, `resolve` for its gain, the plan for its speed, the layer specs to build it in, and the
doctor what it needs. A feature overrides the methods that concern it; the others answer that it changes nothing.
"""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from gpt_pretrain.config.choices import CudaGraphImpl
from gpt_pretrain.config.recipes import Recipe
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.run.fp8 import Obstacle
from gpt_pretrain.run.kernels import Kernels
from gpt_pretrain.run.platform import Library, Platform
from gpt_pretrain.run.products import Resolved
from gpt_pretrain.run.run_spec import RunSpec

# A feature's file takes the types of its methods from here.
__all__ = ["Feature", "Kernels", "Lack", "Library", "Obstacle", "Platform", "Recipe", "Resolved", "RunSpec"]

type Lack = tuple[str, str]
"""What a feature needs, and why this machine does not have it, as a message says it with a colon between them."""


class Feature:
    """An optional behaviour with a key of `model.`: true, false, or null where the machine decides."""

    key: ClassVar[str]
    """Its name below `model.`."""
    library: ClassVar[Library | None] = None
    """The optional library that it calls."""
    without_library: ClassVar[str] = ""
    """What runs do where the library is broken, as a sentence that a colon and the reason follow."""
    core_field: ClassVar[str] = ""
    """The field of megatron-core's `TransformerConfig` that says whether it is used."""
    changes_te_layers: ClassVar[bool] = False
    """It needs Transformer Engine's layers."""
    compiles_first: ClassVar[bool] = False
    """Its first call compiles for seconds, which does not pay for a few tokens."""
    attention_speed: ClassVar[float] = 1.0
    """Speed of attention over cuDNN's, forward and backward together."""
    doctor_part: ClassVar[tuple[str, str]] = ("", "")
    """A part of a run in the doctor's table, and when this feature is the first choice for it."""

    def is_asked(self, model: ModelConfig) -> bool:
        """Whether the configuration says true."""
        return getattr(model, self.key) is True

    def is_used(self, kernels: Kernels) -> bool:
        """Whether a run uses it."""
        return kernels.features[self.key]

    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        """Settings that exclude it, with the reasons; shapes count only if `sizes_known`: all counts are positive."""
        if self.changes_te_layers and run.model.transformer_engine is False:
            yield "model.transformer_engine=false", "it changes Transformer Engine's layers"
        if run.model.cuda_graph_impl is CudaGraphImpl.local:
            yield "model.cuda_graph_impl=local", "not tested in replayed layers"
        yield from self.own_obstacles(run, sizes_known=sizes_known)

    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        """`obstacles` that other features do not have."""
        yield from ()

    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        """Whether null turns it on, where neither obstacles nor CUDA graphs exclude it: it was measured to gain here.

        `kernels` has what was chosen before, features that stand earlier in `registry.FEATURES` included.
        """
        return False

    def lacks(self, spec: RunSpec) -> Lack | None:
        """What it needs that this machine does not have; None if nothing."""
        return None

    def prepare(self) -> None:
        """Changes megatron-core itself, before the model is built."""

    def build_into_model(self, chunks: Sequence[Any]) -> None:
        """Changes this rank's model chunks once they are built, before data parallelism wraps them."""

    def build_into_layer(self, layer: Any) -> None:
        """Changes megatron-core's spec of a Transformer Engine layer, a `ModuleSpec`."""

    def cast_bytes(self, kind: str, recipe: Recipe, of_input: float, of_gradient: float) -> tuple[float, float]:
        """Bytes per value that casts of a linear layer's input and of its output's gradient read and write.

        It is asked where the whole MLP is in FP8, and given the bytes of separate casts.
        """
        return of_input, of_gradient

    def permutation_passes(self, choices: int, separate: float) -> float:
        """How often a row's values are read or written to get to a token's `choices` of experts and back.

        Forward and backward together; `separate`: where each choice is gathered and added up by itself.
        """
        return separate

    def doctor_choice(self, platform: Platform) -> str | None:
        """What the doctor's part runs on here, before "else" and the next choice; None: not on this feature."""
        return None
