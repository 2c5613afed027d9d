"""Small corpora for tests: megatron-core's `.bin/.idx`, text, and a configuration that reads them."""

from pathlib import Path

import numpy
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from gpt_pretrain.rules.jobs import load_config

SEQUENCE_LENGTH = 16


def write_token_file(prefix: Path, documents, dtype=numpy.uint16):
    """Writes documents (lists of token ids) and answers the prefix as a string."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(numpy.array(document, dtype=dtype), [len(document)])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


def counting_documents(num_documents, length, start=0):
    """Documents whose tokens count on from one to the next, so that a token tells where it comes from."""
    return [list(range(start + i * length, start + (i + 1) * length)) for i in range(num_documents)]


def data_config(cache, *overrides):
    """The tiny model with short sequences and its caches in `cache`."""
    return load_config(
        [
            f"model.data.cache_dir={cache}",
            f"model.encoder_seq_length={SEQUENCE_LENGTH}",
            "model.micro_batch_size=2",
            "model.global_batch_size=8",
            "trainer.limit_val_batches=1",
            *overrides,
        ]
    )
