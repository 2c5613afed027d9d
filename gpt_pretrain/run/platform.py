"""What this machine offers to the run: its GPU, its libraries and its environment.

megatron-core picks its fused kernels by what it can import. `features.resolve.detect_platform` looks the same things up
once. A null in the configuration ("where available") becomes a value that the header prints; an explicit `true` that
the machine cannot meet is an error, not a slower run (`rules.machine`). Only the detection imports torch.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gpt_pretrain.config.errors import how_to_install
from gpt_pretrain.config.json_objects import JsonObject
from gpt_pretrain.launch.environment import installed_version

if TYPE_CHECKING:
    import torch
    from packaging.version import Version

# transformer_engine.pytorch.quantization.check_fp8_support: Ada and newer.
FP8_CAPABILITY = (8, 9)
HOPPER, BLACKWELL, CONSUMER_BLACKWELL = (9, 0), (10, 0), (12, 0)
ATTENTION = "attention"
# Environment variables that change what a recipe of TE 2.12 computes: the value that changes nothing, the recipe or
# products concerned, and what other values do. NVTE_UNFUSED_FP8_UPDATE computes the same scales, in Python.
RECIPE_VARIABLES = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("0", "tensorwise", "rounds scales to powers of two"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("0", "blockwise", "makes scales other numbers than powers of two"),
    "NVTE_DPA_FP8_RECIPE": ("", ATTENTION, "gives attention another recipe"),
    "NVTE_DPA_FP8DS_AMAX_ALGO": ("most_recent", ATTENTION, "changes attention's amax history"),
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": ("1", ATTENTION, "changes attention's amax history"),
    "NVTE_DPA_FP8DS_REDUCE_AMAX": ("1", ATTENTION, "lets ranks quantize attention with different scales"),
    "NVTE_FP8_DPA_BWD": ("1", ATTENTION, "takes attention's backward pass out of FP8"),
    "NVTE_DPA_FP8CS_O_in_F16": ("1", ATTENTION, "keeps attention's output in FP8 for the backward pass"),
    "NVTE_UnfusedDPA_Emulate_FP8": ("0", ATTENTION, "lets attention fall back to an emulation"),
}
# Each keeps one library from using multicast: NCCL, PyTorch's symmetric memory, NVSHMEM, and Transformer Engine's user
# buffers, which then reach other GPUs by CUDA IPC.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
}
# The one that tells whether the host has multicast.
NO_MULTICAST = "NCCL_NVLS_ENABLE"
USER_BUFFERS_WITHOUT = "UB_SKIPMC"

# TorchAO's casts and products are not public API: another version may have moved them, or round differently.
TESTED_TORCHAO = (0, 18)
_TORCHAO = "torchao.float8.float8_training_tensor", "Float8TrainingTensor", "hp_tensor_and_scale_to_float8"
# The Python modules and compiled kernels that each part of apex needs.
APEX_PARTS = {
    "apex_layer_norm": ("apex.normalization", "fused_layer_norm_cuda"),
    "apex_softmax": ("scaled_upper_triang_masked_softmax_cuda",),
    "apex_weight_gradient": ("fused_weight_gradient_mlp_cuda",),
}


type Found = tuple[str | None, str | None]
"""The version of a library that can be used, and why one cannot that is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """An optional library that a feature calls."""

    name: str
    """In `Platform` and in the doctor's document."""
    title: str
    """In messages."""
    distribution: str
    """On PyPI."""
    extra: str
    """The extra of pyproject.toml that installs it."""
    oldest: str
    """The oldest version tested."""
    used: tuple[str, ...]
    """A module, and the names of it that the feature uses."""
    loaded_by_core: bool = False
    """megatron-core imports it, too: where that fails, nothing trains."""

    def find(self) -> Found:
        """Its version if it can be used, and why not if it is installed and cannot; imports it."""
        oldest = read_version(self.oldest)
        return _version_and_problem(
            self.distribution, f"{oldest} or newer", lambda version: read_version(version) >= oldest, self.used
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform(JsonObject):
    """Hardware and optional libraries of this process.

    The version of a library is None where it cannot be used, and its problem is None unless it is installed.
    """

    cuda: bool
    num_gpus: int
    """CUDA devices that this process sees."""
    device_name: str
    """The GPU's name, or "CPU"."""
    compute_capability: tuple[int, int] | None = None
    """The GPU's: (9, 0) is Hopper."""
    torch_cuda: str | None = None
    """CUDA version that PyTorch was built for: "13.0"; None without a GPU."""
    transformer_engine: str | None = None
    transformer_engine_problem: str | None = None
    torchao: str | None = None
    torchao_problem: str | None = None
    compiler_problem: str | None = None
    """Why torch.compile cannot compile for this CPU; not looked up on a GPU, where Triton compiles."""
    recipe_variables: Mapping[str, str] = field(default_factory=dict)
    """Those set in the environment that could change what an FP8 recipe computes."""
    multicast_variables: Mapping[str, str] = field(default_factory=dict)
    """Those set in the environment that say whether libraries may use NVLink multicast."""
    libraries: Mapping[str, str] = field(default_factory=dict)
    """Name of each `Library` that can be used → its version."""
    library_problems: Mapping[str, str] = field(default_factory=dict)
    """Name of each `Library` that is installed and cannot be used → why."""
    apex_layer_norm: bool = False
    apex_softmax: bool = False
    """The fused scale-mask-softmax kernels for layers without TE."""
    apex_weight_gradient: bool = False
    """apex's GEMM that accumulates weight gradients into the main gradient."""

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        import torch

        return torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")

    @property
    def has_fp8(self) -> bool:
        """Whether the GPU multiplies in FP8."""
        return self.compute_capability is not None and self.compute_capability >= FP8_CAPABILITY

    @property
    def is_hopper(self) -> bool:
        """Whether it is a Hopper GPU. Its FP8 products read rows of both operands, so layers keep transposed copies."""
        return self.compute_capability is not None and HOPPER <= self.compute_capability < BLACKWELL

    @property
    def gpu(self) -> str:
        """Name and compute capability of the GPU, for messages."""
        assert self.compute_capability is not None, "asked only of a GPU"
        major, minor = self.compute_capability
        return f"{self.device_name}, compute capability {major}.{minor}"

    @property
    def why_no_transformer_engine(self) -> str:
        """Why Transformer Engine cannot be used; asked only where it cannot."""
        return self.transformer_engine_problem or (
            f"it is not installed; {how_to_install('te')}" if self.cuda else "there is no CUDA device"
        )


def environment_fields(environment: Mapping[str, str]) -> dict[str, Any]:
    """The fields of `Platform` about an environment."""
    return {
        "recipe_variables": {name: environment[name] for name in RECIPE_VARIABLES if name in environment},
        "multicast_variables": {name: environment[name] for name in MULTICAST_OFF if name in environment},
    }


def library_fields(te: Found, torchao: Found, features: Mapping[str, Found]) -> dict[str, Any]:
    """The fields of `Platform` about libraries; `features` has those of features by their names."""
    return {
        "transformer_engine": te[0],
        "transformer_engine_problem": te[1],
        "torchao": torchao[0],
        "torchao_problem": torchao[1],
        "libraries": {name: version for name, (version, _) in features.items() if version is not None},
        "library_problems": {name: problem for name, (_, problem) in features.items() if problem is not None},
    }


def _imports(module: str) -> bool:
    """Whether a module is installed and loads; an extension compiled for another torch does not."""
    try:
        importlib.import_module(module)
    except ImportError:
        return False
    return True


def _why_it_does_not_load(module: str, *names: str) -> str | None:
    """The error of importing an installed module, or names from it; None if all load."""
    try:
        loaded = importlib.import_module(module)
        for name in names:
            getattr(loaded, name)
    # Shared libraries and compilers that do not fit the driver or PyTorch fail in many ways (OSError, RuntimeError,
    # AssertionError), and the user should hear of all of them.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def transformer_engine() -> Found:
    """Transformer Engine's version if it loads, and why not if it is installed and does not."""
    if importlib.util.find_spec("transformer_engine") is None:
        return None, None
    problem = _why_it_does_not_load("transformer_engine.pytorch")
    return (importlib.metadata.version("transformer_engine") if problem is None else None), problem


def _version_and_problem(distribution: str, needed: str, suits: Callable[[str], bool], names: tuple[str, ...]) -> Found:
    """The two fields of `Platform` about a library; `names` are a module and what is used from it."""
    version = installed_version(distribution)
    if version is None:
        return None, None
    problem = _why_it_does_not_load(*names) if suits(version) else f"{needed} is needed, and {version} is installed"
    return (version if problem is None else None), problem


def read_version(version: str) -> Version:
    """A version that compares as PEP 440 says."""
    # Not at the top, because the doctor answers without it.
    from packaging.version import Version

    return Version(version)


def torchao() -> Found:
    """TorchAO's version if it can be used, and why not if it is installed and cannot."""
    needed = ".".join(map(str, TESTED_TORCHAO))
    return _version_and_problem(
        "torchao", needed, lambda version: read_version(version).release[:2] == TESTED_TORCHAO, _TORCHAO
    )


def compiler_problem() -> str | None:
    """Why torch.compile finds no C++ compiler: it calls $CXX, or else g++ (torch._inductor.config.cpp.cxx)."""
    named = os.environ.get("CXX")
    if shutil.which(named or "g++") is not None:
        return None
    return f"CXX={named} in the environment is no program" if named else "there is no g++ on the PATH"


def apex_parts() -> dict[str, bool]:
    """Which parts of apex load, by their fields of `Platform`."""
    return {field: all(map(_imports, modules)) for field, modules in APEX_PARTS.items()}
