"""The machine of a plan: the share of its peaks that training reaches, and the run's processes.

Training's rules and translations get the planned processes and platform, as if a launcher had started the run there. No
torch is imported, so that a command line that breaks a rule is refused at once.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace

from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.registry import all_features
from gpt_pretrain.features.resolve import build_run_spec
from gpt_pretrain.launch.ranks import Launch, rank_zero_of
from gpt_pretrain.rules.check import config_problems
from gpt_pretrain.rules.machine import machine_problems
from gpt_pretrain.run.gpus import GPUS, GPUS_PER_NODE, Gpu
from gpt_pretrain.run.platform import Platform, environment_fields
from gpt_pretrain.run.run_spec import Layout, RunSpec

# What this project is tested with (pyproject.toml, constraints.txt).
TRANSFORMER_ENGINE, TORCHAO, TORCH_CUDA = "2.12.0", "0.18.0", "13.0"


@dataclass(frozen=True, kw_only=True, slots=True)
class Efficiency:
    """Shares of the peaks that training reaches, and costs that no peak describes; FP8's are `config.recipes`'.

    Calibrated on an H200 (`tests/test_plan_speed.py` names the runs). Used unchanged for an H100, where 8 layers of
    Llama 3 8B kept to them within 1.2%, and for a B200, where nothing has been measured.
    """

    bf16: float = 0.70
    """Share of the BF16 peak that a large GEMM reaches under the power limit of a training step."""
    depth: int = 50
    """A GEMM of inner dimension k runs at k / (k + depth) of that: nothing overlaps its start and end."""
    attention: float = 0.45
    """Share of the BF16 peak that fused causal attention reaches, forward and backward together."""
    bandwidth: float = 0.75
    """Share of the memory's bandwidth that elementwise kernels reach."""
    links: float = 0.75
    """Share of NVLink's or the network's bandwidth that NCCL's collectives reach."""
    kernel_s: float = 3e-6
    """From the end of a kernel to the start of the next."""

    # What the host needs to launch kernels. GPT-2 124M, where the host was slower than the GPU: 48 layers a step took
    # 224 ms in BF16, 332 in tensorwise and 128 with graphs, and 12 layers 75 and 107 (benchmarks/gpt2_124m_1xh200.md).
    host_s_per_step: float = 27e-3
    """For a step without its layers."""
    host_s_per_layer: float = 4.1e-3
    """For one layer, forward and backward, and its share of embedding and loss."""
    host_s_per_fp8_layer: float = 6.4e-3
    """The same with FP8's casts and scales."""
    host_s_per_graphed_layer: float = 2.1e-3
    """The same where layers are CUDA graphs."""
    # Two layers of Mixtral (BF16 and tensorwise, on an H200 and an H100) and four of Qwen3-30B-A3B with one kernel for
    # all experts (an H100), on one GPU, and both on two H100s (EP 2 and DP 2), ask for 2 to 7 ms
    # (benchmarks/experts.md).
    count_wait_s_per_layer: float = 4e-3
    """How long the GPU idles in one layer with experts, forward and backward: the host cannot run ahead, since it waits
    for the counts of their tokens in the middle of the forward pass."""
    # Four layers of Qwen3-30B-A3B, four microbatches of 2 × 4,096 tokens a step, on one H200: 983 ms a step in BF16 and
    # 1,179 in tensorwise scaling; kernels ran for 368 and 462 of them. Without LM head, loss, optimizer and a dense
    # layer's time, 768 products of each layer share the rest.
    host_s_per_expert_product: float = 64e-6
    """For one product of one expert, where experts are multiplied one by one."""
    host_s_per_fp8_expert_product: float = 77e-6
    """The same with FP8's casts and scales."""
    # Four layers of Llama 3 8B in FP8, where the host was slower than the GPU: 32 layers a step took 346 ms with
    # TP 4 + SP, 470 with CP 2, 489 with CP 4 and 590 with TP 2 + SP × CP 2, and 256 layers 2.63 s with TP 2 + SP
    # (benchmarks/layouts_4xh200.md).
    host_s_per_tp_layer: float = 3.5e-3
    """What tensor parallelism's collectives add to one layer: measured in FP8, used for BF16 as well."""
    host_s_per_cp_layer: float = 7.4e-3
    """What context parallelism's split attention and exchanges add: measured in FP8, too much in BF16."""
    # 48 layers of 15.4B, recomputed in microbatches of 2,048 tokens, took 0.82 s a step of two of them on one machine
    # and 1.78 of four on another: 1.29 and 1.42 times as long as by the above (benchmarks/gpt_12_8b_15_4b_1xh200.md).
    host_forward: float = 1 / 3
    """Share of a layer's launches that a recomputed forward pass repeats."""


EFFICIENCY = Efficiency()


def link_bytes_per_s(gpu: Gpu, layout: Layout, span: int) -> float:
    """Bytes per second and direction in a group that spans `span` ranks, its first and last one included."""
    return (gpu.nvlink_gb_s if span <= layout.gpus_per_node else gpu.network_gb_s) * 1e9 * EFFICIENCY.links


def planned_spec(config: Config) -> RunSpec:
    """The planned run, on a node with Transformer Engine, without apex, and with this machine's environment.

    It has the optional library of a feature only if the configuration asks for the feature.
    """
    launch, gpu = _planned_launch(config), GPUS[config.plan.gpu]
    asked = [feature.library for feature in all_features() if feature.library and feature.is_asked(config.model)]
    platform = Platform(
        cuda=True,
        num_gpus=launch.local_world_size,
        device_name=gpu.name,
        compute_capability=gpu.compute_capability,
        torch_cuda=TORCH_CUDA,
        transformer_engine=TRANSFORMER_ENGINE,
        torchao=TORCHAO,
        libraries={library.name: library.oldest for library in asked},
        **environment_fields(os.environ),
    )
    return build_run_spec(config, launch, platform)


def platform_problems(config: Config) -> list[str]:
    """What the planned machine would refuse, with the GPUs that would accept it."""
    problems = machine_problems(planned_spec(config))
    if not problems:
        return []
    on_others = {gpu.name: replace(config, plan=replace(config.plan, gpu=gpu)) for gpu in GPUS}
    fitting = [name for name, other in on_others.items() if not machine_problems(planned_spec(other))]
    return [f"{problem}; or plan.gpu={' or '.join(fitting)}" if fitting else problem for problem in problems]


def planned_world_size(config: Config) -> int:
    """Processes of the planned run, one per GPU.

    `plan.num_gpus`, else `trainer.devices` × `trainer.num_nodes` if either is given, else the fewest that the layout
    allows: one data-parallel rank, or as many as share the experts.
    """
    model, trainer = config.model, config.trainer
    if config.plan.num_gpus is not None:
        return max(1, config.plan.num_gpus)
    if trainer.devices is not None:
        return max(1, trainer.devices * (trainer.num_nodes or 1))
    stage = model.tensor_model_parallel_size * model.context_parallel_size
    if model.num_moe_experts is not None:
        stage = math.lcm(stage, model.expert_model_parallel_size * expert_tensor_parallel_size(model))
    layout = model.pipeline_model_parallel_size * stage
    # A number of nodes alone: the fewest whole replicas that give each node the same number of processes.
    return max(1, math.lcm(max(1, layout), max(1, trainer.num_nodes or 1)))


def planned_world_problems(config: Config) -> Iterator[str]:
    """Why `plan.num_gpus` is impossible."""
    num_gpus, trainer = config.plan.num_gpus, config.trainer
    if num_gpus is None:
        return
    if num_gpus < 1:
        yield f"plan.num_gpus={num_gpus} is not positive; use 1 or more, or null for the fewest that the layout needs"
    elif trainer.devices is not None and trainer.devices > 0 and num_gpus % trainer.devices:
        yield (
            f"plan.num_gpus={num_gpus} is not a multiple of trainer.devices={trainer.devices}, the GPUs of one node; "
            "use a multiple, or trainer.devices=null"
        )
    elif trainer.num_nodes is not None and trainer.num_nodes > 0:
        per_node = trainer.devices or num_gpus // trainer.num_nodes
        if num_gpus != trainer.num_nodes * per_node:
            devices = "null" if trainer.devices is None else trainer.devices
            yield (
                f"plan.num_gpus={num_gpus} does not make trainer.num_nodes={trainer.num_nodes} nodes of "
                f"trainer.devices={devices} GPUs; use another number, or trainer.num_nodes=null"
            )


def _length_problems(config: Config) -> Iterator[str]:
    """Why `plan.document_length` is impossible."""
    length, most = config.plan.document_length, config.model.encoder_seq_length
    if length is not None and length > most:
        yield (
            f"plan.document_length={length:g} is more than a sample of model.encoder_seq_length={most} holds; use the "
            "number that prepare_data prints for samples of this length"
        )


def planned_problems(config: Config) -> list[str]:
    """Every rule that training on the planned ranks would break, before it looks at the machine."""
    return [*planned_world_problems(config), *_length_problems(config)] or config_problems(
        config, _planned_launch(config)
    )


def _planned_launch(config: Config) -> Launch:
    """Rank 0 of the planned run, on as few nodes of eight GPUs as hold it."""
    world_size, trainer = planned_world_size(config), config.trainer
    if trainer.devices is not None and trainer.devices > 0:
        local = min(trainer.devices, world_size)
    elif trainer.num_nodes is not None and trainer.num_nodes > 0:
        local = max(1, world_size // trainer.num_nodes)
    else:
        local = max(size for size in range(1, GPUS_PER_NODE + 1) if world_size % size == 0)
    return rank_zero_of(world_size, local_world_size=local, launcher="plan")
