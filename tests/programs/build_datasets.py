"""Ranks build the data sets of one corpus at once: CACHE OVERRIDE…

Each rank prints a line `RANK LENGTHS DIGEST` of its training and validation samples.
"""

import hashlib
import sys

import torch

from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from tests.token_files import data_config


def main(cache, *overrides):
    config = data_config(cache, *overrides)
    corpus = prepare_corpus(config, show_progress=False)
    torch.distributed.init_process_group("gloo")
    train, valid = build_datasets(config, corpus, num_train_samples=64, num_valid_samples=8)
    digest = hashlib.sha256()
    for dataset in (train, valid):
        for index in range(len(dataset)):
            digest.update(dataset[index]["tokens"].numpy().tobytes())
    print(f"rank {torch.distributed.get_rank()} {len(train)} {len(valid)} {digest.hexdigest()}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
