"""Random states in a checkpoint: the same whether dropout draws from tensors or from generators of CUDA graphs."""

import pytest
import torch

from gpt_pretrain.checkpoint.state import random_states, restore_random_states
from gpt_pretrain.megatron.cpu import install_cpu_device

install_cpu_device()

from megatron.core import tensor_parallel  # noqa: E402 - the device comes first

NAMES = ("data-parallel-rng", "model-parallel-rng")


@pytest.fixture
def tracker():
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)
    yield tensor_parallel.get_cuda_rng_tracker()
    tensor_parallel.random.initialize_rng_tracker(force_reset=True)


def test_generators_are_saved_as_their_states_and_restored_in_place(tracker):
    generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(NAMES)}
    tracker.set_states(dict(generators))
    saved = random_states()
    assert all(torch.equal(saved["tracker"][name], generators[name].get_state()) for name in NAMES)
    drawn = [torch.rand(3, generator=generator) for generator in generators.values()]
    restore_random_states(saved)
    # A graph that has been recorded holds the generator itself.
    assert all(tracker.get_states()[name] is generators[name] for name in NAMES)
    again = [torch.rand(3, generator=generator) for generator in generators.values()]
    assert all(torch.equal(*pair) for pair in zip(drawn, again, strict=True))


def test_states_saved_with_graphs_are_taken_by_a_run_without(tracker):
    generators = {name: torch.Generator().manual_seed(seed) for seed, name in enumerate(NAMES)}
    tracker.set_states(dict(generators))
    saved = random_states()
    tracker.set_states({name: torch.Generator().get_state() for name in NAMES})
    restore_random_states(saved)
    with tracker.fork(NAMES[1]):
        drawn = torch.rand(3)
    assert torch.equal(drawn, torch.rand(3, generator=generators[NAMES[1]]))
