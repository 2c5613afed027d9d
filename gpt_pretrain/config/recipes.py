"""The FP8 recipes: one record for each recipe of each engine, which `model.fp8_recipe` and `model.fp8_backend` choose.

A new recipe is a record here and its values in `conf/fp8/NAME.yaml`. What one reader needs stands together: `Numerics`
for the casts and their checks, `Engine` for the proof and the machine's rules, `Cost` for the plan, `Words` for
messages. Every recipe has all four, so none can be forgotten.

The facts are those of Transformer Engine (TE) 2.12, TorchAO 0.18 and megatron-core 0.19.2.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from gpt_pretrain.config.choices import Fp8Backend, Fp8RecipeName
from gpt_pretrain.config.errors import one_of

# Largest finite value of each format (Micikevicius et al. 2022, arXiv 2209.05433, table 1).
FORMAT_MAX = {"e4m3": 448.0, "e5m2": 57344.0}
_FP32_MAX = (2 - 2.0**-23) * 2.0**127
# The keys that only delayed scaling reads.
DELAYED_KEYS = ("fp8_margin", "fp8_interval", "fp8_amax_history_len", "fp8_amax_compute_algo")


class InfinityIn(Enum):
    """What shows that a cast saturated an infinity (docs/fp8.md, "Infinities")."""

    history = "history"
    """The amax history, after the step."""
    amax = "amax"
    """The quantizer's amax, until its next cast."""
    blocks = "blocks"
    """Nothing that is kept: the tensor that was cast is searched, in blocks of scale 1."""


class Use(Enum):
    """Keys of `model.` that some recipes exclude when they are set, alone or two together."""

    fp8_dot_product_attention = 1
    tp_comm_overlap = 2
    cuda_graph_impl = 3
    num_moe_experts = 4
    first_last_layers_bf16 = 5
    fp8_params = 6
    fp8_params_and_tp_comm_overlap = 7
    fp8_params_and_precision_aware_optimizer = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Numerics:
    """How values are cast and products are added up."""

    block: int | None = None
    """Length of a block that shares a scale; None: one scale per tensor, or per row (`scales_rows`)."""
    squares_weights: bool = False
    """A block of a weight is as high as it is long."""
    scales_rows: bool = False
    """One scale for each row or column along the dimension that a product sums over."""
    scales_dgrad_weight_whole: bool = False
    """In dgrad the weight has one scale for the whole tensor."""
    powers_of_two: bool = False
    """Scales are rounded down to powers of two."""
    has_exponents: bool = False
    """A scale is stored as an exponent in eight bits (E8M0), not as an fp32 number."""
    takes_logarithm: bool = False
    """That rounding uses an fp32 logarithm, which takes a quotient just below a power of two up to it."""
    adds_bias_rounded: bool = False
    """The bias is added after the product is rounded."""
    least_amax: float = 0.0
    """Smaller amaxes count as this one. 0: an amax of 0 gives the scale 1, or the largest number."""

    @property
    def scales_tensors(self) -> bool:
        """Whether each tensor has one scale, not one per block or row."""
        return self.block is None and not self.scales_rows

    @property
    def activation_scale_bytes(self) -> float:
        """Bytes of scales per value of an activation, where blocks have scales."""
        return 0.0 if self.block is None else (1 if self.has_exponents else 4) / self.block

    @property
    def weight_scale_bytes(self) -> float:
        """The same of a weight."""
        return self.activation_scale_bytes / (self.block or 1 if self.squares_weights else 1)

    def largest_scale(self, format: str) -> float:
        """The scale of a tensor of zeros or nearly so, or just below it."""
        if not self.least_amax:
            return _FP32_MAX
        largest = FORMAT_MAX[format] / self.least_amax
        return 2.0 ** math.floor(math.log2(largest)) if self.powers_of_two else largest * (1 - 2**-20)


@dataclass(frozen=True, kw_only=True, slots=True)
class Engine:
    """What the engine's library has of a recipe, and the hardware that it needs."""

    te_class: str = ""
    """Class in `transformer_engine.common.recipe`; empty for other engines."""
    infinity_in: InfinityIn | None
    """Where TE leaves a trace of an infinity (`fp8.infinities`). None: nowhere known, or the layers are ours and keep
    the largest amaxes themselves."""
    scales_flag: tuple[str, str, str] | None = None
    """A field of TE's recipe, and what scales are where it is true and where it is false."""
    capability: tuple[tuple[int, int], tuple[int, int] | None] = ((8, 9), None)
    """CUDA compute capabilities: the first that works, and the first too new (TE's `check_recipe_support`)."""
    cuda: tuple[int, int] | None = None
    """The oldest CUDA version that works."""
    hardware: str = ""
    """`capability` and `cuda` in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the plan expects, calibrated as `plan.machine` says."""

    peak_share: float = 0.665
    """Share of the FP8 peak that a large product reaches in a training step."""
    searches_amax: bool
    """Every cast first reads the whole tensor to find its amax."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Words:
    """What messages say."""

    scales_from: str
    """A sentence that says where a scale comes from."""
    finer: str = ""
    """What to choose where one scale cannot cover a tensor's range; empty: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A way to scale tensors for FP8: what it does to a run, and a record for each of its readers."""

    name: str
    """Transformer Engine's recipes have the names that megatron-core's `get_fp8_recipe` expects."""
    varies: str = ""
    """The recipe that an extension's variant is of."""
    backend: Fp8Backend = Fp8Backend.transformer_engine
    numerics: Numerics
    engine: Engine
    cost: Cost
    words: Words
    e4m3: bool = False
    """Without `fp8_hybrid` and `fp8_e4m3`: gradients are in E4M3 too, not in E5M2."""
    has_own_formats: bool = False
    """No key changes the formats."""
    keeps_history: bool = False
    """Scales come from the amaxes of earlier passes, which checkpoints store."""
    alignment: int = 16
    """Both dimensions of every operand must be multiples of this."""
    gathered_rows: int = 8
    """A rank's rows that are cast and then gathered along the sequence must be a multiple of this (TE's
    `assert_dim_for_all_gather`)."""
    gathers_blocks: bool = False
    """Inputs gathered along the sequence must hold whole blocks in both dimensions."""
    leaves_wgrad_out: bool = False
    """`fp8_wgrad=false` takes weight gradients out of FP8: TE 2.12 dropped this, emulation has it."""
    has_wgrad: bool = True
    """Weight gradients are computed in FP8."""
    gains_by_graphs: bool = False
    """`cuda_graph_impl=null` chooses graphs for small layers."""
    small: tuple[tuple[float, float], ...] = ()
    """(rows, columns): weights up to one of these sizes gain nothing from FP8. Empty: not measured."""
    refusals: Mapping[Use, str] = field(default_factory=dict)
    """What excludes the recipe, with the reasons."""

    @property
    def core_name(self) -> str:
        """megatron-core's name."""
        return self.varies or self.name

    @property
    def preset(self) -> str:
        """The option of `fp8=` that chooses it."""
        return self.name if self.backend is Fp8Backend.transformer_engine else f"{self.backend.name}_{self.name}"

    def is_small(self, rows: int, columns: int) -> bool:
        """Whether a rank's weight is known to be too small to gain from FP8."""
        return any(rows <= most_rows and columns <= most_columns for most_rows, most_columns in self.small)

    def why_not(self, use: Use) -> str | None:
        """Why the recipe cannot be combined with a use of FP8; None where it can."""
        return self.refusals.get(use)


_BLOCK_REFUSALS = {
    **dict.fromkeys(
        (Use.fp8_dot_product_attention, Use.tp_comm_overlap),
        "it has one scale for each block of a tensor",
    ),
    Use.cuda_graph_impl: "tensorwise is the only FP8 recipe tested with graphs",
}

_TORCHAO_REFUSALS = {
    Use.fp8_dot_product_attention: "TorchAO casts linear layers only",
    Use.num_moe_experts: "experts are not tested with TorchAO",
    Use.tp_comm_overlap: "it belongs to Transformer Engine's layers, not to TorchAO's",
    Use.cuda_graph_impl: "tensorwise of Transformer Engine is the only FP8 recipe tested with graphs",
}
# torchao.float8.float8_utils.EPS
_TORCHAO_EPS = 1e-12


def _torchao(refusals: Mapping[Use, str] | None = None, **fields: Any) -> Recipe:
    """A recipe of `torchao.float8.Float8LinearConfig.from_recipe_name`."""
    return Recipe(
        backend=Fp8Backend.torchao,
        has_own_formats=True,
        # Inputs are cast after the gather along the sequence.
        gathered_rows=1,
        refusals={**_TORCHAO_REFUSALS, **(refusals or {})},
        **fields,
    )


def _rowwise(name: str, *, scales_dgrad_weight_whole: bool = False, **fields: Any) -> Recipe:
    return _torchao(
        name=name,
        e4m3=True,
        numerics=Numerics(
            scales_rows=True,
            scales_dgrad_weight_whole=scales_dgrad_weight_whole,
            powers_of_two=True,
            takes_logarithm=True,
            adds_bias_rounded=True,
            least_amax=_TORCHAO_EPS,
        ),
        # With scales of rows torch._scaled_mm runs CUTLASS kernels, not cuBLAS.
        engine=Engine(infinity_in=None, capability=((9, 0), None), hardware="compute capability 9.0 or newer"),
        cost=Cost(peak_share=0.61, searches_amax=True),
        words=Words(scales_from="the scale of a row or column comes from its own values"),
        refusals={Use.fp8_params: "TorchAO's FP8 all-gather is of weights with one scale each"},
        **fields,
    )


_TE = (
    Recipe(
        name="delayed",
        numerics=Numerics(),
        engine=Engine(te_class="DelayedScaling", infinity_in=InfinityIn.history),
        cost=Cost(searches_amax=False),
        words=Words(
            scales_from="the scale of a tensor comes from the amaxes of earlier passes",
            finer="fp8=tensorwise, whose scales follow each tensor",
        ),
        keeps_history=True,
        leaves_wgrad_out=True,
        refusals={
            Use.first_last_layers_bf16: "amaxes are reduced once for all layers, and megatron-core refuses it",
            Use.cuda_graph_impl: "megatron-core 0.19 rolls the amax history of gradients once per layer, not per pass",
            Use.num_moe_experts: "the history of an expert that gets few tokens goes stale, and delayed scales are not "
            "proven",
        },
    ),
    Recipe(
        name="tensorwise",
        numerics=Numerics(),
        engine=Engine(
            te_class="Float8CurrentScaling",
            infinity_in=InfinityIn.amax,
            scales_flag=("use_power_2_scales", "powers of two", "any"),
        ),
        cost=Cost(searches_amax=True),
        words=Words(scales_from="the scale of a tensor comes from the tensor itself", finer="fp8=blockwise"),
        gains_by_graphs=True,
        refusals={
            Use.fp8_params_and_tp_comm_overlap: "FP8 weights with user buffers were tested under delayed scaling only",
        },
    ),
    Recipe(
        name="blockwise",
        e4m3=True,
        numerics=Numerics(block=128, squares_weights=True, powers_of_two=True),
        engine=Engine(
            te_class="Float8BlockScaling",
            infinity_in=InfinityIn.blocks,
            scales_flag=("use_f32_scales", "any", "powers of two"),
            capability=((9, 0), None),
            cuda=(12, 9),
            hardware="compute capability 9.0 and CUDA 12.9 or newer",
        ),
        # CUDA cores add up the partial sums of blocks.
        cost=Cost(peak_share=0.53, searches_amax=False),
        words=Words(scales_from="the scale of a block comes from the block itself"),
        gathered_rows=128,
        gathers_blocks=True,
        refusals={
            **_BLOCK_REFUSALS,
            Use.fp8_params_and_precision_aware_optimizer: "its masters are not tested with weights in blocks",
        },
    ),
    Recipe(
        name="mxfp8",
        e4m3=True,
        numerics=Numerics(block=32, powers_of_two=True, has_exponents=True),
        engine=Engine(
            te_class="MXFP8BlockScaling",
            infinity_in=None,
            capability=((10, 0), (12, 0)),
            hardware="compute capability 10.x (data-center Blackwell)",
        ),
        # peak_share is not measured: Blackwell's tensor cores apply these scales themselves.
        cost=Cost(searches_amax=False),
        words=Words(scales_from="the scale of 32 values comes from those values"),
        alignment=32,
        gathered_rows=32,
        refusals={
            **_BLOCK_REFUSALS,
            # MixedPrecisionOptimizer.prepare_model_params_for_param_sync: weights would be zeros unless the loop
            # filled the gradient buffer before each gather.
            Use.fp8_params: "megatron-core gathers these weights in BF16 through the gradient buffer, which this "
            "application does not fill",
        },
    ),
)
_TORCHAO = (
    _torchao(
        name="tensorwise",
        numerics=Numerics(adds_bias_rounded=True, least_amax=_TORCHAO_EPS),
        engine=Engine(infinity_in=None),
        cost=Cost(searches_amax=True),
        words=Words(scales_from="the scale of a tensor comes from the tensor itself", finer="fp8=torchao_rowwise"),
        # _auto_filter_for_tensorwise (torchao/float8/float8_linear_utils.py), from products measured on an H100.
        small=((1024, 4096),),
    ),
    # _auto_filter_for_rowwise; TorchAO has none for rowwise_with_gw_hp.
    _rowwise("rowwise", small=((2048, math.inf), (math.inf, 1024), (4096, 2048))),
    _rowwise("rowwise_with_gw_hp", scales_dgrad_weight_whole=True, has_wgrad=False),
)
# By preset; an engine's first is what `fp8_recipe=null` means.
RECIPES: Mapping[str, Recipe] = {recipe.preset: recipe for recipe in (*_TE, *_TORCHAO)}
for _name in dict.fromkeys(recipe.name for recipe in RECIPES.values()):
    Fp8RecipeName.add(_name)


def recipes_of(backend: Fp8Backend) -> list[Recipe]:
    """The recipes of an engine, its default first."""
    return [recipe for recipe in RECIPES.values() if recipe.backend is backend]


def recipes_for(*uses: Use, backend: Fp8Backend = Fp8Backend.transformer_engine) -> str:
    """Presets of an engine's recipes that can be combined with all these uses, as messages offer them."""
    return one_of([recipe.preset for recipe in recipes_of(backend) if not any(map(recipe.why_not, uses))])
