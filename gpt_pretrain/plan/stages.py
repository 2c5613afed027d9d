"""What one GPU of each pipeline stage holds: layers, embedding, LM head, parameters, and microbatches in flight."""

from collections.abc import Sequence
from dataclasses import dataclass

from gpt_pretrain.config.choices import Normalization, PositionEmbedding
from gpt_pretrain.config.derived import kv_channels, padded_vocab_size
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, FC1, FC2, PROJ, QKV, Linear
from gpt_pretrain.spec.run_spec import Layout, RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One pipeline stage, as each of its GPUs sees it."""

    index: int
    layers: tuple[int, ...]
    """Indices in the whole model."""
    linears: tuple[Linear, ...]
    """The linear layers of its layers; the LM head at the end of the last stage."""
    has_head: bool
    chunks_in_flight: int
    """Model chunks whose activations are kept at once, at most."""
    layers_per_chunk: int
    fp8_weights: int
    """Elements of weights that FP8 products read."""
    other_parameters: int
    """All other parameters: weights kept out of FP8, embeddings, LM head, biases, norms."""
    expert_weights: int
    """Of both, those of experts."""

    @property
    def num_parameters(self) -> int:
        """Parameters of one GPU."""
        return self.fp8_weights + self.other_parameters

    def optimizer_parameters(self, layout: Layout, *, sharded: bool) -> float:
        """Parameters whose optimizer states one GPU has, all of its own or a share of them."""
        if not sharded:
            return self.num_parameters
        others = self.num_parameters - self.expert_weights
        return others / layout.shards + self.expert_weights / layout.expert_shards

    @property
    def layers_in_flight(self) -> int:
        """Layers times microbatches whose activations are kept at once."""
        return self.chunks_in_flight * self.layers_per_chunk


def _chunks_in_flight(layout: Layout, stage: int) -> int:
    """Forward passes ahead of the first backward pass (megatron-core 0.19, pipeline_parallel/schedules.py).

    1F1B warms up with PP − 1 − stage microbatches, the interleaved schedule with 2 (PP − 1 − stage) + (VP − 1) PP
    chunks; one more is in flight when the first backward pass begins.
    """
    if layout.vp == 1:
        return min(layout.num_microbatches, layout.pp - stage)
    warmup = 2 * (layout.pp - 1 - stage) + (layout.vp - 1) * layout.pp
    return min(layout.num_microbatches * layout.vp, warmup + 1)


def _layer_vectors(model: ModelConfig, layer: Sequence[Linear]) -> int:
    """Biases and norm weights of one layer. Biases of row-parallel layers are whole on every TP rank."""
    norms = 2 * _norm_parameters(model)
    norms += model.qk_layernorm * 2 * kv_channels(model) * _norm_vectors(model)
    biased = {QKV: model.bias or model.qkv_bias, PROJ: model.bias, FC1: model.bias, FC2: model.bias}
    # Routers and experts have none.
    return norms + sum(linear.out_features for linear in layer if biased.get(linear.kind))


def _norm_vectors(model: ModelConfig) -> int:
    return 2 if model.normalization is Normalization.layernorm else 1


def _norm_parameters(model: ModelConfig) -> int:
    return model.hidden_size * _norm_vectors(model)


def plan_stages(spec: RunSpec) -> list[Stage]:
    """The pipeline stages of a checked configuration, in order."""
    model, layout = spec.model, spec.layout
    *in_layers, head = spec.linears
    by_layer: dict[int, list[Linear]] = {}
    for linear in in_layers:
        by_layer.setdefault(linear.layer, []).append(linear)
    layers_per_chunk = model.num_layers // (layout.pp * layout.vp)
    table = padded_vocab_size(model) // layout.tp * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size
    stages = []
    for index in range(layout.pp):
        # Chunk c of stage p holds the layers from (c · PP + p) · layers_per_chunk on.
        layers = tuple(
            (chunk * layout.pp + index) * layers_per_chunk + offset
            for chunk in range(layout.vp)
            for offset in range(layers_per_chunk)
        )
        first, last = index == 0, index == layout.pp - 1
        own = [linear for layer in layers for linear in by_layer[layer]]
        fp8 = sum(linear.num_weights for linear in own if linear.precision == "fp8")
        other = sum(linear.num_weights for linear in own) - fp8
        other += sum(_layer_vectors(model, by_layer[layer]) for layer in layers)
        if first:
            other += table
            other += positions if model.position_embedding_type is PositionEmbedding.learned_absolute else 0
        if last:
            other += _norm_parameters(model)
            # A tied head is the embedding itself where both are on one stage, and a copy of it otherwise.
            other += 0 if model.share_embeddings_and_output_weights and first else table
        stages.append(
            Stage(
                index=index,
                layers=layers,
                linears=(*own, head) if last else tuple(own),
                has_head=last,
                chunks_in_flight=_chunks_in_flight(layout, index),
                layers_per_chunk=layers_per_chunk,
                fp8_weights=fp8,
                other_parameters=other,
                expert_weights=sum(linear.num_weights for linear in own if linear.kind in (EXPERT_FC1, EXPERT_FC2)),
            )
        )
    return stages
