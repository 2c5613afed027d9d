"""Ranks build models and write their weights, each under the name that it has in the whole model.

    FOLDER NAME:OVERRIDE,OVERRIDE… …

Each NAME is a model with its overrides, all with the same parallel sizes. Rank r writes FOLDER/NAME.r.pt: for every
parameter the name in the whole model, the local tensor, the dimension in which it is split over the tensor parallel
ranks (None: each has all of it) and the number of pieces that a rank has there. This comes from the modules' layer
numbers and parameter attributes, not from the sharded state dict that the initialisation itself goes by.
"""

import re
import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_gpt_chunks
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.platforms import spec_of


def whole_model_names(chunk: GPTModel) -> dict[str, torch.nn.Parameter]:
    """Parameters of a chunk; layers are counted from the start of the whole model instead of the chunk's."""
    numbers = {str(index): str(layer.layer_number - 1) for index, layer in enumerate(chunk.decoder.layers)}
    return {
        re.sub(r"^decoder\.layers\.(\d+)\.", lambda match: f"decoder.layers.{numbers[match[1]]}.", name): parameter
        for name, parameter in chunk.named_parameters()
    }


def split(parameter: torch.nn.Parameter) -> tuple[int | None, int]:
    """Dimension and number of pieces per rank; norms have no such attributes."""
    is_split = getattr(parameter, "tensor_model_parallel", False)
    return (parameter.partition_dim, parameter.partition_stride) if is_split else (None, 1)


def main() -> None:
    folder, models = Path(sys.argv[1]), [argument.split(":", 1) for argument in sys.argv[2:]]
    install_cpu_device()
    configs = {name: load_config(["data=mock", *overrides.split(",")]) for name, overrides in models}
    platform, launch = detect_platform(), read_launch()
    with process_groups(next(iter(configs.values())).model, launch, platform):
        for name, config in configs.items():
            tensors = [
                (parameter_name, parameter.detach(), *split(parameter))
                for chunk in build_gpt_chunks(spec_of(config, platform))
                for parameter_name, parameter in whole_model_names(chunk).items()
            ]
            place = {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
            }
            torch.save({**place, "tensors": tensors}, folder / f"{name}.{launch.rank}.pt")


main()
