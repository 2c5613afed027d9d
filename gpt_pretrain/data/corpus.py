"""The corpus of a run: its token files, their shares and sizes, and the tokenizer.

`prepare_corpus` is the entry point of this package. It tokenizes new text (other ranks, and other runs with the same
cache, wait for the first), refuses wrong data, and returns the same `Corpus` on every rank.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpt_pretrain.config.choices import DataImpl, TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config, DataConfig
from gpt_pretrain.data.cache import Progress, cache_directory, fingerprint
from gpt_pretrain.data.own_source import OwnSource
from gpt_pretrain.data.sources import FileSource, StdlibSource, TextSource
from gpt_pretrain.data.token_files import (
    Blend,
    SplitSize,
    SplitSizes,
    check_splits,
    check_token_file,
    check_token_ids,
    check_whole,
    content_fingerprint,
    plan_blend,
    split_matrix,
)
from gpt_pretrain.data.tokenizer import Tokenizer, load_tokenizer, own_tokenizer, tokenize_source
from gpt_pretrain.extend.registry import registered_choice
from gpt_pretrain.launch.signals import ended_while_waiting

# Among the fingerprints the tokenizer's, and its value where the data are token ids.
TOKENIZER = "tokenizer"
NO_TOKENIZER = "none"
# Among them too: what a run counts its samples in. Checkpoints of earlier versions, which used megatron-core's order,
# lack it.
ORDER = "order of the samples"
_EPOCH_BY_EPOCH = "epoch by epoch"
# Among them only where documents are masked: runs of earlier versions never did.
_MASKING = "document masking (model.data.inter_document_masking)"
_OWN_VALIDATION = "model.data.validation_prefix"
# What opens each kind of data: text to tokenize, token files, or None for random tokens.
SOURCES: Mapping[DataImpl, Callable[[DataConfig], TextSource | Blend | None]] = {
    DataImpl.mmap: lambda data: plan_blend(data.data_prefix),
    DataImpl.text: lambda data: FileSource(data.text_files, data.text_key),
    DataImpl.stdlib: lambda data: StdlibSource(),
    DataImpl.mock: lambda data: None,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What a run trains and validates on."""

    prefixes: tuple[str, ...]
    """Paths of the `.bin/.idx` pairs without suffix; empty for mock data."""
    weights: tuple[float, ...]
    """Share of each pair in the samples; they sum to 1."""
    tokenizer: Tokenizer | None
    """None for data of token ids."""
    fingerprints: Mapping[str, str]
    """Of the tokenizer, the tokens, the files' shares, the splits and the order, by name, wherever the files are; a
    resumed run compares them with those in its checkpoint."""
    files_key: str
    """Fingerprint of the files on this machine (path, size, modification time), for the key of the sample indices."""
    splits: tuple[SplitSizes, ...]
    """Training, validation and test split of each pair, and of each of `validation`."""
    validation: Blend | None = None
    """Pairs to validate on, with weights; None: the validation split of `prefixes`."""

    @property
    def is_mock(self) -> bool:
        """Whether the samples are random tokens."""
        return not self.prefixes

    @property
    def is_epoch_by_epoch(self) -> bool:
        """Whether the samples come in the order of `data.epochs`, and not in megatron-core's."""
        return ORDER in self.fingerprints

    def continued(self, saved: Mapping[str, str]) -> "Corpus":
        """The same in the order that a checkpoint with these fingerprints counts its samples in."""
        if ORDER in saved:
            return self
        return replace(self, fingerprints={name: value for name, value in self.fingerprints.items() if name != ORDER})

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all pairs without suffix."""
        return self.prefixes + (() if self.validation is None else self.validation.prefixes)

    def blend(self, split: int) -> Blend:
        """The pairs of the training (0) or validation split (1), with weights."""
        return self.validation if split == 1 and self.validation is not None else Blend(self.prefixes, self.weights)

    def sizes(self, split: int) -> list[SplitSize]:
        """Sizes of a split, in the order of its `blend`."""
        first = len(self.prefixes) if split == 1 and self.validation is not None else 0
        return [sizes[split] for sizes in self.splits[first : first + len(self.blend(split).prefixes)]]

    @property
    def train(self) -> SplitSize:
        """Training split over all pairs."""
        return self._sum(0)

    @property
    def valid(self) -> SplitSize:
        """Validation split over all pairs."""
        return self._sum(1)

    def _sum(self, split: int) -> SplitSize:
        return SplitSize(
            num_documents=sum(sizes[split].num_documents for sizes in self.splits),
            num_tokens=sum(sizes[split].num_tokens for sizes in self.splits),
        )


@ended_while_waiting()
def prepare_corpus(config: Config, *, show_progress: bool) -> Corpus:
    """Finds or makes the run's token files, and refuses wrong data. The cross-field rules have already passed.

    Raises:
        UserError: The data, or what the configuration says of it, cannot be trained on.
    """
    model = config.model
    if model.data.eod_mask_loss and model.tokenizer.library is TokenizerLibrary.none:
        raise UserError(
            "model.data.eod_mask_loss=true needs the end-of-document token of a tokenizer: "
            "model.tokenizer.library=file model.tokenizer.model=PATH, or eod_mask_loss=false"
        )
    source: TextSource | Blend | None
    if (registered := registered_choice("data_source", model.data.data_impl)) is not None:
        source = OwnSource(registered, config)
    else:
        source = SOURCES[model.data.data_impl](model.data)
    if source is None:
        key = fingerprint(["mock", model.vocab_size])
        return Corpus(
            prefixes=(),
            weights=(),
            tokenizer=None,
            fingerprints={TOKENIZER: NO_TOKENIZER, "tokens": key, ORDER: _EPOCH_BY_EPOCH},
            files_key=key,
            splits=(),
        )
    given = own_tokenizer(config)
    cache = cache_directory(model.data)
    tokenizer: Tokenizer | None
    with Progress(show=show_progress) as progress:
        if isinstance(source, TextSource):
            name = model.data.data_impl.name
            prefix, tokenizer = tokenize_source(source, model.tokenizer, cache, progress, name=name, given=given)
            blend = Blend((str(prefix),))
        else:
            blend = source
            path = model.tokenizer.model
            tokenizer = given if path is None else load_tokenizer(path)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's vocabulary of "
                f"{tokenizer.vocab_size}; set model.vocab_size={tokenizer.vocab_size} or more"
            )
        files = [check_token_file(prefix) for prefix in blend.prefixes]
        own = plan_blend(model.data.validation_prefix, _OWN_VALIDATION) if model.data.validation_prefix else None
        own_files = [] if own is None else [check_token_file(prefix, _OWN_VALIDATION) for prefix in own.prefixes]
        sequence, validates = model.encoder_seq_length, config.trainer.limit_val_batches > 0
        for file in (*files, *own_files):
            check_token_ids(file, model.vocab_size, cache, progress)
        if own is None:
            shares = model.data.splits_string
            splits = [check_splits(f, shares, sequence_length=sequence, with_validation=validates) for f in files]
        else:
            splits = [check_whole(file, 0, sequence_length=sequence) for file in files]
            own_splits = [check_whole(file, 1, sequence_length=sequence) for file in own_files]
            own = Blend(own.prefixes, own.weights or _by_size([sizes[1] for sizes in own_splits]))
            splits += own_splits
    weights = blend.weights or _by_size([sizes[0] for sizes in splits[: len(files)]])
    tokenizer_key = None if tokenizer is None else tokenizer.fingerprint
    return Corpus(
        prefixes=blend.prefixes,
        weights=weights,
        tokenizer=tokenizer,
        fingerprints={
            TOKENIZER: tokenizer_key or NO_TOKENIZER,
            "tokens": fingerprint([content_fingerprint(file) for file in files]),
            "shares of the token files": fingerprint(weights),
            "splits": fingerprint(
                split_matrix(model.data.splits_string)
                if own is None
                else [own.weights, [content_fingerprint(file) for file in own_files]]
            ),
            ORDER: _EPOCH_BY_EPOCH,
            **({_MASKING: "on"} if model.data.inter_document_masking else {}),
        },
        files_key=fingerprint(
            [
                [file.identity() for file in files],
                weights,
                tokenizer_key,
                *([] if own is None else [[file.identity() for file in own_files], own.weights]),
            ]
        ),
        splits=tuple(splits),
        validation=own,
    )


def _by_size(sizes: Sequence[SplitSize]) -> tuple[float, ...]:
    """Weights with which files count by their tokens."""
    total = sum(size.num_tokens for size in sizes)
    return tuple(size.num_tokens / total for size in sizes)
