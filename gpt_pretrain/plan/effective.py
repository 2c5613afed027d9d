"""Requested → effective: the fields of megatron-core that each key sets, and the precision of each matrix product.

Fields and values are those that training hands to megatron-core (`megatron.core_fields`), and why a key changes nothing
is what the rules say (`rules.no_effect`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.derived import kv_channels, uses_distributed_optimizer
from gpt_pretrain.config.errors import multiples_near, one_of, show
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.config.recipes import DELAYED_KEYS
from gpt_pretrain.megatron.core_fields import (
    Field,
    HighPrecision,
    ddp_fields,
    optimizer_fields,
    optimizer_state_fields,
    transformer_fields,
)
from gpt_pretrain.rules.no_effect import why_no_effect
from gpt_pretrain.run.fp8 import Fp8Settings
from gpt_pretrain.run.products import EXPERT_FC1, EXPERT_FC2, Gemm, Linear, gemms
from gpt_pretrain.run.run_spec import RunSpec

# The fields of `Fp8Settings` that local layers read in place of megatron-core's.
_IN_LOCAL_LAYERS = {
    "model.fp8_backend": "backend",
    "model.fp8_recipe": "recipe",
    "model.fp8_hybrid": "gradient_format",
    "model.fp8_e4m3": "gradient_format",
    "model.fp8_margin": "margin",
    "model.fp8_amax_history_len": "amax_history_len",
    "model.fp8_amax_compute_algo": "amax_compute_algo",
    "model.fp8_wgrad": "wgrad",
    "model.num_layers_at_start_in_bf16": "num_layers_at_start_in_bf16",
    "model.num_layers_at_end_in_bf16": "num_layers_at_end_in_bf16",
    "model.fp8_exclude": "exclude",
}
# They do no harm on one rank, so no rule refuses them there.
_ABOUT_EXCHANGES = (
    "model.data_parallel_sharding_strategy",
    "model.overlap_grad_reduce",
    "model.overlap_param_gather",
    "model.ddp_bucket_size",
)
# The sizes of an FP8 product are multiples of this in recipes with one scale per tensor, the ones that count where no
# recipe is chosen.
ALIGNMENT = 16


def planned_keys() -> list[str]:
    """The keys that the plan shows, `trainer.precision` first."""
    planned = [path for path, key in schema_keys().items() if key.facts.planned]
    return sorted(planned, key=lambda path: path.startswith("model."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key, its value and the fields that it sets."""

    key: str
    requested: str
    """The value as YAML has it."""
    effective: Mapping[str, str]
    """Field of megatron-core's configs, or of the local layers, and its value; empty where nothing reads it."""
    inert: str
    """Why the key changes nothing in this run; empty where it counts."""
    note: str
    """The value that null resolved to."""


def fields_by_class(spec: RunSpec) -> dict[str, list[Field]]:
    """Every field that training sets, by the name of its class in megatron-core."""
    return {
        "TransformerConfig": transformer_fields(spec),
        "DistributedDataParallelConfig": ddp_fields(spec),
        "OptimizerConfig": [*optimizer_fields(spec), *optimizer_state_fields(spec)],
    }


def is_fp8_key(key: str) -> bool:
    """Whether a key says something about FP8 once `model.fp8` is on."""
    return key.startswith("model.fp8_") or key.endswith("_bf16")


def _shown(value: Any) -> str:
    if isinstance(value, HighPrecision):
        return f"[{','.join(value.patterns)}] in high precision"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_shown, value)) + "]"
    if isinstance(value, Enum):
        return str(value.value)
    return value if isinstance(value, str) else show(value)


def _resolved_null(spec: RunSpec, key: str) -> str:
    """The value that null, or `auto`, resolved to, with the reason."""
    config, model, fp8 = spec.config, spec.model, spec.fp8
    if key == "trainer.precision" and config.trainer.precision is Precision.auto:
        return "auto is bf16 on a GPU"
    if value_of(config, key) is not None:
        return ""
    needed = "model.fp8_params=true needs it" if model.fp8_params else "nothing needs it"
    notes = {
        "model.transformer_engine": "on a GPU" if spec.kernels.transformer_engine else "local layers compute this FP8",
        "model.use_distributed_optimizer": f"null is {show(uses_distributed_optimizer(model))}: {needed}",
    }
    if fp8 is not None:
        formats = f"{fp8.recipe.name} uses {'hybrid' if fp8.hybrid else 'e4m3'}"
        notes |= dict.fromkeys(("model.fp8_hybrid", "model.fp8_e4m3"), formats)
        notes |= {f"model.{name}": "null is the default" for name in ("fp8_backend", "fp8_recipe", *DELAYED_KEYS)}
    return notes.get(key, "")


def _in_local_layers(settings: Fp8Settings, key: str, requested: str) -> dict[str, str]:
    """What local layers read of an FP8 key that megatron-core does not get."""
    layers = "emulated layers" if settings.emulate else "layers of TorchAO"
    name = _IN_LOCAL_LAYERS.get(key)
    if name is None:
        return {layers: requested}
    value = getattr(settings, name)
    return {f"{layers}: {name}": value.name if name == "recipe" else _shown(value)}


def effective_settings(spec: RunSpec) -> Iterator[Setting]:
    """Each FP8, parallelism and precision key of a checked run."""
    reached: dict[str, dict[str, str]] = {}
    for class_name, fields in fields_by_class(spec).items():
        for field in fields:
            for key in field.keys:
                reached.setdefault(key, {})[f"{class_name}.{field.name}"] = _shown(field.value)
    for key in planned_keys():
        requested, effective = _shown(value_of(spec.config, key)), reached.get(key, {})
        inert = why_no_effect(spec, key)
        if not inert and key in _ABOUT_EXCHANGES and spec.layout.shards == 1:
            inert = "one data-parallel rank has nothing to exchange"
        if spec.fp8 is None:
            effective = {} if is_fp8_key(key) else effective
        elif spec.fp8.in_local_layers and (
            key in _IN_LOCAL_LAYERS or (is_fp8_key(key) and not effective and not inert)
        ):
            effective = _in_local_layers(spec.fp8, key, requested)
        yield Setting(
            key=key,
            requested=requested,
            effective=effective,
            inert=inert,
            note="" if inert else _resolved_null(spec, key),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedProduct:
    """One product [m, k] · [k, n] of one GPU and microbatch, in one or more layers."""

    layers: str
    """"0–31", "0, 5–9"; empty outside of the layers."""
    module: str
    phase: str
    """"forward", "dgrad", "wgrad"; of attention "forward" and "backward"."""
    m: int
    n: int
    k: int
    count: int
    """How often a layer computes it: batch · heads for attention's, once for each of the GPU's experts."""
    precision: str
    """"FP8" with its formats, "BF16" or "FP32"."""
    reason: str
    """Why the product is not in FP8; empty for one that is."""
    shape_problem: str
    """Which dimension FP8 cannot take, with the nearest values that it can; empty where it takes all."""
    flops: int
    """Of all its layers together; causal attention counts half of its shape's."""


def layer_ranges(layers: list[int]) -> str:
    """Indices as a person writes them: [0, 1, 2, 5] gives "0–2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def shape_problem(m: int, n: int, k: int, alignment: int) -> str:
    """The sizes that are no multiple of the alignment, and the multiples around them."""
    return "; ".join(
        f"{name}={value} is not ×{alignment}: {one_of(multiples_near(value, alignment))}"
        for name, value in (("m", m), ("n", n), ("k", k))
        if value % alignment
    )


def _shape_problem(spec: RunSpec, gemm: Gemm) -> str:
    """The problem of a product that may run in FP8: the LM head and routers never do, rows of experts are padded."""
    kind, m, k = gemm.linear.kind, gemm.m, gemm.k
    alignment = ALIGNMENT if spec.fp8 is None else spec.fp8.recipe.alignment
    if not gemm.linear.can_be_fp8:
        return ""
    if kind in (EXPERT_FC1, EXPERT_FC2):
        m, k = (m, alignment) if gemm.phase == "wgrad" else (alignment, k)
    return shape_problem(m, gemm.n, k, alignment)


def _precision(spec: RunSpec, phase: str, *, fp8: bool) -> str:
    if spec.fp8 is None or not fp8:
        return "FP32" if spec.config.trainer.precision is Precision.fp32 else "BF16"
    forward, gradient = spec.fp8.forward_format.upper(), spec.fp8.gradient_format.upper()
    return f"FP8 {forward if phase == 'forward' else gradient}·{forward}"


def _linear_products(spec: RunSpec, same: list[Linear]) -> Iterator[PlannedProduct]:
    first = same[0]
    for gemm in gemms(first):
        yield PlannedProduct(
            layers=layer_ranges([linear.layer for linear in same]) if first.layer >= 0 else "",
            module=first.kind,
            phase=gemm.phase,
            m=gemm.m,
            n=gemm.n,
            k=gemm.k,
            count=first.count,
            precision=_precision(spec, gemm.phase, fp8=gemm.fp8),
            reason=first.reason or ("" if gemm.fp8 else "model.fp8_wgrad=false"),
            shape_problem=_shape_problem(spec, gemm),
            flops=gemm.flops * len(same),
        )


def _attention_products(spec: RunSpec) -> Iterator[PlannedProduct]:
    """q·kᵀ and p·v forward; the gradients of q, k, v, p and the scores once more backward. Causal: half is computed."""
    model = spec.model
    sequence, part = model.encoder_seq_length, model.encoder_seq_length // model.context_parallel_size
    width, heads = kv_channels(model), model.num_attention_heads // model.tensor_model_parallel_size
    fp8 = spec.fp8 is not None and spec.fp8.dot_product_attention
    why_not = "model.fp8=false" if spec.fp8 is None else "model.fp8_dot_product_attention=false"
    shapes = {
        ("q·kᵀ", "forward"): (part, sequence, width, 1),
        ("p·v", "forward"): (part, width, sequence, 1),
        ("q·kᵀ again, dp", "backward"): (part, sequence, width, 2),
        ("dq", "backward"): (part, width, sequence, 1),
        ("dk, dv", "backward"): (sequence, width, part, 2),
    }
    for (name, phase), (m, n, k, times) in shapes.items():
        count = model.micro_batch_size * heads * times
        yield PlannedProduct(
            layers=layer_ranges(list(range(model.num_layers))),
            module=f"attention {name}",
            phase=phase,
            m=m,
            n=n,
            k=k,
            count=count,
            precision=_precision(spec, phase, fp8=fp8),
            reason="" if fp8 else why_not,
            shape_problem="",
            flops=m * n * k * count * model.num_layers,
        )


def plan_products(spec: RunSpec) -> Iterator[PlannedProduct]:
    """The products of a checked configuration: linear layers in forward order, attention, the LM head."""
    *in_layers, head = spec.linears
    # Equal layers with the same reasons stay together, in the order in which they first appear.
    groups: dict[Linear, list[Linear]] = {}
    for linear in in_layers:
        groups.setdefault(replace(linear, module="", layer=0), []).append(linear)
    for same in groups.values():
        yield from _linear_products(spec, same)
    yield from _attention_products(spec)
    yield from _linear_products(spec, [head])
