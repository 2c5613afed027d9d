"""Two ranks whose layers join, sum and cast gradients in fused kernels, and in separate ones, in each layout.

OVERRIDES. The losses of four steps must agree as far as BF16 goes, while they fall.
"""

import sys

import torch

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from tests.emulated_training import TINY, build_training_of
from tests.refusals import compose_quickly
from tests.rounding import fp8_anew_tolerance, loss_tolerance

LLAMA = ("model.hidden_size=256", "model.normalization=rmsnorm", "model.bias=false", "trainer.precision=bf16")
LAYOUTS = ("tp2_sp", "pp2", "dp", "zero2", "fsdp")


def main() -> None:
    install_cpu_device()
    for layout in LAYOUTS:
        losses = {}
        for fused in (False, True):
            given = [*TINY, *LLAMA, f"parallelism={layout}", "model.transformer_engine=true", *sys.argv[1:]]
            keys = ["residual_gradient_fusion"] + ["qkv_cast_fusion"] * any(each.startswith("fp8=") for each in given)
            config = compose_quickly([*given, *(f"model.{key}={str(fused).lower()}" for key in keys)])
            with process_groups(config.model, read_launch(), detect_platform()):
                training = build_training_of(config)
                losses[fused] = torch.tensor([training.step() for _ in range(4)])
        if layout == "pp2" and losses[True].isnan().all():
            # The first stage has no loss.
            continue
        assert losses[True][3] < losses[True][0], layout
        for step, (ours, separate) in enumerate(zip(losses[True], losses[False], strict=True), start=1):
            tolerance = loss_tolerance(config.model, torch.bfloat16, step)
            tolerance += fp8_anew_tolerance(config.model, step) if config.model.fp8 else 0
            assert abs(ours - separate) <= tolerance * separate, f"{layout}, step {step}: {ours} and {separate}"


if __name__ == "__main__":
    main()
