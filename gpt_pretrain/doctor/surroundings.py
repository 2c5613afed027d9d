"""What surrounds a run: environment variables and shared memory that are known to slow it down or to end it."""

from collections.abc import Iterator

from gpt_pretrain.doctor.facts import Facts, Torch
from gpt_pretrain.doctor.finding import Blocks, Finding
from gpt_pretrain.spec.platform import MULTICAST_OFF, NO_MULTICAST

# Docker gives a container 64 MiB unless told otherwise; NCCL's ranks of a node exchange buffers there.
_SHARED_MEMORY_GIB = 1.0
_BLACKWELL = (10, 0)


def surroundings(facts: Facts) -> Iterator[Finding]:
    """Findings about the environment of a machine with GPUs."""
    torch, environment = facts.torch, facts.environment
    if not isinstance(torch, Torch) or not torch.gpus:
        return
    still_on = [name for name, value in MULTICAST_OFF.items() if environment.get(name) != value]
    if environment.get(NO_MULTICAST) == MULTICAST_OFF[NO_MULTICAST] and still_on:
        yield Finding(
            about=f"{NO_MULTICAST}={MULTICAST_OFF[NO_MULTICAST]}",
            what="says that this host has no NVLink multicast, and other libraries than NCCL may still try it",
            fix="export " + " ".join(f"{name}={MULTICAST_OFF[name]}" for name in still_on),
            blocks=Blocks.nothing,
        )
    connections = environment.get("CUDA_DEVICE_MAX_CONNECTIONS")
    if connections not in (None, "1") and torch.gpus[0].compute_capability < _BLACKWELL:
        yield Finding(
            about=f"CUDA_DEVICE_MAX_CONNECTIONS={connections}",
            what="costs tensor and context parallel runs the overlap of communication with products, which needs 1; a "
            "run sets that where nothing is set",
            fix="unset CUDA_DEVICE_MAX_CONNECTIONS",
            blocks=Blocks.nothing,
        )
    shared = facts.shared_memory_gib
    if shared is not None and shared < _SHARED_MEMORY_GIB and len(torch.gpus) > 1:
        yield Finding(
            about="/dev/shm",
            what=f"has {shared * 1024:.0f} MiB: NCCL's ranks and data workers share buffers there, and end with a bus "
            "error when it is full",
            fix="docker run --gpus all --ipc=host …",
            blocks=Blocks.nothing,
        )
