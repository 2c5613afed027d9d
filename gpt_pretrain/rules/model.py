"""Cross-field rules about the architecture, its kernels and its exchanges: what megatron-core 0.19 would assert later.

A rule is a generator of messages: the keys and values in conflict, the rule, and the ways out. `rules.shapes` has the
divisions of widths, heads and sequences.
"""

from collections.abc import Iterator

from gpt_pretrain.config.choices import (
    Activation,
    CrossEntropyFusion,
    OuterSharding,
    PositionEmbedding,
    RecomputeGranularity,
)
from gpt_pretrain.config.derived import (
    expert_tensor_parallel_size,
    model_parallel_size,
    shards_gradients,
    uses_distributed_optimizer,
    uses_yarn,
)
from gpt_pretrain.config.errors import divisors, indivisible, multiples_near, one_of, refusal, show
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.registry import all_features
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.rules.schedule import batch_fits, batches, other_batches
from gpt_pretrain.run.products import Resolved


def positions(model: ModelConfig) -> Iterator[str]:
    """The kind of positions, and the length they allow."""
    if model.encoder_seq_length > model.max_position_embeddings:
        yield (
            f"model.encoder_seq_length={model.encoder_seq_length} is longer than "
            f"model.max_position_embeddings={model.max_position_embeddings}; "
            f"use {model.max_position_embeddings} or less, or raise max_position_embeddings"
        )
    freq = model.no_rope_freq
    if freq is not None and model.num_layers % freq:
        ways = f"model.no_rope_freq={one_of(divisors(model.num_layers))} or null"
        yield indivisible(f"model.num_layers={model.num_layers}", f"model.no_rope_freq={freq}", ways)
    if model.apply_rope_fusion and model.position_embedding_type is not PositionEmbedding.rope:
        yield (
            "model.apply_rope_fusion=true has nothing to fuse: "
            f"model.position_embedding_type={model.position_embedding_type.name}; use "
            "model.position_embedding_type=rope, or model.apply_rope_fusion=null"
        )
    yarn = f"model.yarn_original_max_position_embeddings={model.yarn_original_max_position_embeddings}"
    if uses_yarn(model) and model.apply_rope_fusion:
        # apply_rotary_pos_emb would warn in each layer and rotate by the other kernels.
        why = "Transformer Engine's rotation has no factor for cosines and sines"
        yield refusal(yarn, "model.apply_rope_fusion=true", why, "null", "model.apply_rope_fusion=null")
    if uses_yarn(model) and model.rotary_base == 1:
        why = "YaRN divides by the logarithm of the base"
        yield refusal(yarn, "model.rotary_base=1", why, "null", "model.rotary_base=10000")
    if uses_yarn(model) and model.rotary_percentage < 1:
        why = "megatron-core's YaRN rotates whole heads"
        yield refusal(
            yarn, f"model.rotary_percentage={model.rotary_percentage}", why, "null", "model.rotary_percentage=1.0"
        )


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
        divisor, sizes = f"model.pipeline_model_parallel_size={pp}", one_of(divisors(model.num_layers))
        way = f"model.pipeline_model_parallel_size={sizes}"
        if vp is not None:
            divisor += f" × model.virtual_pipeline_model_parallel_size={vp}"
            way = f"a product of {sizes}"
        near = one_of(multiples_near(model.num_layers, chunks))
        yield indivisible(f"model.num_layers={model.num_layers}", divisor, near, way)
    if vp is not None and launch is not None and batch_fits(model, launch):
        samples = model.micro_batch_size * (launch.world_size // model_parallel_size(model))
        for batch, asked in batches(model).items():
            if (batch // samples) % pp:
                yield (
                    f"{asked} makes {batch // samples} microbatches, and the interleaved schedule needs a multiple of "
                    f"model.pipeline_model_parallel_size={pp}; use {other_batches(model, batch, samples * pp)}"
                )
                return


def world_and_batch(model: ModelConfig, launch: Launch) -> Iterator[str]:
    """Processes over the layout, and samples over the data-parallel ranks."""
    size, world = model_parallel_size(model), launch.world_size
    if world % size:
        yield (
            f"model.tensor_model_parallel_size={model.tensor_model_parallel_size} × "
            f"model.pipeline_model_parallel_size={model.pipeline_model_parallel_size} × "
            f"model.context_parallel_size={model.context_parallel_size} needs a multiple of {size} processes, and this "
            f"run has {world}; {launch.how_to_start(size)}, or choose a layout whose product divides {world}"
        )
    elif not batch_fits(model, launch):
        ranks = world // size
        samples = model.micro_batch_size * ranks
        divisor = f"model.micro_batch_size={model.micro_batch_size} × {ranks} data-parallel ranks = {samples}"
        batch, asked = next(each for each in batches(model).items() if each[0] % samples)
        if batch == model.global_batch_size:
            yield indivisible(asked, divisor, one_of(multiples_near(batch, samples)))
        else:
            yield indivisible(asked, divisor, other_batches(model, batch, samples))
    else:
        yield from _instances(model, world // model.pipeline_model_parallel_size)


def _instances(model: ModelConfig, ranks: int) -> Iterator[str]:
    """Whether the `ranks` of a pipeline stage that share weights, and those that share experts, make equal groups."""
    instances = model.num_distributed_optimizer_instances
    sharing = [("data-parallel", ranks // model.tensor_model_parallel_size)]
    if model.num_moe_experts is not None:
        experts = ranks // (model.expert_model_parallel_size * expert_tensor_parallel_size(model))
        sharing.append(("expert data-parallel", experts))
    for kind, size in sharing:
        if size % instances:
            key = "model.num_distributed_optimizer_instances"
            yield f"{key}={instances} does not divide the {size} {kind} ranks; use {key}={one_of(divisors(size))}"
            return


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
            "use model.activations_checkpoint_method=uniform or block"
        )
    if layers is None or layers > per_chunk:
        yield (
            f"model.activations_checkpoint_num_layers={show(layers)} with activations_checkpoint_granularity=full; "
            f"use 1 to {per_chunk}, the layers of one pipeline chunk"
        )


def fusions(model: ModelConfig) -> Iterator[str]:
    """Fused kernels that compute something other than the configuration says."""
    if model.bias_activation_fusion and model.activation is Activation.gelu:
        yield (
            "model.bias_activation_fusion=true computes GELU's tanh form, and model.activation=gelu is the exact one; "
            f"use model.activation=gelu_tanh{'' if model.bias else ' with model.bias=true'}, or "
            "model.bias_activation_fusion=null"
        )
    if model.bias_activation_fusion and model.activation is Activation.squared_relu:
        yield (
            "model.bias_activation_fusion=true has no kernel for model.activation=squared_relu; "
            "use model.bias_activation_fusion=null, or model.activation=swiglu"
        )
    if model.bias_activation_fusion and model.activation is Activation.gelu_tanh and not model.bias:
        yield (
            "model.bias_activation_fusion=true needs model.bias=true with model.activation=gelu_tanh; "
            "use model.bias=true, or model.bias_activation_fusion=null"
        )


def z_loss(model: ModelConfig) -> Iterator[str]:
    """The penalty of logits is computed where the head and its cross entropy are one."""
    if model.z_loss_coeff == 0:
        return
    asked, why = f"model.z_loss_coeff={show(model.z_loss_coeff)}", "the linear one computes its gradient"
    if model.cross_entropy_loss_fusion is False:
        yield refusal(asked, "model.cross_entropy_loss_fusion=false", why, "0", "model.cross_entropy_loss_fusion=null")
    if model.cross_entropy_fusion_impl is CrossEntropyFusion.native:
        native = "model.cross_entropy_fusion_impl=native"
        yield refusal(asked, native, why, "0", "model.cross_entropy_fusion_impl=null or linear")


def gradients(model: ModelConfig) -> Iterator[str]:
    """What megatron-core's data parallelism and distributed optimizer require of each other."""
    if model.overlap_param_gather and not (uses_distributed_optimizer(model) and model.overlap_grad_reduce):
        yield (
            "model.overlap_param_gather=true needs model.use_distributed_optimizer=true and "
            "model.overlap_grad_reduce=true; set both (parallelism=dp does), or model.overlap_param_gather=false"
        )
    instances = f"model.num_distributed_optimizer_instances={model.num_distributed_optimizer_instances}"
    if model.num_distributed_optimizer_instances > 1 and not shards_gradients(model):
        yield (
            f"{instances} needs model.data_parallel_sharding_strategy; use optim_grads or optim_grads_params, or "
            "model.num_distributed_optimizer_instances=1"
        )
    if model.outer_dp_sharding_strategy is OuterSharding.optim:
        yield (
            "model.outer_dp_sharding_strategy=optim would make groups of ranks gather weights from each other after "
            "each update, which they are there to spare; use model.outer_dp_sharding_strategy=no_shard, with fewer "
            "groups if states need room"
        )


def kernel_problems(run: Resolved, *, sizes_known: bool) -> Iterator[str]:
    """All problems of kernels and exchanges that do not depend on divisions.

    Features look at shapes only if `sizes_known`: all counts are positive.
    """
    yield from gradients(run.model)
    yield from fusions(run.model)
    yield from z_loss(run.model)
    for feature in all_features():
        if feature.is_asked(run.model):
            yield from feature.problems(run, sizes_known=sizes_known)
