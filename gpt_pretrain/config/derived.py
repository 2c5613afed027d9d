"""Values that follow from the configuration, as pure functions: the configuration itself never changes."""

import math
import re

from gpt_pretrain.config.choices import Activation, Precision, ShardingStrategy
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import CheckpointConfig, Config, ModelConfig, OptimConfig, TrainerConfig


def model_parallel_size(model: ModelConfig) -> int:
    """Ranks that share one replica of the model: TP · PP · CP."""
    return model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size


def data_parallel_size(model: ModelConfig, world_size: int) -> int:
    """Ranks with different samples: world_size / (TP · PP · CP)."""
    return world_size // model_parallel_size(model)


def masks_tokens(model: ModelConfig) -> bool:
    """Whether the loss leaves tokens out, so that microbatches may count different numbers of them."""
    return model.data.eod_mask_loss or model.data.eod_mask_labels


def num_microbatches(model: ModelConfig, world_size: int) -> int:
    """Forward-backward passes of each data-parallel rank per step of `global_batch_size` samples."""
    return model.global_batch_size // (model.micro_batch_size * data_parallel_size(model, world_size))


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding: `vocab_size` rounded up to `make_vocab_size_divisible_by`.

    Megatron-LM multiplies the divisor by TP. Here the weights have the same shape at every TP, which must divide it.
    """
    return padded_rows(model.vocab_size, model.make_vocab_size_divisible_by)


def padded_rows(num_tokens: int, divisor: int) -> int:
    """Rows of an embedding of so many tokens, in multiples of a divisor."""
    return -(-num_tokens // divisor) * divisor


def uses_distributed_optimizer(model: ModelConfig) -> bool:
    """Whether optimizer states are sharded; null: only with FP8 parameters, which need it."""
    return model.fp8_params if model.use_distributed_optimizer is None else model.use_distributed_optimizer


def shards_gradients(model: ModelConfig) -> bool:
    """Whether a rank keeps its part of the gradients alone."""
    return model.data_parallel_sharding_strategy is not None


def shards_weights(model: ModelConfig) -> bool:
    """Whether a rank keeps its part of the weights alone."""
    return model.data_parallel_sharding_strategy is ShardingStrategy.optim_grads_params


def is_whole(model: ModelConfig) -> bool:
    """Whether each GPU has the whole model, with its gradients, and whole sequences."""
    is_one = model_parallel_size(model) * model.expert_model_parallel_size == 1
    return is_one and not shards_gradients(model)


def layers_with_value_embeddings(model: ModelConfig) -> list[int]:
    """Numbers, from 0, of the layers whose attention adds vectors of tokens to its values: every n-th from the last."""
    freq = model.value_embedding_freq
    return [] if freq is None else [i for i in range(model.num_layers) if (model.num_layers - 1 - i) % freq == 0]


def ffn_hidden_size(model: ModelConfig) -> int:
    """Inner width of the MLP."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def moe_ffn_hidden_size(model: ModelConfig) -> int:
    """Inner width of an expert."""
    return ffn_hidden_size(model) if model.moe_ffn_hidden_size is None else model.moe_ffn_hidden_size


def expert_tensor_parallel_size(model: ModelConfig) -> int:
    """Ranks that share each expert's matrices."""
    size = model.expert_tensor_parallel_size
    return model.tensor_model_parallel_size if size is None else size


def kv_channels(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.hidden_size // model.num_attention_heads if model.kv_channels is None else model.kv_channels


def num_query_groups(model: ModelConfig) -> int:
    """Key/value heads."""
    return model.num_attention_heads if model.num_query_groups is None else model.num_query_groups


def qkv_parts(model: ModelConfig, rows: int) -> tuple[int, int, int]:
    """Rows of queries, of keys and of values among those of their projection, all of them or one rank's."""
    groups = num_query_groups(model)
    of_groups = rows * groups // (model.num_attention_heads + 2 * groups)
    return rows - 2 * of_groups, of_groups, of_groups


def uses_yarn(model: ModelConfig) -> bool:
    """Whether YaRN stretches rope, not Llama 3.1's rescaling."""
    return model.rope_scaling_factor is not None and model.yarn_original_max_position_embeddings is not None


def matmul_parameters_per_layer(model: ModelConfig) -> int:
    """Weights of one transformer layer that multiply a token, without biases and norms.

    In a mixture of experts these are the router and the `moe_router_topk` experts that compute the token.
    """
    query_width = model.num_attention_heads * kv_channels(model)
    key_value_width = num_query_groups(model) * kv_channels(model)
    attention = model.hidden_size * (2 * query_width + 2 * key_value_width)
    mlp_matrices = 3 if model.activation is Activation.swiglu else 2
    if model.num_moe_experts is None:
        return attention + mlp_matrices * model.hidden_size * ffn_hidden_size(model)
    experts = model.moe_router_topk * mlp_matrices * model.hidden_size * moe_ffn_hidden_size(model)
    return attention + model.hidden_size * model.num_moe_experts + experts


def ddp_bucket_size(model: ModelConfig, num_shards: int) -> int | None:
    """Values per bucket of overlapped gradient reduction and parameter gathering; None without overlap.

    `num_shards` (DP · CP) ranks reduce gradients with each other.

    megatron-core's 40 million, or a million per rank, make many short exchanges: Llama 3 8B on four H200s is 1.0%
    faster with 400 million, and 0.7% with 1,000 million. With few buckets there is little computation to hide them
    behind, so a bucket holds at most a 16th of a rank's layers. Where gradients are sharded, a rank has memory for two
    buckets, and these are small.
    """
    if not model.overlap_grad_reduce:
        return None
    if model.ddp_bucket_size is not None:
        return model.ddp_bucket_size
    least = max(40_000_000, 1_000_000 * num_shards)
    if shards_gradients(model):
        return least
    weights = model.num_layers * matmul_parameters_per_layer(model)
    of_rank = weights // (model.tensor_model_parallel_size * model.pipeline_model_parallel_size)
    return max(least, min(400_000_000, of_rank // 16))


# What `flops_per_token` computes, for people.
FLOPS_FORMULA = "3 × (layers × (2 × weights + 2 × heads × head width × sequence) + 2 × hidden × vocabulary)"


def attended_tokens(model: ModelConfig, length: float) -> float:
    """Twice the tokens of a sequence that one of them attends to, the mean over tokens and layers.

    That is the sequence's length, less what sliding windows hide.
    """
    if model.window_size is None:
        return length
    layers = model.window_attn_skip_freq
    share = 1.0 if layers is None else sum(layers) / len(layers)
    return length - share * max(0.0, length - model.window_size[0] - 1) ** 2 / length


def flops_per_token(model: ModelConfig, attended: float | None = None) -> float:
    """Floating-point operations to train on one token: forward, and backward at twice its cost.

    These are the model FLOPs of Chowdhery et al. 2022, appendix B, with attention halved for causality: 2 per weight,
    2 · width · sequence for attention's scores and values together (a token attends to half of the sequence on average)
    and the LM head over the padded vocabulary. What sliding windows hide does not count, nor do recomputed
    activations, norms and softmax.

    `attended` takes the place of the sequence where documents do not see each other (`attended_length`); None: all
    samples are one document.
    """
    query_width = model.num_attention_heads * kv_channels(model)
    length = model.encoder_seq_length if attended is None else attended
    attention = 2 * query_width * attended_tokens(model, length)
    head = 2 * model.hidden_size * padded_vocab_size(model)
    forward = model.num_layers * (2 * matmul_parameters_per_layer(model) + attention) + head
    return 3.0 * forward


def attended_length(squared_lengths: float, num_tokens: int) -> float:
    """The length of document that a token is in on average, from the sum of the documents' squared lengths.

    A token attends to half of its document on average, as it would to half of a sequence of this length.
    """
    return squared_lengths / num_tokens


def min_lr(optim: OptimConfig) -> float:
    """Learning rate after the decay."""
    return optim.lr / 10 if optim.sched.min_lr is None else optim.sched.min_lr


def decoupled_min_lr(optim: OptimConfig) -> float | None:
    """Learning rate of word embeddings and LM head after the decay; None: they have no rate of their own."""
    return None if optim.decoupled_lr is None else optim.decoupled_lr / 10


def weight_of(entry: str | float) -> float | None:
    """The weight that an entry of `model.data.data_prefix` is, infinite beyond any number; None if it is a path."""
    try:
        return float(entry)
    except ValueError:
        return None
    except OverflowError:
        return math.inf


def is_weight(entry: str | float) -> bool:
    """Whether an entry of `model.data.data_prefix` is a weight; otherwise it is a path."""
    return weight_of(entry) is not None


def save_interval_s(checkpoint: CheckpointConfig) -> float | None:
    """`checkpoint.save_interval_minutes` in seconds; None for no saves by the clock."""
    minutes = checkpoint.save_interval_minutes
    return None if minutes is None else 60 * minutes


def max_time_s(trainer: TrainerConfig) -> float | None:
    """`trainer.max_time` ("DD:HH:MM:SS") in seconds; None without a limit.

    Raises:
        ConfigError: It does not follow the format.
    """
    if trainer.max_time is None:
        return None
    match = re.fullmatch(r"(\d{1,6}):(\d\d?):([0-5]?\d):([0-5]?\d)", trainer.max_time)
    if match is None or int(match[2]) > 23:
        example = 'trainer.max_time="00:02:30:00" (in YAML in quotes)'
        problem = f"trainer.max_time={trainer.max_time!r} is not DD:HH:MM:SS"
        raise ConfigError([f"{problem}; two and a half hours are {example}"])
    days, hours, minutes, seconds = map(int, match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def is_reference(config: Config) -> bool:
    """Whether others are compared with this run, so that it keeps plain kernels."""
    return config.trainer.deterministic or config.trainer.precision is Precision.fp32


def keeps_plain_kernels(config: Config) -> bool:
    """Whether local layers do not fuse: in references, and because PyTorch's kernels have their own random state."""
    return is_reference(config) or config.model.attention_dropout > 0
