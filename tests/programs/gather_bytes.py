"""Builds the model of a run on this rank and prints what a gather of its parameters moves: OVERRIDE…

One JSON line of rank 0: bytes of the buffers that data-parallel ranks gather, by the type of what is in them.
"""

import json
import sys
from collections import Counter

from gpt_pretrain.launch.environment import prepare_libraries, set_environment
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.rules.jobs import load_config


def main(*overrides):
    config, launch = load_config(overrides), read_launch()
    set_environment(config)
    prepare_libraries()
    install_cpu_device()
    from gpt_pretrain.features.resolve import build_run_spec, detect_platform
    from gpt_pretrain.fp8.local_layers import fp8_layers
    from gpt_pretrain.megatron.model import build_model
    from gpt_pretrain.megatron.parallel import process_groups

    platform = detect_platform()
    with process_groups(config.model, launch, platform):
        spec = build_run_spec(config, launch, platform)
        model = build_model(spec, fp8_layers(spec))
        sizes = Counter()
        for chunk in model.chunks:
            for buffer in chunk.buffers:
                sizes[str(buffer.param_data.dtype)] += buffer.param_data.nbytes
        if launch.is_rank_zero:
            print(json.dumps(dict(sizes)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
