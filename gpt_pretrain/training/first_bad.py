"""The first tensor that is NaN or infinite: a batch is computed once more, with every module's results looked at.

In the order in which numbers come to be: weights, results of the forward pass (the innermost module first), gradients
of those results in the backward pass, gradients of weights. The ranks compare what they found and all get the same
answer. Slow: the host waits for the device at every module.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from gpt_pretrain.megatron.layers import whole_model_modules

_WEIGHT, _FORWARD, _BACKWARD, _WEIGHT_GRADIENT = range(4)
_PHASES = {
    _WEIGHT: "weight",
    _FORWARD: "forward",
    _BACKWARD: "backward",
    _WEIGHT_GRADIENT: "gradient of a weight",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BadTensor:
    """A tensor with values that are not finite."""

    place: tuple[int, ...]
    """Where it comes among all ranks' tensors."""
    module: str
    """The module whose result it is, or the weight, in the whole model; the whole model's is "model"."""
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    rank: int
    microbatch: int | None
    """Which of its rank's microbatches it was computed from; None for weights and their gradients."""
    data_parallel_rank: int

    @property
    def phase(self) -> str:
        """weight, forward, backward (the gradient of the module's result), or gradient of a weight."""
        return _PHASES[self.place[0]]

    def __str__(self) -> str:
        what = {
            _WEIGHT: f"the weight {self.module}",
            _FORWARD: f"the result of {self.module} in the forward pass",
            _BACKWARD: f"the gradient of {self.module}'s result in the backward pass",
            _WEIGHT_GRADIENT: f"the gradient of the weight {self.module}",
        }[self.place[0]]
        return f"{what} ({self.num_nan} NaN, {self.num_inf} infinite) on rank {self.rank}"


class FirstBad:
    """Looks for it on this rank, and settles it among all.

    Args:
        chunks: This rank's GPTModels.
    """

    def __init__(self, chunks: Sequence[GPTModel]) -> None:
        self._chunks = chunks
        self._found: BadTensor | None = None
        self._num_events = 0
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        self._stages = [index * pp_size + pp_rank for index in range(len(chunks))]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around the forward and backward passes of one batch."""
        self._look_at_weights(_WEIGHT)
        handles = []
        for stage, chunk in zip(self._stages, self._chunks, strict=True):
            count = [-1]
            handles.append(chunk.register_forward_pre_hook(partial(_count_up, count)))
            for name, module in whole_model_modules(chunk):
                hook = partial(self._after_forward, (name or "model", stage), count)
                handles.append(module.register_forward_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._look_at_weights(_WEIGHT_GRADIENT)

    def agree(self) -> BadTensor | None:
        """The first on all ranks, None if everything was finite; every rank calls it."""
        everybody: list[BadTensor | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybody, self._found)
        return min((bad for bad in everybody if bad is not None), key=lambda bad: (bad.place, bad.rank), default=None)

    def _look_at_weights(self, phase: int) -> None:
        for stage, chunk in zip(self._stages, self._chunks, strict=True):
            for index, (name, parameter) in enumerate(named_weights(chunk)):
                tensor = parameter if phase == _WEIGHT else getattr(parameter, "main_grad", None)
                if tensor is not None:
                    self._look(tensor.detach(), (phase, stage, index), name, None)

    def _after_forward(
        self, where: tuple[str, int], count: list[int], module: torch.nn.Module, arguments: Any, result: Any
    ) -> None:
        (name, stage), microbatch = where, count[0]
        for tensor in _tensors(result):
            self._num_events += 1
            self._look(tensor.detach(), (_FORWARD, microbatch, stage, self._num_events), name, microbatch)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._after_backward, where, microbatch))

    def _after_backward(self, where: tuple[str, int], microbatch: int, gradient: torch.Tensor) -> None:
        name, stage = where
        self._num_events += 1
        # The last stage's backward pass is the first.
        self._look(gradient, (_BACKWARD, microbatch, -stage, self._num_events), name, microbatch)

    @torch.no_grad()
    def _look(self, tensor: torch.Tensor, place: tuple[int, ...], module: str, microbatch: int | None) -> None:
        if self._found is not None and self._found.place <= place:
            return
        if bool(torch.isfinite(tensor).all()):
            return
        self._found = BadTensor(
            place=place,
            module=module,
            shape=tuple(tensor.shape),
            num_nan=int(torch.isnan(tensor).sum()),
            num_inf=int(torch.isinf(tensor).sum()),
            rank=torch.distributed.get_rank(),
            microbatch=microbatch,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
        )


def named_weights(chunk: GPTModel) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights of a model chunk by their names in the whole model, each once."""
    for module_name, module in whole_model_modules(chunk):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{module_name}.{name}".removeprefix("."), parameter


@torch.no_grad()
def weights_are_finite(chunks: Sequence[GPTModel]) -> bool:
    """Whether no weight of any rank is NaN or infinite; waits for the device, and every rank calls it."""
    total = torch.zeros(1, device=torch.cuda.current_device())
    for chunk in chunks:
        for parameter in chunk.parameters():
            total += 0.0 * parameter.detach().abs().sum(dtype=torch.float32)
    torch.distributed.all_reduce(total)
    return bool(torch.isfinite(total).item())


def _count_up(count: list[int], module: torch.nn.Module, arguments: Any) -> None:
    # A pass that is recomputed calls the modules inside of the chunk, not the chunk.
    count[0] += 1


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
