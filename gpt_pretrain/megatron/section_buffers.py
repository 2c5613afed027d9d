"""How a model chunk is cut into sections (`run.sections`), and where their parameters and gradients lie.

megatron-core's data parallelism lays out a buffer for each type of parameter, which it cuts into buckets of some size.
Here a bucket is what a buffer has of one section. A buffer holds the rank's part of gradients; whole ones are in memory
that sections use in turn (`sharded_gradients`). Each bucket has its own memory of whole weights. If weights are sharded
(`sharded_weights`), a bucket keeps the rank's part alone, and has whole weights while layers read them: after it is
built, too, so that the whole weights of one bucket are there at a time.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import (
    _ParamAndGradBucket,
    _ParamAndGradBuffer,
    group_params_for_buffers,
)
from megatron.core.fp8_utils import is_float8tensor, modify_underlying_storage
from megatron.core.optimizer.param_layout import FullParamLayout, PerBufferParamLayout, pad_bucket_end, pad_param_start

from gpt_pretrain.config.choices import ShardingStrategy
from gpt_pretrain.megatron.stored_weights import drop_transpose, memory_of, put_memory, put_nothing
from gpt_pretrain.megatron.weights import draw
from gpt_pretrain.run.sections import group_layers, place_in_turn

_LAYER = re.compile(r"(?:^|\.)decoder\.layers\.(\d+)\.")


@dataclass
class SectionedLayout(PerBufferParamLayout):  # type: ignore[misc]  # megatron-core has no types
    """Where a buffer's parameters lie, one bucket or two for each section that has any of them."""

    sections: list[int] = field(default_factory=list)
    """Of each bucket."""
    gradients: list[torch.Tensor] = field(default_factory=list)
    """The memory of each bucket's whole gradients, [values]."""


def _turn(name: str, num_layers: int) -> int:
    """A parameter's place in the backward pass of its chunk: 0 for the head, up to `num_layers` + 1 for embeddings."""
    if (layer := _LAYER.search(name)) is not None:
        return num_layers - int(layer[1])
    # Its gradient is complete after the head's.
    if "decoder.final_layernorm." in name:
        return 1
    if "output_layer." in name:
        return 0
    if "embedding." in name:
        return num_layers + 1
    raise TypeError(f"{name} has no known place in the backward pass; teach megatron.sharded_gradients")


def cut_into_sections(
    chunk: Any, names: Mapping[torch.nn.Parameter, str], bucket_size: int
) -> tuple[list[list[torch.nn.Parameter]], bool]:
    """The parameters of each section in the order of the backward pass, and whether the last one is a tied embedding.

    That one is open all along.
    """
    num_layers = len(chunk.decoder.layers)
    turns: list[list[torch.nn.Parameter]] = [[] for _ in range(num_layers + 2)]
    tied = chunk.share_embeddings_and_output_weights and chunk.pre_process and chunk.post_process
    ends = [chunk.embedding.word_embeddings.weight] if tied else []
    for parameter, name in names.items():
        if not any(parameter is end for end in ends):
            turns[_turn(name, num_layers)].append(parameter)
    sizes = [sum(parameter.nelement() for parameter in turn) for turn in turns[1:-1]]
    layers = [[each for index in group for each in turns[1 + index]] for group in group_layers(sizes, bucket_size)]
    in_turn = [section for section in (turns[0], *layers, turns[-1]) if section]
    return [*in_turn, *([ends] if tied else [])], tied


def lay_out(
    sections: Sequence[Sequence[torch.nn.Parameter]],
    parameters: Sequence[torch.nn.Parameter],
    ddp_config: DistributedDataParallelConfig,
) -> FullParamLayout:
    """A layout for each of megatron-core's buffers, whose buckets are its parts of the sections, without memory."""
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True, partial_data_parallel=True)
    expert_ranks = parallel_state.get_expert_data_parallel_world_size(partial_expert_data_parallel=True)
    section_of = {parameter: index for index, section in enumerate(sections) for parameter in section}
    layouts = {}
    for key, (own, indices) in group_params_for_buffers(parameters, ddp_config.grad_reduce_in_fp32).items():
        shards = expert_ranks if key.is_expert_parallel else ranks
        layout = SectionedLayout(param_indices=indices, num_optimizer_shards=shards)
        buckets: dict[tuple[int, bool], list[torch.nn.Parameter]] = {}
        for parameter in own:
            # Both copies of a tied embedding are cut alike on their stages only if each has a bucket of its own.
            alone = getattr(parameter, "shared_embedding", False)
            buckets.setdefault((section_of[parameter], alone), []).append(parameter)
        start = 0
        for index, (section, alone) in enumerate(sorted(buckets)):
            end = start
            for parameter in buckets[section, alone]:
                first = pad_param_start(end)
                end = first + parameter.nelement()
                layout.param_index_map[parameter] = (first, end, index)
            stop = pad_bucket_end(end, shards, ddp_config.pad_buckets_for_high_nccl_busbw)
            layout.bucket_indices.append((start, stop))
            layout.per_bucket_numel_unpadded.append(end - start)
            layout.sections.append(section)
            start = stop
        layouts[key] = layout
    return FullParamLayout(layouts=layouts)


def allocate(layouts: Iterable[SectionedLayout], num_in_turn: int, dtype: torch.dtype) -> None:
    """Gives all buckets their memory.

    The first `num_in_turn` sections follow each other and share it; any others have their own.
    """
    buckets: dict[int, list[tuple[SectionedLayout, int, int]]] = {}
    for layout in layouts:
        for section, (start, end) in zip(layout.sections, layout.bucket_indices, strict=True):
            buckets.setdefault(section, []).append((layout, len(layout.gradients), end - start))
            layout.gradients.append(torch.empty(0))
    sizes = [sum(size for _, _, size in buckets[section]) for section in sorted(buckets)]
    starts, length = place_in_turn(sizes[:num_in_turn])
    for size in sizes[num_in_turn:]:
        starts.append(length)
        length += size
    memory = torch.zeros(length, dtype=dtype, device=torch.cuda.current_device())
    for section, start in enumerate(starts):
        free = memory[start:]
        for layout, index, size in buckets[section]:
            layout.gradients[index] = free[:size]
            free = free[size:]


class SectionBucket(_ParamAndGradBucket):  # type: ignore[misc]
    """A bucket whose `grad_data` is memory that sections share in turn.

    The memory of its `param_data`, the whole weights, can be given back (`release`); `kept` has the rank's part then.
    Each parameter's is its `own_part`, [n], which starts at the value `own_start` of the parameter.
    """

    rank: int
    """Among the ranks that have a part each."""
    own: torch.Tensor
    """The rank's part of `grad_data`, [values / ranks]: of one microbatch, once it is reduced."""
    total: torch.Tensor
    """The sum of these parts over a step's microbatches so far."""
    is_first = True
    """`total` is that of the step before."""
    own_weights: torch.Tensor
    """The rank's part of `param_data`, [values / ranks]."""
    kept: torch.Tensor
    """The same, of weights that the rank has a part of; without memory while that lies in whole weights."""

    def add_up(self) -> None:
        """Adds the reduced gradients of a microbatch to the sum, or begins it."""
        # Where the collective does not average, this multiplies by one over the ranks.
        if self.is_first:
            torch.mul(self.own, self.gradient_scaling_factor, out=self.total)
        else:
            self.total.add_(self.own, alpha=self.gradient_scaling_factor)
        self.is_first = False

    def parts(self, of_rank: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
        """What of a rank's part, [values / ranks], is of each parameter, [n]; n is 0 where other ranks have all."""
        size = of_rank.numel()
        for parameter, (start, end) in self.param_to_index.items():
            first, last = max(start - self.rank * size, 0), min(end - self.rank * size, size)
            yield parameter, of_rank[first : max(first, last)] if first < size else of_rank[:0]

    def hand_out_parts(self) -> None:
        """Gives each parameter its `own_part`, in the whole weights."""
        self.kept = torch.empty_like(self.own_weights)
        _free(self.kept)
        for parameter, part in self.parts(self.own_weights):
            parameter.own_part = part
            start, _ = self.param_to_index[parameter]
            parameter.own_start = max(self.rank * self.own_weights.numel() - start, 0)

    def take_part(self) -> None:
        """Keeps the rank's part and gives the memory of whole weights back."""
        _allocate(self.kept)
        self.kept.copy_(self.own_weights)
        self._refer_to(self.kept)
        self.release()

    def put_part(self) -> None:
        """Leaves the rank's part to the weights, which must be whole."""
        self._refer_to(self.own_weights)
        _free(self.kept)

    def _refer_to(self, of_rank: torch.Tensor) -> None:
        for parameter, part in self.parts(of_rank):
            parameter.own_part.data = part

    def allocate(self) -> None:
        """Takes memory for whole weights, whose values are not defined."""
        _allocate(self.param_data)

    def release(self) -> None:
        """Gives the memory of whole weights back."""
        _free(self.param_data)
        for parameter in self.params_list:
            drop_transpose(parameter)


def is_shared(ranks: torch.distributed.ProcessGroup) -> bool:
    """Whether there is anybody to share with; a rank that holds experts alone keeps them whole."""
    return ranks.size() > 1


def _allocate(tensor: torch.Tensor) -> None:
    memory = tensor.untyped_storage()
    if memory.resizable():
        memory.resize_(tensor.nbytes)


def _free(tensor: torch.Tensor) -> None:
    """Gives memory back; if NumPy holds it, too, all that is read from it is NaN."""
    memory = tensor.untyped_storage()
    if memory.resizable():
        memory.resize_(0)
    else:
        tensor.view(torch.uint8).fill_(0xFF)


class SectionedBuffer(_ParamAndGradBuffer):  # type: ignore[misc]
    """megatron-core's buffer of weights, and the rank's part of their gradients; arguments are megatron-core's.

    `grad_data`, [values / ranks], is the buckets' `total`. There is no `param_data`: buckets have their own.
    """

    def __init__(  # noqa: PLR0917  # megatron-core passes them by position
        self,
        ddp_config: DistributedDataParallelConfig,
        param_dtype: torch.dtype,
        grad_dtype: torch.dtype,
        params_with_names: Sequence[tuple[torch.nn.Parameter, str]],
        data_parallel_group: torch.distributed.ProcessGroup,
        bucket_size: int | None,
        param_to_name: Mapping[torch.nn.Parameter, str],
        gradient_scaling_factor: float,
        param_indices: Sequence[int],
        nccl_ub: bool,
        pg_collection: object,
        param_layout: SectionedLayout,
    ) -> None:
        assert not nccl_ub, "memory is torch's"
        self.ddp_config, self.param_dtype, self.grad_dtype = ddp_config, param_dtype, grad_dtype
        self.params, self.param_indices = [parameter for parameter, _ in params_with_names], param_indices
        self.data_parallel_group, self.data_parallel_world_size = data_parallel_group, data_parallel_group.size()
        self.gradient_scaling_factor = gradient_scaling_factor
        self.param_index_map, self.bucket_indices = param_layout.param_index_map, param_layout.bucket_indices
        self.num_optimizer_shards, self.sections = param_layout.num_optimizer_shards, param_layout.sections
        self.numel = self.bucket_indices[-1][1]
        self.numel_unpadded = sum(param_layout.per_bucket_numel_unpadded)
        self.extra_main_grads: list[torch.Tensor] = []
        self.has_nvfp4_params = False
        self.param_data = None
        device = torch.cuda.current_device()
        self.grad_data = torch.zeros(self.numel // self.data_parallel_world_size, dtype=grad_dtype, device=device)
        self._whole: dict[torch.nn.Parameter, torch.Tensor] = {}
        self.buckets = [self._bucket(index, param_layout) for index in range(len(self.bucket_indices))]
        self.param_to_bucket = {parameter: bucket for bucket in self.buckets for parameter in bucket.params_list}

    def _bucket(self, index: int, layout: SectionedLayout) -> SectionBucket:
        start, end = self.bucket_indices[index]
        shards_weights = self.ddp_config.data_parallel_sharding_strategy == ShardingStrategy.optim_grads_params.value
        ranks, rank = self.data_parallel_world_size, self.data_parallel_group.rank()
        bucket = SectionBucket(
            params=[parameter for parameter, (_, _, own) in self.param_index_map.items() if own == index],
            param_data=torch.zeros(end - start, dtype=self.param_dtype, device=torch.cuda.current_device()),
            grad_data=layout.gradients[index],
            offset=start,
            numel_unpadded=layout.per_bucket_numel_unpadded[index],
            gradient_scaling_factor=self.gradient_scaling_factor,
            bucket_id=index,
            param_index_map=self.param_index_map,
            params_with_extra_main_grads=[],
        )
        bucket.rank = rank
        bucket.own = bucket.grad_data.chunk(ranks)[rank]
        bucket.total = self.grad_data[start // ranks : end // ranks]
        bucket.own_weights = bucket.param_data.chunk(ranks)[rank]
        for parameter, (first, last) in bucket.param_to_index.items():
            parameter.main_grad = bucket.grad_data[first:last].view(parameter.shape)
            place = bucket.param_data[first:last].view(parameter.shape)
            if shards_weights:
                draw(parameter)
                drop_transpose(parameter)
            if is_float8tensor(parameter):
                modify_underlying_storage(parameter, place)
            else:
                place.copy_(parameter.data)
                parameter.data = place
        if shards_weights:
            bucket.hand_out_parts()
            if is_shared(self.data_parallel_group):
                bucket.take_part()
                for parameter in bucket.params_list:
                    self._whole[parameter] = memory_of(parameter).detach()
                    # megatron-core views parameters to hook into their gradients.
                    put_nothing(parameter)
        return bucket

    def put_whole_memory(self) -> None:
        """Lets weights that are sharded refer to the memory that they have while they are whole."""
        for parameter, memory in self._whole.items():
            put_memory(parameter, memory)
        self._whole.clear()

    def reset(self) -> None:
        """Begins the sums of a new step."""
        for bucket in self.buckets:
            bucket.is_first = True
