"""The yardstick: megatron-core's own pieces in the shortest loop that trains, under the same knobs as the application.

The model, its data-parallel wrapper and the optimizer are built from the application's translated configuration. The
loop is as bare as possible: one batch of random tokens that stays on the device, no data loading, no logging, no
validation, no schedule, no signal handling. Optimizer and loss are megatron-core's own, without `megatron.loss`, so the
comparison shows what the application's gain, unless the configuration asks for the plain loss. The model has the
kernels that `spec.kernels` chooses, so the comparison does not show what those gain; a key such as
`model.activation_cast_fusion=false` leaves one out in both. The loop knows one model chunk and no context parallelism.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func

from gpt_pretrain.config.choices import CrossEntropyFusion
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.schema import Config
from gpt_pretrain.fp8.emulation.layers import emulated_layers
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.translate import translate_optimizer
from gpt_pretrain.megatron.user_buffers import user_buffers
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.spec.platform import detect_platform
from gpt_pretrain.spec.run_spec import RunSpec, build_run_spec


def run_bare_loop(config: Config, launch: Launch, after_step: Callable[[int], None]) -> None:
    """Trains `trainer.max_steps` steps on this rank.

    Args:
        config: From `config.load`, all rules passed.
        launch: This process's place in the run.
        after_step: Called with the number of each step.

    Raises:
        ConfigError: The configuration asks for what this loop lacks, or the machine does not allow it.
    """
    platform = detect_platform()
    spec = build_run_spec(config, launch, platform)
    check_machine(spec)
    with process_groups(config.model, launch, platform), user_buffers(spec):
        step = build_bare_step(spec)
        for number in range(1, config.trainer.max_steps + 1):
            step()
            after_step(number)


def build_bare_step(spec: RunSpec) -> Callable[[], None]:
    """Builds model and optimizer in open process groups, and returns what trains them for one step.

    Raises:
        ConfigError: See `run_bare_loop`.
    """
    config, platform = spec.config, spec.platform
    chunks, context = config.model.virtual_pipeline_model_parallel_size, config.model.context_parallel_size
    if chunks or context > 1:
        raise ConfigError(
            [
                f"the bare loop cannot run model.virtual_pipeline_model_parallel_size={chunks or 'null'} with "
                f"model.context_parallel_size={context}; use null and 1, or leave `bare` out of benchmark.variants"
            ]
        )
    kernels = spec.kernels
    if kernels.cross_entropy_loss_fusion is CrossEntropyFusion.linear:
        kernels = replace(kernels, cross_entropy_loss_fusion=CrossEntropyFusion.native if platform.cuda else None)
    model = build_model(replace(spec, kernels=kernels), emulated_layers(spec))
    assert model.transformer_config.finalize_model_grads_func is finalize_model_grads
    optimizer = get_megatron_optimizer(translate_optimizer(spec), model.chunks, use_gloo_process_groups=False)
    chunk = model.chunks[0]
    micro_batch_size, length = config.model.micro_batch_size, config.model.encoder_seq_length
    shape = (micro_batch_size, length)
    tokens = torch.randint(config.model.vocab_size, shape, device=platform.device)
    labels = torch.randint(config.model.vocab_size, shape, device=platform.device)
    positions = torch.arange(length, device=platform.device).expand(shape)

    def forward_step(_: None, model_chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        losses = model_chunk(tokens, positions, None, labels=labels)
        return losses, lambda output: (output.float().mean(), {})

    forward_backward = get_forward_backward_func()

    def step() -> None:
        chunk.zero_grad_buffer()
        optimizer.zero_grad()
        forward_backward(
            forward_step_func=forward_step,
            data_iterator=None,
            model=chunk,
            num_microbatches=spec.layout.num_microbatches,
            seq_length=length,
            micro_batch_size=micro_batch_size,
            forward_only=False,
        )
        optimizer.step()

    return step
