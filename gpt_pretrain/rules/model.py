"""Cross-field rules about the architecture, its kernels and its exchanges: what megatron-core 0.19 would assert later.

A rule is a generator of messages: the keys and values in conflict, the rule, and the ways out. `rules.shapes` has the
divisions of widths, heads and sequences.
"""

from collections.abc import Iterable, Iterator

from gpt_pretrain.config.choices import Activation, CudaGraphImpl, Fp8Backend, PositionEmbedding, RecomputeGranularity
from gpt_pretrain.config.derived import model_parallel_size, num_microbatches, uses_distributed_optimizer
from gpt_pretrain.config.errors import divisors, multiples_near, one_of, show
from gpt_pretrain.config.recipes import Use, recipes_for
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.registry import FEATURES
from gpt_pretrain.features.resolve import (
    graph_obstacles,
)
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.run.fp8 import Obstacle, local_layers
from gpt_pretrain.run.products import Resolved

_LOCAL_LAYERS = "it compiles megatron-core's local layers"
_COMPILED_ITSELF = "a layer is one graph, and this part is compiled or computed by itself"
# By the reason: keys of `model.` that exclude compiled layers, each with a value that does not. Experts have none:
# without them it is another model.
_NOT_COMPILED = {
    _LOCAL_LAYERS: "transformer_engine=null "
    "apply_rope_fusion=null tp_comm_overlap=false "
    "cuda_graph_impl=null context_parallel_size=1",
    _COMPILED_ITSELF: "bias_activation_fusion=null "
    "bias_dropout_add_fusion=null masked_softmax_fusion=null gradient_accumulation_fusion=null",
    "hooks that wait for parameters would break the graph of a layer": "overlap_param_gather=false",
    # torch 2.11 traces megatron-core's exchanges along the sequence wrongly, whatever the backend: the first gradient
    # norm of a toy was 0.979 instead of 1.166, which the same modules uncompiled gave (TP 2, CPU).
    "its gradients were wrong where ranks split the sequence": "sequence_parallel=false",
    "experts get a different number of tokens in each step, and a graph has fixed shapes": "num_moe_experts",
    "not tested with recomputation": "activations_checkpoint_granularity=null",
    "random numbers drawn in compiled layers are not tested": "hidden_dropout=0 attention_dropout=0",
}


def positions(model: ModelConfig) -> Iterator[str]:
    """The kind of positions, and the length they allow."""
    if model.encoder_seq_length > model.max_position_embeddings:
        yield (
            f"model.encoder_seq_length={model.encoder_seq_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; "
            f"use {model.max_position_embeddings} or less, or raise max_position_embeddings"
        )
    if model.apply_rope_fusion and model.position_embedding_type is not PositionEmbedding.rope:
        yield (
            "model.apply_rope_fusion=true has nothing to fuse: "
            f"model.position_embedding_type={model.position_embedding_type.name}; use "
            "model.position_embedding_type=rope, or model.apply_rope_fusion=null"
        )


def pipeline(model: ModelConfig, launch: Launch | None) -> Iterator[str]:
    """Layers over stages and chunks; microbatches of the interleaved schedule."""
    pp, vp = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
    if vp is not None and pp == 1:
        yield (
            f"model.virtual_pipeline_model_parallel_size={vp} needs model.pipeline_model_parallel_size of 2 or more; "
            "use null, or more stages"
        )
        return
    chunks = pp * (vp or 1)
    if model.num_layers % chunks:
        divisor, sizes = f"model.pipeline_model_parallel_size={pp}", one_of(divisors(model.num_layers))
        way = f"model.pipeline_model_parallel_size={sizes}"
        if vp is not None:
            divisor += f" × model.virtual_pipeline_model_parallel_size={vp}"
            way = f"a product of {sizes}"
        near = one_of(multiples_near(model.num_layers, chunks))
        yield indivisible(f"model.num_layers={model.num_layers}", divisor, near, way)
    if vp is not None and launch is not None and batch_fits(model, launch):
        microbatches = num_microbatches(model, launch.world_size)
        if microbatches % pp:
            per_step = model.global_batch_size // microbatches
            yield (
                f"model.global_batch_size={model.global_batch_size} makes {microbatches} microbatches, and the "
                f"interleaved schedule needs a multiple of model.pipeline_model_parallel_size={pp}; use "
                f"model.global_batch_size={one_of(multiples_near(model.global_batch_size, per_step * pp))}"
            )


def batch_fits(model: ModelConfig, launch: Launch) -> bool:
    """Whether a whole number of microbatches makes the global batch."""
    ranks, rest = divmod(launch.world_size, model_parallel_size(model))
    return rest == 0 and model.global_batch_size % (model.micro_batch_size * ranks) == 0


def world_and_batch(model: ModelConfig, launch: Launch) -> Iterator[str]:
    """Processes over the layout, and samples over the data-parallel ranks."""
    size, world = model_parallel_size(model), launch.world_size
    if world % size:
        yield (
            f"model.tensor_model_parallel_size={model.tensor_model_parallel_size} × "
            f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size} × "
            f"model.context_parallel_size={model.context_parallel_size} needs a multiple of {size} processes, and this "
            f"run has {world}; {launch.how_to_start(size)}, or choose a layout whose product divides {world}"
        )
    elif not batch_fits(model, launch):
        ranks = world // size
        batch, samples = model.global_batch_size, model.micro_batch_size * ranks
        divisor = f"model.micro_batch_size={model.micro_batch_size} × {ranks} data-parallel ranks = {samples}"
        yield indivisible(f"model.global_batch_size={batch}", divisor, one_of(multiples_near(batch, samples)))


def recomputation(model: ModelConfig) -> Iterator[str]:
    """Combinations of `activations_checkpoint_*` (TransformerConfig.__post_init__)."""
    granularity = model.activations_checkpoint_granularity
    method, layers = model.activations_checkpoint_method, model.activations_checkpoint_num_layers
    if granularity is not RecomputeGranularity.full:
        return
    per_chunk = model.num_layers // (
        model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    )
    if method is None:
        yield (
            "model.activations_checkpoint_granularity=full needs model.activations_checkpoint_method; "
            "use model.activations_checkpoint_method=uniform or block"
        )
    if layers is None or layers > per_chunk:
        yield (
            f"model.activations_checkpoint_num_layers={show(layers)} with activations_checkpoint_granularity=full; "
            f"use 1 to {per_chunk}, the layers of one pipeline chunk"
        )


def fusions(model: ModelConfig) -> Iterator[str]:
    """Fused kernels that compute something other than the configuration says."""
    if model.bias_activation_fusion and model.activation is Activation.gelu:
        yield (
            "model.bias_activation_fusion=true computes GELU's tanh form, and model.activation=gelu is the exact one; "
            f"use model.activation=gelu_tanh{'' if model.bias else ' with model.bias=true'}, or "
            "model.bias_activation_fusion=null"
        )
    if model.bias_activation_fusion and model.activation is Activation.gelu_tanh and not model.bias:
        yield (
            "model.bias_activation_fusion=true needs model.bias=true with model.activation=gelu_tanh; "
            "use model.bias=true, or model.bias_activation_fusion=null"
        )


def refusal(asked: str, setting: str, why: str, *ways: str) -> str:
    """The message about two settings that exclude each other, and what to use instead."""
    return f"{asked} cannot be combined with {setting}: {why}; use {', or '.join(ways)}"


def indivisible(product: str, divisor: str, *ways: str) -> str:
    """The message about a number that must be a multiple of another, and what to use instead."""
    return f"{product} is not divisible by {divisor}; use {', or '.join(ways)}"


def refusals(asked: str, obstacles: Iterable[Obstacle], instead: str) -> Iterator[str]:
    """A message for each obstacle to what was asked for."""
    for setting, why, *ways in obstacles:
        yield refusal(asked, setting, why, instead, *ways)


def graph_problems(run: Resolved) -> Iterator[str]:
    """Settings that exclude requested CUDA graphs."""
    if run.model.cuda_graph_impl is CudaGraphImpl.local:
        yield from refusals("model.cuda_graph_impl=local", graph_obstacles(run), "null or none")


def compile_problems(run: Resolved) -> Iterator[str]:
    """Settings that exclude requested compilation."""
    asked, model = "model.compile=true", run.model
    if not model.compile:
        return
    if run.fp8 is not None:
        why = "it is for layers without FP8"
        if run.fp8.backend is Fp8Backend.torchao:
            why += ", and TorchAO's casts and products are compiled already"
        yield refusal(asked, "model.fp8=true", why, "model.compile=false")
    if run.config.trainer.deterministic:
        yield refusal(asked, "trainer.deterministic=true", "not tested", "model.compile=false")
    for why, settings in _NOT_COMPILED.items():
        for setting in settings.split():
            key, _, instead = setting.partition("=")
            value = getattr(model, key)
            if value and show(value) not in (instead, CudaGraphImpl.none.name):
                ways = ("model.compile=false", f"model.{setting}") if instead else ("model.compile=false",)
                yield refusal(asked, f"model.{key}={show(value)}", why, *ways)
    for feature in FEATURES:
        if feature.is_asked(model):
            why = _LOCAL_LAYERS if feature.changes_te_layers else _COMPILED_ITSELF
            yield refusal(asked, f"model.{feature.key}=true", why, "model.compile=false", f"model.{feature.key}=null")


def fused_kernel_problems(run: Resolved, *, sizes_known: bool) -> Iterator[str]:
    """Settings that exclude requested kernels; shapes are only looked at if `sizes_known`: all counts are positive."""
    for feature in FEATURES:
        if feature.is_asked(run.model):
            obstacles = feature.obstacles(run, sizes_known=sizes_known)
            yield from refusals(f"model.{feature.key}=true", obstacles, "null or false")


def gradients(model: ModelConfig) -> Iterator[str]:
    """What megatron-core's data parallelism and distributed optimizer require of each other."""
    if model.overlap_param_gather and not (uses_distributed_optimizer(model) and model.overlap_grad_reduce):
        yield (
            "model.overlap_param_gather=true needs model.use_distributed_optimizer=true and "
            "model.overlap_grad_reduce=true; set both (parallelism=dp does), or model.overlap_param_gather=false"
        )


def kernel_problems(run: Resolved, *, sizes_known: bool) -> Iterator[str]:
    """All problems of kernels and exchanges that do not depend on divisions."""
    yield from gradients(run.model)
    yield from graph_problems(run)
    yield from compile_problems(run)
    yield from fusions(run.model)
    yield from fused_kernel_problems(run, sizes_known=sizes_known)


def tensor_parallel_overlap(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """What Transformer Engine's user buffers need (`initialize_ub` of TE 2.12 and the linear layers that use them)."""
    if run.model.tp_comm_overlap:
        asked, off = "model.tp_comm_overlap=true", "model.tp_comm_overlap=false"
        yield from refusals(asked, _overlap_obstacles(run, launch), off)


def _overlap_obstacles(run: Resolved, launch: Launch | None) -> Iterator[Obstacle]:
    model, tp = run.model, run.model.tensor_model_parallel_size
    if tp == 1 or not model.sequence_parallel:
        layout = f"model.tensor_model_parallel_size={tp} and model.sequence_parallel={show(model.sequence_parallel)}"
        yield layout, "it overlaps exchanges along the sequence, and there are none", "parallelism=tp2_sp"
    local = local_layers(model)
    if not local and model.transformer_engine is False:
        local = "model.transformer_engine=false"
    if local:
        yield local, "it needs Transformer Engine's linear layers"
    if model.num_moe_experts is not None:
        yield f"model.num_moe_experts={model.num_moe_experts}", "it has no buffers for experts"
    for setting in _untested_with_overlap(run):
        yield setting, "not tested"
    if model.hidden_size % 4:
        near = one_of(multiples_near(model.hidden_size, 4))
        in_four = "it splits a layer's output in four"
        yield f"model.hidden_size={model.hidden_size}", in_four, f"model.hidden_size={near}"
    if run.fp8 is not None and (why := run.fp8.recipe.why_not(Use.tp_comm_overlap)) is not None:
        why = f"{why}, and only tensors with one scale are exchanged"
        yield f"model.fp8_recipe={run.fp8.recipe.name}", why, f"fp8={recipes_for(Use.tp_comm_overlap)}"
    if launch is not None and launch.world_size > 1 and launch.local_world_size % tp:
        why = f"it works within a node, and {launch.local_world_size} processes do not hold whole groups of this size"
        yield f"model.tensor_model_parallel_size={tp}", why


def _untested_with_overlap(run: Resolved) -> Iterator[str]:
    """Settings that no run with user buffers has had."""
    model = run.model
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(model, name)
        if size > 1:
            yield f"model.{name}={size}"
    granularity = model.activations_checkpoint_granularity
    if granularity is not None:
        yield f"model.activations_checkpoint_granularity={granularity.name}"
    if run.fp8 is not None and run.fp8.params and run.fp8.recipe.why_not(Use.fp8_params_and_tp_comm_overlap):
        yield f"model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}"
    for name in ("fp8_dot_product_attention", "first_last_layers_bf16"):
        if getattr(model, name):
            yield f"model.{name}=true"
    if model.fp8_exclude:
        yield f"model.fp8_exclude={model.fp8_exclude}"
