"""Two ranks exchange the gradients of experts of one kernel while the backward pass goes on; Triton interprets it."""

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.te_layers import OneKernelExperts, announce_gradients, use_one_kernel
from tests.refusals import compose_quickly

WIDTH, COUNTS = 32, [3, 0, 2]


class Parameters(torch.nn.Module):
    """What is asked of Transformer Engine's layer, which is not here: its parameters."""

    use_bias = False

    def __init__(self):
        super().__init__()
        for expert in range(len(COUNTS)):
            weight = torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)
            self.register_parameter(f"weight{expert}", torch.nn.Parameter(weight))


class Layers(OneKernelExperts):
    def __init__(self):
        torch.nn.Module.__init__(self)
        self.linear_fc1, self.linear_fc2 = Parameters(), Parameters()
        use_one_kernel(self)

    def forward(self, rows):
        return self.linear_fc2(self.linear_fc1(rows, COUNTS)[0], COUNTS)[0]


def wrapped():
    config = TransformerConfig(num_layers=1, hidden_size=WIDTH, num_attention_heads=1)
    exchange = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=len(COUNTS) * WIDTH**2
    )
    return DistributedDataParallel(config, exchange, Layers())


def microbatches():
    return torch.randn(2, sum(COUNTS), WIDTH, dtype=torch.bfloat16)


def main():
    install_cpu_device()
    launch = read_launch()
    with process_groups(compose_quickly(["parallelism=dp"]).model, launch, detect_platform()):
        torch.manual_seed(1)
        chunk, alone = wrapped(), Layers()
        announce_gradients([chunk])
        alone.load_state_dict(chunk.module.state_dict())
        torch.manual_seed(2 + launch.rank)
        # In the first step data parallelism learns how often to expect a gradient.
        for _ in range(2):
            chunk.zero_grad_buffer()
            for weight in alone.parameters():
                weight.main_grad = torch.zeros(WIDTH, WIDTH)
            first, last = microbatches()
            with chunk.no_sync():
                chunk(first).float().sum().backward()
            assert not any(group.grad_reduce_handle for group in chunk.bucket_groups)
            chunk(last).float().sum().backward()
            started = [group.grad_reduce_handle is not None for group in chunk.bucket_groups]
            chunk.finish_grad_sync()
            for rows in (first, last):
                alone(rows).float().sum().backward()
            for weight, expected in zip(chunk.module.parameters(), alone.parameters(), strict=True):
                torch.distributed.all_reduce(expected.main_grad)
                torch.testing.assert_close(weight.main_grad, expected.main_grad / launch.world_size)
        assert started == [True, True], started


main()
