"""What a run writes when it gives up on losses or gradients that are not finite: RUN_DIR/dumps/step_00000012.json.

The step's batch is computed once more, and every module's results are checked. The file names the first tensor that
was NaN or infinite, and its samples. Nothing is updated, and no checkpoint follows: the newest one is from before.

First means first in the order of computation: weights, results of the forward pass (the innermost module first) and
inputs of linear layers, gradients of those results in the backward pass, gradients of weights. Inputs are checked
because a cast to FP8 turns an infinity into a number, so that the layer's result does not show it. The ranks compare
what they found and all get the same answer. This is slow: the host waits for the device at every module.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.derived import shards_weights
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import write_file
from gpt_pretrain.config.json_objects import to_json_value
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.own_parts import read_own_part
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.megatron.whole_layers import without_graphs
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.step import compute_gradients, mean_loss
from gpt_pretrain.training.stop import BadStep

_WEIGHT, _FORWARD, _BACKWARD, _WEIGHT_GRADIENT = range(4)
_PHASES = ("weight", "forward", "backward", "gradient of a weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class BadTensor:
    """A tensor with values that are not finite."""

    place: tuple[int, ...]
    """In the order of all ranks' tensors; begins with the phase."""
    module: str
    """The name, in the whole model, of the weight or of the module whose result or input it is; "model": the whole."""
    is_input: bool
    """In the forward pass: whether it is the module's input instead of its result."""
    shape: tuple[int, ...]
    num_nan: int
    num_inf: int
    rank: int
    microbatch: int | None
    """Of its rank; None for weights and their gradients."""
    data_parallel_rank: int

    @property
    def phase(self) -> str:
        """weight, input, forward, backward (the gradient of the module's result), or gradient of a weight."""
        return "input" if self.is_input else _PHASES[self.place[0]]

    def __str__(self) -> str:
        what = (
            f"the weight {self.module}",
            f"the {'input' if self.is_input else 'result'} of {self.module} in the forward pass",
            f"the gradient of {self.module}'s result in the backward pass",
            f"the gradient of the weight {self.module}",
        )[self.place[0]]
        return f"{what} ({self.num_nan} NaN, {self.num_inf} infinite) on rank {self.rank}"


class FirstBad:
    """Looks for the first bad tensor on this rank, and then among all ranks."""

    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        self._chunks = chunks
        self._found: BadTensor | None = None
        self._num_events = 0
        self._microbatches: dict[int, int] = {}
        """By stage: the microbatch that passes through it."""
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        self._stages = [index * pp_size + pp_rank for index in range(len(chunks))]

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Encloses the forward and backward passes of one batch."""
        self._look_at_weights(_WEIGHT)
        handles = []
        for stage, chunk in zip(self._stages, self._chunks, strict=True):
            self._microbatches[stage] = -1
            handles.append(chunk.register_forward_pre_hook(partial(self._next_microbatch, stage)))
            for name, module in whole_model_modules(chunk):
                handles.append(module.register_forward_hook(partial(self._after_forward, name or "model", stage)))
                if hasattr(module, "fp8_meta"):
                    handles.append(module.register_forward_pre_hook(partial(self._before_forward, name, stage)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._look_at_weights(_WEIGHT_GRADIENT)

    def agree(self) -> BadTensor | None:
        """The first bad tensor of all ranks, None if everything was finite; every rank calls it."""
        everybody: list[BadTensor | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybody, self._found)
        return min((bad for bad in everybody if bad is not None), key=lambda bad: (bad.place, bad.rank), default=None)

    def _look_at_weights(self, phase: int) -> None:
        for stage, chunk in zip(self._stages, self._chunks, strict=True):
            for index, (name, parameter) in enumerate(named_weights(chunk)):
                tensor = parameter if phase == _WEIGHT else getattr(parameter, "main_grad", None)
                if tensor is not None:
                    self._look(tensor.detach(), (phase, stage, index), name, None)

    def _next_microbatch(self, stage: int, chunk: torch.nn.Module, inputs: Any) -> None:
        # A recomputed pass calls the modules inside the chunk, not the chunk.
        self._microbatches[stage] += 1

    def _before_forward(self, name: str, stage: int, module: torch.nn.Module, inputs: Any) -> None:
        microbatch = self._microbatches[stage]
        for tensor in _tensors(inputs):
            self._num_events += 1
            place = (_FORWARD, microbatch, stage, self._num_events)
            self._look(tensor.detach(), place, name, microbatch, is_input=True)

    def _after_forward(self, name: str, stage: int, module: torch.nn.Module, inputs: Any, result: Any) -> None:
        microbatch = self._microbatches[stage]
        for tensor in _tensors(result):
            self._num_events += 1
            self._look(tensor.detach(), (_FORWARD, microbatch, stage, self._num_events), name, microbatch)
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._after_backward, name, stage, microbatch))

    def _after_backward(self, name: str, stage: int, microbatch: int, gradient: torch.Tensor) -> None:
        self._num_events += 1
        # The last stage's backward pass is the first.
        self._look(gradient, (_BACKWARD, microbatch, -stage, self._num_events), name, microbatch)

    @torch.no_grad()
    def _look(
        self, tensor: torch.Tensor, place: tuple[int, ...], module: str, microbatch: int | None, is_input: bool = False
    ) -> None:
        if (self._found is not None and self._found.place <= place) or bool(torch.isfinite(tensor).all()):
            return
        self._found = BadTensor(
            place=place,
            module=module,
            is_input=is_input,
            shape=tuple(tensor.shape),
            num_nan=int(torch.isnan(tensor).sum()),
            num_inf=int(torch.isinf(tensor).sum()),
            rank=torch.distributed.get_rank(),
            microbatch=microbatch,
            data_parallel_rank=parallel_state.get_data_parallel_rank(),
        )


def named_weights(chunk: MegatronModule) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The weights of a model chunk by their names in the whole model, each once."""
    for module_name, module in whole_model_modules(chunk):
        for name, parameter in module.named_parameters(recurse=False):
            yield f"{module_name}.{name}".removeprefix("."), parameter


@torch.no_grad()
def weights_are_finite(model: Model) -> bool:
    """Whether no weight of any rank is NaN or infinite; every rank calls it and waits for the device."""
    total = torch.zeros(1, device=torch.cuda.current_device())
    with model.newest_parameters():
        for chunk in model.gpt_chunks:
            for parameter in chunk.parameters():
                values = read_own_part(parameter) if shards_weights(model.spec.model) else parameter.detach()
                total += 0.0 * values.abs().sum(dtype=torch.float32)
    torch.distributed.all_reduce(total)
    return bool(torch.isfinite(total).item())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def write_dump(
    directory: Path,
    bad: BadStep,
    *,
    trainable: Trainable,
    iterators: Sequence[Iterator[Batch] | None],
    sequence_length: int,
) -> str:
    """Computes a step's batch once more, writes what was found and returns it as a sentence; every rank calls it.

    This overwrites gradients. `iterators` begin at the first sample of the step, whose samples are cut into
    pieces of `sequence_length` tokens.
    """
    chunks = trainable.model.gpt_chunks
    search = FirstBad(chunks)
    spec = trainable.model.spec
    with search.watching(), without_graphs(chunks), trainable.model.without_overlapped_exchange():
        report = compute_gradients(trainable, iterators, bad.num_samples, sequence_length)
    first = search.agree()
    torch.distributed.all_reduce(report)
    content = {
        "step": bad.step,
        "first_sample": bad.first_sample,
        "num_samples": bad.num_samples,
        "loss": mean_loss(report[:2]),
        "first_bad": None if first is None else _describe(first, bad, spec),
    }
    path = directory / f"step_{bad.step:08d}.json"

    def write() -> None:
        path.parent.mkdir(exist_ok=True)
        write_file(path, json.dumps(to_json_value(content), indent=2, allow_nan=False) + "\n")

    place = str(path)
    try:
        on_rank_zero(write)
    except UserError as error:
        # Say what was found even if the disk is full.
        place = f"it could not be written ({error})"
    again = "all tensors were finite when its batch was computed once more"
    finding = again if first is None else f"the first bad tensor is {first}"
    return f"{finding}. No checkpoint was written of it; all that was found: {place}"


def _describe(first: BadTensor, bad: BadStep, spec: RunSpec) -> dict[str, Any]:
    samples = None
    if first.microbatch is not None:
        # In the order of data/batches.py.
        rows = spec.model.micro_batch_size
        start = bad.first_sample + (first.microbatch * spec.layout.dp + first.data_parallel_rank) * rows
        samples = list(range(start, start + rows))
    return {
        "phase": first.phase,
        "module": first.module,
        "shape": list(first.shape),
        "num_nan": first.num_nan,
        "num_inf": first.num_inf,
        "rank": first.rank,
        "microbatch": first.microbatch,
        "samples": samples,
    }
