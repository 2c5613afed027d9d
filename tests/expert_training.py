"""Tiny mixtures of experts in several layouts: the same on one rank in this process and on launched ones.

Each rank writes what it saw as JSON, under the name of the case.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.training.dump import named_weights, write_dump
from gpt_pretrain.training.stop import BadStep
from gpt_pretrain.training.watches import ExpertWatch
from tests.emulated_training import RECOMPUTED, TINY, Training, build_training_of, emulate, lay_out_anew
from tests.refusals import compose_quickly

STEPS = 3
# Four experts in each of two layers, of which a token meets two; scores large enough to differ.
EXPERTS = (
    "model.num_moe_experts=4",
    "model.moe_ffn_hidden_size=96",
    "model.moe_z_loss_coeff=1e-3",
    "model.init_method_std=0.2",
    "model.optim.lr=1e-3",
)

# The weight that is made NaN at the end: of the last expert, which with EP the last rank has.
SPOILT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"

# What is trained, by the name in front of the dot.
MODELS: dict[str, Sequence[str]] = {
    "plain": (),
    "seq": ("model.moe_router_load_balancing_type=seq_aux_loss",),
    "masked": ("model.data.eod_mask_loss=true",),
    # All four experts: of scores that BF16 rounds, a token's two best may be others in each layout.
    "bf16": ("trainer.precision=bf16", "model.moe_router_topk=4"),
    # All four experts, here too. Attention, whose weights have other scales where ranks have parts of them, is left
    # out. An expert of EP 2 gets the rows of two microbatches, as it does in one of twice the size.
    "fp8": (
        *emulate("tensorwise", "model.fp8_exclude=['*.self_attention.*']"),
        "model.moe_router_topk=4",
        "model.micro_batch_size=4",
    ),
    "fp8_bf16": (*emulate("tensorwise"), "trainer.precision=bf16"),
    "allgather": ("model.moe_token_dispatcher_type=allgather",),
    "recomputed": RECOMPUTED,
    # So that two stages can have two chunks each.
    "deep": ("model.num_layers=4",),
}
# How, on two ranks, by the name behind it.
LAYOUTS: dict[str, Sequence[str]] = {
    "ep2": ("parallelism=ep2",),
    "ep2_halves": ("parallelism=ep2", "model.micro_batch_size=2"),
    "ep2_overlapped": ("parallelism=ep2", "model.overlap_moe_expert_parallel_comm=true"),
    # Norms of experts and of the rest are added up over other ranks.
    "ep2_plain": ("parallelism=single", "model.expert_model_parallel_size=2"),
    "pp2": ("parallelism=pp2",),
    # The ranks share each expert's matrices, too.
    "tp2_sp": ("parallelism=tp2_sp",),
    "pp2_vp2": ("parallelism=pp2_vp2",),
    # They share each expert's matrices, and nothing else.
    "etp2": ("parallelism=single", "model.expert_tensor_parallel_size=2"),
    # They share the experts out, and the matrices of the rest.
    "tp2_sp_ep2": ("parallelism=tp2_sp", "model.expert_model_parallel_size=2", "model.expert_tensor_parallel_size=1"),
}


def config_of(case: str) -> Config:
    """Of "MODEL" on one rank, or "MODEL.LAYOUT" on two."""
    model, _, layout = case.partition(".")
    return compose_quickly([*TINY, *EXPERTS, *MODELS[model], *(LAYOUTS[layout] if layout else ())])


def train(config: Config, dumps: Path) -> dict[str, Any]:
    """Takes `STEPS` steps, and one that is looked into; process groups are open."""
    training = build_training_of(config)
    watch = ExpertWatch(training.trainable.model, step=0)
    seen: dict[str, Any] = {"losses": [], "grad_norms": []}
    for _ in range(STEPS):
        result = training.result()
        loss_sum, tokens = result.loss_sum_and_tokens.tolist()
        seen["losses"].append(loss_sum / tokens)
        seen["grad_norms"].append(float(result.grad_norm))
    seen["validation"] = training.validate()
    (record,) = watch.records(STEPS)
    seen["experts"] = asdict(record)

    seen["num_parameters"] = training.trainable.model.num_parameters
    seen["own_parameters"] = sum(parameter.numel() for chunk in training.chunks for parameter in chunk.parameters())
    _spoil_an_expert(training)
    bad = BadStep(step=STEPS + 1, first_sample=0, num_samples=config.model.global_batch_size)
    iterators = training.iterators(first_sample=0)
    # Without the place of the file.
    length = config.model.encoder_seq_length
    told = write_dump(dumps, bad, trainable=training.trainable, iterators=iterators, sequence_length=length)
    seen["finding"] = told.partition(". No checkpoint")[0]
    seen["skipped"] = bool(training.result().skipped)
    return seen


def _spoil_an_expert(training: Training) -> None:
    """Makes one weight NaN on the ranks that have it."""
    for chunk in training.chunks:
        for name, parameter in named_weights(chunk):
            if name == SPOILT:
                parameter.data.view(-1)[0] = torch.nan


def run_cases(folder: Path, cases: Iterable[str]) -> None:
    """Trains one after the other, all with this launch's number of ranks; writes FOLDER/CASE.RANK.json."""
    install_cpu_device()
    with process_groups(compose_quickly(TINY).model, read_launch(), detect_platform()):
        for case in cases:
            config = config_of(case)
            lay_out_anew(config)
            seen = train(config, folder / case)
            (folder / f"{case}.{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))
