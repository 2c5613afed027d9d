"""megatron-core's CUDA calls answer for the CPU where there is no CUDA device."""

import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import random as megatron_random

from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.environment import prepare_libraries
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.layers import TorchNorm
from gpt_pretrain.megatron.model import translate_transformer
from gpt_pretrain.megatron.parallel import process_groups
from tests.platforms import spec_of
from tests.refusals import compose_quickly

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device, which is used as it is")


@pytest.fixture(autouse=True)
def cpu_device() -> None:
    install_cpu_device()


@pytest.fixture
def groups() -> Iterator[Config]:
    config = compose_quickly(["data=mock"])
    with process_groups(config.model, read_launch({}), detect_platform()):
        yield config


def test_groups_look_for_messages_in_one_thread(groups: Config) -> None:
    def devices(group: Any) -> list[Any]:
        return list(group._get_backend(torch.device("cpu")).options._devices)

    (first,) = devices(torch.distributed.group.WORLD)
    assert devices(parallel_state.get_tensor_model_parallel_group()) == [first]
    assert devices(torch.distributed.new_group(backend="gloo")) == [first]


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: torch.empty(2, device="cuda"),
        lambda: torch.zeros(2, device="cuda:0"),
        lambda: torch.ones(2, device=torch.device("cuda", 1)),
        lambda: torch.full((2,), 3.0, device=torch.cuda.current_device()),
        lambda: torch.tensor([1, 2], device="cuda"),
        lambda: torch.arange(2, device="cuda"),
        lambda: torch.empty_like(torch.ones(2), device="cuda"),
        lambda: torch.ones(2).new_zeros(2, device="cuda"),
        lambda: torch.ones(2).cuda(),
        lambda: torch.ones(2).to("cuda"),
        lambda: torch.ones(2).to(torch.device("cuda")),
        lambda: torch.ones(2).to(device="cuda", dtype=torch.bfloat16),
        lambda: torch.nn.Linear(2, 2, device="cuda").weight,
        lambda: torch.nn.Linear(2, 2).cuda().weight,
        lambda: torch.nn.Linear(2, 2).to("cuda").weight,
        lambda: torch.nn.Linear(2, 2).to(torch.cuda.current_device()).weight,
    ],
)
def test_cuda_allocation_lands_on_the_cpu(allocate: Callable[[], torch.Tensor]) -> None:
    assert allocate().device == torch.device("cpu")


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (torch.float32, "torch.cuda.FloatTensor"),
        (torch.bfloat16, "torch.cuda.BFloat16Tensor"),
        (torch.float16, "torch.cuda.HalfTensor"),
    ],
)
def test_type_answers_the_name_that_megatron_core_compares_with(dtype: torch.dtype, name: str) -> None:
    assert torch.ones(1, dtype=dtype).type() == name
    assert torch.nn.Parameter(torch.ones(1, dtype=dtype)).type() == name


def test_type_with_an_argument_still_converts() -> None:
    assert torch.ones(1).type(torch.float64).dtype is torch.float64


def test_streams_and_synchronisation_do_nothing() -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        result = torch.ones(2, device="cuda") + 1
    stream.synchronize()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert result.tolist() == [2.0, 2.0]


def test_second_installation_changes_nothing() -> None:
    modes, stream = torch._C._len_torch_function_stack(), torch.cuda.Stream
    install_cpu_device()
    assert torch._C._len_torch_function_stack() == modes
    assert torch.cuda.Stream is stream


def test_the_warning_that_the_distributed_optimizer_causes_is_silent_and_no_other() -> None:
    shard = torch.ones(4, requires_grad=True).view(-1)[:2]
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        assert shard.grad is None
        assert ["not a leaf" in str(warning.message) for warning in shown] == [True]
        shown.clear()
        prepare_libraries()
        assert shard.grad is None
        assert shown == []
        torch.tensor(shard)  # also a UserWarning of torch's that this file passes on
        assert ["copy construct" in str(warning.message) for warning in shown] == [True]


def dropped() -> torch.Tensor:
    """Which of 64 values dropout leaves out."""
    return F.dropout(torch.ones(64), 0.5) == 0.0


def in_fork() -> torch.Tensor:
    with tensor_parallel.get_cuda_rng_tracker().fork():
        return dropped()


def test_fork_draws_from_a_state_of_its_own(groups: Config) -> None:
    torch.manual_seed(7)
    outside = [dropped(), dropped()]
    torch.manual_seed(7)
    first_outside = dropped()
    first, second = in_fork(), in_fork()
    # The forked state moves on from one fork to the next, and the state around it does not notice.
    assert not torch.equal(first, second)
    assert torch.equal(first_outside, outside[0])
    assert torch.equal(dropped(), outside[1])


def test_restored_states_give_the_same_masks(groups: Config) -> None:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    in_fork()
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    around = torch.cuda.get_rng_state()
    masks = [in_fork(), dropped(), in_fork()]
    tracker.set_states(states)
    torch.cuda.set_rng_state(around)
    again = [in_fork(), dropped(), in_fork()]
    assert all(torch.equal(one, other) for one, other in zip(masks, again, strict=True))


def test_masks_differ_over_tensor_parallel_ranks_inside_forks_alone(groups: Config) -> None:
    masks = {}
    for rank in (0, 1):
        tensor_parallel.model_parallel_cuda_manual_seed(groups.model.seed, tp_rank=rank, force_reset_rng=True)
        masks[rank] = (in_fork(), dropped())
    # Where activations are split each rank drops its own; where they are whole all must drop the same.
    assert not torch.equal(masks[0][0], masks[1][0])
    assert torch.equal(masks[0][1], masks[1][1])


def test_recomputed_activations_drop_the_same_values(groups: Config) -> None:
    kept: list[torch.Tensor] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            inner = F.dropout(x, 0.5)
        output = F.dropout(inner, 0.5)
        kept.append(output.detach() != 0.0)
        return output

    x = torch.ones(256, requires_grad=True)
    tensor_parallel.checkpoint(layer, False, x).sum().backward()
    forward, recomputed = kept
    assert 0 < forward.sum() < 256
    assert torch.equal(forward, recomputed)
    assert x.grad is not None
    assert torch.equal(x.grad, 4.0 * forward)
    assert not megatron_random.is_checkpointing()


@pytest.mark.parametrize(("layout", "marked"), [("tp2", False), ("tp2_sp", True)])
@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def test_norm_tells_whether_the_sequence_is_split(layout: str, marked: bool, normalization: str) -> None:
    config = compose_quickly(["data=mock", f"parallelism={layout}", f"model.normalization={normalization}"])
    platform = detect_platform()
    norm: Any = TorchNorm(translate_transformer(spec_of(config, platform)), 8, 1e-5)
    parameters = dict(norm.named_parameters())
    assert parameters.keys() == ({"weight", "bias"} if normalization == "layernorm" else {"weight"})
    assert all(parameter.sequence_parallel is marked for parameter in parameters.values())


@pytest.mark.parametrize("normalization", ["layernorm", "rmsnorm"])
def test_norm_computes_its_formula(normalization: str) -> None:
    config = compose_quickly(["data=mock", f"model.normalization={normalization}"])
    platform = detect_platform()
    norm: Any = TorchNorm(translate_transformer(spec_of(config, platform)), 4, 0.1)
    x = [1.0, 2.0, 4.0, -3.0]
    mean = sum(x) / 4 if normalization == "layernorm" else 0.0
    scale = math.sqrt(sum((value - mean) ** 2 for value in x) / 4 + 0.1)
    expected = torch.tensor([(value - mean) / scale for value in x])
    torch.testing.assert_close(norm(torch.tensor(x)), expected, atol=1e-6, rtol=0.0)
