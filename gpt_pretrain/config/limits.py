"""The largest whole numbers that a configuration may hold.

They lie far above any run, and low enough that every rule, forecast and index answers at once: nothing else bounds what
a file or a command line can say.
"""

# Exact as a floating-point number, and with room to multiply a few in 64 bits.
_ANY = 2**53
_LARGEST = {
    # Of each layer the rules look at every product.
    2**10: "num_layers activations_checkpoint_num_layers virtual_pipeline_model_parallel_size num_workers "
    "num_dataset_builder_threads num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 rounds",
    2**16: "num_attention_heads num_query_groups kv_channels num_moe_experts moe_router_topk fp8_margin",
    2**20: "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size expert_model_parallel_size "
    "expert_tensor_parallel_size devices num_nodes num_gpus hidden_size max_new_tokens micro_batch_size",
    2**24: "ffn_hidden_size moe_ffn_hidden_size encoder_seq_length max_position_embeddings global_batch_size",
    # What megatron-core's builders count in 32 bits, and numpy's largest seed.
    2**31 - 1: "vocab_size make_vocab_size_divisible_by max_steps steps warmup_steps",
    2**32 - 1: "seed",
}
_LARGEST_OF = {name: largest for largest, names in _LARGEST.items() for name in names.split()}


def largest_value(path: str) -> int:
    """The largest integer that a key takes."""
    return _LARGEST_OF.get(path.rpartition(".")[2], _ANY)
