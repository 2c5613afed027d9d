"""`model.cuda_graph_impl=local`: layers are recorded once, and replayed from then on (`megatron.whole_layers`)."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import CudaGraphImpl, LayerName, PositionEmbedding
from gpt_pretrain.config.derived import matmul_parameters_per_layer
from gpt_pretrain.config.recipes import Use
from gpt_pretrain.features.feature import Feature, Obstacle, Resolved, RunSpec, changing_shapes
from gpt_pretrain.run.fp8 import local_layers

# Graphs gain up to this many operations of a layer on a microbatch, 6 per weight and token. On an H200 they sped up
# GPT-2 124M by 1.4 at 32 × 1,024 tokens (1.4e12), and not at 64 × 1,024 (2.8e12).
_MAX_LAYER_FLOPS = 2e12
_ONE_GPU = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1}


class CudaGraphs(Feature):
    """CUDA graphs of layers."""

    key = "cuda_graph_impl"
    asked = CudaGraphImpl.local
    off = "null or none"
    changes_te_layers = True
    not_forecast = "memory is that without CUDA graphs"

    @override
    def is_used(self, spec: RunSpec) -> bool:
        return spec.kernels.cuda_graph_impl is self.asked

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model, settings = run.model, run.fp8
        why = "graphs are for models that fit one GPU, and not tested across several"
        yield from self.needs(model, why, **_ONE_GPU)
        yield from self.needs(model, "reducing gradients during replays is not tested", overlap_grad_reduce=False)
        if model.transformer_engine is False:
            yield "model.transformer_engine=false", "graphs hold Transformer Engine's layers"
        if model.layer is not LayerName.gpt:
            yield f"model.layer={model.layer.name}", "layers of extensions are not tested in replays"
        why = "a router gives each expert a different number of tokens, and a graph has fixed shapes"
        yield from self.needs(model, why, num_moe_experts=None)
        yield from self.needs(model, "a graph keeps what backward needs", activations_checkpoint_granularity=None)
        why = "a replay keeps no attention logits"
        yield from self.needs(model, why, qk_clip=False, log_max_attention_logit=False)
        yield from self.needs(model, "layers without rope are not tested in replays", no_rope_freq=None)
        yield from self.needs(model, "sliding windows are not tested in replays", window_size=None)
        why = "random numbers drawn in replays are not tested"
        yield from self.needs(model, why, hidden_dropout=0, attention_dropout=0)
        if cause := local_layers(model):
            yield cause, "these layers decide in Python, which a replay would not repeat"
        if settings is not None and (why_not := settings.recipe.why_not(Use.cuda_graph_impl)) is not None:
            yield f"model.fp8_recipe={settings.recipe.name}", why_not
        why = "attention's own products have delayed scales, which replays do not update"
        yield from self.needs(model, why, fp8_dot_product_attention=False)
        why = "a graph reads weights at recorded addresses, and transposes of FP8 weights move"
        yield from self.needs(model, why, fp8_params=False)
        yield from changing_shapes(model)
        if (interval := run.config.logging.fp8_statistics_interval) is not None:
            yield f"logging.fp8_statistics_interval={interval}", "a replay reports none of its products"

    def choose(self, run: Resolved, *, is_free: bool) -> CudaGraphImpl | None:
        """What records graphs; None: nothing. Null chooses it where it gains and obstacles leave it, if `is_free`."""
        model = run.model
        if model.cuda_graph_impl is not None:
            return None if model.cuda_graph_impl is CudaGraphImpl.none else model.cuda_graph_impl
        recipe_gains = run.fp8 is not None and run.fp8.recipe.gains_by_graphs
        layer_flops = 6 * matmul_parameters_per_layer(model) * model.micro_batch_size * model.encoder_seq_length
        # The bitwise comparison (tests/test_gpu_graphs.py) covers GPT's layers, all in FP8, on one rank.
        compared = model.position_embedding_type is PositionEmbedding.learned_absolute and not (
            model.first_last_layers_bf16 or model.fp8_exclude
        )
        gains = is_free and recipe_gains and compared and layer_flops <= _MAX_LAYER_FLOPS
        return CudaGraphImpl.local if gains and not any(self.obstacles(run, sizes_known=True)) else None
