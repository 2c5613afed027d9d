"""Weights that are whole only while layers read them (`data_parallel_sharding_strategy=optim_grads_params`).

Between steps a rank keeps its part of the weights: FP8 codes of weights that are stored in FP8, BF16 otherwise. A pass
through the layers goes from section to section (`run.sections`), forward and back:

    a layer of a section begins   the ranks have gathered the section, or do now; the others' memory is given back,
                                  and the ranks begin to gather the section that comes next
    the optimizer writes          its rank's part alone

So two sections are whole at a time. What a backward pass reads again has been saved as views of the memory, which are
good again as soon as the section is. Gathering takes one collective for each section, type and group of ranks, in the
same order on all of them. Transposes of FP8 weights, which Transformer Engine's products read on Hopper, are made by
each pass and go with the section.

Outside of training steps all are whole at once (`WholeWeights.gathered`): checkpoints, validations and whatever else
reads or writes weights find them as in a run without sharding. So it is from the building of a model until its first
step.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fp8_utils import is_float8tensor
from torch.distributed.distributed_c10d import _coalescing_manager

from gpt_pretrain.megatron.section_buffers import SectionBucket
from gpt_pretrain.megatron.stored_weights import StoredWeight


def is_shared(ranks: torch.distributed.ProcessGroup) -> bool:
    """Whether there is anybody to share with; a rank that holds experts alone keeps them whole."""
    return ranks.size() > 1


class WeightSection:
    """The weights of a section; `groups` are its buckets, with the ranks that share each of them."""

    def __init__(self, groups: Sequence[tuple[torch.distributed.ProcessGroup, Sequence[SectionBucket]]]) -> None:
        self._groups = [(ranks, buckets) for ranks, buckets in groups if is_shared(ranks)]
        self._exchanges: list[Any] = []
        self.is_whole = True
        """Or will be, once `wait` was called."""
        for bucket in (bucket for _, buckets in groups for bucket in buckets):
            bucket.kept = torch.empty_like(bucket.own_weights)
            _free(bucket.kept)
            for parameter, part in bucket.parts(bucket.own_weights):
                parameter.own_part = part

    def _buckets(self) -> Iterator[tuple[torch.distributed.ProcessGroup, SectionBucket]]:
        for ranks, buckets in self._groups:
            for bucket in buckets:
                yield ranks, bucket

    def take_parts(self) -> None:
        """Keeps the rank's part and gives the memory of whole weights back."""
        for _, bucket in self._buckets():
            _allocate(bucket.kept)
            bucket.kept.copy_(bucket.own_weights)
            _refer_to(bucket, bucket.kept)
        self.release()

    def put_parts(self) -> None:
        """Leaves the rank's part to the weights, which must be whole."""
        for _, bucket in self._buckets():
            _refer_to(bucket, bucket.own_weights)
            _free(bucket.kept)

    def gather(self) -> None:
        """Begins to make the weights whole."""
        for _, bucket in self._buckets():
            _allocate(bucket.param_data)
        self._exchange("kept")

    def gather_in_place(self) -> None:
        """Makes whole weights follow the parts that their ranks have written there."""
        self._exchange("own_weights")
        self.wait()

    def _exchange(self, part: str) -> None:
        assert not self._exchanges
        for ranks, buckets in self._groups:
            with _coalescing_manager(ranks, async_ops=True) as handle:
                for bucket in buckets:
                    torch.distributed.all_gather_into_tensor(
                        bucket.param_data, getattr(bucket, part), group=ranks, async_op=True
                    )
            self._exchanges.append(handle)
        self.is_whole = True

    def wait(self) -> None:
        """Lets the device wait for the weights."""
        for handle in self._exchanges:
            handle.wait()
        self._exchanges.clear()

    def count_off(self) -> torch.Tensor:
        """Parts of whole weights that are not those that their ranks keep, int64 []; the ranks call it together."""
        off = torch.zeros((), dtype=torch.int64, device=torch.cuda.current_device())
        for ranks, bucket in self._buckets():
            off += (bucket.own_weights != bucket.kept).any()
            # The ranks agree on all parts: then each is that of its rank.
            parts = bucket.param_data.view(torch.uint8).view(ranks.size(), -1)
            sums = torch.stack([part.sum(dtype=torch.int64) for part in parts])
            extremes = torch.cat([sums, -sums])
            torch.distributed.all_reduce(extremes, op=torch.distributed.ReduceOp.MAX, group=ranks)
            off += (extremes[: ranks.size()] != -extremes[ranks.size() :]).sum()
        return off

    def release(self) -> None:
        """Gives the memory of whole weights back, once what was launched has read them."""
        # Memory that an exchange still writes must not be given to others.
        self.wait()
        for _, bucket in self._buckets():
            _free(bucket.param_data)
            for parameter in bucket.params_list:
                if is_float8tensor(parameter) and not isinstance(parameter, StoredWeight):
                    parameter.update_usage(rowwise_usage=True, columnwise_usage=False)
        self.is_whole = False


def _allocate(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())


def _free(tensor: torch.Tensor) -> None:
    """Gives memory back; on a CPU, where others may hold it through NumPy, all that is read from it is NaN."""
    if tensor.is_cuda:
        tensor.untyped_storage().resize_(0)
    else:
        tensor.view(torch.uint8).fill_(0xFF)


def _refer_to(bucket: SectionBucket, of_rank: torch.Tensor) -> None:
    for parameter, part in bucket.parts(of_rank):
        parameter.own_part.data = part


class WholeWeights:
    """Which weights of a model chunk are whole.

    Args:
        sections: In the order of the forward pass, those that follow each other.
        lasting: Those that are used at both ends of a pass, and stay whole through it.
        prefetches: Whether a section is gathered while the one before it computes.
    """

    def __init__(
        self, sections: Sequence[WeightSection], lasting: Sequence[WeightSection], *, prefetches: bool
    ) -> None:
        self._sections = sections
        self._all = [*sections, *lasting]
        self._lasting = lasting
        self._prefetches = prefetches
        self._at: int | None = None
        self.are_all = True
        """Outside of steps."""
        self.num_off = torch.zeros((), dtype=torch.int64, device=torch.cuda.current_device())
        """Parts that were read inside `counted` and are not those that their ranks keep, int64 []."""
        self._is_counted = False

    def watch(self, module: torch.nn.Module, index: int) -> None:
        """Calls `enter` before a module's forward and backward pass."""

        def begin(*_: object) -> None:
            self.enter(index)

        def end(module: torch.nn.Module, inputs: object, outputs: Any) -> None:
            output = outputs[0] if isinstance(outputs, tuple) else outputs
            # A pass that keeps nothing, to be recomputed, has no backward pass, though megatron-core marks its outputs.
            if torch.is_grad_enabled() and output.requires_grad:
                output.register_hook(lambda _: self.enter(index))

        module.register_forward_pre_hook(begin)
        module.register_forward_hook(end)

    def enter(self, index: int) -> None:
        """A pass reads a section now: makes it whole, and begins to gather the one that follows."""
        if self.are_all or index == self._at:
            return
        following = self._following(index)
        self._at = index
        for number, section in enumerate(self._sections):
            if section.is_whole and number not in (index, following):
                section.release()
        wanted = [*self._lasting, self._sections[index]]
        begun = [*wanted, self._sections[following]] if self._prefetches else wanted
        for section in begun:
            if not section.is_whole:
                section.gather()
        for section in wanted:
            section.wait()
            if self._is_counted:
                self.num_off += section.count_off()

    def _following(self, index: int) -> int:
        """The next section of a pass: it turns at both ends, and a recomputed layer's is that of its backward pass."""
        last = len(self._sections) - 1
        if index == 0:
            return min(1, last)
        goes_back = index == last or (self._at is not None and self._at > index)
        return index - 1 if goes_back else index + 1

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Inside, weights are compared with their parts when they are read."""
        self.num_off.zero_()
        self._is_counted = True
        try:
            yield
        finally:
            self._is_counted = False

    def forget(self) -> None:
        """The parts were written: whole weights follow them at once outside of steps, and when they are read inside."""
        self._at = None
        for section in self._all:
            if self.are_all:
                section.gather_in_place()
            elif section.is_whole:
                section.release()

    def begin_step(self) -> None:
        """From here on weights are whole in turn."""
        if self.are_all:
            for section in self._all:
                section.take_parts()
            self.are_all = False

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all weights are whole, and what is written to them stays."""
        if self.are_all:
            yield
            return
        self.forget()
        for section in self._all:
            section.gather()
            section.wait()
            section.put_parts()
        self.are_all = True
        try:
            yield
        finally:
            self.begin_step()
