"""FP8 weights from their masters: after each update a cast of every shard, without transposes of what has one row.

With `model.fp8_params` megatron-core's distributed optimizer hands the shards of fp32 masters to Transformer Engine
(TE). TE 2.12 takes each shard for a matrix of one row, casts it together with its transpose, and throws that away: many
times what reading and writing would take. It also holds all shards in BF16 at once. Here each shard is rounded and cast
by itself; formats, scales and codes are TE's to the bit (`cast_master_weights_to_fp8`, pytorch/tensor/utils.py). The
transposes that products read are made of whole weights behind the gather, as before.

Scales of one per tensor only: weights in blocks are cast by kernels of TE's that read and write once.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.fp8_utils import quantize_param_shard

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.megatron.patches import WEIGHT_CAST, patch
from gpt_pretrain.spec.fp8 import FORMAT_MAX

# What is used of TE, with the parameters that it is given by name; compiled functions do not tell theirs.
_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer_engine.pytorch.tensor.float8_tensor": {
        "Float8Quantizer": ("scale", "amax", "fp8_dtype", "columnwise"),
        "Float8CurrentScalingQuantizer": ("force_pow_2_scales", "amax_epsilon"),
    },
    "transformer_engine.pytorch.tensor.utils": {
        # megatron-core makes the transposes with it behind the gather.
        "post_all_gather_processing": (),
        "cast_master_weights_to_fp8": ("manual_post_all_gather_processing",),
    },
    "transformer_engine.pytorch.optimizers.multi_tensor_apply": {"multi_tensor_applier": ()},
    "transformer_engine_torch": {"compute_amax": (), "multi_tensor_compute_scale_and_scale_inv": ()},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """An FP8 weight, and this rank's part of its master."""

    weight: Any
    master: torch.Tensor | None
    """[n]; None where other ranks have all of it."""
    start: int | None
    """Index of its first value in the flat weight."""

    @property
    def quantizer(self) -> Any:
        """TE's, which holds scale and amax of the weight."""
        return self.weight._get_quantizer()

    def cast(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        """Writes the codes of this part into the weight.

        Args:
            scale: [1], what values are multiplied by.
            amax: [1], receives the largest magnitude if that is larger; empty where nobody asks.
        """
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

        if self.master is None:
            return
        assert self.start is not None
        dtype = self.weight.dtype
        codes = self.weight._data.view(-1)[self.start : self.start + self.master.numel()]
        quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=self.weight._fp8_dtype, columnwise=False)
        # Rounded first, as a weight would be that is kept in BF16: the same codes with and without FP8 parameters.
        quantizer.update_quantized(self.master.to(dtype), quantizer.create_tensor_from_data(codes, dtype))


def _cast_delayed(shards: Sequence[_Shard], group: torch.distributed.ProcessGroup) -> None:
    """With the scales that stand; the amaxes, of all ranks, go into the histories."""
    quantizers = [shard.quantizer for shard in shards]
    for shard, quantizer in zip(shards, quantizers, strict=True):
        shard.cast(quantizer.scale, quantizer.amax)
    amaxes = [quantizer.amax.view(1) for quantizer in quantizers]
    largest = torch.cat(amaxes)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    torch._foreach_copy_(amaxes, largest.split(1))
    inverses = torch.cat([quantizer.scale.view(1) for quantizer in quantizers]).reciprocal_()
    torch._foreach_copy_([shard.weight._scale_inv.view(1) for shard in shards], inverses.split(1))


def _cast_tensorwise(shards: Sequence[_Shard], group: torch.distributed.ProcessGroup) -> None:
    """With scales from the amaxes of what is cast, of all ranks."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier

    quantizers = [shard.quantizer for shard in shards]
    first, device = shards[0].weight, shards[0].weight.device
    largest = torch.zeros(len(shards), dtype=torch.float32, device=device)
    for shard, amax in zip(shards, largest.split(1), strict=True):
        if shard.master is not None:
            tex.compute_amax(shard.master, amax)
    # The largest of rounded values is the largest value, rounded.
    largest.copy_(largest.to(first.dtype))
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    scales = [quantizer.scale.view(1) for quantizer in quantizers]
    multi_tensor_applier(
        tex.multi_tensor_compute_scale_and_scale_inv,
        torch.zeros(1, dtype=torch.int, device=device),
        [list(largest.split(1)), scales, [shard.weight._scale_inv.view(1) for shard in shards]],
        FORMAT_MAX["e4m3"],
        quantizers[0].force_pow_2_scales,
        quantizers[0].amax_epsilon,
    )
    for shard, scale in zip(shards, scales, strict=True):
        shard.cast(scale, torch.empty(0))


def cast_masters(
    weights: Sequence[Any],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: torch.distributed.ProcessGroup,
) -> None:
    """Writes this rank's parts of the masters into its FP8 weights; all ranks of the group call it.

    Args:
        weights: FP8 weights of one recipe, whole.
        masters: This rank's part of each one's master; None where it has none.
        starts: Index of the part's first value in the flat weight.
        group: Ranks that share the masters: scales are of all their parts.
    """
    if not weights:
        return
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    quantizer = weights[0]._get_quantizer()
    if isinstance(quantizer, Float8Quantizer):
        cast = _cast_delayed
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        cast = _cast_tensorwise
    else:
        quantize_param_shard(weights, masters, starts, group)
        return
    cast([_Shard(weight=w, master=m, start=s) for w, m, s in zip(weights, masters, starts, strict=True)], group)


def _what_is_missing() -> list[str]:
    missing = []
    for module_name, names in _NEEDED.items():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError:
            missing.append(module_name)
            continue
        for name, parameters in names.items():
            found = getattr(module, name, None)
            if found is None:
                missing.append(f"{module_name}.{name}")
            elif parameters:
                there = inspect.signature(found).parameters
                missing += [f"{module_name}.{name}({parameter}=)" for parameter in parameters if parameter not in there]
    return missing


def install_weight_cast() -> None:
    """Makes megatron-core's distributed optimizer cast FP8 weights with `cast_masters`. A second call does nothing.

    Raises:
        UserError: Transformer Engine has not what that needs.
    """
    missing = _what_is_missing()
    if missing:
        version = importlib.metadata.version("transformer_engine")
        raise UserError(
            "model.fp8_params=true casts weights with parts of Transformer Engine (tested: 2.12) that the installed "
            f"{version} has not: {', '.join(missing)}; use another version, or false"
        )
    patch(WEIGHT_CAST, quantize_param_shard=cast_masters)
