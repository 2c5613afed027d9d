"""With sharded weights (`parallelism=fsdp`) no rank ever holds the whole model, as torch's allocator counts it."""

import json

import pytest
import torch
from megatron.core.transformer import transformer_block
from megatron.core.transformer.spec_utils import ModuleSpec

from gpt_pretrain.megatron.weights import built_without_first_values
from tests.forked_runs import fork_ranks
from tests.programs.sharded_memory import WHOLE_BUCKETS, WHOLE_LAYERS

# All launches are in the first test's fixture.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    """What each rank saw, by case."""
    folder = tmp_path_factory.mktemp("memory")
    done = fork_ranks(request.param, ["tests/programs/sharded_memory.py", str(folder)], timeout_s=500)
    assert done.returncode == 0, done.stderr[-6000:]
    return [json.loads((folder / f"{request.param}.{rank}.json").read_text()) for rank in range(request.param)]


def held_too_much(case, num_ranks):
    """Phases that held more than the rank's part and two sections, with the bytes that were too many."""
    values, section, whole = sum(case["sections"]), max(case["sections"]), case["bytes"]
    # In BF16; gradients and masters are in fp32. A matrix is drawn in fp32, and a weight in FP8 from BF16.
    two_sections, drawn = 2 * 2 * section, (4 + 2) * case["matrix"]
    gradients = 4 * values / num_ranks + 2 * two_sections
    # All that a phase may leave, and what it may take beside what it finds or leaves.
    most = {
        "model": (whole / num_ranks + gradients, two_sections + drawn),
        "optimizer": (4 * values / num_ranks, drawn),
        # Activations of a few tokens take as much again.
        "validation": (two_sections, 2 * two_sections),
        "save": (0, two_sections),
        # What is read of the weights is BF16 on the host, which this device is.
        "load": (0, 2 * values / num_ranks + two_sections),
        "weights alone": (0, 2 * values / num_ranks + two_sections),
    }
    too_much, before = {}, 0
    for phase, (peak, left) in case["phases"].items():
        if phase in most:
            stays, passes = most[phase]
            # Buckets are padded, and layers have tables of their own.
            excess = max(left - before - 1.03 * stays, peak - max(left, before) - passes)
            if excess > 0.25 * two_sections:
                too_much[phase] = excess
        before = left
    return too_much


@pytest.mark.parametrize("case", ["bf16", "stored"])
def test_no_rank_holds_more_than_its_part_and_two_sections(case, ranks):
    for rank in ranks:
        assert len(rank[case]["phases"]) == 7
        assert held_too_much(rank[case], len(ranks)) == {}


@pytest.mark.parametrize("case", [WHOLE_LAYERS, WHOLE_BUCKETS])
def test_a_start_that_keeps_what_it_should_give_back_is_found(case, ranks):
    for rank in ranks:
        assert rank[case]["phases"].keys() == held_too_much(rank[case], len(ranks)).keys() == {"model"}


def test_a_layer_is_on_the_device_before_it_gives_its_memory_back():
    """megatron-core builds routers on the host: a matrix without memory could not be copied from there."""
    device = torch.device("meta")
    with built_without_first_values(device, fp8_params=False, keeps_matrices=False):
        layer = transformer_block.build_module(ModuleSpec(module=torch.nn.Linear), 4, 4)
    assert (layer.weight.device, layer.weight.untyped_storage().nbytes()) == (device, 0)
    assert layer.bias.device == device
