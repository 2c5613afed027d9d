"""An optimizer's state in a checkpoint: one form for all layouts of parameters and states.

megatron-core 0.19 writes another form from each of its optimizers: plain, with masters, distributed. Here all write the
same. A parameter's tensors lie under `optimizer.state.KIND.PARAMETER` in the parameter's own shape, with KIND exp_avg
and exp_avg_sq (Adam), momentum_buffer (SGD, Muon), ema (`weight_average`) and fp32_param (masters of BF16 parameters).
The step count is one number. All else comes from the configuration. States in fewer bytes than fp32 are saved as plain
numbers, in the smallest type that holds them exactly, and read into host memory first, so runs with and without them
continue from each other's checkpoints.

megatron-core 0.19 gathers what a distributed optimizer shards on every rank before it saves: 12 bytes of host memory
per parameter, and seconds without training. Here each rank writes and reads its own boxes (`checkpoint_boxes`).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace, nested_values
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.config.derived import shards_weights
from gpt_pretrain.kernels import SCALED_BLOCK
from gpt_pretrain.kernels.adam import Master, Moment, StoredValues
from gpt_pretrain.megatron.checkpoint_boxes import boxes_of_part, tensors_of
from gpt_pretrain.megatron.model import Model
from gpt_pretrain.megatron.muon import Muon
from gpt_pretrain.megatron.optimizer import allocate_states
from gpt_pretrain.megatron.precision_aware import PrecisionAwareAdam, PrecisionAwareOptimizer
from gpt_pretrain.megatron.weight_average import AVERAGE

STATES, _MASTER = "optimizer.state.", "fp32_param"
# Values copied to the device at once, to be stored there in fewer bytes.
_VALUES_AT_ONCE = 2**16 * SCALED_BLOCK


def is_moment(key: str) -> bool:
    """Whether a tensor of a checkpoint is an optimizer's state other than a master."""
    return key.startswith(STATES) and not key.startswith(f"{STATES}{_MASTER}.")


def is_average(key: str) -> bool:
    """Whether a tensor of a checkpoint is a weight averaged over steps."""
    return key.startswith(f"{STATES}{AVERAGE}.")


def sharded_optimizer_state(
    optimizer: MegatronOptimizer,
    model_state: dict[str, Any],
    *,
    metadata: dict[str, Any],
    is_loading: bool,
    masters_alone: bool = False,
) -> dict[str, Any]:
    """This rank's part of the optimizer, to write from or to read into.

    Args:
        optimizer: megatron-core's; it gets its states if it made no step yet.
        model_state: The sharded state of the model's chunks, with the tensors' names and places.
        metadata: megatron-core's choice of formats.
        is_loading: Whether the tensors are to be read into.
        masters_alone: Whether other states stay what they are, because another optimizer saved.

    Returns:
        "step": steps taken; "tensors": what belongs to parameters; "parts": what stays on this rank, for
        `load_optimizer_state`.
    """
    parts = _parts(optimizer)
    tensors: dict[str, Any] = {}
    nested: list[Any] = []
    for part in parts:
        # megatron-core's function forgets Adam's step count, which torch keeps beside the moments.
        part.init_state_fn = lambda inner, *_: allocate_states(inner)
        allocate_states(part.optimizer)
        if isinstance(part, DistributedOptimizer):
            host = None
            if is_loading and isinstance(part, PrecisionAwareOptimizer):
                host = _HostStates(part, masters_alone=masters_alone)
            states_of = host or partial(_states_as_they_lie, part, masters_alone=masters_alone)
            shards = _own_shards(part, model_state, states_of)
            state = {str(len(tensors) + index): shard for index, shard in enumerate(shards)}
            tensors |= state
            nested.append(_Shards({name: shard.data for name, shard in state.items()}, host))
        else:
            state = part.sharded_state_dict(dict(model_state), is_loading=is_loading, metadata=dict(metadata))
            dict_list_map_inplace(partial(_take_tensor, tensors, masters_alone), state)
            nested.append(state)
    return {
        "step": max((_steps_taken(part.optimizer) for part in parts), default=0),
        "tensors": tensors,
        "parts": LocalNonpersistentObject(nested),
    }


@torch.no_grad()
def load_optimizer_state(optimizer: MegatronOptimizer, state: dict[str, Any]) -> None:
    """Restores what `sharded_optimizer_state` described and megatron-core has read."""
    # A reader leaves out what is empty: fp32 weights have no masters to be loaded alone.
    step, tensors = state["step"], state.get("tensors", {})
    for part, nested in zip(_parts(optimizer), state["parts"], strict=True):
        if isinstance(part, DistributedOptimizer):
            for name, own in nested.own.items():
                own.copy_(tensors[name])
            if nested.host is not None:
                nested.host.store()
        else:
            dict_list_map_inplace(partial(_put_tensor, tensors), nested)
            if _counts_steps(part.optimizer):
                nested.get("optimizer", nested)["state"]["common_step"] = torch.tensor(float(step))
            part.load_state_dict(nested)
        if isinstance(part.optimizer, PrecisionAwareAdam | Muon):
            part.optimizer.steps_taken.fill_(step)
        if _counts_steps(part.optimizer):
            # megatron-core gives all parameters one step tensor, which each would count up, and Muon's one, too.
            for parameter, states in part.optimizer.state.items():
                if "momentum_buffer" in states:
                    states.pop("step", None)
                else:
                    states["step"] = torch.tensor(float(step), device=parameter.device)


@torch.no_grad()
def make_masters_from_weights(optimizer: MegatronOptimizer, model: Model, weights: Mapping[Any, Any]) -> None:
    """Makes masters from weights that were loaded without an optimizer, and FP8 weights from these masters.

    The chunks hold the weights already; `weights` has the loaded tensors before any rounding to FP8, by chunk: `model`,
    or `model0`, `model1`, …. Of sharded weights it has this rank's parts, by parameter (`own_parts.OwnParts.values`).
    """
    for part in _parts(optimizer):
        if shards_weights(model.spec.model):
            part.take_parts(weights)
        elif isinstance(part, DistributedOptimizer):
            part.reload_model_params({key: dict(state) for key, state in weights.items()})
        else:
            part.reload_model_params()
    share_weights_of_masters(optimizer, model)


@torch.no_grad()
def share_weights_of_masters(optimizer: MegatronOptimizer, model: Model) -> None:
    """Makes weights follow the loaded masters on all ranks; scales must be loaded already.

    FP8 weights are BF16 in megatron-core's checkpoints. Cast from there, each would take the scale of a fresh model
    (delayed) or one from a rounded amax (tensorwise), and the run would not continue from the weights it had.

    With the precision-aware optimizer each rank rewrote its part of the BF16 weights from its masters. Masters saved in
    another type make it differ from the loaded weights that other ranks still hold.
    """
    must_gather = False
    for part in _parts(optimizer):
        in_fp8 = isinstance(part, DistributedOptimizer) and part.ddp_config.fp8_param_gather
        if in_fp8:
            part._copy_main_params_to_model_params()
        must_gather |= in_fp8 or isinstance(part, PrecisionAwareOptimizer)
    if must_gather:
        for chunk in model.chunks:
            chunk.start_param_sync(force_sync=True)


def _parts(optimizer: MegatronOptimizer) -> list[Any]:
    """The optimizers of the chain that have parameters on this rank."""
    return [part for part in optimizer.chained_optimizers if not part.is_stub_optimizer]


def _counts_steps(inner: torch.optim.Optimizer) -> bool:
    """Whether torch keeps a step count beside each parameter's states."""
    return any("step" in states for states in inner.state.values())


def _steps_taken(inner: torch.optim.Optimizer) -> int:
    if isinstance(inner, PrecisionAwareAdam | Muon):
        return int(inner.steps_taken)
    return next((int(state["step"]) for state in inner.state.values() if "step" in state), 0)


def _states_as_they_lie(
    part: DistributedOptimizer, parameter: torch.nn.Parameter, *, masters_alone: bool
) -> Mapping[str, torch.Tensor]:
    """Masters and moments of a parameter, [n] each; those in fewer bytes are read only when they are saved."""
    if isinstance(part, PrecisionAwareOptimizer):
        return {kind: StoredValues(state) for kind, state in part.states(parameter).items()}
    states: dict[str, torch.Tensor] = dict(part._get_main_param_and_optimizer_states(parameter))
    master = states.pop("param")
    # The step count is one number for all. Without BF16 parameters the masters are the parameters.
    states.pop("step", None)
    return {**({_MASTER: master} if part.config.bf16 else {}), **({} if masters_alone else states)}


class _HostStates:
    """Host memory for states in few bytes, which may not fit the device as plain numbers."""

    def __init__(self, part: PrecisionAwareOptimizer, *, masters_alone: bool) -> None:
        self._part, self._masters_alone = part, masters_alone
        self._read: list[tuple[Master | Moment, torch.Tensor]] = []

    def __call__(self, parameter: torch.nn.Parameter) -> Mapping[str, torch.Tensor]:
        """Memory for the states of a parameter, [n] each."""
        targets = {}
        for kind, state in self._part.states(parameter).items():
            if self._masters_alone and kind != _MASTER:
                continue
            targets[kind] = torch.empty(state.values.shape, dtype=state.saved_as, device="cpu")
            self._read.append((state, targets[kind]))
        return targets

    def store(self) -> None:
        """Stores the states on the device."""
        for state, values in self._read:
            for start in range(0, values.numel(), _VALUES_AT_ONCE):
                state.write(start, values[start : start + _VALUES_AT_ONCE].to(state.values.device).float())


@dataclass(frozen=True, slots=True)
class _Shards:
    """What a checkpoint is read into."""

    own: dict[str, torch.Tensor]
    """The tensors by their names in the state."""
    host: _HostStates | None
    """Owns the memory; None: the optimizer does."""


class _Place(str):
    """Stands for a tensor that was taken out, by its name among the tensors."""

    __slots__ = ()


def _take_tensor(tensors: dict[str, Any], masters_alone: bool, leaf: Any) -> Any:
    if isinstance(leaf, LocalNonpersistentObject):
        return leaf.unwrap()
    if not isinstance(leaf, ShardedTensor | ShardedTensorFactory):
        return leaf
    if masters_alone and is_moment(leaf.key):
        return leaf.data
    place = _Place(len(tensors))
    tensors[str(place)] = leaf
    return place


def _put_tensor(tensors: dict[str, torch.Tensor], leaf: Any) -> Any:
    return tensors[str(leaf)] if isinstance(leaf, _Place) else leaf


def _own_shards(
    part: DistributedOptimizer,
    model_state: dict[str, Any],
    states_of: Callable[[torch.nn.Parameter], Mapping[str, torch.Tensor]],
) -> Iterator[ShardedTensor]:
    """Masters and moments of this rank, with their places in the parameters' tensors.

    `model_state`, the sharded state of the model's chunks, gives the parameters' places in the whole model; `states_of`
    gives this rank's states of a parameter, [n] each, by their kinds in a checkpoint.
    """
    entries = nested_values(model_state)
    places = {entry.data: entry for entry in entries if isinstance(entry, ShardedTensor | ShardedTensorFactory)}
    buckets = [bucket for ranges in part.gbuf_ranges for of_dtype in ranges.values() for bucket in of_dtype]
    for bucket in buckets:
        for parameter, ranges in bucket["param_map"].items():
            for kind, values in states_of(parameter).items():
                for place in tensors_of(places[parameter], f"{STATES}{kind}.", values.dtype):
                    start, instance = ranges["param"].start, part.distributed_optimizer_instance_id
                    yield from boxes_of_part(place, values, start, instance)
