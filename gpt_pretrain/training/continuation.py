"""From a checkpoint to text: its model in one process, in the type that it was trained in, FP8 in BF16."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import dist_checkpointing
from megatron.core.transformer.module import Float16Module

from gpt_pretrain.checkpoint.fp8_state import take_extra_states
from gpt_pretrain.checkpoint.source import SavedModel, open_checkpoint
from gpt_pretrain.checkpoint.state import METADATA
from gpt_pretrain.config.choices import CudaGraphImpl, Precision
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.model import build_gpt_chunks
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.spec.platform import detect_platform
from gpt_pretrain.spec.run_spec import build_run_spec
from gpt_pretrain.training.generation import generate_tokens


def continuations(
    *,
    checkpoint: str,
    prompt: str,
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
    num_samples: int,
    tokenizer: str | None,
) -> Iterator[str]:
    """The texts that follow the prompt, one after the other.

    The arguments are those of `commands.generate.GenerateArguments`.

    Raises:
        UserError: The checkpoint is damaged, has no tokenizer, or the prompt is empty or too long for it.
    """
    saved = open_checkpoint(Path(checkpoint), None if tokenizer is None else Path(tokenizer))
    saved_tokenizer, config = saved.tokenizer, inference_config(saved)
    if saved_tokenizer is None:
        raise UserError(f"{saved.path} is of a model without a tokenizer, which has token ids and no text")
    tokens, limit = saved_tokenizer.encode(prompt), config.model.encoder_seq_length
    if not 0 < len(tokens) < limit:
        raise UserError(
            f"prompt={prompt!r} is {len(tokens)} tokens, and the model continues 1 to {limit - 1} "
            f"(model.encoder_seq_length={limit}); give another"
        )
    saved.check_files()
    with loaded_model(saved, config) as model:
        for number in range(num_samples):
            generated = generate_tokens(
                [model],
                config.model,
                tokens,
                vocab_size=saved_tokenizer.vocab_size,
                max_new_tokens=max_new_tokens,
                temperature=temperature,
                top_k=top_k,
                end_token=saved_tokenizer.eod,
                seed=seed + number,
            )
            yield saved_tokenizer.decode(generated)


def inference_config(saved: SavedModel) -> Config:
    """The saved run's configuration for one process without a gradient: no layout, no FP8, its own precision."""
    is_fp32 = saved.manifest.architecture.get("parameters") == "float32"
    model = replace(
        saved.config.model,
        micro_batch_size=1,
        global_batch_size=1,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        moe_grouped_gemm=None,
        moe_router_padding_for_quantization=False,
        sequence_parallel=False,
        use_distributed_optimizer=False,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        ddp_bucket_size=None,
        fp8=False,
        fp8_params=False,
        fp8_emulate=False,
        activations_checkpoint_granularity=None,
        activations_checkpoint_method=None,
        activations_checkpoint_num_layers=None,
        # TE's layers multiply fp32 in TF32; whatever the run had, what this machine has computes the rest.
        transformer_engine=False if is_fp32 else None,
        bias_activation_fusion=None,
        activation_cast_fusion=None,
        bias_dropout_add_fusion=None,
        masked_softmax_fusion=None,
        # It would be compiled, for seconds, to write a few tokens.
        use_flash_attention=False,
        apply_rope_fusion=None,
        fused_single_qkv_rope=None,
        gradient_accumulation_fusion=None,
        embedding_gradient_fusion=None,
        cross_entropy_loss_fusion=None,
        cross_entropy_fusion_impl=None,
        # Buffers and graphs have the shape of a microbatch.
        tp_comm_overlap=False,
        cuda_graph_impl=CudaGraphImpl.none,
    )
    precision = Precision.fp32 if is_fp32 else Precision.bf16
    return replace(saved.config, model=model, trainer=replace(saved.config.trainer, precision=precision))


@contextmanager
def loaded_model(saved: SavedModel, config: Config) -> Iterator[torch.nn.Module]:
    """The model with the checkpoint's weights, in process groups of one process.

    Args:
        saved: Where from.
        config: From `inference_config`.
    """
    platform, launch = detect_platform(), read_launch({})
    with process_groups(config.model, launch, platform):
        (chunk,) = build_gpt_chunks(build_run_spec(config, launch, platform))
        wanted = chunk.sharded_state_dict(metadata=dict(METADATA))
        # Scales of FP8 layers; those of the layers without FP8 are empty.
        extra_states = take_extra_states(wanted)
        state = dist_checkpointing.load({"model": wanted}, str(saved.path))["model"]
        chunk.load_state_dict(state | dict.fromkeys(extra_states))
        yield Float16Module(chunk.config, chunk) if chunk.config.bf16 else chunk
