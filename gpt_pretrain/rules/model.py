"""Cross-field rules about the architecture and its parallel layout: what megatron-core 0.19 would assert later.

Each rule yields one message: the keys and values in conflict, the rule, and legal values.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import Activation, PositionEmbedding, RecomputeGranularity
from gpt_pretrain.config.derived import model_parallel_size, num_microbatches
from gpt_pretrain.config.errors import divisors, multiples_near, one_of
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.launch.ranks import Launch

COUNTS = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
    "rotary_base",
    "encoder_seq_length",
    "micro_batch_size",
    "global_batch_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "activations_checkpoint_num_layers",
    "num_moe_experts",
    "moe_ffn_hidden_size",
    "moe_router_topk",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "ddp_bucket_size",
)


# Of fewer, a router has nothing to choose.
_LEAST = {"num_moe_experts": 2, "moe_router_topk": 2}


def sizes_are_positive(model: ModelConfig) -> Iterator[str]:
    """Counts; the rules below divide by them."""
    for name in COUNTS:
        value = getattr(model, name)
        if value is not None and value < 1:
            yield f"model.{name}={value} is not positive; use {_LEAST.get(name, 1)} or more"


def positions(model: ModelConfig) -> Iterator[str]:
    """The kind of positions, and the length they allow."""
    if model.encoder_seq_length > model.max_position_embeddings:
        yield (
            f"model.encoder_seq_length={model.encoder_seq_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; "
            f"use {model.max_position_embeddings} or less, or raise max_position_embeddings"
        )
    if model.position_embedding_type is not PositionEmbedding.rope:
        if model.apply_rope_fusion:
            yield (
                "model.apply_rope_fusion=true has nothing to fuse: "
                f"model.position_embedding_type={model.position_embedding_type.name}; use "
                "position_embedding_type=rope, or apply_rope_fusion=null"
            )
        return
    if not 0 < model.rotary_percentage <= 1:
        yield f"model.rotary_percentage={model.rotary_percentage} is no share of a head; use above 0 up to 1"
    factor = model.rope_scaling_factor
    if factor is not None and not factor > 1:
        yield f"model.rope_scaling_factor={factor} stretches no period; use more than 1 (Llama 3.1 has 8), or null"


def pipeline(model: ModelConfig, launch: Launch | None) -> Iterator[str]:
    """Layers over stages and chunks; microbatches of the interleaved schedule."""
    pp, vp = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size
    if vp is not None and pp == 1:
        yield (
            f"model.virtual_pipeline_model_parallel_size={vp} needs model.pipeline_model_parallel_size of 2 or more; "
            "use null, or more stages"
        )
        return
    chunks = pp * (vp or 1)
    if model.num_layers % chunks:
        product, sizes = f"model.pipeline_model_parallel_size={pp}", one_of(divisors(model.num_layers))
        way = f"pipeline_model_parallel_size={sizes}"
        if vp is not None:
            product += f" × model.virtual_pipeline_model_parallel_size={vp}"
            way = f"a product of {sizes}"
        yield (
            f"model.num_layers={model.num_layers} is not divisible by {product}; "
            f"use {one_of(multiples_near(model.num_layers, chunks))}, or {way}"
        )
    if vp is not None and launch is not None and _batch_fits(model, launch):
        microbatches = num_microbatches(model, launch.world_size)
        if microbatches % pp:
            per_step = model.global_batch_size // microbatches
            yield (
                f"model.global_batch_size={model.global_batch_size} makes {microbatches} microbatches, and the "
                f"interleaved schedule needs a multiple of model.pipeline_model_parallel_size={pp}; use "
                f"global_batch_size={one_of(multiples_near(model.global_batch_size, per_step * pp))}"
            )


def _batch_fits(model: ModelConfig, launch: Launch) -> bool:
    """Whether a whole number of microbatches makes the global batch."""
    ranks, rest = divmod(launch.world_size, model_parallel_size(model))
    return rest == 0 and model.global_batch_size % (model.micro_batch_size * ranks) == 0


def world_and_batch(model: ModelConfig, launch: Launch) -> Iterator[str]:
    """Processes over the layout, and samples over the data-parallel ranks."""
    size, world = model_parallel_size(model), launch.world_size
    if world % size:
        tp, pp, cp = (
            model.tensor_model_parallel_size,
            model.pipeline_model_parallel_size,
            model.context_parallel_size,
        )
        yield (
            f"model.tensor_model_parallel_size={tp} × model.pipeline_model_parallel_size={pp} × "
            f"model.context_parallel_size={cp} needs a multiple of {size} processes, and this run has {world}; "
            f"{launch.how_to_start(size)}, or choose a layout whose product divides "
            f"{world}"
        )
    elif not _batch_fits(model, launch):
        ranks = world // size
        samples = model.micro_batch_size * ranks
        yield (
            f"model.global_batch_size={model.global_batch_size} is not divisible by model.micro_batch_size="
            f"{model.micro_batch_size} × {ranks} data-parallel ranks = {samples}; "
            f"use {one_of(multiples_near(model.global_batch_size, samples))}"
        )


def recomputation(model: ModelConfig) -> Iterator[str]:
    """Combinations of `activations_checkpoint_*` (TransformerConfig.__post_init__)."""
    granularity = model.activations_checkpoint_granularity
    method, layers = model.activations_checkpoint_method, model.activations_checkpoint_num_layers
    if granularity is not RecomputeGranularity.full:
        return
    per_chunk = model.num_layers // (
        model.pipeline_model_parallel_size * (model.virtual_pipeline_model_parallel_size or 1)
    )
    if method is None:
        yield (
            "model.activations_checkpoint_granularity=full needs model.activations_checkpoint_method; "
            "use activations_checkpoint_method=uniform or block"
        )
    if layers is None or layers > per_chunk:
        shown = "null" if layers is None else str(layers)
        yield (
            f"model.activations_checkpoint_num_layers={shown} with activations_checkpoint_granularity=full; "
            f"use 1 to {per_chunk}, the layers of one pipeline chunk"
        )


def fusions(model: ModelConfig) -> Iterator[str]:
    """Kernels that would compute something other than the configuration says."""
    if model.bias_activation_fusion and model.activation is Activation.gelu:
        yield (
            "model.bias_activation_fusion=true computes GELU's tanh form, and model.activation=gelu is the exact one; "
            f"use activation=gelu_tanh{'' if model.bias else ' with bias=true'}, or bias_activation_fusion=null"
        )
    if model.bias_activation_fusion and model.activation is Activation.gelu_tanh and not model.bias:
        yield (
            "model.bias_activation_fusion=true needs model.bias=true with model.activation=gelu_tanh; "
            "use bias=true, or bias_activation_fusion=null"
        )


def numbers(model: ModelConfig) -> Iterator[str]:
    """Ranges of single values."""
    for name in ("hidden_dropout", "attention_dropout"):
        value = getattr(model, name)
        if not 0 <= value < 1:
            yield f"model.{name}={value} is no dropout probability; use 0 up to below 1"
    for name, usual in (("layernorm_epsilon", "1e-5"), ("init_method_std", "0.02")):
        value = getattr(model, name)
        if value <= 0:
            yield f"model.{name}={value} is not positive; use {usual} or another"
    if model.seed < 0:
        yield f"model.seed={model.seed} is negative; use 0 or more"
