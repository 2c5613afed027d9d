"""Which source each sample of a run comes from.

Samples are drawn by weight, each from the token file that is furthest behind its share (megatron-core's rule). A run
may have several stages, each with its own weights. Every file keeps its place from one stage to the next, so that it is
read once before any of it is read twice. Nothing depends on how many samples a run asks for.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
from megatron.core.datasets import helpers

from gpt_pretrain.config.mixtures import Stage
from gpt_pretrain.data.documents import expected_attended
from gpt_pretrain.data.token_files import SplitSize, check_token_file


@dataclass(frozen=True, slots=True)
class Source:
    """Token files that count as one: they are read in proportion to their sizes."""

    name: str
    prefixes: tuple[str, ...]
    """Paths of the `.bin/.idx` pairs without suffix."""
    sizes: tuple[SplitSize, ...]
    """Of the split of each pair that is read."""

    @property
    def size(self) -> SplitSize:
        """Of all pairs together."""
        return SplitSize(
            num_documents=sum(size.num_documents for size in self.sizes),
            num_tokens=sum(size.num_tokens for size in self.sizes),
        )


@dataclass(frozen=True, slots=True)
class Mixture:
    """Sources, and the stages in which they are drawn from."""

    sources: tuple[Source, ...]
    stages: tuple[Stage, ...]

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Of all sources' token files."""
        return tuple(prefix for source in self.sources for prefix in source.prefixes)

    @property
    def size(self) -> SplitSize:
        """Of all sources together."""
        return Source("", self.prefixes, tuple(size for source in self.sources for size in source.sizes)).size

    def file_weights(self, stage: Stage) -> list[float]:
        """Shares of the files, in the order of `prefixes`, in the samples of a stage."""
        return [
            stage.weights.get(source.name, 0.0) * size.num_tokens / source.size.num_tokens
            for source in self.sources
            for size in source.sizes
        ]

    def stage_lengths(self, num_samples: int, sequence_length: int) -> Iterator[tuple[Stage, int]]:
        """The stages with the number of samples that each has in a run of `num_samples`."""
        begin, tokens = 0, 0.0
        for stage in self.stages:
            end = num_samples
            if stage.num_tokens is not None:
                tokens += stage.num_tokens
                end = min(num_samples, -int(-tokens // sequence_length))
            yield stage, end - begin
            begin = end

    def sequence_length_at(self, sample: int, sequence_length: int) -> int:
        """The tokens that a step which begins with this sample cuts its samples into."""
        end = 0
        for stage, length in self.stage_lengths(sample + 1, sequence_length):
            end += length
            if sample < end:
                return stage.sequence_length or sequence_length
        raise AssertionError("the last stage has no end")

    def epochs(self, num_samples: int, sequence_length: int) -> dict[str, float]:
        """How often a run of `num_samples` reads each source."""
        lengths = list(self.stage_lengths(num_samples, sequence_length))
        return {
            source.name: sum(length * stage.weights.get(source.name, 0.0) for stage, length in lengths)
            * sequence_length
            / source.size.num_tokens
            for source in self.sources
        }

    def attended(self, num_samples: int, sequence_length: int, *, in_documents: bool) -> float:
        """The length of document, or of sample, that a token of a run of `num_samples` is in on average."""
        total = 0.0
        for stage, num_of_stage in self.stage_lengths(num_samples, sequence_length):
            length = stage.sequence_length or sequence_length
            for prefix, share in zip(self.prefixes, self.file_weights(stage), strict=True):
                of_file = expected_attended(check_token_file(prefix).lengths, length) if in_documents else length
                total += num_of_stage * share * of_file
        return total / num_samples

    def draw(self, num_samples: int, sequence_length: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        """The file of each sample, int16, as an index of `prefixes`, and how many samples it gave before, int64."""
        files = numpy.empty(num_samples, dtype=numpy.int16)
        numbers = numpy.empty(num_samples, dtype=numpy.int64)
        drawn = numpy.zeros(len(self.prefixes), dtype=numpy.int64)
        begin = 0
        for stage, length in self.stage_lengths(num_samples, sequence_length):
            weights = numpy.array(self.file_weights(stage))
            (used,) = weights.nonzero()
            part = slice(begin, begin + length)
            helpers.build_blending_indices(files[part], numbers[part], weights[used], len(used), length, False)
            files[part] = used[files[part]]
            numbers[part] += drawn[files[part]]
            drawn += numpy.bincount(files[part], minlength=len(drawn))
            begin += length
        return files, numbers


def by_size(sources: Sequence[Source], temperature: float = 1.0) -> dict[str, float]:
    """Weights of sources: their sizes in tokens to the power of 1/temperature, divided by the sum."""
    powers = {source.name: source.size.num_tokens ** (1 / temperature) for source in sources}
    total = sum(powers.values())
    return {name: power / total for name, power in powers.items()}
