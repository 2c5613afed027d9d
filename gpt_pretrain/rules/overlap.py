"""Cross-field rules about communication that runs behind computation."""

from collections.abc import Iterator

from gpt_pretrain.config.derived import uses_distributed_optimizer
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.spec.recipes import recipes_for
from gpt_pretrain.spec.resolved import Resolved


def gradients(model: ModelConfig) -> Iterator[str]:
    """What megatron-core's data parallelism and distributed optimizer need from each other."""
    if model.overlap_param_gather and not (uses_distributed_optimizer(model) and model.overlap_grad_reduce):
        yield (
            "model.overlap_param_gather=true needs model.use_distributed_optimizer=true and "
            "model.overlap_grad_reduce=true; set both (parallelism=dp does), or overlap_param_gather=false"
        )
    if model.nccl_ub:
        yield (
            "model.nccl_ub=true is refused: megatron-core 0.19 sets NCCL_NVLS_ENABLE=1 for it, which turns NVLink "
            "multicast on also where the host forbids it, and goes on without registered buffers where NCCL does not "
            "take them; use false"
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
    if model.transformer_engine is False or model.fp8_emulate:
        cause = "model.fp8_emulate=true" if model.fp8_emulate else "model.transformer_engine=false"
        yield f"{asked} is done by Transformer Engine's linear layers, and {cause} excludes them; use false"
    if model.num_moe_experts is not None:
        yield f"{asked} has no buffers for experts, and model.num_moe_experts={model.num_moe_experts}; use false"
    yield from (f"{asked} is untried with {setting}; use false" for setting in _untried_with_overlap(run))
    if model.hidden_size % 4:
        yield (
            f"{asked} cuts what a layer puts out into four pieces, and model.hidden_size={model.hidden_size} is not "
            f"divisible by 4; use {model.hidden_size // 4 * 4}, {(model.hidden_size // 4 + 1) * 4} or false"
        )
    if run.fp8 is not None and (why := run.fp8.recipe.why_not("tp_comm_overlap")) is not None:
        yield (
            f"{asked} exchanges tensors with one scale, and model.fp8_recipe={run.fp8.recipe.name}: {why}; use false, "
            f"or fp8={' or '.join(recipes_for('tp_comm_overlap'))}"
        )
    if launch is not None and launch.world_size > 1 and launch.local_world_size % tp:
        yield (
            f"{asked} reaches the GPUs of one node, and the {launch.local_world_size} of a node do not hold whole "
            f"groups of model.tensor_model_parallel_size={tp}; use false"
        )


def _untried_with_overlap(run: Resolved) -> Iterator[str]:
    """What no run with user buffers has had: layers of two precisions, other exchanges beside, products done again."""
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
