"""Why Transformer Engine (TE) does not load, or would fail later, and the command that mends it.

Its three packages have to be of one version, for PyTorch's CUDA, and its PyTorch part built against the very PyTorch
that is there; the libraries it loads have to be the ones that PyTorch loaded.
"""

import re
from collections.abc import Iterator

from gpt_pretrain.config.install import install_command
from gpt_pretrain.doctor.facts import Facts, Failure, Torch
from gpt_pretrain.doctor.finding import WHO_HAS_IT, Blocks, Finding, is_taken
from gpt_pretrain.spec.platform import leading_version

_ABOUT = "Transformer Engine"


def transformer_engine_findings(facts: Facts) -> Iterator[Finding]:
    """Findings about TE; none where it is not asked for, on a machine without a GPU."""
    te, torch = facts.transformer_engine, facts.torch
    if isinstance(torch, Failure) or not torch.gpus:
        return
    if isinstance(te, Failure):
        what, fix = _why_not_loaded(te, torch, facts)
        yield Finding(about=_ABOUT, what=what, fix=fix, blocks=Blocks.fp8)
        return
    if len(te.cudnn_folders) > 1:
        yield Finding(
            about="cuDNN",
            what=f"is loaded twice, from {' and '.join(te.cudnn_folders)}. Fused attention then fails with "
            "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED",
            fix=_use_libraries_of(torch),
            blocks=Blocks.training,
        )
    if te.product_problem is not None:
        yield Finding(
            about=f"{_ABOUT} {te.version}",
            what=f"loads, and a small FP8 layer fails: {te.product_problem}",
            fix=WHO_HAS_IT if is_taken(te.product_problem) else _rebuild(te.version),
            blocks=Blocks.fp8,
        )


def _why_not_loaded(te: Failure, torch: Torch, facts: Facts) -> tuple[str, str]:
    """What to say of a TE that is missing or broken, and the command."""
    if te.is_missing:
        return "is not installed: runs use megatron-core's local layers, without FP8", install_command("te")
    for pattern, cause, fix in _causes(te, torch, facts):
        if re.search(pattern, te.problem):
            return f"does not load: {te.problem}. {cause}", fix
    return f"does not load: {te.problem}", _rebuild(te.version)


def _causes(te: Failure, torch: Torch, facts: Facts) -> Iterator[tuple[str, str, str]]:
    """What the error looks like, what it comes from, and the command; the first that fits."""
    core = _other_cuda(facts, torch)
    if core is not None:
        cause = f"{core} is for another CUDA than PyTorch {torch.version}, which is built for {torch.cuda}"
        yield "", cause, f"python -m pip uninstall --yes {core} && {install_command('te')}"
    yield (
        "undefined symbol: cublasLt",
        f"It needs a newer cuBLAS than PyTorch {torch.version} brings, as TE 2.13 does with PyTorch 2.11; 2.12.0 fits",
        install_command("te"),
    )
    yield "undefined symbol", f"It was built against another PyTorch than {torch.version}", _rebuild(te.version)
    there = ", ".join(f"{name} {version}" for name, version in facts.packages.items())
    yield (
        "version mismatch|Could not find .*transformer.engine|empty .transformer-engine",
        f"Its packages do not fit each other: {there or 'none is complete'}",
        install_command("te"),
    )
    yield (
        r"libcuda\.so",
        "That is the driver's own library: the host has no driver, or the container was started without the GPUs",
        "docker run --gpus all --ipc=host …",
    )
    yield (
        "shared object not found|cannot open shared object file",
        "The library is not where it is looked for",
        _use_libraries_of(torch),
    )
    missing = re.search(r"No module named '(\w+)'", te.problem)
    if missing:
        yield "", "It needs that module", f"python -m pip install {missing[1]}"


def _other_cuda(facts: Facts, torch: Torch) -> str | None:
    """The package of TE's kernels that is for another CUDA than PyTorch's."""
    if torch.cuda is None:
        return None
    fitting = f"transformer-engine-cu{leading_version(torch.cuda)[0]}"
    cores = [name for name in facts.packages if name.startswith("transformer-engine-cu")]
    return cores[0] if cores and fitting not in cores else None


def _rebuild(version: str | None) -> str:
    """Builds TE's PyTorch part again, against the PyTorch that is there."""
    pinned = f"=={version}" if version else ""
    return (
        "python -m pip install --no-build-isolation --no-cache-dir --force-reinstall --no-deps "
        f"transformer-engine-torch{pinned}"
    )


def _use_libraries_of(torch: Torch) -> str:
    """Puts the CUDA libraries of PyTorch's own wheels before the system's."""
    major = 13 if torch.cuda is None else leading_version(torch.cuda)[0]
    # From CUDA 13 on all but cuDNN and NCCL are in one folder.
    cuda = [f"cu{major}"] if major >= 13 else ["cublas", "cuda_runtime", "cuda_nvrtc"]
    folders = ":".join(f"{torch.site}/nvidia/{name}/lib" for name in ("cudnn", "nccl", *cuda))
    return f"export CUDNN_HOME={torch.site}/nvidia/cudnn LD_LIBRARY_PATH={folders}:$LD_LIBRARY_PATH"
