"""Cross-field rules about CUDA graphs: what a step that is recorded once and replayed cannot do, and where it wins.

megatron-core 0.19 asserts some of the former when the first step has run, and computes something else in other cases.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import CudaGraphImpl, Fp8RecipeName
from gpt_pretrain.config.derived import matmul_parameters_per_layer
from gpt_pretrain.config.fp8 import fp8_settings
from gpt_pretrain.config.schema import Config

_SIZES = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
# GPT-2 small's layer and microbatch, which tensorwise scaling computes 1.37 times as fast with graphs on an H200, as
# the host is what it waits for without (benchmarks/gpt2_124m_graphs_h200_2026-11-22.md).
_WEIGHTS_OF_A_LAYER, _TOKENS = 12 * 768**2, 32 * 1024


def _obstacles(config: Config) -> Iterator[tuple[str, str]]:
    """Settings that graphs do not go with, and why."""
    model = config.model
    for name in _SIZES:
        size = getattr(model, name)
        if size > 1:
            yield f"model.{name}={size}", "graphs are for models that fit one GPU, and untried across several"
    if model.overlap_grad_reduce:
        yield "model.overlap_grad_reduce=true", "gradients that are reduced behind replays are untried"
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "graphs hold Transformer Engine's layers"
    if model.fp8_emulate:
        yield "model.fp8_emulate=true", "emulated layers decide in Python what a replay would not decide again"
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
    settings = fp8_settings(model)
    if settings is not None and settings.recipe is Fp8RecipeName.delayed:
        yield (
            "model.fp8_recipe=delayed",
            "megatron-core 0.19 moves the amax history of gradients on at every layer and not at every pass",
        )
    if model.fp8_params:
        yield (
            "model.fp8_params=true",
            "a graph reads weights where they were recorded, and transposes of FP8 weights move",
        )
    interval = config.logging.fp8_statistics_interval
    if interval is not None:
        yield (
            f"logging.fp8_statistics_interval={interval}",
            "a replay computes its products without telling of them",
        )


def graph_problems(config: Config) -> Iterator[str]:
    """What `model.cuda_graph_impl` does not go with."""
    if config.model.cuda_graph_impl is CudaGraphImpl.local:
        for setting, why in _obstacles(config):
            yield f"model.cuda_graph_impl=local does not go with {setting}: {why}; use null or none"


def graphs_pay(config: Config) -> bool:
    """Whether the host would launch a layer's kernels more slowly than a GPU computes them, as far as was measured.

    That is with tensorwise scaling, whose layers launch the most kernels, and no more work in a layer and microbatch
    than was measured. Narrower layers are untried.
    """
    model, settings = config.model, fp8_settings(config.model)
    weights, tokens = matmul_parameters_per_layer(model), model.micro_batch_size * model.encoder_seq_length
    return (
        settings is not None
        and settings.recipe is Fp8RecipeName.tensorwise
        and weights >= _WEIGHTS_OF_A_LAYER
        and weights * tokens <= _WEIGHTS_OF_A_LAYER * _TOKENS
        and not any(_obstacles(config))
    )
