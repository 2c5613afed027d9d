"""Cross-field rules of optimisations: kernels, CUDA graphs, and communication behind computation."""

from collections.abc import Iterable, Iterator
from enum import Enum

from gpt_pretrain.config.choices import CudaGraphImpl, Fp8Backend
from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.errors import multiples_near, one_of, show
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.spec.kernels import (
    Obstacle,
    activation_cast_obstacles,
    embedding_gradient_obstacles,
    flash_attention_obstacles,
    graph_obstacles,
    qkv_rope_obstacles,
)
from gpt_pretrain.spec.products import Resolved
from gpt_pretrain.spec.recipes import local_layers, recipes_for

# Keys of `model.` that exclude compiled layers, each with a value that does not, by the reason. A model without experts
# is another one: None is offered.
_NOT_COMPILED: dict[str, dict[str, str | None]] = {
    "it compiles megatron-core's local layers": {
        "transformer_engine": "null",
        "use_flash_attention": "null",
        "apply_rope_fusion": "null",
        "fused_single_qkv_rope": "null",
        "activation_cast_fusion": "null",
        "tp_comm_overlap": "false",
        "cuda_graph_impl": "null",
        "context_parallel_size": "1",
    },
    "a layer is one graph, and this part is compiled or computed by itself": dict.fromkeys(
        (
            "bias_activation_fusion",
            "bias_dropout_add_fusion",
            "masked_softmax_fusion",
            "gradient_accumulation_fusion",
            "embedding_gradient_fusion",
        ),
        "null",
    ),
    "hooks that wait for parameters would break the graph of a layer": {"overlap_param_gather": "false"},
    # torch 2.11 traces megatron-core's exchanges along the sequence wrongly, whatever the backend: the first gradient
    # norm of a toy was 0.979 instead of 1.166, which the same modules uncompiled gave (TP 2, CPU).
    "its gradients were wrong where ranks split the sequence": {"sequence_parallel": "false"},
    "experts get a different number of tokens in each step, and a graph has fixed shapes": {"num_moe_experts": None},
    "not tested with recomputation": {"activations_checkpoint_granularity": "null"},
    "random numbers drawn in compiled layers are not tested": {"hidden_dropout": "0", "attention_dropout": "0"},
}


def refusals(asked: str, obstacles: Iterable[Obstacle], instead: str) -> Iterator[str]:
    """A problem for each obstacle to what was asked for, with what to use instead."""
    for setting, why in obstacles:
        yield f"{asked} cannot be combined with {setting}: {why}; use {instead}"


def graph_problems(run: Resolved) -> Iterator[str]:
    """Settings that exclude CUDA graphs, where graphs are requested."""
    if run.model.cuda_graph_impl is CudaGraphImpl.local:
        yield from refusals("model.cuda_graph_impl=local", graph_obstacles(run), "null or none")


def compile_problems(run: Resolved) -> Iterator[str]:
    """Settings that exclude compiled layers, where these are requested."""
    asked, model = "model.compile=true", run.model
    if not model.compile:
        return
    if run.fp8 is not None:
        why = "it is for layers without FP8"
        if run.fp8.backend is Fp8Backend.torchao:
            why += ", and TorchAO's casts and products are compiled already"
        yield from refusals(asked, [("model.fp8=true", why)], "compile=false")
    if run.config.trainer.deterministic:
        yield from refusals(asked, [("trainer.deterministic=true", "not tested")], "compile=false")
    for why, keys in _NOT_COMPILED.items():
        for key, instead in keys.items():
            value = getattr(model, key)
            shown = value.name if isinstance(value, Enum) else show(value)
            if value and shown not in (instead, CudaGraphImpl.none.name):
                ways = "compile=false" if instead is None else f"compile=false, or {key}={instead}"
                yield from refusals(asked, [(f"model.{key}={shown}", why)], ways)


def fused_kernel_problems(run: Resolved, *, sizes_known: bool) -> Iterator[str]:
    """Fused kernels requested together with settings that exclude them.

    `sizes_known` says that all counts are positive: shapes of products are divided by them.
    """
    model = run.model
    found = {
        "activation_cast_fusion": activation_cast_obstacles(run, sizes_known=sizes_known),
        "embedding_gradient_fusion": embedding_gradient_obstacles(run.config),
        "fused_single_qkv_rope": qkv_rope_obstacles(model),
        "use_flash_attention": flash_attention_obstacles(model) if sizes_known else (),
    }
    for key, obstacles in found.items():
        if getattr(model, key):
            yield from refusals(f"model.{key}=true", obstacles, "null or false")


def gradients(model: ModelConfig) -> Iterator[str]:
    """What megatron-core's data parallelism and distributed optimizer require of each other."""
    if model.overlap_param_gather and not (uses_distributed_optimizer(model) and model.overlap_grad_reduce):
        yield (
            "model.overlap_param_gather=true needs model.use_distributed_optimizer=true and "
            "model.overlap_grad_reduce=true; set both (parallelism=dp does), or overlap_param_gather=false"
        )
    if model.nccl_ub:
        yield (
            "model.nccl_ub=true is refused: megatron-core 0.19 sets NCCL_NVLS_ENABLE=1 for it, which turns NVLink "
            "multicast on even where the host forbids it, and continues without registered buffers where NCCL refuses "
            "them; use false"
        )


def tensor_parallel_overlap(run: Resolved, launch: Launch | None) -> Iterator[str]:
    """What Transformer Engine's user buffers need (`initialize_ub` of TE 2.12 and the linear layers that use them)."""
    model = run.model
    if not model.tp_comm_overlap:
        return
    asked = "model.tp_comm_overlap=true"
    tp = model.tensor_model_parallel_size
    if tp == 1 or not model.sequence_parallel:
        yield (
            f"{asked} overlaps exchanges along the sequence, and model.tensor_model_parallel_size={tp} with "
            f"model.sequence_parallel={str(model.sequence_parallel).lower()} has none; use parallelism=tp2_sp, or false"
        )
    if cause := local_layers(model) or "model.transformer_engine=false" * (model.transformer_engine is False):
        yield f"{asked} needs Transformer Engine's linear layers, and {cause} excludes them; use false"
    if model.num_moe_experts is not None:
        yield f"{asked} has no buffers for experts, and model.num_moe_experts={model.num_moe_experts}; use false"
    yield from (f"{asked} was not tested with {setting}; use false" for setting in _untested_with_overlap(run))
    if model.hidden_size % 4:
        yield (
            f"{asked} cuts a layer's output into four pieces, and model.hidden_size={model.hidden_size} is not "
            f"divisible by 4; use hidden_size={one_of(multiples_near(model.hidden_size, 4))}, or tp_comm_overlap=false"
        )
    if run.fp8 is not None and (why := run.fp8.recipe.why_not("tp_comm_overlap")) is not None:
        yield (
            f"{asked} exchanges tensors with one scale, and model.fp8_recipe={run.fp8.recipe.name}: {why}; use false, "
            f"or fp8={one_of(recipes_for('tp_comm_overlap'))}"
        )
    if launch is not None and launch.world_size > 1 and launch.local_world_size % tp:
        yield (
            f"{asked} works within a node, and {launch.local_world_size} processes per node do not hold whole groups "
            f"of model.tensor_model_parallel_size={tp}; use false"
        )


def _untested_with_overlap(run: Resolved) -> Iterator[str]:
    """Settings that no run with user buffers has had: two precisions, other exchanges beside them, recomputation."""
    model = run.model
    for name in ("pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(model, name)
        if size > 1:
            yield f"model.{name}={size}"
    granularity = model.activations_checkpoint_granularity
    if granularity is not None:
        yield f"model.activations_checkpoint_granularity={granularity.name}"
    if run.fp8 is not None and run.fp8.params and run.fp8.recipe.why_not("fp8_params with tp_comm_overlap"):
        yield f"model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}"
    for name in ("fp8_dot_product_attention", "first_last_layers_bf16"):
        if getattr(model, name):
            yield f"model.{name}=true"
    if model.fp8_exclude:
        yield f"model.fp8_exclude={model.fp8_exclude}"
