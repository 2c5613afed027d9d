"""Tiny runs that save in one layout and go on in another: the same on one rank in this process and on launched ones.

A run takes `STEPS` steps, saves, and takes as many more; runs in other layouts load what it saved.
Each rank writes what it saw as JSON, under the name of the case. What a run has loaded it saves again, so that all its
tensors can be compared with those that were saved.
"""

import hashlib
import io
import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from omegaconf import OmegaConf
from torch.distributed.checkpoint import FileSystemReader, load
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from gpt_pretrain.checkpoint.load import load_checkpoint, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress, read_manifest
from gpt_pretrain.checkpoint.state import RANDOM_STATES
from gpt_pretrain.config.derived import model_parallel_size
from gpt_pretrain.config.load import config_to_dict, read_config
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import build_batch_iterator
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import SampleDataset, build_datasets
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import data_parallel_rank, process_groups
from gpt_pretrain.training.step import data_iterators, mean_loss, train_step
from tests.emulated_training import TINY, Training, build_training_of, emulate, lay_out_anew, save_checkpoint
from tests.optimizer_states import LEAN, SMALLEST
from tests.refusals import compose_quickly

# The first after a checkpoint shows its weights, the second what its moments and scales made of them.
STEPS = 2
# What a case ends with, if it does more.
GOES_ON, SPOILT = "+", "!"
# A step is four sequences, in two microbatches on each rank. Four ranks of data parallelism have one; experts, whose
# balance is that of a microbatch, always see one sequence in it.
_RUN = (
    "model.micro_batch_size=1",
    "model.data.num_workers=0",
    f"trainer.max_steps={2 * STEPS}",
    "model.activation=swiglu",
)
# So that two stages can have two chunks each.
_DEEP = ("model.num_layers=4",)
_BF16 = ("trainer.precision=bf16",)
_SHARDED = "model.data_parallel_sharding_strategy=optim_grads"
_FULLY = "model.data_parallel_sharding_strategy=optim_grads_params"
_EXPERTS = ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=64", "model.init_method_std=0.2")
# In BF16 rounding alone would send tokens to another expert: each token meets all of them.
_BF16_EXPERTS = (*_EXPERTS, *_BF16, "model.moe_router_topk=4")
_DELAYED = emulate("delayed", "model.fp8_amax_history_len=4")
_UNSHARDED = ("model.use_distributed_optimizer=false", "model.overlap_param_gather=false")
_TP2_SP_EP2 = (
    "parallelism=tp2_sp",
    "model.expert_model_parallel_size=2",
    "model.expert_tensor_parallel_size=1",
    "model.use_distributed_optimizer=true",
)
# Products in fp32, so that layouts differ by its rounding alone, and queries that share keys and values.
_MUON = ("optimizer=muon", "model.optim.muon_fp32_matmul_prec=highest", "model.num_query_groups=2")
_AVERAGED = ("model.optim.ema_decay=0.5",)
# Weights in FP8.
_STORED = (*emulate("torchao_tensorwise"), "model.fp8_params=true", *_BF16)

# Name to number of ranks and overrides. `single` has a plain optimizer, the others of parallelism/ a distributed one.
LAYOUTS: dict[str, tuple[int, Sequence[str]]] = {
    "single": (1, ["parallelism=single"]),
    "dp2": (2, ["parallelism=dp"]),
    "tp2": (2, ["parallelism=tp2"]),
    "pp2": (2, ["parallelism=pp2"]),
    "tp2_sp": (2, ["parallelism=tp2_sp"]),
    "tp2_pp2": (4, ["parallelism=tp2_pp2"]),
}
# What the six are not: other precisions, chunks, optimizers.
OTHERS: dict[str, tuple[int, Sequence[str]]] = {
    "single.deep": (1, _DEEP),
    "pp2_vp2.deep": (2, ["parallelism=pp2_vp2", *_DEEP]),
    "tp2.deep": (2, ["parallelism=tp2", *_DEEP]),
    "single.tied": (1, ["model.share_embeddings_and_output_weights=true"]),
    "pp2.tied": (2, ["parallelism=pp2", "model.share_embeddings_and_output_weights=true"]),
    "single.bf16": (1, _BF16),
    "dp2.bf16": (2, ["parallelism=dp", *_BF16]),
    "dp2_plain.bf16": (2, ["parallelism=single", *_BF16]),
    # States in fewer bytes: all of fp32, and what fits.
    "dp2_remainders.bf16": (2, ["parallelism=dp", *LEAN]),
    "tp2_remainders.bf16": (2, ["parallelism=tp2", *LEAN]),
    "dp2_small.bf16": (2, ["parallelism=dp", *LEAN, *SMALLEST]),
    "dp2_small_late.bf16": (
        2,
        ["parallelism=dp", "model.overlap_param_gather=false", "model.overlap_grad_reduce=false", *LEAN, *SMALLEST],
    ),
    "pp2_small.bf16": (2, ["parallelism=pp2", *LEAN, *SMALLEST]),
    "pp2_remainders.tied_bf16": (2, ["parallelism=pp2", "model.share_embeddings_and_output_weights=true", *LEAN]),
    # Gradients are sharded as well.
    "zero2": (2, ["parallelism=zero2"]),
    "zero2_pp2": (4, ["parallelism=pp2", _SHARDED]),
    "zero2_small.bf16": (2, ["parallelism=zero2", *LEAN, *SMALLEST]),
    "zero2.stored_bf16": (2, ["parallelism=zero2", *_STORED]),
    "zero2_ep2.moe": (2, ["parallelism=ep2", _SHARDED, *_EXPERTS]),
    # Weights are, too.
    "fsdp": (2, ["parallelism=fsdp"]),
    "fsdp_pp2": (4, ["parallelism=pp2", _FULLY]),
    "fsdp_small.bf16": (2, ["parallelism=fsdp", *LEAN, *SMALLEST]),
    "fsdp.stored_bf16": (2, ["parallelism=fsdp", *_STORED]),
    # In each of two groups of ranks.
    "hsdp": (4, ["parallelism=hsdp2"]),
    "hsdp.stored_bf16": (4, ["parallelism=hsdp2", *_STORED]),
    "fsdp_ep2.moe": (2, ["parallelism=ep2", _FULLY, *_EXPERTS]),
    "single.moe": (1, _EXPERTS),
    "ep2.moe": (2, ["parallelism=ep2", *_EXPERTS]),
    # Two ranks of a distributed optimizer share each expert, and two others the attention.
    "tp2_sp_ep2.moe": (4, [*_TP2_SP_EP2, *_EXPERTS]),
    "single.moe_bf16": (1, _BF16_EXPERTS),
    "ep2_plain.moe_bf16": (2, ["model.expert_model_parallel_size=2", *_BF16_EXPERTS]),
    "ep2_small.moe_bf16": (2, ["parallelism=ep2", *_BF16_EXPERTS, *LEAN, *SMALLEST]),
    "single.delayed": (1, _DELAYED),
    "tp2.delayed": (2, ["parallelism=tp2", *_DELAYED]),
    "single.rowwise": (1, emulate("torchao_rowwise")),
    "tp2_sp.rowwise": (2, ["parallelism=tp2_sp", *emulate("torchao_rowwise")]),
    "single.stored_bf16": (1, _STORED),
    "dp2.stored_bf16": (2, ["parallelism=dp", *_STORED]),
    "tp2.stored_bf16": (2, ["parallelism=tp2", *_STORED]),
    "single.sgd": (1, ["model.optim.name=sgd"]),
    "tp2_plain.sgd": (2, ["parallelism=tp2", "model.optim.name=sgd", *_UNSHARDED]),
    "single_lion": (1, ["optimizer=lion"]),
    "dp2_lion": (2, ["parallelism=dp", "optimizer=lion"]),
    "tp2_lion": (2, ["parallelism=tp2", "optimizer=lion"]),
    "single_ema.bf16": (1, [*_BF16, *_AVERAGED]),
    "tp2_ema.bf16": (2, ["parallelism=tp2", *_BF16, *_AVERAGED]),
    "zero2_ema.bf16": (2, ["parallelism=zero2", *_BF16, *_AVERAGED]),
    "fsdp_ema.bf16": (2, ["parallelism=fsdp", *_BF16, *_AVERAGED]),
    "single_muon": (1, _MUON),
    "dp2_muon": (2, ["parallelism=dp", *_MUON]),
    "dp2_plain_muon": (2, ["parallelism=single", *_MUON]),
    "zero2_muon": (2, ["parallelism=zero2", *_MUON]),
    "tp2_muon": (2, ["parallelism=tp2", *_MUON]),
    "tp2_sp_distributed_muon": (2, ["parallelism=tp2_sp", "model.optim.muon_tp_mode=distributed", *_MUON]),
    "tp2_blockwise_muon_in_blocks": (2, ["parallelism=tp2", *_MUON, "model.optim.muon_tp_mode=blockwise"]),
    "tp2_plain_muon": (2, ["parallelism=tp2", *_UNSHARDED, *_MUON]),
    # More ranks than matrices of a form.
    "dp4_muon": (4, ["parallelism=dp", *_MUON]),
    "tp2_pp2_muon": (4, ["parallelism=tp2_pp2", *_MUON]),
    "tp2_dp2_muon": (4, ["parallelism=tp2", *_MUON]),
    "dp2_muon.bf16": (2, ["parallelism=dp", *_BF16, *_MUON]),
    "single_muon.bf16": (1, [*_BF16, *_MUON]),
    "tp2_muon.bf16": (2, ["parallelism=tp2", *_BF16, *_MUON]),
    "dp2_muon.stored_bf16": (2, ["parallelism=dp", *_STORED, *_MUON]),
    "single_muon.moe": (1, [*_EXPERTS, *_MUON]),
    "ep2_muon.moe": (2, ["parallelism=ep2", *_EXPERTS, *_MUON]),
    "tp2_sp_ep2_muon.moe": (4, [*_TP2_SP_EP2, *_EXPERTS, *_MUON]),
    "tp2_muon.moe": (2, ["parallelism=tp2_sp", *_EXPERTS, *_MUON]),
}


def write_configs(folder: Path) -> None:
    """Composes the configurations once for all ranks, which takes each of them longer than to load a checkpoint."""
    for layout, (num_ranks, overrides) in {**LAYOUTS, **OTHERS}.items():
        model = (config := compose_quickly([*TINY, *_RUN, *overrides])).model
        if num_ranks == model_parallel_size(model) and model.num_moe_experts is None:
            config = replace(config, model=replace(model, micro_batch_size=2))
        (folder / f"{layout}.config").write_bytes(pickle.dumps(config_to_dict(config)))


@cache
def config_of(layout: str, folder: Path) -> Config:
    values = pickle.loads((folder / f"{layout}.config").read_bytes())
    config, problems = read_config(OmegaConf.create(values))
    assert config is not None, problems
    return config


@dataclass
class _RecordedDataset:
    """Notes which samples are read."""

    dataset: SampleDataset
    read: list[int]
    num_epochs: float = 0.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return self.dataset[index]


def run_steps(training: Training, progress: TrainingProgress) -> dict[str, Any]:
    """Trains `STEPS` steps on the data that the application would read from there on.

    Returns:
        "losses" and "grad_norms" by step, and "samples": what this rank has read, in order; none where no tokens are.
    """
    config, trainable = training.config, training.trainable
    corpus = prepare_corpus(config, show_progress=False)
    dataset, _ = build_datasets(config, corpus, num_train_samples=100)
    recorded = _RecordedDataset(dataset, [])
    ranks = parallel_state.get_data_parallel_world_size()
    iterators = data_iterators(
        trainable.model,
        lambda: build_batch_iterator(
            recorded,
            config=config,
            consumed_samples=progress.consumed_samples,
            data_parallel_rank=data_parallel_rank(),
            data_parallel_size=ranks,
            device=detect_platform().device,
        ),
    )
    seen: dict[str, Any] = {"losses": [], "grad_norms": []}
    for _ in range(STEPS):
        result = train_step(trainable, iterators)
        seen["losses"].append(mean_loss(result.loss_sum_and_tokens))
        seen["grad_norms"].append(float(result.grad_norm))
    # Of one chunk of this rank: others read the same.
    readers = sum(iterator is not None for iterator in iterators)
    samples = recorded.read if readers < 2 else sorted(set(recorded.read), key=recorded.read.index)
    return {**seen, "samples": samples, "data_parallel": [data_parallel_rank(), ranks]}


def save_in(config: Config, folder: Path, layout: str, how: str) -> None:
    """Trains from fresh weights, and saves FOLDER/LAYOUT/step_…; with `GOES_ON`, the next steps are LAYOUT.uncut."""
    training = build_training_of(config)
    run_steps(training, TrainingProgress(step=0, consumed_samples=0))
    progress = TrainingProgress(step=STEPS, consumed_samples=STEPS * config.model.global_batch_size)
    _save(training, folder / layout, progress)
    if how == GOES_ON:
        _write(folder, f"{layout}.uncut", run_steps(training, progress))


def load_in(config: Config, source: str, folder: Path, name: str, how: str) -> None:
    """Loads what was saved in another layout, and saves it again as FOLDER/NAME.again/step_….

    Args:
        config: Of the layout that loads.
        source: The layout that saved.
        folder: Where checkpoints are.
        name: Notes are written under it.
        how: With `GOES_ON`, the steps after it are taken and noted. With `SPOILT`, one bit of one moment is turned over
            on each rank in between.
    """
    training = build_training_of(config)
    checkpoint = verify_checkpoint(folder / source / f"step_{STEPS:08d}")
    restored = load_checkpoint(checkpoint, training.trainable, config, _fingerprints(config))
    seen = {"notes": list(restored.notes), "weights": _digest(training)}
    if how == SPOILT:
        _spoil_a_moment(training)
    _save(training, folder / f"{name}.again", restored.progress)
    if how == GOES_ON:
        seen |= run_steps(training, restored.progress)
    _write(folder, name, seen)


def _spoil_a_moment(training: Training) -> None:
    (part,) = training.trainable.optimizer.chained_optimizers
    first = next(state["exp_avg"] for state in part.optimizer.state.values())
    first.view(torch.int32).flatten()[0] ^= 1


def _digest(training: Training) -> str:
    """Of the bits of this rank's weights."""
    digest = hashlib.sha256()
    with training.trainable.model.gathered_parameters():
        for chunk in training.chunks:
            for weight in chunk.parameters():
                digest.update(_bits(weight).numpy().tobytes())
    return digest.hexdigest()


def _save(training: Training, directory: Path, progress: TrainingProgress) -> None:
    config, trainable = training.config, training.trainable
    with trainable.model.newest_parameters():
        save_checkpoint(directory, trainable, progress, config, _fingerprints(config))


def _fingerprints(config: Config) -> Mapping[str, str]:
    return prepare_corpus(config, show_progress=False).fingerprints


def _write(folder: Path, case: str, seen: dict[str, Any]) -> None:
    rank = torch.distributed.get_rank()
    (folder / f"{case}.{rank}.json").write_text(json.dumps(seen))


def run_cases(folder: Path, cases: Iterable[str]) -> None:
    """Runs cases one after the other, all with this launch's number of ranks.

    Args:
        folder: Where configurations are (`write_configs`), and where checkpoints and results go.
        cases: `LAYOUT` saves, `SOURCE>LAYOUT` loads, with `GOES_ON` or `SPOILT` at its end as `save_in` and `load_in`
            say.
    """
    install_cpu_device()
    with process_groups(config_of("single", folder).model, read_launch(), detect_platform()):
        for case in cases:
            how = case[-1] if case.endswith((GOES_ON, SPOILT)) else ""
            *source, layout = case.removesuffix(how).split(">")
            config = config_of(layout, folder)
            lay_out_anew(config)
            if source:
                load_in(config, source[0], folder, f"{source[0]}.{layout}{how.removesuffix(GOES_ON)}", how)
            else:
                save_in(config, folder, layout, how)


def saved_state(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint holds but random states: tensors, put together from their pieces, and objects.

    Args:
        checkpoint: Its directory, step_….
    """
    reader = FileSystemReader(checkpoint)
    metadata = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        if isinstance(entry, TensorStorageMetadata)
        else io.BytesIO()
        for key, entry in metadata.items()
        if not key.startswith(RANDOM_STATES)
    }
    load(state, storage_reader=reader, no_dist=True)
    # megatron-core puts each object into a list.
    values = {key: value[0] if isinstance(value, list) else value for key, value in state.items()}
    # Step counts and the schedule; the name ends with the number of ranks.
    (common,) = [values.pop(key) for key in metadata if key.startswith("common_state/")]
    manifest = read_manifest(checkpoint)
    return {
        "common": common,
        "progress": (manifest.step, manifest.consumed_samples),
        **{
            key: _decoded(value) if "_extra_state" in key and isinstance(value, torch.Tensor) else value
            for key, value in values.items()
        },
    }


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    """What does not have the same bits in two states of `saved_state`, or is in one of them alone."""
    both = one.keys() & other.keys()
    return (one.keys() ^ other.keys()) | {key for key in both if not _is_same(one[key], other[key])}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return not differing(one, other)
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same_kind = (one.dtype, one.shape) == (other.dtype, other.shape)
        return same_kind and _bits(one).equal(_bits(other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def _decoded(pickled: torch.Tensor) -> dict[str, torch.Tensor]:
    """Transformer Engine's FP8 state of a layer: tensors, and whatever else it keeps as the text of its repr.

    Its bytes as they are hold addresses: a pickled tensor's storage is named by the place where it was.
    """
    state = pickle.loads(pickled.numpy().tobytes()) if pickled.numel() else {}
    return {
        name: value if isinstance(value, torch.Tensor) else torch.tensor(list(repr(value).encode()))
        for name, value in state.items()
    }
