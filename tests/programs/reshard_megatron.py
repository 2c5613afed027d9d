"""Ranks load a Megatron-LM checkpoint into plain GPTModels of another layout and save it: FROM TO MODEL TP PP.

Both are megatron-core's own work.
"""

import sys
from pathlib import Path

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.megatron_checkpoints import MODELS, load_gpt, save_gpt


def main(source: str, target: str, name: str, tp: str, pp: str) -> None:
    install_cpu_device()
    layout = [f"model.tensor_model_parallel_size={tp}", f"model.pipeline_model_parallel_size={pp}"]
    config = load_config([*layout, "model.num_layers=4"])
    with process_groups(config.model, read_launch(), detect_platform()):
        save_gpt(Path(target), MODELS[name], model=load_gpt(Path(source), MODELS[name]))


if __name__ == "__main__":
    main(*sys.argv[1:])
