"""What the processes of a benchmark hand to the one that started them: JSON files, written by `worker`."""

from dataclasses import dataclass

from gpt_pretrain.report.json_object import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class GemmCeiling(JsonObject):
    """How fast square matrix products of one type are on this machine."""

    dtype: str
    """float32, bfloat16 or fp8."""
    side: int
    """Rows and columns of both operands."""
    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine(JsonObject):
    """What the runs were measured on."""

    device: str
    """Name of the GPU, or of the processor."""
    memory_gib: float | None
    """Memory of one GPU; null without one."""
    driver: str | None
    """NVIDIA's driver; null without one."""
    versions: tuple[str, ...]
    """Of Python and of the libraries that matter."""
    gemms: tuple[GemmCeiling, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel(JsonObject):
    """What a profiled step spends its time on: a kernel of the GPU, or an operation of torch on a CPU."""

    name: str
    calls: float
    """Per step."""
    time_ms: float
    """Per step, without what it calls."""
    share: float
    """Of all kernels' time, 0 to 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(JsonObject):
    """What a profiled step of a GPU consists of: all kernels of a kind, or the time without any."""

    kind: str
    """One of `kinds.KINDS`."""
    time_ms: float
    """Per step; kernels that run side by side count each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(JsonObject):
    """What one rank of one process measured."""

    first_step_s: float
    """Seconds from the start of the process to the end of its first step."""
    step_times_s: tuple[float, ...]
    """Mean seconds per step of each interval."""
    memory_gib: float
    """Peak memory on this rank's GPU after the timed steps; without a GPU, the process's resident memory."""
    loss: float | None
    """Cross entropy in nats per token, mean of the last interval; null of the bare loop, which has other data."""
    losses: tuple[float, ...]
    """Of every step, the first included; empty of the bare loop."""
    dtype: str
    """Type of parameters and of the products that are not in FP8: bfloat16 or float32."""
    kernels: tuple[Kernel, ...]
    """The longest, where the steps were profiled."""
    parts: tuple[Part, ...]
    """All of a GPU's step, where it was profiled, the longest part first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Forecast(JsonObject):
    """What `plan` says of a run before it is measured."""

    memory_gib: float
    """Peak of torch's allocator on the GPU that needs most."""
    tokens_per_s_per_gpu: float | None
    """null where no speed is predicted."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(JsonObject):
    """Why one rank measured nothing."""

    time_unix: float
    """Seconds since 1970-01-01 UTC: the first rank that fails knows why, the others miss it."""
    problem: str
