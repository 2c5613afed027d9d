"""Four ranks cut a sequence of 16 in one layout after the other: FOLDER LAYOUT…; rank r writes FOLDER/r.json.

A layout is tensor, pipeline and context parallel sizes, with commas between. Of each: this rank's positions, and its
context parallel group's.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from megatron.core import parallel_state

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import context_parallel_slices, lay_out_ranks, process_groups
from gpt_pretrain.rules.jobs import load_config


def main() -> None:
    folder, layouts = Path(sys.argv[1]), sys.argv[2:]
    install_cpu_device()
    launch = read_launch()
    model = load_config([]).model
    found = {}
    with process_groups(model, launch, detect_platform()):
        for layout in layouts:
            tp, pp, cp = map(int, layout.split(","))
            parallel_state.destroy_model_parallel()
            sizes = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp, "context_parallel_size": cp}
            lay_out_ranks(replace(model, **sizes))
            positions = context_parallel_slices({"tokens": torch.arange(16).unsqueeze(0)})["tokens"][0].tolist()
            of_group = [None] * cp
            torch.distributed.all_gather_object(of_group, positions, group=parallel_state.get_context_parallel_group())
            found[layout] = {"rank": positions, "group": of_group}
    (folder / f"{launch.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
