"""Finds infinities that a cast to FP8 hides, and undoes what a skipped step did to delayed scaling.

A cast saturates: an infinity becomes the largest code, and loss and gradient norm do not show it. docs/fp8.md,
"Infinities", says where each recipe of Transformer Engine (TE) 2.12 shows it (tests/test_gpu_infinities.py): delayed in
the amax history; tensorwise in the quantizer's amax until its next cast, so amaxes are read before each pass; blockwise
nowhere, so the few blocks of scale 1 are searched in the tensor that was cast. Local layers keep the largest amax of
their casts.

The result of a norm that is fused with its cast is not searched: an infinity would become NaN. Nor are weights in
blocks: an update that would make one infinite is skipped.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.recipes import RECIPES, InfinityIn
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.launch import patches
from gpt_pretrain.launch.patches import patched

# Quantizers per product of a module (TE 2.12, pytorch/module): of input, weight and output; of their two gradients.
_FORWARD, _BACKWARD = 3, 2


class StepCasts:
    """The FP8 casts of one step: whether they met an infinity, and the state to restore if the step is skipped.

    An infinite amax in a history freezes the scale (TE 2.12, common/recipe/delayed_scaling.cu), and large values that
    follow from an infinity make scales too small. Infinities that a validation left become zeros before the step.
    """

    @torch.no_grad()
    def __init__(self, chunks: Sequence[MegatronModule]) -> None:
        modules: list[Any] = [module for chunk in chunks for module in chunk.modules()]
        states = [state for module in modules for state in getattr(module, "fp8_meta", {}).values()]
        states = [state for state in states if getattr(state, "amax_history", None) is not None]
        self._histories: list[torch.Tensor] = [state.amax_history for state in states]
        self._scales: list[torch.Tensor] = [state.scale for state in states]
        self._before = _flat(self._histories).nan_to_num_(nan=0.0, posinf=0.0), _flat(self._scales)
        _write(self._before[0], self._histories)
        self._amaxes: list[torch.Tensor] = [each.largest_amax for each in modules if hasattr(each, "largest_amax")]
        # megatron-core's configuration does not know the FP8 of local layers.
        shown_in = {RECIPES[chunk.config.fp8_recipe].engine.infinity_in for chunk in chunks if chunk.config.fp8}
        self._searches_blocks = InfinityIn.blocks in shown_in
        self._own_layers = [each for each in modules if is_te_linear(each)] if InfinityIn.amax in shown_in else []
        self._own_amaxes = [*_amaxes(self._own_layers, "fwd"), *_amaxes(self._own_layers, "bwd")]
        for amaxes in (self._amaxes, self._own_amaxes):
            _write(torch.zeros_like(_flat(amaxes)), amaxes)
        # Above 0 if a cast has met an infinity that nothing else shows any more.
        self._found = torch.zeros(1, device=torch.cuda.current_device())

    def watching(self) -> AbstractContextManager[None]:
        """Around the passes of the step."""
        return _search_blocks(self._found) if self._searches_blocks else nullcontext()

    @torch.no_grad()
    def look(self) -> None:
        """Called before each pass, forward and backward, which may overwrite the amaxes of the one before."""
        if self._own_layers and not self._own_amaxes:
            # Quantizers are created in the first forward pass. Those of gradients have cast nothing yet.
            self._own_amaxes = [*_amaxes(self._own_layers, "fwd"), *(unused := _amaxes(self._own_layers, "bwd"))]
            _write(torch.zeros_like(_flat(unused)), unused)
        if self._own_amaxes:
            torch.maximum(self._found, torch.isinf(_flat(self._own_amaxes)).any(), out=self._found)

    def met_infinity(self) -> torch.Tensor:
        """Whether a cast of this rank met an infinity, bool []; does not wait for the device."""
        self.look()
        return ~torch.isfinite(_flat([*self._amaxes, *self._histories])).all() | (self._found[0] > 0)

    @torch.no_grad()
    def restore_if_skipped(self, skipped: torch.Tensor) -> None:
        """Restores histories and scales if the step was `skipped`, a bool on the device; the host does not wait."""
        for tensors, before in zip((self._histories, self._scales), self._before, strict=True):
            _write(torch.where(skipped, before, _flat(tensors)), tensors)


def _amaxes(layers: Sequence[Any], direction: str) -> list[torch.Tensor]:
    """The amaxes of tensorwise scaling's casts, each fp32 [1]; the memory of unused quantizers may hold anything."""
    found = []
    for layer in layers:
        quantizers = list(layer.quantizers[f"scaling_{direction}"])
        used = quantizers[:: _FORWARD if direction == "fwd" else _BACKWARD]
        # A weight that is stored in FP8 is cast by the optimizer.
        if direction == "fwd" and not any(map(is_float8tensor, layer.parameters(recurse=False))):
            used += quantizers[1::_FORWARD]
        found += [each.amax for each in used if type(each).__name__ == "Float8CurrentScalingQuantizer"]
    return found


@contextmanager
def _search_blocks(found: torch.Tensor) -> Iterator[None]:
    """Searches tensors that are cast in blocks inside; sets `found`, fp32 [1], to 1 if they contain an infinity."""
    from gpt_pretrain.kernels.fp8_codes_triton import search_blocks

    def search(values: torch.Tensor, result: Any) -> None:
        if not result._is_2D_scaled and result._rowwise_scale_inv is not None and values.numel():
            search_blocks(values, result._rowwise_scale_inv, found)

    casts, splits = patches.BLOCK_CASTS, patches.SPLIT_CASTS
    cast, split = casts.owner().quantize_impl, splits.owner().split_quantize

    def watched_cast(quantizer: Any, values: torch.Tensor) -> Any:
        result = cast(quantizer, values)
        search(values, result)
        return result

    def watched_split(values: torch.Tensor, rows: Sequence[int], *args: Any, **kwargs: Any) -> Any:
        results = split(values, rows, *args, **kwargs)
        for part, result in zip(values.split(list(rows)), results, strict=True):
            search(part, result)
        return results

    with patched(casts, quantize_impl=watched_cast), patched(splits, split_quantize=watched_split):
        yield


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The values of all in one tensor: a kernel for all of them instead of one for each."""
    if not tensors:
        return torch.empty(0, device=torch.cuda.current_device())
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _write(values: torch.Tensor, tensors: list[torch.Tensor]) -> None:
    """The reverse of `_flat`."""
    if tensors:
        parts = values.split([tensor.numel() for tensor in tensors])
        torch._foreach_copy_(tensors, [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)])
