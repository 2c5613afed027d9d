"""One look at one library, in a process of its own: `python -m gpt_pretrain.doctor.probe NAME FILE`.

A library that was built for another PyTorch may end the process that imports it. The probe writes what it finds to FILE
as JSON, since libraries print what they like on standard output; no file means that the process died.
"""

import ctypes
import faulthandler
import importlib.metadata
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpt_pretrain.launch.environment import NVIDIA_SMI, ask_driver

# Width of the products that are tried: a multiple of 16, as FP8 asks.
_SMALL = 64


class _Unusable(Exception):
    """Why runs do not use a library that is installed, as `spec.platform` tells it."""


def _first_line(error: Exception) -> str:
    """The error's type and first line: what follows is a traceback or advice for developers."""
    line = str(error).strip().partition("\n")[0]
    return line if isinstance(error, _Unusable) else f"{type(error).__name__}: {line}"


def _fails(work: Callable[[], None]) -> str | None:
    try:
        work()
    # The driver, CUDA and the libraries raise errors of many types; every one is an answer.
    except Exception as error:
        return _first_line(error)
    return None


def probe_torch() -> dict[str, Any]:
    """PyTorch, its GPUs, and whether they compute."""
    import torch

    cuda = torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if cuda else 0

    def multiply() -> None:
        x = torch.ones(_SMALL, _SMALL, device="cuda", dtype=torch.bfloat16)
        assert (x @ x).sum().item() == _SMALL**3, "a BF16 product gave a wrong result"

    cudnn, nccl = torch.backends.cudnn.version(), torch.cuda.nccl.version() if torch.version.cuda else None
    properties = [torch.cuda.get_device_properties(index) for index in range(num_gpus)]
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": None if cudnn is None else _cudnn_version(cudnn),
        "nccl": None if nccl is None else ".".join(map(str, nccl)),
        "site": str(Path(torch.__file__).parents[1]),
        "gpus": [
            {"name": each.name, "compute_capability": [each.major, each.minor], "memory_gib": each.total_memory / 2**30}
            for each in properties
        ],
        "why_no_gpu": None if cuda else _fails(torch.cuda.init),
        "product_problem": _fails(multiply) if cuda else None,
        "peer_access": torch.cuda.can_device_access_peer(0, 1) if num_gpus > 1 else None,
    }


def _cudnn_version(number: int) -> str:
    """The number that cuDNN gives as its version, as text: 91900 is 9.19.0."""
    major, rest = divmod(number, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def probe_driver() -> dict[str, Any]:
    """NVIDIA's driver, without PyTorch."""
    version, gpus = ask_driver()
    return {"version": version, "gpus": gpus, "cuda": _driver_cuda()}


def _driver_cuda() -> tuple[int, int] | None:
    """The newest CUDA that the driver runs."""
    try:
        libcuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    number = ctypes.c_int()
    if libcuda.cuDriverGetVersion(ctypes.byref(number)) != 0:
        return None
    return number.value // 1000, number.value % 1000 // 10


def probe_transformer_engine() -> dict[str, Any]:
    """Transformer Engine beside PyTorch, and whether a layer of it computes in FP8."""
    importlib.metadata.version("transformer_engine")  # its absence is the answer

    import torch
    import transformer_engine.pytorch as te
    import transformer_engine_torch
    from transformer_engine.pytorch import optimizers

    def train_a_layer() -> None:
        layer = te.Linear(_SMALL, _SMALL, params_dtype=torch.bfloat16, device="cuda")
        x = torch.ones(_SMALL, _SMALL, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with te.autocast(enabled=True):
            y = layer(x)
        y.sum().backward()
        torch.cuda.synchronize()

    has_fp8 = torch.cuda.is_available() and te.is_fp8_available()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libcudnn" in line}
    return {
        "version": importlib.metadata.version("transformer_engine"),
        "cudnn": _cudnn_version(transformer_engine_torch.get_cudnn_version()),
        "cublaslt": str(transformer_engine_torch.get_cublasLt_version()),
        "cudnn_folders": sorted({str(Path(path).resolve().parent) for path in mapped}),
        "scales_on_device": hasattr(optimizers, "multi_tensor_scale_tensor"),
        "product_problem": _fails(train_a_layer) if has_fp8 else None,
    }


def probe_flash_attention() -> dict[str, Any]:
    """FlashAttention-4, as a run looks it up."""
    importlib.metadata.version("flash-attn-4")  # its absence is the answer

    from gpt_pretrain.spec.platform import flash_attention

    version, problem = flash_attention()
    if problem is not None:
        raise _Unusable(problem)
    return {"version": version}


def probe_torchao() -> dict[str, Any]:
    """TorchAO, as a run looks it up, and whether a layer of it computes in FP8."""
    importlib.metadata.version("torchao")  # its absence is the answer

    from gpt_pretrain.spec.platform import FP8_CAPABILITY, torchao

    version, problem = torchao()
    if problem is not None:
        raise _Unusable(problem)
    import torch
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    def train_a_layer() -> None:
        plain = torch.nn.Linear(_SMALL, _SMALL, bias=False, dtype=torch.bfloat16, device="cuda")
        x = torch.ones(_SMALL, _SMALL, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        Float8Linear.from_float(plain, Float8LinearConfig())(x).sum().backward()
        torch.cuda.synchronize()

    has_fp8 = torch.cuda.is_available() and torch.cuda.get_device_capability() >= FP8_CAPABILITY
    return {"version": version, "product_problem": _fails(train_a_layer) if has_fp8 else None}


def probe_apex() -> dict[str, Any]:
    """The parts of apex that load."""
    import apex  # noqa: F401  its absence is the answer
    import torch  # noqa: F401  apex's kernels find its libraries once it is loaded

    from gpt_pretrain.spec.platform import apex_parts

    return {"version": importlib.metadata.version("apex"), "parts": apex_parts()}


def probe_application() -> dict[str, Any]:
    """Everything that a run imports on this machine, in the order of `python -m gpt_pretrain`."""
    from gpt_pretrain.megatron.cpu import install_cpu_device

    install_cpu_device()
    return probe_application_on_gpu()


def probe_application_on_gpu() -> dict[str, Any]:
    """Everything that a run imports where it finds a GPU: Transformer Engine and apex by way of megatron-core, too."""
    import gpt_pretrain.rules.gate
    from gpt_pretrain.launch.environment import prepare_libraries

    prepare_libraries()
    import megatron.core

    import gpt_pretrain.training.run  # noqa: F401  loading is the question

    # After a plus sign its version has the commit of the folder that it is imported in.
    return {"megatron_core": megatron.core.__version__.partition("+")[0]}


def probe_requirements() -> list[dict[str, str | None]] | None:
    """Declared requirements of this project that are not met; None where it is not installed itself."""
    from packaging.requirements import Requirement

    try:
        declared = importlib.metadata.requires("gpt_pretrain") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    unmet = []
    for requirement in map(Requirement, declared):
        # Requirements of an extra have a marker that is false without it.
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = installed_version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            unmet.append({"needed": str(requirement), "installed": installed})
    return unmet


def installed_version(name: str) -> str | None:
    """The version of an installed package, loadable or not."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


# The probe of a library has the name that the library is installed by.
PROBES: dict[str, Callable[[], object]] = {
    "torch": probe_torch,
    "driver": probe_driver,
    "transformer_engine": probe_transformer_engine,
    "flash-attn-4": probe_flash_attention,
    "torchao": probe_torchao,
    "apex": probe_apex,
    "application": probe_application,
    "application_on_gpu": probe_application_on_gpu,
    "requirements": probe_requirements,
}


def main(name: str, path: Path) -> None:
    """Writes what a probe found, or why it found nothing, to a file."""
    # A fatal signal then prints where it struck.
    faulthandler.enable()
    try:
        found = {"found": PROBES[name]()}
    # Loading a broken library fails in as many ways as computing with it.
    except Exception as error:
        # Another name would be that of a module that the library itself lacks.
        is_missing = getattr(error, "name", None) == name or getattr(error, "filename", None) == NVIDIA_SMI
        found = {"failed": {"problem": _first_line(error), "is_missing": is_missing}}
    path.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
