"""Megatron-LM's own training, as its pretrain_gpt.py starts it, which its wheel lacks; on a GPU, or on a CPU.

    --samples FILE ARGUMENT…

One process, without a launcher. FILE holds the token ids of all samples in the order in which they are read, int64
[samples, seq_length + 1]: the order of other programs is their own. The arguments are Megatron-LM's, which also builds
the model, loads the weights, trains and logs. Nothing of the application takes part; it only answers for the device
where there is no GPU.
"""

from functools import partial

import torch

from gpt_pretrain.megatron.cpu import install_cpu_device

install_cpu_device()

# ruff: noqa: E402 - megatron-core looks for a GPU while it is imported.
from megatron.core.datasets import utils
from megatron.core.enums import ModelType
from megatron.training import get_args, initialize, pretrain, training
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


class Samples(torch.utils.data.Dataset):
    """The fields of Megatron-LM's GPTDataset."""

    def __init__(self, path):
        self.tokens = torch.load(path, weights_only=True)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        tokens = self.tokens[index]
        length = len(tokens) - 1
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.ones(length),
            "position_ids": torch.arange(length),
        }


def datasets(num_samples):
    """For training alone."""
    return Samples(get_args().samples), None, None


def loss_of(loss_mask, losses):
    """The summed loss of a microbatch, its number of tokens, and both for the log."""
    loss, count = (losses.float() * loss_mask).sum(), loss_mask.sum().int()
    return loss, count, {"lm loss": torch.stack([loss.detach(), count])}


def forward_step(batches, model):
    """Losses of a microbatch, and what sums them up."""
    batch = {name: field.cuda(non_blocking=True) for name, field in next(batches).items()}
    # Megatron-LM's layers are causal without a mask.
    losses = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"], loss_mask=batch["loss_mask"])
    return losses, partial(loss_of, batch["loss_mask"])


def with_samples(parser):
    """The parser with the one argument that is not Megatron-LM's."""
    parser.add_argument("--samples", required=True)
    return parser


def run_without_gpu():
    """Lets Megatron-LM start where it asks for a GPU."""
    training.initialize_megatron = partial(initialize.initialize_megatron, allow_no_cuda=True)
    # It opens its groups only where there is a device.
    torch.cuda.device_count = lambda: 1
    torch.cuda.set_device = lambda device: None


def main():
    """Trains."""
    # It would run a Makefile that the wheel lacks; the helpers are compiled already.
    utils.compile_helpers = lambda: None
    if not torch.cuda.is_available():
        run_without_gpu()
    arguments = parse_and_validate_args(extra_args_provider=with_samples)
    config = pretrain_cfg_container_from_args(arguments, gpt_config_from_args(arguments))
    datasets.is_distributed = True
    # One process needs no launcher.
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step, store=torch.distributed.HashStore())
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
