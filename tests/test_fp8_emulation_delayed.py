"""Delayed scaling over steps, microbatches and validation, against a simulation in plain Python."""

import math
import struct
from collections import deque
from functools import partial

import pytest
import torch

from gpt_pretrain.fp8.delayed import Scaling
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.run.fp8 import resolve_fp8
from tests.emulated_training import RECOMPUTED, emulate, emulated_training

LARGEST = {Role.input: 448.0, Role.weight: 448.0, Role.output_gradient: 57344.0}
FP32_MAX = struct.unpack("f", struct.pack("I", 0x7F7FFFFF))[0]


def fp32(value):
    return struct.unpack("f", struct.pack("f", value))[0]


class Simulated:
    """One tensor's scale: from the last amaxes, oldest first."""

    def __init__(self, largest, length, algorithm):
        self.largest, self.algorithm = largest, algorithm
        self.past = deque(maxlen=length)
        self.current = 0.0
        self.scale = 1.0

    def see(self, amax):
        self.current = max(self.current, amax)

    def update(self):
        if self.current == 0.0:
            return
        self.past.append(self.current)
        amax = max(self.past) if self.algorithm == "max" else self.current
        if math.isfinite(amax):
            quotient = self.largest / amax
            self.scale = fp32(quotient) if quotient < FP32_MAX else FP32_MAX
        self.current = 0.0

    def history(self, length):
        """As the layers keep it: row 0 of the pass under way, then the past without its oldest, newest last."""
        past = list(self.past)[-(length - 1) :] if length > 1 else []
        return [self.current, *[0.0] * (length - 1 - len(past)), *past]


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (3, 0), (16, 2)])
def test_scales_follow_the_last_amaxes(algorithm, length, margin, compose_config):
    install_cpu_device()
    settings = resolve_fp8(
        compose_config(
            "fp8=delayed",
            f"model.fp8_amax_history_len={length}",
            f"model.fp8_amax_compute_algo={algorithm}",
            f"model.fp8_margin={margin}",
        ).model
    )
    # One tensor's amax per pass, and another's that no pass casts.
    passes = [1.0, 4.0, 2.0, 0.0, 0.5, 1e-42, 3.0, math.inf, 7.0, 0.3, 0.2, 0.1, 0.05]
    scaling, simulated = Scaling(2, "e4m3", settings), Simulated(448.0 / 2**margin, length, algorithm)
    for amax in passes:
        # A cast raises the amax of the pass; validation may have cast before.
        for seen in (amax / 2, amax):
            scaling.record(1, torch.tensor([seen]))
            simulated.see(fp32(seen))
        scaling.update()
        simulated.update()
        assert scaling.scale.tolist() == [1.0, simulated.scale]
        assert scaling.amax_history[:, 1].tolist() == simulated.history(length)
        assert scaling.amax_history[:, 0].tolist() == [0.0] * length


class Watch:
    """Follows a live model with a simulation of each cast tensor, and checks the scales that products read."""

    def __init__(self, training, length, algorithm):
        self.layers = training.layers()
        self.length = length
        self.simulated = {
            (name, role): Simulated(LARGEST[role], length, algorithm) for name in self.layers for role in Role
        }
        self.scales_read = 0
        self.weight_scales = {}
        self.first_layer = "decoder.layers.0.self_attention.linear_qkv"
        for name, layer in self.layers.items():
            layer.register_forward_pre_hook(partial(self.forward, name))
            layer.register_full_backward_pre_hook(partial(self.backward, name))
            layer.product_listeners.append(partial(self.product, name))
        (chunk,) = training.chunks
        chunk.decoder.register_forward_hook(lambda *_: self.end_forward())

    def forward(self, name, layer, inputs):
        self.simulated[name, Role.input].see(inputs[0].abs().max().item())
        if layer.is_first_microbatch:
            weight = self.simulated[name, Role.weight]
            self.weight_scales[name] = weight.scale
            weight.see(layer.weight.abs().max().item())

    def backward(self, name, layer, gradients):
        self.simulated[name, Role.output_gradient].see(gradients[0].abs().max().item())

    def product(self, name, product):
        if product.phase is not Phase.wgrad:
            for operand in product.operands:
                expected = (
                    self.weight_scales[name]
                    if operand.role is Role.weight
                    else self.simulated[name, operand.role].scale
                )
                assert operand.scale.tolist() == [expected], (name, product.phase, operand.role)
                self.scales_read += 1
        elif name == self.first_layer:
            # The last product of a backward pass; its update follows.
            self.end_backward()

    def end_forward(self):
        if torch.is_grad_enabled():
            for (_, role), simulated in self.simulated.items():
                if role is not Role.output_gradient:
                    simulated.update()

    def end_backward(self):
        for (_, role), simulated in self.simulated.items():
            if role is Role.output_gradient:
                simulated.update()

    def check(self):
        for name, layer in self.layers.items():
            state = layer.get_extra_state()
            for direction, roles in (("fwd", (Role.input, Role.weight)), ("bwd", (Role.output_gradient,))):
                for column, role in enumerate(roles):
                    simulated = self.simulated[name, role]
                    assert state[f"scale_{direction}"][column] == simulated.scale, (name, role)
                    history = state[f"amax_history_{direction}"][:, column].tolist()
                    assert history == simulated.history(self.length), (name, role)
            # Outputs and input gradients are never cast.
            assert state["scale_fwd"].shape == (3,)
            assert (state["scale_fwd"][2], state["scale_bwd"][1]) == (1.0, 1.0)


@pytest.mark.parametrize(("length", "algorithm"), [(4, "max"), (4, "most_recent"), (1, "max"), (1024, "max")])
def test_live_layers_scale_as_simulated(length, algorithm):
    overrides = emulate("delayed", f"model.fp8_amax_history_len={length}", f"model.fp8_amax_compute_algo={algorithm}")
    with emulated_training(*overrides, "model.global_batch_size=6") as training:
        watch = Watch(training, length, algorithm)
        assert len(watch.layers) == 8
        # Validation first, as in a run: what it sees counts in the first training pass.
        training.validate()
        watch.check()
        for _ in range(3):
            training.step()
            watch.check()
        training.validate()
        watch.check()
        training.step()
        watch.check()
        assert watch.scales_read == 8 * 2 * (3 + 3) + 8 * 4 * 3 * 4


@pytest.mark.parametrize("length", [2, 1024])
def test_recomputed_activations_change_nothing(length):
    def run(*overrides):
        history = f"model.fp8_amax_history_len={length}"
        with emulated_training(*emulate("delayed", history), *overrides) as training:
            losses = [training.step() for _ in range(4)]
            return losses, {name: layer.get_extra_state() for name, layer in training.layers().items()}

    losses, states = run()
    recomputed_losses, recomputed_states = run(*RECOMPUTED)
    assert recomputed_losses == losses
    torch.testing.assert_close(recomputed_states, states, rtol=0, atol=0)
