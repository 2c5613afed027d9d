"""A mixture of experts is one model at every layout: losses, gradients, auxiliary losses and loads of one process.

Routing is a choice, so that nothing may differ by more than rounding: a token that goes to another expert shows.
"""

import json
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe import token_dispatcher
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron import model as megatron_model
from gpt_pretrain.plan.stages import plan_stages
from gpt_pretrain.training.watches import ExpertWatch
from tests.emulated_training import emulate, emulated_training
from tests.expert_training import EXPERTS, LAYOUTS, MODELS, SPOILT, STEPS, config_of, run_cases
from tests.forked_runs import fork_ranks
from tests.platforms import spec_of
from tests.rounding import fp8_anew_tolerance, fp8_loss_tolerance, gradient_tolerance, loss_tolerance
from tests.runs import run_small

CASES = [
    f"{'deep' if layout == 'pp2_vp2' else 'plain'}.{layout}"
    for layout in LAYOUTS
    if layout not in ("ep2_halves", "ep2_overlapped")
]
CASES += ["seq.tp2_sp", "masked.ep2", "bf16.ep2", "allgather.tp2_sp_ep2", "recomputed.ep2"]
FP8_CASES = ["fp8.ep2_halves", "fp8.tp2_sp_ep2"]
# With the case that they equal to the bit.
OVERLAPPED = {"bf16.ep2_overlapped": "bf16.ep2", "fp8_bf16.ep2_overlapped": "fp8_bf16.ep2"}
# Dispatchers and recomputation change no number.
SAME_AS_PLAIN = ("allgather", "recomputed")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    run_cases(folder, MODELS)
    return {model: json.loads((folder / f"{model}.0.json").read_text()) for model in MODELS}


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    # Those of one layout follow each other.
    cases = sorted({*CASES, *FP8_CASES, *OVERLAPPED, *OVERLAPPED.values()}, key=lambda case: case.partition(".")[2])
    done = fork_ranks(2, ["tests/programs/expert_layouts.py", str(folder), *cases])
    assert done.returncode == 0, done.stderr[-6000:]
    return {case: [json.loads((folder / f"{case}.{rank}.json").read_text()) for rank in range(2)] for case in cases}


def test_experts_learn(one_process):
    losses = one_process["plain"]["losses"]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("case", CASES)
def test_layout_trains_as_one_process(case, one_process, two_ranks):
    model = case.partition(".")[0]
    expected, sizes = one_process[model], config_of(case).model
    dtype = torch.bfloat16 if model == "bf16" else torch.float32
    # Of the step after the last one, whose gradients are written down and whose model is validated.
    loss, gradient = loss_tolerance(sizes, dtype, STEPS + 1), gradient_tolerance(sizes, dtype, STEPS + 1)
    for seen in two_ranks[case]:
        assert seen["num_parameters"] == expected["num_parameters"]
        for name in ("losses", "validation"):
            assert seen[name] == pytest.approx(expected[name], rel=loss), name
        for name in ("grad_norms", "experts"):
            assert seen[name] == pytest.approx(expected[name], rel=gradient), name


@pytest.mark.parametrize("case", FP8_CASES)
def test_layout_trains_in_fp8_as_one_process(case, one_process, two_ranks):
    """The first loss is that of the same codes; updates differ in rounding, and after them so may all codes."""
    expected, sizes = one_process["fp8"], config_of(case).model
    first = loss_tolerance(sizes, torch.float32) + fp8_loss_tolerance(sizes)
    for seen in two_ranks[case]:
        assert seen["losses"][0] == pytest.approx(expected["losses"][0], rel=first)
        assert seen["losses"] == pytest.approx(expected["losses"], rel=fp8_anew_tolerance(sizes, STEPS))
        assert seen["validation"] == pytest.approx(expected["validation"], rel=fp8_anew_tolerance(sizes, STEPS + 1))


@pytest.mark.parametrize("case", ["plain", *CASES, *FP8_CASES])
def test_bad_weight_of_one_expert_stops_all_ranks_and_is_named(case, one_process, two_ranks):
    for seen in two_ranks.get(case) or [one_process[case]]:
        assert seen["skipped"]
        assert f"the first bad tensor is the weight {SPOILT} (1 NaN, 0 infinite)" in seen["finding"]


@pytest.mark.parametrize("case", CASES[: len(LAYOUTS) - 1])
def test_plan_knows_what_each_rank_has(case, two_ranks):
    config = config_of(case)
    launch = replace(read_launch({}), world_size=2, local_world_size=2)
    stages = plan_stages(spec_of(config, launch=launch))
    for rank, seen in enumerate(two_ranks[case]):
        assert seen["own_parameters"] == stages[rank if len(stages) > 1 else 0].num_parameters


@pytest.mark.parametrize(("overlapped", "in_turn"), OVERLAPPED.items(), ids=OVERLAPPED)
def test_overlapped_exchange_changes_no_bit(overlapped, in_turn, two_ranks):
    """Layers of two microbatches take turns, and each computes what it does by itself."""
    assert two_ranks[overlapped] == two_ranks[in_turn]


def test_fp8_is_proven_beside_an_overlapped_exchange(tmp_path, cache_dir):
    overrides = [
        "model.num_moe_experts=4",
        "parallelism=ep2",
        "model.overlap_moe_expert_parallel_comm=true",
        "model.micro_batch_size=2",
        "trainer.precision=bf16",
        *emulate("tensorwise"),
        "trainer.max_steps=3",
        "trainer.limit_val_batches=0",
        "logging.fp8_statistics_interval=2",
    ]
    metrics = run_small(2, tmp_path / "run", cache_dir, overrides)
    # Without the experts' products it would be below a half.
    assert metrics.fp8_coverage.gemm_flops_share > 0.6
    assert not metrics.fp8_coverage.layers_kept_out
    assert metrics.train[-1].skipped_steps == 0


@pytest.mark.parametrize("model", SAME_AS_PLAIN)
def test_how_it_is_computed_changes_no_number(model, one_process):
    for name in ("losses", "experts", "grad_norms"):
        assert one_process[model][name] == pytest.approx(one_process["plain"][name], rel=1e-5), name


@pytest.mark.parametrize("model", ["seq", "bf16", "fp8"])
def test_what_a_key_changes_arrives(model, one_process):
    assert one_process[model]["grad_norms"] != pytest.approx(one_process["plain"]["grad_norms"], rel=1e-5)


def test_parameters_are_counted_by_hand(one_process):
    """Two layers: attention, two norms, router, four gated experts; embedding, final norm, head."""
    attention = 64 * 64 + (64 + 2 * 32) * 64
    layer = attention + 2 * 64 + 4 * 64 + 4 * 3 * 64 * 96
    assert one_process["plain"]["num_parameters"] == 2 * layer + 64 + 2 * 128 * 64


def test_run_logs_its_experts_and_writes_a_sample(tmp_path, cache_dir):
    overrides = [
        "model.num_moe_experts=4",
        "model.moe_z_loss_coeff=1e-3",
        "parallelism=ep2",
        "trainer.max_steps=4",
        "trainer.log_every_n_steps=2",
        "trainer.limit_val_batches=0",
        "sample.max_new_tokens=4",
    ]
    metrics = run_small(2, tmp_path / "run", cache_dir, overrides)
    assert [record.step for record in metrics.experts] == [record.step for record in metrics.train] == [2, 4]
    for record in metrics.experts:
        # By its definition it cannot be far below 1, nor above the number of experts.
        assert 0.9 < record.load_balancing_loss < 4
        # Of four scores near zero the logsumexp is near log 4, and its square is the loss.
        assert 1 < record.z_loss < 4
        assert record.idlest_expert < 1 < record.busiest_expert < 4 / 2 + 1e-9
        assert (record.idle_experts == 0) is (record.idlest_expert > 0)
    assert metrics.summary.sample_text


def test_rows_that_no_other_rank_sends_are_not_sorted_again(monkeypatch):
    sort, calls = token_dispatcher.sort_chunks_by_idxs, []
    monkeypatch.setattr(
        token_dispatcher, "sort_chunks_by_idxs", lambda *args, **names: calls.append(1) or sort(*args, **names)
    )

    def run():
        calls.clear()
        with emulated_training(*EXPERTS) as training:
            return training.step(), training.gradients(), len(calls)

    loss, gradients, sorts = run()
    monkeypatch.setattr(megatron_model, "leave_sorted", lambda chunk: None)
    expected_loss, expected, upstream_sorts = run()
    assert (sorts, loss) == (0, expected_loss)
    assert upstream_sorts > 0
    assert gradients.keys() == expected.keys()
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)


class HostReads(TorchDispatchMode):
    """Counts the numbers that the host reads from tensors; on a GPU it waits for each."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_watching_experts_reads_nothing_between_records():
    with emulated_training(*EXPERTS) as training:
        with HostReads() as without:
            training.step()
        watch = ExpertWatch(training.trainable.model, step=1)
        with HostReads() as watched:
            training.step()
        with HostReads() as reading:
            (record,) = watch.records(2)
        assert watched.count == without.count
        assert reading.count > 0
        # Two microbatches of 64 tokens, each to two of four experts of two layers.
        assert record.busiest_expert >= 1.0
