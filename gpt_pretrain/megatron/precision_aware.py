"""megatron-core's distributed optimizer around an Adam that keeps its states in fewer bytes.

megatron-core 0.19 has two ways with masters. Its own makes them in fp32, copies gradients to fp32 for each step, and
casts FP8 weights of every recipe. Its precision-aware one leaves masters to Transformer Engine's FusedAdam and reads
gradients where they are, but knows FP8 weights with delayed scaling only (of others it hands over None). Here the first
builds everything, and then masters take the type that was asked for, gradients are read where they are, and Adam writes
BF16 weights itself. FP8 weights are cast from the masters as they are without all this.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from gpt_pretrain.kernels.adam_states import Master, Moment
from gpt_pretrain.megatron.adam import PrecisionAwareAdam


class PrecisionAwareOptimizer(DistributedOptimizer):  # type: ignore[misc]  # megatron-core has no types
    """A distributed optimizer around `PrecisionAwareAdam`; arguments are megatron-core's."""

    optimizer: PrecisionAwareAdam
    config: OptimizerConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Norms and zeroing are those of gradients that have another type than the masters. Not before the masters are
        # made, and others are made of the same config.
        self.config = copy.copy(self.config)
        self.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        if self.is_stub_optimizer:
            return
        for weight, master in self._weights_and_masters():
            # Read by the kernel, and changed in the kernel: a weight that is cast to FP8 later is neither.
            follows = weight is not None and not self._is_distopt_quantized_param(weight)
            remainders = follows and self.config.store_param_remainders
            if remainders and self.config.main_params_dtype is torch.float32:
                master.data = torch.zeros_like(master, dtype=torch.int16)
            else:
                master.data = master.to(self.config.main_params_dtype)
            self.optimizer.allocate(master, weight if follows else None)
        for group in self.shard_fp32_groups:
            for parameter in group:
                self.optimizer.allocate(parameter, None)
        # Masters in fp32, one by one: nothing else has use for their memory.
        torch.cuda.empty_cache()

    def _weights_and_masters(self) -> Iterator[tuple[torch.Tensor | None, torch.Tensor]]:
        """This rank's parts of parameters that have masters; None for FP8 weights that have no flat form."""
        for weights, masters in zip(self.shard_float16_groups, self.shard_fp32_from_float16_groups, strict=True):
            yield from zip(weights, masters, strict=True)

    def _parameters_and_masters(self) -> Iterator[tuple[Any, Any]]:
        """Parameters of which this rank has a part, and the masters of these parts."""
        for parameter_groups, master_groups in (
            (self.model_float16_groups, self.shard_fp32_from_float16_groups),
            (self.model_fp32_groups, self.shard_fp32_groups),
        ):
            for parameters, masters in zip(parameter_groups, master_groups, strict=True):
                yield from zip(parameters, masters, strict=True)

    def _copy_model_grads_to_main_grads(self) -> None:
        """Lets Adam read gradients where they were reduced."""
        for parameter, master in self._parameters_and_masters():
            part = self._get_model_param_range_map(parameter)["param"]
            master.decoupled_grad = parameter.main_grad.view(-1)[part.start : part.end]

    def _copy_main_params_to_model_params(self) -> None:
        """Casts FP8 weights from their masters; the others were written with theirs."""
        if not self.is_stub_optimizer and self.ddp_config.fp8_param_gather:
            distrib_optimizer.quantize_param_shard(
                *self._get_fp8_params_and_shard_fp32_from_fp8(), self.data_parallel_group
            )

    def _copy_model_params_to_main_params(self, state_dict: dict[str, Any]) -> None:
        """Makes the masters what weights say that were loaded without them.

        Args:
            state_dict: The loaded weights by chunk, in high precision.
        """
        loaded = self._build_model_param_to_state_dict_param_map(state_dict)
        for parameter, master in self._parameters_and_masters():
            part = self._get_model_param_range_map(parameter)["param"]
            values = loaded[parameter].detach().view(-1)[part.start : part.end]
            self.optimizer.states[master].master.write(0, values.float())

    def states(self, parameter: torch.nn.Parameter) -> Mapping[str, Master | Moment]:
        """What this rank has of a parameter, by the names of a checkpoint."""
        group, index = self.model_param_group_index_map[parameter]
        return self.optimizer.states[self.optimizer.param_groups[group]["params"][index]].by_name
