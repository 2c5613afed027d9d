"""Cross-field rules about divisions: widths over heads, heads and sequences over parallel ranks.

Every value that a message offers is legal: it breaks no other rule of this file in the run at hand, nor, where such a
value is near, one about shapes elsewhere (`Accepts`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from gpt_pretrain.config.choices import PositionEmbedding
from gpt_pretrain.config.derived import (
    kv_channels,
    model_parallel_size,
    num_query_groups,
    padded_vocab_size,
)
from gpt_pretrain.config.errors import divisors, one_of
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch

type Accepts = Callable[[str, int], bool]
"""Whether no rule about shapes speaks of a key of `model.` where it has a value."""


def _whatever(_: str, __: int) -> bool:
    return True


# How many values on either side of a wrong one are tried for a legal one.
_REACH = 256


def _rotated_channels(model: ModelConfig, channels: int) -> int:
    """Channels of a head that rope rotates."""
    return int(channels * model.rotary_percentage)


def _rotates_pairs(model: ModelConfig, channels: int) -> bool:
    if model.position_embedding_type is not PositionEmbedding.rope or not 0 < model.rotary_percentage <= 1:
        return True
    rotated = _rotated_channels(model, channels)
    return rotated > 0 and rotated % 2 == 0


def _are_heads(model: ModelConfig, hidden: int, heads: int) -> bool:
    """Whether a width makes so many heads, and rope finds pairs in each."""
    if model.kv_channels is not None:
        return True
    return hidden % heads == 0 and _rotates_pairs(model, hidden // heads)


def _nearest(model: ModelConfig, key: str, legal: Iterable[int], accepts: Accepts) -> list[int]:
    """The closest legal values of a key below and above, of those that are accepted if any is; legal ones ascend."""
    found, value = list(legal), getattr(model, key)
    sides = [[n for n in reversed(found) if n < value], [n for n in found if n > value]]
    near = [next((n for n in side if accepts(key, n)), None) for side in sides]
    return [n for n in near if n is not None] or [side[0] for side in sides if side]


def _multiples(value: int, step: int) -> range:
    """Multiples of a step on both sides of a value."""
    middle = value // step
    return range(max(1, middle - _REACH) * step, (middle + _REACH) * step + 1, step)


def _widths(model: ModelConfig, accepts: Accepts) -> str:
    """The nearest `hidden_size` that makes the requested heads, or another way to have them."""
    hidden, heads = model.hidden_size, model.num_attention_heads
    step = math.lcm(heads, model.tensor_model_parallel_size)
    legal = (width for width in _multiples(hidden, step) if _are_heads(model, width, heads))
    near = _nearest(model, "hidden_size", legal, accepts)
    return f"use hidden_size={one_of(near)}, or set model.kv_channels" if near else "set model.kv_channels"


def _head_counts(model: ModelConfig, multiple_of: int, accepts: Accepts) -> list[int]:
    """The nearest legal `num_attention_heads` among the multiples of a number."""
    counts = _multiples(model.num_attention_heads, multiple_of)
    legal = (count for count in counts if _are_heads(model, model.hidden_size, count))
    return _nearest(model, "num_attention_heads", legal, accepts)


def _heads_over_ranks(model: ModelConfig, accepts: Accepts) -> list[str]:
    """The way out by another number of heads, where there is one."""
    tp = model.tensor_model_parallel_size
    groups = model.num_query_groups
    # A number of groups that goes with the heads is offered beside them.
    near = _head_counts(model, tp, accepts if groups is None else _whatever)
    if not near:
        return []
    # As many groups as ranks divide every number of heads that the ranks share.
    goes = groups is None or (groups % tp == 0 and all(count % groups == 0 for count in near))
    return [f"model.num_attention_heads={one_of(near)}" + ("" if goes else f" with model.num_query_groups={tp}")]


def _tensor_parallel_sizes(model: ModelConfig, launch: Launch | None) -> str:
    """The `tensor_model_parallel_size` that heads, groups, widths, sequence and processes allow."""

    def is_legal(size: int) -> bool:
        candidate = replace(model, tensor_model_parallel_size=size)
        fits = launch is None or launch.world_size % model_parallel_size(candidate) == 0
        return fits and not [*widths_over_tensor_ranks(candidate), *sequence(candidate)]

    heads, groups = model.num_attention_heads, num_query_groups(model)
    sizes = [size for size in divisors(math.gcd(heads, groups)) if is_legal(size)]
    if sizes:
        return f"model.tensor_model_parallel_size={one_of(sizes)}"
    return "model.tensor_model_parallel_size=1" + (" with model.sequence_parallel=false" * model.sequence_parallel)


def attention_heads(model: ModelConfig, launch: Launch | None, accepts: Accepts = _whatever) -> Iterator[str]:
    """Heads over width, groups and tensor-parallel ranks."""
    heads, tp, groups = model.num_attention_heads, model.tensor_model_parallel_size, num_query_groups(model)
    if model.kv_channels is None and model.hidden_size % heads:
        yield (
            f"model.hidden_size={model.hidden_size} is not divisible by model.num_attention_heads={heads}; "
            f"{_widths(model, accepts)}"
        )
    legal_groups = [count for count in divisors(heads) if count % tp == 0] or divisors(heads)
    if heads % groups:
        ways = [f"model.num_query_groups={one_of(legal_groups)}"]
        near = [] if groups % tp else _head_counts(model, groups, accepts)
        ways += [f"model.num_attention_heads={one_of(near)}"] if near else []
        yield (
            f"model.num_attention_heads={heads} is not divisible by model.num_query_groups={groups}; "
            f"use {', or '.join(ways)}"
        )
    if heads % tp:
        ways = [*_heads_over_ranks(model, accepts), _tensor_parallel_sizes(model, launch)]
        yield (
            f"model.num_attention_heads={heads} is not divisible by model.tensor_model_parallel_size={tp}; "
            f"use {', or '.join(ways)}"
        )
    elif heads % groups == 0 and groups % tp:
        # megatron-core can repeat a group over several ranks, at the price of gathering every QKV product. It
        # is refused because weights must not depend on the layout.
        yield (
            f"model.num_query_groups={groups} is not divisible by model.tensor_model_parallel_size={tp}; "
            f"use model.num_query_groups={one_of(legal_groups)}, or {_tensor_parallel_sizes(model, launch)}"
        )


def rotated_pairs(model: ModelConfig, accepts: Accepts = _whatever) -> Iterator[str]:
    """Channels of a head that rope rotates, told in the keys that make them."""
    hidden, heads, channels = model.hidden_size, model.num_attention_heads, kv_channels(model)
    if _rotates_pairs(model, channels) or (model.kv_channels is None and hidden % heads):
        return
    if model.kv_channels is None:
        cause = f"model.hidden_size={hidden} makes {heads} heads (model.num_attention_heads) of {channels} channels"
        way = _widths(model, accepts)
    else:
        cause = f"model.kv_channels={channels}"
        legal = (width for width in _multiples(channels, 1) if _rotates_pairs(model, width))
        near = _nearest(model, "kv_channels", legal, accepts)
        # Of a tiny share, no head within reach has a pair.
        way = f"use {one_of(near)}" if near else ""
    if model.rotary_percentage < 1:
        share = f"model.rotary_percentage={model.rotary_percentage}"
        cause += f", of which {share} rotates {_rotated_channels(model, channels)}"
        way = f"{way}, or another rotary_percentage" if way else "use another rotary_percentage"
    yield f"{cause}, and rope rotates pairs of channels; {way}"


def widths_over_tensor_ranks(model: ModelConfig, accepts: Accepts = _whatever) -> Iterator[str]:
    """Matrices and embedding rows that tensor-parallel ranks share."""
    tp = model.tensor_model_parallel_size
    widths = [("hidden_size", model.hidden_size)]
    # Experts have ranks of their own (`rules.experts`), and null is a multiple of hidden_size.
    if model.num_moe_experts is None and model.ffn_hidden_size is not None:
        widths.append(("ffn_hidden_size", model.ffn_hidden_size))
    for name, value in widths:
        if value % tp:
            near = _nearest(model, name, _multiples(value, tp), accepts)
            yield (
                f"model.{name}={value} is not divisible by model.tensor_model_parallel_size={tp}; "
                f"use {one_of(near)}, or another tensor_model_parallel_size"
            )
    if padded_vocab_size(model) % tp:
        divisor = model.make_vocab_size_divisible_by
        yield (
            f"model.vocab_size={model.vocab_size}, padded to {padded_vocab_size(model)}, is not divisible by "
            f"model.tensor_model_parallel_size={tp}; use model.make_vocab_size_divisible_by={math.lcm(divisor, tp)}"
        )


def sequence(model: ModelConfig, accepts: Accepts = _whatever) -> Iterator[str]:
    """Sequence and context parallelism."""
    tp, cp, length = model.tensor_model_parallel_size, model.context_parallel_size, model.encoder_seq_length
    if model.sequence_parallel and tp == 1:
        yield (
            "model.sequence_parallel=true needs model.tensor_model_parallel_size of 2 or more; "
            "use false, or parallelism=tp2_sp"
        )
    if cp > 1 and model.transformer_engine is False:
        yield (
            f"model.context_parallel_size={cp} needs Transformer Engine's attention, and "
            "model.transformer_engine=false; use context_parallel_size=1, or transformer_engine=null"
        )
    # Each context-parallel rank takes two slices, one from either half, which balances the causal mask.
    need = math.lcm(2 * cp if cp > 1 else 1, tp * cp if model.sequence_parallel else 1)
    if length % need:
        causes = [f"2 × model.context_parallel_size={cp}"] if cp > 1 else []
        causes += [f"model.tensor_model_parallel_size={tp} with sequence_parallel"] if model.sequence_parallel else []
        yield (
            f"model.encoder_seq_length={length} is not divisible by {need} ({' and '.join(causes)}); "
            f"use {one_of(_nearest(model, 'encoder_seq_length', _multiples(length, need), accepts))}"
        )
