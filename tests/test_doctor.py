"""The doctor's findings and verdict, told of machines that are described and not there."""

from dataclasses import replace

import pytest

from gpt_pretrain.doctor.answer import answer_lines
from gpt_pretrain.doctor.facts import Driver, Facts, Failure, Gpu, Loaded, Requirement, Torch
from gpt_pretrain.doctor.findings import Blocks
from gpt_pretrain.doctor.verdict import give_verdict, platform_of
from tests.platforms import CPU, H200, INSTALL_FLASH, INSTALL_TE

TORCH = Torch(
    version="2.11.0+cu130",
    cuda="13.0",
    gpus=(Gpu(name="NVIDIA H200", compute_capability=(9, 0), memory_gib=139.8),) * 8,
    why_no_gpu=None,
    product_problem=None,
)
TE = Loaded(version="2.12.0")
MISSING = Failure(problem="ModuleNotFoundError: No module named 'x'", is_missing=True)
DRIVER = Driver(version="580.95", gpus=("NVIDIA H200",) * 8)
HEALTHY = Facts(
    python="3.12.3",
    executable="/usr/bin/python",
    torch=TORCH,
    driver=DRIVER,
    device_files=("/dev/nvidia0", "/dev/nvidia1"),
    transformer_engine=TE,
    torchao=MISSING,
    apex=MISSING,
    libraries={"flash_attention": MISSING},
    application=Loaded(version="0.19.2", remark="training loads"),
    requirements=(),
    environment={},
)
NO_DRIVER = Failure(problem="FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'", is_missing=True)
NO_GPU_TORCH = replace(TORCH, gpus=(), why_no_gpu="RuntimeError: Found no NVIDIA driver")
LAPTOP = replace(HEALTHY, torch=NO_GPU_TORCH, driver=NO_DRIVER, device_files=(), transformer_engine=MISSING)
FLASH = Loaded(version="4.0.0b36")
TORCHAO = Loaded(version="0.18.0")
PIP = "python -m pip install"
INSTALL = INSTALL_TE.removeprefix("install it from the checkout with ")
REMOVE_FLASH = "python -m pip uninstall --yes flash-attn-4"
REINSTALL_FLASH = f"{REMOVE_FLASH} && {INSTALL_FLASH.removeprefix('install it from the checkout with ')}"
REINSTALL_TORCHAO = "python -m pip uninstall --yes torchao && python -m pip install -c constraints.txt -e '.[torchao]'"
REMOVE_TE = "python -m pip uninstall --yes transformer-engine transformer-engine-torch"
REINSTALL_TE = f"{INSTALL} --no-cache-dir"


def broken_te(problem):
    return replace(HEALTHY, transformer_engine=Failure(problem=problem, version="2.12.0"))


def broken_flash(problem, version="4.0.0b36", **changes):
    return replace(HEALTHY, libraries={"flash_attention": Failure(problem=problem, version=version)}, **changes)


def with_gpu(name, capability):
    return replace(
        HEALTHY, torch=replace(TORCH, gpus=(Gpu(name=name, compute_capability=capability, memory_gib=80.0),))
    )


def with_torch(facts=HEALTHY, **changes):
    return replace(facts, torch=replace(facts.torch, **changes))


def hidden(**changes):
    """GPUs that the driver shows and PyTorch cannot use."""
    return with_torch(gpus=(), why_no_gpu="RuntimeError: no CUDA-capable device", **changes)


def test_a_healthy_machine_has_no_findings_and_trains_in_fp8():
    verdict = give_verdict(HEALTHY)

    assert verdict.findings == ()
    assert verdict.exit_code == 0
    assert verdict.device == "8 × NVIDIA H200"
    assert [name for name, why in verdict.recipes.items() if why is None] == ["delayed", "tensorwise", "blockwise"]
    assert "compute capability 10.x" in verdict.recipes["mxfp8"]


def test_the_platform_is_the_one_that_training_detects():
    assert platform_of(HEALTHY, TORCH) == H200
    flash = replace(HEALTHY, libraries={"flash_attention": FLASH})
    assert platform_of(flash, TORCH) == replace(H200, libraries={"flash_attention": "4.0.0b36"})
    assert platform_of(broken_flash("OSError: x"), TORCH) == replace(
        H200, library_problems={"flash_attention": "OSError: x"}
    )
    # It is not looked for without a GPU.
    assert platform_of(flash, NO_GPU_TORCH) == CPU


@pytest.mark.parametrize(
    ("facts", "lacking"),
    [
        (replace(HEALTHY, torchao=TORCHAO), None),
        (HEALTHY, "'.[torchao]'"),
        (replace(HEALTHY, torchao=Failure(problem="0.18 is needed, and 0.16.0 is installed")), "0.16.0"),
        (replace(HEALTHY, torchao=replace(TORCHAO, product_problem="RuntimeError: x")), "RuntimeError: x"),
        (replace(LAPTOP, torchao=TORCHAO), "CUDA"),
    ],
)
def test_recipes_of_torchao_run_where_it_is(facts, lacking):
    recipes = give_verdict(facts).recipes
    for name in ("torchao_tensorwise", "torchao_rowwise", "torchao_rowwise_with_gw_hp"):
        assert (recipes[name] is None) == (lacking is None)
        assert lacking is None or lacking in recipes[name]


def lines_of(facts):
    return [" ".join(line.split()) for line in answer_lines(facts, give_verdict(facts))]


@pytest.mark.parametrize(
    ("flash", "row"),
    [
        (FLASH, "FlashAttention-4 4.0.0b36 loads"),
        (MISSING, "FlashAttention-4 not installed runs are slower without it"),
        (Failure(problem="OSError: x", version="4.0.0b36"), "FlashAttention-4 4.0.0b36 cannot be used"),
    ],
)
def test_the_table_has_its_version_or_what_its_absence_costs(flash, row):
    assert row in lines_of(replace(HEALTHY, libraries={"flash_attention": flash}))


def test_recipes_that_run_without_transformer_engine_are_told_beside_its_absence():
    answer = lines_of(replace(HEALTHY, transformer_engine=MISSING, torchao=TORCHAO))[1]
    assert "does not work with Transformer Engine" in answer
    assert "torchao_tensorwise" in answer


@pytest.mark.parametrize("flash", [MISSING, FLASH, Failure(problem="OSError: x", version="4.0.0b36")])
def test_a_laptop_trains_small_models_without_fp8(flash):
    verdict = give_verdict(replace(LAPTOP, libraries={"flash_attention": flash}))

    (finding,) = verdict.findings
    assert finding.blocks is Blocks.nothing
    assert (finding.about, finding.fix) == ("this machine", "docker run --gpus all --ipc=host …")
    assert "model.fp8_emulate=true" in finding.what
    assert verdict.exit_code == 3
    assert all("there is no CUDA device" in why for why in verdict.recipes.values())


@pytest.mark.parametrize(
    ("facts", "exit_code", "named", "fix"),
    [
        # What is needed and not there.
        (
            replace(
                HEALTHY,
                requirements=(Requirement(needed="megatron-core~=0.19.2", installed=None),),
                application=Failure(problem="ModuleNotFoundError: No module named 'megatron'"),
            ),
            1,
            ("gpt_pretrain", "megatron-core~=0.19.2"),
            f"{PIP} 'megatron-core~=0.19.2'",
        ),
        (
            replace(HEALTHY, requirements=(Requirement(needed="torch>=2.11", installed="2.9.1"),)),
            1,
            ("gpt_pretrain", "torch>=2.11", "2.9.1"),
            f"{PIP} 'torch>=2.11'",
        ),
        # PyTorch.
        (
            replace(HEALTHY, torch=Failure(problem="OSError: libcudart.so.13", version="2.11.0")),
            1,
            ("PyTorch", "OSError: libcudart.so.13"),
            f"{PIP} --force-reinstall 'torch==2.11.0'",
        ),
        (
            replace(HEALTHY, torch=MISSING, requirements=(Requirement(needed="torch>=2.11", installed=None),)),
            1,
            ("gpt_pretrain", "torch>=2.11"),
            f"{PIP} 'torch>=2.11'",
        ),
        (
            hidden(version="2.11.0+cpu", cuda=None),
            1,
            ("PyTorch 2.11.0+cpu", "without CUDA", "there are GPUs"),
            f"{PIP} --force-reinstall 'torch==2.11.0'",
        ),
        (
            with_torch(
                replace(LAPTOP, assumed_gpu="NVIDIA H200"), version="2.11.0+cpu", cuda=None, gpus=TORCH.gpus[:1]
            ),
            1,
            ("PyTorch 2.11.0+cpu", "--assume-gpu is NVIDIA H200"),
            f"{PIP} --force-reinstall 'torch==2.11.0'",
        ),
        (hidden(), 1, ("PyTorch 2.11.0", "RuntimeError: no CUDA-capable device"), "env | grep CUDA_VISIBLE_DEVICES"),
        (
            replace(hidden(), driver=Failure(problem="RuntimeError: Driver/library version mismatch")),
            1,
            ("PyTorch 2.11.0", "no CUDA-capable device", "RuntimeError: Driver/library version mismatch"),
            "sudo dmesg",
        ),
        (
            with_torch(product_problem="AcceleratorError: CUDA error: no kernel image is available"),
            1,
            ("PyTorch", "NVIDIA H200", "AcceleratorError"),
            f"{PIP} --upgrade torch",
        ),
        (
            with_torch(product_problem="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 MiB"),
            1,
            ("PyTorch", "NVIDIA H200", "OutOfMemoryError"),
            "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv",
        ),
        # Transformer Engine.
        (
            replace(HEALTHY, transformer_engine=MISSING),
            3,
            ("Transformer Engine", "not installed", "local layers", "TorchAO"),
            INSTALL,
        ),
        (
            broken_te("ImportError: te.so: undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"),
            3,
            ("Transformer Engine", "undefined symbol: cublasLtGroupedMatrixLayoutInit_internal"),
            REINSTALL_TE,
        ),
        (
            replace(
                broken_te("loading it ended Python with signal SIGABRT"),
                application=Failure(problem="loading it ended Python with signal SIGABRT", version="0.19.2"),
            ),
            1,
            ("training", "SIGABRT", "Transformer Engine"),
            REMOVE_TE,
        ),
        (
            replace(HEALTHY, transformer_engine=replace(TE, product_problem="RuntimeError: cuBLAS Error")),
            3,
            ("Transformer Engine 2.12.0", "RuntimeError: cuBLAS Error"),
            REINSTALL_TE,
        ),
        # FlashAttention-4.
        (
            broken_flash("4.0.0b36 or newer is needed, and 4.0.0b20 is installed", version="4.0.0b20"),
            0,
            ("FlashAttention-4", "4.0.0b36", "4.0.0b20"),
            REINSTALL_FLASH,
        ),
        (
            broken_flash(
                "loading it ended Python with signal SIGABRT (Fatal Python error: Aborted)",
                application=Failure(problem="loading it ended Python with signal SIGABRT", version="0.19.2"),
            ),
            1,
            ("training", "SIGABRT", "FlashAttention-4"),
            REMOVE_FLASH,
        ),
        # TorchAO.
        (
            replace(HEALTHY, torchao=Failure(problem="0.18 is needed, and 0.16.0 is installed", version="0.16.0")),
            0,
            ("TorchAO", "0.18", "0.16.0", "model.fp8_backend=torchao"),
            REINSTALL_TORCHAO,
        ),
        (
            replace(HEALTHY, torchao=replace(TORCHAO, product_problem="RuntimeError: CUBLAS_STATUS_NOT_SUPPORTED")),
            0,
            ("TorchAO 0.18.0", "CUBLAS_STATUS_NOT_SUPPORTED"),
            REINSTALL_TORCHAO,
        ),
        # megatron-core.
        (
            replace(
                HEALTHY,
                application=Failure(problem="ModuleNotFoundError: No module named 'megatron.core'", version="0.19.2"),
            ),
            1,
            ("training", "'megatron.core'", "another folder named megatron", "unset PYTHONPATH"),
            f"{PIP} --force-reinstall --no-deps 'megatron-core==0.19.2'",
        ),
    ],
)
def test_what_is_wrong_is_found_with_the_command_that_mends_it(facts, exit_code, named, fix):
    verdict = give_verdict(facts)

    (finding,) = [each for each in verdict.findings if all(part in f"{each.about} {each.what}" for part in named)]
    assert fix in finding.fix
    assert verdict.exit_code == exit_code
    if exit_code == 1:
        assert verdict.findings[0].blocks is Blocks.training, "what keeps training from working is told first"


@pytest.mark.parametrize(
    ("facts", "recipe", "why"),
    [
        (with_gpu("NVIDIA A100", (8, 0)), "delayed", "compute capability 8.9 or newer"),
        (with_torch(cuda="12.8"), "blockwise", "CUDA 12.9 or newer"),
        (replace(HEALTHY, transformer_engine=MISSING), "tensorwise", "Transformer Engine"),
        (
            replace(HEALTHY, transformer_engine=replace(TE, version="2.9.0")),
            "delayed",
            "Transformer Engine 2.12 or newer",
        ),
        (broken_te("OSError: libcudnn"), "delayed", "OSError: libcudnn"),
        (
            replace(HEALTHY, environment={"NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1"}),
            "tensorwise",
            "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES=1",
        ),
        (replace(HEALTHY, torch=MISSING), "delayed", "PyTorch"),
    ],
)
def test_a_recipe_that_does_not_run_says_why(facts, recipe, why):
    assert why in give_verdict(facts).recipes[recipe]


def test_blackwell_runs_every_recipe():
    recipes = give_verdict(replace(with_gpu("NVIDIA B200", (10, 0)), torchao=TORCHAO)).recipes

    assert set(recipes.values()) == {None}


@pytest.mark.parametrize(
    ("apex", "row"),
    [
        (MISSING, "apex not installed runs are slower without it"),
        (Loaded(version="0.1", remark="layer norm"), "apex 0.1 layer norm"),
    ],
)
def test_the_answer_has_what_is_here_and_a_line_for_each_fix(apex, row):
    facts = replace(broken_te("ImportError: x.so: undefined symbol: _ZN3c10"), apex=apex)
    verdict = give_verdict(facts)
    shown = [*answer_lines(facts, verdict)]

    assert shown[:3] == ["training   works on 8 × NVIDIA H200", "FP8        does not work", "exit code  3"]
    (finding,) = verdict.findings
    assert finding.blocks is Blocks.fp8
    # A fix is copied: it stands on a line of its own.
    assert f"    {finding.fix}" in shown
    for part in (row, "PyTorch 2.11.0+cu130 with CUDA 13.0", "580.95", *verdict.recipes):
        assert any(part in " ".join(line.split()) for line in shown)
