"""Two ranks observe two steps with products of different layers, and each writes what it reads to DIRECTORY.

torchrun --nproc-per-node 2 fp8_statistics_of_ranks.py DIRECTORY
"""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from gpt_pretrain.fp8.gemms import Fp8Operand, Phase, Product, Role
from gpt_pretrain.fp8.statistics import StatisticsCollector
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.products import resolve


def product(code_bytes: list[int], scale: float, amax: dict[Role, float]) -> Product:
    input_, weight = (
        Fp8Operand(
            role=role,
            format="e4m3",
            codes=torch.tensor(code_bytes, dtype=torch.uint8).view(torch.float8_e4m3fn),
            scale=torch.tensor([scale]),
            amax=torch.tensor([amax[role]]),
        )
        for role in (Role.input, Role.weight)
    )
    return Product(phase=Phase.forward, operands=(input_, weight))


def main() -> None:
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    run = resolve(load_config(["model.num_layers=2", "fp8=delayed"]))
    collector = StatisticsCollector(run.linears, [], torch.device("cpu"))
    large = product([0x7E, 0x38], 0.5, {Role.input: 1000.0, Role.weight: 1000.0})
    small = product([0x38, 0x00, 0x00, 0x00, 0x80, 0x38], 2.0, {Role.input: 3.0, Role.weight: math.nan})
    with collector.observe(1):
        collector.add("decoder.layers.0.mlp.linear_fc1", (large, small)[rank])
        if rank == 1:
            collector.add("decoder.layers.1.mlp.linear_fc2", small)
    with collector.observe(2):
        if rank == 0:
            collector.add("decoder.layers.0.mlp.linear_fc1", large)
    read = [
        (
            statistics.step,
            [
                {name: "inf" if value == math.inf else value for name, value in asdict(tensor).items()}
                for tensor in statistics.tensors
            ],
        )
        for statistics in collector.read()
    ]
    (Path(sys.argv[1]) / f"rank_{rank}.json").write_text(json.dumps(read), encoding="utf-8")
    torch.distributed.destroy_process_group()


main()
