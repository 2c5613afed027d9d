"""megatron-core on a machine without CUDA.

megatron-core 0.19 asks `torch.cuda` for the current device, allocates with `device="cuda"`, keeps its dropout state in
CUDA generators and recognizes parameters by the type name `torch.cuda.FloatTensor`. Without a CUDA device
`install_cpu_device` replaces each of these for the life of the process; nothing else asks which device it is on.
"""

import contextlib
import logging
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch._C._distributed_c10d import Store
from torch._dynamo import trace_rules
from torch.overrides import TorchFunctionMode

from gpt_pretrain.launch import patches
from gpt_pretrain.launch.patches import patch

_CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Turns CUDA devices in torch calls into the CPU, and lets `Tensor.type()` answer CUDA type names."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            name: str = func(*args)
            return name.replace("torch.", "torch.cuda.", 1)
        if kwargs and _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and any(_is_cuda(arg) for arg in args):
            args = tuple(_CPU if _is_cuda(arg) else arg for arg in args)
        return func(*args, **kwargs)


def _do_nothing(*_: object, **__: object) -> None:
    """Twin of CUDA calls that wait for something or free it."""


class _Event:
    """A CUDA event that has always passed."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    record = wait = _do_nothing


class _Stream:
    """A CUDA stream where nothing is ever in flight."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    wait_stream = wait_event = synchronize = _do_nothing

    def record_event(self) -> "_Stream":
        """An event that has already passed."""
        return self


def _numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Twin of the dispatcher's copy to the host."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


def _random_state(*_: object, **__: object) -> torch.Tensor:
    """Dropout draws from the CPU generator, so the tracker must switch its state."""
    return torch.get_rng_state()


def _set_random_state(state: torch.Tensor, *_: object, **__: object) -> None:
    torch.set_rng_state(state)


def _gather_bytes(output: torch.Tensor, input: torch.Tensor, **options: Any) -> Any:
    """Twin of NCCL's gathers, which keep tensors of different types apart."""
    return torch.distributed.all_gather_into_tensor(output.view(torch.uint8), input.view(torch.uint8), **options)


class _SharingGroup(torch.distributed.ProcessGroupGloo):
    """A gloo group that shares the message thread of the process's first group."""

    _process_and_devices: ClassVar[tuple[int, Any]] = (0, None)

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        process, devices = self._process_and_devices
        # A forked process has none of its parent's threads.
        if process != os.getpid():
            super().__init__(store, rank, size, timeout)
            own: Any = self.options
            _SharingGroup._process_and_devices = os.getpid(), own._devices
            return
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices, options._timeout = devices, timeout
        super().__init__(store, rank, size, options)


_installed = False


def install_cpu_device() -> None:
    """Without a CUDA device, makes megatron-core's CUDA calls answer for the CPU; call it before importing that."""
    global _installed  # noqa: PLW0603 - torch.cuda is global, so is its replacement
    if _installed or torch.cuda.is_available():
        return
    _installed = True

    patches.hide_libraries("transformer_engine", "apex")
    patch(
        patches.CPU_DEVICE,
        # nn.Module.to and others accept a torch.device here in place of an index.
        current_device=lambda: _CPU,
        Event=_Event,
        Stream=_Stream,
        current_stream=lambda *_: _Stream(),
        default_stream=lambda *_: _Stream(),
        stream=contextlib.nullcontext,
        synchronize=_do_nothing,
        empty_cache=_do_nothing,
        get_rng_state=_random_state,
        set_rng_state=_set_random_state,
        manual_seed=torch.manual_seed,
    )
    patch(patches.CPU_TENSOR, record_stream=_do_nothing)
    patch(patches.CPU_GROUPS, ProcessGroupGloo=_SharingGroup)
    patch(patches.CPU_RANDOM_STATE, get_rng_state=_random_state)
    patch(patches.CPU_TRACKED_STATE, _set_cuda_rng_state=_set_random_state)
    # It warns that the CPU generator changed inside a forked state, which is the point here.
    logging.getLogger(patches.CPU_TRACKED_STATE.place).setLevel(logging.ERROR)
    patch(patches.CPU_GATHER, dist_all_gather_func=_gather_bytes)
    patch(patches.CPU_DISPATCHER, maybe_move_tensor_to_cpu=_numbers)
    recompute = patches.CPU_RECOMPUTATION.owner().backward

    def recompute_on_cpu(*arguments: Any) -> Any:
        with _CudaMeansCpu():
            return recompute(*arguments)

    patch(patches.CPU_RECOMPUTATION, backward=staticmethod(recompute_on_cpu))

    _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]


def let_compiler_see_twins() -> None:
    """Lets torch.compile trace the twin of `current_device`, which it takes for torch's own by its name.

    Process groups must be open: while they open, torch looks the names up again.
    """
    if _installed:
        trace_rules.get_torch_obj_rule_map().pop(torch.cuda.current_device, None)
