"""NVLink multicast on this machine: which variables forbid it, and what is refused where they do.

Some hosts have no multicast (NVLS), though their GPUs could: a virtual machine without the fabric manager's support, a
container that may not make multicast objects. Whoever runs such a host says so by NCCL_NVLS_ENABLE=0. Libraries that
try it all the same hang or end the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpt_pretrain.config.schema import Config

if TYPE_CHECKING:
    from gpt_pretrain.spec.platform import Platform

# Each keeps one library from multicast: NCCL, PyTorch's symmetric memory, NVSHMEM, and Transformer Engine's user
# buffers, which then reach other GPUs by CUDA IPC.
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "UB_SKIPMC": "1",
}
# The one that speaks for the host.
NO_MULTICAST = "NCCL_NVLS_ENABLE"
USER_BUFFERS_WITHOUT = "UB_SKIPMC"


def multicast_variables() -> dict[str, str]:
    """Those of `MULTICAST_OFF` that the environment sets, with their values."""
    return {name: os.environ[name] for name in MULTICAST_OFF if name in os.environ}


def multicast_problems(config: Config, platform: Platform) -> Iterator[str]:
    """What would use multicast on a host that says it has none."""
    variables = platform.multicast_variables
    if variables.get(NO_MULTICAST) != MULTICAST_OFF[NO_MULTICAST]:
        return
    if config.model.tp_comm_overlap and variables.get(USER_BUFFERS_WITHOUT) != MULTICAST_OFF[USER_BUFFERS_WITHOUT]:
        yield (
            f"model.tp_comm_overlap=true makes user buffers with NVLink multicast, and {NO_MULTICAST}="
            f"{MULTICAST_OFF[NO_MULTICAST]} in the environment says that this host has none; export "
            f"{USER_BUFFERS_WITHOUT}={MULTICAST_OFF[USER_BUFFERS_WITHOUT]}, which makes them without, or use false"
        )
