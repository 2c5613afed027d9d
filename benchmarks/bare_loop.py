"""The yardstick: megatron-core's own pieces in the shortest loop that trains, under the same knobs as the application.

The model, its data-parallel wrapper and the optimizer are built from the application's translated configuration; the
loop is as bare as it gets: one batch of random tokens that stays on the device, no data loading, no logging, no
validation, no schedule, no signal handling. The optimizer is megatron-core's as it comes, without the kernels of
`gpt_pretrain/megatron/kernels.py`: what those bring shows in the comparison. One model chunk, no context parallelism.

    python benchmarks/bare_loop.py --steps 60 --interval 10 model=gpt2_124m data=mock

prints one JSON line: seconds per step of each interval of steps, and the peak memory.
"""

import argparse
import json
import time

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt_pretrain.config.derived import num_microbatches
from gpt_pretrain.config.launch import read_launch
from gpt_pretrain.config.load import load_config
from gpt_pretrain.config.rules import check_config
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.platform import detect_platform, plan_kernels
from gpt_pretrain.megatron.translate import translate_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--interval", type=int, required=True, help="steps between two readings of the clock")
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    config = load_config(arguments.overrides)
    launch = read_launch()
    check_config(config, launch)
    if config.model.virtual_pipeline_model_parallel_size or config.model.context_parallel_size > 1:
        parser.error("the bare loop knows neither virtual pipeline stages nor context parallelism")
    install_cpu_device()
    platform = detect_platform()
    with process_groups(config.model, launch, platform):
        model = build_model(config, platform, plan_kernels(config, platform))
        assert model.transformer_config.finalize_model_grads_func is finalize_model_grads
        optimizer = get_megatron_optimizer(
            translate_optimizer(config, platform), model.chunks, use_gloo_process_groups=False
        )
        chunk = model.chunks[0]
        shape = (config.model.micro_batch_size, config.model.encoder_seq_length)
        tokens = torch.randint(config.model.vocab_size, shape, device=platform.device)
        labels = torch.randint(config.model.vocab_size, shape, device=platform.device)
        positions = torch.arange(shape[1], device=platform.device).expand(shape)

        def forward_step(_, model_chunk):
            losses = model_chunk(tokens, positions, None, labels=labels)
            return losses, lambda output: (output.float().mean(), {})

        forward_backward = get_forward_backward_func()
        seconds = []
        for _ in range(arguments.steps // arguments.interval):
            torch.cuda.synchronize()
            began = time.monotonic()
            for _ in range(arguments.interval):
                chunk.zero_grad_buffer()
                optimizer.zero_grad()
                forward_backward(
                    forward_step_func=forward_step,
                    data_iterator=None,
                    model=chunk,
                    num_microbatches=num_microbatches(config.model, launch.world_size),
                    seq_length=shape[1],
                    micro_batch_size=shape[0],
                    forward_only=False,
                )
                optimizer.step()
            torch.cuda.synchronize()
            seconds.append((time.monotonic() - began) / arguments.interval)
        memory = torch.cuda.max_memory_allocated() / 2**30 if platform.cuda else None
        if launch.is_rank_zero:
            print(json.dumps({"step_time_s": seconds, "memory_gib": memory}))


if __name__ == "__main__":
    main()
