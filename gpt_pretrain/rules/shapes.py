"""Cross-field rules about divisions: widths over heads, heads and sequences over ranks, and FP8's multiples.

The values that a message offers obey its rule; another rule may still refuse one of them.

An FP8 GEMM requires both dimensions of both operands to be multiples of 16 (mxfp8: 32), after TP, SP, CP and the
microbatch. Transformer Engine (TE) 2.12 asserts a part of this when the first microbatch arrives
(`assert_dim_for_fp8_exec`: rows by 8, columns by 16). dgrad sums over the weight's rows and wgrad over the tokens, so
the rows need the 16 as well, which TE checks in the backward pass only (cublaslt_gemm.cu, "Leading dimension").
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpt_pretrain.config.choices import Activation, PositionEmbedding
from gpt_pretrain.config.derived import expert_tensor_parallel_size, kv_channels, num_query_groups, padded_vocab_size
from gpt_pretrain.config.errors import divisors, indivisible, multiples_near, one_of, refusal
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, FC1, FC2, PROJ, QKV, Linear, Resolved

# Layers whose input each rank casts before it is gathered along the sequence.
_COLUMN_PARALLEL = (QKV, FC1)
_OF_EXPERTS = (EXPERT_FC1, EXPERT_FC2)


def _rotated_channels(model: ModelConfig, channels: int) -> int:
    """Channels of a head that rope rotates."""
    return int(channels * model.rotary_percentage)


def _rotates_pairs(model: ModelConfig, channels: int) -> bool:
    if model.position_embedding_type is not PositionEmbedding.rope or not 0 < model.rotary_percentage <= 1:
        return True
    rotated = _rotated_channels(model, channels)
    return rotated > 0 and rotated % 2 == 0


def _hidden_sizes(model: ModelConfig) -> str:
    """A way out: the nearest `hidden_size` for the requested heads, or `kv_channels`."""
    heads = model.num_attention_heads
    pairs = 2 if model.position_embedding_type is PositionEmbedding.rope else 1
    widths = multiples_near(model.hidden_size, math.lcm(pairs * heads, model.tensor_model_parallel_size))
    near = [width for width in widths if _rotates_pairs(model, width // heads)]
    return f"use model.hidden_size={one_of(near)}, or set model.kv_channels" if near else "set model.kv_channels"


def _head_counts(model: ModelConfig, multiple_of: int) -> list[int]:
    """The nearest `num_attention_heads` among the multiples of a number that divide the width."""
    heads, hidden = model.num_attention_heads, model.hidden_size
    if model.kv_channels is not None:
        return multiples_near(heads, multiple_of)
    counts = [n for n in divisors(hidden) if n % multiple_of == 0 and _rotates_pairs(model, hidden // n)]
    return [n for n in counts if n < heads][-1:] + [n for n in counts if n > heads][:1]


def _heads_over_ranks(model: ModelConfig) -> list[str]:
    """The way out by another number of heads, if there is one."""
    tp, groups = model.tensor_model_parallel_size, model.num_query_groups
    near = _head_counts(model, tp)
    if not near:
        return []
    # TP groups divide every number of heads that TP divides.
    suits = groups is None or (groups % tp == 0 and all(count % groups == 0 for count in near))
    return [f"model.num_attention_heads={one_of(near)}" + ("" if suits else f" with model.num_query_groups={tp}")]


def _tensor_parallel_sizes(model: ModelConfig) -> str:
    """The values of `tensor_model_parallel_size` that divide heads, groups, widths and sequence."""
    ffn = model.ffn_hidden_size if model.num_moe_experts is None else None
    length = model.encoder_seq_length // model.context_parallel_size if model.sequence_parallel else 0
    widths = (model.hidden_size, ffn or 0, padded_vocab_size(model), length)
    sizes = divisors(math.gcd(model.num_attention_heads, num_query_groups(model), *widths))
    if model.sequence_parallel and sizes == [1]:
        return "model.tensor_model_parallel_size=1 with model.sequence_parallel=false"
    return f"model.tensor_model_parallel_size={one_of(sizes[1:] if model.sequence_parallel else sizes)}"


def _attention_heads(model: ModelConfig) -> Iterator[str]:
    """Heads over width, groups and tensor-parallel ranks."""
    heads, tp, groups = model.num_attention_heads, model.tensor_model_parallel_size, num_query_groups(model)
    asked, tensor_parallel = f"model.num_attention_heads={heads}", f"model.tensor_model_parallel_size={tp}"
    if model.kv_channels is None and model.hidden_size % heads:
        yield f"model.hidden_size={model.hidden_size} is not divisible by {asked}; {_hidden_sizes(model)}"
    legal_groups = [count for count in divisors(heads) if count % tp == 0] or divisors(heads)
    if heads % groups:
        ways = [f"model.num_query_groups={one_of(legal_groups)}"]
        near = [] if groups % tp else _head_counts(model, groups)
        ways += [f"model.num_attention_heads={one_of(near)}"] if near else []
        yield indivisible(asked, f"model.num_query_groups={groups}", *ways)
    if heads % tp:
        ways = [*_heads_over_ranks(model), _tensor_parallel_sizes(model)]
        yield indivisible(asked, tensor_parallel, *ways)
    elif heads % groups == 0 and groups % tp:
        # megatron-core can repeat a group over several ranks, at the price of gathering every QKV product. This is
        # refused because weights must not depend on the layout.
        ways = [f"model.num_query_groups={one_of(legal_groups)}", _tensor_parallel_sizes(model)]
        yield indivisible(f"model.num_query_groups={groups}", tensor_parallel, *ways)


def _rotated_pairs(model: ModelConfig) -> Iterator[str]:
    """The number of channels that rope rotates must be even."""
    hidden, heads, channels = model.hidden_size, model.num_attention_heads, kv_channels(model)
    if _rotates_pairs(model, channels) or (model.kv_channels is None and hidden % heads):
        return
    if model.kv_channels is None:
        cause = f"model.hidden_size={hidden} makes {heads} heads (model.num_attention_heads) of {channels} channels"
        way = _hidden_sizes(model)
    else:
        cause, way = f"model.kv_channels={channels}", f"use {one_of(multiples_near(channels, 2))}"
    if model.rotary_percentage < 1:
        share = f"model.rotary_percentage={model.rotary_percentage}"
        cause += f", of which {share} rotates {_rotated_channels(model, channels)}"
        way = "use another rotary_percentage, or another model.kv_channels"
    yield f"{cause}, and rope rotates pairs of channels; {way}"


def _widths_over_tensor_ranks(model: ModelConfig) -> Iterator[str]:
    """Matrices and embedding rows that tensor-parallel ranks split."""
    tp = model.tensor_model_parallel_size
    tensor_parallel = f"model.tensor_model_parallel_size={tp}"
    widths = [("hidden_size", model.hidden_size)]
    # `rules.experts` checks the widths of experts; null is a multiple of hidden_size.
    if model.num_moe_experts is None and model.ffn_hidden_size is not None:
        widths.append(("ffn_hidden_size", model.ffn_hidden_size))
    for name, value in widths:
        if value % tp:
            near = one_of(multiples_near(value, tp))
            yield indivisible(f"model.{name}={value}", tensor_parallel, near, "another tensor_model_parallel_size")
    if padded_vocab_size(model) % tp:
        padded = f"model.vocab_size={model.vocab_size}, padded to {padded_vocab_size(model)},"
        multiple = math.lcm(model.make_vocab_size_divisible_by, tp)
        yield indivisible(padded, tensor_parallel, f"model.make_vocab_size_divisible_by={multiple}")


def _sequence_step(model: ModelConfig) -> int:
    """What a sequence must be a multiple of, to be split over ranks."""
    tp, cp = model.tensor_model_parallel_size, model.context_parallel_size
    # Each context-parallel rank takes two slices, one from either half, which balances the causal mask.
    return math.lcm(2 * cp if cp > 1 else 1, tp * cp if model.sequence_parallel else 1)


def _sequence(model: ModelConfig) -> Iterator[str]:
    """Sequence and context parallelism."""
    tp, cp, length = model.tensor_model_parallel_size, model.context_parallel_size, model.encoder_seq_length
    if model.sequence_parallel and tp == 1:
        yield (
            "model.sequence_parallel=true needs model.tensor_model_parallel_size of 2 or more; "
            "use false, or parallelism=tp2_sp"
        )
    if cp > 1 and model.transformer_engine is False:
        why = "it needs Transformer Engine's attention"
        ways = "model.context_parallel_size=1", "model.transformer_engine=null"
        yield refusal(f"model.context_parallel_size={cp}", "model.transformer_engine=false", why, *ways)
    need = _sequence_step(model)
    if length % need:
        causes = [f"2 × model.context_parallel_size={cp}"] if cp > 1 else []
        causes += [f"model.tensor_model_parallel_size={tp} with sequence_parallel"] if model.sequence_parallel else []
        near = one_of(multiples_near(length, need))
        yield indivisible(f"model.encoder_seq_length={length}", f"{need} ({' and '.join(causes)})", near)


def division_problems(model: ModelConfig) -> Iterator[str]:
    """All rules above."""
    yield from _attention_heads(model)
    yield from _rotated_pairs(model)
    yield from _widths_over_tensor_ranks(model)
    yield from _sequence(model)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """What FP8 products require: a key's value must be a multiple of a step."""

    key: str
    value: int
    step: int
    why: str
    """Why, in the words of the message."""


def _weight(linear: Linear, model: ModelConfig, unit: int) -> str:
    ranks = " on each tensor parallel rank" if model.tensor_model_parallel_size > 1 else ""
    return (
        f"the weight of {linear.kind} is {linear.out_features}×{linear.in_features}{ranks}, and FP8 products take "
        f"multiples of {unit}"
    )


def _step(count: int, unit: int) -> int:
    """The step that makes `count` times a number a multiple of `unit`."""
    return unit // math.gcd(count, unit)


def _needs_of_weights(model: ModelConfig, settings: Fp8Settings, fp8: dict[str, Linear]) -> Iterator[_Need]:
    """Rows and columns of the weights."""
    unit, tp = settings.recipe.alignment, model.tensor_model_parallel_size
    hidden, heads = model.hidden_size, model.num_attention_heads
    # The residual stream is a dimension of every weight, and whole on each rank.
    yield _Need(key="hidden_size", value=hidden, step=unit, why=_weight(next(iter(fp8.values())), model, unit))
    # TE asserts that an input that is cast and then gathered over the tensor parallel ranks consists of whole blocks of
    # 128×128 (`assert_dim_for_all_gather`, `Float8BlockQuantizer.is_quantizable`); others may end in a part of a block.
    if model.sequence_parallel and settings.recipe.gathers_blocks and fp8.keys() & set(_COLUMN_PARALLEL):
        yield _Need(
            key="hidden_size",
            value=hidden,
            step=settings.recipe.gathered_rows,
            why=f"model.fp8_recipe={settings.recipe.name} with model.sequence_parallel=true gathers blocks of "
            f"{settings.recipe.numerics.block}×{settings.recipe.numerics.block}",
        )
    for kind, count in ((QKV, (heads + 2 * num_query_groups(model)) // tp), (PROJ, heads // tp)):
        if kind in fp8:
            step = _step(count, unit)
            why = _weight(fp8[kind], model, unit)
            if model.kv_channels is None:
                yield _Need(key="hidden_size", value=hidden, step=heads * step, why=why)
            else:
                yield _Need(key="kv_channels", value=model.kv_channels, step=step, why=why)
    gated = 2 if model.activation is Activation.swiglu else 1
    etp = expert_tensor_parallel_size(model)
    for kind, count, ranks in ((FC1, gated, tp), (FC2, 1, tp), (EXPERT_FC1, gated, etp), (EXPERT_FC2, 1, etp)):
        if kind in fp8:
            step, why = _step(count, ranks * unit), _weight(fp8[kind], model, unit)
            if kind in _OF_EXPERTS and model.moe_ffn_hidden_size is not None:
                yield _Need(key="moe_ffn_hidden_size", value=model.moe_ffn_hidden_size, step=step, why=why)
            elif model.ffn_hidden_size is None:
                yield _Need(key="hidden_size", value=hidden, step=_step(4, step), why=why)
            else:
                yield _Need(key="ffn_hidden_size", value=model.ffn_hidden_size, step=step, why=why)


def _needs_of_tokens(model: ModelConfig, settings: Fp8Settings, fp8: dict[str, Linear]) -> Iterator[_Need]:
    """Rows of the activations: the tokens of a microbatch, and those that a rank casts itself."""
    unit, tp, cp = settings.recipe.alignment, model.tensor_model_parallel_size, model.context_parallel_size
    micro, length = model.micro_batch_size, model.encoder_seq_length
    # An expert's tokens are padded, whatever their number.
    of_sequences = [linear for kind, linear in fp8.items() if kind not in _OF_EXPERTS]
    if not of_sequences:
        return
    needs = [(of_sequences[0].tokens, cp, unit, f"FP8 products take multiples of {unit}")]
    columns = [linear for kind, linear in fp8.items() if kind in _COLUMN_PARALLEL]
    if model.sequence_parallel and columns:
        # TE asserts the 8; together with TP it makes the 16 of the whole.
        rows = settings.recipe.gathered_rows
        why = f"what a rank casts before it is gathered (model.sequence_parallel=true) must be a multiple of {rows}"
        needs.append((columns[0].local_tokens, cp * tp, rows, why))
    for tokens, ranks, rows, rule in needs:
        # `_sequence` requires the second anyway, so every value offered here is legal.
        step = math.lcm(_step(micro, ranks * rows), _sequence_step(model))
        yield _Need(
            key="encoder_seq_length",
            value=length,
            step=step,
            why=f"with model.micro_batch_size={micro} a rank has {tokens} tokens, and {rule}",
        )


def fp8_shape_problems(run: Resolved) -> Iterator[str]:
    """One message for each key that makes a shape unfit for FP8 products; the sizes are positive and divide."""
    model, settings = run.model, run.fp8
    if settings is None:
        return
    fp8: dict[str, Linear] = {}
    for linear in run.linears:
        if linear.precision == "fp8":
            fp8.setdefault(linear.kind, linear)
    if not fp8:
        return
    needs: dict[str, list[_Need]] = {}
    for need in (*_needs_of_weights(model, settings, fp8), *_needs_of_tokens(model, settings, fp8)):
        needs.setdefault(need.key, []).append(need)
    for key, of_key in needs.items():
        broken = [need for need in of_key if need.value % need.step]
        if broken:
            values = one_of(multiples_near(broken[0].value, math.lcm(*(need.step for need in of_key))))
            yield f"model.{key}={broken[0].value}: {broken[0].why}; use {values}"
