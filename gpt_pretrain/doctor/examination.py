"""Examines this machine: starts the probes, each in a process of its own, and reads their answers.

All probes run at once, except that those which may touch a GPU run one after the other: a GPU in exclusive-process
mode takes one process at a time.
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
from pathlib import Path
from typing import Any

from gpt_pretrain.doctor.facts import (
    Apex,
    Application,
    Driver,
    Facts,
    Failure,
    FlashAttention,
    Gpu,
    Requirement,
    Torch,
    TransformerEngine,
)
from gpt_pretrain.doctor.probe import installed_version
from gpt_pretrain.launch.environment import device_files
from gpt_pretrain.plan import hardware
from gpt_pretrain.spec.platform import MULTICAST_OFF, RECIPE_VARIABLES

_WATCHED = (
    *MULTICAST_OFF,
    *RECIPE_VARIABLES,
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "CUDNN_HOME",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
)
_PACKAGES = (
    "transformer-engine",
    "transformer-engine-torch",
    "transformer-engine-cu12",
    "transformer-engine-cu13",
)
# An import from a cold network file system takes tens of seconds; one that takes minutes hangs.
_PROBE_TIMEOUT_S = 180


def examine(assumed_gpu: hardware.Gpu | None = None) -> Facts:
    """Looks at everything. It takes as long as the slowest import: about ten seconds, half a minute on a GPU.

    Args:
        assumed_gpu: A GPU that stands in for the machine's own.
    """
    application = "application" if assumed_gpu is None else "application_on_gpu"
    files = device_files()
    on_gpu = ["torch", "transformer_engine", "flash-attn-4", "apex", application]
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
        flash_attention=_read_flash_attention(answers["flash-attn-4"]),
        apex=_read(Apex, answers["apex"]),
        application=_read(Application, answers[application]),
        requirements=_read_requirements(answers["requirements"]),
        packages={name: version for name in _PACKAGES if (version := installed_version(name)) is not None},
        environment={name: os.environ[name] for name in _WATCHED if name in os.environ},
        shared_memory_gib=shutil.disk_usage(shm).total / 2**30 if shm.is_dir() else None,
        assumed_gpu=None if assumed_gpu is None else assumed_gpu.name,
    )


def run_probes(queues: Sequence[Sequence[str]]) -> dict[str, dict[str, Any] | Failure]:
    """Runs the probes of each queue one after the other, and all queues at once.

    Returns:
        Probe → what it found, or how it failed.
    """
    with (
        tempfile.TemporaryDirectory(prefix="gpt_pretrain-doctor-") as folder,
        ThreadPoolExecutor(len(queues)) as threads,
    ):

        def run(names: Sequence[str]) -> dict[str, dict[str, Any] | Failure]:
            return {name: _answer(name, _start(name, path), path) for name in names for path in [Path(folder) / name]}

        return {name: answer for answers in threads.map(run, queues) for name, answer in answers.items()}


def _start(name: str, path: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "gpt_pretrain.doctor.probe", name, str(path)]
    with path.with_suffix(".stderr").open("wb") as stderr:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr)


def _answer(name: str, process: subprocess.Popen[bytes], path: Path) -> dict[str, Any] | Failure:
    try:
        code = process.wait(_PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return Failure(problem=f"loading it took more than {_PROBE_TIMEOUT_S} s", version=_version_of(name))
    if not path.exists():
        said = path.with_suffix(".stderr").read_text(errors="replace").strip().splitlines()
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        why = f" ({said[0]})" if said else ""
        return Failure(problem=f"loading it ended Python with {ended}{why}", version=_version_of(name))
    answer: Mapping[str, dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    if "failed" in answer:
        return Failure(**answer["failed"], version=_version_of(name))
    return answer["found"]


def _version_of(probe: str) -> str | None:
    return installed_version("megatron-core" if probe.startswith("application") else probe)


def _frozen(value: Any) -> Any:
    """JSON has lists where facts have tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def _read[Kind](kind: type[Kind], found: dict[str, Any] | Failure) -> Kind | Failure:
    return found if isinstance(found, Failure) else kind(**{name: _frozen(value) for name, value in found.items()})


def _read_torch(found: dict[str, Any] | Failure, assumed_gpu: hardware.Gpu | None) -> Torch | Failure:
    if isinstance(found, Failure):
        return found
    if assumed_gpu is not None:
        gpu = {name: getattr(assumed_gpu, name) for name in ("name", "compute_capability", "memory_gib")}
        found = {**found, "gpus": [gpu], "why_no_gpu": None, "product_problem": None, "peer_access": None}
    return _read(Torch, {**found, "gpus": [_read(Gpu, gpu) for gpu in found["gpus"]]})


def _read_flash_attention(found: dict[str, Any] | Failure) -> FlashAttention | Failure:
    """A problem that a run survives is a failure here, too."""
    if isinstance(found, Failure):
        return found
    if found["problem"] is not None:
        return Failure(problem=found["problem"], version=_version_of("flash-attn-4"))
    return FlashAttention(version=found["version"])


def _read_requirements(found: dict[str, Any] | Failure) -> tuple[Requirement, ...] | Failure | None:
    if isinstance(found, Failure) or found["unmet"] is None:
        return found if isinstance(found, Failure) else None
    return tuple(Requirement(**unmet) for unmet in found["unmet"])
