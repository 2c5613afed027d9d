"""Ranks build the data sets of one corpus at once: CACHE OUT OVERRIDE…

Each rank writes `LENGTHS DIGEST` of its training and validation samples to OUT/rank_N: on one shared pipe, the lines of
two ranks may run into each other.
"""

import hashlib
import sys
from pathlib import Path

import torch

from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from tests.token_files import data_config


def main(cache, out, *overrides):
    config = data_config(cache, *overrides)
    corpus = prepare_corpus(config, show_progress=False)
    torch.distributed.init_process_group("gloo")
    train, valid = build_datasets(config, corpus, num_train_samples=64)
    digest = hashlib.sha256()
    for dataset in (train, valid):
        for index in range(len(dataset)):
            digest.update(dataset[index]["tokens"].numpy().tobytes())
    line = f"{len(train)} {len(valid)} {digest.hexdigest()}"
    (Path(out) / f"rank_{torch.distributed.get_rank()}").write_text(line, encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
