"""Emulated FP8 on two ranks: the scales and losses of one process, wherever Transformer Engine's reductions make them.

What they do not make the same, there as here: current and block scaling scale the weight's parts, and the tensors that
are split along features, by each rank's own part; data parallel ranks see other microbatches than one process does.
"""

import pytest
import torch

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import recipes_of
from gpt_pretrain.fp8.gemms import Role
from tests.emulated_training import TINY, emulate, emulated_training, observed_training
from tests.forked_runs import fork_ranks
from tests.refusals import compose_quickly
from tests.rounding import fp8_anew_tolerance, fp8_loss_tolerance

TORCHAO = tuple(recipe.preset for recipe in recipes_of(Fp8Backend.torchao))
# Cases that share process groups share a launch.
LAUNCHES = (
    (
        "tp2:delayed",
        "tp2_sp:delayed:resume",
        "tp2:tensorwise",
        "tp2_sp:tensorwise",
        "tp2_sp:blockwise",
        *(f"{layout}:{recipe}" for layout in ("tp2", "tp2_sp") for recipe in TORCHAO),
        "tp2:torchao_tensorwise:own",
        "tp2_sp:torchao_tensorwise:own",
    ),
    ("dp:delayed:resume", "dp:torchao_tensorwise:own", *(f"dp:{recipe}:resume" for recipe in TORCHAO)),
    ("pp2:delayed", "pp2:torchao_tensorwise:own", *(f"pp2:{recipe}" for recipe in TORCHAO)),
)
MODEL = compose_quickly(TINY).model
LOSS_TOLERANCE = fp8_loss_tolerance(MODEL)
ROUNDED_ANEW_TOLERANCE = fp8_anew_tolerance(MODEL)
QKV = "decoder.layers.0.self_attention.linear_qkv"
# Of tensor parallel ranks: tensors of which each has a part.
SPLIT = {
    ("linear_qkv", Role.output_gradient.value),
    ("linear_fc1", Role.output_gradient.value),
    ("linear_proj", Role.input.value),
    ("linear_fc2", Role.input.value),
    *((kind, Role.weight.value) for kind in ("linear_qkv", "linear_fc1", "linear_proj", "linear_fc2")),
}


def launch(folder):
    for cases in LAUNCHES:
        done = fork_ranks(2, ["tests/programs/emulated_layouts.py", str(folder), *cases])
        assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def two_ranks(made_once):
    """What both ranks saw, by "LAYOUT.RECIPE"."""
    folder = made_once("emulated_layouts", launch)
    names = {path.name.rsplit(".", 2)[0] for path in folder.glob("*.pt")}
    return {name: [torch.load(folder / f"{name}.{rank}.pt") for rank in (0, 1)] for name in names}


@pytest.fixture(scope="module")
def one_process():
    results = {}
    for recipe in ("delayed", "tensorwise", "blockwise", *TORCHAO):
        with emulated_training(*emulate(recipe)) as training:
            results[recipe] = observed_training(training)
    return results


@pytest.fixture(scope="module")
def own_losses():
    """Of one process that computes TorchAO's own products, in BF16."""
    overrides = ("fp8=torchao_tensorwise", "trainer.precision=bf16")
    with emulated_training(*overrides, torchao={"compiled": False}) as training:
        return observed_training(training)["losses"]


def is_split(key):
    name, role = key
    return (name.rsplit(".", 1)[1], role) in SPLIT


def scales(result, key):
    return [scale for _, scale in result["read"][key]]


def amaxes(result, key):
    return [amax for amax, _ in result["read"][key]]


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2"])
def test_delayed_scaling_is_that_of_one_process(layout, two_ranks, one_process):
    expected = one_process["delayed"]
    seen = set()
    for result in two_ranks[f"{layout}.delayed"]:
        assert result["losses"] == pytest.approx(expected["losses"], rel=LOSS_TOLERANCE)
        for key in result["read"]:
            assert scales(result, key) == pytest.approx(scales(expected, key), rel=1e-5), key
            seen.add(key)
    assert seen == set(expected["read"])
    # Amaxes are each rank's own until they are reduced.
    first, second = (result["read"] for result in two_ranks[f"{layout}.delayed"])
    for key in set(first) & set(second):
        largest = [max(pair) for pair in zip(amaxes({"read": first}, key), amaxes({"read": second}, key), strict=True)]
        assert largest == pytest.approx(amaxes(expected, key), rel=1e-5), key
        if is_split(key):
            assert amaxes({"read": first}, key) != amaxes({"read": second}, key), key


def test_data_parallel_ranks_share_their_scales(two_ranks, one_process):
    first, second = two_ranks["dp.delayed"]
    assert first["losses"] == pytest.approx(one_process["delayed"]["losses"], rel=1e-2)
    for key in first["read"]:
        assert scales(first, key) == scales(second, key), key
    # A step is one microbatch on each rank; no product comes before this layer's input.
    key = (QKV, Role.input.value)
    one = amaxes(one_process["delayed"], key)
    assert (amaxes(first, key)[0], amaxes(second, key)[0]) == pytest.approx(one[:2], rel=1e-6)
    assert one[0] != pytest.approx(one[1], rel=1e-3)
    assert scales(first, key)[:2] == pytest.approx([1.0, 448.0 / max(one[:2])], rel=1e-6)


def test_current_scaling_takes_the_amax_of_all_parts_of_the_sequence(two_ranks, one_process):
    with_split, without_split = two_ranks["tp2_sp.tensorwise"], two_ranks["tp2.tensorwise"]
    for one, other in zip(with_split, without_split, strict=True):
        assert one["losses"] == pytest.approx(other["losses"], rel=LOSS_TOLERANCE)
        for key in one["read"]:
            assert scales(one, key) == pytest.approx(scales(other, key), rel=1e-5), key
    expected = one_process["tensorwise"]
    assert with_split[0]["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    key = (QKV, Role.input.value)
    assert scales(with_split[0], key)[0] == scales(with_split[1], key)[0]
    assert scales(with_split[0], key)[0] == pytest.approx(scales(expected, key)[0], rel=1e-6)
    # A weight's scale is that of the rank's own part: its largest value lies on one of them.
    key = (QKV, Role.weight.value)
    parts = [scales(result, key)[0] for result in with_split]
    assert min(parts) == scales(expected, key)[0]
    assert max(parts) > min(parts)


def test_block_scaling_trains_as_in_one_process(two_ranks, one_process):
    for result in two_ranks["tp2_sp.blockwise"]:
        assert result["losses"] == pytest.approx(one_process["blockwise"]["losses"], rel=LOSS_TOLERANCE)


@pytest.mark.parametrize("recipe", TORCHAO)
@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2", "dp"])
def test_torchao_trains_as_in_one_process(layout, recipe, two_ranks, one_process):
    """Tensor parallel ranks scale their own parts of weights and features, by powers of two but for tensorwise."""
    expected = one_process[recipe]["losses"]
    scales_differ = layout.startswith("tp2") and recipe == "torchao_tensorwise"
    for result in two_ranks[f"{layout}.{recipe}"]:
        tolerance = ROUNDED_ANEW_TOLERANCE if scales_differ else LOSS_TOLERANCE
        assert result["losses"] == pytest.approx(expected, rel=tolerance)
    # Scales of what no rank shares are equal.
    key = (QKV, Role.input.value)
    if layout != "dp":
        assert scales(two_ranks[f"{layout}.{recipe}"][0], key)[0] == pytest.approx(scales(one_process[recipe], key)[0])


@pytest.mark.parametrize("layout", ["tp2", "tp2_sp", "pp2", "dp"])
def test_torchaos_own_products_train_as_in_one_process(layout, two_ranks, own_losses):
    # Roundings to BF16 move values to other codes, too.
    for result in two_ranks[f"{layout}.own.torchao_tensorwise"]:
        assert result["losses"] == pytest.approx(own_losses, rel=ROUNDED_ANEW_TOLERANCE)


@pytest.mark.parametrize("case", ["tp2_sp.delayed", "dp.delayed", *(f"dp.{recipe}" for recipe in TORCHAO)])
def test_resumed_ranks_equal_uncut_ones(case, two_ranks):
    for result in two_ranks[case]:
        (losses, states), (resumed_losses, resumed_states) = result["uncut"], result["resumed"]
        assert resumed_losses == losses
        torch.testing.assert_close(resumed_states, states, rtol=0, atol=0)
