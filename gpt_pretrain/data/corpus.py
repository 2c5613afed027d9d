"""The corpus of a run: its sources of token files, their shares and sizes, and the tokenizer.

`prepare_corpus` is the entry point of this package. It tokenizes new text (other ranks, and other runs with the same
cache, wait for the first), refuses wrong data, and returns the same `Corpus` on every rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from gpt_pretrain.config.choices import DataImpl, TokenizerLibrary
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.files import expand_user
from gpt_pretrain.config.mixtures import Stage, has_own_sources, read_entries, read_stages, source_names
from gpt_pretrain.config.schema import Config, DataConfig
from gpt_pretrain.config.urls import scheme_of
from gpt_pretrain.data.cache import Progress, cache_directory, fingerprint
from gpt_pretrain.data.mixtures import Mixture, Source, by_size
from gpt_pretrain.data.remote import local_prefixes
from gpt_pretrain.data.sources import open_source
from gpt_pretrain.data.token_files import (
    SplitSize,
    TokenFile,
    check_splits,
    check_token_file,
    check_token_ids,
    check_whole,
    content_fingerprint,
    sentences_warning,
    split_matrix,
)
from gpt_pretrain.data.tokenizer import Tokenizer, load_tokenizer, own_tokenizer
from gpt_pretrain.data.tokenizing import tokenize_source, train_once
from gpt_pretrain.launch.signals import ended_while_waiting

# Among the fingerprints the tokenizer's, and its value where the data are token ids.
TOKENIZER = "tokenizer"
NO_TOKENIZER = "none"
# Among them too: what a run counts its samples in. Checkpoints of earlier versions have another value, or none.
ORDER = "order of the samples"
_ORDER_OF_THIS_VERSION = "epoch by epoch, splits sampled"
# Among them only where documents are masked: runs of earlier versions never did.
_MASKING = "document masking (model.data.inter_document_masking)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """What a run trains and validates on."""

    training: Mixture
    """Without sources for random tokens."""
    validation: tuple[Source, ...]
    """Sets to validate on, each by itself."""
    validation_weights: Mapping[str, float]
    """Share of each set in the loss over all of them; they sum to 1."""
    splits: str | None
    """How each file's documents are divided (`model.data.splits_string`); None: files are read whole."""
    tokenizer: Tokenizer | None
    """None for data of token ids."""
    fingerprints: Mapping[str, str]
    """Of the tokenizer, the tokens, the files' shares, the splits and the order, by name, wherever the files are; a
    resumed run compares them with those in its checkpoint."""
    files_key: str
    """Fingerprint of the files on this machine (path, size, modification time), for the key of the sample indices."""

    @property
    def is_mock(self) -> bool:
        """Whether the samples are random tokens."""
        return not self.training.sources

    @property
    def files(self) -> tuple[str, ...]:
        """Paths of all pairs without suffix."""
        of_validation = (prefix for source in self.validation for prefix in source.prefixes)
        return tuple(dict.fromkeys([*self.training.prefixes, *of_validation]))

    @property
    def train(self) -> SplitSize:
        """Training split over all sources."""
        return self.training.size

    @property
    def valid(self) -> SplitSize:
        """Validation split over all sources."""
        return Mixture(self.validation, ()).size


@dataclass(frozen=True, slots=True)
class _Named:
    """What a key names: the paths of each source, and the sources' weights if it states any."""

    paths: Mapping[str, Sequence[str]]
    weights: Mapping[str, float] | None


def _read_list(data: DataConfig, key: str | None) -> _Named:
    """Reads a key of `model.data`; None for data without one."""
    entries: Sequence[Any] = getattr(data, key) if key else ()
    paths, weights = read_entries(entries, f"model.data.{key}")
    if data.data_impl is DataImpl.mmap:
        paths = [path if scheme_of(path) else str(expand_user(path, f"model.data.{key}").absolute()) for path in paths]
    if not entries or not has_own_sources(data, entries):
        return _Named({data.data_impl.name: paths}, None)
    names = source_names(paths)
    shares = None if weights is None else dict(zip(names, weights, strict=True))
    return _Named({name: [path] for name, path in zip(names, paths, strict=True)}, shares)


@ended_while_waiting()
def prepare_corpus(config: Config, *, show_progress: bool) -> Corpus:
    """Finds or makes the run's token files, and refuses wrong data. The cross-field rules have already passed.

    Raises:
        UserError: The data, or what the configuration says of it, cannot be trained on.
    """
    model, data = config.model, config.model.data
    asked = next((name for name in ("eod_mask_loss", "eod_mask_labels") if getattr(data, name)), None)
    if asked is not None and model.tokenizer.library is TokenizerLibrary.none:
        raise UserError(
            f"model.data.{asked}=true needs the end-of-document token of a tokenizer: "
            f"model.tokenizer.library=file model.tokenizer.model=PATH, or {asked}=false"
        )
    if data.data_impl is DataImpl.mock:
        key = fingerprint(["mock", model.vocab_size])
        return Corpus(
            training=Mixture((), ()),
            validation=(),
            validation_weights={},
            splits=None,
            tokenizer=None,
            fingerprints={TOKENIZER: NO_TOKENIZER, "tokens": key},
            files_key=key,
        )
    named = _read_list(data, data.data_impl.files_key)
    own = _read_list(data, "validation_prefix") if data.validation_prefix else None
    cache = cache_directory(data)
    with Progress(show=show_progress) as progress:
        prefixes, tokenizer = _token_files(config, named.paths, cache, progress)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise UserError(
                f"model.vocab_size={model.vocab_size} is smaller than the tokenizer's vocabulary of "
                f"{tokenizer.vocab_size}; set model.vocab_size={tokenizer.vocab_size} or more"
            )
        own_prefixes = local_prefixes(own.paths, "model.data.validation_prefix", cache, progress) if own else {}
        files = {name: [check_token_file(prefix) for prefix in paths] for name, paths in prefixes.items()}
        own_files = {
            name: [check_token_file(prefix, "model.data.validation_prefix") for prefix in paths]
            for name, paths in own_prefixes.items()
        }
        for file in chain(*files.values(), *own_files.values()):
            check_token_ids(file, model.vocab_size, cache, progress)
            if warning := sentences_warning(file):
                progress.note(warning)
    training, validation = _sources(config, files, own_files)
    if not (stages := tuple(read_stages(data))):
        stages = (Stage(None, named.weights or by_size(training, data.temperature or 1.0)),)
    mixture = Mixture(training, stages)
    weights: Mapping[str, float] = stages[0].weights
    if own is not None:
        weights = own.weights or by_size(validation)
    elif len(stages) > 1:
        weights = {source.name: 1 / len(validation) for source in validation}
    tokenizer_key = None if tokenizer is None else tokenizer.fingerprint
    shares = [
        [stage.num_tokens, mixture.file_weights(stage), *([stage.sequence_length] if stage.sequence_length else [])]
        for stage in stages
    ]
    in_order, own_in_order = list(chain(*files.values())), list(chain(*own_files.values()))
    splits: Any = split_matrix(data.splits_string)
    if own is not None:
        splits = [weights, [content_fingerprint(file) for file in own_in_order]]
    return Corpus(
        training=mixture,
        validation=validation,
        # In the order of the sets; a stage may name them in another.
        validation_weights={source.name: weights[source.name] for source in validation},
        splits=data.splits_string if own is None else None,
        tokenizer=tokenizer,
        fingerprints={
            TOKENIZER: tokenizer_key or NO_TOKENIZER,
            "tokens": fingerprint([content_fingerprint(file) for file in in_order]),
            "shares of the token files": fingerprint(shares),
            "splits": fingerprint(splits),
            ORDER: _ORDER_OF_THIS_VERSION,
            **({_MASKING: "on"} if data.inter_document_masking else {}),
        },
        files_key=fingerprint(
            [
                [file.identity() for file in (*in_order, *own_in_order)],
                list(files),
                list(own_files),
                shares,
                tokenizer_key,
            ]
        ),
    )


def _token_files(
    config: Config, paths: Mapping[str, Sequence[str]], cache: Path, progress: Progress
) -> tuple[Mapping[str, Sequence[str]], Tokenizer | None]:
    """The token files of each source, and the tokenizer; text is tokenized unless the cache has its tokens."""
    data, settings = config.model.data, config.model.tokenizer
    given = own_tokenizer(config)
    if data.data_impl is DataImpl.mmap:
        local = local_prefixes(paths, "model.data.data_prefix", cache, progress)
        return local, given if settings.model is None else load_tokenizer(settings.model, eod_token=settings.eod_token)
    sources = {name: open_source(config, patterns) for name, patterns in paths.items()}
    if given is None and len(sources) > 1 and settings.library is TokenizerLibrary.bpe:
        # One tokenizer for all of them.
        given = train_once(open_source(config, [*chain(*paths.values())]), settings.vocab_size, cache, progress)
    tokenizer: Tokenizer | None = None
    prefixes: dict[str, Sequence[str]] = {}
    for name, source in sources.items():
        prefix, tokenizer = tokenize_source(source, settings, cache, progress, name=data.data_impl.name, given=given)
        prefixes[name] = [str(prefix)]
    return prefixes, tokenizer


def _sources(
    config: Config, files: Mapping[str, Sequence[TokenFile]], own_files: Mapping[str, Sequence[TokenFile]]
) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    """What to train and to validate on: splits of the same files, or whole files; refused if one fills no sample."""
    length, shares = config.model.encoder_seq_length, config.model.data.splits_string
    validates = config.trainer.limit_val_batches > 0

    def source(name: str, of_source: Sequence[TokenFile], sizes: Iterable[SplitSize]) -> Source:
        return Source(name, tuple(file.prefix for file in of_source), tuple(sizes))

    def whole(named: Mapping[str, Sequence[TokenFile]], split: int) -> tuple[Source, ...]:
        return tuple(
            source(name, each, [check_whole(file, split, sequence_length=length) for file in each])
            for name, each in named.items()
        )

    if own_files:
        return whole(files, 0), whole(own_files, 1)
    found = {
        name: [check_splits(file, shares, sequence_length=length, with_validation=validates) for file in each]
        for name, each in files.items()
    }
    training, validation = (
        tuple(source(name, each, [sizes[split] for sizes in found[name]]) for name, each in files.items())
        for split in range(2)
    )
    return training, validation
