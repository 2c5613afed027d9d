"""`model.compile`: torch.compile makes one graph of a layer without Transformer Engine (`megatron.whole_layers`)."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import CudaGraphImpl, Fp8Backend
from gpt_pretrain.config.errors import show
from gpt_pretrain.features.feature import (
    COMPILED_ITSELF,
    LOCAL_LAYERS,
    Feature,
    Lack,
    Obstacle,
    Resolved,
    RunSpec,
    changing_shapes,
)

# By the reason: keys of `model.` that exclude compiled layers, each with a value that does not. Experts have none:
# without them it is another model. `FusedKernel` excludes itself.
_EXCLUDED = {
    LOCAL_LAYERS: "transformer_engine=null "
    "apply_rope_fusion=null tp_comm_overlap=false "
    "cuda_graph_impl=null context_parallel_size=1",
    COMPILED_ITSELF: "bias_activation_fusion=null "
    "bias_dropout_add_fusion=null masked_softmax_fusion=null gradient_accumulation_fusion=null",
    "hooks that wait for parameters would break the graph of a layer": "overlap_param_gather=false",
    # torch 2.11 traces megatron-core's exchanges along the sequence wrongly, whatever the backend: the first gradient
    # norm of a toy was 0.979 instead of 1.166, which the same modules uncompiled gave (TP 2, CPU).
    "its gradients were wrong where ranks split the sequence": "sequence_parallel=false",
    "experts get a different number of tokens in each step, and a graph has fixed shapes": "num_moe_experts",
    "not tested with recomputation": "activations_checkpoint_granularity=null",
    "a graph would hold for a layer's number alone": "no_rope_freq=null",
    "layers of extensions are not tested": "layer=gpt",
    "sliding windows are not tested": "window_size=null",
    "not tested with sharded gradients": "data_parallel_sharding_strategy=null",
    "random numbers drawn in compiled layers are not tested": "hidden_dropout=0 attention_dropout=0",
}


class Compile(Feature):
    """Compiled layers."""

    key = "compile"
    off = "model.compile=false"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        if run.fp8 is not None:
            why = "it is for layers without FP8"
            if run.fp8.backend is Fp8Backend.torchao:
                why += ", and TorchAO's casts and products are compiled already"
            yield "model.fp8=true", why
        if run.config.trainer.deterministic:
            yield "trainer.deterministic=true", "not tested"
        yield from changing_shapes(run.model)
        for why, settings in _EXCLUDED.items():
            for setting in settings.split():
                key, _, instead = setting.partition("=")
                value = getattr(run.model, key)
                if value and show(value) not in (instead, CudaGraphImpl.none.name):
                    yield f"model.{key}={show(value)}", why, *([f"model.{setting}"] if instead else [])

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        if (problem := spec.platform.compiler_problem) is not None:
            yield "a C++ compiler on a CPU", problem, "install g++"
