"""Tiny runs with whole and with sharded gradients and weights (`parallelism=dp`, `zero2`, `fsdp`) side by side.

Launched ranks write what they saw as JSON, under the names of the case and the strategy.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state

from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.training.step import compute_gradients, mean_loss
from tests.emulated_training import TINY, Training, build_training_of, emulate, lay_out_anew
from tests.optimizer_states import LEAN, SMALLEST
from tests.refusals import compose_quickly

STEPS = 2
STRATEGIES = {name: f"model.data_parallel_sharding_strategy={name}" for name in ("optim_grads", "optim_grads_params")}
# A section for each layer; two microbatches on each rank in a step.
_RUN = (
    "parallelism=dp",
    "model.num_layers=4",
    "model.ddp_bucket_size=1",
    "model.micro_batch_size=1",
)
_BF16 = ("trainer.precision=bf16",)
_TIED = ("model.share_embeddings_and_output_weights=true",)
_LEARNED = (
    *_TIED,
    "model.position_embedding_type=learned_absolute",
    "model.bias=true",
    "model.normalization=layernorm",
)
_EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=96", "model.init_method_std=0.2")
_RECOMPUTED = (
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
    "model.activations_checkpoint_num_layers=2",
)
# Gradients are added to `main_grad` where they are computed: the head's in the forward pass.
_IN_PLACE = ("model.gradient_accumulation_fusion=true",)
_LINEAR_LOSS = (*_IN_PLACE, "model.cross_entropy_loss_fusion=true", "model.cross_entropy_fusion_impl=linear")
_TP2_SP = ("model.tensor_model_parallel_size=2", "model.sequence_parallel=true")
_PP2 = ("model.pipeline_model_parallel_size=2",)

# Ranks and overrides. Of each name's models there is one that shards nothing but states, and one for each strategy.
CASES: dict[str, tuple[int, Sequence[str]]] = {
    "fp32": (2, ()),
    # Norms are sums over other parts, so that clipping would round otherwise.
    "one microbatch": (2, ("model.global_batch_size=2", "trainer.gradient_clip_val=0")),
    "one microbatch, summed in place": (
        2,
        ("model.global_batch_size=2", "trainer.gradient_clip_val=0", *emulate("delayed"), *_IN_PLACE),
    ),
    "one section of all layers": (2, ("model.ddp_bucket_size=null",)),
    "bf16": (2, _BF16),
    "bf16 gradients, small states": (2, (*LEAN, *SMALLEST)),
    "delayed": (2, emulate("delayed", "model.fp8_amax_history_len=4")),
    "tensorwise": (2, (*emulate("tensorwise"), *_BF16)),
    "blockwise": (2, emulate("blockwise")),
    "stored": (2, (*emulate("torchao_tensorwise"), "model.fp8_params=true", *_BF16)),
    "tied": (2, _TIED),
    "tied, learned positions": (2, _LEARNED),
    "masked": (2, ("model.data.eod_mask_loss=true",)),
    "linear loss, tied": (2, (*_LINEAR_LOSS, *_TIED)),
    "recomputed": (2, _RECOMPUTED),
    "gathered at once": (2, ("model.overlap_param_gather=false",)),
    "ep2, summed in place": (2, ("model.expert_model_parallel_size=2", *_EXPERTS, *emulate("tensorwise"), *_IN_PLACE)),
    "ep2": (2, ("model.expert_model_parallel_size=2", *_EXPERTS)),
    "dp4": (4, ()),
    "tp2_sp": (4, (*_TP2_SP, "model.qk_layernorm=true")),
    "pp2": (4, _PP2),
    "pp2 tied": (4, (*_PP2, *_LEARNED)),
    "pp2 linear loss": (4, (*_PP2, *_LINEAR_LOSS)),
    "pp2_vp2": (4, (*_PP2, "model.virtual_pipeline_model_parallel_size=2")),
    "pp2 recomputed": (4, (*_PP2, *_RECOMPUTED)),
    "ep2 of 4": (4, ("model.expert_model_parallel_size=2", *_EXPERTS)),
    # Two groups of two ranks.
    "hsdp": (4, ()),
    "hsdp stored": (4, (*emulate("torchao_tensorwise"), "model.fp8_params=true", *_BF16)),
    "hsdp small states": (4, (*LEAN, *SMALLEST)),
    "hsdp tied": (4, _TIED),
    "hsdp ep2": (4, ("model.expert_model_parallel_size=2", *_EXPERTS)),
}
# For Transformer Engine's layers, whose products write over what `main_grad` holds where they find the mark.
GPU_CASES: dict[str, tuple[int, Sequence[str]]] = {
    "bf16 on GPUs": (2, ()),
    "delayed on GPUs": (2, ("fp8=delayed",)),
    "delayed, stored on GPUs": (2, ("fp8=delayed", "model.fp8_params=true")),
    "tensorwise, stored on GPUs": (2, ("fp8=tensorwise", "model.fp8_params=true")),
    "blockwise, stored on GPUs": (2, ("fp8=blockwise", "model.fp8_params=true", "model.hidden_size=128")),
    "tied on GPUs": (2, (*_TIED, "fp8=delayed", "model.fp8_params=true")),
    # All four experts: sums in any order would choose others for some tokens.
    "experts on GPUs": (2, ("model.expert_model_parallel_size=2", *_EXPERTS, "model.moe_router_topk=4")),
}


@cache
def config_of(case: str, strategy: str | None = None) -> Config:
    """Of one of the models of a case."""
    num_ranks, own = {**CASES, **GPU_CASES}[case]
    batch = f"model.global_batch_size={8 if case in GPU_CASES else 2 * num_ranks}"
    instances = ["model.num_distributed_optimizer_instances=2"] if case.startswith("hsdp") else []
    return compose_quickly(
        [*TINY, *_RUN, batch, *own, *([] if strategy is None else [STRATEGIES[strategy], *instances])]
    )


def _own_parts(training: Training) -> Iterator[tuple[torch.nn.Parameter, int, int]]:
    """Parameters that this rank holds a part of, with its bounds."""
    for part in training.trainable.optimizer.chained_optimizers:
        for of_buffer in part.gbuf_ranges:
            for bucket in (bucket for buckets in of_buffer.values() for bucket in buckets):
                for parameter, ranges in bucket["param_map"].items():
                    yield parameter, ranges["param"].start, ranges["param"].end


def whole_gradients(training: Training) -> list[torch.Tensor]:
    """The reduced gradients of this rank's parameters, put together from the parts of all data-parallel ranks."""
    bounds = {parameter: (start, end) for parameter, start, end in _own_parts(training)}
    whole = []
    for parameter in (parameter for chunk in training.chunks for parameter in chunk.parameters()):
        gradient = torch.zeros(parameter.numel(), dtype=torch.float64, device=parameter.device)
        if parameter in bounds:
            start, end = bounds[parameter]
            own = parameter.main_grad.flatten()
            gradient[start:end] = own if own.numel() == end - start else own[start:end]
        is_expert = not getattr(parameter, "allreduce", True)
        group = (
            parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
            if is_expert
            else parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)
        )
        torch.distributed.all_reduce(gradient, group=group)
        whole.append(gradient)
    return whole


def gradient_bytes(training: Training) -> int:
    """Bytes of all memory that gradients have, and of nothing else, on this rank."""
    storages = {}
    for chunk in training.trainable.model.chunks:
        tensors = [buffer.grad_data for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        tensors += [bucket.grad_data for group in chunk.bucket_groups for bucket in group.buckets]
        tensors += [parameter.main_grad for parameter in chunk.parameters()]
        storages |= {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def train(config: Config) -> dict[str, Any]:
    """The first step's gradients, then `STEPS` steps with their losses and norms, and the weights after them."""
    training = build_training_of(config)
    compute_gradients(training.trainable, training.iterators(first_sample=0))
    seen: dict[str, Any] = {"gradients": whole_gradients(training), "bytes": gradient_bytes(training)}
    seen["sizes"] = [{name: each.numel() for name, each in chunk.named_parameters()} for chunk in training.chunks]
    results = [training.result() for _ in range(STEPS)]
    with training.trainable.model.newest_parameters():
        # A forward pass without gradients may come in between.
        seen["validation"] = training.validate()
    with training.trainable.model.gathered_parameters():
        seen["weights"] = [
            parameter.detach().float().clone() for chunk in training.chunks for parameter in chunk.parameters()
        ]
    seen["losses"] = [mean_loss(result.loss_sum_and_tokens) for result in results]
    seen["norms"] = [float(result.grad_norm) for result in results]
    return seen


def compare(whole: dict[str, Any], sharded: dict[str, Any]) -> dict[str, Any]:
    """What two models of a case saw, in numbers."""
    pairs = list(zip(whole["gradients"], sharded["gradients"], strict=True))
    return {
        "numbers": {name: [each[name] for each in (whole, sharded)] for name in ("losses", "norms", "validation")},
        # Of each parameter: the largest difference over the largest gradient.
        "gaps": [float((one - other).abs().max() / one.abs().max().clamp(min=1e-30)) for one, other in pairs],
        "has_gradients": all(bool(one.any()) for one, _ in pairs),
        "same_gradients": all(map(torch.equal, *zip(*pairs, strict=True))),
        "same_weights": all(map(torch.equal, whole["weights"], sharded["weights"])),
        "bytes": [each["bytes"] for each in (whole, sharded)],
        "sizes": sharded["sizes"],
    }


def run_cases(folder: Path, cases: Iterable[str]) -> None:
    """Trains one case after the other, all with this launch's number of ranks; each writes JSON into `folder`."""
    install_cpu_device()
    with process_groups(compose_quickly(TINY).model, read_launch(), detect_platform()):
        for case in cases:
            lay_out_anew(config_of(case))
            whole = train(config_of(case))
            for strategy in STRATEGIES:
                if config_of(case, strategy).model.num_distributed_optimizer_instances > 1:
                    lay_out_anew(config_of(case, strategy))
                seen = compare(whole, train(config_of(case, strategy)))
                (folder / f"{case}.{strategy}.{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))
