"""Warnings of the FP8 statistics: when they come, how often, and what they say."""

import math

import pytest
import torch

from gpt_pretrain.fp8.statistics import Alarms, StepStatistics, TensorStatistics
from gpt_pretrain.spec.recipes import resolve_fp8

FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"


def tensor(**changes):
    values = {
        "layer": FC1,
        "tensor": "input",
        "amax": 3.0,
        "scale_min": 128.0,
        "scale_max": 128.0,
        "saturated": 0.0,
        "flushed": 0.0,
        "amax_history_used": 16,
    }
    return TensorStatistics(**(values | changes))


def scaled(scale):
    return {"scale_min": scale, "scale_max": scale}


def warned(compose_config, overrides, observations, interval=100):
    """Step of each warning → the warning, when each observation is of one tensor."""
    alarms = Alarms(resolve_fp8(compose_config(*overrides).model), 1e-3, interval)
    found = {}
    for number, observation in enumerate(observations, start=1):
        step = number * interval
        for message in alarms.check(StepStatistics(step=step, tensors=[tensor(**observation)])):
            found[step] = message
    return found


TENSORWISE, MAX = "fp8=tensorwise", "model.fp8_amax_compute_algo=max"
THRESHOLD = "logging.fp8_saturation_threshold=0.001"
WITHOUT = f'model.fp8_exclude=["{FC1}"]'


@pytest.mark.parametrize(
    ("overrides", "observation", "said"),
    [
        (
            ["fp8=delayed"],
            {"amax": 3.0, **scaled(1024.0), "saturated": 0.0123},
            # 3 · 1024 / 448 is 6.9: three powers of two.
            [
                "1.2%",
                "logging.fp8_saturation_threshold=0.001",
                "amax 3 ",
                "1.02e+03",
                "model.fp8_margin from 0 to 3",
                "fp8=tensorwise",
                WITHOUT,
            ],
        ),
        (
            ["fp8=delayed", "model.fp8_margin=2", "model.fp8_amax_compute_algo=most_recent"],
            {"tensor": "output_gradient", "amax": 1.0, **scaled(60000.0), "saturated": 0.5},
            [
                "50%",
                "amax 1 ",
                "6e+04",
                "model.fp8_margin from 2 to 3",
                "model.fp8_amax_compute_algo=max",
                "fp8=tensorwise",
                WITHOUT,
            ],
        ),
        (
            ["fp8=delayed"],
            {"amax": math.inf, "saturated": None},
            ["inf or NaN", "model.optim.lr", "model.optim.sched.warmup_steps", WITHOUT],
        ),
        (["fp8=tensorwise"], scaled(0.0), ["scale is 0", "infinite", "model.optim.lr", WITHOUT]),
        (
            ["fp8=delayed"],
            {"amax": 1e-40, **scaled(torch.finfo(torch.float32).max)},
            ["scale is infinite", "amax 1e-40", "model.init_method_std", WITHOUT],
        ),
    ],
)
def test_a_warning_names_tensor_number_and_way_out(compose_config, overrides, observation, said):
    ((step, message),) = warned(compose_config, overrides, [observation]).items()

    role = observation.get("tensor", "input")
    assert step == 100
    assert message.startswith(f"FP8 at step 100: {role} of {FC1}: ")
    assert [part for part in said if part not in message] == []
    # What belongs to another recipe or choice is not offered.
    keys = {"model.fp8_margin", "model.fp8_amax_compute_algo", "fp8=tensorwise", "model.optim.lr"}
    assert {key for key in keys if key in message} == {key for key in keys if any(key in part for part in said)}


GOOD, SATURATED = {}, {"saturated": 0.002}
JUMPS = [scaled(scale) for scale in (1.0, 4.0, 64.0, 8.0)]


@pytest.mark.parametrize(
    ("overrides", "observations", "steps"),
    [
        pytest.param([], [GOOD, SATURATED, SATURATED, SATURATED], [200], id="once"),
        pytest.param([], [SATURATED, GOOD, SATURATED], [100, 300], id="again after it had recovered"),
        pytest.param([], [{"saturated": 0.001}, {"saturated": None}], [], id="at the threshold, and unknown"),
        pytest.param([], [scaled(0.0), {"amax": math.inf}], [100], id="still degenerate"),
        pytest.param([], JUMPS, [400], id="three jumps in a row"),
        pytest.param([], [*JUMPS, scaled(32.0), scaled(33.0), *JUMPS], [400, 900], id="jumps again"),
        pytest.param([], [scaled(scale) for scale in (1.0, 4.0, 15.9, 64.0)], [], id="one of them below four"),
        pytest.param([], [scaled(1.0), scaled(100.0), *[scaled(100.0)] * 3], [], id="one jump"),
        pytest.param([], [*JUMPS[:3], {"amax": math.inf}, JUMPS[3]], [400], id="not across an infinity"),
        pytest.param(["fp8=blockwise"], JUMPS, [], id="blocks have no scale to follow"),
        pytest.param(["fp8=blockwise"], [{"scale_max": 3.5e38}], [], id="a block of zeros"),
        pytest.param(["fp8=blockwise"], [scaled(3.5e38)], [100], id="all blocks of zeros"),
        pytest.param(["fp8=tensorwise"], JUMPS, [400], id="jumps of current scales"),
    ],
)
def test_a_warning_comes_once_until_its_tensor_recovers(compose_config, overrides, observations, steps):
    assert list(warned(compose_config, overrides or ["fp8=delayed"], observations)) == steps


@pytest.mark.parametrize(
    ("overrides", "interval", "offered"),
    [
        (["fp8=delayed"], 1, ["model.fp8_amax_history_len (now 1024)", "fp8=tensorwise", "model.optim.lr"]),
        (
            ["fp8=delayed", "model.fp8_amax_compute_algo=most_recent"],
            50,
            ["model.fp8_amax_compute_algo=max", "fp8=tensorwise", "model.optim.lr"],
        ),
        (["fp8=tensorwise"], 50, ["model.optim.lr", "model.optim.sched.warmup_steps"]),
    ],
)
def test_a_jumping_scale_is_shown_with_what_smooths_it(compose_config, overrides, interval, offered):
    [found] = warned(compose_config, overrides, JUMPS, interval).values()

    assert found.startswith(f"FP8 at step {4 * interval}: input of {FC1}: ")
    every = "every step" if interval == 1 else f"every {interval} steps"
    assert all(part in found for part in ("factor of 4", f"{every}: 1, 4, 64, 8;"))
    keys = ["model.fp8_amax_history_len (now 1024)", "model.fp8_amax_compute_algo=max", "fp8=tensorwise"]
    keys += ["model.optim.lr", "model.optim.sched.warmup_steps"]
    assert [key for key in keys if key in found] == offered


def test_each_tensor_has_warnings_of_its_own(compose_config):
    alarms = Alarms(resolve_fp8(compose_config("fp8=delayed").model), 1e-3, 1)
    both = [tensor(saturated=0.5), tensor(saturated=0.5, tensor="weight"), tensor(layer=FC2, amax=math.inf)]
    assert len(alarms.check(StepStatistics(step=1, tensors=both[:1]))) == 1

    second = alarms.check(StepStatistics(step=2, tensors=both))
    assert [message.split(": ")[1] for message in second] == [f"weight of {FC1}", f"input of {FC2}"]


def test_layers_that_begin_to_show_the_same_share_a_warning(compose_config):
    alarms = Alarms(resolve_fp8(compose_config("fp8=delayed").model), 1e-3, 1)
    layers = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(6)]
    shares = [0.01, 0.01, 0.05, 0.0, 0.01, 0.01]

    def check(step, shares):
        tensors = [tensor(layer=layer, saturated=share) for layer, share in zip(layers, shares, strict=True)]
        return alarms.check(StepStatistics(step=step, tensors=tensors))

    [message] = check(1, shares)
    assert message.startswith(f"FP8 at step 1: input of {layers[2]}: 5% of its values are saturated")
    assert message.endswith(f'["{layers[2]}"]; likewise {layers[0]}, {layers[1]}, {layers[4]} and 1 more')
    [message] = check(2, [0.01] * 6)
    assert message.startswith(f"FP8 at step 2: input of {layers[3]}: 1%"), "the others have been warned of"
    assert "likewise" not in message
