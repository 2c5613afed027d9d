"""Cross-field rules about CUDA graphs: what a step that is recorded once and replayed cannot do, or was not tried with.

megatron-core 0.19 asserts some of this when the first step has run, and computes something else in other cases.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import CudaGraphImpl, Fp8RecipeName
from gpt_pretrain.config.fp8 import fp8_settings
from gpt_pretrain.config.obstacles import Obstacle, refusals
from gpt_pretrain.config.schema import Config, ModelConfig


def graph_problems(config: Config) -> Iterator[str]:
    """What `model.cuda_graph_impl` does not go with, where graphs are asked for."""
    if config.model.cuda_graph_impl is CudaGraphImpl.local:
        yield from refusals("model.cuda_graph_impl=local", graph_obstacles(config), "null or none")


def graph_obstacles(config: Config) -> Iterator[Obstacle]:
    """What graphs do not go with; beside any of it, `null` is without them (`megatron.platform_graphs`)."""
    yield from _of_layout(config.model)
    yield from _of_layers(config.model)
    yield from _of_fp8(config)


def _of_layout(model: ModelConfig) -> Iterator[Obstacle]:
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        size = getattr(model, name)
        if size > 1:
            yield f"model.{name}={size}", "graphs are for models that fit one GPU, and untried across several"
    if model.overlap_grad_reduce:
        yield "model.overlap_grad_reduce=true", "gradients that are reduced behind replays are untried"


def _of_layers(model: ModelConfig) -> Iterator[Obstacle]:
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "graphs hold Transformer Engine's layers"
    if model.num_moe_experts is not None:
        yield (
            f"model.num_moe_experts={model.num_moe_experts}",
            "a router gives each expert another number of tokens, and a graph has one shape",
        )
    granularity = model.activations_checkpoint_granularity
    if granularity is not None:
        yield (
            f"model.activations_checkpoint_granularity={granularity.name}",
            "a graph keeps what its backward pass needs",
        )
    for name in ("hidden_dropout", "attention_dropout"):
        probability = getattr(model, name)
        if probability > 0:
            yield f"model.{name}={probability}", "random numbers that are drawn in replays are untried"


def _of_fp8(config: Config) -> Iterator[Obstacle]:
    model, settings, interval = config.model, fp8_settings(config.model), config.logging.fp8_statistics_interval
    if model.fp8_emulate:
        yield "model.fp8_emulate=true", "emulated layers decide in Python what a replay would not decide again"
    if settings is not None and settings.recipe is Fp8RecipeName.delayed:
        yield (
            "model.fp8_recipe=delayed",
            "megatron-core 0.19 moves the amax history of gradients on at every layer and not at every pass",
        )
    elif settings is not None and settings.recipe is not Fp8RecipeName.tensorwise:
        yield f"model.fp8_recipe={settings.recipe.name}", "of FP8 only tensorwise scaling was tried"
    if model.fp8_dot_product_attention:
        yield (
            "model.fp8_dot_product_attention=true",
            "attention's own products have delayed scales, which replays do not move on",
        )
    if model.fp8_params:
        yield (
            "model.fp8_params=true",
            "a graph reads weights where they were recorded, and transposes of FP8 weights move",
        )
    if interval is not None:
        yield (
            f"logging.fp8_statistics_interval={interval}",
            "a replay computes its products without telling of them",
        )
