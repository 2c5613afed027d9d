"""Whether `model.cuda_graph_impl=null` comes to CUDA graphs: where they were measured to gain.

They gain where a GPU computes a layer sooner than Python launches its kernels. Tensorwise scaling launches half as many
again as BF16: it looks for the largest value of what it casts.
"""

from gpt_pretrain.config.choices import CudaGraphImpl, Fp8RecipeName, PositionEmbedding
from gpt_pretrain.config.derived import matmul_parameters_per_layer
from gpt_pretrain.config.schema import Config
from gpt_pretrain.spec.fp8 import fp8_settings
from gpt_pretrain.spec.obstacles import graph_obstacles

# Operations of one layer on one microbatch, 6 for each weight and token. On an H200, graphs made GPT-2 124M 1.4 times
# as fast at 32 × 1,024 tokens (1.4e12), and no faster at 64 × 1,024 (2.8e12).
_MAX_LAYER_FLOPS = 2e12


def plan_graphs(config: Config, world_size: int, *, transformer_engine: bool) -> CudaGraphImpl | None:
    """What records graphs of the layers; None: nothing does.

    Args:
        config: A configuration that all rules let pass.
        world_size: Processes of the run: on several, replays beside each other's exchanges are untried.
        transformer_engine: Whether the layers are Transformer Engine's.
    """
    model = config.model
    if model.cuda_graph_impl is not None:
        return None if model.cuda_graph_impl is CudaGraphImpl.none else model.cuda_graph_impl
    settings = fp8_settings(model)
    tensorwise = settings is not None and settings.recipe is Fp8RecipeName.tensorwise
    layer_flops = 6 * matmul_parameters_per_layer(model) * model.micro_batch_size * model.encoder_seq_length
    # What the comparison to the bit was made with (tests/test_gpu_graphs.py): GPT's layers, all of them in FP8.
    compared = model.position_embedding_type is PositionEmbedding.learned_absolute and not (
        model.first_last_layers_bf16 or model.fp8_exclude
    )
    small = layer_flops <= _MAX_LAYER_FLOPS
    gain = transformer_engine and tensorwise and compared and small and world_size == 1
    # A kernel that is asked for and untried in graphs goes before them.
    asked = model.activation_cast_fusion or model.embedding_gradient_fusion or model.use_flash_attention
    is_free = not asked and not any(graph_obstacles(config))
    return CudaGraphImpl.local if gain and is_free else None
