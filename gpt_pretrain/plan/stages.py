"""What one GPU of each pipeline stage holds: layers, parameters, microbatches in flight, and activations.

The activations that a layer's forward pass keeps were read from what the autograd functions save: Transformer Engine
2.12's `_LayerNormLinear`, `_Linear` and `FusedAttnFunc`, megatron-core 0.19's `GeLUFunction`, `SwiGLUFunction` and its
local `DotProductAttention`. In FP8 a linear layer keeps its input as one byte per value, in the layout that the weight
gradient reads; the inputs of norms, attention and the activation function stay in BF16.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpt_pretrain.config.choices import Activation, Normalization, PositionEmbedding
from gpt_pretrain.config.derived import (
    kv_channels,
    layers_with_value_embeddings,
    num_query_groups,
    padded_vocab_size,
    uses_distributed_optimizer,
)
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.qkv_rope import QkvRope
from gpt_pretrain.megatron.core_fields import Dtype, params_dtype
from gpt_pretrain.plan.experts import token_dispatch
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.platform import BLACKWELL, Platform
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, FC1, FC2, PROJ, QKV, Linear, linears
from gpt_pretrain.run.run_spec import Layout, RunSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One pipeline stage, as each of its GPUs sees it."""

    index: int
    layers: Mapping[int, list[Linear]]
    """Linear layers by the index of their transformer layer in the whole model."""
    head: Linear | None
    """The LM head, on the last stage."""
    chunks_in_flight: int
    """Maximum number of model chunks whose activations are kept at once."""
    layers_per_chunk: int
    num_parameters: int
    """Parameters of one GPU: weights, biases, norms, embeddings, LM head."""

    @property
    def linears(self) -> list[Linear]:
        """The linear layers of its transformer layers."""
        return [linear for layer in self.layers.values() for linear in layer]

    @property
    def fp8_weights(self) -> int:
        """Elements of weights that FP8 products read."""
        return sum(linear.num_weights for linear in self.linears if linear.precision == "fp8")

    @property
    def expert_weights(self) -> int:
        """Parameters of experts."""
        return sum(linear.num_weights for linear in self.linears if linear.kind in (EXPERT_FC1, EXPERT_FC2))

    def optimizer_parameters(self, spec: RunSpec) -> float:
        """Parameters whose optimizer states one GPU holds: all of its own, or its shard of them."""
        if not uses_distributed_optimizer(spec.model):
            return self.num_parameters
        others = self.num_parameters - self.expert_weights
        return others / spec.layout.shards + self.expert_weights / spec.layout.expert_shards


def _chunks_in_flight(layout: Layout, stage: int) -> int:
    """Forward passes before the first backward pass (megatron-core 0.19, pipeline_parallel/schedules.py).

    1F1B warms up with PP − 1 − stage microbatches, the interleaved schedule with 2 (PP − 1 − stage) + (VP − 1) PP
    chunks; one more is in flight when the first backward pass begins.
    """
    if layout.vp == 1:
        return min(layout.num_microbatches, layout.pp - stage)
    warmup = 2 * (layout.pp - 1 - stage) + (layout.vp - 1) * layout.pp
    return min(layout.num_microbatches * layout.vp, warmup + 1)


def _norm_parameters(model: ModelConfig, width: int) -> int:
    return width * (2 if model.normalization is Normalization.layernorm else 1)


def layer_parameters(model: ModelConfig, layer: Sequence[Linear]) -> int:
    """Weights, biases and norms of one layer. Biases of row-parallel layers are whole on every TP rank."""
    norms = 2 * _norm_parameters(model, model.hidden_size)
    norms += model.qk_layernorm * 2 * _norm_parameters(model, kv_channels(model))
    # Routers and experts have no biases.
    biased = (QKV, PROJ, FC1, FC2) if model.bias else (QKV,) if model.qkv_bias else ()
    biases = sum(linear.out_features for linear in layer if linear.kind in biased)
    return sum(linear.num_weights for linear in layer) + norms + biases


def _stage_parameters(model: ModelConfig, layers: Iterable[Sequence[Linear]], *, first: bool, last: bool) -> int:
    """Parameters of one tensor parallel rank of a pipeline stage."""
    table = padded_vocab_size(model) // model.tensor_model_parallel_size * model.hidden_size
    positions = model.max_position_embeddings * model.hidden_size
    num_parameters = sum(layer_parameters(model, layer) for layer in layers)
    if first:
        num_parameters += table
        num_parameters += positions if model.position_embedding_type is PositionEmbedding.learned_absolute else 0
        values = num_query_groups(model) * kv_channels(model) // model.tensor_model_parallel_size
        num_parameters += len(layers_with_value_embeddings(model)) * padded_vocab_size(model) * values
    if last:
        num_parameters += _norm_parameters(model, model.hidden_size)
        # A tied head is the embedding itself where both are on one stage, and a copy of it otherwise.
        num_parameters += 0 if model.share_embeddings_and_output_weights and first else table
    return num_parameters


def _by_layer(linears: Iterable[Linear]) -> tuple[dict[int, list[Linear]], Linear]:
    """The linear layers of each transformer layer, and the LM head."""
    *in_layers, head = linears
    by_layer: dict[int, list[Linear]] = {}
    for linear in in_layers:
        by_layer.setdefault(linear.layer, []).append(linear)
    return by_layer, head


def count_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model; tied embeddings count once."""
    whole = replace(
        model,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )
    layers, _ = _by_layer(linears(whole, None))
    return _stage_parameters(whole, layers.values(), first=True, last=True)


def plan_stages(spec: RunSpec) -> list[Stage]:
    """The pipeline stages of a checked configuration, in order."""
    model, layout = spec.model, spec.layout
    by_layer, head = _by_layer(spec.linears)
    layers_per_chunk = model.num_layers // (layout.pp * layout.vp)
    stages = []
    for index in range(layout.pp):
        # Chunk c of stage p begins with layer (c · PP + p) · layers_per_chunk.
        firsts = [(chunk * layout.pp + index) * layers_per_chunk for chunk in range(layout.vp)]
        layers = {layer: by_layer[layer] for start in firsts for layer in range(start, start + layers_per_chunk)}
        first, last = index == 0, index == layout.pp - 1
        stages.append(
            Stage(
                index=index,
                layers=layers,
                head=head if last else None,
                chunks_in_flight=_chunks_in_flight(layout, index),
                layers_per_chunk=layers_per_chunk,
                num_parameters=_stage_parameters(model, layers.values(), first=first, last=last),
            )
        )
    return stages


def per_layer[Value](stage: Stage, compute: Callable[[list[Linear]], Value]) -> dict[int, Value]:
    """A value for each layer, computed once for all layers whose products run in the same precisions."""
    kinds = {
        index: tuple((each.precision, each.wgrad_precision) for each in own) for index, own in stage.layers.items()
    }
    of_kind = {kinds[index]: own for index, own in stage.layers.items()}
    computed = {kind: compute(own) for kind, own in of_kind.items()}
    return {index: computed[kind] for index, kind in kinds.items()}


def element_bytes(spec: RunSpec) -> int:
    """Bytes of a value in the run's precision."""
    return 4 if params_dtype(spec) is Dtype.fp32 else 2


def held_fp8(spec: RunSpec) -> Fp8Settings | None:
    """The FP8 in which layers hold values. None in emulation too, which holds rounded values in the run's precision."""
    return None if spec.fp8 is None or spec.fp8.emulate else spec.fp8


def keeps_transposes(settings: Fp8Settings, platform: Platform) -> bool:
    """Whether FP8 products take one layout only, so that layers keep a transposed copy of each operand.

    Hopper's do (TE 2.12, `is_non_tn_fp8_gemm_supported`), and TorchAO's on every GPU. Block scales need two copies
    everywhere.
    """
    capability = platform.compute_capability
    return settings.in_local_layers or capability is None or capability < BLACKWELL


def input_bytes(spec: RunSpec, linear: Linear) -> float:
    """Bytes of one value of the input that a linear layer keeps."""
    fp8 = held_fp8(spec)
    if fp8 is None or linear.wgrad_precision != "fp8":
        return element_bytes(spec)
    return 1 + fp8.recipe.numerics.activation_scale_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """Bytes that one layer keeps of one microbatch, on one GPU."""

    layer_input: float
    """All that a recomputed layer keeps."""
    attention_block: float
    """Norm, projections, q, k, v and the output of attention."""
    attention_core: float
    """What selective recomputation does not keep."""
    mlp: float
    passing: float
    """What passing through the layer needs on top at its peak: backward, or forward with small experts."""

    @property
    def kept(self) -> float:
        """Without recomputation."""
        return self.layer_input + self.attention_block + self.attention_core + self.mlp


def layer_activations(spec: RunSpec, layer: Sequence[Linear]) -> LayerActivations:
    """What one layer keeps. `layer` lists its linear layers in forward order, experts with their rows (`on_rank`)."""
    qkv, proj, *router, fc1, fc2 = layer
    model, kernels, fp8 = spec.model, spec.kernels, held_fp8(spec)
    tp, element = model.tensor_model_parallel_size, element_bytes(spec)
    tokens, local = qkv.tokens, qkv.local_tokens
    heads, width = model.num_attention_heads // tp, kv_channels(model)
    residual = local * model.hidden_size * element
    # Mean (LayerNorm only) and inverse deviation of each token in fp32.
    norm_statistics = local * 4 * (2 if model.normalization is Normalization.layernorm else 1)
    dropout_mask = local * model.hidden_size * (model.hidden_dropout > 0)

    # Rotary embeddings, or a layout that attention cannot read, give q, k and v tensors of their own, and the
    # projection's output is freed: there is one copy in any case.
    fp8_attention = fp8 is not None and fp8.dot_product_attention
    projected = tokens * (heads + 2 * num_query_groups(model) // tp) * width * (1 if fp8_attention else element)
    attended = tokens * heads * width
    # The norms of queries and keys keep their inputs and a number for each, or the kernel that also rotates the
    # projection's output.
    if kernels.features[QkvRope.key]:
        normalized = model.qk_layernorm * tokens * (heads + 2 * num_query_groups(model) // tp) * width * element
    else:
        normalized = model.qk_layernorm * tokens * (heads + num_query_groups(model) // tp) * (width * element + 4)
    # Attention keeps its output; the projection's input is the same tensor, or an FP8 copy beside it.
    projection_input = attended * input_bytes(spec, proj)
    shares_output = fp8 is None or proj.wgrad_precision != "fp8"
    if kernels.transformer_engine or kernels.torch_attention:
        softmax = 4 * heads * tokens
    else:
        # [b, heads, s, s]: the softmax in fp32 and the factor of v; the fused kernel keeps only the latter.
        per_score = element + (0 if kernels.masked_softmax_fusion or element == 4 else 4)
        softmax = heads * tokens * model.encoder_seq_length * per_score
    core = softmax + (0 if shares_output else attended * (1 if fp8_attention else element))

    # With experts: a row for each token and each of its experts.
    rows = fc1.tokens * fc1.count
    inner = rows * fc2.in_features
    fc1_output = rows * fc1.out_features * element
    fc1_input = (rows if router else local) * model.hidden_size * input_bytes(spec, fc1)
    # The router's input, whose copies are the experts' rows, and its scores and weights in fp32.
    routed = local * (model.hidden_size * element + 4 * 4 * router[0].out_features) if router else 0
    # The unfused gate keeps silu(x) beside x and its factor.
    gate = inner * element if model.activation is Activation.swiglu and not kernels.bias_activation_fusion else 0
    kept = inner * input_bytes(spec, fc2)
    return LayerActivations(
        layer_input=residual,
        attention_block=local * model.hidden_size * input_bytes(spec, qkv)
        + norm_statistics
        + projected
        + normalized
        + projection_input
        + dropout_mask,
        attention_core=core,
        mlp=residual + fc1_input + routed + norm_statistics + fc1_output + gate + kept + dropout_mask,
        # The activation's gradient exists beside its kept input, and two gradients of the residual stream: before and
        # after the layer. Attention's backward pass, cuDNN's or FlashAttention-4's with gradients in fp32, takes less
        # than the MLP has freed by then.
        passing=(passing_bytes(spec, layer) if router else fc1_output) + 2 * residual,
    )


def passing_bytes(spec: RunSpec, layer: Sequence[Linear]) -> float:
    """Bytes that a layer of experts needs at its peak on top of what it keeps, without the residual stream.

    Three moments compete. At the end of the experts' forward pass the callers still hold the rows as sent, received
    and, before a cast, sorted and padded, and the activation's output in the run's precision. Before the experts'
    backward pass the gradient of all rows is received and sorted. In it, the activation's gradients take the place of
    its kept output.
    """
    *_, fc1, fc2 = layer
    way, element, hidden = token_dispatch(spec.model, layer), element_bytes(spec), spec.model.hidden_size
    rows = way.received
    row = rows * hidden * element
    inner, cast = rows * fc2.in_features, fc1.precision == "fp8"
    # BF16 keeps the experts' input itself.
    held = way.sent * hidden * element
    held += row * (way.exchanged and (way.sorted or cast)) + row * (way.sorted and cast)
    # The result exists beside its copy without padding, and later beside its copy in the order of the way back.
    forward = held + max(row * (1 + 2 * way.padded) + (inner * element if cast else 0), row * (1 + way.sorted))
    received = 2 * row
    # FP8 reads the gradient from two copies of one byte per value.
    activation = inner * element + rows * fc1.out_features * element - inner * input_bytes(spec, fc2)
    output = row + (2 * rows * hidden if cast else 0) + inner * element
    return max(forward, received, activation, output)
