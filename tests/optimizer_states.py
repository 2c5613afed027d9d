"""The precision-aware optimizer in tests: overrides, the bits of all that it and the model hold, and its kernel."""

import copy
from functools import partial

import torch

from gpt_pretrain.fp8.infinities import StepCasts
from gpt_pretrain.kernels.adam import AdamState, AdamStep, Master, Moment, update
from gpt_pretrain.megatron.optimizer import conditional_update
from gpt_pretrain.training.step import compute_gradients

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


def assert_a_step_that_is_not_finite_changes_no_bit(training):
    """Its gradient is infinite in one place; the step after it, whose gradients are finite, changes some."""
    trainable = training.trainable
    training.step()
    before = states(training)
    for broken in (True, False):
        casts = StepCasts(training.chunks)
        report = compute_gradients(trainable, training.iterators(first_sample=0))
        if broken:
            training.chunks[0].decoder.layers[1].mlp.linear_fc1.weight.main_grad[3, 5] = float("inf")
        result = conditional_update(
            trainable.optimizer, report, casts.met_infinity(), before_update=casts.restore_if_skipped
        )
        assert result.skipped == broken
        assert all(map(torch.equal, states(training), before)) == broken


def assert_kernel_computes_what_torch_does(device, num, master, moments):
    """Three steps of one parameter, each from the same states."""
    from gpt_pretrain.kernels.adam_triton import update_on_gpu

    generator = torch.Generator(device=device).manual_seed(5)
    state = _fresh_state((torch.randn(num, device=device, generator=generator) * 0.02).bfloat16(), master, moments)
    for number in (1, 2, 3):
        gradient = torch.randn(num, device=device, generator=generator).bfloat16() * 1e-3
        values = torch.tensor([0, 0.5, 1 - 0.9**number, 1 - 0.95**number, number], device=device)
        step = AdamStep(device_values=values, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
        expected = copy.deepcopy(state)
        update(gradient, expected, step)
        update_on_gpu(gradient, state, step)
        for name, kept in expected.by_name.items():
            aim, read = kept.read(0, num), state.by_name[name].read(0, num)
            # Products and sums in one go are rounded once less: seldom, a value falls to its type's next neighbour.
            step_to_next = {torch.float8_e4m3fn: 2**-3, torch.bfloat16: 2**-7, torch.float16: 2**-10}
            small = kept.values.dtype in step_to_next
            largest = float(aim.abs().max())
            torch.testing.assert_close(
                read,
                aim,
                rtol=step_to_next.get(kept.values.dtype, 1e-5),
                atol=largest * (5e-5 if kept.values.dtype is torch.float8_e4m3fn else 1e-6),
                msg=partial("{} of step {}: {}".format, name, number),
            )
            assert not small or (read != aim).float().mean() < 0.05, name


def _fresh_state(weight, master, moments):
    first, second = (Moment.zeros(weight, dtype, keeps_positive=second) for second, dtype in enumerate(moments))
    values = torch.zeros_like(weight, dtype=torch.int16) if master is torch.int16 else weight.to(master)
    return AdamState(master=Master(values, weight.clone()), exp_avg=first, exp_avg_sq=second)
