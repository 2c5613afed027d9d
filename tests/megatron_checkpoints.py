"""Checkpoints as Megatron-LM and NeMo have them: a plain GPTModel of megatron-core, saved by megatron-core's own code.

No part of the application builds or saves them; it only answers for the device where there is no GPU.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies.common import save_common
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

from tests.saved_models import randomize

# Megatron-LM's arguments by model; 250 tokens.
LLAMA: Mapping[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 4,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "seq_length": 32,
    "max_position_embeddings": 32,
    "position_embedding_type": "rope",
    "rotary_base": 500000,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-5,
    "swiglu": True,
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "make_vocab_size_divisible_by": 128,
    "padded_vocab_size": 256,
    "model_type": ModelType.encoder_or_decoder,
    "params_dtype": torch.float32,
}
GPT = {
    **LLAMA,
    "ffn_hidden_size": 256,
    "group_query_attention": False,
    "num_query_groups": 1,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "bias_gelu_fusion": True,
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
}
QWEN = {**LLAMA, "add_qkv_bias": True, "kv_channels": 24}
EXPERTS = {
    **LLAMA,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_router_dtype": "fp32",
    "qk_layernorm": True,
}
MODELS = {"llama": LLAMA, "gpt": GPT, "qwen": QWEN, "experts": EXPERTS}
NEMO = {"weights": "module.", "model_weights": "model."}


def build_gpt(arguments: Mapping[str, Any], *, rows: int | None = None) -> GPTModel:
    """This rank's part of the model; inside of `process_groups`. `rows` pad the vocabulary otherwise."""
    model_parallel_cuda_manual_seed(1)
    swiglu, experts = arguments["swiglu"], arguments.get("num_experts")
    te = arguments.get("transformer_impl") == "transformer_engine"
    activation = torch.nn.functional.silu if swiglu else lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    config = TransformerConfig(
        num_layers=arguments["num_layers"],
        hidden_size=arguments["hidden_size"],
        ffn_hidden_size=arguments["ffn_hidden_size"],
        num_attention_heads=arguments["num_attention_heads"],
        num_query_groups=arguments["num_query_groups"] if arguments["group_query_attention"] else None,
        kv_channels=arguments["kv_channels"],
        normalization=arguments["normalization"],
        layernorm_epsilon=arguments["layernorm_epsilon"],
        gated_linear_unit=swiglu,
        activation_func=activation,
        bias_activation_fusion=False,
        add_bias_linear=arguments["add_bias_linear"],
        add_qkv_bias=arguments.get("add_qkv_bias", False),
        qk_layernorm=arguments.get("qk_layernorm", False),
        num_moe_experts=experts,
        moe_router_topk=arguments.get("moe_router_topk", 2),
        moe_ffn_hidden_size=arguments.get("moe_ffn_hidden_size"),
        moe_router_dtype="fp32",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not te,
        moe_grouped_gemm=te and experts is not None,
        bf16=te,
        fp8=arguments.get("fp8"),
        params_dtype=arguments["params_dtype"],
        pipeline_dtype=arguments["params_dtype"],
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    if te:
        spec = get_gpt_layer_with_transformer_engine_spec(
            num_experts=experts, moe_grouped_gemm=experts is not None, qk_layernorm=config.qk_layernorm
        )
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=experts, qk_layernorm=config.qk_layernorm, normalization=config.normalization
        )
    # Experts' norm has the name that Transformer Engine's layers give it, unless a test wants the local one.
    if experts and not te and not arguments.get("local_names"):
        spec.submodules.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    model = GPTModel(
        config,
        spec,
        vocab_size=rows or arguments["padded_vocab_size"],
        max_sequence_length=arguments["max_position_embeddings"],
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=arguments["position_embedding_type"],
        rotary_base=arguments["rotary_base"],
        share_embeddings_and_output_weights=not arguments["untie_embeddings_and_output_weights"],
        parallel_output=False,
    )
    # Position embeddings are made on the host in fp32; Megatron-LM's Float16Module and cuda() do this.
    return model.to("cuda", arguments["params_dtype"]) if te else model


def save_gpt(
    path: Path,
    arguments: Mapping[str, Any],
    *,
    metadata: Mapping[str, Any] | None = None,
    prefix: str = "",
    common_file: bool = False,
    model: GPTModel | None = None,
) -> GPTModel:
    """Saves a model, by default one of random weights, into `path`, as Megatron-LM does; every rank calls it.

    With `common_file` its arguments are in common.pt, as before megatron-core 0.19.
    """
    if model is None:
        model = build_gpt(arguments)
        randomize(model)
    path.mkdir(parents=True, exist_ok=True)
    state: dict[str, Any] = {"model": sharded(model, metadata, prefix)}
    common = {"args": argparse.Namespace(**arguments), "iteration": 7, "checkpoint_version": 3.0}
    if prefix:
        common = {"state_dict": {}, "loops": {}}
    if common_file:
        save_common(common, str(path))
    else:
        state |= common
    dist_checkpointing.save(state, str(path), async_strategy="mcore")
    return model


def sharded(model: GPTModel, metadata: Mapping[str, Any] | None = None, prefix: str = "") -> dict[str, Any]:
    """A model's state, as its own class describes it."""
    groups = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = model.sharded_state_dict(
        prefix=prefix, metadata={**(metadata or {}), "dp_cp_group": groups}
    )
    return state


def load_gpt(path: Path, arguments: Mapping[str, Any], *, rows: int | None = None) -> GPTModel:
    """A plain model with the weights in `path`, loaded by megatron-core's own loader, which must find all of them."""
    model = build_gpt(arguments, rows=rows)
    state = {"model": sharded(model)}
    loaded, not_asked_for, not_found = dist_checkpointing.load(state, str(path), strict="return_all")
    # Transformer Engine's layers have FP8 state that local ones lack.
    assert not not_found, not_found
    assert not {key for key in not_asked_for if not key.endswith("_extra_state")}, not_asked_for
    model.load_state_dict(loaded["model"], strict=True)
    return model


@torch.no_grad()
def logits_of(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    """[b, s, vocab / TP] of a model that is whole on this rank."""
    tokens = tokens.to(next(model.parameters()).device)
    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    logits: torch.Tensor = model.eval()(tokens, positions, None)
    return logits
