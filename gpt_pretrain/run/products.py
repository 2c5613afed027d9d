"""Every matrix product of a training step on one rank: its shape, and whether it runs in FP8 and why.

Pure arithmetic on the configuration; `Resolved` is all that follows from it without a machine. The rules check the
shapes, `gpt_pretrain.plan` prints them, and a run's proof of FP8 compares them with the live modules.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from gpt_pretrain.config.choices import AUTO, Activation
from gpt_pretrain.config.derived import (
    attended_tokens,
    expert_tensor_parallel_size,
    ffn_hidden_size,
    kv_channels,
    moe_ffn_hidden_size,
    num_query_groups,
    padded_vocab_size,
)
from gpt_pretrain.config.errors import counted
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.run.fp8 import Fp8Settings, resolve_fp8

# megatron-core's names of a transformer layer's linear layers, in the order of the forward pass.
QKV, PROJ, FC1, FC2 = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
# In place of the last two with a mixture of experts.
ROUTER, EXPERT_FC1, EXPERT_FC2 = "mlp.router", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"

_TOO_SMALL = f"too small to gain (model.fp8_exclude={AUTO})"

# Logits in a chunk: 1 GiB in BF16. Smaller chunks are slower products, and each reads the main gradient.
_CHUNK_LOGITS = 2**29


@dataclass(frozen=True, kw_only=True, slots=True)
class Linear:
    """A linear layer y = x·wᵀ of the model, as one tensor parallel rank computes it."""

    module: str
    """Name in the whole model, layers counted over all pipeline stages: "decoder.layers.3.mlp.linear_fc1"."""
    layer: int
    """Index of the transformer layer; -1 for the LM head."""
    kind: str
    """Name within the layer: "mlp.linear_fc1"; "output_layer" for the LM head."""
    out_features: int
    """Rows of the rank's weight."""
    in_features: int
    """Columns of the rank's weight."""
    count: int
    """Weights of this shape on the rank: its experts, which share one module but not their rows."""
    tokens: int
    """Rows of x in the product: microbatch · sequence / CP, gathered over the TP ranks that split the sequence. For an
    expert the mean, as if the router spread tokens evenly."""
    local_tokens: int
    """Rows of x that the rank holds and casts: tokens / TP where the input is split along the sequence."""
    precision: str
    """Of forward and dgrad: "fp8" or "high"."""
    wgrad_precision: str
    """Of wgrad."""
    reason: str
    """Why it is not in FP8; empty if it is."""

    @property
    def can_be_fp8(self) -> bool:
        """Whether FP8 is for it at all: not for the LM head, nor for routers."""
        return self.layer >= 0 and self.kind != ROUTER

    @property
    def is_small(self) -> bool:
        """Whether it is kept out as too small to gain."""
        return self.reason == _TOO_SMALL

    @property
    def num_weights(self) -> int:
        """Elements of the rank's weights."""
        return self.count * self.out_features * self.in_features


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm:
    """One product [m, k] · [k, n]."""

    linear: Linear
    phase: str
    """"forward" (x·wᵀ), "dgrad" (dy·w) or "wgrad" (dyᵀ·x)."""
    m: int
    n: int
    k: int
    fp8: bool

    @property
    def flops(self) -> int:
        """Multiplications and additions, for all weights of the layer."""
        return 2 * self.m * self.n * self.k * self.linear.count


type _Shape = dict[str, int]


def _shape(rows: int, columns: int, tokens: int, *, local_tokens: int, count: int = 1) -> _Shape:
    """What a kind of linear layer has in common in all layers; see `Linear`."""
    sizes = {"out_features": rows, "in_features": columns, "count": count}
    return {**sizes, "tokens": tokens, "local_tokens": local_tokens}


def _mlp_shapes(model: ModelConfig, tokens: int, split: int) -> dict[str, _Shape]:
    """Shapes of the MLP, or of the router and a rank's experts."""
    tp, hidden, gated = model.tensor_model_parallel_size, model.hidden_size, model.activation is Activation.swiglu
    if model.num_moe_experts is None:
        inner = ffn_hidden_size(model) // tp
        fc1 = _shape((1 + gated) * inner, hidden, tokens, local_tokens=split)
        return {FC1: fc1, FC2: _shape(hidden, inner, tokens, local_tokens=tokens)}
    experts, etp = model.num_moe_experts, expert_tensor_parallel_size(model)
    ep = model.expert_model_parallel_size
    inner = moe_ffn_hidden_size(model) // etp
    # Each rank routes its part of the sequence; the ranks that share an expert compute all tokens routed to it.
    rows = max(1, tokens // tp * etp * ep * model.moe_router_topk // experts)
    return {
        ROUTER: _shape(experts, hidden, split, local_tokens=split),
        EXPERT_FC1: _shape((1 + gated) * inner, hidden, rows, local_tokens=rows, count=experts // ep),
        EXPERT_FC2: _shape(hidden, inner, rows, local_tokens=rows, count=experts // ep),
    }


def linears(model: ModelConfig, settings: Fp8Settings | None) -> Iterator[Linear]:
    """The linear layers of the whole model in forward order, each with one tensor parallel rank's shapes."""
    tp = model.tensor_model_parallel_size
    tokens = model.micro_batch_size * model.encoder_seq_length // model.context_parallel_size
    split = tokens // tp if model.sequence_parallel else tokens
    attention = model.num_attention_heads * kv_channels(model)
    projected = attention + 2 * num_query_groups(model) * kv_channels(model)
    hidden = model.hidden_size
    shapes = {
        QKV: _shape(projected // tp, hidden, tokens, local_tokens=split),
        PROJ: _shape(hidden, attention // tp, tokens, local_tokens=tokens),
        **_mlp_shapes(model, tokens, split),
    }
    for layer in range(model.num_layers):
        for kind, shape in shapes.items():
            size = shape["out_features"], shape["in_features"]
            reason = "model.fp8=false" if settings is None else why_not_fp8(model, settings, layer, kind, size)
            fp8 = not reason
            yield Linear(
                module=f"decoder.layers.{layer}.{kind}",
                layer=layer,
                kind=kind,
                **shape,
                precision="fp8" if fp8 else "high",
                wgrad_precision="fp8" if fp8 and settings is not None and settings.wgrad else "high",
                reason=reason,
            )
    yield Linear(
        module="output_layer",
        layer=-1,
        kind="output_layer",
        **_shape(padded_vocab_size(model) // tp, hidden, tokens, local_tokens=split),
        precision="high",
        wgrad_precision="high",
        reason="the LM head stays out of FP8",
    )


def why_not_fp8(model: ModelConfig, settings: Fp8Settings, layer: int, kind: str, size: tuple[int, int]) -> str:
    """Why a linear layer, whose weight has this size on a rank, is kept out of FP8; empty: it is not."""
    if kind == ROUTER:
        return "routers stay out of FP8"
    if settings.experts_left_out and kind in (EXPERT_FC1, EXPERT_FC2):
        return "one BF16 kernel computes all experts (model.moe_grouped_kernel)"
    if layer < settings.num_layers_at_start_in_bf16:
        return f"first {counted(settings.num_layers_at_start_in_bf16, 'layer')} (model.num_layers_at_start_in_bf16)"
    if layer >= model.num_layers - settings.num_layers_at_end_in_bf16:
        return f"last {counted(settings.num_layers_at_end_in_bf16, 'layer')} (model.num_layers_at_end_in_bf16)"
    if settings.excludes(f"decoder.layers.{layer}.{kind}"):
        return "model.fp8_exclude"
    is_small = settings.exclude_small and settings.recipe.is_small(*size)
    return _TOO_SMALL if is_small else ""


def chunk_tokens(num_tokens: int, num_columns: int) -> int:
    """Tokens that go through the LM head together in a linear loss (`megatron.loss`): a power of two, or all."""
    return min(num_tokens, 1 << (max(1, _CHUNK_LOGITS // num_columns).bit_length() - 1))


def _attention_flops(model: ModelConfig, attended: float | None = None) -> float:
    """Operations of causal attention's two products, in one layer and one forward pass of a rank's microbatch."""
    tokens = model.micro_batch_size * model.encoder_seq_length // model.context_parallel_size
    width = model.num_attention_heads // model.tensor_model_parallel_size * kv_channels(model)
    return 2.0 * tokens * attended_tokens(model, model.encoder_seq_length if attended is None else attended) * width


def gemms(linear: Linear) -> tuple[Gemm, Gemm, Gemm]:
    """The three products of a linear layer: forward, dgrad and wgrad."""
    tokens, out_features, in_features = linear.tokens, linear.out_features, linear.in_features
    fp8, wgrad_fp8 = linear.precision == "fp8", linear.wgrad_precision == "fp8"
    return (
        Gemm(linear=linear, phase="forward", m=tokens, n=out_features, k=in_features, fp8=fp8),
        Gemm(linear=linear, phase="dgrad", m=tokens, n=in_features, k=out_features, fp8=fp8),
        Gemm(linear=linear, phase="wgrad", m=out_features, n=in_features, k=tokens, fp8=wgrad_fp8),
    )


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """What follows from a configuration without a machine, even if it breaks rules."""

    config: Config
    fp8: Fp8Settings | None
    """None: the run has no FP8."""
    launch: Launch | None = None
    """The processes that it asks for; None: nothing depends on the world size."""

    @property
    def model(self) -> ModelConfig:
        """The section `model` of the configuration."""
        return self.config.model

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """The model's linear layers in forward order, the LM head last; sizes must divide as the layout asks."""
        return tuple(linears(self.model, self.fp8))

    @property
    def kept_out(self) -> tuple[Linear, ...]:
        """The linear layers that settings keep out of FP8, in forward order."""
        if self.fp8 is None:
            return ()
        return kept_out_of(self.linears)

    @property
    def fp8_flops_share(self) -> float:
        """Share of a step's matrix operations, attention and LM head included, that run in FP8."""
        return self.fp8_flops_share_of(self.linears)

    def fp8_flops_share_of(self, linears: Iterable[Linear], attended: float | None = None) -> float:
        """The same if these were the model's linear layers, and `attended` as of `config.derived.flops_per_token`."""
        total = attention = 3.0 * self.model.num_layers * _attention_flops(self.model, attended)
        in_fp8 = attention if self.fp8 is not None and self.fp8.dot_product_attention else 0.0
        for linear in linears:
            for gemm in gemms(linear):
                total += gemm.flops
                in_fp8 += gemm.flops if gemm.fp8 else 0
        return in_fp8 / total


def kept_out_of(linears: Iterable[Linear]) -> tuple[Linear, ...]:
    """The linear layers among these that are kept out of FP8, and that FP8 is for."""
    return tuple(linear for linear in linears if linear.can_be_fp8 and linear.precision != "fp8")


def describe_kept_out(run: Resolved) -> list[str]:
    """What settings keep out of FP8, one phrase per reason; another one if `AUTO` finds nothing."""
    by_reason: dict[str, list[Linear]] = {}
    for linear in run.kept_out:
        by_reason.setdefault(linear.reason, []).append(linear)
    phrases = [
        f"{len(linears)} linear layers kept out ({', '.join(shapes_of(linears))}; {reason})"
        for reason, linears in by_reason.items()
    ]
    if run.fp8 is not None and run.fp8.exclude_small and _TOO_SMALL not in by_reason:
        phrases.append(f"no linear layer {_TOO_SMALL}")
    return phrases


def shapes_of(linears: Iterable[Linear]) -> list[str]:
    """Each kind of layer once, with the shape of a rank's weight: "mlp.linear_fc2 4096×14336"."""
    return list(dict.fromkeys(f"{each.kind} {each.out_features}×{each.in_features}" for each in linears))


def resolve(config: Config, launch: Launch | None = None) -> Resolved:
    """Resolves what needs no machine."""
    return Resolved(config=config, fp8=resolve_fp8(config.model), launch=launch)
