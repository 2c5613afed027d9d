"""Which implementation each part of a run's model uses, as `features.resolve` chose it for a machine."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gpt_pretrain.config.choices import CrossEntropyFusion, CudaGraphImpl, MoeGroupedKernel
from gpt_pretrain.config.keys import schema_sections
from gpt_pretrain.run.platform import APEX_PARTS, Platform


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernels:
    """Which implementation each part of the model runs on."""

    transformer_engine: bool
    compile: bool
    """torch.compile takes whole layers and fuses what lies between their products."""
    bias_activation_fusion: bool
    bias_dropout_add_fusion: bool
    masked_softmax_fusion: bool
    torch_attention: bool
    """Local layers use PyTorch's fused attention, not megatron-core's, which writes all scores."""
    apply_rope_fusion: bool
    gradient_accumulation_fusion: bool
    cross_entropy_fusion_impl: CrossEntropyFusion | None
    """None: megatron-core's unfused loss."""
    moe_grouped_gemm: bool
    moe_grouped_kernel: MoeGroupedKernel | None
    """None: no grouped products."""
    cuda_graph_impl: CudaGraphImpl | None
    """None: no CUDA graphs."""
    features: Mapping[str, bool]
    """Key of each feature (`features.registry`) → whether the run uses it."""

    def values(self) -> dict[str, Any]:
        """Each part with its value; a feature follows the part whose key precedes its own in the schema.

        Those of extensions come last.
        """
        keys = [field.name for field in fields(schema_sections()["model"])]
        parts = [field.name for field in fields(self) if field.name != "features"]
        for feature in sorted(filter(keys.__contains__, self.features), key=keys.index):
            before = keys[: keys.index(feature)]
            parts.insert(parts.index(next(key for key in reversed(before) if key in parts)) + 1, feature)
        parts += [feature for feature in self.features if feature not in parts]
        return {part: self.features[part] if part in self.features else getattr(self, part) for part in parts}


def fused_parts(kernels: Kernels) -> str:
    """The parts of a model that are on, with their values, in one line."""
    values = {name: value for name, value in kernels.values().items() if name != "transformer_engine"}
    active = [name if value is True else f"{name} ({value.value})" for name, value in values.items() if value]
    return ", ".join(active) or "none"


def describe_kernels(kernels: Kernels, platform: Platform) -> Mapping[str, str]:
    """One line per part of the model for the run's header."""
    te = f"Transformer Engine {platform.transformer_engine}"
    apex = [part.removeprefix("apex_").replace("_", " ") for part in APEX_PARTS if getattr(platform, part)]
    local = "megatron-core local, compiled" if kernels.compile else "megatron-core local"
    return {
        "layers": te if kernels.transformer_engine else local,
        "fused": fused_parts(kernels),
        # apex has nothing for a CPU.
        **({"apex": ", ".join(apex) or "not installed: nothing is lost but speed"} if platform.cuda else {}),
    }
