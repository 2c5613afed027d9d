"""The proof of numbers: what emulated layers computed is compared with the plan, whatever they say about themselves."""

import json
from contextlib import nullcontext
from functools import partial

import pytest

from gpt_pretrain.config.choices import Fp8Backend
from gpt_pretrain.config.recipes import RECIPES, recipes_of
from gpt_pretrain.fp8.casts import Directions
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.proof import ProofError
from tests import sabotages
from tests.emulated_training import RECOMPUTED, emulate, emulated_training
from tests.forked_runs import fork_ranks
from tests.sabotages import (
    LAYER,
    OTHER,
    after_updates,
    change_cast,
    in_both_ways,
    layer_of,
    prove,
    prove_steps,
    state_of,
    with_codes,
)

DELAYED, TENSORWISE, BLOCKWISE = emulate("delayed"), emulate("tensorwise"), emulate("blockwise")
ROWWISE, ROWWISE_GW_HP = emulate("torchao_rowwise"), emulate("torchao_rowwise_with_gw_hp")
FC1, FC2, PROJ = "mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_proj"


@pytest.mark.parametrize(
    "overrides",
    [
        *(emulate(recipe.preset, "trainer.precision=bf16") for recipe in RECIPES.values()),
        # Scales whose logarithms are no exact numbers.
        *(emulate(recipe.preset, "trainer.precision=fp32") for recipe in recipes_of(Fp8Backend.torchao)),
        emulate("mxfp8"),
        (*DELAYED, *RECOMPUTED),
        (*DELAYED, "model.fp8_e4m3=true", "model.fp8_hybrid=false"),
        (*DELAYED, "model.fp8_margin=3", "model.fp8_amax_history_len=3"),
        (*DELAYED, "model.fp8_amax_history_len=1"),
        (*DELAYED, "model.fp8_amax_history_len=4", "model.fp8_amax_compute_algo=most_recent"),
        (*DELAYED, "model.fp8_wgrad=false", "model.fp8_exclude=['*.1.mlp.linear_fc1']"),
        (*BLOCKWISE, "model.fp8_e4m3=false", "model.fp8_hybrid=true"),
        (*TENSORWISE, "model.bias=true"),
        emulate("torchao_rowwise_with_gw_hp", "model.bias=true", "trainer.precision=bf16"),
        (*ROWWISE, *RECOMPUTED),
    ],
    ids=" ".join,
)
def test_no_step_of_a_sound_training_differs(overrides):
    with emulated_training(*overrides) as training:
        for step in range(1, 6):
            if step == 4:
                training.validate()
            prove(training, step=step)


@pytest.mark.parametrize(
    ("built", "what", "planned", "live"),
    [
        ((*DELAYED, "model.fp8_amax_history_len=2"), "input: rows of the amax history", "1024", "2"),
        ((*DELAYED, "model.fp8_amax_history_len=1"), "weight: rows of the amax history", "1024", "1"),
        (TENSORWISE, "output gradient: rows of the amax history", "1024", "0"),
        ((*DELAYED, "model.fp8_e4m3=true"), "codes of the output gradient in dgrad", "e5m2", "float8_e4m3fn"),
        ((*DELAYED, "model.fp8_wgrad=false"), "wgrad", "e5m2 × e4m3", "float32 × float32"),
        (("fp8=none",), "forward", "e4m3 × e4m3", "no such product"),
    ],
)
def test_layers_built_by_another_plan_are_found(built, what, planned, live):
    with emulated_training(*built) as training, pytest.raises(ProofError) as error:
        prove(training, step=1, planned=DELAYED)
    found = [each for each in error.value.differences if each.what == what]
    assert {(each.planned, each.live) for each in found} == {(planned, live)}
    assert len({each.module for each in found}) == 8, "each layer's"


@pytest.mark.parametrize("role", Role)
def test_another_margin_shows_in_every_scale(role):
    with emulated_training(*DELAYED, "model.fp8_margin=6") as training:
        training.step()
        with pytest.raises(ProofError) as error:
            prove(training, step=2, planned=DELAYED)
    found = [each for each in error.value.differences if each.what == f"{role.value.replace('_', ' ')}: next scale"]
    assert len(found) == 8
    assert [float(each.planned) / float(each.live) for each in found] == pytest.approx([64.0] * 8, rel=1e-4)


def test_another_algorithm_shows_once_amaxes_fall():
    most_recent = "model.fp8_amax_compute_algo=most_recent"
    with emulated_training(*DELAYED, most_recent) as training, pytest.raises(ProofError) as error:
        prove_steps(training, range(1, 5), planned=DELAYED)
    assert {each.what.partition(": ")[2] for each in error.value.differences} <= {"scale", "first scale", "next scale"}


# A sabotage of one layer's cast, state or product: the recipe, what is done before the first step, and where it shows.
OF_A_LAYER = {
    "codes of another format": (
        TENSORWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.other_format),
        "codes of the input in forward",
    ),
    "codes of the transposed tensor": (
        TENSORWISE,
        PROJ,
        partial(change_cast, role=Role.weight, change=with_codes(lambda codes: codes.t().contiguous())),
        "codes of the weight in forward",
    ),
    "codes of another tensor": (
        DELAYED,
        FC2,
        partial(change_cast, role=Role.output_gradient, change=with_codes(lambda codes: codes.flip(0))),
        "codes of the output gradient in dgrad",
    ),
    "rounded towards zero": (
        TENSORWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.rounded_towards_zero),
        "codes of the input in forward",
    ),
    "twice the scale": (
        TENSORWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.twice_the_scale),
        "scale of the input",
    ),
    "twice the delayed scale": (
        DELAYED,
        FC1,
        partial(change_cast, role=Role.weight, change=sabotages.twice_the_scale),
        "weight: scale",
    ),
    "scale of a part": (
        TENSORWISE,
        PROJ,
        partial(change_cast, role=Role.output_gradient, change=sabotages.scale_of_a_part),
        "scale of the output gradient",
    ),
    "half the amax": (
        TENSORWISE,
        FC1,
        partial(change_cast, role=Role.input, change=in_both_ways(sabotages.half_the_amax)),
        "amax of the input",
    ),
    "smaller blocks": (
        BLOCKWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.smaller_blocks),
        "scales of the input in forward",
    ),
    "blocks along the other dimension": (
        BLOCKWISE,
        FC1,
        partial(change_cast, role=Role.output_gradient, change=sabotages.other_dimension),
        "scales of the output gradient in wgrad",
    ),
    "scales that are no powers of two": (
        BLOCKWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.any_scales),
        "scale of the input",
    ),
    "scales of powers of two that are too small": (
        BLOCKWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.half_the_blocks_scales),
        "scale of the input",
    ),
    "a tensor's scale in place of rows'": (
        ROWWISE,
        FC1,
        partial(sabotages.own_recipe, overrides=emulate("torchao_tensorwise")),
        "scales of the input in forward",
    ),
    "columns in place of rows": (
        ROWWISE,
        FC1,
        partial(change_cast, role=Role.output_gradient, change=sabotages.other_dimension),
        "scales of the output gradient in wgrad",
    ),
    "scales of rows that are no powers of two": (
        ROWWISE,
        FC1,
        partial(change_cast, role=Role.input, change=sabotages.scales_of_rows(1.0, powers_of_two=False)),
        "scale of the input",
    ),
    "scales of rows that are too small": (
        ROWWISE_GW_HP,
        PROJ,
        partial(change_cast, role=Role.input, change=sabotages.scales_of_rows(0.5, powers_of_two=True)),
        "scale of the input",
    ),
    "a weight of rows in dgrad": (
        ROWWISE_GW_HP,
        FC2,
        partial(sabotages.own_recipe, overrides=ROWWISE),
        "scales of the weight in dgrad",
    ),
    "a weight of one scale in dgrad": (
        ROWWISE,
        FC2,
        partial(sabotages.own_recipe, overrides=ROWWISE_GW_HP),
        "scales of the weight in dgrad",
    ),
    "no rounding of rows": (ROWWISE, FC1, sabotages.round_nothing, "result of forward"),
    "wgrad of the rounded input": (ROWWISE_GW_HP, FC1, sabotages.round_input_of_wgrad, "input in wgrad"),
    "wgrad in FP8": (ROWWISE_GW_HP, PROJ, sabotages.quantize_wgrad, "wgrad"),
    "no rounding": (TENSORWISE, FC1, sabotages.round_nothing, "result of forward"),
    "no rounding of the weight": (
        DELAYED,
        FC2,
        partial(sabotages.round_nothing, roles=(Role.weight,)),
        "result of forward",
    ),
    "wgrad in high precision": (TENSORWISE, PROJ, sabotages.round_nothing_for_wgrad, "result of wgrad"),
    "another product": (DELAYED, FC1, sabotages.shift_products, "result of forward"),
    **{
        f"a {phase.value} product of zeros": (
            TENSORWISE,
            FC1,
            partial(sabotages.drop_products, phase=phase),
            f"result of {phase.value}",
        )
        for phase in Phase
    },
    "another output": (BLOCKWISE, FC2, sabotages.add_to_output, "output"),
    "a microbatch without FP8": (DELAYED, FC1, sabotages.skip_microbatch, "forward products"),
    "a layer without FP8": (TENSORWISE, FC1, sabotages.leave_fp8, "forward"),
    "a layer on another recipe": (
        DELAYED,
        FC1,
        partial(sabotages.own_recipe, overrides=TENSORWISE),
        "input: newest amax of the history",
    ),
    "a layer of another block size": (
        BLOCKWISE,
        FC1,
        partial(sabotages.own_recipe, overrides=emulate("mxfp8")),
        "scales of the input in forward",
    ),
    "no amaxes": (DELAYED, FC1, sabotages.record_nothing, "input: newest amax of the history"),
    "twice the amaxes": (DELAYED, FC1, sabotages.record_twice, "input: newest amax of the history"),
}


@pytest.mark.parametrize("name", OF_A_LAYER)
def test_one_layer_that_is_wrong_is_named(name):
    overrides, kind, sabotage, what = OF_A_LAYER[name]
    with emulated_training(*overrides) as training:
        sabotage(layer_of(training, kind))
        with pytest.raises(ProofError) as error:
            prove(training, step=1)
    differences = error.value.differences
    assert {each.module for each in differences} == {f"{LAYER}.{kind}"}
    (row,) = [each for each in differences if each.what == what]
    assert row.planned != row.live
    assert all(text in str(error.value) for text in (f"{LAYER}.{kind}", what, row.planned, row.live))


# A rounding to BF16, which has eight bits, moves a number by up to 2^-8 of it.
@pytest.mark.parametrize(("roundings", "is_found"), [(0.9, False), (1.2, True)])
def test_results_may_be_rounded_to_bf16_once_and_no_more(roundings, is_found):
    with emulated_training(*TENSORWISE) as training:
        sabotages.blur_products(layer_of(training, FC1), roundings * 2.0**-8)
        with pytest.raises(ProofError) if is_found else nullcontext():
            prove(training, step=1)


def of_state(change, kind=FC1):
    """Changes one layer's part of the state after each update."""

    def sabotage(training):
        layer = layer_of(training, kind)
        scaling = state_of(layer)
        after_updates(scaling._forward, lambda _: change(layer.fp8_meta["scaling_fwd"]))

    return sabotage


# A sabotage of the state of delayed scaling, from the second step on; what shows, of which value.
OF_THE_STATE = {
    "scales frozen at 1": (lambda scaling: scaling.scale.fill_(1.0), "input: next scale"),
    "the scale of another tensor": (lambda scaling: scaling.scale[0].copy_(scaling.scale[1]), "input: next scale"),
    "a stale amax": (
        lambda scaling: scaling.amax_history[-1].copy_(scaling.amax_history[-2]),
        "input: newest amax of the history",
    ),
    "a history that forgets": (lambda scaling: scaling.amax_history[:-1].zero_(), "input: amax history after 2 passes"),
    "a history that does not roll": (
        lambda scaling: scaling.amax_history.copy_(scaling.amax_history.roll(1, 0)),
        "input: newest amax of the history",
    ),
}


@pytest.mark.parametrize("name", OF_THE_STATE)
def test_state_that_is_wrong_is_found(name):
    change, what = OF_THE_STATE[name]
    with emulated_training(*DELAYED) as training:
        training.step()
        prove(training, step=2)
        of_state(change)(training)
        with pytest.raises(ProofError) as error:
            prove(training, step=3)
    assert {each.module for each in error.value.differences} == {f"{LAYER}.{FC1}"}
    (row,) = [each for each in error.value.differences if each.what == what]
    assert row.planned != row.live


def test_a_scale_that_is_frozen_after_its_first_update_is_found_once_its_amax_has_grown():
    kept = []

    def freeze(scaling):
        kept.append(scaling.scale[0].clone())
        scaling.scale[0] = kept[0]

    with emulated_training(*DELAYED) as training:
        of_state(freeze, FC2)(training)
        with pytest.raises(ProofError) as error:
            prove_steps(training, range(1, 8))
    assert len(kept) > 1, "it was right until its amax grew"
    assert {each.module for each in error.value.differences} == {f"{LAYER}.{FC2}"}
    assert "input: next scale" in {each.what for each in error.value.differences}


def test_a_scale_that_is_changed_between_steps_is_found():
    with emulated_training(*DELAYED) as training:
        training.step()
        layer_of(training, FC1).fp8_meta["scaling_fwd"].scale[1] = 1.0
        with pytest.raises(ProofError) as error:
            prove(training, step=2)
    (row,) = error.value.differences
    assert (row.module, row.what, row.live) == (f"{LAYER}.{FC1}", "weight: first scale", "1")
    assert float(row.planned) > 100


@pytest.mark.parametrize("overrides", [DELAYED, TENSORWISE])
def test_weight_codes_that_lag_behind_are_found(overrides):
    with emulated_training(*overrides) as training:
        training.step()
        sabotages.keep_codes(layer_of(training, FC1))
        with pytest.raises(ProofError) as error:
            prove(training, step=2)
    rows = {each.what: each for each in error.value.differences}
    assert {each.module for each in rows.values()} == {f"{LAYER}.{FC1}"}
    assert "times round(value · scale) in e4m3" in rows["codes of the weight in forward"].planned


def test_fp8_that_is_off_from_the_second_step_on_is_found_by_the_next_proof():
    with emulated_training(*TENSORWISE) as training:
        prove(training, step=1)
        for layer in training.layers().values():
            sabotages.leave_fp8(layer)
        training.step()
        with pytest.raises(ProofError) as error:
            prove(training, step=3)
    assert {(each.what, each.live) for each in error.value.differences} == {
        (what, "no such product") for what in ("forward", "dgrad", "wgrad")
    }
    assert len(error.value.differences) == 3 * 8


@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("layer", [OTHER, LAYER])
def test_a_weight_that_is_not_rounded_is_found_by_every_proof(layer, number):
    with emulated_training(*TENSORWISE) as training:
        sabotages.round_nothing(layer_of(training, FC1, layer), (Role.weight,))
        with pytest.raises(ProofError) as error:
            prove(training, step=number)
    assert {each.module for each in error.value.differences} == {f"{layer}.{FC1}"}
    assert "rounding of the weight in forward" in {each.what for each in error.value.differences}


def test_the_input_of_another_microbatch_in_a_weight_gradient_is_found():
    with emulated_training(*TENSORWISE) as training:
        kept = []

        def earlier(x, directions):
            kept.append(directions.along_columns)
            return Directions(directions.along_rows, kept[max(0, len(kept) - 2)])

        change_cast(layer_of(training, FC1), Role.input, earlier)
        with pytest.raises(ProofError) as error:
            prove(training, step=1)
    assert {each.module for each in error.value.differences} == {f"{LAYER}.{FC1}"}
    assert "input in wgrad" in {each.what for each in error.value.differences}


def test_a_history_that_is_empty_beside_filled_ones_is_told():
    with emulated_training(*DELAYED) as training:
        for _ in range(3):
            training.step()
        layer = layer_of(training, FC1)
        layer.fp8_meta["scaling_fwd"].amax_history[:, 0].zero_()
        layer.fp8_meta["scaling_fwd"].scale[0] = 1.0
        (warning,) = prove(training, step=1).warnings
    assert all(each in warning for each in (f"{LAYER}.{FC1}", "input: amax history", "empty"))


def test_values_that_had_been_rounded_before_are_told():
    """A tensor that FP8 holds exactly looks the same, so the run goes on."""
    with emulated_training(*TENSORWISE) as training:
        sabotages.round_beforehand(layer_of(training, FC1))
        (warning,) = prove(training, step=1).warnings
    assert all(each in warning for each in (f"{LAYER}.{FC1}", "input in forward", "50%", "0.0%"))


# LAYOUT:RECIPE:SABOTAGE, and what it shows, in all layers or one. Cases that share process groups share a launch.
FIRST_FC1 = "decoder.layers.0.mlp.linear_fc1"
OF_RANKS = {
    "dp:delayed:nothing": None,
    "dp:tensorwise:nothing": None,
    "dp:torchao_rowwise:nothing": None,
    "dp:torchao_rowwise:rounding_of_rank_1": (FIRST_FC1, "result of forward"),
    "dp:delayed:amaxes_of_each_rank": (None, "input: newest amax of the history"),
    "dp:delayed:history_of_rank_1": (FIRST_FC1, "input: amax history on all ranks"),
    "dp:delayed:recipe_of_rank_1": (FIRST_FC1, "input: newest amax of the history"),
    "dp:tensorwise:rounding_of_rank_1": (FIRST_FC1, "result of forward"),
    "tp2_sp:delayed:nothing": None,
    "tp2_sp:tensorwise:nothing": None,
    "tp2_sp:blockwise:nothing": None,
    "tp2_sp:torchao_tensorwise:nothing": None,
    "tp2_sp:torchao_rowwise:nothing": None,
    "tp2_sp:torchao_rowwise_with_gw_hp:nothing": None,
    "tp2_sp:blockwise:rounding_of_rank_1": (FIRST_FC1, "result of forward"),
    "tp2_sp:delayed:scale_of_rank_1": (FIRST_FC1, "input: next scale"),
    "pp2_vp2:delayed:nothing": None,
    "pp2_vp2:mxfp8:nothing": None,
    "pp2_vp2:torchao_rowwise:nothing": None,
    "pp2:delayed:nothing": None,
    "pp2:delayed:recomputed": None,
}


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory):
    """What each of two ranks told of each case: [module, what, planned, live] of every difference."""
    folder = tmp_path_factory.mktemp("ranks")
    for layout in ("dp", "tp2_sp", "pp2_vp2", "pp2"):
        cases = [case for case in OF_RANKS if case.partition(":")[0] == layout]
        done = fork_ranks(2, ["tests/programs/sabotaged_ranks.py", str(folder), *cases])
        assert done.returncode == 0, done.stderr[-4000:]
    return {case: [json.loads((folder / f"{case}.{rank}").read_text()) for rank in (0, 1)] for case in OF_RANKS}


@pytest.mark.parametrize("case", OF_RANKS)
def test_ranks_prove_and_find_together(case, of_ranks):
    first, second = of_ranks[case]
    assert first == second, "both tell all differences"
    if OF_RANKS[case] is None:
        assert first == []
        return
    module, what = OF_RANKS[case]
    assert what in {each[1] for each in first}
    assert len({each[0] for each in first}) == (8 if module is None else 1)
    assert module in {None, first[0][0]}
