"""Two ranks train tiny GPTs with emulated FP8, one after the other in the same process groups.

    FOLDER LAYOUT:RECIPE[:resume|:own] …

Rank r writes FOLDER/LAYOUT.RECIPE.r.pt: what `observed_training` saw on this rank; where it says "resume" also losses
and states of a run that was saved after a validation, "uncut", and of one that was resumed there, "resumed".
"""

import sys
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.checkpoint.load import load_checkpoint, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import (
    TINY,
    Training,
    build_training,
    build_training_of,
    emulate,
    observed_training,
    save_checkpoint,
)


def two_more_steps(training: Training) -> tuple[list[float], dict[str, Any]]:
    losses = [training.step() for _ in range(2)]
    return losses, {name: layer.get_extra_state() for name, layer in training.layers().items()}


def train(folder: Path, layout: str, recipe: str, resume: bool, own: bool) -> dict[str, Any]:
    if own:
        # TorchAO's own products, which a CPU computes with one scale for each tensor.
        config = load_config([*TINY, f"parallelism={layout}", f"fp8={recipe}", "trainer.precision=bf16"])
        return observed_training(build_training_of(config, {"compiled": False}))
    overrides = (f"parallelism={layout}", *emulate(recipe))
    training = build_training(*overrides)
    result = observed_training(training)
    if resume:
        training.validate()
        config, trainable = training.config, training.trainable
        with trainable.model.gathered_parameters():
            path = save_checkpoint(
                folder / f"{layout}.{recipe}", trainable, TrainingProgress(step=3, consumed_samples=12), config, {}
            )
        result["uncut"] = two_more_steps(training)
        resumed = build_training(*overrides)
        load_checkpoint(verify_checkpoint(path), resumed.trainable, config, {})
        result["resumed"] = two_more_steps(resumed)
    return result


def main() -> None:
    folder, cases = Path(sys.argv[1]), [argument.split(":") for argument in sys.argv[2:]]
    install_cpu_device()
    launch = read_launch()
    with process_groups(load_config([*TINY, f"parallelism={cases[0][0]}"]).model, launch, detect_platform()):
        for layout, recipe, *more in cases:
            own = "own" in more
            result = train(folder, layout, recipe, resume="resume" in more, own=own)
            torch.save(result, folder / f"{layout}{'.own' if own else ''}.{recipe}.{launch.rank}.pt")


if __name__ == "__main__":
    main()
