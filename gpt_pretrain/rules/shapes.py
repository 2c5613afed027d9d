"""Cross-field rules about divisions: widths over heads, heads and sequences over ranks, and FP8's multiples.

The values that a message offers obey its rule; another rule may still refuse one of them.

An FP8 GEMM requires both dimensions of both operands to be multiples of 16 (mxfp8: 32), after TP, SP, CP and the
microbatch. Transformer Engine (TE) 2.12 asserts a part of this when the first microbatch arrives
(`assert_dim_for_fp8_exec`: rows by 8, columns by 16). dgrad sums over the weight's rows and wgrad over the tokens, so
the rows need the 16 as well, which TE checks in the backward pass only (cublaslt_gemm.cu, "Leading dimension").
"""

import math
from collections.abc import Iterator

from gpt_pretrain.config.choices import PositionEmbedding
from gpt_pretrain.config.derived import expert_tensor_parallel_size, kv_channels, num_query_groups, padded_vocab_size
from gpt_pretrain.config.errors import divisors, indivisible, multiples_near, one_of, refusal
from gpt_pretrain.config.mixtures import own_lengths
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, FC1, FC2, PROJ, QKV, Linear, Resolved

# Layers whose input each rank casts before it is gathered along the sequence.
_COLUMN_PARALLEL = (QKV, FC1)
_OF_EXPERTS = (EXPERT_FC1, EXPERT_FC2)


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
        # An even number of channels, for rope.
        near = one_of(multiples_near(model.hidden_size, math.lcm(2 * heads, tp)))
        yield indivisible(f"model.hidden_size={model.hidden_size}", asked, f"model.hidden_size={near}", "kv_channels")
    groups_way = f"model.num_query_groups={one_of([n for n in divisors(heads) if n % tp == 0] or divisors(heads))}"
    if heads % groups:
        yield indivisible(asked, f"model.num_query_groups={groups}", groups_way)
    if heads % tp:
        yield indivisible(asked, tensor_parallel, _tensor_parallel_sizes(model))
    elif heads % groups == 0 and groups % tp:
        # megatron-core can repeat a group over several ranks, at the price of gathering every QKV product. This is
        # refused because weights must not depend on the layout.
        yield indivisible(
            f"model.num_query_groups={groups}", tensor_parallel, groups_way, _tensor_parallel_sizes(model)
        )


def _rotated_pairs(model: ModelConfig) -> Iterator[str]:
    """The number of channels that rope rotates must be even."""
    channels, share = kv_channels(model), model.rotary_percentage
    rotated = int(channels * share)
    divides = model.kv_channels is not None or model.hidden_size % model.num_attention_heads == 0
    if model.position_embedding_type is PositionEmbedding.rope and divides and (rotated % 2 or not rotated):
        cause = f"model.kv_channels={channels}"
        if model.kv_channels is None:
            cause = f"model.hidden_size={model.hidden_size} makes heads of {channels} channels"
        way = "another rotary_percentage, or another model.kv_channels"
        if share == 1:
            way = f"model.kv_channels={one_of(multiples_near(channels, 2))}"
        yield (
            f"{cause}, of which model.rotary_percentage={share} rotates {rotated}, and rope rotates pairs; use {way}"
        )


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


def _stage_lengths(model: ModelConfig) -> Iterator[str]:
    """The sequence lengths of stages divide samples, and ranks divide them."""
    length, need = model.encoder_seq_length, _sequence_step(model)
    for own in own_lengths(model.data):
        if length % own or own % need:
            fitting = [each for each in divisors(length) if each % need == 0 and each < length]
            near = sorted(sorted(fitting, key=lambda each: abs(each - own))[:3])
            ways = [f"seq_length={one_of(near)}"] if near else []
            split = f" into multiples of {need}, which ranks split" if need > 1 else ""
            yield (
                f"model.data.stages: seq_length={own} does not divide model.encoder_seq_length={length}{split}; use "
                f"{', or '.join([*ways, 'no seq_length'])}"
            )


def division_problems(model: ModelConfig) -> Iterator[str]:
    """All rules above."""
    yield from _attention_heads(model)
    yield from _rotated_pairs(model)
    yield from _widths_over_tensor_ranks(model)
    yield from _sequence(model)
    yield from _stage_lengths(model)


def fp8_shape_problems(run: Resolved) -> Iterator[str]:
    """One message for each key that makes a shape unfit for FP8 products; the sizes are positive and divide."""
    model, settings = run.model, run.fp8
    fp8 = {linear.kind: linear for linear in run.linears if linear.precision == "fp8"}
    if settings is None or not fp8:
        return
    steps = _steps(model, settings)
    causes: dict[str, str] = {}
    for key, cause in (*_unfit_weights(model, settings, fp8), *_unfit_tokens(model, settings, fp8)):
        causes.setdefault(key, cause)
    for key, cause in causes.items():
        value = getattr(model, key)
        yield f"model.{key}={value}: {cause}; use {one_of(multiples_near(value, steps[key]))}"


def _steps(model: ModelConfig, settings: Fp8Settings) -> dict[str, int]:
    """Multiples of these make every shape fit, by key; a shape alone may need less."""
    unit, tp, cp = settings.recipe.alignment, model.tensor_model_parallel_size, model.context_parallel_size
    rows = settings.recipe.gathered_rows if model.sequence_parallel else 1
    return {
        "hidden_size": math.lcm(
            unit * (model.num_attention_heads if model.kv_channels is None else 1),
            unit * tp if model.ffn_hidden_size is None else tp,
            rows if settings.recipe.gathers_blocks else 1,
        ),
        "kv_channels": unit,
        "ffn_hidden_size": unit * tp,
        "moe_ffn_hidden_size": unit * expert_tensor_parallel_size(model),
        "encoder_seq_length": math.lcm(unit * cp, rows * cp * tp, _sequence_step(model)),
    }


def _unfit_weights(model: ModelConfig, settings: Fp8Settings, fp8: dict[str, Linear]) -> Iterator[tuple[str, str]]:
    """Keys that give a weight rows or columns which FP8 products do not take, and why."""
    recipe, heads = settings.recipe, "hidden_size" if model.kv_channels is None else "kv_channels"
    inner = "hidden_size" if model.ffn_hidden_size is None else "ffn_hidden_size"
    of_experts = inner if model.moe_ffn_hidden_size is None else "moe_ffn_hidden_size"
    keys = {
        QKV: (heads, "hidden_size"),
        PROJ: ("hidden_size", heads),
        FC1: (inner, "hidden_size"),
        FC2: ("hidden_size", inner),
        EXPERT_FC1: (of_experts, "hidden_size"),
        EXPERT_FC2: ("hidden_size", of_experts),
    }
    ranks = " on each tensor parallel rank" if model.tensor_model_parallel_size > 1 else ""
    for kind, linear in fp8.items():
        shape = linear.out_features, linear.in_features
        for key, size in zip(keys[kind], shape, strict=True):
            if size % recipe.alignment:
                weight = f"the weight of {kind} is {shape[0]}×{shape[1]}{ranks}"
                yield key, f"{weight}, and FP8 products take multiples of {recipe.alignment}"
    # TE asserts that an input that is cast and then gathered over the tensor parallel ranks consists of whole blocks of
    # 128×128 (`assert_dim_for_all_gather`, `Float8BlockQuantizer.is_quantizable`); others may end in a part of a block.
    gathers = model.sequence_parallel and recipe.gathers_blocks and any(kind in fp8 for kind in _COLUMN_PARALLEL)
    if gathers and model.hidden_size % recipe.gathered_rows:
        block = recipe.numerics.block
        asked = f"model.fp8_recipe={recipe.name} with model.sequence_parallel=true"
        yield "hidden_size", f"{asked} gathers blocks of {block}×{block}"


def _unfit_tokens(model: ModelConfig, settings: Fp8Settings, fp8: dict[str, Linear]) -> Iterator[tuple[str, str]]:
    """The key of the sequence, if a rank multiplies or casts a number of tokens that does not fit."""
    unit, rows = settings.recipe.alignment, settings.recipe.gathered_rows
    # An expert's tokens are padded, whatever their number.
    counts = [
        (fp8[kind].tokens, unit, f"FP8 products take multiples of {unit}") for kind in fp8 if kind not in _OF_EXPERTS
    ]
    if model.sequence_parallel:
        # TE asserts the 8; together with TP it makes the 16 of the whole.
        why = f"what a rank casts before it is gathered (model.sequence_parallel=true) must be a multiple of {rows}"
        counts += [(fp8[kind].local_tokens, rows, why) for kind in _COLUMN_PARALLEL if kind in fp8]
    for tokens, step, why in counts:
        if tokens % step:
            yield (
                "encoder_seq_length",
                f"with model.micro_batch_size={model.micro_batch_size} a rank has {tokens} tokens, and {why}",
            )
