"""What this machine offers to the run: GPU, Transformer Engine, FlashAttention-4, TorchAO, apex, and its environment.

megatron-core picks its fused kernels by what it can import. `detect_platform` looks the same things up once: null in
the configuration ("where available") becomes a value that the header prints, and an explicit `true` that the machine
cannot meet is an error rather than a slower run (`rules.machine`). Only the detection imports torch; everything that
follows from a `Platform` works without it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from gpt_pretrain.config.errors import how_to_install
from gpt_pretrain.launch.environment import ended_while_importing

if TYPE_CHECKING:
    import torch

# transformer_engine.pytorch.quantization.check_fp8_support: Ada and newer.
FP8_CAPABILITY = (8, 9)
HOPPER, BLACKWELL, CONSUMER_BLACKWELL = (9, 0), (10, 0), (12, 0)
ATTENTION = "attention"
# Environment variables that change what a recipe of TE 2.12 computes: the value that changes nothing, the recipe or the
# products concerned, and what others do. NVTE_UNFUSED_FP8_UPDATE is absent: it computes the same scales in Python.
RECIPE_VARIABLES = {
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("0", "tensorwise", "rounds scales to powers of two"),
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": ("0", "blockwise", "makes scales other numbers than powers of two"),
    "NVTE_DPA_FP8_RECIPE": ("", ATTENTION, "gives attention another recipe"),
    "NVTE_DPA_FP8DS_AMAX_ALGO": ("most_recent", ATTENTION, "changes attention's amax history"),
    "NVTE_DPA_FP8DS_AMAX_HISTLEN": ("1", ATTENTION, "changes attention's amax history"),
    "NVTE_DPA_FP8DS_REDUCE_AMAX": ("1", ATTENTION, "lets ranks quantise attention with different scales"),
    "NVTE_FP8_DPA_BWD": ("1", ATTENTION, "takes attention's backward pass out of FP8"),
    "NVTE_DPA_FP8CS_O_in_F16": ("1", ATTENTION, "keeps attention's output in FP8 for the backward pass"),
    "NVTE_UnfusedDPA_Emulate_FP8": ("0", ATTENTION, "lets attention fall back to an emulation"),
}
# Each keeps one library from multicast: NCCL, PyTorch's symmetric memory, NVSHMEM, and Transformer Engine's user
# buffers, which then reach other GPUs by CUDA IPC.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
}
# The one that says whether the host has multicast.
NO_MULTICAST = "NCCL_NVLS_ENABLE"
USER_BUFFERS_WITHOUT = "UB_SKIPMC"

# The oldest version tested, and the names that `megatron.te_layers` uses.
OLDEST_FLASH_ATTENTION = "4.0.0b36"
_FLASH_ATTENTION = "flash_attn.cute.interface", "_flash_attn_fwd", "_flash_attn_bwd"
# TorchAO's casts and products are no public API: another version may have them elsewhere, or round differently.
TESTED_TORCHAO = (0, 18)
_TORCHAO = "torchao.float8.float8_training_tensor", "Float8TrainingTensor", "hp_tensor_and_scale_to_float8"
# What each part of apex needs: its Python module, where it has one, and its compiled kernels.
APEX_PARTS = {
    "apex_layer_norm": ("apex.normalization", "fused_layer_norm_cuda"),
    "apex_optimizer": ("apex.optimizers", "amp_C"),
    "apex_softmax": ("scaled_upper_triang_masked_softmax_cuda",),
    "apex_weight_gradient": ("fused_weight_gradient_mlp_cuda",),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Hardware and optional libraries of this process; the defaults are those of a machine with none of them."""

    cuda: bool
    """A CUDA device is there."""
    num_gpus: int
    """CUDA devices that this process sees."""
    device_name: str
    """Name of the GPU, or of the processor's kind."""
    compute_capability: tuple[int, int] | None = None
    """CUDA compute capability of the GPU: (9, 0) is Hopper; None without one."""
    torch_cuda: str | None = None
    """CUDA version that PyTorch was built for: "13.0"; None without a GPU."""
    transformer_engine: str | None = None
    """Version of Transformer Engine, if it imports on this machine."""
    transformer_engine_problem: str | None = None
    """Why Transformer Engine, though installed, does not import."""
    torchao: str | None = None
    """Version of TorchAO, if it is the one that `fp8.torchao` calls."""
    torchao_problem: str | None = None
    """Why TorchAO, though installed, is not used."""
    compiler_problem: str | None = None
    """Why torch.compile cannot compile for this CPU; not looked up on a GPU, where Triton compiles."""
    recipe_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set and could change what an FP8 recipe computes."""
    multicast_variables: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that are set and say whether libraries may use NVLink multicast."""
    flash_attention: str | None = None
    """Version of FlashAttention-4, if it imports on this machine."""
    flash_attention_problem: str | None = None
    """Why FlashAttention-4, though installed, is not used."""
    apex_layer_norm: bool = False
    """apex's fused layer norm."""
    apex_optimizer: bool = False
    """apex's fused Adam and multi-tensor kernels; TE brings its own."""
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
        """Whether the GPU is a Hopper, whose FP8 products read rows of both operands: layers keep transposed copies."""
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


def recipe_variables() -> dict[str, str]:
    """The `RECIPE_VARIABLES` that the environment sets, with their values."""
    return {name: os.environ[name] for name in RECIPE_VARIABLES if name in os.environ}


def multicast_variables() -> dict[str, str]:
    """The `MULTICAST_OFF` variables that the environment sets, with their values."""
    return {name: os.environ[name] for name in MULTICAST_OFF if name in os.environ}


def leading_version(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: "2.12.0+abc" gives (2, 12, 0)."""
    return tuple(map(int, re.findall(r"\d+", re.split(r"[^\d.]", text)[0])))


def _imports(module: str) -> bool:
    """Whether a module is there and loads, which a compiled extension built for another torch does not."""
    if importlib.util.find_spec(module.split(".", 1)[0]) is None:
        return False
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
    # AssertionError), all of which the user should know.
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _transformer_engine() -> tuple[str | None, str | None]:
    if importlib.util.find_spec("transformer_engine") is None:
        return None, None
    problem = _why_it_does_not_load("transformer_engine.pytorch")
    return (importlib.metadata.version("transformer_engine") if problem is None else None), problem


def flash_attention() -> tuple[str | None, str | None]:
    """The fields of `Platform` about FlashAttention-4: its version, or why it is not used where it is installed."""
    try:
        # The distribution's version: the module has none, and flash_attn beside it belongs to another package.
        version = importlib.metadata.version("flash-attn-4")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    if Version(version) < Version(OLDEST_FLASH_ATTENTION):
        return None, f"{OLDEST_FLASH_ATTENTION} or newer is needed, and {version} is installed"
    problem = _why_it_does_not_load(*_FLASH_ATTENTION)
    return (version if problem is None else None), problem


def torchao() -> tuple[str | None, str | None]:
    """The fields of `Platform` about TorchAO: its version, or why it is not used where it is installed."""
    try:
        version = importlib.metadata.version("torchao")
    except importlib.metadata.PackageNotFoundError:
        return None, None
    if leading_version(version)[:2] != TESTED_TORCHAO:
        return None, f"{'.'.join(map(str, TESTED_TORCHAO))} is needed, and {version} is installed"
    problem = _why_it_does_not_load(*_TORCHAO)
    return (version if problem is None else None), problem


def compiler_problem() -> str | None:
    """The field of `Platform`: torch.compile calls $CXX or else g++ (torch._inductor.config.cpp.cxx)."""
    named = os.environ.get("CXX")
    if shutil.which(named or "g++") is not None:
        return None
    return f"CXX={named} in the environment is no program" if named else "there is no g++ on the PATH"


def apex_parts() -> dict[str, bool]:
    """The fields of `Platform` about apex: which of its parts load."""
    return {field: all(map(_imports, modules)) for field, modules in APEX_PARTS.items()}


def detect_platform() -> Platform:
    """Looks up what is there; imports Transformer Engine, FlashAttention-4, TorchAO and apex where installed."""
    with ended_while_importing():
        import torch

    variables: dict[str, Any] = {"recipe_variables": recipe_variables(), "multicast_variables": multicast_variables()}
    if not torch.cuda.is_available():
        return Platform(cuda=False, num_gpus=0, device_name="CPU", compiler_problem=compiler_problem(), **variables)
    with ended_while_importing():
        te_version, te_problem = _transformer_engine()
        flash_version, flash_problem = flash_attention()
        torchao_version, torchao_problem = torchao()
        parts: dict[str, Any] = apex_parts()
    return Platform(
        cuda=True,
        num_gpus=torch.cuda.device_count(),
        device_name=torch.cuda.get_device_name(),
        compute_capability=torch.cuda.get_device_capability(),
        torch_cuda=torch.version.cuda,
        transformer_engine=te_version,
        transformer_engine_problem=te_problem,
        torchao=torchao_version,
        torchao_problem=torchao_problem,
        flash_attention=flash_version,
        flash_attention_problem=flash_problem,
        **variables,
        **parts,
    )
