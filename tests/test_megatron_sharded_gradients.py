"""Runs that shard gradients, or weights too (`parallelism=zero2`, `fsdp`), train like one that does not (`dp`)."""

import json
import math
import re
from itertools import pairwise, product, starmap

import pytest
import torch

from gpt_pretrain.fp8.proof import Proof, ProofError
from gpt_pretrain.megatron import section_buffers
from gpt_pretrain.megatron.sharded_weights import WeightSection, WholeWeights
from gpt_pretrain.run.sections import group_layers, place_in_turn
from tests.emulated_training import emulate, emulated_training
from tests.forked_runs import fork_ranks
from tests.rounding import fp8_anew_tolerance, gradient_tolerance, loss_tolerance
from tests.sharded_training import CASES, STEPS, STRATEGIES, config_of

# All launches are in the first test's fixture.
pytestmark = pytest.mark.timeout(600)

BF16 = [case for case in CASES if any("bf16" in override for override in CASES[case][1])]
FP8 = [case for case in CASES if any(override.startswith("fp8=") for override in CASES[case][1])]


def launch(folder):
    for num_ranks in (2, 4):
        cases = [case for case, (ranks, _) in CASES.items() if ranks == num_ranks]
        done = fork_ranks(num_ranks, ["tests/programs/sharded_gradients.py", str(folder), *cases], timeout_s=500)
        assert done.returncode == 0, done.stderr[-6000:]


@pytest.fixture(scope="module")
def results(made_once):
    """What each rank of each case saw."""
    folder = made_once("sharded_gradients", launch)
    return {
        (case, strategy): [json.loads((folder / f"{case}.{strategy}.{rank}.json").read_text()) for rank in range(ranks)]
        for strategy in STRATEGIES
        for case, (ranks, _) in CASES.items()
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_ranks_that_have_all(case, strategy, results):
    """Both compute the same microbatches' gradients, and add up the eight of a step in another order."""
    in_bf16 = "model.grad_reduce_in_fp32=false" in CASES[case][1]
    rounding = math.sqrt(8) * torch.finfo(torch.bfloat16 if in_bf16 else torch.float32).eps
    for rank in results[case, strategy]:
        assert rank["has_gradients"]
        assert max(rank["gaps"]) < rounding


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["one microbatch", "one microbatch, summed in place"])
def test_with_one_microbatch_nothing_differs(case, strategy, results):
    for rank in results[case, strategy]:
        assert rank["same_gradients"]
        assert rank["same_weights"]
        assert all(whole == sharded for name, (whole, sharded) in rank["numbers"].items() if name != "norms")
    assert not any(rank["same_gradients"] for rank in results["fp32", strategy]), (
        "several are added up in the order of dp"
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_updates_are_those_of_ranks_that_have_all(case, strategy, results):
    model = config_of(case).model
    dtype = torch.bfloat16 if case in BF16 else torch.float32
    for rank in results[case, strategy]:
        whole, sharded = rank["numbers"]["losses"]
        assert len(whole) == STEPS
        assert sharded[0] == whole[0], "the first step starts from the same weights"
        assert whole[-1] < whole[0] - 0.25
        for step in range(STEPS):
            near = fp8_anew_tolerance(model, step + 1) if case in FP8 else loss_tolerance(model, dtype, step + 1)
            assert sharded[step] == pytest.approx(whole[step], rel=near)
            norm = pytest.approx(rank["numbers"]["norms"][0][step], rel=gradient_tolerance(model, dtype, step + 1))
            assert case in FP8 or rank["numbers"]["norms"][1][step] == norm
        near = fp8_anew_tolerance(model, STEPS + 1) if case in FP8 else loss_tolerance(model, dtype, STEPS + 1)
        assert rank["numbers"]["validation"][1] == pytest.approx(rank["numbers"]["validation"][0], rel=near)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ["fp32", "dp4", "tied", "tp2_sp", "pp2", "pp2_vp2"])
def test_a_rank_has_its_part_of_the_gradients_and_two_sections(case, strategy, results):
    num_ranks = CASES[case][0] // (1 if case in ("fp32", "dp4", "tied") else 2)
    for rank in results[case, strategy]:
        expected = 0
        for sizes in rank["sizes"]:
            layers, others = {}, {}
            for name, size in sizes.items():
                found = re.search(r"layers\.(\d+)\.", name)
                of, place = (layers, int(found[1])) if found else (others, name)
                of[place] = of.get(place, 0) + size
            # The final norm's gradient comes with those of the last layer.
            layers[max(layers)] += others.get("decoder.final_layernorm.weight", 0)
            head, embedding = others.get("output_layer.weight", 0), others.get("embedding.word_embeddings.weight", 0)
            tied = case == "tied"
            in_turn = [head, *(layers[layer] for layer in sorted(layers, reverse=True)), 0 if tied else embedding]
            pairs = max(map(sum, pairwise(in_turn)))
            expected += 4 * (sum(sizes.values()) // num_ranks + pairs + (embedding if tied else 0))
        whole, sharded = rank["bytes"]
        # The length of a bucket is a multiple of 128 values.
        assert expected <= sharded < 1.02 * expected
        assert whole >= 4 * sum(sum(sizes.values()) for sizes in rank["sizes"])


@pytest.mark.parametrize(
    ("sizes", "bucket_size", "expected"),
    [
        ([], 5, []),
        ([3, 3, 3], 1, [[0], [1], [2]]),
        ([3, 3, 3], 4, [[0, 1], [2]]),
        ([3, 3, 3], 6, [[0, 1], [2]]),
        ([3, 9, 1, 1], 7, [[0, 1], [2, 3]]),
        ([3, 3], 100, [[0, 1]]),
    ],
)
def test_sections_are_the_fewest_whole_layers_of_a_size(sizes, bucket_size, expected):
    assert group_layers(sizes, bucket_size) == expected


@pytest.mark.parametrize("sizes", [[], [5], [5, 2], [9, 2, 2, 2, 9], [1, 7, 3, 8, 2, 2], [4, 4, 4]])
def test_sections_that_follow_each_other_have_memory_side_by_side(sizes):
    starts, length = place_in_turn(sizes)
    bounds = [(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    assert all(start >= 0 and end <= length for start, end in bounds)
    for (start, end), (other_start, other_end) in pairwise(bounds):
        assert end <= other_start or other_end <= start
    assert length == max([*map(sum, pairwise(sizes)), *sizes], default=0)


@pytest.mark.parametrize("sharding", STRATEGIES.values())
@pytest.mark.parametrize("tied", [False, True])
def test_memory_is_not_used_while_results_are_in_it(tied, sharding):
    """gloo keeps inputs and results in memory of its own until somebody waits; NCCL does not."""
    tie = f"model.share_embeddings_and_output_weights={str(tied).lower()}"
    with emulated_training(
        sharding, "parallelism=dp", "model.num_layers=6", "model.ddp_bucket_size=1", tie
    ) as training:
        (chunk,) = training.trainable.model.chunks
        seen = []

        def look(*_):
            used = [section for section in chunk.sections if section.waits_for is not None]
            for section, other in product(used, chunk.exchanging):
                seen.append((section, other))
                assert not any(starmap(overlap, product(memory_of(section), memory_of(other))))

        for layer in training.chunks[0].decoder.layers:
            layer.register_full_backward_hook(look)
        training.step()
    assert seen, "exchanges go on while others compute"


def memory_of(section):
    buckets = [bucket.grad_data for group in section.groups for bucket in group.buckets]
    return [(bucket.data_ptr(), bucket.data_ptr() + bucket.nbytes) for bucket in buckets]


def overlap(one, other):
    return one[0] < other[1] and other[0] < one[1]


@pytest.mark.parametrize("sharding", STRATEGIES.values())
def test_a_gradient_out_of_turn_ends_the_run(sharding):
    """Memory that it was written to may hold another layer's gradients."""
    with emulated_training(sharding, "parallelism=dp", "model.ddp_bucket_size=1") as training:
        (chunk,) = training.trainable.model.chunks
        chunk.zero_grad_buffer()
        weight = training.chunks[0].decoder.layers[0].mlp.linear_fc1.weight
        with pytest.raises(RuntimeError, match=r"decoder\.layers\.0\.mlp\.linear_fc1\.weight came twice"):
            chunk.param_to_bucket_group[weight].register_grad_ready(weight)


@pytest.mark.parametrize("sharding", STRATEGIES.values())
def test_a_gradient_that_is_missing_ends_the_run(sharding):
    with emulated_training(sharding, "parallelism=dp") as training:
        training.chunks[0].embedding.register_forward_hook(lambda module, inputs, output: output.detach())
        with pytest.raises(RuntimeError, match=r"no gradient of embedding\.word_embeddings\.weight"):
            training.step()


@pytest.mark.parametrize("sharding", STRATEGIES.values())
def test_a_step_that_is_not_finite_updates_nothing(sharding):
    with emulated_training(sharding, "parallelism=dp", "model.ddp_bucket_size=1") as training:
        training.step()
        (embedding,) = (chunk.embedding.word_embeddings.weight for chunk in training.chunks)
        before = embedding.detach().clone()
        handle = (
            training.chunks[0]
            .decoder.layers[1]
            .mlp.linear_fc2.register_forward_hook(lambda module, inputs, outputs: (outputs[0] * torch.inf, outputs[1]))
        )
        assert training.result().skipped
        assert torch.equal(embedding, before)
        handle.remove()
        assert not training.result().skipped
        assert not torch.equal(embedding, before)


FSDP = ("parallelism=fsdp", "model.ddp_bucket_size=1", "model.num_layers=3")


@pytest.fixture
def shared_with_nobody(monkeypatch):
    """One rank gathers from itself what several gather from each other."""
    monkeypatch.setattr(section_buffers, "is_shared", lambda ranks: True)


@pytest.mark.parametrize(
    ("recipe", "spoil"),
    [
        ("delayed", lambda bucket: bucket.param_data[3].neg_()),
        ("torchao_tensorwise", lambda bucket: bucket.param_data.view(torch.uint8)[3].bitwise_xor_(1)),
    ],
)
def test_the_proof_finds_weights_that_were_not_gathered(recipe, spoil, monkeypatch, shared_with_nobody):
    """One value of what a layer reads is another than its rank keeps."""
    stored = ["model.fp8_params=true", "trainer.precision=bf16"] if recipe.startswith("torchao") else []
    with emulated_training(*emulate(recipe), *FSDP, *stored) as training:
        (chunk,) = training.trainable.model.chunks
        training.step()
        proof = Proof(training.trainable.model, training.trainable.optimizer, 0)
        with proof.watching():
            training.result()
        proof.judge()
        gather = WeightSection.gather

        def gather_wrong(section):
            gather(section)
            section.wait()
            for bucket in (bucket for _, buckets in section._groups for bucket in buckets):
                spoil(bucket)

        monkeypatch.setattr(WeightSection, "gather", gather_wrong)
        proof = Proof(training.trainable.model, training.trainable.optimizer, 1)
        with proof.watching():
            training.result()
        assert chunk.weights.num_off > 0
        with pytest.raises(ProofError, match="weights that layers read"):
            proof.judge()


@pytest.mark.parametrize("overlaps", [True, False])
def test_two_neighboring_sections_are_whole_at_a_time(overlaps, shared_with_nobody, monkeypatch):
    gather = f"model.overlap_param_gather={str(overlaps).lower()}"
    with emulated_training(*FSDP, gather, "model.num_layers=6") as training:
        (chunk,) = training.trainable.model.chunks
        sections, seen, enter = chunk.weights._sections, [], WholeWeights.enter

        def enter_seen(weights, index):
            enter(weights, index)
            seen.append((index, [number for number, section in enumerate(sections) if section.is_whole]))

        monkeypatch.setattr(WholeWeights, "enter", enter_seen)
        training.step()
    # The embedding, six layers, the head.
    assert [index for index, _ in seen] == [*range(8), *reversed(range(8))] * (len(seen) // 16)
    for index, whole in seen:
        assert index in whole
        # At an end the pass turns, and finds the section before still there.
        assert len(whole) == (2 if overlaps or index == 7 else 1) or index == 0
        assert max(whole) - min(whole) <= 1
