"""The configurations of published models in small, for files that nobody published."""

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "head_dim": 16,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
