"""megatron-core on a machine without CUDA.

megatron-core 0.19 asks `torch.cuda` for the current device, allocates with `device="cuda"`, keeps its dropout state
in CUDA generators and recognises parameters by the type name `torch.cuda.FloatTensor`. Where no CUDA device exists,
`install_cpu_device()` answers each of these with its CPU twin, once, for the life of the process; where one exists it
does nothing. With it the same model, schedules and optimizers run under gloo, and nothing else in the project asks
which device it is on.
"""

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":", 1)[0] == "cuda"


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites a CUDA device in any torch call to the CPU, and makes `Tensor.type()` answer the CUDA type name."""

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


class _Stream:
    """A CUDA stream where everything is synchronous already."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def wait_stream(self, _: object) -> None:
        """Nothing is in flight."""

    def wait_event(self, _: object) -> None:
        """Nothing is in flight."""

    def record_event(self) -> "_Stream":
        """An event that is over, as the stream always is."""
        return self

    def synchronize(self) -> None:
        """Nothing is in flight."""


@contextlib.contextmanager
def _stream_context(_: object) -> Iterator[None]:
    yield


def _do_nothing(*_: object, **__: object) -> None:
    """Twin of CUDA calls that wait for or release what the CPU does not have."""


def _numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Twin of the dispatcher's copy to the host: a tensor, as a NumPy array where that is asked for."""
    return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor


_installed = False


def install_cpu_device() -> None:
    """Makes megatron-core's CUDA calls answer for the CPU, if this machine has no CUDA device.

    Call it before megatron-core is imported. A second call does nothing.
    """
    global _installed  # noqa: PLW0603 - torch.cuda is global, so is its replacement
    if _installed or torch.cuda.is_available():
        return
    _installed = True

    # megatron-core takes Transformer Engine's and apex's optimizers wherever they import, and those are CUDA kernels.
    for library in ("transformer_engine", "apex"):
        sys.modules.setdefault(library, None)  # type: ignore[arg-type]  # None makes an import fail

    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import token_dispatcher

    # nn.Module.to and friends accept a torch.device here as they do an index.
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *_: _Stream()  # type: ignore[assignment]
    torch.cuda.default_stream = lambda *_: _Stream()  # type: ignore[assignment]
    torch.cuda.stream = _stream_context  # type: ignore[assignment]
    torch.cuda.synchronize = _do_nothing
    torch.cuda.empty_cache = _do_nothing

    # Dropout draws from the CPU generator here, so its state is the one that the tracker must switch.
    get_state = lambda *_, **__: torch.get_rng_state()  # noqa: E731
    torch.cuda.get_rng_state = get_state
    torch.cuda.random.get_rng_state = get_state
    torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    torch.cuda.manual_seed = torch.manual_seed  # type: ignore[assignment]
    megatron_random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    # It warns that the CPU generator changed inside a forked state: here that is the point.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)

    # The dispatcher of experts leaves counts that are on the CPU already what they are; collectives take numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = _numbers

    # torch switches a mode off while its handler runs, and a backward pass runs inside of one: what is computed anew in
    # it needs a mode of its own.
    recompute = megatron_random.CheckpointFunction.backward

    def recompute_on_cpu(*arguments: Any) -> Any:
        with _CudaMeansCpu():
            return recompute(*arguments)

    megatron_random.CheckpointFunction.backward = staticmethod(recompute_on_cpu)

    _CudaMeansCpu().__enter__()  # type: ignore[no-untyped-call]
