"""What the doctor finds on a machine and what is wrong with it: plain values, so that any machine can be described."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A library that is not installed, or does not load."""

    problem: str
    """The error's type and message, or what ended the process that tried."""
    is_missing: bool = False
    """The library itself is not installed."""
    version: str | None = None
    """What is installed, where something is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """NVIDIA's driver, asked without PyTorch."""

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
    """Why it can use none, in its own words."""
    product_problem: str | None
    """How a small BF16 product on the first GPU failed."""
    peer_access: bool | None
    """The first GPU reads the memory of the second; None with fewer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerEngine:
    """Transformer Engine (TE), loaded."""

    version: str
    cudnn: str
    cublaslt: str
    cudnn_folders: tuple[str, ...]
    """Where the cuDNN libraries of a process with PyTorch and TE were loaded from; more than one folder is a mix."""
    scales_on_device: bool
    """It has the kernel that clips gradients without a wait, `multi_tensor_scale_tensor`."""
    product_problem: str | None
    """How a small FP8 layer on the first GPU failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FlashAttention:
    """FlashAttention-4, loaded, and new enough for runs to use it."""

    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Apex:
    """apex, installed; each part for itself."""

    version: str
    parts: Mapping[str, bool]
    """Field of `Platform` → whether it loads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Application:
    """gpt_pretrain's training, loaded with all that it imports."""

    megatron_core: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A package that this project needs and that is not installed, or not in a version that it allows."""

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
    """Through which processes reach the GPUs, `/dev/nvidia0` and so on; there without a driver that works, too."""
    transformer_engine: TransformerEngine | Failure
    flash_attention: FlashAttention | Failure
    apex: Apex | Failure
    application: Application | Failure
    requirements: tuple[Requirement, ...] | Failure | None
    """What is not met; None where the project runs from a checkout that is not installed."""
    packages: Mapping[str, str]
    """Transformer Engine's parts → version: they have to fit each other."""
    environment: Mapping[str, str]
    """The variables that the doctor looks at, those that are set."""
    shared_memory_gib: float | None
    """Size of /dev/shm; None where there is none."""
    assumed_gpu: str | None = None
    """The GPU that was named by --assume-gpu and stands in for the machine's own."""


class Blocks(Enum):
    """What a finding keeps from working."""

    training = "training"
    fp8 = "fp8"
    nothing = "nothing"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that does not work as it should."""

    about: str
    """Library, variable or part of the machine: the subject of the sentence."""
    what: str
    """The rest of the sentence: what is so, and what follows from it; no full stop."""
    fix: str | None
    """A command for a shell; None where a shell cannot mend it, and `what` says who can."""
    blocks: Blocks
