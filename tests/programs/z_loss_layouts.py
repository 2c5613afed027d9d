"""Two ranks share the vocabulary of an LM head with a penalty on log z: FOLDER CAP, where rank r writes FOLDER/r.pt."""

import sys
from pathlib import Path

import torch
from megatron.core import parallel_state

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.kernels.cross_entropy import linear_cross_entropy
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import TINY

Z_LOSS, CHUNK = 0.02, 16


def main() -> None:
    folder, cap = Path(sys.argv[1]), float(sys.argv[2]) or None
    install_cpu_device()
    launch = read_launch()
    hidden, weight, labels, loss_gradient = torch.load(folder / "head.pt")
    with process_groups(load_config([*TINY, "parallelism=tp2"]).model, launch, detect_platform()):
        group = parallel_state.get_tensor_model_parallel_group()
        hidden = hidden.requires_grad_()
        part = torch.nn.Parameter(weight.chunk(2)[launch.rank].clone())
        losses = linear_cross_entropy(
            hidden, part, labels, loss_gradient, group, chunk=CHUNK, accumulate=False, z_loss=Z_LOSS, cap=cap
        )
        losses.backward(loss_gradient)
    torch.save((losses.detach(), hidden.grad, part.grad), folder / f"{launch.rank}.pt")


if __name__ == "__main__":
    main()
