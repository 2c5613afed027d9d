"""Weights that are stored in FP8 (`model.fp8_params`), and their cast from fp32 masters.

megatron-core's distributed optimizer lays the bytes of FP8 weights into a buffer of their own, hands the shards of
masters over to be cast, and gathers the bytes as it gathers BF16 weights (`param_and_grad_buffer`,
`distrib_optimizer`).

**Transformer Engine's (TE's) weights.** TE 2.12 casts all shards together with transposes that nobody reads
(`patches.WEIGHT_CAST`). `cast_masters` rounds and casts each shard by itself; formats, scales and codes are TE's to the
bit (`cast_master_weights_to_fp8`, pytorch/tensor/utils.py). Products read transposes of whole weights, which are made
after the gather. This covers one scale per tensor. Weights in blocks are left to TE's kernels, which pass over them
once.

**Local layers' weights** (TorchAO). megatron-core expects an FP8 weight to look like a BF16 one and to keep its bytes
elsewhere, but knows TE's classes only. `StoredWeight` is such a weight without TE or a GPU. After each update every
rank casts its own parts:

    amax = the largest magnitude of the weight's master, over all ranks that share it (one collective for all weights)
    scale = 448 / amax                     as TorchAO computes it
    code = round(master · scale)           E4M3, from the master itself; nothing lies beyond 448

The master is rounded once, as TorchAO rounds FSDP2's fp32 shards (TorchAO 0.18, float8/fsdp_utils.py:
`fsdp_pre_all_gather`, `precompute_float8_dynamic_scale_for_fsdp`). TE rounds it to BF16 first, and so does a run
without `model.fp8_params`, which casts BF16 weights: about 2% of its codes differ by one. Tensor parallel ranks have
scales of their own in both.
"""

import importlib
import importlib.metadata
import inspect
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from megatron.core.fp8_utils import is_float8tensor, quantize_param_shard
from torch.utils._pytree import tree_leaves, tree_map

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.recipes import FORMAT_MAX
from gpt_pretrain.launch.patches import FP8_WEIGHTS, WEIGHT_CAST, patch

# From amaxes [n] to scales [n], fp32.
type ScaleRule = Callable[[torch.Tensor], torch.Tensor]
# This rank's part of each master (None: other ranks hold all of it), the part's start in the flat weight, and the ranks
# that share the masters.
type _Masters = Sequence[torch.Tensor | None]
type _Starts = Sequence[int | None]
type _Group = torch.distributed.ProcessGroup

# In E4M3.
_NAN_CODE = 0x7F
# Values that are cast at once; meanwhile each takes four bytes.
_PIECE = 2**24
# What is used of TE, with the parameters passed by name; compiled functions do not tell theirs.
_NEEDED: dict[str, dict[str, tuple[str, ...]]] = {
    "transformer_engine.pytorch.tensor.float8_tensor": {
        "Float8Quantizer": ("scale", "amax", "fp8_dtype", "columnwise"),
        "Float8CurrentScalingQuantizer": ("force_pow_2_scales", "amax_epsilon"),
    },
    "transformer_engine.pytorch.tensor.utils": {
        # megatron-core makes the transposes with it, after the gather.
        "post_all_gather_processing": (),
        "cast_master_weights_to_fp8": ("manual_post_all_gather_processing",),
    },
    "transformer_engine.pytorch.optimizers.multi_tensor_apply": {"multi_tensor_applier": ()},
    "transformer_engine_torch": {"compute_amax": (), "multi_tensor_compute_scale_and_scale_inv": ()},
}


class StoredWeight(torch.Tensor):
    """E4M3 codes with one scale that pass for a high-precision matrix.

    Views are views of the codes, unless they ask for another type. `copy_` casts. All other operations read the values
    that the codes stand for, and none writes to them.
    """

    codes: torch.Tensor
    """uint8 [out, in]; a part of the buffer of `DistributedDataParallel` once that is built."""
    scale: torch.Tensor
    """fp32 [1]: values were multiplied by it."""
    largest: torch.Tensor
    """fp32 [1]: the amax that the scale came from, which may be infinite or NaN."""
    scale_rule: ScaleRule | None
    """None for a part of a weight, which cannot be cast by itself."""

    @staticmethod
    def __new__(
        cls: type[Self],
        codes: torch.Tensor,
        *,
        scale: torch.Tensor,
        largest: torch.Tensor,
        scale_rule: ScaleRule | None,
        dtype: torch.dtype,
    ) -> Self:
        """Wraps codes; `dtype` is what the weight passes for."""
        weight: Self = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, strides=codes.stride(), dtype=dtype, device=codes.device
        )
        weight.codes, weight.scale, weight.largest, weight.scale_rule = codes, scale, largest, scale_rule
        return weight

    @classmethod
    def in_place_of(cls, weight: torch.nn.Parameter, scale_rule: ScaleRule) -> torch.nn.Parameter:
        """A parameter with the shape and the attributes of another, without its values."""
        codes = torch.zeros_like(weight, dtype=torch.uint8)
        scale, largest = (torch.zeros(1, dtype=torch.float32, device=weight.device) for _ in range(2))
        stored = torch.nn.Parameter(cls(codes, scale=scale, largest=largest, scale_rule=scale_rule, dtype=weight.dtype))
        vars(stored).update(vars(weight))
        return stored

    def dequantize(self) -> torch.Tensor:
        """The values that the codes stand for."""
        values: torch.Tensor = self.codes.view(torch.float8_e4m3fn).float() * self.scale.reciprocal()
        return values.to(self.dtype)

    # megatron-core's name for it where TE is not installed.
    from_float8 = dequantize

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"StoredWeight({list(self.shape)}, scale={self.scale.item():.6g})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        weight, kwargs = args[0], kwargs or {}
        if func.is_view and func is not torch.ops.aten.view.dtype:
            return tree_map(weight._around, func(weight.codes, *args[1:], **kwargs))
        if func is torch.ops.aten.copy_.default and isinstance(weight, cls):
            weight._cast(args[1].dequantize() if isinstance(args[1], cls) else args[1])
            return weight
        if func._schema.is_mutable and any(isinstance(leaf, cls) for leaf in tree_leaves(weight)):
            raise TypeError(f"{func} would write to a weight that is stored in FP8")
        return func(*tree_map(_values, args), **tree_map(_values, kwargs))

    def _around(self, codes: torch.Tensor) -> Self:
        rule = self.scale_rule if codes.numel() == self.codes.numel() else None
        return type(self)(codes, scale=self.scale, largest=self.largest, scale_rule=rule, dtype=self.dtype)

    def _cast(self, values: torch.Tensor) -> None:
        assert self.scale_rule is not None, "a part of a weight has no scale of its own"
        self.largest.copy_(values.abs().max().view(1))
        self.scale.copy_(self.scale_rule(self.largest))
        _write_codes(self.codes, values, self.scale)


def _values(argument: Any) -> Any:
    return argument.dequantize() if isinstance(argument, StoredWeight) else argument


def _write_codes(codes: torch.Tensor, values: torch.Tensor, scale: torch.Tensor) -> None:
    # A clamp would read and write all values again. Without it, what an amax missed becomes NaN, and shows.
    codes.view(torch.float8_e4m3fn).copy_(values.float() * scale)


def own_codes(weight: Any, start: int, size: int) -> torch.Tensor:
    """The codes, uint8 [size], of this rank's part of an FP8 weight, which starts at the value `start`."""
    # A weight that is not whole has its part elsewhere.
    own: torch.Tensor | None = getattr(weight, "own_part", None)
    if own is not None:
        return own
    return memory_of(weight).reshape(-1)[start : start + size]


def memory_of(weight: Any) -> torch.Tensor:
    """The tensor that a weight's values lie in: the codes of one that is stored in FP8, otherwise itself."""
    name = _name_of_codes(weight)
    memory: torch.Tensor = weight if name is None else getattr(weight, name)
    return memory


def put_memory(weight: Any, memory: torch.Tensor) -> None:
    """Lets a weight's values lie in a tensor of its shape, without copying them."""
    match _name_of_codes(weight):
        case "codes":
            weight.codes = memory
        case "_data":
            weight._data = memory
        case "_rowwise_data":
            weight._rowwise_data = memory
        case None:
            weight.data = memory


def put_nothing(weight: Any) -> None:
    """Lets one value, NaN, stand for all of a weight's: nothing can be viewed of a weight without memory."""
    memory = memory_of(weight).detach()
    nan = memory.new_full((), _NAN_CODE) if memory.dtype is torch.uint8 else memory.new_full((), torch.nan)
    put_memory(weight, nan.expand(memory.shape))


def _name_of_codes(weight: Any) -> str | None:
    return next((name for name in ("codes", "_data", "_rowwise_data") if hasattr(weight, name)), None)


def drop_transpose(weight: Any) -> None:
    """Frees the transpose of a weight that TE has stored in FP8; products that need one make it again."""
    if is_float8tensor(weight) and not isinstance(weight, StoredWeight):
        weight.update_usage(rowwise_usage=True, columnwise_usage=False)


def _cast_stored(weights: Sequence[StoredWeight], masters: _Masters, starts: _Starts, group: _Group) -> None:
    """`cast_masters` for stored weights."""
    held = [(index, master) for index, master in enumerate(masters) if master is not None]
    amaxes = torch.zeros(len(weights), dtype=torch.float32, device=weights[0].device)
    if held:
        largest = torch._foreach_norm([master for _, master in held], torch.inf)
        # Indexing with host numbers would wait for the device.
        parts = amaxes.split(1)
        torch._foreach_copy_([parts[index] for index, _ in held], torch.stack(largest).float().split(1))
    torch.distributed.all_reduce(amaxes, op=torch.distributed.ReduceOp.MAX, group=group)
    scale_rule = weights[0].scale_rule
    assert scale_rule is not None, "parameters are whole weights"
    torch._foreach_copy_([weight.largest for weight in weights], amaxes.split(1))
    torch._foreach_copy_([weight.scale for weight in weights], scale_rule(amaxes).split(1))
    for index, master in held:
        weight, start = weights[index], starts[index]
        assert start is not None
        codes = own_codes(weight, start, master.numel())
        for piece, values in zip(codes.split(_PIECE), master.view(-1).split(_PIECE), strict=True):
            _write_codes(piece, values, weight.scale)


def install_stored_weights() -> None:
    """Makes megatron-core treat a `StoredWeight` as an FP8 weight, beside TE's own if TE is installed."""
    core = FP8_WEIGHTS.owner()
    if core.FP8_TENSOR_CLASS is StoredWeight or isinstance(core.FP8_TENSOR_CLASS, tuple):
        return
    replace_of_te, finish_of_te = core._modify_underlying_storage_impl, core.te_post_all_gather_processing

    def replace(weight: Any, codes: torch.Tensor) -> None:
        if not isinstance(weight, StoredWeight):
            replace_of_te(weight, codes)
            return
        codes.copy_(weight.codes)
        weight.codes = codes

    def finish(weights: list[Any]) -> None:
        # Local products make the transposes that they read (`fp8.linear_products`).
        if of_te := [weight for weight in weights if not isinstance(weight, StoredWeight)]:
            finish_of_te(of_te)

    patch(
        FP8_WEIGHTS,
        HAVE_TE_FP8_TENSOR_CLASS=True,
        FP8_TENSOR_CLASS=(core.FP8_TENSOR_CLASS, StoredWeight) if core.HAVE_TE_FP8_TENSOR_CLASS else StoredWeight,
        _modify_underlying_storage_impl=replace,
        te_post_all_gather_processing=None if finish_of_te is None else finish,
    )


def _cast_part(
    weight: Any, master: torch.Tensor | None, start: int | None, scale: torch.Tensor, amax: torch.Tensor
) -> None:
    """Writes this rank's part of a master, times `scale` [1], into a TE weight; see `cast_masters`.

    `amax`, [1], is raised to the largest magnitude; it is empty if nobody needs it.
    """
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    if master is None:
        return
    assert start is not None
    codes = own_codes(weight, start, master.numel())
    quantizer = Float8Quantizer(scale=scale, amax=amax, fp8_dtype=weight._fp8_dtype, columnwise=False)
    # Rounded to BF16 first, so the codes are those of a run without FP8 parameters.
    quantizer.update_quantized(master.to(weight.dtype), quantizer.create_tensor_from_data(codes, weight.dtype))


def _cast_delayed(weights: Sequence[Any], masters: _Masters, starts: _Starts, group: _Group) -> None:
    """Casts with the present scales; the amaxes of all ranks go into the histories."""
    quantizers = [weight._get_quantizer() for weight in weights]
    for weight, master, start, quantizer in zip(weights, masters, starts, quantizers, strict=True):
        _cast_part(weight, master, start, quantizer.scale, quantizer.amax)
    amaxes = [quantizer.amax.view(1) for quantizer in quantizers]
    largest = torch.cat(amaxes)
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    torch._foreach_copy_(amaxes, largest.split(1))
    inverses = torch.cat([quantizer.scale.view(1) for quantizer in quantizers]).reciprocal_()
    torch._foreach_copy_([weight._scale_inv.view(1) for weight in weights], inverses.split(1))


def _cast_tensorwise(weights: Sequence[Any], masters: _Masters, starts: _Starts, group: _Group) -> None:
    """Casts with scales from the amaxes of these values over all ranks."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.optimizers.multi_tensor_apply import multi_tensor_applier

    quantizers = [weight._get_quantizer() for weight in weights]
    device = weights[0].device
    largest = torch.zeros(len(weights), dtype=torch.float32, device=device)
    for master, amax in zip(masters, largest.split(1), strict=True):
        if master is not None:
            tex.compute_amax(master, amax)
    # The largest rounded value is the largest value, rounded.
    largest.copy_(largest.to(weights[0].dtype))
    torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    scales = [quantizer.scale.view(1) for quantizer in quantizers]
    multi_tensor_applier(
        tex.multi_tensor_compute_scale_and_scale_inv,
        torch.zeros(1, dtype=torch.int, device=device),
        [list(largest.split(1)), scales, [weight._scale_inv.view(1) for weight in weights]],
        FORMAT_MAX["e4m3"],
        quantizers[0].force_pow_2_scales,
        quantizers[0].amax_epsilon,
    )
    for weight, master, start, scale in zip(weights, masters, starts, scales, strict=True):
        _cast_part(weight, master, start, scale, torch.empty(0))


def cast_masters(weights: Sequence[Any], masters: _Masters, starts: _Starts, group: _Group) -> None:
    """Writes this rank's parts of the masters into its FP8 weights; all ranks of the group call it.

    The weights are whole and of one recipe; scales come from the parts of all ranks.
    """
    if not weights:
        return
    if isinstance(weights[0], StoredWeight):
        _cast_stored(weights, masters, starts, group)
        return
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer

    quantizer = weights[0]._get_quantizer()
    if isinstance(quantizer, Float8Quantizer):
        cast = _cast_delayed
    elif isinstance(quantizer, Float8CurrentScalingQuantizer):
        cast = _cast_tensorwise
    else:
        # Weights in blocks. TE raises an error for a quantizer that it cannot cast this way.
        cast = _cast_blocks
    cast(weights, masters, starts, group)


def _cast_blocks(weights: Sequence[Any], masters: _Masters, starts: _Starts, group: _Group) -> None:
    parts = [
        None if master is None or start is None else own_codes(weight, start, master.numel())
        for weight, master, start in zip(weights, masters, starts, strict=True)
    ]
    quantize_param_shard(weights, masters, starts, group, parts)


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
                lacking = set(parameters) - set(inspect.signature(found).parameters)
                missing += [f"{module_name}.{name}({parameter}=)" for parameter in parameters if parameter in lacking]
    return missing


def install_weight_cast(*, of_te: bool) -> None:
    """Makes megatron-core's distributed optimizer cast FP8 weights, TE's or not, with `cast_masters`.

    Raises:
        UserError: The installed TE lacks what that needs.
    """
    missing = _what_is_missing() if of_te else []
    if missing:
        version = importlib.metadata.version("transformer_engine")
        raise UserError(
            "model.fp8_params=true casts weights with parts of Transformer Engine (tested: 2.12) that the installed "
            f"{version} lacks: {', '.join(missing)}; use another version, or false"
        )
    patch(WEIGHT_CAST, quantize_param_shard=cast_masters)
