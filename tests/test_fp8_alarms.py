"""Warnings of the FP8 statistics: when they come, how often, and what they say."""

import math

import pytest
import torch

from gpt_pretrain.config.recipes import RECIPES
from gpt_pretrain.fp8.alarms import Alarms
from gpt_pretrain.fp8.statistics import StepStatistics, TensorStatistics
from gpt_pretrain.run.fp8 import resolve_fp8
from gpt_pretrain.training.watches import Fp8Watch
from tests.emulated_training import emulate, emulated_training

FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"


def tensor(**changes):
    values = {
        "layer": FC1,
        "tensor": "input",
        "amax": 4.0,
        "scale_min": 128.0,
        "scale_max": 128.0,
        "saturated": 0.0,
        "flushed": 0.0,
        "smallest": 0.0,
        "lagging": None,
        "amax_history_used": 16,
    }
    return TensorStatistics(**(values | changes))


def scaled(scale):
    return {"scale_min": scale, "scale_max": scale}


def warned(compose_config, overrides, observations):
    """Step of each warning → the warning, when each observation is of one tensor."""
    alarms = Alarms(resolve_fp8(compose_config(*overrides).model), 1e-3)
    found = {}
    for number, observation in enumerate(observations, start=1):
        step = number * 100
        for message in alarms.check(StepStatistics(step=step, tensors=[tensor(**observation)])):
            found[step] = message
    return found


ROWWISE = ["fp8=torchao_rowwise", "model.fp8_emulate=true"]
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
            {"tensor": "output_gradient", "amax": 1.0, **scaled(65000.0), "saturated": 0.5},
            [
                "50%",
                "amax 1 ",
                "6.5e+04",
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
            ["as large as scales get", "amax 1e-40", "model.init_method_std", WITHOUT],
        ),
        (
            ["fp8=torchao_tensorwise", "model.fp8_emulate=true"],
            {"amax": 0.0, **scaled(448 / 1e-12)},
            ["as large as scales get", "amax 0", "model.init_method_std", WITHOUT],
        ),
        (
            ["fp8=torchao_tensorwise", "model.fp8_emulate=true"],
            {"flushed": 0.3, "smallest": 0.2},
            ["30% of its values", "fp8=torchao_rowwise", WITHOUT],
        ),
    ],
)
def test_a_warning_names_tensor_number_and_way_out(compose_config, overrides, observation, said):
    ((step, message),) = warned(compose_config, overrides, [observation] * 2).items()

    role = observation.get("tensor", "input")
    assert step == (200 if observation.get("saturated") else 100), "what saturates once may only grow"
    assert message.startswith(f"FP8 at step {step}: {role} of {FC1}: ")
    assert [part for part in said if part not in message] == []
    # What belongs to another recipe or choice is not offered.
    keys = {"model.fp8_margin", "model.fp8_amax_compute_algo", "fp8=tensorwise", "model.optim.lr"}
    assert {key for key in keys if key in message} == {key for key in keys if any(key in part for part in said)}


GOOD, SATURATED, FLUSHED = {}, {"saturated": 0.002}, {"flushed": 0.11, "smallest": 0.2}
JUMPS = [scaled(scale) for scale in (1.0, 4.0, 64.0, 8.0)]


@pytest.mark.parametrize(
    ("overrides", "observations", "steps"),
    [
        pytest.param([], [GOOD, SATURATED, SATURATED, SATURATED], [300], id="once"),
        pytest.param([], [*[SATURATED] * 2, GOOD, *[SATURATED] * 2], [200, 500], id="again after it had recovered"),
        pytest.param([], [SATURATED, GOOD, SATURATED], [], id="saturated for one observation"),
        pytest.param(
            [], [{"saturated": 0.001}] * 2 + [{"saturated": None}] * 2, [], id="at the threshold, and unknown"
        ),
        pytest.param([], [{"saturated": 0.5, "amax": 3.62}] * 2, [], id="463 rounds to 448"),
        pytest.param([], [scaled(0.0), {"amax": math.inf}], [100], id="still degenerate"),
        pytest.param([], JUMPS, [400], id="three jumps in a row"),
        pytest.param([], [*JUMPS, scaled(32.0), scaled(33.0), *JUMPS], [400, 900], id="jumps again"),
        pytest.param([], [scaled(scale) for scale in (1.0, 4.0, 15.9, 64.0)], [], id="one of them below four"),
        pytest.param([], [scaled(1.0), scaled(100.0), *[scaled(100.0)] * 3], [], id="one jump"),
        pytest.param([], [*JUMPS[:3], {"amax": math.inf}, JUMPS[3]], [400], id="not across an infinity"),
        pytest.param(["fp8=blockwise"], JUMPS, [], id="blocks have no scale to follow"),
        pytest.param(["fp8=blockwise"], [{"scale_max": 3.5e38}], [], id="a block of zeros"),
        pytest.param(["fp8=blockwise"], [scaled(3.5e38)], [100], id="all blocks of zeros"),
        pytest.param(ROWWISE, [{"scale_max": 2.0**48}], [], id="a row of zeros"),
        pytest.param(ROWWISE, [scaled(2.0**48)], [100], id="all rows of zeros"),
        pytest.param(ROWWISE, [scaled(2.0**47)], [], id="rows of small values"),
        pytest.param(ROWWISE, JUMPS, [], id="rows have no scale to follow"),
        pytest.param(["fp8=tensorwise"], JUMPS, [400], id="jumps of current scales"),
        pytest.param([], [FLUSHED, FLUSHED, GOOD, FLUSHED], [100, 400], id="flushed"),
        pytest.param([], [{"flushed": 0.9, "smallest": 0.02}, {"flushed": 0.9}], [], id="zeros that no cast has made"),
        pytest.param([], [{"flushed": 0.9, "smallest": None}], [], id="a sample of zeros under a good scale"),
        pytest.param([], [{"flushed": 0.09, "smallest": 0.2}], [], id="flushed, below a tenth"),
        pytest.param([], [{"amax": 1e-4, **scaled(100.0)}], [100], id="the largest value is subnormal"),
        pytest.param([], [{"amax": 0.0, **scaled(1.0)}] * 3, [], id="nothing to cast"),
        pytest.param([], [{"amax": 3.0, **scaled(1.0)}] * 3, [200], id="still 1"),
        pytest.param([], [{"amax": 400.0, **scaled(1.0)}] * 3, [], id="1 by its amax"),
        pytest.param([], [{"amax": 3.0, **scaled(1.0)}, GOOD], [], id="1 at first"),
        pytest.param(["fp8=tensorwise"], [{"amax": 3.0, **scaled(1.0)}] * 3, [], id="1, but of this pass"),
        pytest.param([], [{"lagging": 0.001}, {"lagging": 0.002}, {"lagging": 0.9}], [200], id="lagging"),
    ],
)
def test_a_warning_comes_once_until_its_tensor_recovers(compose_config, overrides, observations, steps):
    assert list(warned(compose_config, overrides or ["fp8=delayed"], observations)) == steps


@pytest.mark.parametrize(
    ("overrides", "offered"),
    [
        (["fp8=delayed"], ["model.fp8_amax_history_len (now 1024)", "fp8=tensorwise", "model.optim.lr"]),
        (
            ["fp8=delayed", "model.fp8_amax_compute_algo=most_recent"],
            ["model.fp8_amax_compute_algo=max", "fp8=tensorwise", "model.optim.lr"],
        ),
        (["fp8=tensorwise"], ["model.optim.lr", "model.optim.sched.warmup_steps"]),
    ],
)
def test_a_jumping_scale_is_shown_with_what_smooths_it(compose_config, overrides, offered):
    [found] = warned(compose_config, overrides, JUMPS).values()

    assert found.startswith(f"FP8 at step 400: input of {FC1}: ")
    assert all(part in found for part in ("factor of 4", ": 1, 4, 64, 8;"))
    keys = ["model.fp8_amax_history_len (now 1024)", "model.fp8_amax_compute_algo=max", "fp8=tensorwise"]
    keys += ["model.optim.lr", "model.optim.sched.warmup_steps"]
    assert [key for key in keys if key in found] == offered


def test_each_tensor_has_warnings_of_its_own(compose_config):
    alarms = Alarms(resolve_fp8(compose_config("fp8=delayed").model), 1e-3)
    both = [tensor(amax=math.inf), tensor(amax=math.inf, tensor="weight"), tensor(layer=FC2, amax=math.inf)]
    assert len(alarms.check(StepStatistics(step=1, tensors=both[:1]))) == 1

    second = alarms.check(StepStatistics(step=2, tensors=both))
    assert [message.split(": ")[1] for message in second] == [f"weight of {FC1}", f"input of {FC2}"]


def test_layers_that_begin_to_show_the_same_share_a_warning(compose_config):
    alarms = Alarms(resolve_fp8(compose_config("fp8=delayed").model), 1e-3)
    layers = [f"decoder.layers.{layer}.mlp.linear_fc1" for layer in range(6)]
    shares = [0.01, 0.01, 0.05, 0.0, 0.01, 0.01]

    def check(step, shares):
        tensors = [tensor(layer=layer, saturated=share) for layer, share in zip(layers, shares, strict=True)]
        return alarms.check(StepStatistics(step=step, tensors=tensors))

    assert check(0, shares) == []
    [message] = check(1, shares)
    assert message.startswith(f"FP8 at step 1: input of {layers[2]}: 5% of its values are saturated")
    assert message.endswith(f'["{layers[2]}"]; likewise {layers[0]}, {layers[1]}, {layers[4]} and 1 more')
    assert check(2, [0.01] * 6) == []
    [message] = check(3, [0.01] * 6)
    assert message.startswith(f"FP8 at step 3: input of {layers[3]}: 1%"), "the others have been warned of"
    assert "likewise" not in message


def test_a_tensor_that_a_step_did_not_look_at_is_not_warned_of_again(compose_config):
    alarms = Alarms(resolve_fp8(compose_config("fp8=delayed").model), 1e-3)
    warned_at = []
    for step, looked_at in enumerate([[FC1], [FC2], [FC1], [FC2], [FC1, FC2]]):
        tensors = [tensor(layer=layer, amax=math.inf) for layer in looked_at]
        warned_at += [step for _ in alarms.check(StepStatistics(step=step, tensors=tensors))]
    assert warned_at == [0, 1]


def set_scales(factor):
    """Multiplies the scales of gradients before each step; None sets them to 1."""

    def spoil(training, step):
        for layer in training.layers().values():
            scale = layer.fp8_meta["scaling_bwd"].scale
            scale.copy_(torch.ones_like(scale) if factor is None else scale * factor(step))

    return spoil


def keep_first_weights(training, step):
    """From the second step on layers multiply by the codes of their first weights."""
    if step == 2:
        for layer in training.layers().values():
            layer.register_forward_pre_hook(lambda layer, inputs: setattr(layer, "is_first_microbatch", False))


def warnings_of(training, num_steps, spoil=lambda training, step: None):
    """Step and text of each warning."""
    watch = Fp8Watch(training.trainable.model)
    told = []
    for step in range(1, num_steps + 1):
        spoil(training, step)
        with watch.step(step):
            training.step()
        told += [(record.step, message) for record in watch.records() for message in record.warnings]
    return told


EVERY_STEP = "trainer.log_every_n_steps=1"


@pytest.mark.parametrize(
    ("spoil", "tensor_name", "said"),
    [
        pytest.param(set_scales(None), "output_gradient", "became zero", id="flushed under a scale of 1"),
        pytest.param(set_scales(None), "output_gradient", "still 1", id="a scale that stays 1"),
        pytest.param(set_scales(lambda step: 64.0), "output_gradient", "are saturated", id="saturated"),
        pytest.param(set_scales(lambda step: 16.0 ** -(step % 2)), "output_gradient", "jumps", id="swings"),
        pytest.param(keep_first_weights, "weight", "not those of the weight", id="weights that lag"),
    ],
)
def test_live_layers_are_watched_without_statistics(spoil, tensor_name, said):
    with emulated_training(*emulate("delayed", EVERY_STEP)) as training:
        told = warnings_of(training, 6, spoil)
    matching = [(step, message) for step, message in told if f": {tensor_name} of " in message and said in message]
    assert len(matching) == 1, told
    assert all(f"FP8 at step {step}: " in message for step, message in told)


WARM = ("model.optim.lr=1e-3", "model.optim.sched.warmup_steps=20")


# What a recipe makes of values and how the layers around it round them are independent; all pairs are slow.
SOUND = [
    pytest.param(recipe.preset, precision, marks=[pytest.mark.slow] if (number + second) % 2 else [])
    for number, recipe in enumerate(RECIPES.values())
    for second, precision in enumerate(("bf16", "fp32"))
]


@pytest.mark.parametrize(("recipe", "precision"), SOUND)
def test_a_sound_run_is_not_warned_of(recipe, precision):
    told = (f"trainer.precision={precision}", "trainer.log_every_n_steps=5")
    with emulated_training(*emulate(recipe, *told, *WARM)) as training:
        assert warnings_of(training, 40) == []
