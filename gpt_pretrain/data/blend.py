"""What of which file each split gets: shares of documents, and weights of a blend.

`model.data.splits_string` divides the documents of every file; `model.data.data_prefix` names the files and, where
there are several, how much of a batch each contributes. Both are read here, strictly: what cannot be meant is refused.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)

from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.data.check import TokenFile

_SPLIT_NAMES = ("training", "validation", "test")


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitSize:
    """Documents (sequences of the index) and tokens of one split."""

    num_documents: int
    num_tokens: int


def split_matrix(splits: str) -> list[tuple[float, float] | None]:
    """Start and end of each split as shares of the documents, by megatron-core's own rule; None for an absent split."""
    matrix: list[tuple[float, float] | None] = convert_split_vector_to_split_matrix(parse_and_normalize_split(splits))
    return matrix


def split_sizes(token_file: TokenFile, splits: str) -> list[SplitSize]:
    """Documents and tokens of the training, validation and test split of one file, rounded as megatron-core does."""
    lengths = token_file.lengths()
    sizes = []
    for bounds in split_matrix(splits):
        start, end = (0, 0) if bounds is None else (round(bound * token_file.num_documents) for bound in bounds)
        num_tokens = int(lengths[start:end].sum(dtype=numpy.int64))
        sizes.append(SplitSize(num_documents=max(0, end - start), num_tokens=num_tokens))
    return sizes


def check_splits(token_file: TokenFile, splits: str, *, sequence_length: int, with_validation: bool) -> list[SplitSize]:
    """Refuses a split that is used and cannot fill one sequence.

    Args:
        token_file: The file.
        splits: `model.data.splits_string`.
        sequence_length: Tokens of a sample; a sample needs one more, the label of its last token.
        with_validation: Whether the run validates.

    Raises:
        UserError: Says how many documents and tokens each split has, and what is needed.
    """
    sizes = split_sizes(token_file, splits)
    used = 2 if with_validation else 1
    needed = sequence_length + 1
    for name, size in zip(_SPLIT_NAMES[:used], sizes[:used], strict=True):
        if size.num_tokens >= needed:
            continue
        counts = ", ".join(
            f"{n} {s.num_documents:,} documents with {s.num_tokens:,} tokens"
            for n, s in zip(_SPLIT_NAMES, sizes, strict=True)
        )
        without = " or trainer.limit_val_batches=0 (no validation)" if name == "validation" else ""
        raise UserError(
            f"{token_file.prefix}: the {name} split has {size.num_documents:,} documents with {size.num_tokens:,} "
            f"tokens, one sample of model.encoder_seq_length={sequence_length} needs {needed:,} "
            f"(model.data.splits_string={splits!r} gives {counts}); use more text, other splits, a shorter "
            f"sequence{without}. A document is never divided between splits; a .txt file is one document"
        )
    return sizes


def plan_blend(entries: Sequence[Any]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Reads `model.data.data_prefix`: paths, or weights and paths in turn.

    Weights are shares: positive, and with the sum 1 or 100 (to one part in a thousand), so that a forgotten or
    mistyped one is noticed instead of normalised away.

    The cross-field rules (`rules.check`) have checked the form, and that weights are positive.

    Returns:
        The paths, and their weights with the sum 1, or None where none were given.

    Raises:
        ConfigError: The weights are no shares.
    """
    if not any(_is_number(entry) for entry in entries):
        return tuple(_absolute(entry) for entry in entries), None
    weights, paths = [float(weight) for weight in entries[0::2]], [_absolute(path) for path in entries[1::2]]
    total = sum(weights)
    if not (math.isclose(total, 1, rel_tol=1e-3) or math.isclose(total, 100, rel_tol=1e-3)):
        mended = ",".join(f"{weight / total:.4g},{path}" for weight, path in zip(weights, entries[1::2], strict=True))
        raise ConfigError(
            [
                f"model.data.data_prefix: the weights {', '.join(f'{w:g}' for w in weights)} have the sum {total:g}; "
                f"they must sum to 1 or 100. In proportion: model.data.data_prefix=[{mended}]"
            ]
        )
    return tuple(paths), tuple(weight / total for weight in weights)


def _absolute(path: Any) -> str:
    return str(Path(str(path)).expanduser().absolute())


def _is_number(entry: Any) -> bool:
    try:
        float(entry)
    except ValueError:
        return False
    return True
