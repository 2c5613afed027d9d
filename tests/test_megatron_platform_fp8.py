"""FP8 on a machine: what GPU, CUDA, Transformer Engine and environment must offer, and what is refused without."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.rules.machine import check_machine, machine_notes
from gpt_pretrain.run.platform import Platform
from tests.forked_runs import fork_ranks
from tests.nemo import NEMO_FP8, NEMO_FP8_WITH_TE
from tests.platforms import CPU, H200, H200_WITHOUT_TE, spec_of
from tests.refusals import Refused, check_refused, check_told, compose_quickly
from tests.test_megatron_platform import problems_on

GPU, GPU_WITHOUT_TE = H200, H200_WITHOUT_TE
GPU_WITH_BROKEN_TE = replace(GPU_WITHOUT_TE, transformer_engine_problem="OSError: libcublas.so.13 is missing")
FP8 = "model.fp8=true"
BLOCKWISE, MXFP8, TENSORWISE = "fp8=blockwise", "fp8=mxfp8", "fp8=tensorwise"
TORCHAO, ROWWISE = "fp8=torchao_tensorwise", "fp8=torchao_rowwise"
ATTENTION = "model.fp8_dot_product_attention=true"
EMULATE, NO_ATTENTION = "model.fp8_emulate=true", "model.fp8_dot_product_attention=false"
A100 = replace(GPU, device_name="NVIDIA A100", compute_capability=(8, 0))
L40S = replace(GPU, device_name="NVIDIA L40S", compute_capability=(8, 9))
B200 = replace(GPU, device_name="NVIDIA B200", compute_capability=(10, 0))
RTX5090 = replace(GPU, device_name="NVIDIA GeForce RTX 5090", compute_capability=(12, 0))


def with_variables(**variables: str) -> Platform:
    return replace(GPU, recipe_variables=variables)


@pytest.mark.parametrize(
    ("platform", "overrides", "told"),
    [
        (CPU, FP8, f"{FP8} CUDA device"),
        (A100, FP8, f"{FP8} 8.9 A100 8.0"),
        (GPU_WITHOUT_TE, FP8, f"{FP8} Transformer Engine installed pip '.[te]'"),
        (GPU_WITH_BROKEN_TE, FP8, f"{FP8} Transformer Engine OSError: libcublas.so.13"),
        (replace(GPU, transformer_engine="2.9.0+70f53666"), FP8, f"{FP8} 2.12 2.9.0+70f53666 '.[te]'"),
        (L40S, BLOCKWISE, "model.fp8_recipe=blockwise 9.0 12.9 L40S 8.9 13.0"),
        (replace(GPU, torch_cuda="12.8"), BLOCKWISE, "model.fp8_recipe=blockwise 9.0 12.9 H200 12.8"),
        (GPU, MXFP8, "model.fp8_recipe=mxfp8 10.x H200 9.0"),
        (RTX5090, MXFP8, "model.fp8_recipe=mxfp8 10.x 5090 12.0"),
        (CPU, TORCHAO, f"{FP8} model.fp8_backend=torchao CUDA device"),
        (A100, TORCHAO, f"{FP8} model.fp8_backend=torchao 8.9 A100 8.0"),
        (GPU, TORCHAO, f"{FP8} model.fp8_backend=torchao TorchAO installed pip '.[torchao]'"),
        (
            replace(GPU, torchao_problem="0.18 is needed, and 0.16.0 is installed"),
            TORCHAO,
            f"{FP8} model.fp8_backend=torchao 0.18 0.16.0 '.[torchao]'",
        ),
        (replace(L40S, torchao="0.18.0"), ROWWISE, "model.fp8_recipe=rowwise 9.0 L40S 8.9"),
        (L40S, f"{FP8} {ATTENTION}", f"{ATTENTION} 9.x 10.x L40S 8.9"),
        (GPU, f"{FP8} {ATTENTION} model=gpt2_124m", f"{ATTENTION} 128 Hopper model.kv_channels=64"),
        (B200, f"{FP8} {ATTENTION} model.kv_channels=256", f"{ATTENTION} 16 128 model.kv_channels=256"),
        (
            GPU,
            f"{TENSORWISE} {ATTENTION}",
            f"{ATTENTION} model.fp8_recipe=tensorwise Hopper NVTE_DPA_FP8_RECIPE=DelayedScaling",
        ),
    ],
)
def test_fp8_that_the_machine_cannot_compute_is_refused(platform: Platform, overrides: str, told: str) -> None:
    row = Refused(f"data=mock model=llama3_8b {overrides}", told=told)
    check_refused(row, problems_on(platform))


@pytest.mark.parametrize(
    ("variables", "overrides", "told"),
    [
        ({"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}, [TENSORWISE], "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1"),
        ({"NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}, [BLOCKWISE], "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1"),
        ({"NVTE_DPA_FP8_RECIPE": "F16"}, [FP8, ATTENTION], "NVTE_DPA_FP8_RECIPE=F16"),
        (
            {"NVTE_DPA_FP8_RECIPE": "DelayedScaling", "NVTE_DPA_FP8DS_AMAX_HISTLEN": "16"},
            [TENSORWISE, ATTENTION],
            "NVTE_DPA_FP8DS_AMAX_HISTLEN=16",
        ),
    ],
)
def test_variables_that_change_a_recipe_silently_are_refused(
    variables: dict[str, str], overrides: list[str], told: str
) -> None:
    (problem,) = problems_on(with_variables(**variables))(["data=mock", "model=llama3_8b", *overrides], None)
    check_told(problem, [told, "environment", "unset"])


@pytest.mark.parametrize(
    ("platform", "overrides"),
    [
        (GPU, [FP8]),
        (GPU, [TENSORWISE]),
        (GPU, [BLOCKWISE]),
        (replace(GPU, torch_cuda="12.9"), [BLOCKWISE]),
        (L40S, [TENSORWISE]),
        (B200, [MXFP8]),
        (B200, [BLOCKWISE]),
        (replace(GPU, transformer_engine="2.12"), [FP8]),
        (GPU, [FP8, ATTENTION]),
        (B200, [TENSORWISE, ATTENTION]),
        (with_variables(NVTE_DPA_FP8_RECIPE="DelayedScaling"), [TENSORWISE, ATTENTION]),
        (with_variables(NVTE_DPA_FP8_RECIPE="DelayedScaling"), [FP8, ATTENTION]),
        # What another recipe would read, or what says what is so anyway.
        (with_variables(NVTE_FP8_BLOCK_SCALING_FP32_SCALES="1", NVTE_DPA_FP8_RECIPE="F16"), [TENSORWISE]),
        (with_variables(NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES="0"), [TENSORWISE]),
        # Emulated, anything can be computed anywhere.
        *((anywhere, [MXFP8, "model.fp8_emulate=true"]) for anywhere in (CPU, A100, GPU_WITHOUT_TE, GPU, RTX5090)),
        (with_variables(NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES="1"), [TENSORWISE, "model.fp8_emulate=true"]),
    ],
)
def test_fp8_that_the_machine_can_compute_passes(platform: Platform, overrides: list[str]) -> None:
    config = compose_quickly(["data=mock", "model=llama3_8b", *overrides])
    check_machine(spec_of(config, platform))
    assert spec_of(config, platform).kernels.transformer_engine is not config.model.fp8_emulate


@pytest.mark.parametrize(
    "overrides",
    [
        NEMO_FP8,
        NEMO_FP8_WITH_TE,
        [TENSORWISE, ATTENTION],
        [BLOCKWISE, "model.fp8_params=true", "model.gradient_accumulation_fusion=true", "parallelism=cp2"],
    ],
)
def test_the_emulation_that_is_offered_is_taken(overrides: list[str], broken_rules: Callable[..., list[str]]) -> None:
    """It is offered with whatever of the command line it cannot be combined with taken back."""
    asked = ["data=mock", "model=llama3_8b", *overrides]
    with pytest.raises(ConfigError) as refused:
        check_machine(spec_of(compose_quickly(asked), CPU))
    problem = refused.value.problems[0]
    offered = re.findall(r"model\.\w+=\w+", problem.rpartition("; ")[2])
    assert offered[0] == "model.fp8_emulate=true"
    assert broken_rules(*asked, *offered) == []
    check_machine(spec_of(compose_quickly([*asked, *offered]), CPU))


def test_emulated_fp8_where_the_gpu_has_its_own_is_told() -> None:
    config = compose_quickly(["data=mock", TENSORWISE, "model.fp8_emulate=true"])
    (note,) = machine_notes(spec_of(config, GPU))
    assert "model.fp8_emulate" in note
    for platform in (CPU, GPU_WITHOUT_TE, GPU_WITH_BROKEN_TE, A100):
        assert machine_notes(spec_of(config, platform)) == []


def test_an_emulated_recipe_of_torchao_is_told_where_torchao_is() -> None:
    config, with_torchao = compose_quickly(["data=mock", ROWWISE]), replace(GPU, torchao="0.18.0")
    assert machine_notes(spec_of(config, with_torchao)) == []
    emulated = compose_quickly(["data=mock", ROWWISE, EMULATE])
    assert machine_notes(spec_of(emulated, GPU)) == []
    (note,) = machine_notes(spec_of(emulated, with_torchao))
    assert "model.fp8_emulate" in note


def test_variables_of_recipes_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_DPA_FP8_RECIPE", "F16")
    monkeypatch.setenv("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "1")
    monkeypatch.setenv("NVTE_FLASH_ATTN", "1")
    assert detect_platform().recipe_variables == {
        "NVTE_DPA_FP8_RECIPE": "F16",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    }


def test_fp8_without_a_gpu_ends_the_program_with_the_way_out(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = fork_ranks(1, ["-m", "gpt_pretrain", "data=mock", FP8, f"run_dir={run_dir}"])
    assert done.returncode == 2
    assert done.stdout == ""
    check_told(done.stderr.strip().removeprefix("error: "), [FP8, "CUDA"])
    assert not run_dir.exists()
