"""What the doctor knows of a machine, as plain values that can describe any machine."""

from collections.abc import Mapping
from dataclasses import dataclass


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
class Loaded:
    """A feature's library, loaded, and new enough for runs to use it."""

    version: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchAO:
    """TorchAO, loaded, and of the version that runs use."""

    version: str
    product_problem: str | None
    """How a small FP8 layer on the first GPU failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Apex:
    """apex, installed."""

    version: str
    parts: Mapping[str, bool]
    """Field of `Platform` → whether that part loads."""


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
    torchao: TorchAO | Failure
    apex: Apex | Failure
    libraries: Mapping[str, Loaded | Failure]
    """Name of each library that features call (`features.registry.LIBRARIES`) → what was found of it."""
    application: Application | Failure
    requirements: tuple[Requirement, ...] | Failure | None
    """Unmet requirements; None where the project runs from a checkout that is not installed."""
    packages: Mapping[str, str]
    """Transformer Engine's packages → version; they must fit each other."""
    environment: Mapping[str, str]
    """The variables that the doctor looks at, where set."""
    shared_memory_gib: float | None
    """Size of /dev/shm; None where there is none."""
    assumed_gpu: str | None = None
    """The GPU that --assume-gpu names; it stands in for the machine's own."""
