"""What is wrong on a machine, in its libraries' own words, and the command that fixes it, from the facts alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from gpt_pretrain.config.errors import install_command
from gpt_pretrain.doctor.facts import Facts, Failure, Requirement, Torch
from gpt_pretrain.features.registry import libraries
from gpt_pretrain.run.platform import Library

# Where PyTorch comes from the machine's image, it must not be replaced: a fix names the one package that is missing.
_INSTALL, _UNINSTALL = "python -m pip install", "python -m pip uninstall --yes"
_SEE_GPUS = "docker run --gpus all --ipc=host …"
_WHO_HAS_IT = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"
_LOOK_AT_DRIVER = "env | grep CUDA_VISIBLE_DEVICES; nvidia-smi; sudo dmesg | grep -iE 'nvrm|xid' | tail"
# Transformer Engine's packages must have one version, for PyTorch's CUDA, and be built against this PyTorch.
_REMOVE_TE = f"{_UNINSTALL} transformer-engine transformer-engine-torch transformer-engine-cu12 transformer-engine-cu13"
_REINSTALL_TE = f"{_REMOVE_TE} && {install_command('te')} --no-cache-dir"


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
    # Without a GPU a run looks for none of these.
    if isinstance(facts.torch, Torch) and facts.torch.gpus:
        found += _libraries(facts)
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
    torch, driver = facts.torch, facts.driver
    if isinstance(torch, Failure):
        if not any(unmet.needed.startswith("torch") and unmet.installed is None for unmet in _unmet(facts)):
            version = f"=={torch.version}" if torch.version else ""
            fix = f"{_INSTALL} --force-reinstall 'torch{version}'"
            yield Finding("PyTorch", f"does not load: {torch.problem}", fix, Blocks.training)
        return
    about = f"PyTorch {torch.version}"
    has_gpus = bool(torch.gpus or facts.device_files) or not isinstance(driver, Failure)
    if torch.cuda is None and has_gpus:
        # A driver that fits is assumed with a GPU; the libraries still have to be those for a GPU.
        although = "there are GPUs" if facts.assumed_gpu is None else f"--assume-gpu is {facts.assumed_gpu}"
        what = f"is built without CUDA, although {although}: runs would train on the CPU"
        fix = f"{_INSTALL} --force-reinstall 'torch=={torch.version.partition('+')[0]}'"
        yield Finding(about, what, fix, Blocks.training)
    elif not has_gpus:
        what = (
            "has no GPU, or no NVIDIA driver. Small models train on the CPU, and FP8 is emulated there "
            "(model.fp8_emulate=true). A container sees only the GPUs that it was started with"
        )
        yield Finding("this machine", what, _SEE_GPUS, Blocks.nothing)
    elif not torch.gpus:
        of_driver = f"; nvidia-smi fails: {driver.problem}" if isinstance(driver, Failure) else ""
        what = f"can use none of this machine's GPUs, and runs would train on the CPU: {torch.why_no_gpu}{of_driver}"
        yield Finding(about, what, _LOOK_AT_DRIVER, Blocks.training)
    elif torch.product_problem is not None:
        what = f"does not compute on {torch.gpus[0].name}: {torch.product_problem}"
        yield Finding(about, what, _unless_taken(torch.product_problem, f"{_INSTALL} --upgrade torch"), Blocks.training)


def _application(facts: Facts) -> Iterator[Finding]:
    """Training's own modules that do not load, unless a finding about what they need already says why."""
    application, te = facts.application, facts.transformer_engine
    is_explained = any(unmet.installed is None for unmet in _unmet(facts))
    if not isinstance(application, Failure) or is_explained or isinstance(facts.torch, Failure):
        return
    what = f"does not load: {application.problem}"
    reinstall = "--no-deps -c constraints.txt megatron-core"
    if application.version is not None:
        what += ". If another folder named megatron comes first on Python's path, unset PYTHONPATH"
        reinstall = f"--force-reinstall --no-deps 'megatron-core=={application.version}'"
    fix = f"{_INSTALL} {reinstall}"
    without = [(library.title, f"{_UNINSTALL} {library.distribution}") for library, _ in _broken(facts, by_core=True)]
    if isinstance(te, Failure) and not te.is_missing:
        without.insert(0, ("Transformer Engine", _REMOVE_TE))
    if without:
        title, fix = without[0]
        what = f"does not load: {application.problem}. {title}, which megatron-core loads, does not either"
    yield Finding("training", what, fix, Blocks.training)


def _broken(facts: Facts, *, by_core: bool = False) -> Iterator[tuple[Library, Failure]]:
    """Features' libraries that are installed and cannot be used; of those that megatron-core loads if `by_core`."""
    for library in libraries():
        found = facts.libraries[library.name]
        if isinstance(found, Failure) and not found.is_missing and (library.loaded_by_core or not by_core):
            yield library, found


def _libraries(facts: Facts) -> Iterator[Finding]:
    """Findings about the libraries that a run looks for on a machine with GPUs."""
    te, torchao = facts.transformer_engine, facts.torchao
    if not isinstance(te, Failure):
        yield from _fp8_layer(f"Transformer Engine {te.version}", te.product_problem, _REINSTALL_TE, Blocks.fp8)
    elif te.is_missing:
        what = "is not installed: runs use megatron-core's local layers, with TorchAO's FP8 recipes only"
        yield Finding("Transformer Engine", what, install_command("te"), Blocks.fp8)
    else:
        yield Finding("Transformer Engine", f"does not load: {te.problem}", _REINSTALL_TE, Blocks.fp8)
    for library, failure in _broken(facts):
        what = f"is installed and cannot be used: {failure.problem}. Training works without it, but slower"
        fix = f"{_UNINSTALL} {library.distribution} && {install_command(library.extra)}"
        yield Finding(library.title, what, fix, Blocks.nothing)
    fix = f"{_UNINSTALL} torchao && {install_command('torchao')}"
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
