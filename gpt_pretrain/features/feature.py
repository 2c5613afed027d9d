"""What a feature is: the questions that the rest of the application asks of each optional behaviour.

Rules ask for its obstacles, `resolve` for its gain, the plan for its speed, the layer specs to build it in, and the
doctor what it needs. A feature overrides the methods that concern it; the others answer that it changes nothing.
"""

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, override

from gpt_pretrain.config.choices import CudaGraphImpl
from gpt_pretrain.config.errors import refusal, refusals, show
from gpt_pretrain.config.facts import NO_FACTS, Facts
from gpt_pretrain.config.mixtures import own_lengths
from gpt_pretrain.config.recipes import Recipe
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.run.fp8 import Obstacle
from gpt_pretrain.run.kernels import Kernels
from gpt_pretrain.run.platform import Library, Platform
from gpt_pretrain.run.products import Resolved
from gpt_pretrain.run.run_spec import RunSpec, why_local_layers

# A feature's file takes the types of its methods from here.
__all__ = ["Kernels", "Lack", "Library", "Obstacle", "Platform", "Recipe", "Resolved", "RunSpec"]

type Lack = tuple[str, ...]
"""What a feature needs, why this machine does not have it, and other ways out beside doing without."""

LOCAL_LAYERS = "it compiles megatron-core's local layers"
COMPILED_ITSELF = "a layer is one graph, and this part is compiled or computed by itself"


def changing_shapes(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that give microbatches different shapes, for features that record or compile graphs."""
    why = "a graph has fixed shapes, and microbatches have different numbers of documents"
    if model.data.inter_document_masking:
        yield "model.data.inter_document_masking=true", why, "model.data.inter_document_masking=false"
    if lengths := own_lengths(model.data):
        why = "a graph has fixed shapes, and those of stages with a seq_length differ"
        yield f"model.data.stages with seq_length={lengths[0]}", why, "stages without seq_length"


class Feature:
    """An optional behaviour that a key of `model.` asks for."""

    key: ClassVar[str]
    """Its name below `model.`."""
    asked: ClassVar[Any] = True
    """The value of the key that asks for it; None: all but null do."""
    off: ClassVar[str]
    """How messages offer to do without it."""
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
    not_forecast: ClassVar[str] = ""
    """What the plan's forecasts leave out in a run with it."""
    attention_speed: ClassVar[float] = 1.0
    """Speed of attention over cuDNN's, forward and backward together."""

    @property
    def path(self) -> str:
        """The dotted key that turns it on."""
        return f"model.{self.key}"

    def setting(self, model: ModelConfig) -> str:
        """What asks for it, as messages name it."""
        return f"{self.path}={show(self.wanted(model))}"

    def wanted(self, model: ModelConfig) -> Any:
        """What the configuration says."""
        return attrgetter(self.key)(model)

    def is_asked(self, model: ModelConfig) -> bool:
        """Whether the configuration asks for it."""
        wanted = self.wanted(model)
        return wanted is not None if self.asked is None else wanted is self.asked

    def is_used(self, spec: RunSpec) -> bool:
        """Whether a run uses it."""
        return self.is_asked(spec.model)

    def problems(self, run: Resolved, *, sizes_known: bool) -> Iterator[str]:
        """Why the rules refuse what was asked for; arguments as of `obstacles`."""
        yield from refusals(self.setting(run.model), self.obstacles(run, sizes_known=sizes_known), self.off)

    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        """Settings that exclude it, with the reasons; shapes count only if `sizes_known`: all counts are positive."""
        yield from ()

    @staticmethod
    def needs(model: ModelConfig, why: str, **values: object) -> Iterator[Obstacle]:
        """An obstacle for each key of `model.` that has another value than the feature needs."""
        for key, value in values.items():
            if getattr(model, key) != value:
                yield f"model.{key}={show(getattr(model, key))}", why

    def problems_here(self, spec: RunSpec) -> Iterator[str]:
        """Why this machine cannot do what was asked for."""
        for needed, why, *ways in self.lacks(spec):
            yield f"{self.setting(spec.model)} needs {needed}: {why}; use {', or '.join([self.off, *ways])}"

    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        """What it needs that this machine does not have."""
        if self.changes_te_layers and not spec.kernels.transformer_engine:
            yield "Transformer Engine layers", why_local_layers(spec)

    def prepare(self) -> None:
        """Changes megatron-core itself, before the model is built."""

    def build_into_model(self, chunks: Sequence[Any]) -> None:
        """Changes this rank's model chunks once they are built, before data parallelism wraps them."""

    def build_into_layer(self, layer: Any, model: ModelConfig) -> None:
        """Changes megatron-core's spec of a layer, a `ModuleSpec`."""

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


class FusedKernel(Feature):
    """A feature whose key is true, false, or null where the machine decides; its docstring is the key's help."""

    after: ClassVar[str] = "gradient_accumulation_fusion"
    """The key of `model.` that its own follows in `--help` and `config.yaml`."""
    facts: ClassVar[Facts] = NO_FACTS
    """What else is known of its key."""
    off = "null or false"

    @property
    def unset(self) -> str:
        """The setting that asks for nothing, as messages offer it."""
        return f"{self.path}=null"

    @override
    def is_used(self, spec: RunSpec) -> bool:
        return spec.kernels.features[self.key]

    @override
    def problems(self, run: Resolved, *, sizes_known: bool) -> Iterator[str]:
        yield from super().problems(run, sizes_known=sizes_known)
        if run.model.compile:
            why = LOCAL_LAYERS if self.changes_te_layers else COMPILED_ITSELF
            yield refusal("model.compile=true", self.setting(run.model), why, "model.compile=false", self.unset)

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        if self.changes_te_layers and run.model.transformer_engine is False:
            yield "model.transformer_engine=false", "it changes Transformer Engine's layers"
        if run.model.cuda_graph_impl is CudaGraphImpl.local:
            yield "model.cuda_graph_impl=local", "not tested in replayed layers"
        yield from self.own_obstacles(run, sizes_known=sizes_known)

    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        """`obstacles` that other kernels do not have."""
        yield from ()

    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        """Whether null turns it on, where neither obstacles nor CUDA graphs exclude it: it was measured to gain here.

        `kernels` has what was chosen before, kernels that stand earlier in `registry.fused_kernels` included.
        """
        return False
