"""What would use NVLink multicast, on hosts that have none and say so."""

from dataclasses import replace

import pytest

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import rank_zero_of
from gpt_pretrain.rules.machine import check_machine
from tests.platforms import CPU, H200, H200_WITHOUT_TE, INSTALL_TE, spec_of
from tests.refusals import check_told, compose_quickly

OVERLAP = ("data=mock", "parallelism=tp2_sp", "model.tp_comm_overlap=true")


def refusals(platform, *overrides):
    try:
        check_machine(
            spec_of(compose_quickly(overrides), platform, rank_zero_of(2, local_world_size=2, launcher="torchrun"))
        )
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="a host that says nothing"),
        pytest.param({"NCCL_NVLS_ENABLE": "1"}, id="a host with multicast"),
        pytest.param({"NCCL_NVLS_ENABLE": "0", "UB_SKIPMC": "1"}, id="without it, and user buffers know"),
    ],
)
def test_user_buffers_are_made_where_the_host_allows_them(variables):
    assert refusals(replace(H200, multicast_variables=variables), *OVERLAP) == []


@pytest.mark.parametrize("skips", [{}, {"UB_SKIPMC": "0"}])
def test_user_buffers_with_multicast_are_refused_on_a_host_without(skips):
    platform = replace(H200, multicast_variables={"NCCL_NVLS_ENABLE": "0", **skips})
    (problem,) = refusals(platform, *OVERLAP)
    settings = ["model.tp_comm_overlap=true", "NCCL_NVLS_ENABLE=0", "UB_SKIPMC=1"]
    check_told(problem, settings)
    assert refusals(platform, "data=mock", "parallelism=tp2_sp") == []


def test_the_environment_is_where_a_run_looks(monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.delenv("UB_SKIPMC", raising=False)
    monkeypatch.delenv("TORCH_SYMM_MEM_DISABLE_MULTICAST", raising=False)
    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)
    assert detect_platform().multicast_variables == {"NCCL_NVLS_ENABLE": "0"}


@pytest.mark.parametrize("override", ["model.tp_comm_overlap=true", "model.cuda_graph_impl=local"])
def test_what_transformer_engine_does_is_refused_without_it(override):
    for platform, why in ((H200_WITHOUT_TE, INSTALL_TE), (CPU, "CUDA device")):
        (problem,) = refusals(platform, "data=mock", override)
        check_told(problem, [override, "Transformer Engine", why])
