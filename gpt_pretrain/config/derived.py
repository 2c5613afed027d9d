"""What follows from the configuration: pure functions, so that the configuration itself never changes."""

from gpt_pretrain.config.schema import ModelConfig


def data_parallel_size(model: ModelConfig, world_size: int) -> int:
    """Ranks that see different samples: world_size / (TP · PP · CP)."""
    return world_size // (
        model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
    )


def num_microbatches(model: ModelConfig, world_size: int) -> int:
    """Forward-backward passes of each data-parallel rank per optimizer step."""
    return model.global_batch_size // (model.micro_batch_size * data_parallel_size(model, world_size))


def padded_vocab_size(model: ModelConfig) -> int:
    """Rows of the embedding: `vocab_size` rounded up to `make_vocab_size_divisible_by`.

    Megatron-LM multiplies the divisor by TP; here it does not depend on the layout, so that the weights have one
    shape at every TP. A rule asks that TP divides it.
    """
    divisor = model.make_vocab_size_divisible_by
    return -(-model.vocab_size // divisor) * divisor


def ffn_hidden_size(model: ModelConfig) -> int:
    """Inner width of the MLP."""
    return 4 * model.hidden_size if model.ffn_hidden_size is None else model.ffn_hidden_size


def kv_channels(model: ModelConfig) -> int:
    """Width of one attention head."""
    return model.hidden_size // model.num_attention_heads if model.kv_channels is None else model.kv_channels


def num_query_groups(model: ModelConfig) -> int:
    """Key/value heads."""
    return model.num_attention_heads if model.num_query_groups is None else model.num_query_groups
