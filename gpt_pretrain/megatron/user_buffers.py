"""Transformer Engine's user buffers: memory that the ranks of a tensor parallel group read and write of each other.

With `model.tp_comm_overlap` a product of TE's linear layers and the exchange of its input or output over the tensor
parallel ranks run at the same time, in pieces (`initialize_ub` of TE 2.12, pytorch/module/base.py). The buffers hold
one microbatch's activations, and belong to the run: made before the layers, which look them up at their first pass.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

import torch

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.gemms import linears
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.platform_multicast import MULTICAST_OFF, USER_BUFFERS_WITHOUT


@contextmanager
def user_buffers(model: ModelConfig) -> Iterator[None]:
    """Makes the buffers that `model.tp_comm_overlap` asks for, if it does; process groups are open.

    Raises:
        UserError: The GPUs of this host have no multicast, and nothing says to do without.
    """
    if not model.tp_comm_overlap:
        yield
        return
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import base

    if not tex.device_supports_multicast() and USER_BUFFERS_WITHOUT not in os.environ:
        raise UserError(
            "model.tp_comm_overlap=true makes user buffers with NVLink multicast, which these GPUs or their driver do "
            f"not have; export {USER_BUFFERS_WITHOUT}={MULTICAST_OFF[USER_BUFFERS_WITHOUT]}, or use false"
        )
    precisions = {linear.precision == "fp8" for linear in linears(model) if linear.layer >= 0}
    modes = base.UserBufferQuantizationMode
    # TE prints who shares them on the standard output, which belongs to the run.
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        base.initialize_ub(
            shape=[model.encoder_seq_length * model.micro_batch_size // model.context_parallel_size, model.hidden_size],
            tp_size=model.tensor_model_parallel_size,
            quantization_modes=[modes.FP8 if in_fp8 else modes.NONE for in_fp8 in sorted(precisions)],
            dtype=torch.bfloat16,
            bootstrap_backend="nccl",
        )
    try:
        yield
    finally:
        base.destroy_ub()
