"""What the FP8 keys add up to: NeMo's flags, megatron-core's names and the recipes' defaults.

Everything that acts on FP8 (the rules, the translation to megatron-core, the plan, the proof, emulation) reads
`Fp8Settings`, so they cannot disagree about what null means. `spec.run_spec` resolves them once.
"""

import fnmatch
from dataclasses import dataclass

from gpt_pretrain.config.choices import AmaxComputeAlgo, Fp8RecipeName
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.spec.recipes import RECIPES, Recipe

# Largest finite value of each format (Micikevicius et al. 2022, arXiv 2209.05433, table 1).
FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
# The keys that only delayed scaling reads.
DELAYED_KEYS = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Settings:
    """The FP8 of a run."""

    recipe: Recipe
    forward_format: str
    """Of inputs and weights: "e4m3"."""
    gradient_format: str
    """Of the gradients of outputs: "e4m3" or "e5m2"."""
    margin: int
    """delayed: scales leave 2^margin of headroom."""
    amax_history_len: int
    """delayed: rows of the amax history."""
    amax_compute_algo: AmaxComputeAlgo
    """delayed: which amax of the history counts."""
    wgrad: bool
    """Weight gradients in FP8."""
    params: bool
    """Weights stored and gathered in FP8."""
    dot_product_attention: bool
    multi_head_attention: bool
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    exclude: tuple[str, ...]
    """Patterns of linear layers kept out of FP8."""
    emulate: bool

    @property
    def hybrid(self) -> bool:
        """E4M3 forward and E5M2 backward; otherwise E4M3 in both."""
        return self.gradient_format == "e5m2"

    def excludes(self, module: str) -> bool:
        """Whether a pattern keeps a linear layer out, by its name in the whole model (`products.Linear.module`)."""
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude)


def resolve_fp8(model: ModelConfig) -> Fp8Settings | None:
    """The FP8 of a run, or None where `model.fp8` is off."""
    if not model.fp8:
        return None
    recipe = RECIPES[model.fp8_recipe or Fp8RecipeName.delayed]
    # NeMo's rule: e4m3 wins where both are set.
    unset = model.fp8_e4m3 is None and model.fp8_hybrid is None
    e4m3 = recipe.e4m3 if unset else bool(model.fp8_e4m3)
    kept = model.first_last_layers_bf16
    start, end = model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
    return Fp8Settings(
        recipe=recipe,
        forward_format="e4m3",
        gradient_format="e4m3" if e4m3 else "e5m2",
        margin=model.fp8_margin or 0,
        amax_history_len=1024 if model.fp8_amax_history_len is None else model.fp8_amax_history_len,
        amax_compute_algo=model.fp8_amax_compute_algo or AmaxComputeAlgo.max,
        wgrad=model.fp8_wgrad is not False,
        params=model.fp8_params,
        dot_product_attention=model.fp8_dot_product_attention,
        multi_head_attention=model.fp8_multi_head_attention,
        num_layers_at_start_in_bf16=(1 if start is None else start) if kept else 0,
        num_layers_at_end_in_bf16=(1 if end is None else end) if kept else 0,
        exclude=tuple(model.fp8_exclude),
        emulate=model.fp8_emulate,
    )


def emulation(model: ModelConfig) -> str:
    """How messages offer emulation: together with a reset of every setting that excludes it."""
    in_its_way = {
        "fp8_params=false": model.fp8_params,
        "fp8_dot_product_attention=false": model.fp8_dot_product_attention,
        "transformer_engine=null": model.transformer_engine,
        "gradient_accumulation_fusion=null": model.gradient_accumulation_fusion,
        "context_parallel_size=1": model.context_parallel_size > 1,
    }
    taken_back = [f"model.{instead}" for instead, is_set in in_its_way.items() if is_set]
    return "model.fp8_emulate=true" + (f" with {' '.join(taken_back)}" if taken_back else "")
