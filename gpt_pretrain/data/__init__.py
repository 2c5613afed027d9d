"""From text or token files to the microbatches of one rank.

    sources (text) → tokenizing (.bin/.idx in the cache) → token_files (checks) → corpus → datasets → batches

Every rank calls `corpus.prepare_corpus` before the model is built and torch.distributed is initialized. It tokenizes
new text and refuses wrong data. `datasets.build_datasets` and `batches.build_batch_iterator` need process groups.
"""
