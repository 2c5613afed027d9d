"""Two ranks compute one model's logits under tensor parallelism, without and with sequence parallelism.

    FOLDER OVERRIDE…

FOLDER/input.pt holds the whole weights by megatron-core's names and tokens [b, s]; each rank takes its part of every
weight. Rank 0 writes FOLDER/output.pt: the logits [b, s, vocab], gathered over the ranks, of both layouts.
"""

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_gpt_chunks
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.platforms import spec_of


def shard(name: str, whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """This rank's part of a weight: of the dimension in which the rank has less than the whole."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    if parameter.shape == whole.shape:
        return whole
    if name.endswith("linear_fc1.weight"):
        # Gate and up projections lie one behind the other on every rank.
        return torch.cat([half.chunk(size)[rank] for half in whole.chunk(2)])
    (dim,) = (dim for dim in range(whole.dim()) if parameter.shape[dim] * size == whole.shape[dim])
    return whole.chunk(size, dim=dim)[rank]


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2:]
    install_cpu_device()
    given = torch.load(folder / "input.pt")
    tokens = given["tokens"]
    configs = {layout: load_config([*overrides, f"parallelism={layout}"]) for layout in ("tp2", "tp2_sp")}
    platform = detect_platform()
    output = {}
    # Both layouts have the same groups; sequence parallelism is the model's alone.
    with process_groups(configs["tp2"].model, read_launch(), platform), torch.no_grad():
        for layout, config in configs.items():
            (model,) = build_gpt_chunks(spec_of(config, platform))
            for name, parameter in model.named_parameters():
                parameter.copy_(shard(name, given["weights"][name], parameter))
            positions = torch.arange(tokens.shape[1]).expand_as(tokens)
            output[layout] = gather_from_tensor_model_parallel_region(model.eval()(tokens, positions, None))
    if read_launch().is_rank_zero:
        torch.save(output, folder / "output.pt")


main()
