"""The ceiling of this machine: how fast its matrix products are at best, and what machine it is.

A data sheet's peak is for a clock that no GPU keeps under load, so a run's use of the machine is told against what
square products reach here and now. Run in a process of its own, as the measured runs are.
"""

import importlib.metadata
import platform as python_platform
import statistics
import time
from collections.abc import Callable

import torch

from gpt_pretrain.benchmark.results import GemmCeiling, Machine
from gpt_pretrain.launch.driver import ask_driver
from gpt_pretrain.spec.platform import Platform

# Large enough to fill a GPU (the sides that PERFORMANCE tables quote); on a CPU to be done in a second.
_SIDE_GPU, _SIDE_CPU = 8192, 1024
# Products between two readings of the clock, and readings, of which the first warms up.
_PRODUCTS, _READINGS = 20, 6
_PACKAGES = ("torch", "megatron-core", "transformer-engine", "hydra-core")


def _tflops(product: Callable[[], object], side: int, num_products: int) -> float:
    """Median TFLOP/s of a square product: 2·side³ operations each."""
    seconds = []
    for _ in range(_READINGS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(num_products):
            product()
        torch.cuda.synchronize()
        seconds.append((time.perf_counter() - began) / num_products)
    return 2 * side**3 / statistics.median(seconds[1:]) / 1e12


def measure_gemms(platform: Platform) -> tuple[GemmCeiling, ...]:
    """TFLOP/s of square products: BF16, and FP8 where the GPU has it; FP32 and BF16 on a CPU.

    FP8 is E4M3 times E4M3 with one scale per tensor and fast accumulation into BF16, as in a forward pass.
    """
    side, num_products = (_SIDE_GPU, _PRODUCTS) if platform.cuda else (_SIDE_CPU, 1)
    ceilings = []
    for dtype in (torch.bfloat16,) if platform.cuda else (torch.float32, torch.bfloat16):
        a, b = (torch.randn(side, side, device=platform.device).to(dtype) for _ in range(2))
        tflops = _tflops(lambda a=a, b=b: a @ b, side, num_products)  # type: ignore[misc]
        ceilings.append(GemmCeiling(dtype=str(dtype).removeprefix("torch."), side=side, tflops=tflops))
    if platform.cuda and platform.has_fp8:
        a, b = (torch.randn(side, side, device=platform.device).to(torch.float8_e4m3fn) for _ in range(2))
        one = torch.ones((), device=platform.device)

        def product() -> torch.Tensor:
            # The second operand column by column, the only layout that Hopper multiplies.
            return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True)

        ceilings.append(GemmCeiling(dtype="fp8", side=side, tflops=_tflops(product, side, num_products)))
    return tuple(ceilings)


def _driver() -> str | None:
    """Version of NVIDIA's driver; None where the tool that tells it is not there or fails."""
    try:
        return ask_driver()[0]
    except (OSError, RuntimeError):
        return None


def _processor() -> str:
    """The processor by its name, which Python knows on few systems."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line.partition(":")[2].strip() for line in file if line.startswith("model name")]
    except OSError:
        names = []
    return names[0] if names else python_platform.machine()


def describe_machine(platform: Platform) -> Machine:
    """Device, driver and versions, and the ceilings of its products."""
    installed = {distribution.name.lower().replace("_", "-") for distribution in importlib.metadata.distributions()}
    versions = [f"{name} {importlib.metadata.version(name)}" for name in _PACKAGES if name in installed]
    return Machine(
        device=platform.device_name if platform.cuda else _processor(),
        memory_gib=torch.cuda.get_device_properties(0).total_memory / 2**30 if platform.cuda else None,
        driver=_driver() if platform.cuda else None,
        versions=(f"Python {python_platform.python_version()}", *versions),
        gemms=measure_gemms(platform),
    )
