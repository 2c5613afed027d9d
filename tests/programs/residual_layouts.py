"""Two ranks whose norms' backward kernels add the residual stream's gradient, and with separate sums, in each layout.

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

LLAMA = ("model.normalization=rmsnorm", "model.bias=false", "trainer.precision=bf16")
LAYOUTS = ("tp2_sp", "pp2", "dp", "zero2", "fsdp")


def main() -> None:
    install_cpu_device()
    for layout in LAYOUTS:
        losses = {}
        for fused in (False, True):
            asked = f"model.residual_gradient_fusion={str(fused).lower()}", "model.transformer_engine=true"
            config = compose_quickly([*TINY, *LLAMA, f"parallelism={layout}", *asked, *sys.argv[1:]])
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
