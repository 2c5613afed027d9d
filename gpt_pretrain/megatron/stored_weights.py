"""Weights that local layers store in FP8 (`model.fp8_params` with TorchAO), and their cast from masters.

megatron-core's distributed optimizer asks of an FP8 weight that it looks like one in BF16 and keeps its bytes
elsewhere. It lays these bytes into a buffer of their own, hands the shards of masters over to be cast, and gathers the
bytes, one per value, as it gathers BF16 weights (`param_and_grad_buffer`, `distrib_optimizer`). It knows Transformer
Engine's (TE) classes; `StoredWeight` is one that needs no TE, and no GPU.

After each update every rank casts its own parts:

    amax = the largest magnitude of the weight's master, over all ranks that share it (one collective for all weights)
    scale = 448 / amax                     as TorchAO computes it
    code = round(master · scale)           E4M3, from the master itself; nothing lies beyond 448

The master is rounded once, as TorchAO rounds FSDP2's fp32 shards (TorchAO 0.18, float8/fsdp_utils.py:
`fsdp_pre_all_gather`, `precompute_float8_dynamic_scale_for_fsdp`). TE rounds it to BF16 first, and so does a run
without `model.fp8_params`, which casts BF16 weights: there about 2% of the codes are the next ones. Tensor parallel
ranks have scales of their own, as they do in that cast.
"""

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch.utils._pytree import tree_leaves, tree_map

from gpt_pretrain.megatron.patches import FP8_WEIGHTS, patch

# From amaxes [n] to scales [n], fp32.
type ScaleRule = Callable[[torch.Tensor], torch.Tensor]

# Values that are cast at once: in between they take four bytes each.
_PIECE = 2**24


class StoredWeight(torch.Tensor):
    """E4M3 codes with one scale that pass for a matrix of high precision.

    Views are views of the codes, unless they ask for another type. `copy_` casts what it is given. Any other operation
    reads the values that the codes stand for, and none writes to them.
    """

    codes: torch.Tensor
    """uint8 [out, in]; after `DistributedDataParallel` has been built, a part of its buffer."""
    scale: torch.Tensor
    """fp32 [1]: the factor of the values."""
    largest: torch.Tensor
    """fp32 [1]: the amax that the scale came from, infinities and NaN included."""
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
        """The shape alone: values are many, and few of them say anything."""
        return f"StoredWeight({list(self.shape)}, scale={self.scale.item():.6g})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See the class."""
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
    # No clamp, which would read and write all of them once more: what an amax leaves out becomes NaN, and shows.
    codes.view(torch.float8_e4m3fn).copy_(values.float() * scale)


def cast_shards(
    weights: Sequence[StoredWeight],
    masters: Sequence[torch.Tensor | None],
    starts: Sequence[int | None],
    group: torch.distributed.ProcessGroup,
) -> None:
    """Writes this rank's parts of the masters into its weights; the arguments are those of `weights.cast_masters`."""
    held = [(index, master) for index, master in enumerate(masters) if master is not None]
    amaxes = torch.zeros(len(weights), dtype=torch.float32, device=weights[0].device)
    if held:
        largest = torch._foreach_norm([master for _, master in held], torch.inf)
        # Indexing by numbers of the host would wait for the device.
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
        codes = weight.codes.view(-1)[start : start + master.numel()]
        for piece, values in zip(codes.split(_PIECE), master.view(-1).split(_PIECE), strict=True):
            _write_codes(piece, values, weight.scale)


def install_stored_weights() -> None:
    """Makes megatron-core take a `StoredWeight` for an FP8 weight, beside TE's own where TE is installed."""
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
        # Products make the transposes that they read (`fp8.linear_products`).
        of_te = [weight for weight in weights if not isinstance(weight, StoredWeight)]
        if of_te:
            finish_of_te(of_te)

    patch(
        FP8_WEIGHTS,
        HAVE_TE_FP8_TENSOR_CLASS=True,
        FP8_TENSOR_CLASS=(core.FP8_TENSOR_CLASS, StoredWeight) if core.HAVE_TE_FP8_TENSOR_CLASS else StoredWeight,
        _modify_underlying_storage_impl=replace,
        te_post_all_gather_processing=None if finish_of_te is None else finish,
    )
