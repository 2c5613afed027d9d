"""Two ranks train tiny GPTs and prove each step, after one of them, or both, has been made wrong.

    FOLDER LAYOUT:RECIPE:SABOTAGE …

Rank r writes FOLDER/LAYOUT:RECIPE:SABOTAGE.r: the differences that ended the run, none after two proven steps.
"""

import json
import sys
from pathlib import Path

import torch

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests import sabotages
from tests.emulated_training import RECOMPUTED, TINY, Training, build_training, emulate


def sabotage(training: Training, name: str) -> None:
    if name in ("nothing", "recomputed"):
        return
    layer = sabotages.layer_of(training, "mlp.linear_fc1", "decoder.layers.0")
    if name == "amaxes_of_each_rank":
        for scaling in (sabotages.state_of(layer)._forward, sabotages.state_of(layer)._backward):
            scaling.reduce = lambda group: None
    elif torch.distributed.get_rank() == 0:
        return
    elif name == "history_of_rank_1":
        layer.fp8_meta["scaling_fwd"].amax_history[5, 0] = 1e-6
    elif name == "recipe_of_rank_1":
        sabotages.own_recipe(layer, emulate("tensorwise"))
    elif name == "rounding_of_rank_1":
        sabotages.round_nothing(layer)
    elif name == "scale_of_rank_1":
        state = layer.fp8_meta["scaling_fwd"]
        sabotages.after_updates(sabotages.state_of(layer)._forward, lambda _: state.scale.mul_(2))


def found(layout: str, recipe: str, name: str) -> list[list[str]]:
    more = RECOMPUTED if name == "recomputed" else ()
    layers = ("model.num_layers=4",) if "vp2" in layout else ()
    training = build_training(f"parallelism={layout}", *emulate(recipe), *more, *layers)
    training.step()
    sabotage(training, name)
    try:
        sabotages.prove_steps(training, range(1, 3))
    except ProofError as error:
        return [[each.module, each.what, each.planned, each.live] for each in error.differences]
    return []


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    install_cpu_device()
    launch = read_launch()
    layout = cases[0].partition(":")[0]
    layers = ("model.num_layers=4",) if "vp2" in layout else ()
    config = load_config([*TINY, *layers, f"parallelism={layout}"])
    with process_groups(config.model, launch, detect_platform()):
        for case in cases:
            (folder / f"{case}.{launch.rank}").write_text(json.dumps(found(*case.split(":"))))


if __name__ == "__main__":
    main()
