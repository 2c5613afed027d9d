"""What changes the model: its layers, its FP8 and its loss. Types of torch and megatron-core are named as text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpt_pretrain.config.choices import Fp8Backend, Fp8RecipeName, LayerName, LossName
from gpt_pretrain.config.errors import UserError, one_of
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import registering

if TYPE_CHECKING:
    import torch

# Recipes of Transformer Engine, and whether scales can be of either kind.
_VARIED = {recipe.name: recipe.engine.scales_flag is not None for recipe in recipes_of(Fp8Backend.transformer_engine)}

# From a `gpt_pretrain.run.run_spec.RunSpec` and a `megatron.core.transformer.ModuleSpec` to another one.
type BuildLayer = Callable[[Any, Any], Any]
# From a recipe of `transformer_engine.common.recipe` to another one.
type ChangeRecipe = Callable[[Any], Any]
type TokenLosses = Callable[["torch.Tensor", "torch.Tensor", Config], "torch.Tensor"]


def layer(name: str) -> Callable[[BuildLayer], BuildLayer]:
    """Registers a function that makes the spec of a transformer layer, as a decorator; `model.layer=NAME` chooses it.

    The function gets the resolved run (`run.config`, `run.model`, `run.kernels`, `run.fp8`, …) and the `ModuleSpec` of
    megatron-core that the run would build its layers from: Transformer Engine's modules, or local ones. It returns one,
    changed as it likes; all layers of a model are built from it. A weight of its own that tensor parallel ranks do not
    split is copied on all of them, and needs the attribute `sequence_parallel` where they split the sequence.

    Initial values are drawn by the program, from the seed: normal for matrices, unchanged for vectors. Linear layers of
    Transformer Engine, or of the classes in the given spec, run in FP8 like the program's and are proven; others, such
    as `torch.nn.Linear`, run in the run's precision and are listed among those kept out. The plan counts the program's
    own layer. Checkpoints, resumes, resharding and generation work as with it; an export is refused.
    """
    return registering("layer", name, "run, layer", builtin=LayerName)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeVariant:
    """A variant of an FP8 recipe that an extension has registered."""

    of: str
    powers_of_two: bool | None
    change: Callable[[Any], Any]


def fp8_recipe(name: str, *, of: str, powers_of_two: bool | None = None) -> Callable[[ChangeRecipe], ChangeRecipe]:
    """Registers a variant of a recipe of Transformer Engine, as a decorator; `model.fp8_recipe=NAME` chooses it.

    The function gets the object of `transformer_engine.common.recipe` that the run would use and returns one of the
    same class. It is called on GPUs alone. What is said here is what the rules, the emulation (`model.fp8_emulate`) and
    the proof go by: a run whose scales are others is refused in its first step.

    Args:
        name: What `model.fp8_recipe` takes.
        of: delayed, tensorwise, blockwise or mxfp8; formats, keys and refusals are its.
        powers_of_two: Whether scales are rounded down to powers of two; None: as in the other recipe. Only tensorwise
            and blockwise have both.
    """
    if of not in _VARIED or (powers_of_two is not None and not _VARIED[of]):
        with_both = [known for known, has_both in _VARIED.items() if has_both or powers_of_two is None]
        raise UserError(
            f"fp8_recipe {name!r}: of={of!r} with powers_of_two={powers_of_two}; use of={one_of(with_both)}"
        )

    def variant(change: ChangeRecipe) -> RecipeVariant:
        return RecipeVariant(of=of, powers_of_two=powers_of_two, change=change)

    return registering("fp8_recipe", name, "recipe", builtin=Fp8RecipeName, value_of=variant)


def feature[F: type[Any]](name: str) -> Callable[[F], F]:
    """Registers a subclass of `gpt_pretrain.features.feature.FusedKernel`, as a decorator.

    `model.features=[NAME]` uses it: nothing turns it on by itself, so `key` and `gains` are not asked for. It changes
    how a run computes, not what: a generation from a checkpoint goes without it. What a model computes belongs into a
    layer.
    """
    return registering("feature", name, {})


def loss(name: str) -> Callable[[TokenLosses], TokenLosses]:
    """Registers a function that computes token losses from logits, as a decorator; `model.loss=NAME` chooses it.

    It is called as `function(logits, labels, config)` for each microbatch: logits [b, s, v] in the run's precision,
    capped if the run caps them, of the whole vocabulary, padding included, also under tensor parallelism, where each
    rank gets the gradient of its part; labels [b, s], int64. Under context parallelism s is this rank's part of the
    sequence. It returns losses [b, s] of any floating type; the run leaves out masked tokens and averages. Compute in
    fp32.

    Training uses it. Validation stays cross entropy, so that runs with different losses can be compared.
    """
    return registering("loss", name, "logits, labels, config", builtin=LossName)
