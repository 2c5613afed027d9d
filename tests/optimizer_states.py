"""The precision-aware optimizer in tests: overrides that turn it on, and the bits of all that it and the model hold."""

import torch

LEAN = (
    "trainer.precision=bf16",
    "model.use_distributed_optimizer=true",
    "model.optim.use_precision_aware_optimizer=true",
    "model.grad_reduce_in_fp32=false",
)
SMALLEST = ("model.optim.main_params_dtype=fp16", "model.optim.exp_avg_dtype=fp8", "model.optim.exp_avg_sq_dtype=fp16")
FP32 = ("trainer.precision=bf16", "model.use_distributed_optimizer=true")


def states(training):
    """Copies of weights, masters, moments and step count, as bytes; of FP8 weights codes and scale."""
    inner = training.trainable.optimizer.chained_optimizers[0].optimizer
    tensors = [inner.steps_taken]
    for weight in (weight for chunk in training.chunks for weight in chunk.parameters()):
        tensors += [weight._data, weight._scale_inv] if hasattr(weight, "_scale_inv") else [weight.data]
    for state in inner.states.values():
        tensors += [state.master.values, state.exp_avg.values, state.exp_avg_sq.values]
        tensors += [moment.scales for moment in (state.exp_avg, state.exp_avg_sq) if moment.scales is not None]
    return [tensor.clone().contiguous().flatten().view(torch.uint8) for tensor in tensors]
