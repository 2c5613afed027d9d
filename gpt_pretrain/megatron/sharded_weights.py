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

No rank ever has the whole model: not at a start either, when each section is drawn and shared out before the next one
(`section_buffers`), nor in a save or a load, which take the rank's parts (`own_parts`). A validation passes through the
sections as a step does. Only what an extension's callbacks read is whole all at once (`WholeWeights.gathered`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.distributed_c10d import _coalescing_manager

from gpt_pretrain.megatron import section_buffers
from gpt_pretrain.megatron.section_buffers import SectionBucket


class WeightSection:
    """The weights of a section; `groups` are its buckets, with the ranks that share each of them."""

    def __init__(self, groups: Sequence[tuple[torch.distributed.ProcessGroup, Sequence[SectionBucket]]]) -> None:
        self._groups = [(ranks, buckets) for ranks, buckets in groups if section_buffers.is_shared(ranks)]
        self._exchanges: list[Any] = []
        self.is_whole = False
        """Or will be, once `wait` was called."""

    def _buckets(self) -> Iterator[tuple[torch.distributed.ProcessGroup, SectionBucket]]:
        for ranks, buckets in self._groups:
            for bucket in buckets:
                yield ranks, bucket

    def take_parts(self) -> None:
        """Keeps the rank's part and gives the memory of whole weights back."""
        for _, bucket in self._buckets():
            bucket.take_part()
        self.is_whole = False

    def put_parts(self) -> None:
        """Leaves the rank's part to the weights, which must be whole."""
        for _, bucket in self._buckets():
            bucket.put_part()

    def gather(self) -> None:
        """Begins to make the weights whole."""
        assert not self._exchanges
        for ranks, buckets in self._groups:
            with _coalescing_manager(ranks, async_ops=True) as handle:
                for bucket in buckets:
                    bucket.allocate()
                    torch.distributed.all_gather_into_tensor(bucket.param_data, bucket.kept, group=ranks, async_op=True)
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
            bucket.release()
        self.is_whole = False


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
        self.are_all = False
        """Inside `gathered`."""
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
        """The parts were written: whole weights are gathered anew when they are read."""
        assert not self.are_all, "nothing is written while all are whole"
        self._at = None
        for section in self._all:
            if section.is_whole:
                section.release()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Inside, all weights are whole at once, and what is written to them stays."""
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
            for section in self._all:
                section.take_parts()
            self.are_all = False
