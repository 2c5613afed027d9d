"""Two ranks with norms of queries and keys, in a kernel of their own and fused with the rotation.

OVERRIDES. Gradients of tensor parallel ranks, reduced over them, must agree as far as the precision goes; losses of
other layouts, in fp32, while they learn.
"""

import sys

import torch

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from tests.emulated_training import TINY, build_training_of
from tests.qkv_ropes import counted_launches
from tests.refusals import compose_quickly
from tests.rounding import gradient_tolerance


def separate_and_fused(*overrides: str) -> dict[bool, Config]:
    """The configurations of both, with `overrides`."""
    install_cpu_device()
    asked = "model.num_query_groups=2", "model.qk_layernorm=true", "model.encoder_seq_length=16"
    return {
        fused: compose_quickly([*TINY, *asked, f"model.fused_single_qkv_rope={str(fused).lower()}", *overrides])
        for fused in (False, True)
    }


def check_losses(*overrides: str) -> None:
    """Four steps."""
    configs = separate_and_fused("trainer.precision=fp32", *overrides)
    losses = {}
    with process_groups(configs[True].model, read_launch(), detect_platform()):
        for fused, config in configs.items():
            with counted_launches(normalizes=True) as launches:
                training = build_training_of(config)
                losses[fused] = torch.tensor([training.step() for _ in range(4)])
            assert bool(sum(launch.call_count for launch in launches)) is fused
    assert losses[True][3] < losses[True][0]
    torch.testing.assert_close(losses[True], losses[False], rtol=1e-5, atol=0)


def main() -> None:
    configs = separate_and_fused("parallelism=tp2_sp", *sys.argv[1:])
    model = configs[True].model
    gradients = {}
    with process_groups(model, read_launch(), detect_platform()):
        for fused, config in configs.items():
            with counted_launches(normalizes=True) as launches:
                training = build_training_of(config)
                gradients[fused] = training.gradients()
            assert bool(sum(launch.call_count for launch in launches)) is fused
            for name, gradient in gradients[fused].items():
                if "_layernorm.weight" in name and "self_attention" in name:
                    (other,) = gradient.clone()[None]
                    torch.distributed.broadcast(other, 0)
                    assert torch.equal(gradient, other), f"{name} has different gradients on the ranks"
    dtype = torch.bfloat16 if training.config.trainer.precision is Precision.bf16 else torch.float32
    tolerance = gradient_tolerance(model, dtype)
    for name, separate in gradients[False].items():
        gap = float((gradients[True][name] - separate).norm() / separate.norm())
        assert gap < tolerance, f"{name}: {gap} of {tolerance}"


if __name__ == "__main__":
    main()
