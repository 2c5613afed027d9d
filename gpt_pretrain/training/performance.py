"""How fast a run is, in the units that compare between machines."""

import psutil
import torch

from gpt_pretrain.spec.platform import Platform

# Dense BF16 tensor-core peaks in TFLOP/s, from NVIDIA's data sheets (half of the figures quoted with sparsity).
# The first name that the device's own name contains counts, so longer names come first.
_PEAK_BF16_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.4,
    "H200": 989.4,
    "H20": 148.0,
    "H800": 989.4,
    "GB200": 2500.0,
    "B200": 2250.0,
    "B300": 2250.0,
    "A100": 312.0,
    "A800": 312.0,
    "L40S": 362.0,
}


def peak_tflops(platform: Platform) -> float | None:
    """Dense BF16 peak of this GPU in TFLOP/s; None without a GPU, or for one that is not in the table."""
    if not platform.cuda:
        return None
    return next((peak for name, peak in _PEAK_BF16_TFLOPS.items() if name in platform.device_name), None)


def memory_gib(platform: Platform) -> float:
    """Peak memory that tensors took on this GPU, or the resident memory of the process without one, in GiB."""
    used = torch.cuda.max_memory_allocated() if platform.cuda else psutil.Process().memory_info().rss
    return float(used) / 2**30
