"""What is wrong on a machine and the command that fixes it, from the facts alone.

Error messages are those of PyTorch 2.11, megatron-core 0.19 and Transformer Engine (TE) 2.12. TE's three packages must
have one version, for PyTorch's CUDA; its PyTorch part must be built against the installed PyTorch; and the libraries it
loads must be the ones that PyTorch loaded.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpt_pretrain.config.errors import install_command
from gpt_pretrain.doctor.facts import Facts, Failure, Requirement, Torch
from gpt_pretrain.features.registry import LIBRARIES
from gpt_pretrain.run.platform import BLACKWELL, MULTICAST_OFF, NO_MULTICAST, Library

# The first driver of each CUDA major version (CUDA compatibility guide, minor version compatibility).
_FIRST_DRIVER = {11: "450 or newer", 12: "525 or newer", 13: "580 or newer"}
# BF16 came with Ampere.
_BF16_CAPABILITY = (8, 0)
# Where PyTorch comes from the machine's image, it must not be replaced: a fix names the one package that is missing.
_INSTALL = "python -m pip install"
# Docker gives a container 64 MiB unless told otherwise; NCCL's ranks of a node exchange buffers there.
_SHARED_MEMORY_GIB = 1.0
_SEE_GPUS = "docker run --gpus all --ipc=host …"
_WHO_HAS_IT = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
_TE = "Transformer Engine"


class Blocks(StrEnum):
    """What a finding prevents."""

    training = "training"
    fp8 = "fp8"
    nothing = "nothing"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not work as it should."""

    about: str
    """Library, variable or part of the machine: the subject of the sentence."""
    what: str
    """The rest of the sentence, without a full stop: what is wrong and its consequence."""
    fix: str
    """A shell command."""
    blocks: Blocks


def list_findings(facts: Facts) -> list[Finding]:
    """All findings, those that keep training from working first."""
    found = [*_requirements(facts), *_torch(facts), *_application(facts)]
    torch = facts.torch
    # Without a GPU a run looks for none of these.
    if isinstance(torch, Torch) and torch.gpus:
        found += [*_libraries(facts, torch), *_surroundings(facts, torch)]
    return sorted(found, key=lambda finding: list(Blocks).index(finding.blocks))


def _requirements(facts: Facts) -> Iterator[Finding]:
    if isinstance(facts.requirements, Failure):
        what = f"has requirements that could not be checked: {facts.requirements.problem}"
        yield Finding("gpt_pretrain", what, f"{_INSTALL} packaging", Blocks.nothing)
    for unmet in _unmet(facts):
        there = "which is not installed" if unmet.installed is None else f"and {unmet.installed} is installed"
        yield Finding("gpt_pretrain", f"needs {unmet.needed}, {there}", f"{_INSTALL} '{unmet.needed}'", Blocks.training)


def _unmet(facts: Facts) -> tuple[Requirement, ...]:
    return facts.requirements if isinstance(facts.requirements, tuple) else ()


def _torch(facts: Facts) -> Iterator[Finding]:
    torch = facts.torch
    if isinstance(torch, Failure):
        if not any(unmet.needed.startswith("torch") and unmet.installed is None for unmet in _unmet(facts)):
            version = f"=={torch.version}" if torch.version else ""
            fix = f"{_INSTALL} --force-reinstall 'torch{version}'"
            yield Finding("PyTorch", f"does not load: {torch.problem}", fix, Blocks.training)
    elif facts.assumed_gpu is not None:
        # A driver that fits is assumed as well; the libraries still have to be those for a GPU.
        if torch.cuda is None:
            yield _cpu_build(torch, f"--assume-gpu is {facts.assumed_gpu}")
    elif not torch.gpus:
        yield _no_gpu(facts, torch)
    else:
        yield from _gpu(torch)


def _gpu(torch: Torch) -> Iterator[Finding]:
    gpu = torch.gpus[0]
    if torch.product_problem is not None:
        capability = ".".join(map(str, gpu.compute_capability))
        what = f"does not compute on {gpu.name} (compute capability {capability}): {torch.product_problem}"
        fix = _unless_taken(torch.product_problem, f"{_INSTALL} --upgrade torch")
        yield Finding(f"PyTorch {torch.version}", what, fix, Blocks.training)
    if gpu.compute_capability < _BF16_CAPABILITY:
        what = "has no BF16 units, as compute capability 8.0 and newer have: train in FP32"
        yield Finding(gpu.name, what, "python -m gpt_pretrain trainer.precision=fp32 …", Blocks.nothing)


def _cpu_build(torch: Torch, although: str) -> Finding:
    what = f"is built without CUDA, although {although}: runs would train on the CPU"
    fix = f"{_INSTALL} --force-reinstall 'torch=={torch.version.partition('+')[0]}'"
    return Finding(f"PyTorch {torch.version}", what, fix, Blocks.training)


def _no_gpu(facts: Facts, torch: Torch) -> Finding:
    """PyTorch uses no GPU: there is none, or something hides it."""
    driver = facts.driver
    if isinstance(driver, Failure) and facts.device_files:
        return _broken_driver(facts, driver)
    if isinstance(driver, Failure):
        broken = f"; nvidia-smi fails: {driver.problem}" if not driver.is_missing else ""
        return Finding(
            "this machine",
            f"has no GPU, or no NVIDIA driver{broken}. Small models train on the CPU, and FP8 is emulated "
            "there (model.fp8_emulate=true). A container sees only the GPUs that it was started with",
            _SEE_GPUS,
            Blocks.nothing,
        )
    num_gpus, the_driver = len(driver.gpus), f"the driver {driver.version}"
    if torch.cuda is None:
        return _cpu_build(torch, f"there is {driver.gpus[0]} ({num_gpus} in all)")
    needed = _major(torch.cuda)
    if driver.cuda is not None and driver.cuda[0] < needed:
        return Finding(
            the_driver,
            f"runs CUDA up to {'.'.join(map(str, driver.cuda))}, and PyTorch {torch.version} is built for CUDA "
            f"{torch.cuda}, which needs {_FIRST_DRIVER.get(needed, 'a newer one')}. Update it on the host, also for a "
            "container, or on a data center GPU install CUDA's compatibility package",
            f"apt-get install cuda-compat-{torch.cuda.replace('.', '-')} && "
            f"export LD_LIBRARY_PATH=/usr/local/cuda-{torch.cuda}/compat:$LD_LIBRARY_PATH",
            Blocks.training,
        )
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        what = f"hides all {num_gpus} GPUs: runs would train on the CPU"
        return Finding(f"CUDA_VISIBLE_DEVICES={visible!r}", what, "unset CUDA_VISIBLE_DEVICES", Blocks.training)
    what = f"shows {num_gpus} GPUs, and PyTorch can use none: {torch.why_no_gpu}"
    fix = "nvidia-smi -q | grep -iE 'product name|mig mode|fabric|state'"
    return Finding(the_driver, what, fix, Blocks.training)


def _broken_driver(facts: Facts, driver: Failure) -> Finding:
    """There are GPUs, and nothing reaches them."""
    files = facts.device_files
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    if driver.is_missing:
        what = "there is no nvidia-smi: the driver's own libraries are missing. A container has them only if asked"
        fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility --ipc=host …"
    else:
        what = f"nvidia-smi fails: {driver.problem}. Repair the driver on the host, often by reloading it"
        fix = "nvidia-smi; sudo dmesg | grep -iE 'nvrm|xid' | tail"
    what = f"is broken: {files[0]}{more} exists, and {what}. Runs would train on the CPU"
    return Finding("the NVIDIA driver", what, fix, Blocks.training)


def _application(facts: Facts) -> Iterator[Finding]:
    """Training's own modules that do not load, unless a finding about what they need already says why."""
    application, te = facts.application, facts.transformer_engine
    is_explained = any(unmet.installed is None for unmet in _unmet(facts))
    if not isinstance(application, Failure) or is_explained or isinstance(facts.torch, Failure):
        return
    if application.version is None:
        fix = f"{_INSTALL} --no-deps -c constraints.txt megatron-core"
    else:
        fix = f"{_INSTALL} --force-reinstall --no-deps 'megatron-core=={application.version}'"
    what = f"does not load: {application.problem}"
    if isinstance(te, Failure) and not te.is_missing:
        what += ". Transformer Engine, which megatron-core loads, does not either: fix it, or train without it"
        names = " ".join(facts.packages)
        fix = f"python -m pip uninstall --yes {names}" if names else "unset PYTHONPATH"
    elif "'megatron" in application.problem and application.version is not None:
        what += ". megatron-core is installed: another folder named megatron comes first on Python's path"
        fix = 'unset PYTHONPATH; python -c "import megatron; print(megatron.__path__)"'
    else:
        for library, failure in _broken_libraries(facts):
            if library.loaded_by_core and _ended_by(failure.problem) == _ended_by(application.problem):
                what += (
                    f". {library.title}, which megatron-core loads, fails in the same way: fix it, or train without it"
                )
                fix = _remove(library)
    yield Finding("training", what, fix, Blocks.training)


def _broken_libraries(facts: Facts) -> Iterator[tuple[Library, Failure]]:
    """Features' libraries that are installed and cannot be used."""
    for library in LIBRARIES:
        found = facts.libraries[library.name]
        if isinstance(found, Failure) and not found.is_missing:
            yield library, found


def _remove(library: Library) -> str:
    return f"python -m pip uninstall --yes {library.distribution}"


def _ended_by(problem: str) -> str:
    """The problem without the process's first words, in parentheses, which may be another library's warning."""
    return problem.partition(" (")[0]


def _libraries(facts: Facts, torch: Torch) -> Iterator[Finding]:
    """Findings about the libraries that a run looks for on a machine with GPUs."""
    te, torchao = facts.transformer_engine, facts.torchao
    if isinstance(te, Failure):
        yield Finding(_TE, *_why_not_loaded(te, torch, facts), Blocks.fp8)
    else:
        if len(te.cudnn_folders) > 1:
            what = (
                f"is loaded twice, from {' and '.join(te.cudnn_folders)}. Fused attention then fails with "
                "CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED"
            )
            yield Finding("cuDNN", what, _use_libraries_of(torch), Blocks.training)
        yield from _fp8_layer(f"{_TE} {te.version}", te.product_problem, _rebuild(te.version), Blocks.fp8)
    for library, failure in _broken_libraries(facts):
        what = f"is installed and cannot be used: {failure.problem}. Training works without it, but slower"
        fix = f"{_remove(library)} && {install_command(library.extra)}"
        yield Finding(library.title, what, fix, Blocks.nothing)
    fix = f"python -m pip uninstall --yes torchao && {install_command('torchao')}"
    if not isinstance(torchao, Failure):
        yield from _fp8_layer(f"TorchAO {torchao.version}", torchao.product_problem, fix, Blocks.nothing)
    elif not torchao.is_missing:
        what = f"is installed and cannot be used: {torchao.problem}. Its recipes (model.fp8_backend=torchao) do not run"
        yield Finding("TorchAO", what, fix, Blocks.nothing)


def _fp8_layer(about: str, problem: str | None, fix: str, blocks: Blocks) -> Iterator[Finding]:
    if problem is not None:
        what = f"loads, and a small FP8 layer fails: {problem}"
        yield Finding(about, what, _unless_taken(problem, fix), blocks)


def _unless_taken(problem: str, fix: str) -> str:
    """The fix, unless the GPU fails because other processes use it, and no library is to blame."""
    return _WHO_HAS_IT if "out of memory" in problem or "busy or unavailable" in problem else fix


def _why_not_loaded(te: Failure, torch: Torch, facts: Facts) -> tuple[str, str]:
    """What is wrong with a TE that is missing or broken, and the fix."""
    if te.is_missing:
        without = "runs use megatron-core's local layers, with TorchAO's FP8 recipes only"
        return f"is not installed: {without}", install_command("te")
    for pattern, cause, fix in _causes(te, torch, facts):
        if re.search(pattern, te.problem):
            return f"does not load: {te.problem}. {cause}", fix
    return f"does not load: {te.problem}", _rebuild(te.version)


def _causes(te: Failure, torch: Torch, facts: Facts) -> Iterator[tuple[str, str, str]]:
    """Pattern of the error, its cause, and the fix; the first pattern that matches counts."""
    kernels = [name for name in facts.packages if name.startswith("transformer-engine-cu")]
    if torch.cuda is not None and kernels and f"transformer-engine-cu{_major(torch.cuda)}" not in kernels:
        cause = f"{kernels[0]} is for another CUDA than PyTorch {torch.version}, which is built for {torch.cuda}"
        yield "", cause, f"python -m pip uninstall --yes {kernels[0]} && {install_command('te')}"
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
        _SEE_GPUS,
    )
    not_found = "shared object not found|cannot open shared object file"
    yield not_found, "The library is not on the search path", _use_libraries_of(torch)
    missing = re.search(r"No module named '(\w+)'", te.problem)
    if missing:
        yield "", "It needs that module", f"{_INSTALL} {missing[1]}"


def _rebuild(version: str | None) -> str:
    """Builds TE's PyTorch part again, against the installed PyTorch."""
    package = f"transformer-engine-torch=={version}" if version else "transformer-engine-torch"
    return f"{_INSTALL} --no-build-isolation --no-cache-dir --force-reinstall --no-deps {package}"


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


def _use_libraries_of(torch: Torch) -> str:
    """Puts the CUDA libraries of PyTorch's own wheels before the system's."""
    major = 13 if torch.cuda is None else _major(torch.cuda)
    # From CUDA 13 on all but cuDNN and NCCL are in one folder.
    cuda = [f"cu{major}"] if major >= 13 else ["cublas", "cuda_runtime", "cuda_nvrtc"]
    folders = ":".join(f"{torch.site}/nvidia/{name}/lib" for name in ("cudnn", "nccl", *cuda))
    return f"export CUDNN_HOME={torch.site}/nvidia/cudnn LD_LIBRARY_PATH={folders}:$LD_LIBRARY_PATH"


def _surroundings(facts: Facts, torch: Torch) -> Iterator[Finding]:
    """Findings about the environment of a machine with GPUs."""
    environment, shared = facts.environment, facts.shared_memory_gib
    still_on = [name for name, value in MULTICAST_OFF.items() if environment.get(name) != value]
    if environment.get(NO_MULTICAST) == MULTICAST_OFF[NO_MULTICAST] and still_on:
        what = "says that this host has no NVLink multicast; libraries other than NCCL may still try it"
        fix = "export " + " ".join(f"{name}={MULTICAST_OFF[name]}" for name in still_on)
        yield Finding(f"{NO_MULTICAST}={MULTICAST_OFF[NO_MULTICAST]}", what, fix, Blocks.nothing)
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections not in (None, "1") and torch.gpus[0].compute_capability < BLACKWELL:
        what = (
            "costs tensor and context parallel runs the overlap of communication with matrix products, which needs 1; "
            "a run sets 1 where the variable is unset"
        )
        fix = "unset CUDA_DEVICE_MAX_CONNECTIONS"
        yield Finding(f"CUDA_DEVICE_MAX_CONNECTIONS={connections}", what, fix, Blocks.nothing)
    if shared is not None and shared < _SHARED_MEMORY_GIB and len(torch.gpus) > 1:
        what = (
            f"has {shared * 1024:.0f} MiB: NCCL's ranks and data workers share buffers there and die of a bus "
            "error when it is full"
        )
        yield Finding("/dev/shm", what, _SEE_GPUS, Blocks.nothing)
