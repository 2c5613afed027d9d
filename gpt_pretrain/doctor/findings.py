"""What is wrong on a machine and the command that mends it, told from the facts alone.

The messages that are recognised are those of PyTorch 2.11, megatron-core 0.19 and Transformer Engine 2.12.
"""

from collections.abc import Iterator, Sequence

from gpt_pretrain.config.install import install_command
from gpt_pretrain.doctor.facts import Driver, Facts, Failure, Requirement, Torch
from gpt_pretrain.doctor.finding import WHO_HAS_IT, Blocks, Finding, is_taken
from gpt_pretrain.doctor.surroundings import surroundings
from gpt_pretrain.doctor.te_findings import transformer_engine_findings
from gpt_pretrain.spec.platform import leading_version

# The first driver of each CUDA major version (CUDA compatibility guide, minor version compatibility).
_FIRST_DRIVER = {11: "450 or newer", 12: "525 or newer", 13: "580 or newer"}
# BF16 came with Ampere.
_BF16_CAPABILITY = (8, 0)
_REMOVE_FLASH = "python -m pip uninstall --yes flash-attn-4"
# Where PyTorch comes from the machine's image, it must not be replaced: a fix names the one package that is missing.
_INSTALL = "python -m pip install"


def list_findings(facts: Facts) -> list[Finding]:
    """All findings, those that keep training from working first."""
    found = [
        *_requirements(facts),
        *_torch(facts),
        *_application(facts),
        *transformer_engine_findings(facts),
        *_flash_attention(facts),
        *surroundings(facts),
    ]
    return sorted(found, key=lambda finding: list(Blocks).index(finding.blocks))


def _requirements(facts: Facts) -> Iterator[Finding]:
    if facts.requirements is None:
        yield Finding(
            about="gpt_pretrain",
            what="runs from a checkout that is not installed: what it needs was not compared with what is there",
            fix=f"{_INSTALL} --no-deps -e .",
            blocks=Blocks.nothing,
        )
        return
    if isinstance(facts.requirements, Failure):
        yield Finding(
            about="gpt_pretrain",
            what=f"what it needs could not be compared with what is there: {facts.requirements.problem}",
            fix=f"{_INSTALL} packaging",
            blocks=Blocks.nothing,
        )
        return
    for unmet in _unmet(facts):
        there = "which is not installed" if unmet.installed is None else f"and {unmet.installed} is installed"
        yield Finding(
            about="gpt_pretrain",
            what=f"needs {unmet.needed}, {there}",
            fix=f"{_INSTALL} '{unmet.needed}'",
            blocks=Blocks.training,
        )


def _unmet(facts: Facts) -> tuple[Requirement, ...]:
    return facts.requirements if isinstance(facts.requirements, tuple) else ()


def _torch(facts: Facts) -> Iterator[Finding]:
    torch, driver = facts.torch, facts.driver
    if isinstance(torch, Failure):
        if not any(unmet.needed.startswith("torch") and unmet.installed is None for unmet in _unmet(facts)):
            version = f"=={torch.version}" if torch.version else ""
            yield Finding(
                about="PyTorch",
                what=f"does not load: {torch.problem}",
                fix=f"{_INSTALL} --force-reinstall 'torch{version}'",
                blocks=Blocks.training,
            )
        return
    if facts.assumed_gpu is not None:
        # What is assumed is a GPU with a driver that fits; the libraries have to be those for a GPU all the same.
        if torch.cuda is None:
            yield _cpu_build(torch, f"--assume-gpu is {facts.assumed_gpu}")
        return
    if not torch.gpus:
        yield from _no_gpu(facts, torch)
        return
    gpu = torch.gpus[0]
    if torch.product_problem is not None:
        yield Finding(
            about=f"PyTorch {torch.version}",
            what=f"does not compute on {gpu.name} (compute capability "
            f"{'.'.join(map(str, gpu.compute_capability))}): {torch.product_problem}",
            fix=WHO_HAS_IT if is_taken(torch.product_problem) else f"{_INSTALL} --upgrade torch",
            blocks=Blocks.training,
        )
    if gpu.compute_capability < _BF16_CAPABILITY:
        yield Finding(
            about=gpu.name,
            what="has no BF16 units, as compute capability 8.0 and newer have: train in FP32",
            fix="python -m gpt_pretrain trainer.precision=fp32 …",
            blocks=Blocks.nothing,
        )
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if isinstance(driver, Driver) and len(driver.gpus) > len(torch.gpus) and visible is not None:
        yield Finding(
            about=f"CUDA_VISIBLE_DEVICES={visible}",
            what=f"leaves PyTorch {len(torch.gpus)} of {len(driver.gpus)} GPUs",
            fix="unset CUDA_VISIBLE_DEVICES",
            blocks=Blocks.nothing,
        )


def _cpu_build(torch: Torch, although: str) -> Finding:
    return Finding(
        about=f"PyTorch {torch.version}",
        what=f"is built without CUDA, although {although}: runs would train on the CPU",
        fix=f"{_INSTALL} --force-reinstall 'torch=={torch.version.partition('+')[0]}'",
        blocks=Blocks.training,
    )


def _no_gpu(facts: Facts, torch: Torch) -> Iterator[Finding]:
    """PyTorch uses no GPU: there is none, or something hides it."""
    driver = facts.driver
    if isinstance(driver, Failure) and facts.device_files:
        yield _broken_driver(facts.device_files, driver)
        return
    if isinstance(driver, Failure):
        broken = f"; nvidia-smi fails: {driver.problem}" if not driver.is_missing else ""
        yield Finding(
            about="this machine",
            what=f"has no GPU, or no NVIDIA driver{broken}. Small models train on the CPU, and FP8 is emulated "
            "there (model.fp8_emulate=true). A container has the GPUs that it was started with",
            fix="docker run --gpus all --ipc=host …",
            blocks=Blocks.nothing,
        )
        return
    num_gpus = len(driver.gpus)
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    if torch.cuda is None:
        yield _cpu_build(torch, f"there is {driver.gpus[0]} ({num_gpus} in all)")
    elif driver.cuda is not None and driver.cuda[0] < leading_version(torch.cuda)[0]:
        first = _FIRST_DRIVER.get(leading_version(torch.cuda)[0])
        yield Finding(
            about=f"the driver {driver.version}",
            what=f"runs CUDA up to {'.'.join(map(str, driver.cuda))}, and PyTorch {torch.version} is "
            f"built for CUDA {torch.cuda}, which needs {first or 'a newer one'}. Update it on the host, also for a "
            "container, or on a data centre GPU install CUDA's compatibility package",
            fix=f"apt-get install cuda-compat-{torch.cuda.replace('.', '-')} && "
            f"export LD_LIBRARY_PATH=/usr/local/cuda-{torch.cuda}/compat:$LD_LIBRARY_PATH",
            blocks=Blocks.training,
        )
    elif visible is not None and visible.strip() in ("", "-1"):
        yield Finding(
            about=f"CUDA_VISIBLE_DEVICES={visible!r}",
            what=f"hides all {num_gpus} GPUs: runs would train on the CPU",
            fix="unset CUDA_VISIBLE_DEVICES",
            blocks=Blocks.training,
        )
    else:
        yield Finding(
            about=f"the driver {driver.version}",
            what=f"shows {num_gpus} GPUs, and PyTorch can use none: {torch.why_no_gpu}",
            fix="nvidia-smi -q | grep -iE 'product name|mig mode|fabric|state'",
            blocks=Blocks.training,
        )


def _broken_driver(files: Sequence[str], driver: Failure) -> Finding:
    """There are GPUs, and nothing reaches them."""
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    if driver.is_missing:
        what = "there is no nvidia-smi: the driver's own libraries are missing. A container has them only if asked"
        fix = "docker run --gpus all -e NVIDIA_DRIVER_CAPABILITIES=compute,utility --ipc=host …"
    else:
        what = f"nvidia-smi fails: {driver.problem}. Mend the driver on the host, often by starting it anew"
        fix = "nvidia-smi; sudo dmesg | grep -iE 'nvrm|xid' | tail"
    return Finding(
        about="the driver of NVIDIA",
        what=f"is broken: {files[0]}{more} is there, and {what}. Runs would train on the CPU",
        fix=fix,
        blocks=Blocks.training,
    )


def _application(facts: Facts) -> Iterator[Finding]:
    """Training's own modules; not told again where a finding about what they need says why."""
    application, te, flash = facts.application, facts.transformer_engine, facts.flash_attention
    is_explained = isinstance(facts.requirements, tuple) and any(
        unmet.installed is None for unmet in facts.requirements
    )
    if not isinstance(application, Failure) or is_explained or isinstance(facts.torch, Failure):
        return
    fix = f"{_INSTALL} --force-reinstall --no-deps 'megatron-core=={application.version}'"
    if application.version is None:
        fix = f"{_INSTALL} --no-deps -c constraints.txt megatron-core"
    what = f"does not load: {application.problem}"
    if isinstance(te, Failure) and not te.is_missing:
        what += ". Transformer Engine, which megatron-core loads, does not either: mend it, or train without it"
        names = " ".join(facts.packages)
        fix = f"python -m pip uninstall --yes {names}" if names else "unset PYTHONPATH"
    elif "'megatron" in application.problem and application.version is not None:
        what += ". megatron-core is installed: another folder named megatron comes first on Python's path"
        fix = 'unset PYTHONPATH; python -c "import megatron; print(megatron.__path__)"'
    elif isinstance(flash, Failure) and _ended_by(flash.problem) == _ended_by(application.problem):
        what += ". FlashAttention-4, which megatron-core loads, fails alike: mend it, or train without it"
        fix = _REMOVE_FLASH
    yield Finding(about="training", what=what, fix=fix, blocks=Blocks.training)


def _ended_by(problem: str) -> str:
    """Without what the process wrote first, which may be another library's warning and stands in parentheses."""
    return problem.partition(" (")[0]


def _flash_attention(facts: Facts) -> Iterator[Finding]:
    """FlashAttention-4 that is installed and cannot be used; none where a run looks for none, without a GPU."""
    flash, torch = facts.flash_attention, facts.torch
    if not isinstance(flash, Failure) or flash.is_missing or isinstance(torch, Failure) or not torch.gpus:
        return
    yield Finding(
        about="FlashAttention-4",
        what=f"is installed and cannot be used: {flash.problem}. Without it nothing is lost but speed",
        fix=f"{_REMOVE_FLASH} && {install_command('flash')}",
        blocks=Blocks.nothing,
    )
