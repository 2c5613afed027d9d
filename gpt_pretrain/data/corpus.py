"""The corpus of a run: which token files, in which shares, by which tokenizer, and how large.

`prepare_corpus` is the entrance to this room. It tokenises what is not tokenised yet (the other ranks of a node, and
other runs with the same cache, wait for the first), refuses wrong data, and returns the same `Corpus` on every rank.

A new source of data needs a member of `config.choices.DataImpl`, `conf/data/NAME.yaml`, a function that opens it, and
its line in `SOURCES`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpt_pretrain.config.choices import DataImpl, TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schema import Config, DataConfig
from gpt_pretrain.data.cache import Progress, cache_directory, file_identity, fingerprint
from gpt_pretrain.data.sources import FileSource, StdlibSource, TextSource
from gpt_pretrain.data.token_files import (
    Blend,
    SplitSize,
    SplitSizes,
    check_splits,
    check_token_file,
    check_token_ids,
    content_fingerprint,
    plan_blend,
    split_matrix,
)
from gpt_pretrain.data.tokenizer import Tokenizer, load_tokenizer, tokenize_source

# The fingerprint of the missing tokenizer where data come as token ids.
NO_TOKENIZER = "none"
# Kind of data → what opens it: text to be tokenised, token files, or None for random tokens.
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
    """Share of each pair in the samples, with the sum 1."""
    tokenizer: Tokenizer | None
    """None where token ids are taken as they are."""
    fingerprints: Mapping[str, str]
    """Of the tokenizer, the tokens, the files' shares and the splits, each by its name: a checkpoint keeps them, and a
    resumed run compares them. They do not depend on where the files lie."""
    files_key: str
    """Stands for the files on this machine (path, size, time of modification) in the key of the sample indices."""
    splits: tuple[SplitSizes, ...]
    """Training, validation and test split of each pair."""

    @property
    def is_mock(self) -> bool:
        """Whether the samples are random tokens."""
        return not self.prefixes

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


def prepare_corpus(config: Config, *, show_progress: bool) -> Corpus:
    """Finds or makes the run's token files, and refuses wrong data. The cross-field rules have passed before.

    Raises:
        UserError: The data, or what the configuration says of it, cannot be trained on.
    """
    model = config.model
    if model.data.eod_mask_loss and model.tokenizer.library is TokenizerLibrary.none:
        raise UserError(
            "model.data.eod_mask_loss=true needs the end-of-document token of a tokenizer: "
            "model.tokenizer.library=file model.tokenizer.model=PATH, or eod_mask_loss=false"
        )
    source = SOURCES[model.data.data_impl](model.data)
    if source is None:
        key = fingerprint(["mock", model.vocab_size])
        return Corpus(
            prefixes=(),
            weights=(),
            tokenizer=None,
            fingerprints={"tokenizer": NO_TOKENIZER, "tokens": key},
            files_key=key,
            splits=(),
        )
    cache = cache_directory(model.data)
    with Progress(show=show_progress) as progress:
        if isinstance(source, TextSource):
            text = tokenize_source(source, model.tokenizer, cache, progress, name=model.data.data_impl.name)
            blend = Blend((str(text.prefix),))
            tokenizer: Tokenizer | None = text.tokenizer
        else:
            blend = source
            tokenizer = None if model.tokenizer.model is None else load_tokenizer(model.tokenizer.model)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's vocabulary of "
                f"{tokenizer.vocab_size}; set model.vocab_size={tokenizer.vocab_size} or more"
            )
        files = [check_token_file(prefix) for prefix in blend.prefixes]
        sequence = model.encoder_seq_length
        validates = config.trainer.limit_val_batches > 0
        splits = []
        for file in files:
            check_token_ids(file, model.vocab_size, cache, progress)
            sizes = check_splits(file, model.data.splits_string, sequence_length=sequence, with_validation=validates)
            splits.append(sizes)
    num_tokens = [sizes[0].num_tokens for sizes in splits]
    weights = blend.weights or tuple(count / sum(num_tokens) for count in num_tokens)
    content = [content_fingerprint(file) for file in files]
    tokenizer_key = None if tokenizer is None else tokenizer.fingerprint
    identity = [[file_identity(file.bin_path), file_identity(file.idx_path)] for file in files]
    return Corpus(
        prefixes=blend.prefixes,
        weights=weights,
        tokenizer=tokenizer,
        fingerprints={
            "tokenizer": tokenizer_key or NO_TOKENIZER,
            "tokens": fingerprint(content),
            "shares of the token files": fingerprint(weights),
            "splits": fingerprint(split_matrix(model.data.splits_string)),
        },
        files_key=fingerprint([identity, weights, tokenizer_key]),
        splits=tuple(splits),
    )
