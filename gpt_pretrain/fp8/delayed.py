r"""Delayed scaling: the scale of a cast comes from the magnitudes in earlier casts.

Each linear layer keeps a scale and a history of amaxes for its input, weight and output (`scaling_fwd`) and for the
gradients of its output and input (`scaling_bwd`). Row 0 of a history belongs to the present pass. A cast uses the
current scale and raises row 0 to its own amax. Then, once per pass:

    row 0  ← maximum over the amax reduction group
    amax   = max(history)  or  row 0 (most_recent)
    scale  ← (largest code / 2^margin) / amax
    history rolls: row i ← row i + 1, the last ← row 0, row 0 ← 0

A tensor that was not cast since the last update (row 0 is zero) keeps its scale and history: a weight is cast only in
the first microbatch of a step. An infinite amax keeps the scale. Outputs and input gradients are never cast; they have
columns because Transformer Engine (TE) has them.

As in TE 2.12, a pass for inputs and weights ends with the transformer block's forward pass (the outermost autocast), if
it computes gradients; validation leaves its amaxes in row 0 for the next training pass. A pass for gradients ends with
the backward pass of the layer that ran first in the forward pass. Either updates all layers of the process, including
other model chunks. Under activation recomputation the second forward pass casts with the scales of the first and
records nothing. Every recomputed layer updates at the end of its backward pass; TE's forward update there finds nothing
recorded, so it is left out here.

The functions at the end of the file read the state of live layers, TE's or emulated.

Sources: TE's pytorch/quantization.py (FP8GlobalStateManager), common/recipe/delayed_scaling.cu
(`amax_and_scale_update_after_reduction`) and megatron-core's transformer_block.py.
"""

import hashlib
from collections import deque
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlock

from gpt_pretrain.config.choices import AmaxComputeAlgo
from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.fp8.casts import FP32_MAX, Directions, cast_tensor, tensor_amax
from gpt_pretrain.fp8.gemms import Role, role_format
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.run.fp8 import Fp8Settings

# A tensor's column in its state.
_COLUMNS = {Role.input: 0, Role.weight: 1, Role.output_gradient: 0}


class Scaling:
    """Scales [n] and amax history [length, n] of n tensors of one format, fp32."""

    def __init__(self, num_tensors: int, format: str, settings: Fp8Settings) -> None:
        device = torch.cuda.current_device()
        self._largest = FORMAT_MAX[format] * 2.0**-settings.margin
        self._takes_maximum = settings.amax_compute_algo is AmaxComputeAlgo.max
        self.scale = torch.ones(num_tensors, dtype=torch.float32, device=device)
        self.amax_history = torch.zeros(settings.amax_history_len, num_tensors, dtype=torch.float32, device=device)

    def record(self, column: int, amax: torch.Tensor) -> None:
        """Raises the amax of the present pass to that of a cast, [1]."""
        row = self.amax_history[0, column : column + 1]
        torch.maximum(row, amax, out=row)

    def reduce(self, group: torch.distributed.ProcessGroup) -> None:
        """Takes the maximum of the present pass's amaxes over the ranks of the group."""
        if group.size() > 1:
            torch.distributed.all_reduce(self.amax_history[0], op=torch.distributed.ReduceOp.MAX, group=group)

    def update(self) -> None:
        """Sets the scales and rolls the histories of tensors that were cast since the last update."""
        history = self.amax_history
        was_cast = history[0] != 0
        amax = history.amax(dim=0) if self._takes_maximum else history[0].clone()
        scale = (torch.full_like(amax, self._largest) / amax).clamp(max=FP32_MAX)
        self.scale.copy_(torch.where(was_cast & torch.isfinite(amax), scale, self.scale))
        rolled = history.roll(-1, 0)
        rolled[0] = 0
        history.copy_(torch.where(was_cast, rolled, history))

    def take_place(self, whole: "Scaling", offset: int) -> None:
        """Becomes columns of a larger one, so that one update serves many layers."""
        columns = slice(offset, offset + self.scale.numel())
        whole.scale[columns] = self.scale
        whole.amax_history[:, columns] = self.amax_history
        self.scale, self.amax_history = whole.scale[columns], whole.amax_history[:, columns]


class DelayedScaling:
    """The scales and histories of all emulated layers of this process, and when they are updated."""

    def __init__(self, settings: Fp8Settings, group: torch.distributed.ProcessGroup) -> None:
        self.settings = settings
        self._group = group
        self._layers: list[LayerScaling] = []
        self._forward, self._backward = self._scalings(0)
        self.in_training_pass = False
        """Whether a block's forward pass is running whose gradients will be computed, with recomputation or without."""
        self._has_first_layer = False

    def _scalings(self, num_layers: int) -> tuple[Scaling, Scaling]:
        settings = self.settings
        forward = Scaling(3 * num_layers, settings.forward_format, settings)
        return forward, Scaling(2 * num_layers, settings.gradient_format, settings)

    def new_layer(self) -> "LayerScaling":
        """The state of one more layer."""
        self._layers.append(LayerScaling(self, *self._scalings(1)))
        return self._layers[-1]

    def attach(self, block: TransformerBlock) -> None:
        """Follows the forward passes of a model chunk whose layers have been built."""
        self._forward, self._backward = self._scalings(len(self._layers))
        for index, layer in enumerate(self._layers):
            layer.forward.take_place(self._forward, 3 * index)
            layer.backward.take_place(self._backward, 2 * index)
        block.register_forward_pre_hook(lambda *_: self._begin_forward())
        block.register_forward_hook(lambda *_: self._end_forward())

    def _begin_forward(self) -> None:
        self.in_training_pass = torch.is_grad_enabled()
        self._has_first_layer = False

    def _end_forward(self) -> None:
        if self.in_training_pass:
            self._forward.reduce(self._group)
            self._forward.update()
        self.in_training_pass = False

    def end_backward(self) -> None:
        """Updates the gradients' scales; called by layers with `LayerScaling.ends_backward`."""
        self._backward.reduce(self._group)
        self._backward.update()

    def claim_first_layer(self) -> bool:
        """True for the first caller in each forward pass of a block."""
        is_first, self._has_first_layer = not self._has_first_layer, True
        return is_first


class LayerScaling:
    """Delayed scaling of one linear layer."""

    def __init__(self, scaling: DelayedScaling, forward: Scaling, backward: Scaling) -> None:
        self._all = scaling
        # Of input, weight and output; of the gradients of output and input.
        self.forward, self.backward = forward, backward
        # Scales of inputs that will be recomputed, oldest first: backward passes keep the order of the forward passes.
        self._to_recompute: deque[torch.Tensor] = deque()
        self.ends_backward = False
        """Whether the backward pass of the newest input must call `end_backward`."""
        self.end_backward = scaling.end_backward

    def __call__(self, x: torch.Tensor, role: Role) -> Directions:
        """Casts a matrix with the scale of earlier passes; `x` is detached, so the grad mode tells training passes."""
        scaling = self.backward if role is Role.output_gradient else self.forward
        column = _COLUMNS[role]
        # A copy: updates write scales in place, but codes live until the backward pass.
        scale, amax = scaling.scale[column : column + 1].clone(), tensor_amax(x)
        is_recomputed = False
        if role is Role.input:
            with_gradients, in_training_pass = torch.is_grad_enabled(), self._all.in_training_pass
            is_recomputed = with_gradients and not in_training_pass and bool(self._to_recompute)
            if is_recomputed:
                scale = self._to_recompute.popleft()
            elif in_training_pass and not with_gradients:
                self._to_recompute.append(scale)
            is_first = with_gradients and in_training_pass and self._all.claim_first_layer()
            self.ends_backward = is_recomputed or is_first
        if not is_recomputed:
            scaling.record(column, amax)
        quantized = cast_tensor(x, role_format(self._all.settings, role), scale, amax)
        return Directions(quantized, quantized)

    def state(self) -> dict[str, torch.Tensor]:
        """Copies under the names of TE's extra state."""
        return {name: tensor.detach().to("cpu", copy=True) for name, tensor in self._tensors().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restores `state`, whose histories have the same length."""
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {
            "scale_fwd": self.forward.scale,
            "amax_history_fwd": self.forward.amax_history,
            "scale_bwd": self.backward.scale,
            "amax_history_bwd": self.backward.amax_history,
        }


def delayed_state(module: torch.nn.Module, role: Role) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A tensor's amax history, fp32 [fp8_amax_history_len], and the scale of its next cast, fp32 [].

    The scale is 1 until a pass sets it. None for modules without FP8 and for recipes without a history.
    """
    name, column = "scaling_bwd" if role is Role.output_gradient else "scaling_fwd", _COLUMNS[role]
    state: Any = getattr(module, "fp8_meta", {}).get(name)
    if getattr(state, "amax_history", None) is None:
        return None
    return state.amax_history[:, column], state.scale[column]


def join_present_amaxes(chunks: Sequence[MegatronModule]) -> None:
    """Gives row 0 of each history the maxima over the amax reduction group; every rank calls it.

    The next pass does that anyway. Until then each rank has those of the samples that it validated, and a checkpoint
    would give the first rank's to all.
    """
    if rows := _present_amaxes(chunks):
        joined = torch.cat(rows)
        group = parallel_state.get_amax_reduction_group(with_context_parallel=True)
        torch.distributed.all_reduce(joined, op=torch.distributed.ReduceOp.MAX, group=group)
        torch._foreach_copy_(rows, list(joined.split([len(row) for row in rows])))


@contextmanager
def present_amaxes_kept(chunks: Sequence[MegatronModule]) -> Iterator[None]:
    """Inside, casts leave no amaxes to the next training pass."""
    rows = _present_amaxes(chunks)
    held = [row.clone() for row in rows]
    try:
        yield
    finally:
        for row, value in zip(rows, held, strict=True):
            row.copy_(value)


def _present_amaxes(chunks: Sequence[MegatronModule]) -> list[torch.Tensor]:
    """Row 0 of each history."""
    metas = [getattr(module, "fp8_meta", {}) for chunk in chunks for module in chunk.modules()]
    states = [meta.get(name) for meta in metas for name in ("scaling_fwd", "scaling_bwd")]
    histories = [getattr(state, "amax_history", None) for state in states]
    return [history[0] for history in histories if history is not None]


def gradient_scales(chunks: Sequence[MegatronModule]) -> torch.Tensor:
    """The scales of the next casts of output gradients, fp32 [FP8 layers of this rank].

    A scale is 1 only if no pass has had an amax: the largest code over an amax is not 1.
    """
    found = (delayed_state(module, Role.output_gradient) for chunk in chunks for module in chunk.modules())
    scales = [state[1] for state in found if state is not None]
    # A copy, because Transformer Engine writes the next scales in place.
    return torch.stack(scales) if scales else torch.empty(0, device=torch.cuda.current_device())


def state_digest(module: torch.nn.Module) -> str | None:
    """The SHA-256 of a layer's scales and past amaxes, in hexadecimal; None for modules without.

    Row 0 of a history is left out: it belongs to the present pass, and a stored weight that is loaded raises it.
    """
    states = [delayed_state(module, role) for role in Role]
    if None in states:
        return None
    parts = [part for history, scale in filter(None, states) for part in (history[1:], scale.view(1))]
    return hashlib.sha256(torch.cat(parts).float().cpu().numpy().tobytes()).hexdigest()


def state_digests(chunks: Sequence[MegatronModule], linears: Container[str]) -> dict[str, str]:
    """The digests of the named layers of the model, by name, the same on all ranks; every rank calls it.

    A checkpoint has the state of the first rank of each pipeline stage, and gives it to all.
    """
    own = {}
    if parallel_state.get_tensor_model_parallel_rank() == 0 and parallel_state.get_data_parallel_rank() == 0:
        for chunk in chunks:
            for name, module in whole_model_modules(chunk):
                if name in linears and (digest := state_digest(module)) is not None:
                    own[name] = digest
    ranks: list[dict[str, str]] = [own] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(ranks, own)
    return {name: digest for of_rank in ranks for name, digest in of_rank.items()}
