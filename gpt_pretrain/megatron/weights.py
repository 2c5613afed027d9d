"""A rank's weights: drawn from the seed, the same in every layout; and, stored in FP8, cast from their masters.

**Initial weights.** megatron-core draws each rank's shard from a generator of that rank, so that one seed gives another
model in every layout. Here each weight matrix is drawn whole, from a generator seeded by (seed, its name, its layer),
and each rank keeps its part. megatron-core's sharded state dict says what the part is: it names every local tensor, its
global shape and its place in it, across TP, PP, interleaved chunks and tied embeddings alike. The distribution is
GPT-2's: normal with `init_method_std`, and std / sqrt(2 · num_layers) for the two projections that write into the
residual stream (Radford et al. 2019, section 2.3). Norms and biases keep their ones and zeros.

**FP8 weights** (`model.fp8_params`). After each update megatron-core's distributed optimizer hands the shards of fp32
masters over to be cast. Transformer Engine (TE) 2.12 casts all of them together with transposes that nobody reads
(`patches.WEIGHT_CAST`). Here each shard is rounded and cast by itself. Formats, scales and codes are TE's to the bit
(`cast_master_weights_to_fp8`, pytorch/tensor/utils.py). The transposes that products read are made of whole weights
after the gather. This covers weights with one scale per tensor; TE's own kernels cast weights in blocks,
which they read and write once.
"""

import hashlib
import importlib
import importlib.metadata
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from megatron.core.transformer.module import MegatronModule

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.megatron.patches import FIRST_VALUES, WEIGHT_CAST, patch, patched
from gpt_pretrain.megatron.stored_weights import StoredWeight, cast_shards
from gpt_pretrain.spec.recipes import FORMAT_MAX

_RESIDUAL_PROJECTIONS = ("linear_proj.weight", "linear_fc2.weight")
# What this file uses of TE, with the parameters that it passes by name; compiled functions do not tell theirs.
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


def _generator_seed(seed: int, key: str, index: Sequence[int]) -> int:
    digest = hashlib.sha256(f"{seed}/{key}/{'/'.join(map(str, index))}".encode()).digest()
    return int.from_bytes(digest[:8], "little", signed=True)


def _weight_shards(chunk: MegatronModule) -> Iterator[ShardedTensor]:
    """Every sharded weight matrix of this chunk; one that is stored in parts (gated MLPs) comes in parts."""
    for value in nested_values(chunk.sharded_state_dict()):
        parts = nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]
        for part in parts:
            if isinstance(part, ShardedTensor) and part.data is not None and part.data.dim() >= 2:
                yield part


@torch.no_grad()
def initialize_weights(chunks: Sequence[MegatronModule], model: ModelConfig) -> None:
    """Draws every weight matrix of this rank's model chunks, before they are wrapped."""
    for chunk in chunks:
        with _fp8_weights_drawn_whole(chunk):
            for shard in _weight_shards(chunk):
                _draw(shard, model)


def _draw(shard: ShardedTensor, model: ModelConfig) -> None:
    axes = shard.prepend_axis_num
    std = model.init_method_std
    if shard.key.endswith(_RESIDUAL_PROJECTIONS):
        std /= math.sqrt(2.0 * model.num_layers)
    # Leading axes count layers, and the halves of a gated MLP: part of the name, not of the matrix.
    index, shape = shard.global_offset[:axes], shard.global_shape[axes:]
    generator = torch.Generator(device=shard.data.device)
    generator.manual_seed(_generator_seed(model.seed, shard.key, index))
    whole = torch.empty(shape, dtype=torch.float32, device=shard.data.device).normal_(0.0, std, generator=generator)
    place = tuple(
        slice(offset, offset + size) for offset, size in zip(shard.global_offset[axes:], shard.data.shape, strict=True)
    )
    shard.data.copy_(whole[place])


@contextmanager
def _fp8_weights_drawn_whole(chunk: MegatronModule) -> Iterator[None]:
    """Draws weights that are stored in FP8 in high precision inside, and quantises each of them at the end.

    A weight that is drawn in parts, like the halves of a gated MLP, would take its scale from each part in turn. The
    drawn values stay where the optimizer finds its masters (TE's `get_high_precision_init_val`), which therefore start
    unrounded.
    """
    drawn: list[tuple[Any, torch.Tensor]] = []
    with ExitStack() as hooks:
        for module in chunk.modules():
            values = {
                name: torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
                for name, parameter in module.named_parameters(recurse=False)
                if is_float8tensor(parameter)
            }
            if values:
                hooks.callback(module.register_state_dict_post_hook(partial(_put, values)).remove)
                drawn += [(getattr(module, name), value) for name, value in values.items()]
        yield
    for parameter, value in drawn:
        parameter.copy_(value)
        _keep(parameter, value)


def _keep(parameter: Any, value: torch.Tensor) -> None:
    """Gives a weight the methods that TE gives one that keeps its first value, on the device instead of the host."""
    kept = [value]
    parameter.get_high_precision_init_val = lambda: kept[0] if kept else None
    parameter.clear_high_precision_init_val = kept.clear


def forget_first_values(chunks: Sequence[torch.nn.Module]) -> None:
    """Frees the values that FP8 weights were drawn as, once the optimizer has made its masters from them.

    megatron-core frees those of weights whose master this rank holds. The others would stay through the first forward
    and backward pass: 6.5 GiB of Llama 3 8B on two ranks, and more on many.
    """
    for chunk in chunks:
        for parameter in chunk.parameters():
            if hasattr(parameter, "clear_high_precision_init_val"):
                parameter.clear_high_precision_init_val()


@contextmanager
def built_without_first_values(*, fp8_params: bool) -> Iterator[None]:
    """Layers that are built inside copy no weight to the host, which nobody has drawn yet (`patches.FIRST_VALUES`)."""
    if not fp8_params:
        yield
        return
    with patched(FIRST_VALUES, with_high_precision_init_val=classmethod(lambda cls: False)):
        yield


def _put(
    values: dict[str, torch.Tensor], module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    state.update({prefix + name: value for name, value in values.items()})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shard:
    """An FP8 weight and this rank's part of its master."""

    weight: Any
    master: torch.Tensor | None
    """[n]; None where other ranks hold all of it."""
    start: int | None
    """Index of its first value in the flat weight."""

    @property
    def quantizer(self) -> Any:
        """TE's, which holds the weight's scale and amax."""
        return self.weight._get_quantizer()

    def cast(self, scale: torch.Tensor, amax: torch.Tensor) -> None:
        """Writes the codes of this part, values times `scale` [1], into the weight.

        `amax`, [1], is raised to the largest magnitude; it is empty where nobody needs it.
        """
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

        if self.master is None:
            return
        assert self.start is not None
        dtype = self.weight.dtype
        codes = self.weight._data.view(-1)[self.start : self.start + self.master.numel()]
        quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=self.weight._fp8_dtype, columnwise=False)
        # Rounded first, like a weight that is kept in BF16: the same codes with and without FP8 parameters.
        quantizer.update_quantized(self.master.to(dtype), quantizer.create_tensor_from_data(codes, dtype))


def _cast_delayed(shards: Sequence[_Shard], group: torch.distributed.ProcessGroup) -> None:
    """With the present scales; the amaxes of all ranks go into the histories."""
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
    """With scales from the amaxes of these very values, over all ranks."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier

    quantizers = [shard.quantizer for shard in shards]
    first, device = shards[0].weight, shards[0].weight.device
    largest = torch.zeros(len(shards), dtype=torch.float32, device=device)
    for shard, amax in zip(shards, largest.split(1), strict=True):
        if shard.master is not None:
            tex.compute_amax(shard.master, amax)
    # The largest rounded value is the largest value, rounded.
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
        masters: This rank's part of each master; None where it has none.
        starts: Index of the part's first value in the flat weight.
        group: Ranks that share the masters; scales come from all their parts.
    """
    if not weights:
        return
    if isinstance(weights[0], StoredWeight):
        cast_shards(weights, masters, starts, group)
        return
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    quantizer = weights[0]._get_quantizer()
    if isinstance(quantizer, Float8Quantizer):
        cast = _cast_delayed
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        cast = _cast_tensorwise
    else:
        # Weights in blocks. TE raises an error for a quantizer that it cannot cast this way.
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


def install_weight_cast(*, of_te: bool) -> None:
    """Makes megatron-core's distributed optimizer cast FP8 weights, Transformer Engine's or not, with `cast_masters`.

    Raises:
        UserError: The installed Transformer Engine lacks what that needs.
    """
    missing = _what_is_missing() if of_te else []
    if missing:
        version = importlib.metadata.version("transformer_engine")
        raise UserError(
            "model.fp8_params=true casts weights with parts of Transformer Engine (tested: 2.12) that the installed "
            f"{version} lacks: {', '.join(missing)}; use another version, or false"
        )
    patch(WEIGHT_CAST, quantize_param_shard=cast_masters)
