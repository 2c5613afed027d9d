"""What changes the model: its layers and its loss. Types of torch and megatron-core are named as text."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from gpt_pretrain.config.choices import LayerName, LossName
from gpt_pretrain.config.schema import Config
from gpt_pretrain.extend.registry import register

if TYPE_CHECKING:
    import torch

# From a `gpt_pretrain.run.run_spec.RunSpec` and a `megatron.core.transformer.ModuleSpec` to another one.
type BuildLayer = Callable[[Any, Any], Any]
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

    def add(build: BuildLayer) -> BuildLayer:
        register("layer", name, build, build.__module__, builtin=LayerName)
        return build

    return add


def loss(name: str) -> Callable[[TokenLosses], TokenLosses]:
    """Registers a function that computes token losses from logits, as a decorator; `model.loss=NAME` chooses it.

    It is called as `function(logits, labels, config)` for each microbatch: logits [b, s, v] in the run's precision, of
    the whole vocabulary, padding included, also under tensor parallelism, where each rank gets the gradient of its
    part; labels [b, s], int64. Under context parallelism s is this rank's part of the sequence. It returns losses
    [b, s] of any floating type; the run leaves out masked tokens and averages. Compute in fp32.

    Training uses it. Validation stays cross entropy, so that runs with different losses can be compared.
    """

    def add(function: TokenLosses) -> TokenLosses:
        register("loss", name, function, function.__module__, builtin=LossName)
        return function

    return add
