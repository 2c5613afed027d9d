"""NVIDIA's driver, asked without PyTorch: by its own tool, and by the files through which processes reach the GPUs."""

import subprocess
from pathlib import Path

NVIDIA_SMI = "nvidia-smi"
# It answers in a second or two; in minutes, or never, where a GPU has fallen off the bus.
_TIMEOUT_S = 60


def ask_driver() -> tuple[str, list[str]]:
    """The driver's version and the names of all GPUs; CUDA_VISIBLE_DEVICES hides none of them.

    Raises:
        FileNotFoundError: There is no nvidia-smi.
        RuntimeError: It fails, in its own words, or does not answer.
    """
    query = [NVIDIA_SMI, "--query-gpu=driver_version,name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{NVIDIA_SMI} does not answer within {_TIMEOUT_S} s") from None
    rows = [row.split(", ", 1) for row in answer.stdout.strip().splitlines()]
    if answer.returncode != 0 or not rows or len(rows[0]) == 1:
        raise RuntimeError(" ".join((answer.stdout + answer.stderr).split()))
    return rows[0][0], [name for _, name in rows]


def device_files(folder: Path = Path("/dev")) -> list[str]:
    """The files of GPUs, which are there where the driver's kernel module was loaded; of one that broke later, too."""
    return sorted(str(path) for path in folder.glob("nvidia[0-9]*"))
