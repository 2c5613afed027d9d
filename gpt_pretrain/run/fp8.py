"""The FP8 of a run as its keys say: recipe, formats, and which layers stay out.

Everything that acts on FP8 (rules, translation, plan, proof, emulation) reads `Fp8Settings`, so all agree on what null
means. The kernel that multiplies the rows of a rank's experts is chosen here too: with `moe_grouped_kernel=triton` the
experts stay out of FP8.
"""

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpt_pretrain.config.choices import AUTO, Activation, AmaxComputeAlgo, Fp8Backend, Fp8RecipeName, MoeGroupedKernel
from gpt_pretrain.config.derived import moe_ffn_hidden_size
from gpt_pretrain.config.recipes import RECIPES, Recipe, Use, recipes_of
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.extend.model import RecipeVariant
from gpt_pretrain.extend.registry import registered

# A setting that excludes what was asked for, why, and other ways out beside doing without (`config.errors.refusals`).
type Obstacle = tuple[str, ...]

# Null means one kernel for all experts of a rank from this many on, and up to this many operations in an expert's first
# product. Transformer Engine launches one product per expert, which took an H200's host about 65 µs; in that time the
# GPU computes 4e10 operations. With 128 experts of 3e9 a step took 983 ms, and its kernels 368 (the shape of
# Qwen3-30B-A3B, four layers, 2 × 4,096 tokens). For few large experts cuBLAS is faster.
MANY_EXPERTS = 16
MAX_PRODUCT_FLOPS = 4e10

# The linear layers of experts, by their names in the whole model.
EXPERT_LINEARS = "*.mlp.experts.*"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Settings:
    """The FP8 of a run."""

    backend: Fp8Backend
    recipe: Recipe
    """Another engine's if this engine has none of that name; `rules.fp8` refuses that."""
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
    num_layers_at_start_in_bf16: int
    num_layers_at_end_in_bf16: int
    exclude: tuple[str, ...]
    """Patterns of linear layers kept out of FP8; `AUTO` stands for those too small to gain."""
    experts_left_out: bool
    """One BF16 kernel computes the experts (`model.moe_grouped_kernel`)."""
    emulate: bool

    @property
    def in_local_layers(self) -> bool:
        """Whether megatron-core's local layers compute it: TorchAO's and emulated FP8."""
        return self.emulate or self.backend is Fp8Backend.torchao

    @property
    def hybrid(self) -> bool:
        """Whether the backward pass is in E5M2, not in E4M3 like the forward pass."""
        return self.gradient_format == "e5m2"

    @property
    def exclude_small(self) -> bool:
        """Whether layers too small to gain from FP8 stay out."""
        return AUTO in self.exclude

    @property
    def high_precision(self) -> tuple[str, ...]:
        """Patterns of linear layers that Transformer Engine computes outside of FP8."""
        return (*self.exclude, EXPERT_LINEARS) if self.experts_left_out else self.exclude

    def excludes(self, module: str) -> bool:
        """Whether a pattern keeps a linear layer out, by its name in the whole model (`products.Linear.module`)."""
        return any(fnmatch.fnmatchcase(module, pattern) for pattern in self.exclude)


def resolve_fp8(model: ModelConfig) -> Fp8Settings | None:
    """The FP8 of a run; None without `model.fp8`."""
    if not model.fp8:
        return None
    backend = model.fp8_backend or Fp8Backend.transformer_engine
    known = (*recipes_of(backend), *RECIPES.values(), *_variants())
    recipe = next(each for each in known if model.fp8_recipe in (None, Fp8RecipeName[each.name]))
    unset = recipe.has_own_formats or (model.fp8_e4m3 is None and model.fp8_hybrid is None)
    # As in NeMo, fp8_e4m3 wins over fp8_hybrid.
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
        num_layers_at_start_in_bf16=(1 if start is None else start) if kept else 0,
        num_layers_at_end_in_bf16=(1 if end is None else end) if kept else 0,
        exclude=tuple(model.fp8_exclude),
        experts_left_out=model.num_moe_experts is not None and grouped_kernel(model) is MoeGroupedKernel.triton,
        emulate=model.fp8_emulate,
    )


def _variants() -> Iterator[Recipe]:
    """The variants that extensions have registered."""
    for each in registered("fp8_recipe"):
        variant: RecipeVariant = each.value
        recipe, powers_of_two = RECIPES[variant.of], variant.powers_of_two
        if powers_of_two is None:
            powers_of_two = recipe.numerics.powers_of_two
        graphs = {Use.cuda_graph_impl: "variants of extensions are not tested with graphs"}
        yield replace(
            recipe,
            name=each.name,
            varies=recipe.name,
            numerics=replace(recipe.numerics, powers_of_two=powers_of_two),
            gains_by_graphs=False,
            refusals={**recipe.refusals, **graphs},
        )


def local_layers(model: ModelConfig) -> str:
    """The setting that leaves FP8 to megatron-core's local layers; empty: none does."""
    if not model.fp8:
        return ""
    if model.fp8_emulate:
        return "model.fp8_emulate=true"
    return "model.fp8_backend=torchao" if model.fp8_backend is Fp8Backend.torchao else ""


def emulation(model: ModelConfig) -> str:
    """How messages offer emulation: with every setting that excludes it taken back."""
    exclusions = {
        "model.fp8_params=false": model.fp8_params,
        "model.fp8_dot_product_attention=false": model.fp8_dot_product_attention,
        "model.transformer_engine=null": model.transformer_engine,
        "model.context_parallel_size=1": model.context_parallel_size > 1,
    }
    taken_back = [instead for instead, is_set in exclusions.items() if is_set]
    return "model.fp8_emulate=true" + (f" with {' '.join(taken_back)}" if taken_back else "")


def grouped_kernel_obstacles(model: ModelConfig) -> Iterator[Obstacle]:
    """Settings that exclude `model.moe_grouped_kernel=triton`, with the reasons."""
    if model.transformer_engine is False:
        yield "model.transformer_engine=false", "it takes the place of Transformer Engine's grouped product"
    if model.moe_grouped_gemm is False:
        yield "model.moe_grouped_gemm=false", "that asks for a product for each expert"
    if model.gradient_accumulation_fusion is False:
        yield "model.gradient_accumulation_fusion=false", "it adds weight gradients to the main gradient itself"
    if not model.grad_reduce_in_fp32:
        yield "model.grad_reduce_in_fp32=false", "it adds weight gradients in fp32"


def grouped_kernel(model: ModelConfig) -> MoeGroupedKernel:
    """The kernel of grouped products in a model with experts; the model may break rules."""
    if model.moe_grouped_kernel is not None:
        return model.moe_grouped_kernel
    suits = _has_many_small_experts(model) and not any(grouped_kernel_obstacles(model))
    return MoeGroupedKernel.triton if suits else MoeGroupedKernel.transformer_engine


def _has_many_small_experts(model: ModelConfig) -> bool:
    experts, ep, tp = model.num_moe_experts, model.expert_model_parallel_size, model.tensor_model_parallel_size
    if experts is None or min(experts, ep, tp) < 1 or experts // ep < MANY_EXPERTS:
        return False
    tokens = model.micro_batch_size * model.encoder_seq_length / tp
    rows = tokens * ep * model.moe_router_topk / experts
    # Ranks that share an expert's matrices have fewer columns and, by the same factor, more rows.
    columns = (2 if model.activation is Activation.swiglu else 1) * moe_ffn_hidden_size(model)
    return 2.0 * rows * columns * model.hidden_size <= MAX_PRODUCT_FLOPS
