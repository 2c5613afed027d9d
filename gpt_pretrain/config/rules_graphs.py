"""Cross-field rules about CUDA graphs: what a step that is recorded once and replayed cannot do.

megatron-core 0.19 asserts some of this when the first step has run, and computes something else in other cases.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import CudaGraphImpl, Fp8RecipeName
from gpt_pretrain.config.fp8 import fp8_settings
from gpt_pretrain.config.schema import Config

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def graph_problems(config: Config) -> Iterator[str]:
    """What `model.cuda_graph_impl` does not go with."""
    model = config.model
    if model.cuda_graph_impl is not CudaGraphImpl.local:
        return

    def refused(setting: str, why: str) -> str:
        return f"model.cuda_graph_impl=local does not go with {setting}: {why}; use null or none"

    for name in _SIZES:
        size = getattr(model, name)
        if size > 1:
            yield refused(f"model.{name}={size}", "graphs are for models that fit one GPU, and untried across several")
    if model.transformer_engine is False:
        yield refused("model.transformer_engine=false", "graphs hold Transformer Engine's layers")
    if model.fp8_emulate:
        yield refused("model.fp8_emulate=true", "emulated layers decide in Python what a replay would not decide again")
    if model.num_moe_experts is not None:
        yield refused(
            f"model.num_moe_experts={model.num_moe_experts}",
            "a router gives each expert another number of tokens, and a graph has one shape",
        )
    granularity = model.activations_checkpoint_granularity
    if granularity is not None:
        yield refused(
            f"model.activations_checkpoint_granularity={granularity.name}",
            "a graph keeps what its backward pass needs",
        )
    settings = fp8_settings(model)
    if settings is not None and settings.recipe is Fp8RecipeName.delayed:
        yield refused(
            "model.fp8_recipe=delayed",
            "megatron-core 0.19 moves the amax history of gradients on at every layer and not at every pass",
        )
    if model.fp8_params:
        yield refused(
            "model.fp8_params=true",
            "a graph reads weights where they were recorded, and transposes of FP8 weights move",
        )
    interval = config.logging.fp8_statistics_interval
    if interval is not None:
        yield refused(
            f"logging.fp8_statistics_interval={interval}",
            "a replay computes its products without telling of them",
        )
