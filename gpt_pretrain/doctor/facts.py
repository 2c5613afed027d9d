"""What the doctor knows of a machine, as plain values that can describe any machine."""

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    gpus: tuple[Gpu, ...]
    why_no_gpu: str | None
    """Why it can use no GPU, in its own words."""
    product_problem: str | None
    """How a small BF16 product on the first GPU failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """A library that is loaded, and new enough for runs to use it."""

    version: str
    remark: str = "loads"
    """What else there is to know of it."""
    product_problem: str | None = None
    """How a small FP8 layer on the first GPU failed."""
    parts: Mapping[str, bool] = field(default_factory=dict)
    """Field of `Platform` → whether that part of apex loads."""


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
    transformer_engine: Loaded | Failure
    torchao: Loaded | Failure
    apex: Loaded | Failure
    libraries: Mapping[str, Loaded | Failure]
    """Name of each library that features call (`features.registry.libraries`) → what was found of it."""
    application: Loaded | Failure
    """All that training imports; its version is megatron-core's."""
    requirements: tuple[Requirement, ...] | Failure
    """Unmet requirements."""
    environment: Mapping[str, str]
    """Environment variables, of which those count that a run looks at (`run.platform.environment_fields`)."""
    assumed_gpu: str | None = None
    """The GPU that --assume-gpu names; it stands in for the machine's own."""
