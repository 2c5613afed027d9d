"""Tiny GPTs on documents that do not see each other: the same on one rank in this process and on launched ones.

Each rank that has logits writes what it saw, under the name of the case.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.data.documents import document_borders
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.training.inference import forward_pass
from gpt_pretrain.training.step import train_step
from tests.emulated_training import TINY, Training, build_training_of, emulate, lay_out_anew
from tests.refusals import compose_quickly

MASKED = "model.data.inter_document_masking=true"
DOCUMENTS = (
    *TINY,
    # Random tokens have no documents; these are made here.
    "data=stdlib",
    "model.tokenizer.vocab_size=128",
    "model.init_method_std=0.2",
    MASKED,
)
# Of two samples of 32: some of one token, at the start, in between and at the end, and a sample of a single document.
LENGTHS = ((1, 9, 1, 14, 6, 1), (32,))
# The document that is changed, in the first sample.
CHANGED = 3

MODELS: dict[str, Sequence[str]] = {
    "rope": (),
    "heads": ("model.num_query_groups=4",),
    "learned": ("model.position_embedding_type=learned_absolute",),
    "deep": ("model.num_layers=4",),
    "recomputed": (
        "model.activations_checkpoint_granularity=full",
        "model.activations_checkpoint_method=uniform",
        "model.activations_checkpoint_num_layers=1",
    ),
    "selective": ("model.activations_checkpoint_granularity=selective",),
    "bf16": ("trainer.precision=bf16",),
    "experts": ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=96"),
    **{
        recipe: emulate(recipe, "trainer.precision=bf16")
        for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8", "torchao_rowwise")
    },
}


def config_of(case: str) -> Config:
    """Of "MODEL", or "MODEL.LAYOUT"."""
    model, _, layout = case.partition(".")
    return compose_quickly([*DOCUMENTS, *MODELS[model], *([f"parallelism={layout}"] if layout else ())])


def tokens_and_positions(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [b, s], and positions that restart in each document."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(config.model.vocab_size, (len(LENGTHS), 32), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in sample]) for sample in LENGTHS])
    return tokens, positions


def borders() -> list[tuple[int, int]]:
    """First token of each document of the samples end to end, and the one after its last."""
    lengths = [length for sample in LENGTHS for length in sample]
    return list(pairwise(accumulate(lengths, initial=0)))


def changed(tokens: torch.Tensor) -> torch.Tensor:
    """The same tokens, but for those of one document."""
    begin, end = borders()[CHANGED]
    others = tokens.clone()
    others.view(-1)[begin:end] = (others.view(-1)[begin:end] + 17) % 128
    return others


def compute_logits(training: Training, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """Logits [b · s, vocab] of samples as training sees them, on the ranks of the last stage; every rank calls it."""
    device = detect_platform().device
    packed, places = (each.view(1, -1).to(device) for each in (tokens, positions))
    inside = document_borders(positions).to(device)
    found = forward_pass(
        training.trainable.model.chunks,
        training.config.model,
        packed.shape,
        lambda chunk: chunk(packed, places, inside),
    )
    return None if found is None else gather_from_tensor_model_parallel_region(found)[0].float().cpu()


def batches_of(config: Config, tokens: torch.Tensor, positions: torch.Tensor) -> Iterator[Batch]:
    """A step's microbatches of this rank, all the same."""
    ranks = parallel_state.get_data_parallel_world_size()
    for _ in range(config.model.global_batch_size // config.model.micro_batch_size // ranks):
        yield Batch(
            tokens=tokens,
            labels=tokens.roll(-1, dims=1),
            loss_mask=torch.ones(tokens.shape),
            position_ids=positions,
            document_borders=document_borders(positions),
        )


@torch.no_grad()
def look(training: Training) -> dict[str, Any]:
    """Logits of the documents, and of them with one changed; process groups are open."""
    tokens, positions = tokens_and_positions(training.config)
    training.trainable.model.eval()
    # The first pass of delayed scaling has other scales than the later ones.
    compute_logits(training, tokens, positions)
    states = [chunk.state_dict() for chunk in training.chunks]
    kept = [{name: each.clone() for name, each in state.items() if isinstance(each, torch.Tensor)} for state in states]
    seen = {"logits": compute_logits(training, tokens, positions)}
    for chunk, state in zip(training.chunks, kept, strict=True):
        chunk.load_state_dict(state, strict=False)
    seen["changed"] = compute_logits(training, changed(tokens), positions)
    training.trainable.model.train()
    return seen


def train_and_look(config: Config) -> dict[str, Any]:
    """What `look` sees, and losses, gradient norm and squared lengths of two steps before it."""
    training = build_training_of(config)
    tokens, positions = tokens_and_positions(config)
    seen: dict[str, Any] = {"losses": [], "norms": []}
    for _ in range(2):
        batches = [batches_of(config, tokens, positions) for _ in training.chunks]
        result = train_step(training.trainable, batches)
        loss_sum, num_tokens = result.loss_sum_and_tokens.tolist()
        seen["losses"].append(loss_sum / num_tokens)
        seen["norms"].append(float(result.grad_norm))
        assert result.squared_lengths is not None
        seen["squared_lengths"] = result.squared_lengths.item()
    with training.trainable.model.gathered_parameters():
        return {**seen, **look(training)}


@contextmanager
def one_process(config: Config) -> Iterator[None]:
    """Open process groups of this process alone."""
    install_cpu_device()
    with process_groups(config.model, read_launch({}), detect_platform()):
        yield


def run_cases(folder: Path, cases: Iterable[str]) -> None:
    """Trains one after the other, all with this launch's number of ranks; writes FOLDER/CASE.RANK.pt."""
    install_cpu_device()
    with process_groups(compose_quickly(DOCUMENTS).model, read_launch(), detect_platform()):
        for case in cases:
            config = config_of(case)
            lay_out_anew(config)
            torch.save(train_and_look(config), folder / f"{case}.{torch.distributed.get_rank()}.pt")
