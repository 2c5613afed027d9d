"""The precision-aware optimizer: what it stores comes out as it went in, and it trains as one with fp32 states does."""

import sys
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from gpt_pretrain.checkpoint.load import load_checkpoint, load_weights, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.extend import registry
from gpt_pretrain.kernels import SCALED_BLOCK
from gpt_pretrain.kernels.adam import SCALED, AdamState, AdamStep, Master, Moment, StoredValues, update
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.optimizer import _make_conditional, allocate_states
from gpt_pretrain.megatron.precision_aware import PrecisionAwareAdam, _kernel
from tests.emulated_training import build_training, build_training_of, emulate, emulated_training, save_checkpoint
from tests.forked_runs import interpret_kernels
from tests.optimizer_states import FP32, LEAN, SMALLEST, assert_a_step_that_is_not_finite_changes_no_bit, states


def spread_values(num):
    """Of all magnitudes, with blocks of zeros and blocks of a single value."""
    generator = torch.Generator().manual_seed(3)
    exponents = torch.randint(-40, 8, (num,), generator=generator)
    values = torch.randn(num, generator=generator) * 2.0**exponents
    values[SCALED_BLOCK : 2 * SCALED_BLOCK] = 0
    values[3 * SCALED_BLOCK : 4 * SCALED_BLOCK] = 1e-30
    return values


@pytest.mark.parametrize("dtype", SCALED)
def test_moments_of_small_types_are_within_half_a_step_of_their_block(dtype):
    values = spread_values(20 * SCALED_BLOCK + 7)
    moment = Moment.zeros(values, dtype, keeps_positive=False)
    moment.write(0, values)
    scaled = SCALED[dtype]
    largest = (
        torch.nn.functional.pad(values, (0, SCALED_BLOCK - 7))
        .view(-1, SCALED_BLOCK)
        .abs()
        .amax(1)
        .repeat_interleave(SCALED_BLOCK)
    )
    # Relative to each value, or where it is below the type's normal numbers, to the largest of its block.
    relative = 2.0 ** -(scaled.mantissa_bits + 1)
    absolute = largest[: values.numel()] * scaled.smallest / 2 / 2.0 ** (scaled.headroom - 1)
    error = (moment.read(0, values.numel()) - values).abs()
    assert (error <= torch.maximum(values.abs() * relative, absolute)).all()
    assert error.max() > 0


@pytest.mark.parametrize("dtype", [*SCALED, torch.bfloat16, torch.float32])
def test_what_is_read_and_stored_again_is_what_it_was_and_the_plain_type_holds_it(dtype):
    moment = Moment.zeros(spread_values(9 * SCALED_BLOCK + 5), dtype, keeps_positive=False)
    moment.write(0, spread_values(9 * SCALED_BLOCK + 5))
    values = moment.read(0, 9 * SCALED_BLOCK + 5)
    assert torch.equal(values.to(moment.saved_as).float(), values)
    again = Moment.zeros(values, dtype, keeps_positive=False)
    again.write(0, values)
    assert torch.equal(again.values.view(torch.uint8), moment.values.view(torch.uint8))
    assert torch.equal(again.read(SCALED_BLOCK + 3, 3 * SCALED_BLOCK), values[SCALED_BLOCK + 3 : 3 * SCALED_BLOCK])


def test_a_second_moment_that_is_not_zero_does_not_become_zero():
    values = torch.tensor([1.0, 1e-20, 0.0])
    moment = Moment.zeros(values, torch.float16, keeps_positive=True)
    moment.write(0, values)
    read = moment.read(0, 3)
    assert read[1] > 0
    assert read[2] == 0


def test_remainders_and_weight_make_the_master_exactly():
    values = spread_values(1000)
    # Half-way between two BF16 numbers, and next to it.
    values[:4] = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, -0x407E8000], dtype=torch.int32).view(torch.float32)
    master = Master(torch.zeros(1000, dtype=torch.int16), torch.zeros(1000, dtype=torch.bfloat16))
    master.write(0, values)
    assert torch.equal(master.read(0, 1000), values)
    nearest = (master.weight.float() - values).abs() <= (values.bfloat16().float() - values).abs()
    assert nearest.all()


@pytest.mark.parametrize(
    ("dtype", "falls", "stands_still"),
    [
        (torch.float8_e4m3fn, 0.9375, 0.97),
        (torch.bfloat16, 1 - 2**-8, 0.999),
        (torch.float16, 1 - 2**-11, 1 - 2**-13),
    ],
)
def test_moments_fall_with_the_betas_that_the_rules_allow_and_not_with_larger_ones(dtype, falls, stands_still):
    """What lies next to a power of two has the least to lose, relative to what lies between two numbers."""
    for beta in (falls, stands_still):
        moment = Moment.zeros(torch.empty(SCALED_BLOCK), dtype, keeps_positive=True)
        before = torch.linspace(1, 2, SCALED_BLOCK).to(dtype).float()
        moment.write(0, before)
        # What the first step leaves as it was, every further one does.
        for _ in range(int(4 / (1 - beta)) if beta == falls else 1):
            moment.write(0, moment.read(0, SCALED_BLOCK) * beta)
        after = moment.read(0, SCALED_BLOCK)
        assert (after < before / 5).all() if beta == falls else torch.equal(after, before)


def reference(weight, gradients, group):
    """torch's AdamW in 64 bits."""
    weight = weight.double().requires_grad_()
    adam = torch.optim.AdamW([weight], **group, foreach=False)
    for gradient in gradients:
        weight.grad = gradient.double()
        adam.step()
    return weight.detach()


def test_adam_is_torchs_in_every_group_and_remainders_change_no_bit_of_it():
    """With much weight decay, and gradients that `eps` shows beside."""
    install_cpu_device()
    generator = torch.Generator().manual_seed(11)
    groups = [
        {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 3.0},
        {"lr": 3e-3, "betas": (0.8, 0.99), "eps": 1e-8, "weight_decay": 0.0},
    ]
    num, scale = 3 * SCALED_BLOCK + 11, 0.5
    start = [torch.randn(num, generator=generator).bfloat16() for _ in groups]
    gradients = [[torch.randn(num, generator=generator) * 3e-8 for _ in range(5)] for _ in groups]
    results = {}
    for kept in (torch.float32, torch.int16):
        masters = [torch.nn.Parameter(weight.to(kept) * (kept is torch.float32), False) for weight in start]
        adam = PrecisionAwareAdam(
            [{"params": [master], **group} for master, group in zip(masters, groups, strict=True)],
            **groups[0],
            adam_w_mode=True,
            capturable=False,
            exp_avg_dtype=torch.float32,
            exp_avg_sq_dtype=torch.float32,
        )
        adam.grad_scale.fill_(scale)
        for master, weight in zip(masters, start, strict=True):
            adam.allocate(master, weight.clone())
        for step in range(5):
            for master, of_group in zip(masters, gradients, strict=True):
                master.decoupled_grad = of_group[step]
            adam.step()
        results[kept] = [adam.states[master].master.read(0, num) for master in masters]
        assert all(
            torch.equal(adam.states[master].master.weight, result.bfloat16())
            for master, result in zip(masters, results[kept], strict=True)
        )
    assert all(map(torch.equal, results[torch.int16], results[torch.float32]))
    for result, weight, of_group, group in zip(results[torch.float32], start, gradients, groups, strict=True):
        expected = reference(weight, [gradient * scale for gradient in of_group], group)
        torch.testing.assert_close(result.double(), expected, rtol=1e-6, atol=1e-7)


def test_without_triton_a_gpu_has_no_such_optimizer(monkeypatch):
    monkeypatch.delitem(sys.modules, "gpt_pretrain.kernels.adam_triton", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(UserError, match=r"model\.optim\.use_precision_aware_optimizer=true .*Triton"):
        _kernel()


def test_updates_smaller_than_the_spacing_of_fp16_add_up():
    """Between 0.0156 and 0.0312 they are 1.5e-5 apart; with equal gradients Adam takes steps of the learning rate."""
    weight, gradient = torch.full((4096,), 0.02, dtype=torch.bfloat16), torch.ones(4096)
    state = AdamState(
        master=Master(weight.half(), weight),
        exp_avg=Moment.zeros(weight, torch.float32, keeps_positive=False),
        exp_avg_sq=Moment.zeros(weight, torch.float32, keeps_positive=True),
    )
    before = float(state.master.read(0, 4096).mean())
    for number in range(1, 101):
        values = torch.tensor([0, 1, 1 - 0.9**number, 1 - 0.95**number, number])
        update(gradient, state, AdamStep(device_values=values, lr=1e-6, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0))
    assert before - float(state.master.read(0, 4096).mean()) == pytest.approx(100e-6, rel=0.03)


def test_states_to_be_saved_are_cut_without_being_read():
    reads = []

    class Watched(Moment):
        def read(self, start, end):
            reads.append((start, end))
            return Moment.read(self, start, end)

    moment = Watched.zeros(torch.empty(4 * SCALED_BLOCK), torch.float8_e4m3fn, keeps_positive=False)
    moment.write(0, torch.arange(4.0 * SCALED_BLOCK))
    stored = StoredValues(moment)
    part = stored.view(-1)[300:900].view(1, 20, 30).detach()
    assert (part.shape, part.dtype, part.numel()) == ((1, 20, 30), torch.bfloat16, 600)
    assert reads == []
    values = part.dequantize()
    assert reads == [(300, 900)]
    assert torch.equal(values, moment.read(300, 900).bfloat16().view(1, 20, 30))
    with pytest.raises(NotImplementedError, match=r"aten\.add"):
        _ = stored + 1


# The types that Triton's interpreter rounds as GPUs do.
INTERPRETED = """
import torch
from tests.optimizer_states import assert_kernel_computes_what_torch_does
for master, moment in ((torch.int16, torch.float32), (torch.float16, torch.float16)):
    assert_kernel_computes_what_torch_does("cpu", 5_007, master, (moment, moment))
"""


def test_the_kernel_interpreted_computes_what_torch_does():
    interpret_kernels(INTERPRETED)


@cache
def losses(*overrides, steps=20):
    with emulated_training(*overrides) as training:
        return [training.step() for _ in range(steps)]


def test_fp32_states_with_remainders_are_those_of_separate_masters():
    """The same arithmetic, rounded in another order; what a curve makes of that shows where it is steep."""
    usual, lean = losses(*FP32), losses(*FP32, "model.optim.use_precision_aware_optimizer=true")
    assert lean[:8] == pytest.approx(usual[:8], rel=1e-3)
    assert sum(lean) == pytest.approx(sum(usual), rel=5e-3)
    assert usual[-1] < usual[0] / 2


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(SMALLEST, id="smallest"),
        pytest.param(["model.optim.exp_avg_dtype=bf16", "model.optim.exp_avg_sq_dtype=bf16"], id="bf16 moments"),
        pytest.param([*SMALLEST, *emulate("delayed")], id="emulated FP8"),
    ],
)
def test_small_states_learn_what_fp32_states_learn(overrides):
    fp8 = overrides[3:]
    usual, lean = losses(*FP32, *fp8), losses(*LEAN, *overrides)
    assert lean[-1] < usual[0] / 2
    assert sum(lean) == pytest.approx(sum(usual), rel=0.03)


def test_a_step_that_is_not_finite_changes_no_bit():
    with emulated_training(*LEAN, *SMALLEST) as training:
        assert_a_step_that_is_not_finite_changes_no_bit(training)


def test_gradients_are_clipped_to_the_norm():
    """The first moment after one step is a tenth of the clipped gradient."""
    with emulated_training(*LEAN, "trainer.gradient_clip_val=1e-3") as training:
        norm = training.result().grad_norm
        inner = training.trainable.optimizer.chained_optimizers[0].optimizer
        moments = torch.cat([state.exp_avg.values for state in inner.states.values()])
        assert norm > 1
        assert moments.norm().item() == pytest.approx(1e-4, rel=1e-3)


def save(training, folder):
    progress = TrainingProgress(step=3, consumed_samples=12)
    return save_checkpoint(folder, training.trainable, progress, training.config, {})


def load(path, training):
    load_checkpoint(verify_checkpoint(path), training.trainable, training.config, {})


@pytest.mark.parametrize("small", [SMALLEST, ("model.optim.exp_avg_dtype=bf16", "model.optim.exp_avg_sq_dtype=fp16")])
def test_a_resumed_run_goes_on_bit_for_bit(small, tmp_path):
    with emulated_training(*LEAN, *small) as training:
        for _ in range(3):
            training.step()
        saved = states(training)
        path = save(training, tmp_path)
        expected = [training.step() for _ in range(3)]
        again = build_training_of(training.config)
        load(path, again)
        assert all(map(torch.equal, states(again), saved))
        assert [again.step() for _ in range(3)] == expected


def test_fp32_states_go_on_as_small_ones_and_back(tmp_path):
    with emulated_training(*FP32) as usual:
        for _ in range(5):
            usual.step()
        path = save(usual, tmp_path / "usual")
        expected = [usual.step() for _ in range(5)]
        small = build_training(*LEAN, *SMALLEST)
        load(path, small)
        assert [small.step() for _ in range(5)] == pytest.approx(expected, rel=0.02)
        back = build_training(*FP32)
        load(save(small, tmp_path / "small"), back)
        assert back.step() == pytest.approx(small.step(), rel=0.02)


def test_masters_follow_weights_that_are_loaded_alone(tmp_path):
    with emulated_training(*FP32) as usual:
        usual.step()
        path = save(usual, tmp_path)
        for small in ((), SMALLEST):
            training = build_training(*LEAN, *small)
            load_weights(verify_checkpoint(path), training.trainable, training.config, {})
            assert training.validate() == usual.validate()
            part = training.trainable.optimizer.chained_optimizers[0]
            for parameter, master in part._parameters_and_masters():
                values = part.optimizer.states[master].master.read(0, master.numel())
                assert torch.equal(values.to(torch.float16), parameter.detach().flatten().to(torch.float16))


def test_another_optimizer_than_the_one_asked_for_is_an_error(monkeypatch):
    changed = [
        replace(each, value=replace(each.value, class_name="Adamax"))
        for each in registry.BUILT_IN
        if each.kind == "optimizer"
    ]
    monkeypatch.setattr(registry, "BUILT_IN", changed)
    with pytest.raises(TypeError, match=r"model.optim.name=adam: .* AdamW, not Adamax"), emulated_training():
        pass


def test_an_optimizer_that_cannot_skip_an_update_is_an_error():
    install_cpu_device()
    inner = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(TypeError, match="Adagrad"):
        _make_conditional(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=inner)]))
    with pytest.raises(TypeError, match="Adagrad"):
        allocate_states(inner)
