"""FP8: one record for each recipe of each engine, and the settings that follow from a run's FP8 keys.

Everything that acts on FP8 (rules, translation, plan, proof, emulation) reads `Fp8Settings`: they agree on what null
means.

A new recipe is a member of `config.choices.Fp8RecipeName`, a record here, `conf/fp8/NAME.yaml` and its casts in
`fp8.casts`. The facts are those of Transformer Engine (TE) 2.12, TorchAO 0.18 and megatron-core 0.19.2.
"""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import AUTO, AmaxComputeAlgo, Fp8Backend, Fp8RecipeName
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.spec.experts import EXPERT_LINEARS, leaves_experts_out

# Largest finite value of each format (Micikevicius et al. 2022, arXiv 2209.05433, table 1).
FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_FP32_MAX = (2 - 2.0**-23) * 2.0**127
# The keys that only delayed scaling reads.
DELAYED_KEYS = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")


class InfinityIn(Enum):
    """What shows an infinity that a cast has saturated (docs/fp8.md, "Infinities")."""

    history = "history"
    """The amax history, after the step."""
    amax = "amax"
    """The quantizer's amax, until its next cast."""
    blocks = "blocks"
    """No number; blocks of scale 1 are searched in the tensor that was cast."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A way to scale tensors for FP8."""

    name: str
    backend: Fp8Backend = Fp8Backend.transformer_engine
    te_class: str = ""
    """Class of `transformer_engine.common.recipe`; empty for recipes of other engines."""
    e4m3: bool
    """Where neither `fp8_hybrid` nor `fp8_e4m3` is set: E4M3 also for gradients, rather than hybrid."""
    has_own_formats: bool = False
    """No key changes the formats."""
    scales_from: str
    """A sentence that says where a scale comes from."""
    infinity_in: InfinityIn | None
    """Where Transformer Engine leaves an infinity that a cast met (`fp8.infinities`). None: nowhere that is known, or
    the layers are ours, which keep the largest amaxes themselves."""
    keeps_history: bool = False
    """Scales come from the amaxes of earlier passes, a state that checkpoints hold."""
    searches_amax: bool = False
    """Every cast reads the whole tensor first, to find its amax."""
    block: int | None = None
    """Values along a block with one scale; None: one scale per tensor, or per row (`scales_rows`)."""
    scales_rows: bool = False
    """One scale for each row or column along the dimension that a product sums over."""
    scales_dgrad_weight_whole: bool = False
    """dgrad reads a weight with one scale for the whole tensor."""
    powers_of_two: bool = False
    """Scales are rounded down to powers of two."""
    takes_logarithm: bool = False
    """By a logarithm in fp32, which rounds a quotient just below a power of two up to that power."""
    adds_bias_rounded: bool = False
    """The bias is added after the product is rounded."""
    least_amax: float = 0.0
    """The smallest amax that counts in a scale. 0: an amax of 0 gives the scale 1, or the largest number."""
    activation_scale_bytes: float = 0.0
    """Bytes of scales per value of an activation."""
    weight_scale_bytes: float = 0.0
    """Bytes of scales per value of a weight."""
    alignment: int = 16
    """Both dimensions of every operand must be multiples of this."""
    gathered_rows: int = 8
    """A rank's rows that are cast before they are gathered along the sequence must be a multiple of this (TE's
    `assert_dim_for_all_gather`)."""
    gathers_blocks: bool = False
    """Inputs that are gathered along the sequence must hold whole blocks in both dimensions."""
    leaves_wgrad_out: bool = False
    """`fp8_wgrad=false` can take weight gradients out of FP8; TE 2.12 dropped it, emulation has it."""
    has_wgrad: bool = True
    """Weight gradients are computed in FP8."""
    gains_by_graphs: bool = False
    """`cuda_graph_impl=null` chooses graphs for small layers."""
    scales_flag: tuple[str, str, str] | None = None
    """A field of TE's recipe about its scales, and what they are where it is true and where it is false."""
    scales: str = ""
    """What they must be."""
    capability: tuple[tuple[int, int], tuple[int, int] | None] = ((8, 9), None)
    """CUDA compute capabilities that compute it: the first, and the first beyond them (TE's
    `check_recipe_support`)."""
    cuda: tuple[int, int] | None = None
    """The oldest CUDA that does."""
    hardware: str = ""
    """`capability` and `cuda` in words."""
    peak_share: float
    """Share of the FP8 peak that a large product reaches in a training step (calibrated, see `plan.machine`)."""
    small: tuple[tuple[float, float], ...] = ()
    """Rows and columns: a weight no larger in both than one of these gains nothing by FP8. Empty: not measured."""
    finer: str = ""
    """The choice where a tensor's values span more than one scale can bring into the format; empty: none."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Features that the recipe cannot be combined with, keys of `model.` or phrases, with the reasons."""

    @property
    def scales_tensors(self) -> bool:
        """One scale per tensor, rather than per block or row."""
        return self.block is None and not self.scales_rows

    @property
    def preset(self) -> str:
        """The option of the group `fp8=` that chooses it."""
        return self.name if self.backend is Fp8Backend.transformer_engine else f"{self.backend.name}_{self.name}"

    def is_small(self, rows: int, columns: int) -> bool:
        """Whether a rank's weight is known to be too small to gain by FP8."""
        return any(rows <= most_rows and columns <= most_columns for most_rows, most_columns in self.small)

    def largest_scale(self, format: str) -> float:
        """The scale of a tensor of (nearly) zeros, or just below it; fp32's largest number where amax has no limit."""
        if not self.least_amax:
            return _FP32_MAX
        largest = FORMAT_MAX[format] / self.least_amax
        return 2.0 ** math.floor(math.log2(largest)) if self.powers_of_two else largest * (1 - 2**-20)

    def why_not(self, feature: str) -> str | None:
        """Why the recipe cannot be combined with a feature; None where it can."""
        return self.refusals.get(feature)


_OF_BLOCKS = {
    **dict.fromkeys(
        ("fp8_dot_product_attention", "tp_comm_overlap", "activation_cast_fusion"),
        "it has one scale for each block of a tensor",
    ),
    "cuda_graph_impl": "tensorwise is the only FP8 recipe tested with graphs",
}

# torchao.float8.float8_utils.EPS
_LEAST_AMAX = 1e-12
_OF_TORCHAO = {
    "fp8_dot_product_attention": "TorchAO casts linear layers only",
    "num_moe_experts": "experts are not tested with TorchAO",
    **dict.fromkeys(
        ("tp_comm_overlap", "activation_cast_fusion"), "it belongs to Transformer Engine's layers, not to TorchAO's"
    ),
    "cuda_graph_impl": "tensorwise of Transformer Engine is the only FP8 recipe tested with graphs",
}


_OF_ROWS: dict[str, Any] = {
    "scales_rows": True,
    "refusals": {"fp8_params": "TorchAO's FP8 all-gather is of weights with one scale each"},
    "powers_of_two": True,
    "takes_logarithm": True,
    # torch._scaled_mm with scales of rows: kernels of CUTLASS, not cuBLAS.
    "capability": ((9, 0), None),
    "peak_share": 0.61,
    "hardware": "compute capability 9.0 or newer",
}


def _torchao(refusals: Mapping[str, str] | None = None, **fields: Any) -> Recipe:
    """A recipe of `torchao.float8.Float8LinearConfig.from_recipe_name`."""
    return Recipe(
        backend=Fp8Backend.torchao,
        infinity_in=None,
        has_own_formats=True,
        least_amax=_LEAST_AMAX,
        adds_bias_rounded=True,
        # Inputs are cast after they are gathered along the sequence.
        gathered_rows=1,
        refusals={**_OF_TORCHAO, **(refusals or {})},
        **fields,
    )


_TE = (
    Recipe(
        name="delayed",
        te_class="DelayedScaling",
        e4m3=False,
        scales_from="the scale of a tensor comes from the amaxes of earlier passes",
        infinity_in=InfinityIn.history,
        keeps_history=True,
        finer="fp8=tensorwise, whose scales follow each tensor",
        leaves_wgrad_out=True,
        peak_share=0.665,
        refusals={
            "first_last_layers_bf16": "amaxes are reduced once for all layers, and megatron-core refuses it",
            "cuda_graph_impl": "megatron-core 0.19 rolls the amax history of gradients once per layer, not per pass",
            "num_moe_experts": "the history of an expert that gets few tokens goes stale, and delayed scales are not "
            "proven",
        },
    ),
    Recipe(
        name="tensorwise",
        te_class="Float8CurrentScaling",
        e4m3=False,
        scales_from="the scale of a tensor comes from the tensor itself",
        infinity_in=InfinityIn.amax,
        searches_amax=True,
        finer="fp8=blockwise",
        gains_by_graphs=True,
        scales_flag=("use_power_2_scales", "powers of two", "any"),
        scales="any",
        peak_share=0.665,
        refusals={
            "fp8_params with tp_comm_overlap": "FP8 weights with user buffers were tested under delayed scaling only",
            "activation_cast_fusion with tp_comm_overlap": "tested with user buffers under delayed scaling only",
        },
    ),
    Recipe(
        name="blockwise",
        te_class="Float8BlockScaling",
        e4m3=True,
        scales_from="the scale of a block comes from the block itself",
        infinity_in=InfinityIn.blocks,
        block=128,
        activation_scale_bytes=4 / 128,
        # Weights have square blocks.
        weight_scale_bytes=4 / 128**2,
        gathered_rows=128,
        gathers_blocks=True,
        powers_of_two=True,
        scales_flag=("use_f32_scales", "any", "powers of two"),
        scales="powers of two",
        capability=((9, 0), None),
        cuda=(12, 9),
        hardware="compute capability 9.0 and CUDA 12.9 or newer",
        # Partial sums of blocks are promoted outside of the tensor cores.
        peak_share=0.53,
        refusals={
            **_OF_BLOCKS,
            "fp8_params with use_precision_aware_optimizer": "its masters are not tested with weights in blocks",
        },
    ),
    Recipe(
        name="mxfp8",
        te_class="MXFP8BlockScaling",
        e4m3=True,
        scales_from="the scale of 32 values comes from those values",
        infinity_in=None,
        block=32,
        activation_scale_bytes=1 / 32,
        weight_scale_bytes=1 / 32,
        alignment=32,
        gathered_rows=32,
        powers_of_two=True,
        capability=((10, 0), (12, 0)),
        hardware="compute capability 10.x (data-center Blackwell)",
        # Blackwell's tensor cores apply these scales themselves. Not measured.
        peak_share=0.665,
        refusals={
            **_OF_BLOCKS,
            # MixedPrecisionOptimizer.prepare_model_params_for_param_sync: unless the loop filled the gradients' buffer
            # before each gather, weights would be zeros.
            "fp8_params": "megatron-core gathers these weights in BF16 through the gradient buffer, which this "
            "application does not fill",
        },
    ),
)
_TORCHAO = (
    _torchao(
        name="tensorwise",
        e4m3=False,
        scales_from="the scale of a tensor comes from the tensor itself",
        searches_amax=True,
        # _auto_filter_for_tensorwise (torchao/float8/float8_linear_utils.py), from products measured on an H100.
        small=((1024, 4096),),
        finer="fp8=torchao_rowwise",
        peak_share=0.665,
    ),
    _torchao(
        name="rowwise",
        e4m3=True,
        scales_from="the scale of a row or column comes from its own values",
        searches_amax=True,
        # _auto_filter_for_rowwise; TorchAO has none for rowwise_with_gw_hp.
        small=((2048, math.inf), (math.inf, 1024), (4096, 2048)),
        **_OF_ROWS,
    ),
    _torchao(
        name="rowwise_with_gw_hp",
        e4m3=True,
        scales_from="the scale of a row or column comes from its own values",
        scales_dgrad_weight_whole=True,
        searches_amax=True,
        has_wgrad=False,
        **_OF_ROWS,
    ),
)
# By their presets. The first of an engine's is the one that `fp8_recipe=null` means.
RECIPES: Mapping[str, Recipe] = {recipe.preset: recipe for recipe in (*_TE, *_TORCHAO)}


def recipes_of(backend: Fp8Backend) -> list[Recipe]:
    """The recipes of an engine, its usual one first."""
    return [recipe for recipe in RECIPES.values() if recipe.backend is backend]


def recipes_for(*features: str, backend: Fp8Backend = Fp8Backend.transformer_engine) -> list[str]:
    """Presets of an engine's recipes that can be combined with all these features, for messages."""
    return [recipe.preset for recipe in recipes_of(backend) if not any(map(recipe.why_not, features))]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Settings:
    """The FP8 of a run."""

    backend: Fp8Backend
    recipe: Recipe
    """Another engine's where this one has none of that name, which `rules.fp8` refuses."""
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
    """Patterns of linear layers kept out of FP8, and `AUTO` for those too small to gain."""
    experts_left_out: bool
    """Experts are computed by one kernel in BF16 (`model.moe_grouped_kernel`)."""
    emulate: bool

    @property
    def in_local_layers(self) -> bool:
        """Whether megatron-core's local layers compute it, as with TorchAO and in emulation."""
        return self.emulate or self.backend is Fp8Backend.torchao

    @property
    def hybrid(self) -> bool:
        """E4M3 forward and E5M2 backward; otherwise E4M3 in both."""
        return self.gradient_format == "e5m2"

    @property
    def exclude_small(self) -> bool:
        """Whether layers too small to gain stay out."""
        return AUTO in self.exclude

    @property
    def high_precision(self) -> tuple[str, ...]:
        """Patterns of linear layers that Transformer Engine computes outside of FP8."""
        return (*self.exclude, EXPERT_LINEARS) if self.experts_left_out else self.exclude

    def excludes(self, module: str) -> bool:
        """Whether a pattern keeps a linear layer out, by its name in the whole model (`products.Linear.module`)."""
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude)


def resolve_fp8(model: ModelConfig) -> Fp8Settings | None:
    """The FP8 of a run, or None where `model.fp8` is off."""
    if not model.fp8:
        return None
    backend = model.fp8_backend or Fp8Backend.transformer_engine
    own = recipes_of(backend)
    named = [each for each in (*own, *RECIPES.values()) if model.fp8_recipe in (None, Fp8RecipeName[each.name])]
    recipe = named[0]
    # NeMo's rule: e4m3 wins where both are set.
    unset = recipe.has_own_formats or (model.fp8_e4m3 is None and model.fp8_hybrid is None)
    e4m3 = recipe.e4m3 if unset else bool(model.fp8_e4m3)
    kept = model.first_last_layers_bf16
    start, end = model.num_layers_at_start_in_bf16, model.num_layers_at_end_in_bf16
    return Fp8Settings(
        backend=backend,
        recipe=recipe,
        forward_format="e4m3",
        gradient_format="e4m3" if e4m3 else "e5m2",
        margin=model.fp8_margin or 0,
        amax_history_len=1024 if model.fp8_amax_history_len is None else model.fp8_amax_history_len,
        amax_compute_algo=model.fp8_amax_compute_algo or AmaxComputeAlgo.max,
        wgrad=recipe.has_wgrad and model.fp8_wgrad is not False,
        params=model.fp8_params,
        dot_product_attention=model.fp8_dot_product_attention,
        multi_head_attention=model.fp8_multi_head_attention,
        num_layers_at_start_in_bf16=(1 if start is None else start) if kept else 0,
        num_layers_at_end_in_bf16=(1 if end is None else end) if kept else 0,
        exclude=tuple(model.fp8_exclude),
        experts_left_out=leaves_experts_out(model),
        emulate=model.fp8_emulate,
    )


def local_layers(model: ModelConfig) -> str:
    """The setting that leaves FP8 to megatron-core's local layers; empty where none does."""
    if not model.fp8:
        return ""
    of_torchao = f"model.fp8_backend={Fp8Backend.torchao.name}" * (model.fp8_backend is Fp8Backend.torchao)
    return "model.fp8_emulate=true" if model.fp8_emulate else of_torchao


def emulation(model: ModelConfig) -> str:
    """How messages offer emulation: with a reset of every setting that excludes it."""
    in_its_way = {
        "fp8_params=false": model.fp8_params,
        "fp8_dot_product_attention=false": model.fp8_dot_product_attention,
        "transformer_engine=null": model.transformer_engine,
        "context_parallel_size=1": model.context_parallel_size > 1,
    }
    taken_back = [f"model.{instead}" for instead, is_set in in_its_way.items() if is_set]
    return "model.fp8_emulate=true" + (f" with {' '.join(taken_back)}" if taken_back else "")
