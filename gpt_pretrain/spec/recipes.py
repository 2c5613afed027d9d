"""The FP8 recipes: one record each, read by the rules, the proof, the plan, the emulation and the doctor.

A new recipe is a member of `config.choices.Fp8RecipeName`, a record here, `conf/fp8/NAME.yaml` and its casts in
`fp8.emulation.casts`. What the columns say was read in Transformer Engine (TE) 2.12 and megatron-core 0.19.2.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpt_pretrain.config.choices import Fp8RecipeName


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How tensors get their FP8 scales, and what follows from it."""

    name: str
    te_class: str
    """Class of `transformer_engine.common.recipe`."""
    e4m3: bool
    """E4M3 also for gradients, where neither `fp8_hybrid` nor `fp8_e4m3` is set; else hybrid."""
    scales_from: str
    """Where a scale comes from, as a sentence."""
    keeps_history: bool = False
    """Scales come from the amaxes of earlier passes: the recipe has state, which checkpoints hold."""
    searches_amax: bool = False
    """Every cast reads the whole tensor first, to find its amax."""
    block: int | None = None
    """Values along a block with one scale; None: one scale for the whole tensor."""
    activation_scale_bytes: float = 0.0
    """Bytes of scales per value of an activation."""
    weight_scale_bytes: float = 0.0
    """Bytes of scales per value of a weight."""
    alignment: int = 16
    """Both dimensions of every operand must be multiples of this."""
    gathered_rows: int = 8
    """The rows that a rank casts before they are gathered along the sequence must be multiples of this (TE's
    `assert_dim_for_all_gather`)."""
    gathers_blocks: bool = False
    """Inputs that are gathered along the sequence must hold whole blocks in both dimensions."""
    leaves_wgrad_out: bool = False
    """Weight gradients can be computed outside of FP8 (`fp8_wgrad=false`); TE 2.12 dropped it, emulation has it."""
    fuses_activation_cast: bool = False
    """`activation_cast_fusion=null` chooses the fusion; elsewhere losses moved by more than noise, or it is refused."""
    gains_by_graphs: bool = False
    """`cuda_graph_impl=null` chooses graphs for small layers."""
    scales_flag: tuple[str, str, str] | None = None
    """A field of TE's recipe about its scales, and what they are where it is true, and where false."""
    scales: str = ""
    """Which of the two they must be."""
    capability: tuple[tuple[int, int], tuple[int, int] | None] = ((8, 9), None)
    """CUDA compute capabilities that compute it: the first, and the first beyond them (TE's
    `check_recipe_support`)."""
    cuda: tuple[int, int] | None = None
    """The oldest CUDA that does."""
    hardware: str = ""
    """The two above in words."""
    peak_share: float
    """Share of the FP8 peak that a large product reaches in a training step (calibrated, see `plan.hardware`)."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """What the recipe cannot be combined with: a key of `model.`, or a word for a feature, to the reason."""

    @property
    def scales_tensors(self) -> bool:
        """One scale per tensor, rather than per block."""
        return self.block is None

    def why_not(self, feature: str) -> str | None:
        """Why the recipe cannot be combined with a feature; None where it can."""
        return self.refusals.get(feature)


_BLOCKS_NOT_TENSORS = "it has one scale for each block of a tensor"

RECIPES: Mapping[Fp8RecipeName, Recipe] = {
    Fp8RecipeName.delayed: Recipe(
        name="delayed",
        te_class="DelayedScaling",
        e4m3=False,
        scales_from="the scale of a tensor comes from the amaxes of earlier passes",
        keeps_history=True,
        leaves_wgrad_out=True,
        fuses_activation_cast=True,
        peak_share=0.665,
        refusals={
            "first_last_layers_bf16": "amaxes are reduced once for all layers, and megatron-core refuses it",
            "cuda_graph_impl": "megatron-core 0.19 rolls the amax history of gradients once per layer, not per pass",
            "num_moe_experts": "the history of an expert that gets few tokens goes stale, and delayed scales are not "
            "proven",
        },
    ),
    Fp8RecipeName.tensorwise: Recipe(
        name="tensorwise",
        te_class="Float8CurrentScaling",
        e4m3=False,
        scales_from="the scale of a tensor comes from the tensor itself",
        searches_amax=True,
        gains_by_graphs=True,
        scales_flag=("use_power_2_scales", "powers of two", "any"),
        scales="any",
        peak_share=0.665,
        refusals={
            "fp8_params with tp_comm_overlap": "FP8 weights with user buffers were tested under delayed scaling only",
            "activation_cast_fusion with tp_comm_overlap": "tested with user buffers under delayed scaling only",
        },
    ),
    Fp8RecipeName.blockwise: Recipe(
        name="blockwise",
        te_class="Float8BlockScaling",
        e4m3=True,
        scales_from="the scale of a block comes from the block itself",
        block=128,
        activation_scale_bytes=4 / 128,
        # Weights have square blocks.
        weight_scale_bytes=4 / 128**2,
        gathered_rows=128,
        gathers_blocks=True,
        scales_flag=("use_f32_scales", "any", "powers of two"),
        scales="powers of two",
        capability=((9, 0), None),
        cuda=(12, 9),
        hardware="compute capability 9.0 and CUDA 12.9 or newer",
        # Partial sums of blocks are promoted outside of the tensor cores.
        peak_share=0.53,
        refusals={
            "fp8_dot_product_attention": _BLOCKS_NOT_TENSORS,
            "tp_comm_overlap": _BLOCKS_NOT_TENSORS,
            "activation_cast_fusion": _BLOCKS_NOT_TENSORS,
            "cuda_graph_impl": "tensorwise is the only FP8 recipe tested with graphs",
            "fp8_params with use_precision_aware_optimizer": "its masters are not tested with weights in blocks",
        },
    ),
    Fp8RecipeName.mxfp8: Recipe(
        name="mxfp8",
        te_class="MXFP8BlockScaling",
        e4m3=True,
        scales_from="the scale of 32 values comes from those values",
        block=32,
        activation_scale_bytes=1 / 32,
        weight_scale_bytes=1 / 32,
        alignment=32,
        gathered_rows=32,
        capability=((10, 0), (12, 0)),
        hardware="compute capability 10.x (data-center Blackwell)",
        # Blackwell's tensor cores apply these scales themselves. Not measured.
        peak_share=0.665,
        refusals={
            "fp8_dot_product_attention": _BLOCKS_NOT_TENSORS,
            "tp_comm_overlap": _BLOCKS_NOT_TENSORS,
            "activation_cast_fusion": _BLOCKS_NOT_TENSORS,
            "cuda_graph_impl": "tensorwise is the only FP8 recipe tested with graphs",
            # MixedPrecisionOptimizer.prepare_model_params_for_param_sync: the loop would have to fill the gradients'
            # buffer before each gather; weights would be zeros without it.
            "fp8_params": "megatron-core gathers these weights in BF16 through the gradient buffer, which this "
            "application does not fill",
        },
    ),
}


def recipes_for(*features: str) -> list[str]:
    """Names of the recipes that can be combined with all these features, for messages."""
    return [recipe.name for recipe in RECIPES.values() if not any(map(recipe.why_not, features))]
