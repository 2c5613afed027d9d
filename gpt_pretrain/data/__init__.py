"""From text or token files to the microbatches of one rank.

    sources (text) → tokenizer (.bin/.idx in the cache) → token_files (checks) → corpus → datasets → batches

`corpus.prepare_corpus` is called by every rank before the model is built and before torch.distributed is initialised:
it tokenises what is not tokenised yet and refuses wrong data. `datasets.build_datasets` and
`batches.build_batch_iterator` follow once the process groups stand.
"""
