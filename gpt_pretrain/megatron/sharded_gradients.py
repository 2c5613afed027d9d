"""Data parallelism that keeps a rank's part of the gradients alone (`data_parallel_sharding_strategy=optim_grads`).

megatron-core's data parallelism holds the gradients of the whole model on every rank, sums microbatches there and
reduces once a step (`DistributedDataParallel`). Here each microbatch is reduced, section by section
(`run.sections`), while the backward pass goes on:

    the section opens             its gradients are set to zero, in memory that sections use in turn
    its layers' backward passes   add gradients to `main_grad`, views of that memory, as they always do
    its last gradient is there    the ranks reduce-scatter the section; the next section opens, in other memory
    the one after that opens      first the rank's part of the result is added to its sum over microbatches

So a gradient is a sum over ranks first and over microbatches then; megatron-core adds up microbatches first. With one
microbatch a step both do the same. Both add in the type of the gradients (`model.grad_reduce_in_fp32`) and use the same
collective.

Once the microbatches are through, `main_grad` is the rank's part of a parameter's gradient, [n], until the next step.
megatron-core's sums over tensor-parallel ranks and over both copies of a tied embedding work on it as it is, because
these ranks have the same part. The optimizer reads it through `reading_parts`. How a rank's part is cut differs from
megatron-core's buckets, and checkpoints do not depend on it (`optimizer_state`).

Products that can write a gradient over what is there do, and nothing is set to zero for them (`_written_over`).

An embedding that is also the head of the same chunk gets gradients at both ends of the backward pass. It has memory of
its own. The LM head's loss computes gradients in the forward pass, so the first section opens before that.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.fp8_utils import is_float8tensor
from megatron.core.optimizer import distrib_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.transformer import TransformerConfig
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from gpt_pretrain.config.choices import ShardingStrategy
from gpt_pretrain.launch.patches import GRADIENT_BUFFERS, patched
from gpt_pretrain.megatron.precision_aware import pairs_of_groups
from gpt_pretrain.megatron.section_buffers import (
    SectionBucket,
    SectionedBuffer,
    allocate,
    cut_into_sections,
    lay_out,
)
from gpt_pretrain.megatron.sharded_weights import WeightSection, WholeWeights
from gpt_pretrain.megatron.stored_weights import memory_of, put_memory, put_nothing


class _BucketGroup(_ParamAndGradBucketGroup):  # type: ignore[misc]
    """The buckets of a section whose gradients the same ranks share."""

    section_index: int
    section: "_Section"
    grad_reduce_handle: Any

    def register_grad_ready(self, param: torch.nn.Parameter, force_all_reduce: bool | None = False) -> None:
        """A parameter's gradient of this microbatch is complete."""
        self.section.take(param)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Sums or averages the gradients of a microbatch over the ranks; each keeps its part, in place."""
        assert self.grad_reduce_handle is None, "the section before it in this memory is not collected"
        group = self.intra_distributed_optimizer_instance_group
        operation = ReduceOp.AVG if self.ddp_config.average_in_collective else ReduceOp.SUM
        with _coalescing_manager(group, async_ops=True) as handle:
            for bucket in self.buckets:
                torch.distributed.reduce_scatter_tensor(
                    bucket.own, bucket.grad_data, op=operation, group=group, async_op=True
                )
        self.grad_reduce_handle = handle

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits, on the device, for the part of a microbatch, and adds it to the sum."""
        self.grad_reduce_handle.wait()
        self.grad_reduce_handle = None
        for bucket in self.buckets:
            bucket.add_up()


@dataclass(eq=False, repr=False)
class _Section:
    """What is complete at one point of the backward pass."""

    chunk: "ShardedGradients"
    groups: list[_BucketGroup]
    zeroed: list[torch.Tensor]
    """Gradients that are added to what is there."""
    waits_for: set[torch.nn.Parameter] | None = None
    """Parameters without a gradient of this microbatch; None: its memory is not the section's now."""

    def open(self) -> None:
        """Sets the gradients to zero, except for those that are written over what is there."""
        if self.zeroed:
            torch._foreach_zero_(self.zeroed)
        self.waits_for = {parameter for group in self.groups for parameter in group.params}

    def take(self, parameter: torch.nn.Parameter) -> None:
        """Notes a gradient; the last one starts the exchange.

        Raises:
            RuntimeError: The section has it already, or is not open: gradients were lost or mixed up.
        """
        if self.waits_for is None or parameter not in self.waits_for:
            raise RuntimeError(
                f"the gradient of {self.chunk.names[parameter]} came twice in a microbatch, or before those of later "
                "layers were complete; model.data_parallel_sharding_strategy=null does without this order"
            )
        self.waits_for.remove(parameter)
        if not self.waits_for:
            self.waits_for = None
            for group in self.groups:
                group.start_grad_sync()
            self.chunk.go_on_after(self)

    def collect(self) -> None:
        """Takes the results of the exchange out of the memory."""
        for group in self.groups:
            group.finish_grad_sync()


def _partition(buffers: Sequence[SectionedBuffer], **_: bool) -> list[_BucketGroup]:
    """megatron-core's `partition_buckets`: the buckets of a section are one group."""
    by_section: dict[int, list[SectionBucket]] = {}
    for buffer in buffers:
        for section, bucket in zip(buffer.sections, buffer.buckets, strict=True):
            by_section.setdefault(section, []).append(bucket)
    groups = []
    for section in sorted(by_section):
        ranks = buffers[0].data_parallel_group
        group = _BucketGroup(by_section[section], buffers[0].ddp_config, ranks, ranks.size())
        group.section_index = section
        groups.append(group)
    return groups


def _written_over(chunk: Any) -> Iterator[Any]:
    """Weights whose products write gradients over what `main_grad` holds, if they have `overwrite_main_grad`.

    That saves setting them to zero and reading them. Transformer Engine 2.12 asks the weight that it multiplied: where
    that is a copy in FP8 it would not find the mark, and add.
    """
    for module in chunk.modules():
        of_te = getattr(module, "fuse_wgrad_accumulation", False) and "weight" in module._parameters
        finds_mark = of_te and (is_float8tensor(module.weight) or not chunk.config.fp8)
        if finds_mark or getattr(module, "overwrites_main_grad", False):
            yield module.weight


class ShardedGradients(DistributedDataParallel):  # type: ignore[misc]
    """megatron-core's data parallelism around `module`, with sharded gradients; `chunk` is the model chunk inside."""

    def __init__(
        self,
        config: TransformerConfig,
        ddp_config: DistributedDataParallelConfig,
        module: torch.nn.Module,
        chunk: Any,
    ) -> None:
        names: dict[Any, str] = {each: name for name, each in module.named_parameters() if each.requires_grad}
        sections, tied = cut_into_sections(chunk, names, ddp_config.bucket_size)
        layout = lay_out(sections, list(names), ddp_config)
        (dtype,) = {key.grad_dtype for key in layout.layouts}
        allocate(layout.layouts.values(), len(sections) - tied, dtype)
        with patched(GRADIENT_BUFFERS, _ParamAndGradBuffer=SectionedBuffer, partition_buckets=_partition):
            super().__init__(config, ddp_config, module, full_param_layout=layout)
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            buffer.put_whole_memory()
        self.names = names
        self._groups: list[_BucketGroup] = self.bucket_groups + self.expert_parallel_bucket_groups
        self.sections = [_Section(self, [], []) for _ in sections]
        for group in self._groups:
            group.section = self.sections[group.section_index]
            group.section.groups.append(group)
        # Those that share memory, and what is open beside them.
        self._in_turn = self.sections[: len(sections) - tied]
        self._all_along = self.sections[len(sections) - tied :]
        # Whose results are still in their memory.
        self.exchanging: list[_Section] = []
        self._whole = {parameter: parameter.main_grad for parameter in names}
        for weight in _written_over(chunk):
            weight.overwrite_main_grad = True
        for parameter, group in self.param_to_bucket_group.items():
            if not getattr(parameter, "overwrite_main_grad", False):
                group.section.zeroed.append(parameter.main_grad)
        self._parts = {
            parameter: part
            for group in self._groups
            for bucket in group.buckets
            for parameter, part in bucket.parts(bucket.total)
        }
        self.weights: WholeWeights | None = None
        """None: weights are always whole."""
        if self._shards_weights:
            self.weights = self._share_weights_out(chunk)
        if chunk.post_process:
            chunk.output_layer.register_forward_pre_hook(self._before_head)

    @property
    def _shards_weights(self) -> bool:
        # megatron-core asks for hooks before `weights` is there.
        strategy: str = self.ddp_config.data_parallel_sharding_strategy
        return strategy == ShardingStrategy.optim_grads_params.value

    def _share_weights_out(self, chunk: Any) -> WholeWeights:
        """Weights that are whole in turn, in the sections of the gradients."""
        sections = [
            WeightSection([(each.intra_distributed_optimizer_instance_group, each.buckets) for each in section.groups])
            for section in self.sections
        ]
        num_in_turn = len(self._in_turn)
        # A pass begins with the section whose gradients come last.
        forward = sections[:num_in_turn][::-1]
        weights = WholeWeights(forward, sections[num_in_turn:], prefetches=self.ddp_config.overlap_param_gather)
        # A tied embedding is whole all along, once a pass has begun.
        for name, index in (("embedding", 0), ("output_layer", num_in_turn - 1)):
            if (module := getattr(chunk, name, None)) is not None:
                weights.watch(module, index)
        for layer in chunk.decoder.layers:
            groups = [self.param_to_bucket_group[each] for each in layer.parameters() if each.requires_grad]
            weights.watch(layer, num_in_turn - 1 - groups[0].section_index)
        return weights

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The module's."""
        output = super().forward(*inputs, **kwargs)
        if output.requires_grad:
            output.register_hook(lambda _: self._open_first())
        return output

    def _before_head(self, *_: object) -> None:
        """The loss computes gradients in the forward pass (`loss.LossHead`)."""
        if torch.is_grad_enabled():
            self._open_first()

    def _open_first(self) -> None:
        """Makes room for the first gradients of a microbatch."""
        if self._in_turn[0].waits_for is None:
            self._collect(besides=None)
            for section in (self._in_turn[0], *self._all_along):
                section.open()

    def go_on_after(self, section: _Section) -> None:
        """Opens the section whose gradients come next."""
        self.exchanging.append(section)
        if section in self._all_along or section is self._in_turn[-1]:
            return
        # Those before lie where the next one will.
        self._collect(besides=section)
        self._in_turn[self._in_turn.index(section) + 1].open()

    def _collect(self, *, besides: _Section | None) -> None:
        for section in self.exchanging:
            if section is not besides:
                section.collect()
        self.exchanging = [section for section in self.exchanging if section is besides]

    def no_sync(self) -> AbstractContextManager[None]:
        """Nothing is put off: every microbatch is reduced."""
        return nullcontext()

    def zero_grad_buffer(self) -> None:
        """Begins a step."""
        super().zero_grad_buffer()
        for parameter, gradient in self._whole.items():
            parameter.main_grad = gradient

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Ends a step's exchanges: `main_grad` becomes the rank's part, [n], of each parameter's gradient.

        Raises:
            RuntimeError: A parameter got no gradient.
        """
        for section in self.sections:
            if section.waits_for is not None:
                missing = ", ".join(sorted(self.names[parameter] for parameter in section.waits_for))
                raise RuntimeError(f"no gradient of {missing} in a microbatch")
        self._collect(besides=None)
        if self.ddp_config.num_distributed_optimizer_instances > 1:
            self._sum_over_instances()
        for group in self._groups:
            group.param_gather_dispatched = False
        for parameter, part in self._parts.items():
            parameter.main_grad = part

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Makes whole weights follow the parts that the optimizer has written."""
        if self.weights is None:
            super().start_param_sync(*unused, force_sync=force_sync, force_dispatch=force_dispatch)
        else:
            self.weights.forget()

    def _start_bucket_group_param_sync(self, bucket_group: _BucketGroup, force_sync: bool) -> None:
        if self.weights is None:
            super()._start_bucket_group_param_sync(bucket_group, force_sync)

    def enable_forward_pre_hook(self) -> None:
        """Sharded weights have hooks of their own."""
        if not self._shards_weights:
            super().enable_forward_pre_hook()

    def _sum_over_instances(self) -> None:
        """Sums or averages the step's gradients over the groups of ranks that share them out in the same way."""
        operation = ReduceOp.AVG if self.ddp_config.average_in_collective else ReduceOp.SUM
        for buffer in (*self.buffers, *self.expert_parallel_buffers):
            torch.distributed.all_reduce(buffer.grad_data, op=operation, group=self.inter_dist_opt_group)


class _PartReader(DistributedOptimizer):  # type: ignore[misc]
    """Reads `main_grad` as the rank's part of a gradient, and works on the rank's part of weights that are sharded."""

    _reads_parts = False

    @classmethod
    def _build_model_and_main_param_groups(
        cls, gbuf_ranges: Any, param_gbuf_map: Any, opt_group_ranges: Any, config: Any
    ) -> Any:
        sharded = {
            parameter: memory_of(parameter).detach()
            for group in opt_group_ranges
            for parameter in group["params"]
            if hasattr(parameter, "own_part")
        }
        for parameter in sharded:
            # megatron-core takes parts of whole weights.
            put_nothing(parameter)
        groups = super()._build_model_and_main_param_groups(gbuf_ranges, param_gbuf_map, opt_group_ranges, config)
        for parameter, whole in sharded.items():
            put_memory(parameter, whole)
        of_model_16, of_model_32, of_rank_16, of_rank_32, masters = groups
        for parameter, part in (*pairs_of_groups(of_model_16, of_rank_16), *pairs_of_groups(of_model_32, of_rank_32)):
            if parameter in sharded and not is_float8tensor(parameter):
                # What the optimizer writes moves with it.
                part.data, parameter.own_part = parameter.own_part, part
        for parameter, master in pairs_of_groups(of_model_16, masters):
            if parameter in sharded and not is_float8tensor(parameter):
                master.copy_(parameter.own_part)
        return groups

    def _copy_model_grads_to_main_grads(self) -> None:
        self._reads_parts = True
        super()._copy_model_grads_to_main_grads()
        self._reads_parts = False

    def take_parts(self, parts: Mapping[torch.nn.Parameter, torch.Tensor]) -> None:
        """Sets the masters from parts of weights, [n] each, that were loaded without masters."""
        self._reads_parts = True
        self.reload_model_params(parts)
        self._reads_parts = False

    def _build_model_param_to_state_dict_param_map(self, state_dict: Any) -> Any:
        return state_dict if self._reads_parts else super()._build_model_param_to_state_dict_param_map(state_dict)

    def _get_model_param_range_map(self, param: torch.nn.Parameter) -> dict[str, Range]:
        ranges: dict[str, Range] = super()._get_model_param_range_map(param)
        return {"param": Range(0, ranges["param"].size)} if self._reads_parts else ranges

    def _copy_main_params_to_model_params(self) -> None:
        if self.is_stub_optimizer or self.config.use_precision_aware_optimizer or not self._shards_weights:
            super()._copy_main_params_to_model_params()
            return
        if self.ddp_config.fp8_param_gather:
            distrib_optimizer.quantize_param_shard(
                *self._get_fp8_params_and_shard_fp32_from_fp8(), self.data_parallel_group
            )
        for parameter, master in pairs_of_groups(self.model_float16_groups, self.shard_fp32_from_float16_groups):
            if not is_float8tensor(parameter):
                parameter.own_part.copy_(master)

    def step_with_ready_grads(self) -> bool:
        """See megatron-core's."""
        updated: bool = super().step_with_ready_grads()
        if self._shards_weights:
            for chunk in self.model_chunks:
                chunk.weights.forget()
        return updated

    @property
    def _shards_weights(self) -> bool:
        return any(chunk.weights is not None for chunk in self.model_chunks)


@cache
def reading_parts(optimizer: type[DistributedOptimizer]) -> type[DistributedOptimizer]:
    """A class of distributed optimizers for gradients that `ShardedGradients` has reduced."""
    return type(f"{optimizer.__name__}OfParts", (_PartReader, optimizer), {})
