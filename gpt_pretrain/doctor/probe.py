"""The examination of this machine, one library at a time, each in a process of its own.

A library that was built for another PyTorch may end the process that imports it. So `examine` starts a process
(`python -m gpt_pretrain.doctor.probe NAME FILE`) for each probe, which pickles what it finds into FILE, since libraries
print what they like on standard output; no file means that the process died. All probes run at once, except that those
which may touch a GPU run one after the other: a GPU in exclusive-process mode takes one process at a time.
"""

import faulthandler
import importlib.metadata
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from gpt_pretrain.doctor.facts import Driver, Facts, Failure, Gpu, Loaded, Requirement, Torch
from gpt_pretrain.features.registry import libraries
from gpt_pretrain.launch.environment import NVIDIA_SMI, ask_driver, device_files, installed_version
from gpt_pretrain.run import platform
from gpt_pretrain.run.platform import Library

# What features call, by the name that it is installed by.
_LIBRARIES = {library.distribution: library for library in libraries()}
# An import from a cold network file system takes tens of seconds; one that takes minutes hangs.
_TIMEOUT_S = 180
# Width of the products that are tried: a multiple of 16, as FP8 asks.
_SMALL = 64


def examine(assumed_gpu: Gpu | None = None) -> Facts:
    """Looks at everything, for as long as the slowest import takes: about ten seconds, half a minute on a GPU."""
    application = "application" if assumed_gpu is None else "application_on_gpu"
    files = device_files()
    on_gpu = ["torch", "transformer_engine", *_LIBRARIES, "torchao", "apex", application]
    queues = [on_gpu] if files else [[name] for name in on_gpu]
    found = run_probes([*queues, ["driver"], ["requirements"]])
    torch = found["torch"]
    if assumed_gpu is not None and isinstance(torch, Torch):
        torch = replace(torch, gpus=(assumed_gpu,), why_no_gpu=None, product_problem=None)
    return Facts(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        torch=torch,
        driver=found["driver"],
        device_files=tuple(files),
        transformer_engine=found["transformer_engine"],
        libraries={library.name: found[distribution] for distribution, library in _LIBRARIES.items()},
        torchao=found["torchao"],
        apex=found["apex"],
        application=found[application],
        requirements=found["requirements"],
        environment=dict(os.environ),
        assumed_gpu=None if assumed_gpu is None else assumed_gpu.name,
    )


def run_probes(queues: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Runs the probes of each queue one after the other, and all queues at once; returns what each found."""
    with (
        tempfile.TemporaryDirectory(prefix="gpt_pretrain-doctor-") as folder,
        ThreadPoolExecutor(len(queues)) as threads,
    ):

        def run(names: Sequence[str]) -> dict[str, Any]:
            return {name: _run_probe(name, Path(folder) / name) for name in names}

        return {name: found for answers in threads.map(run, queues) for name, found in answers.items()}


def _run_probe(name: str, path: Path) -> Any:
    version = installed_version("megatron-core" if name.startswith("application") else name)
    stderr = path.with_suffix(".stderr")
    command = [sys.executable, "-m", "gpt_pretrain.doctor.probe", name, str(path)]
    try:
        with stderr.open("wb") as file:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file,
                timeout=_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Failure(problem=f"loading it took more than {_TIMEOUT_S} s", version=version)
    if not path.exists():
        said = stderr.read_text(errors="replace").strip().splitlines()
        code = done.returncode
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = f" ({said[0]})" if said else ""
        return Failure(problem=f"loading it ended Python with {ended}{why}", version=version)
    found = pickle.loads(path.read_bytes())
    return replace(found, version=version) if isinstance(found, Failure) else found


class _Unusable(Exception):
    """Why runs do not use a library that is installed, in the words of `run.platform`."""


def _first_line(error: Exception) -> str:
    """The error's type and first line: a traceback or advice for developers follows."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, _Unusable) else f"{type(error).__name__}: {line}"


def _fails(work: Callable[[], None]) -> str | None:
    try:
        work()
    # The driver, CUDA and the libraries raise errors of many types; every one is an answer.
    except Exception as error:
        return _first_line(error)
    return None


def _probe_torch() -> Torch:
    """PyTorch, its GPUs, and whether they compute."""
    import torch

    cuda = torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if cuda else 0

    def multiply() -> None:
        x = torch.ones(_SMALL, _SMALL, device="cuda", dtype=torch.bfloat16)
        assert (x @ x).sum().item() == _SMALL**3, "a BF16 product gave a wrong result"

    properties = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    return Torch(
        # A plain string: its own type could not be unpickled without PyTorch.
        version=str(torch.__version__),
        cuda=torch.version.cuda,
        gpus=tuple(
            Gpu(name=each.name, compute_capability=(each.major, each.minor), memory_gib=each.total_memory / 2**30)
            for each in properties
        ),
        why_no_gpu=None if cuda else _fails(torch.cuda.init),
        product_problem=_fails(multiply) if cuda else None,
    )


def _probe_driver() -> Driver:
    version, gpus = ask_driver()
    return Driver(version=version, gpus=tuple(gpus))


def _probe_transformer_engine() -> Loaded:
    """Transformer Engine beside PyTorch, and whether a layer of it computes in FP8."""
    version = importlib.metadata.version("transformer_engine")  # its absence is the answer

    import torch
    import transformer_engine.pytorch as te

    def train_a_layer() -> None:
        layer = te.Linear(_SMALL, _SMALL, params_dtype=torch.bfloat16, device="cuda")
        x = torch.ones(_SMALL, _SMALL, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(enabled=True):
            y = layer(x)
        y.sum().backward()
        torch.cuda.synchronize()

    has_fp8 = torch.cuda.is_available() and te.is_fp8_available()
    return Loaded(version=version, product_problem=_fails(train_a_layer) if has_fp8 else None)


def _usable_version(name: str, find: Callable[[], platform.Found]) -> str:
    """The version of a library that a run looks up by `find`, unless it does not use it."""
    importlib.metadata.version(name)  # its absence is the answer
    version, problem = find()
    if version is None:
        raise _Unusable(problem)
    return version


def _probe_library(library: Library) -> Loaded:
    return Loaded(version=_usable_version(library.distribution, library.find))


def _probe_torchao() -> Loaded:
    """TorchAO, and whether a layer of it computes in FP8."""
    version = _usable_version("torchao", platform.torchao)
    import torch
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    def train_a_layer() -> None:
        plain = torch.nn.Linear(_SMALL, _SMALL, bias=False, dtype=torch.bfloat16, device="cuda")
        x = torch.ones(_SMALL, _SMALL, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        Float8Linear.from_float(plain, Float8LinearConfig())(x).sum().backward()
        torch.cuda.synchronize()

    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= platform.FP8_CAPABILITY
    return Loaded(version=version, product_problem=_fails(train_a_layer) if has_fp8 else None)


def _probe_apex() -> Loaded:
    import apex  # noqa: F401  its absence is the answer
    import torch  # noqa: F401  apex's kernels find its libraries once it is loaded

    parts = platform.apex_parts()
    loaded = [part.removeprefix("apex_").replace("_", " ") for part, loads in parts.items() if loads]
    remark = ", ".join(loaded) or "none of its compiled parts load"
    return Loaded(version=importlib.metadata.version("apex"), remark=remark, parts=parts)


def _probe_application() -> Loaded:
    """Everything that a run imports on this machine, in the order of `python -m gpt_pretrain`."""
    from gpt_pretrain.megatron.cpu import install_cpu_device

    install_cpu_device()
    return _probe_application_on_gpu()


def _probe_application_on_gpu() -> Loaded:
    """Everything that a run imports where it finds a GPU: Transformer Engine and apex by way of megatron-core, too."""
    import gpt_pretrain.rules.jobs
    from gpt_pretrain.launch.environment import prepare_libraries

    prepare_libraries()
    import megatron.core

    import gpt_pretrain.training.run  # noqa: F401  loading is the question

    # After a plus sign its version has the commit of the folder that it is imported in.
    return Loaded(version=megatron.core.__version__.partition("+")[0], remark="training loads")


def _probe_requirements() -> tuple[Requirement, ...]:
    """Declared requirements of this project that are not met; a checkout that is not installed declares none."""
    from packaging import requirements

    declared: list[str] = []
    with suppress(importlib.metadata.PackageNotFoundError):
        declared = importlib.metadata.requires("gpt_pretrain") or []
    unmet = []
    for each in map(requirements.Requirement, declared):
        # Requirements of an extra have a marker that is false without it.
        if each.marker is not None and not each.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(each.name)
        if installed is None or not each.specifier.contains(installed, prereleases=True):
            unmet.append(Requirement(needed=str(each), installed=installed))
    return tuple(unmet)


# The probe of a library has the name that the library is installed by.
_PROBES: dict[str, Callable[[], object]] = {
    "torch": _probe_torch,
    "driver": _probe_driver,
    "transformer_engine": _probe_transformer_engine,
    **{distribution: partial(_probe_library, library) for distribution, library in _LIBRARIES.items()},
    "torchao": _probe_torchao,
    "apex": _probe_apex,
    "application": _probe_application,
    "application_on_gpu": _probe_application_on_gpu,
    "requirements": _probe_requirements,
}


def main(name: str, path: Path) -> None:
    """Pickles what a probe found, or why it found nothing, into a file."""
    # A fatal signal then prints where it struck.
    faulthandler.enable()
    try:
        found = _PROBES[name]()
    # Loading a broken library fails in as many ways as computing with it.
    except Exception as error:
        # Another name would be that of a module that the library itself lacks.
        is_missing = getattr(error, "name", None) == name or getattr(error, "filename", None) == NVIDIA_SMI
        found = Failure(problem=_first_line(error), is_missing=is_missing)
    path.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
