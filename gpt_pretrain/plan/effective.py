"""Requested → effective: the fields of megatron-core that each key sets, and the precision of each linear layer.

Fields and values are those that training hands to megatron-core (`megatron.core_fields`), and why a key changes nothing
is what the rules say (`rules.no_effect`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.errors import show
from gpt_pretrain.config.keys import schema_keys, value_of
from gpt_pretrain.megatron.core_fields import (
    Field,
    HighPrecision,
    ddp_fields,
    optimizer_fields,
    optimizer_state_fields,
    transformer_fields,
    yarn_fields,
)
from gpt_pretrain.rules.no_effect import why_no_effect
from gpt_pretrain.run.products import Linear
from gpt_pretrain.run.run_spec import RunSpec


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


def fields_by_class(spec: RunSpec) -> dict[str, list[Field]]:
    """Every field that training sets, by the name of its class in megatron-core."""
    return {
        "TransformerConfig": [*transformer_fields(spec), *yarn_fields(spec)],
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
        if is_fp8_key(key) and spec.fp8 is None:
            effective = {}
        elif is_fp8_key(key) and spec.fp8 is not None and spec.fp8.in_local_layers and not inert:
            effective = {**effective, "local layers": requested}
        yield Setting(key=key, requested=requested, effective=effective, inert=inert)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLinear:
    """A linear layer of one GPU, in one or more transformer layers: rows [rows, inputs] times weights, per microbatch.

    A product of these sizes computes the output, and one each the gradients of inputs and weights.
    """

    layers: str
    """"0–31", "0, 5–9"; empty outside of the layers."""
    module: str
    count: int
    """How many each transformer layer has: the GPU's experts, or 1."""
    rows: int
    inputs: int
    outputs: int
    precision: str
    """"FP8", "BF16" or "FP32"."""
    reason: str
    """Why it is not in FP8, or which of its products is not; empty if all are."""


def layer_ranges(layers: list[int]) -> str:
    """Indices as a person writes them: [0, 1, 2, 5] gives "0–2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def plan_linears(spec: RunSpec) -> Iterator[PlannedLinear]:
    """The linear layers of a checked configuration in forward order, the LM head last."""
    # Equal layers with the same reasons stay together, in the order in which they first appear.
    groups: dict[Linear, list[int]] = {}
    for linear in spec.linears:
        groups.setdefault(replace(linear, module="", layer=0), []).append(linear.layer)
    high = "FP32" if spec.config.trainer.precision is Precision.fp32 else "BF16"
    for first, layers in groups.items():
        in_fp8 = first.precision == "fp8"
        yield PlannedLinear(
            layers=layer_ranges([layer for layer in layers if layer >= 0]),
            module=first.kind,
            count=first.count,
            rows=first.tokens,
            inputs=first.in_features,
            outputs=first.out_features,
            precision="FP8" if in_fp8 else high,
            reason=f"gradients of weights in {high}" if in_fp8 and first.wgrad_precision != "fp8" else first.reason,
        )
