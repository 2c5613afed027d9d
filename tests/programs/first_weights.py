"""Saves a model with first weights that BF16 has as well, so that runs of both precisions start from the same.

    FOLDER OVERRIDE…

FOLDER becomes the run's directory.
"""

import sys
from pathlib import Path

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from tests.saved_models import build_trainable, save, small_config


def main(folder, *overrides):
    install_cpu_device()
    config = small_config(*overrides)
    with process_groups(config.model, read_launch(), detect_platform()):
        trainable = build_trainable(config)
        for parameter in trainable.model.gpt_chunks[0].parameters():
            parameter.data.copy_(parameter.data.bfloat16())
        save(Path(folder), config, trainable, {})


if __name__ == "__main__":
    main(*sys.argv[1:])
