"""Whatever layout saved a checkpoint, any other loads every bit of it, and goes on with the same samples and losses.

What was loaded is saved again and compared with what was saved: weights, masters, moments, scales and step counts. Runs
that hold the same bits take the same steps, so that one pair for each loading layout also trains on: there the order
of sums differs from the saving run's, and losses differ by what the number format rounds.
"""

import json
from functools import lru_cache
from itertools import product

import pytest
import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values

from gpt_pretrain.checkpoint.load import load_weights, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from tests.emulated_training import build_training_of, group_sizes
from tests.forked_runs import fork_ranks
from tests.resharded_training import (
    GOES_ON,
    LAYOUTS,
    OTHERS,
    SPOILT,
    STEPS,
    config_of,
    differing,
    run_cases,
    saved_state,
    write_configs,
)
from tests.rounding import gradient_tolerance, loss_tolerance

STEP = f"step_{STEPS:08d}"

# All launches are in the first test's fixture.
pytestmark = pytest.mark.timeout(900)

ALL_LAYOUTS = {**LAYOUTS, **OTHERS}
# A file is cut by the layout that saves, and read by ranges that the one that loads asks for: each layout meets itself,
# one rank both ways, and another layout of several ranks both ways. All other pairs of the six are slow.
USUAL = [
    *((layout, layout) for layout in LAYOUTS),
    *(("single", layout) for layout in LAYOUTS if layout != "single"),
    *((layout, "single") for layout in LAYOUTS if layout != "single"),
    ("dp2", "tp2"),
    ("tp2", "pp2"),
    ("pp2", "tp2_sp"),
    ("tp2_sp", "tp2_pp2"),
    ("tp2_pp2", "dp2"),
]
SLOW = [pair for pair in product(LAYOUTS, LAYOUTS) if pair not in USUAL]
# Which layout saves and which loads: the usual six, and other precisions, chunks and optimizers.
PAIRS = [
    *USUAL,
    ("single.deep", "pp2_vp2.deep"),
    ("pp2_vp2.deep", "tp2.deep"),
    ("pp2_vp2.deep", "single.deep"),
    ("single.tied", "pp2.tied"),
    ("pp2.tied", "single.tied"),
    ("single.bf16", "dp2.bf16"),
    ("dp2.bf16", "single.bf16"),
    ("dp2.bf16", "dp2_plain.bf16"),
    ("dp2_plain.bf16", "dp2.bf16"),
    ("single.bf16", "dp2_remainders.bf16"),
    ("dp2_remainders.bf16", "tp2_remainders.bf16"),
    ("dp2_small.bf16", "dp2_small.bf16"),
    ("pp2_small.bf16", "pp2_small.bf16"),
    ("pp2_remainders.tied_bf16", "pp2_remainders.tied_bf16"),
    ("ep2_small.moe_bf16", "ep2_small.moe_bf16"),
    ("zero2", "zero2"),
    ("dp2", "zero2"),
    ("zero2", "dp2"),
    ("zero2", "zero2_pp2"),
    ("zero2_pp2", "tp2"),
    ("zero2_small.bf16", "zero2_small.bf16"),
    ("dp2.stored_bf16", "zero2.stored_bf16"),
    ("zero2.stored_bf16", "dp2.stored_bf16"),
    ("zero2.stored_bf16", "zero2.stored_bf16"),
    ("ep2.moe", "zero2_ep2.moe"),
    ("zero2_ep2.moe", "single.moe"),
    ("fsdp", "fsdp"),
    ("dp2", "fsdp"),
    ("fsdp", "zero2"),
    ("fsdp", "fsdp_pp2"),
    ("fsdp_pp2", "tp2"),
    ("fsdp_small.bf16", "fsdp_small.bf16"),
    ("dp2.stored_bf16", "fsdp.stored_bf16"),
    ("fsdp.stored_bf16", "zero2.stored_bf16"),
    ("fsdp.stored_bf16", "fsdp.stored_bf16"),
    ("hsdp", "hsdp"),
    ("hsdp", "dp2"),
    ("fsdp", "hsdp"),
    ("hsdp.stored_bf16", "fsdp.stored_bf16"),
    ("ep2.moe", "fsdp_ep2.moe"),
    ("fsdp_ep2.moe", "single.moe"),
    ("single.sgd", "tp2_plain.sgd"),
    ("tp2_plain.sgd", "single.sgd"),
    ("single_lion", "tp2_lion"),
    ("tp2_lion", "dp2_lion"),
    ("dp2_lion", "single_lion"),
    ("single_ema.bf16", "fsdp_ema.bf16"),
    ("fsdp_ema.bf16", "tp2_ema.bf16"),
    ("tp2_ema.bf16", "zero2_ema.bf16"),
    ("zero2_ema.bf16", "single_ema.bf16"),
    ("single_muon", "tp2_muon"),
    ("tp2_muon", "tp2_muon"),
    ("tp2_muon", "single_muon"),
    ("dp2_muon", "dp2_muon"),
    ("dp2_muon", "zero2_muon"),
    ("zero2_muon", "zero2_muon"),
    ("zero2_muon", "tp2_sp_distributed_muon"),
    ("tp2_sp_distributed_muon", "tp2_sp_distributed_muon"),
    ("tp2_plain_muon", "dp2_muon"),
    ("single_muon", "tp2_plain_muon"),
    ("tp2_plain_muon", "tp2_plain_muon"),
    ("dp2_plain_muon", "tp2_pp2_muon"),
    ("tp2_pp2_muon", "dp2_plain_muon"),
    ("tp2_muon", "tp2_dp2_muon"),
    ("tp2_dp2_muon", "dp4_muon"),
    ("single_muon.bf16", "dp2_muon.bf16"),
    ("dp2_muon.bf16", "tp2_muon.bf16"),
    ("dp2_muon.stored_bf16", "dp2_muon.stored_bf16"),
    ("single_muon.moe", "ep2_muon.moe"),
    ("ep2_muon.moe", "ep2_muon.moe"),
    ("ep2_muon.moe", "tp2_sp_ep2_muon.moe"),
    ("tp2_sp_ep2_muon.moe", "tp2_muon.moe"),
    ("single.moe", "ep2.moe"),
    ("ep2.moe", "tp2_sp_ep2.moe"),
    ("tp2_sp_ep2.moe", "single.moe"),
    ("ep2.moe", "ep2.moe"),
    ("single.moe_bf16", "ep2_plain.moe_bf16"),
    ("ep2_plain.moe_bf16", "single.moe_bf16"),
    ("single.delayed", "single.delayed"),
    ("single.delayed", "tp2.delayed"),
    ("tp2.delayed", "single.delayed"),
    ("tp2.delayed", "tp2.delayed"),
    ("single.rowwise", "tp2_sp.rowwise"),
    ("tp2_sp.rowwise", "single.rowwise"),
    ("tp2_sp.rowwise", "tp2_sp.rowwise"),
    ("single.stored_bf16", "dp2.stored_bf16"),
    ("dp2.stored_bf16", "single.stored_bf16"),
    ("dp2.stored_bf16", "dp2.stored_bf16"),
    # In another layout of tensor parallel ranks codes have other scales.
    ("tp2.stored_bf16", "tp2.stored_bf16"),
]
FP8 = (".delayed", ".rowwise", ".stored_bf16")
# Masters that are rounded as they are loaded.
ROUNDED = ("dp2.bf16", "dp2_small_late.bf16")
# One bit of a moment is turned over after it was loaded.
CONTROL = ("single", "dp2")


def trains_on(source, target):
    """Whether the pair also trains on: each layout from its own checkpoint, and from the first other one.

    FP8 does so from its own alone: in another layout values near the border of two codes fall to either side.
    """
    return source == target or (
        not target.endswith(FP8) and source == next(one for one, other in PAIRS if other == target != one)
    )


def pair_parameters(pairs):
    pairs = list(pairs)
    marks = [[pytest.mark.slow] if pair in SLOW else [] for pair in pairs]
    return pytest.mark.parametrize(
        ("source", "target"),
        [pytest.param(*pair, id="→".join(pair), marks=mark) for pair, mark in zip(pairs, marks, strict=True)],
    )


def cases(num_ranks, pairs, folder):
    """What is saved and what is loaded by so many ranks, in the order of the process groups that they need."""
    saved = [layout for layout, (ranks, _) in ALL_LAYOUTS.items() if ranks == num_ranks]
    saved.sort(key=lambda layout: group_sizes(config_of(layout, folder).model))
    hows = [(pair, GOES_ON if trains_on(*pair) else "") for pair in pairs] + [(ROUNDED, GOES_ON), (CONTROL, SPOILT)]
    compared = {source for (source, _), how in hows if how == GOES_ON}
    loaded = sorted((how for how in hows if how[0][1] in saved), key=lambda how: saved.index(how[0][1]))
    return (
        [f"{layout}{GOES_ON if layout in compared else ''}" for layout in saved],
        [f"{source}>{target}{how}" for (source, target), how in loaded],
    )


@pytest.fixture(scope="module")
def results(made_once, request):
    """Folder of the checkpoints and of what all ranks of all cases saw."""
    with_slow = any(item.get_closest_marker("slow") for item in request.session.items if item.path == request.path)
    pairs = [*PAIRS, *(SLOW if with_slow else [])]

    def fill(folder):
        write_configs(folder)
        saved, loaded = zip(*(cases(num_ranks, pairs, folder) for num_ranks in (1, 2, 4)), strict=True)
        run_cases(folder, saved[0])
        launch(2, folder, saved[1])
        launch(4, folder, [*saved[2], *loaded[2]])
        launch(2, folder, loaded[1])
        run_cases(folder, loaded[0])

    return made_once("resharding", fill)


def launch(num_ranks, folder, these):
    done = fork_ranks(num_ranks, ["tests/programs/resharding.py", str(folder), *these], timeout_s=500)
    assert done.returncode == 0, done.stderr[-6000:]


def seen(results, case, layout):
    """What each rank saw."""
    return [json.loads((results / f"{case}.{rank}.json").read_text()) for rank in range(ALL_LAYOUTS[layout][0])]


# Each source is compared with several targets in turn.
@lru_cache(maxsize=1)
def saved_by(source, results):
    return saved_state(results / source / STEP)


def samples_by_step(ranks):
    """Samples of each step in the order of the data set, put together from the data parallel ranks that read them."""
    parts = {}
    for rank in ranks:
        if rank["samples"]:
            index, _ = rank["data_parallel"]
            assert parts.setdefault(index, rank["samples"]) == rank["samples"], (
                "ranks of one replica read other samples"
            )
    (num_parts,) = {rank["data_parallel"][1] for rank in ranks}
    assert sorted(parts) == list(range(num_parts))
    # Microbatches go to the ranks in turn, of one sample each where there are several ranks.
    order = [sample for turn in zip(*(parts[index] for index in range(num_parts)), strict=True) for sample in turn]
    per_step = len(order) // STEPS
    return [order[step * per_step : (step + 1) * per_step] for step in range(STEPS)]


@pair_parameters([*PAIRS, *SLOW])
def test_every_bit_comes_through_any_layout(source, target, results):
    before, after = saved_by(source, results), saved_state(results / f"{source}.{target}.again" / STEP)
    masters = ["fp32_param"] if "bf16" in source else []
    scales = {key for key in before if "_extra_state" in key}
    weights = {key for key in before if not key.startswith("optimizer.")} - scales - {"common", "progress"}
    states = {f"optimizer.state.{kind}.{key}" for key in weights for kind in moments_of(key, source) + masters}
    assert before.keys() == weights | scales | states | {"common", "progress"}
    assert all(before[key].count_nonzero() for key in states)
    # Layers without scales keep an object as well, which says so.
    assert ["scale_fwd" in before[key] for key in scales if before[key] is not None] == [True] * (
        len(scales) if "delayed" in source else 0
    )
    assert before["common"]["scheduler"]["num_steps"] == STEPS
    # SGD and Lion count no steps.
    assert before["common"]["optimizer"]["step"] == (0 if "sgd" in source or "lion" in source else STEPS)
    assert before["progress"] == (STEPS, 4 * STEPS)
    changed = differing(before, after)
    if "remainders" in target:
        # A weight that is stored as half of its master is rounded away from zero where another is rounded to even.
        for key in changed & weights:
            master = before[f"optimizer.state.fp32_param.{key}"].double()
            assert (before[key].double() - master).abs().equal((after[key].double() - master).abs()), key
        changed -= weights
    assert not changed


def moments_of(weight, layout):
    """Of a weight, by its name in a checkpoint."""
    of_matrix = weight.startswith("decoder.layers.") and weight.endswith(".weight")
    by_muon = "muon" in layout and of_matrix and "norm" not in weight and "router" not in weight
    if "lion" in layout:
        return ["exp_avg"]
    moments = ["momentum_buffer"] if "sgd" in layout or by_muon else ["exp_avg", "exp_avg_sq"]
    return [*moments, *(["ema"] if "_ema" in layout else [])]


def test_muon_computes_the_same_in_any_layout(results):
    """Weights and moments of matrices that ranks shard, cut, and share as experts, after two steps."""
    compared = 0
    for layout in (layout for layout in ALL_LAYOUTS if layout.endswith(("muon", "muon.moe"))):
        of_experts = layout.endswith(".moe")
        whole, found = saved_by(f"single_muon{'.moe' * of_experts}", results), saved_state(results / layout / STEP)
        tolerance = STEPS * gradient_tolerance(config_of(layout, results).model, torch.float32, STEPS)
        for key, value in whole.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                assert (found[key] - value).norm() < tolerance * value.norm(), (layout, key)
                compared += key.startswith("optimizer.state.momentum_buffer.")
    assert compared == 10 * 4 + 4 * 4


def test_muon_computes_the_same_bits_however_states_are_sharded(results):
    sharded, plain = (saved_state(results / layout / STEP) for layout in ("dp2_muon", "dp2_plain_muon"))
    assert not differing(sharded, plain)


def test_blocks_of_a_matrix_are_another_update(results):
    """Of tensor parallel ranks, each by itself: what the modes without it must not compute."""
    whole, blocks = (saved_state(results / layout / STEP) for layout in ("tp2_muon", "tp2_blockwise_muon_in_blocks"))
    key = "decoder.layers.mlp.linear_fc1.weight"
    assert (whole[key] - blocks[key]).norm() > 1e-3 * whole[key].norm()


def test_one_bit_of_a_moment_would_show(results):
    source, target = CONTROL
    found = differing(saved_by(source, results), saved_state(results / f"{source}.{target}{SPOILT}.again" / STEP))
    # One on each rank, of the same tensor or of two.
    assert len(found) in (1, 2)
    assert all(key.startswith("optimizer.state.exp_avg.") for key in found)


@pair_parameters(pair for pair in PAIRS if trains_on(*pair))
def test_run_goes_on_where_any_layout_saved(source, target, results):
    uncut, resumed = seen(results, f"{source}.uncut", source), seen(results, f"{source}.{target}", target)
    read = [[*range(4 * step, 4 * step + 4)] for step in range(STEPS, 2 * STEPS)]
    assert samples_by_step(resumed) == samples_by_step(uncut) == read
    if source == target:
        for name in ("losses", "grad_norms"):
            assert [rank[name] for rank in resumed] == [rank[name] for rank in uncut]
        return
    model, dtype = config_of(target, results).model, torch.bfloat16 if "bf16" in target else torch.float32
    for rank in resumed:
        # All start with the same bits: the first step after it is like the first of a run.
        for step in range(STEPS):
            loss, norm = uncut[0]["losses"][step], uncut[0]["grad_norms"][step]
            assert rank["losses"][step] == pytest.approx(loss, rel=loss_tolerance(model, dtype, step + 1))
            assert rank["grad_norms"][step] == pytest.approx(norm, rel=gradient_tolerance(model, dtype, step + 1))


@pytest.mark.parametrize(("source", "target"), [("tp2_pp2", "single"), ("dp2.bf16", "single.bf16")])
def test_weights_alone_come_from_any_layout(source, target, results):
    install_cpu_device()
    path = results / source / STEP
    config = config_of(target, results)
    with process_groups(config.model, read_launch({}), detect_platform()):
        training = build_training_of(config)
        checkpoint = verify_checkpoint(path)
        restored = load_weights(checkpoint, training.trainable, config, checkpoint.manifest.data)
        chunk = training.chunks[0]
        # By the checkpoint's names, layers in front.
        weights = {
            entry.key: entry.data for entry in nested_values(chunk.sharded_state_dict()) if "extra" not in entry.key
        }
    assert restored.progress == TrainingProgress(step=0, consumed_samples=0)
    saved = saved_by(source, results)
    assert weights["decoder.final_layernorm.weight"].equal(saved["decoder.final_layernorm.weight"])
    last = {key: value for key, value in weights.items() if key.startswith("decoder.layers.") and "fc1" not in key}
    assert len(last) == 4, "norm, QKV, projection and second linear layer"
    for key, value in last.items():
        assert value.equal(saved[key][-1]), key


def test_ranks_share_the_weights_of_masters_that_were_rounded_as_they_were_loaded(results):
    source, target = ROUNDED
    uncut, resumed = seen(results, f"{source}.uncut", source), seen(results, f"{source}.{target}", target)
    first, second = (rank["weights"] for rank in resumed)
    assert first == second
    assert first != seen(results, "single.bf16.dp2.bf16", "dp2.bf16")[0]["weights"]
    assert_losses_agree_as_bf16_does(resumed[0]["losses"], uncut[0]["losses"], config_of(target, results).model)


@pytest.mark.parametrize(
    ("small", "usual"),
    [
        ("pp2_small.bf16", "single.bf16"),
        ("pp2_remainders.tied_bf16", "pp2.tied"),
        ("ep2_small.moe_bf16", "ep2_plain.moe_bf16"),
    ],
)
def test_small_states_train_in_stages_and_with_experts_as_fp32_states_do(small, usual, results):
    losses, expected = (seen(results, f"{layout}.uncut", layout)[0]["losses"] for layout in (small, usual))
    assert_losses_agree_as_bf16_does(losses, expected, config_of(small, results).model)


def assert_losses_agree_as_bf16_does(losses, expected, model):
    """Both of the steps after `STEPS`."""
    for step, (loss, other) in enumerate(zip(losses, expected, strict=True), start=STEPS + 1):
        assert loss == pytest.approx(other, rel=loss_tolerance(model, torch.bfloat16, step))


def test_another_layout_is_said_and_a_distributed_optimizer_alone_is_none(results):
    (to_two, _), (to_plain, _) = (
        [rank["notes"] for rank in seen(results, case, "dp2")] for case in ("single.dp2", "dp2.bf16.dp2_plain.bf16")
    )
    assert len(to_two) == 1
    assert "processes=2 (saved with 1)" in to_two[0]
    assert "model.seed" in to_two[0]
    assert to_plain == []
