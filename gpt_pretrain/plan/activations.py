"""What the forward pass of a layer leaves in memory for its backward pass, on one GPU, in bytes.

Read from what the autograd functions save: Transformer Engine 2.12's `_LayerNormLinear` and `_Linear` (module/), its
`FusedAttnFunc` (attention/dot_product_attention/backends.py), megatron-core 0.19's `GeLUFunction` and
`SwiGLUFunction` (fusions/) and its local `DotProductAttention`. In FP8 a linear layer keeps its input as one byte per
value, in the layout that the weight gradient reads, and no longer in BF16; what feeds norms, attention and the
activation function stays in BF16.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from gpt_pretrain.config.choices import Activation, Normalization
from gpt_pretrain.config.derived import kv_channels, num_query_groups
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.plan.experts import passing_bytes
from gpt_pretrain.spec.products import Linear
from gpt_pretrain.spec.recipes import Fp8Settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """How activations are stored."""

    element: int
    """Bytes of a value in the run's precision: 2 or 4."""
    fp8: Fp8Settings | None
    """FP8 as Transformer Engine and TorchAO store it; None also where it is emulated, in the run's precision."""
    fused_attention: bool
    """Attention keeps a number for each token and head; otherwise the softmax of all scores."""
    fused_activation: bool
    fused_softmax: bool

    def input_bytes(self, linear: Linear) -> float:
        """Bytes of one value of a linear layer's kept input."""
        if self.fp8 is None or linear.wgrad_precision != "fp8":
            return self.element
        return 1 + self.fp8.recipe.activation_scale_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerActivations:
    """Bytes that one layer keeps of one microbatch, on one GPU."""

    layer_input: float
    """What a recomputed layer keeps instead of all this."""
    attention_block: float
    """Norm, projections, q, k, v and the output of attention."""
    attention_core: float
    """What selective recomputation of attention does without."""
    mlp: float
    passing: float
    """What passing through the layer needs on top at its peak: backward, or forward in front of small experts."""

    @property
    def kept(self) -> float:
        """Without recomputation."""
        return self.layer_input + self.attention_block + self.attention_core + self.mlp

    @property
    def kept_selective(self) -> float:
        """With attention recomputed."""
        return self.kept - self.attention_core


def layer_activations(model: ModelConfig, layer: Sequence[Linear], storage: Storage) -> LayerActivations:
    """What one layer keeps.

    Args:
        model: The checked configuration.
        layer: Its linear layers in forward order, experts with the rows that count (`experts.on_rank`).
        storage: How activations are stored.
    """
    qkv, proj, *router, fc1, fc2 = layer
    tp, element = model.tensor_model_parallel_size, storage.element
    tokens, local = qkv.tokens, qkv.local_tokens
    heads, width = model.num_attention_heads // tp, kv_channels(model)
    residual = local * model.hidden_size * element
    # Mean (LayerNorm only) and inverse deviation of each token in fp32.
    norm_statistics = local * 4 * (2 if model.normalization is Normalization.layernorm else 1)
    dropout_mask = local * model.hidden_size * (model.hidden_dropout > 0)

    # Rotary embeddings and a layout that attention cannot read both make q, k and v tensors of their own, and the
    # projection's output is let go: one copy of them in any case.
    fp8_attention = storage.fp8 is not None and storage.fp8.dot_product_attention
    projected = tokens * (heads + 2 * num_query_groups(model) // tp) * width * (1 if fp8_attention else element)
    attended = tokens * heads * width
    # Their norms keep what they were given.
    normalised = model.qk_layernorm * tokens * (heads + num_query_groups(model) // tp) * (width * element + 4)
    # Attention keeps its output; the projection's input is the same tensor, or an FP8 copy beside it.
    projection_input = attended * storage.input_bytes(proj)
    shares_output = storage.fp8 is None or proj.wgrad_precision != "fp8"
    if storage.fused_attention:
        softmax = 4 * heads * tokens
    else:
        # [b, heads, s, s]: the softmax in fp32 and what is multiplied with v; the fused kernel keeps the latter alone.
        per_score = element + (0 if storage.fused_softmax or element == 4 else 4)
        softmax = heads * tokens * model.encoder_seq_length * per_score
    core = softmax + (0 if shares_output else attended * (1 if fp8_attention else element))

    # Of experts: a row for each token and each of its experts.
    rows = fc1.tokens * fc1.count
    inner = rows * fc2.in_features
    fc1_output = rows * fc1.out_features * element
    fc1_input = (rows if router else local) * model.hidden_size * storage.input_bytes(fc1)
    # The router's input, which the experts' rows are copies of, and its scores and weights in fp32.
    routed = local * (model.hidden_size * element + 4 * 4 * router[0].out_features) if router else 0
    # The unfused gate keeps silu(x) beside x and its factor.
    gate = inner * element if model.activation is Activation.swiglu and not storage.fused_activation else 0
    kept = storage.input_bytes(fc2)
    passing = passing_bytes(model, layer, element=element, input_bytes=kept) if router else fc1_output
    return LayerActivations(
        layer_input=residual,
        attention_block=local * model.hidden_size * storage.input_bytes(qkv)
        + norm_statistics
        + projected
        + normalised
        + projection_input
        + dropout_mask,
        attention_core=core,
        mlp=residual
        + fc1_input
        + routed
        + norm_statistics
        + fc1_output
        + gate
        + inner * storage.input_bytes(fc2)
        + dropout_mask,
        # The activation's gradient stands beside its kept input; the gradient of the residual stream before and after.
        # Attention's backward pass, cuDNN's or FlashAttention-4's with gradients in fp32, takes less than what the MLP
        # has let go of by then.
        passing=passing + 2 * residual,
    )
