"""The multiples that FP8 products require of their shapes, told in the keys that make the shapes.

An FP8 GEMM requires both dimensions of both operands to be multiples of 16 (mxfp8: 32), after TP, SP, CP and the
microbatch. Transformer Engine 2.12 asserts a part of this when the first microbatch arrives (`assert_dim_for_fp8_exec`:
rows by 8, columns by 16): the forward product sums over the columns. dgrad sums over the weight's rows and wgrad over
the tokens, so the rows need the 16 as well. TE checks them only in the backward pass
(cublaslt_gemm.cu, "Leading dimension requirement on A for FP8 GEMM").
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpt_pretrain.config.choices import Activation
from gpt_pretrain.config.derived import (
    expert_tensor_parallel_size,
    ffn_hidden_size,
    kv_channels,
    num_query_groups,
)
from gpt_pretrain.config.errors import multiples_near, one_of
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.rules.layout import Accepts
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, FC1, FC2, PROJ, QKV, Linear, Resolved
from gpt_pretrain.spec.recipes import Fp8Settings

# Layers whose input each rank casts before it is gathered along the sequence.
_COLUMN_PARALLEL = (QKV, FC1)
_OF_EXPERTS = (EXPERT_FC1, EXPERT_FC2)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Need:
    """A key's value has to be a multiple of a step."""

    key: str
    value: int
    step: int
    why: str
    """Why, in the words of the message."""
    instead: tuple[str, int] | None = None
    """A way out by another key of the model."""


def _weight(linear: Linear, model: ModelConfig, unit: int) -> str:
    ranks = " on each tensor parallel rank" if model.tensor_model_parallel_size > 1 else ""
    return (
        f"the weight of {linear.kind} is {linear.out_features}×{linear.in_features}{ranks}, and FP8 products take "
        f"multiples of {unit}"
    )


def _step(count: int, unit: int) -> int:
    """The step that makes `count` times a number a multiple of `unit`."""
    return unit // math.gcd(count, unit)


def _gathered_in_blocks(model: ModelConfig, settings: Fp8Settings) -> bool:
    """Whether inputs are cast in blocks and then gathered over the tensor parallel ranks.

    TE asserts that such an input consists of whole blocks of 128×128 (`assert_dim_for_all_gather`,
    `Float8BlockQuantizer.is_quantizable`); ungathered ones may end in a part of a block.
    """
    return model.sequence_parallel and settings.recipe.gathers_blocks


def _widths(model: ModelConfig, settings: Fp8Settings, fp8: dict[str, Linear]) -> Iterator[_Need]:
    """Rows and columns of the weights."""
    unit, tp = settings.recipe.alignment, model.tensor_model_parallel_size
    hidden, heads = model.hidden_size, model.num_attention_heads
    # The residual stream is a dimension of every weight, and whole on each rank.
    yield _Need(key="hidden_size", value=hidden, step=unit, why=_weight(next(iter(fp8.values())), model, unit))
    if _gathered_in_blocks(model, settings) and fp8.keys() & set(_COLUMN_PARALLEL):
        yield _Need(
            key="hidden_size",
            value=hidden,
            step=settings.recipe.gathered_rows,
            why=f"model.fp8_recipe={settings.recipe.name} with model.sequence_parallel=true gathers blocks of "
            f"{settings.recipe.block}×{settings.recipe.block}",
        )
    for kind, count in ((QKV, (heads + 2 * num_query_groups(model)) // tp), (PROJ, heads // tp)):
        if kind in fp8:
            step = _step(count, unit)
            why = _weight(fp8[kind], model, unit)
            if model.kv_channels is None:
                near = multiples_near(kv_channels(model), step)[-1]
                instead = ("kv_channels", near)
                yield _Need(key="hidden_size", value=hidden, step=heads * step, why=why, instead=instead)
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
                near = multiples_near(ffn_hidden_size(model), step)[-1]
                instead = ("ffn_hidden_size", near)
                yield _Need(key="hidden_size", value=hidden, step=_step(4, step), why=why, instead=instead)
            else:
                yield _Need(key="ffn_hidden_size", value=model.ffn_hidden_size, step=step, why=why)


def _tokens(model: ModelConfig, settings: Fp8Settings, fp8: dict[str, Linear]) -> Iterator[_Need]:
    """Rows of the activations: the tokens of a microbatch, and the share that a rank casts itself."""
    unit, tp, cp = settings.recipe.alignment, model.tensor_model_parallel_size, model.context_parallel_size
    micro, length = model.micro_batch_size, model.encoder_seq_length
    # rules.layout.sequence requires these divisors anyway, so every value offered here is legal.
    divisible = math.lcm(2 * cp if cp > 1 else 1, tp * cp if model.sequence_parallel else 1)
    # The tokens of an expert are padded, however many come.
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
    near = multiples_near(micro, math.lcm(*(_step(length, ranks * rows) for _, ranks, rows, _ in needs)))[-1]
    for tokens, ranks, rows, rule in needs:
        step = math.lcm(_step(micro, ranks * rows), divisible)
        yield _Need(
            key="encoder_seq_length",
            value=length,
            step=step,
            why=f"with model.micro_batch_size={micro} a rank has {tokens} tokens, and {rule}",
            instead=("micro_batch_size", near),
        )


def fp8_shape_problems(run: Resolved, accepts: Accepts) -> Iterator[str]:
    """One message for each key that makes a shape which FP8 products refuse.

    The run's sizes are positive and divide as the layout asks (`rules.model`).
    """
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
    for need in (*_widths(model, settings, fp8), *_tokens(model, settings, fp8)):
        needs.setdefault(need.key, []).append(need)
    for key, of_key in needs.items():
        broken = [need for need in of_key if need.value % need.step]
        if broken:
            values = one_of(multiples_near(broken[0].value, math.lcm(*(need.step for need in of_key))))
            ways = [values]
            if (other := broken[0].instead) is not None and accepts(*other):
                ways.append(f"model.{other[0]}={other[1]}")
            yield f"model.{key}={broken[0].value}: {broken[0].why}; use {', or '.join(ways)}"
