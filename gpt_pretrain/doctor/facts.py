"""What the doctor finds on a machine, as plain values that can describe any machine, and the examination of this one.

The examination starts the probes, each in a process of its own, and reads their answers. All probes run at once, except
that those which may touch a GPU run one after the other: a GPU in exclusive-process mode takes one process at a time.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from gpt_pretrain.doctor.probe import installed_version
from gpt_pretrain.launch.environment import device_files
from gpt_pretrain.plan import machine
from gpt_pretrain.spec.platform import MULTICAST_OFF, RECIPE_VARIABLES


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A library that is not installed or does not load."""

    problem: str
    """The error's type and message, or what ended the process that tried to load it."""
    is_missing: bool = False
    """The library itself is not installed."""
    version: str | None = None
    """The installed version, if any."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """NVIDIA's driver, as found without PyTorch."""

    version: str
    gpus: tuple[str, ...]
    """Names of the GPUs; CUDA_VISIBLE_DEVICES hides none of them."""
    cuda: tuple[int, int] | None
    """Newest CUDA that the driver runs; None where libcuda does not say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU, as PyTorch sees it."""

    name: str
    compute_capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Torch:
    """PyTorch, loaded."""

    version: str
    cuda: str | None
    """CUDA version that it was built for: "13.0"; None for a build without CUDA."""
    cudnn: str | None
    nccl: str | None
    site: str
    """The folder that torch/ is installed in, and nvidia/ with its libraries."""
    gpus: tuple[Gpu, ...]
    why_no_gpu: str | None
    """Why it can use no GPU, in its own words."""
    product_problem: str | None
    """How a small BF16 product on the first GPU failed."""
    peer_access: bool | None
    """The first GPU reads the memory of the second; None with fewer than two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerEngine:
    """Transformer Engine (TE), loaded."""

    version: str
    cudnn: str
    cublaslt: str
    cudnn_folders: tuple[str, ...]
    """Where the cuDNN libraries of a process with PyTorch and TE were loaded from; more than one folder is a mix."""
    scales_on_device: bool
    """It has `multi_tensor_scale_tensor`, the kernel that clips gradients without waiting for the device."""
    product_problem: str | None
    """How a small FP8 layer on the first GPU failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttention:
    """FlashAttention-4, loaded, and new enough for runs to use it."""

    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchAO:
    """TorchAO, loaded, and of the version that runs use."""

    version: str
    product_problem: str | None
    """How a small FP8 layer on the first GPU failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Apex:
    """apex, installed; each part loads or does not."""

    version: str
    parts: Mapping[str, bool]
    """Field of `Platform` → whether it loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """gpt_pretrain's training, loaded with all that it imports."""

    megatron_core: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A package that this project needs and that is missing or has a version that it does not allow."""

    needed: str
    """As in pyproject.toml: "hydra-core~=1.3"."""
    installed: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """A machine, its libraries and its environment."""

    python: str
    executable: str
    torch: Torch | Failure
    driver: Driver | Failure
    device_files: tuple[str, ...]
    """How processes reach the GPUs, `/dev/nvidia0` and so on; they exist even without a working driver."""
    transformer_engine: TransformerEngine | Failure
    flash_attention: FlashAttention | Failure
    torchao: TorchAO | Failure
    apex: Apex | Failure
    application: Application | Failure
    requirements: tuple[Requirement, ...] | Failure | None
    """Unmet requirements; None where the project runs from a checkout that is not installed."""
    packages: Mapping[str, str]
    """Transformer Engine's packages → version; they must fit each other."""
    environment: Mapping[str, str]
    """The set variables among those that the doctor looks at."""
    shared_memory_gib: float | None
    """Size of /dev/shm; None where there is none."""
    assumed_gpu: str | None = None
    """The GPU that --assume-gpu names; it stands in for the machine's own."""


class Blocks(Enum):
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
    """The rest of the sentence: what is wrong and what follows from it, without a full stop."""
    fix: str | None
    """A shell command; None where no command mends it, and `what` says who can."""
    blocks: Blocks


_WATCHED = (
    *MULTICAST_OFF,
    *RECIPE_VARIABLES,
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "CUDNN_HOME",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)
_PACKAGES = ("transformer-engine", "transformer-engine-torch", "transformer-engine-cu12", "transformer-engine-cu13")
# An import from a cold network file system takes tens of seconds; one that takes minutes hangs.
_PROBE_TIMEOUT_S = 180


def examine(assumed_gpu: machine.Gpu | None = None) -> Facts:
    """Looks at everything, for as long as the slowest import takes: about ten seconds, half a minute on a GPU."""
    application = "application" if assumed_gpu is None else "application_on_gpu"
    files = device_files()
    on_gpu = ["torch", "transformer_engine", "flash-attn-4", "torchao", "apex", application]
    queues = [on_gpu] if files else [[name] for name in on_gpu]
    answers = run_probes([*queues, ["driver"], ["requirements"]])
    shm = Path("/dev/shm")
    return Facts(
        python=".".join(map(str, sys.version_info[:3])),
        executable=sys.executable,
        torch=_read_torch(answers["torch"], assumed_gpu),
        driver=_read(Driver, answers["driver"]),
        device_files=tuple(files),
        transformer_engine=_read(TransformerEngine, answers["transformer_engine"]),
        flash_attention=_read(FlashAttention, answers["flash-attn-4"]),
        torchao=_read(TorchAO, answers["torchao"]),
        apex=_read(Apex, answers["apex"]),
        application=_read(Application, answers[application]),
        requirements=_read_requirements(answers["requirements"]),
        packages={name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        environment={name: os.environ[name] for name in _WATCHED if name in os.environ},
        shared_memory_gib=shutil.disk_usage(shm).total / 2**30 if shm.is_dir() else None,
        assumed_gpu=None if assumed_gpu is None else assumed_gpu.name,
    )


def run_probes(queues: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Runs the probes of each queue one after the other, and all queues at once.

    Returns:
        Probe → what it found as JSON has it, or a `Failure`.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gpt_pretrain-doctor-") as folder,
        ThreadPoolExecutor(len(queues)) as threads,
    ):

        def run(names: Sequence[str]) -> dict[str, Any]:
            return {name: _run_probe(name, Path(folder) / name) for name in names}

        return {name: answer for answers in threads.map(run, queues) for name, answer in answers.items()}


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
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return Failure(problem=f"loading it took more than {_PROBE_TIMEOUT_S} s", version=version)
    if not path.exists():
        said = stderr.read_text(errors="replace").strip().splitlines()
        code = done.returncode
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = f" ({said[0]})" if said else ""
        return Failure(problem=f"loading it ended Python with {ended}{why}", version=version)
    answer = json.loads(path.read_text(encoding="utf-8"))
    return Failure(**answer["failed"], version=version) if "failed" in answer else answer["found"]


def _frozen(value: Any) -> Any:
    """JSON has lists where facts have tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read[Kind](kind: type[Kind], found: Any) -> Kind | Failure:
    return found if isinstance(found, Failure) else kind(**{name: _frozen(value) for name, value in found.items()})


def _read_torch(found: Any, assumed_gpu: machine.Gpu | None) -> Torch | Failure:
    if isinstance(found, Failure):
        return found
    if assumed_gpu is not None:
        gpu = {name: getattr(assumed_gpu, name) for name in ("name", "compute_capability", "memory_gib")}
        found = {**found, "gpus": [gpu], "why_no_gpu": None, "product_problem": None, "peer_access": None}
    return _read(Torch, {**found, "gpus": [_read(Gpu, gpu) for gpu in found["gpus"]]})


def _read_requirements(found: Any) -> tuple[Requirement, ...] | Failure | None:
    return tuple(Requirement(**unmet) for unmet in found) if isinstance(found, list) else found
