"""Transformer Engine's user buffers: memory of each rank that the others of its tensor parallel group read and write.

With `model.tp_comm_overlap` a product of TE's linear layers overlaps with the exchange of its input or output between
the tensor parallel ranks, piece by piece (`initialize_ub` of TE 2.12, pytorch/module/base.py). The buffers hold the
activations of one microbatch. They belong to the run and are made before the layers, which look them up in every pass.
"""

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.spec.platform import MULTICAST_OFF, USER_BUFFERS_WITHOUT
from gpt_pretrain.spec.run_spec import RunSpec

_STANDARD_OUTPUT = 1


@contextmanager
def user_buffers(spec: RunSpec) -> Iterator[None]:
    """Makes the buffers if `model.tp_comm_overlap` asks for them; process groups are open.

    Raises:
        UserError: The GPUs of this host have no multicast, and the environment does not allow a run without it.
    """
    model = spec.model
    if not model.tp_comm_overlap:
        yield
        return
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.module import base

    without = MULTICAST_OFF[USER_BUFFERS_WITHOUT]
    if not tex.device_supports_multicast() and os.environ.get(USER_BUFFERS_WITHOUT) != without:
        raise UserError(
            "model.tp_comm_overlap=true makes user buffers with NVLink multicast, which these GPUs or their driver "
            f"lack; export {USER_BUFFERS_WITHOUT}={without}, or use false"
        )
    precisions = {linear.precision == "fp8" for linear in spec.linears if linear.layer >= 0}
    modes = base.UserBufferQuantizationMode
    with silent_output():
        base.initialize_ub(
            shape=[model.encoder_seq_length * model.micro_batch_size // model.context_parallel_size, model.hidden_size],
            tp_size=model.tensor_model_parallel_size,
            quantization_modes=[modes.FP8 if in_fp8 else modes.NONE for in_fp8 in sorted(precisions)],
            dtype=torch.bfloat16,
            bootstrap_backend="nccl",
        )
    yield
    # Not after an error: that would wait for the GPU, which may be waiting for a rank that will never come.
    base.destroy_ub()


@contextmanager
def silent_output() -> Iterator[None]:
    """Discards what is written to the standard output inside, by C libraries too.

    The standard output belongs to the run, and TE reports every buffer there.
    """
    sys.stdout.flush()
    kept = os.dup(_STANDARD_OUTPUT)
    try:
        with open(os.devnull, "w", encoding="utf-8") as nowhere:
            os.dup2(nowhere.fileno(), _STANDARD_OUTPUT)
        yield
    finally:
        sys.stdout.flush()
        # C keeps its own buffer of lines.
        ctypes.CDLL(None).fflush(None)
        os.dup2(kept, _STANDARD_OUTPUT)
        os.close(kept)


@contextmanager
def without_user_buffers(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Inside, exchanges follow the products of a forward pass without gradients, whose length is then free.

    With overlap TE cuts the output of a row-parallel product into pieces of the buffer's shape, gradients or not.
    """
    modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
    overlapped = [module for module in modules if getattr(module, "ub_overlap_rs_fprop", False)]
    for module in overlapped:
        module.ub_overlap_rs_fprop = False
    try:
        yield
    finally:
        for module in overlapped:
            module.ub_overlap_rs_fprop = True
