"""Tiny GPTs whose weights are stored in FP8: what is seen of them, and ways in which their cast can be wrong."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from megatron.core.distributed import param_and_grad_buffer
from torchao.float8 import Float8LinearConfig, ScalingGranularity
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import LinearMMConfig

from gpt_pretrain.megatron import stored_weights
from gpt_pretrain.megatron.stored_weights import StoredWeight
from tests.emulated_training import Training, emulate
from tests.sabotages import prove

# Without it two data parallel ranks would share the weights out layer by layer, and none would be cast by both.
KEPT_OUT = "decoder.layers.1.mlp.linear_fc2"
# Without clipping, whose norm is summed up in another order in each layout.
STORED = (
    *emulate("torchao_tensorwise"),
    "model.fp8_params=true",
    "trainer.precision=bf16",
    "trainer.gradient_clip_val=0",
    f"model.fp8_exclude=[{KEPT_OUT}]",
)
NOT_STORED = tuple(each for each in STORED if "fp8_params" not in each)
STEPS = 3


def distributed_optimizer(training: Training) -> Any:
    optimizer: Any = training.trainable.optimizer
    (part,) = optimizer.chained_optimizers
    return part


def torchaos_cast(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, uint8, and scale [1] that TorchAO's own cast makes of a master."""
    cast = Float8LinearConfig.from_recipe_name("tensorwise").cast_config_weight
    theirs = hp_tensor_to_float8_dynamic(
        master, cast.target_dtype, LinearMMConfig(), scaling_granularity=ScalingGranularity.TENSORWISE
    )
    return theirs._data.view(torch.uint8), theirs._scale.view(1)


@contextmanager
def watched_gathers() -> Iterator[Counter[torch.dtype]]:
    """Counts the values that parameters' gathers bring to this rank, by the type of the tensors handed over."""
    counted: Counter[torch.dtype] = Counter()
    gather = param_and_grad_buffer.dist_all_gather_func

    def watched(output: torch.Tensor, own: torch.Tensor, **options: Any) -> Any:
        assert output.dtype is own.dtype
        counted[output.dtype] += output.numel()
        return gather(output, own, **options)

    param_and_grad_buffer.dist_all_gather_func = watched
    try:
        yield counted
    finally:
        param_and_grad_buffer.dist_all_gather_func = gather


def observed(training: Training) -> dict[str, Any]:
    """Trains `STEPS` steps, the last of which is proven.

    Returns:
        "losses"; "gathered", values by type in one step; "weights": by layer the codes, scale and amax that this rank
        has after all have been gathered, "master", this rank's part of the master, and "start", where it begins;
        "num_plain", parameters that are not stored in FP8; "share", the model's bytes in FP8 by the proof.
    """
    losses = [training.step()]
    with watched_gathers() as gathered:
        losses.append(training.step())
    with training.trainable.model.gathered_parameters():
        pass
    proven = prove(training, step=STEPS)
    names = {id(layer.weight): name for name, layer in training.layers().items()}
    with training.trainable.model.gathered_parameters():
        rows = zip(*distributed_optimizer(training)._get_fp8_params_and_shard_fp32_from_fp8(), strict=True)
        weights = {
            names[id(weight)]: {
                "codes": weight.codes.clone(),
                "scale": weight.scale.clone(),
                "amax": weight.largest.clone(),
                "master": None if master is None else master.clone(),
                "start": start,
            }
            for weight, master, start in rows
        }
    parameters = [parameter for chunk in training.chunks for parameter in chunk.parameters()]
    return {
        "losses": losses,
        "gathered": dict(gathered),
        "weights": weights,
        "num_plain": sum(each.numel() for each in parameters if not isinstance(each, StoredWeight)),
        "share": proven.fp8_parameter_bytes_share,
    }


@contextmanager
def _nothing_written(training: Training) -> Iterator[None]:
    write = stored_weights._write_codes
    stored_weights._write_codes = lambda *_: None
    try:
        yield
    finally:
        stored_weights._write_codes = write


@contextmanager
def _scales_of_other_amaxes(training: Training) -> Iterator[None]:
    """Codes agree with their scales, which are of masters that were larger."""
    weights, _, _ = distributed_optimizer(training)._get_fp8_params_and_shard_fp32_from_fp8()
    rule = weights[0].scale_rule
    weights[0].scale_rule = lambda amaxes: rule(1.25 * amaxes)
    yield


# What one rank does wrong.
SABOTAGES: dict[str, Callable[[Training], AbstractContextManager[None]]] = {
    "a part that is not cast again": _nothing_written,
    "stale scales": _scales_of_other_amaxes,
}
