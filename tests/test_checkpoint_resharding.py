"""Whatever layout saved a checkpoint, any other goes on from it: the same samples, losses and optimizer state.

Compared with the saving run, which went on itself: a state that was lost on the way would show in its next losses.
"""

import json
import os
from itertools import product

import pytest
import torch
from filelock import FileLock
from megatron.core.dist_checkpointing.dict_utils import nested_values

from gpt_pretrain.checkpoint.load import load_weights
from gpt_pretrain.checkpoint.start import verify_checkpoint
from gpt_pretrain.checkpoint.state import Progress
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.spec.platform import detect_platform
from tests.emulated_training import build_training_of
from tests.forked_runs import fork_ranks
from tests.resharded_training import LAYOUTS, OTHERS, STEPS, config_of, run_cases, saved_state, write_configs

# All launches are in the first test's fixture.
pytestmark = pytest.mark.timeout(900)

PAIRS = list(product(LAYOUTS, LAYOUTS))
# Source, target, and whether what was loaded is also saved again and compared tensor by tensor.
OTHER_PAIRS = [
    ("single.deep", "pp2_vp2.deep", True),
    ("pp2_vp2.deep", "tp2.deep", True),
    ("pp2_vp2.deep", "single.deep", False),
    ("single.tied", "pp2.tied", True),
    ("pp2.tied", "single.tied", False),
    ("single.bf16", "dp2.bf16", True),
    ("dp2.bf16", "single.bf16", True),
    ("dp2.bf16", "dp2_plain.bf16", True),
    ("dp2_plain.bf16", "dp2.bf16", False),
    ("single.bf16", "dp2_remainders.bf16", False),
    ("dp2_remainders.bf16", "tp2_remainders.bf16", True),
    ("dp2_small.bf16", "dp2_small.bf16", True),
    ("pp2_small.bf16", "pp2_small.bf16", True),
    ("pp2_remainders.tied_bf16", "pp2_remainders.tied_bf16", True),
    ("ep2_small.moe_bf16", "ep2_small.moe_bf16", True),
    ("single.sgd", "tp2_plain.sgd", True),
    ("tp2_plain.sgd", "single.sgd", False),
    ("single.moe", "ep2.moe", True),
    ("ep2.moe", "tp2_sp_ep2.moe", True),
    ("tp2_sp_ep2.moe", "single.moe", True),
    ("ep2.moe", "ep2.moe", False),
    ("single.moe_bf16", "ep2_plain.moe_bf16", True),
    ("ep2_plain.moe_bf16", "single.moe_bf16", False),
    ("single.delayed", "tp2.delayed", True),
    ("tp2.delayed", "single.delayed", True),
]
# Masters that are rounded as they are loaded.
ROUNDED_PAIRS = [("dp2.bf16", "dp2_small_late.bf16")]
ALL_LAYOUTS = {**LAYOUTS, **OTHERS}


def cases(num_ranks):
    """What is saved and what is loaded by so many ranks."""
    saved = [layout for layout, (ranks, _) in ALL_LAYOUTS.items() if ranks == num_ranks]
    pairs = [(*pair, pair == ("tp2_pp2", "dp2")) for pair in PAIRS]
    loaded = [
        f"{source}>{target}{'+' if again else ''}"
        for source, target, again in [*pairs, *OTHER_PAIRS, *((*pair, False) for pair in ROUNDED_PAIRS)]
        if target in saved
    ]
    return saved, loaded


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Folder of the checkpoints and of what all ranks of all cases saw."""
    # pytest's own processes share the launches: whoever comes first runs them.
    shared = (
        tmp_path_factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else tmp_path_factory.getbasetemp()
    )
    folder = shared / "resharding"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = tmp_path_factory.mktemp("unfinished")
            write_configs(unfinished)
            saved, loaded = zip(cases(1), cases(2), cases(4), strict=True)
            run_cases(unfinished, saved[0])
            launch(2, unfinished, saved[1])
            launch(4, unfinished, [*saved[2], *loaded[2]])
            launch(2, unfinished, loaded[1])
            run_cases(unfinished, loaded[0])
            unfinished.rename(folder)
    return folder


def launch(num_ranks, folder, these):
    done = fork_ranks(num_ranks, ["tests/programs/resharding.py", str(folder), *these], timeout_s=500)
    assert done.returncode == 0, done.stderr[-6000:]


def seen(results, case, layout):
    """What each rank saw."""
    return [json.loads((results / f"{case}.{rank}.json").read_text()) for rank in range(ALL_LAYOUTS[layout][0])]


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
    # Microbatches of one sample go to the ranks in turn.
    order = [sample for turn in zip(*(parts[index] for index in range(num_parts)), strict=True) for sample in turn]
    per_step = len(order) // STEPS
    return [order[step * per_step : (step + 1) * per_step] for step in range(STEPS)]


@pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{source}→{target}" for source, target in PAIRS])
def test_any_layout_goes_on_where_any_other_saved(source, target, results):
    uncut, resumed = seen(results, f"{source}.uncut", source), seen(results, f"{source}.{target}", target)
    assert (
        samples_by_step(resumed) == samples_by_step(uncut) == [[*range(4 * step, 4 * step + 4)] for step in (3, 4, 5)]
    )
    for rank in resumed:
        assert rank["losses"][0] == pytest.approx(uncut[0]["losses"][0], abs=1e-5)
        assert rank["grad_norms"][0] == pytest.approx(uncut[0]["grad_norms"][0], abs=1e-4)
        # Moments and step counts show in the updates.
        assert rank["losses"] == pytest.approx(uncut[0]["losses"], abs=1e-5)
        assert rank["grad_norms"] == pytest.approx(uncut[0]["grad_norms"], abs=1e-4)
    if source == target:
        assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in uncut]
        assert [rank["grad_norms"] for rank in resumed] == [rank["grad_norms"] for rank in uncut]


@pytest.mark.parametrize(("source", "target", "_"), OTHER_PAIRS, ids=[f"{pair[0]}→{pair[1]}" for pair in OTHER_PAIRS])
def test_other_precisions_chunks_and_optimizers_reshard_too(source, target, _, results):
    uncut, resumed = seen(results, f"{source}.uncut", source), seen(results, f"{source}.{target}", target)
    assert samples_by_step(resumed) == samples_by_step(uncut)
    # Values near the border of two BF16 or FP8 codes fall to either side, with the order of sums, and tokens near that
    # of two experts do.
    later = {"bf16": 1e-3, "moe_bf16": 5e-2, "delayed": 5e-3}.get(source.partition(".")[2], 1e-5)
    for rank in resumed:
        assert rank["losses"][0] == pytest.approx(uncut[0]["losses"][0], abs=1e-5)
        assert rank["losses"] == pytest.approx(uncut[0]["losses"], abs=later)
        assert rank["grad_norms"] == pytest.approx(uncut[0]["grad_norms"], abs=max(1e-4, later))
    if source == target:
        assert [rank["losses"] for rank in resumed] == [rank["losses"] for rank in uncut]


SAVED_AGAIN = [("tp2_pp2", "dp2"), *((source, target) for source, target, again in OTHER_PAIRS if again)]


@pytest.mark.parametrize(
    ("source", "target"), SAVED_AGAIN, ids=[f"{source}→{target}" for source, target in SAVED_AGAIN]
)
def test_every_tensor_comes_through_another_layout_unchanged(source, target, results):
    step = f"step_{STEPS:08d}"
    before, after = saved_state(results / source / step), saved_state(results / f"{source}.{target}.again" / step)
    moments = ["momentum_buffer"] if "sgd" in source else ["exp_avg", "exp_avg_sq"]
    masters = ["fp32_param"] if "bf16" in source else []
    scales = {key for key in before if "_extra_state" in key}
    weights = {key for key in before if not key.startswith("optimizer.")} - scales
    states = {f"optimizer.state.{kind}.{key}" for kind in moments + masters for key in weights}
    assert before.keys() == weights | scales | states
    assert all(before[key].count_nonzero() for key in states)
    # Layers without scales keep an object as well, which says so.
    assert ["scale_fwd" in before[key] for key in scales if before[key] is not None] == [True] * (
        len(scales) if "delayed" in source else 0
    )
    torch.testing.assert_close(after, before, rtol=0, atol=0)


@pytest.mark.parametrize(("source", "target"), [("tp2_pp2", "single"), ("dp2.bf16", "single.bf16")])
def test_weights_alone_come_from_any_layout(source, target, results):
    path = results / source / f"step_{STEPS:08d}"
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
    assert restored.progress == Progress(step=0, consumed_samples=0)
    saved = saved_state(path)
    assert weights["decoder.final_layernorm.weight"].equal(saved["decoder.final_layernorm.weight"])
    last = {key: value for key, value in weights.items() if key.startswith("decoder.layers.") and "fc1" not in key}
    assert len(last) == 4, "norm, QKV, projection and second linear layer"
    for key, value in last.items():
        assert value.equal(saved[key][-1]), key


@pytest.mark.parametrize(("source", "target"), ROUNDED_PAIRS)
def test_ranks_share_the_weights_of_masters_that_were_rounded_as_they_were_loaded(source, target, results):
    uncut, resumed = seen(results, f"{source}.uncut", source), seen(results, f"{source}.{target}", target)
    first, second = (rank["weights"] for rank in resumed)
    assert first == second
    assert first != seen(results, "single.bf16.dp2.bf16", "dp2.bf16")[0]["weights"]
    assert resumed[0]["losses"] == pytest.approx(uncut[0]["losses"], rel=1e-2)


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
    assert losses == pytest.approx(expected, rel=2e-2)


def test_another_layout_is_said_and_a_distributed_optimizer_alone_is_none(results):
    (to_two, _), (to_plain, _) = (
        [rank["notes"] for rank in seen(results, case, "dp2")] for case in ("single.dp2", "dp2.bf16.dp2_plain.bf16")
    )
    assert to_two == [
        "resharded: processes=2 (saved with 1); random states are seeded anew from model.seed and the step"
    ]
    assert to_plain == []
