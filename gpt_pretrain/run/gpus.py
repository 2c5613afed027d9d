"""GPUs by their data sheets.

The peaks are dense (half of what is quoted with sparsity). Sources: NVIDIA H100 Tensor Core GPU data sheet (SXM5), H200
data sheet (SXM5), and HGX B200 (1,000 W): NVIDIA Blackwell architecture brief and DGX B200 data sheet. Memory is what
`nvidia-smi` shows: for H100 and H200 in this repository's benchmarks.
"""

from dataclasses import dataclass

from gpt_pretrain.config.choices import PlanGpu

# Ranks that NVLink connects: one HGX board.
GPUS_PER_NODE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU of the data sheets."""

    name: str
    """As CUDA names the device."""
    compute_capability: tuple[int, int]
    bf16_tflops: float
    """Dense tensor-core peak."""
    fp8_tflops: float
    """Dense tensor-core peak."""
    memory_gib: float
    bandwidth_tb_s: float
    """Of the HBM, in 10^12 bytes per second."""
    nvlink_gb_s: float
    """To all other GPUs of the node together, one direction, in 10^9 bytes per second."""
    network_gb_s: float = 50.0
    """To other nodes, one direction: one 400 Gb/s adapter per GPU (DGX H100 and B200)."""


# Dense BF16 tensor-core peaks in TFLOP/s. The first name that the device's name contains counts: longer names first.
_BF16_TFLOPS = {
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


def bf16_peak_tflops(device_name: str) -> float | None:
    """Dense BF16 peak of a GPU in TFLOP/s; None for "CPU" and for GPUs not listed here."""
    return next((peak for name, peak in _BF16_TFLOPS.items() if name in device_name), None)


GPUS = {
    PlanGpu.h100: Gpu(
        name="NVIDIA H100 80GB HBM3",
        compute_capability=(9, 0),
        bf16_tflops=_BF16_TFLOPS["H100"],
        fp8_tflops=1978.9,
        memory_gib=81_559 / 1024,
        bandwidth_tb_s=3.35,
        nvlink_gb_s=450.0,
    ),
    PlanGpu.h200: Gpu(
        name="NVIDIA H200",
        compute_capability=(9, 0),
        bf16_tflops=_BF16_TFLOPS["H200"],
        fp8_tflops=1978.9,
        memory_gib=143_771 / 1024,
        bandwidth_tb_s=4.8,
        nvlink_gb_s=450.0,
    ),
    PlanGpu.b200: Gpu(
        name="NVIDIA B200",
        compute_capability=(10, 0),
        bf16_tflops=_BF16_TFLOPS["B200"],
        fp8_tflops=4500.0,
        memory_gib=183_359 / 1024,
        bandwidth_tb_s=8.0,
        nvlink_gb_s=900.0,
    ),
}
