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
from gpt_pretrain.megatron.parallel import context_parallel_slices, process_groups, sum_over
from gpt_pretrain.training.inference import forward_pass
from gpt_pretrain.training.step import train_step
from tests.emulated_training import RECOMPUTED, TINY, Training, build_training_of, emulate, lay_out_anew
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
# Of two samples of 32 or 128: some of one token, at the start, in between and at the end, and a sample of a single
# document. No number of ranks divides them.
LENGTHS = {32: ((1, 9, 1, 14, 6, 1), (32,)), 128: ((1, 37, 1, 58, 30, 1), (128,))}
# The document that is changed, in the first sample.
CHANGED = 3

_ON_GPU = (
    "trainer.precision=bf16",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.encoder_seq_length=128",
    "model.max_position_embeddings=128",
    # Larger weights saturate the softmax.
    "model.init_method_std=0.1",
)

MODELS: dict[str, Sequence[str]] = {
    "rope": (),
    "heads": ("model.num_query_groups=4",),
    "learned": ("model.position_embedding_type=learned_absolute",),
    "yarn": ("model.rope_scaling_factor=4", "model.yarn_original_max_position_embeddings=16"),
    "deep": ("model.num_layers=4",),
    "recomputed": RECOMPUTED,
    "selective": ("model.activations_checkpoint_granularity=selective",),
    "bf16": ("trainer.precision=bf16",),
    "experts": ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=96"),
    **{
        recipe: emulate(recipe, "trainer.precision=bf16")
        for recipe in ("delayed", "tensorwise", "blockwise", "mxfp8", "torchao_rowwise")
    },
}


# On GPUs, with Transformer Engine's layers where nothing else is said.
GPU_MODELS: dict[str, Sequence[str]] = {
    "te_bf16": (),
    "te_learned": ("model.position_embedding_type=learned_absolute",),
    "te_yarn": ("model.rope_scaling_factor=4", "model.yarn_original_max_position_embeddings=16"),
    "te_delayed": ("fp8=delayed",),
    "te_stored": ("fp8=delayed", "model.fp8_params=true"),
    "te_blockwise": ("fp8=blockwise",),
    "te_tensorwise": ("fp8=tensorwise",),
    "te_experts": ("model.num_moe_experts=4", "model.moe_ffn_hidden_size=512"),
    "te_recomputed": MODELS["recomputed"],
    "te_flash": ("model.use_flash_attention=true",),
    "te_flash_delayed": ("model.use_flash_attention=true", "fp8=delayed"),
    "local": ("model.transformer_engine=false",),
    "torchao": ("fp8=torchao_rowwise",),
}


def config_of(case: str) -> Config:
    """Of "MODEL", or "MODEL.LAYOUT"."""
    model, _, layout = case.partition(".")
    overrides = MODELS[model] if model in MODELS else (*_ON_GPU, *GPU_MODELS[model])
    return compose_quickly([*DOCUMENTS, *overrides, *([f"parallelism={layout}"] if layout else ())])


def tokens_and_positions(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """Random tokens [b, s], and positions that restart in each document."""
    generator, samples = torch.Generator().manual_seed(11), LENGTHS[config.model.encoder_seq_length]
    tokens = torch.randint(config.model.vocab_size, (2, sum(samples[0])), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in sample]) for sample in samples])
    device = detect_platform().device
    return tokens.to(device), positions.to(device)


def borders(config: Config) -> list[tuple[int, int]]:
    """First token of each document of the samples end to end, and the one after its last."""
    lengths = [length for sample in LENGTHS[config.model.encoder_seq_length] for length in sample]
    return list(pairwise(accumulate(lengths, initial=0)))


def changed(tokens: torch.Tensor, config: Config) -> torch.Tensor:
    """The same tokens, but for those of one document."""
    begin, end = borders(config)[CHANGED]
    others = tokens.clone()
    others.view(-1)[begin:end] = (others.view(-1)[begin:end] + 17) % 128
    return others


def compute_logits(training: Training, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
    """Logits [b · s, vocab] of samples as training sees them, on the ranks of the last stage; every rank calls it."""
    inside = document_borders(positions)
    packed = {"tokens": tokens.view(1, -1), "positions": positions.view(1, -1)}
    order = torch.arange(tokens.numel(), device=tokens.device).view(1, -1)
    here = context_parallel_slices({**packed, "order": order})
    found = forward_pass(
        training.trainable.model.chunks,
        training.config.model,
        packed["tokens"].shape,
        lambda chunk: chunk(here["tokens"], here["positions"], inside),
    )
    if found is None:
        return None
    logits = gather_from_tensor_model_parallel_region(found)[0].float()
    whole = logits.new_zeros(tokens.numel(), logits.size(1)).index_copy(0, here["order"][0], logits)
    sum_over(parallel_state.get_context_parallel_group(), whole)
    return whole.cpu()


def batches_of(config: Config, tokens: torch.Tensor, positions: torch.Tensor) -> Iterator[Batch]:
    """A step's microbatches of this rank, all the same."""
    ranks = parallel_state.get_data_parallel_world_size()
    for _ in range(config.model.global_batch_size // config.model.micro_batch_size // ranks):
        yield Batch(
            tokens=tokens,
            labels=tokens.roll(-1, dims=1),
            loss_mask=torch.ones(tokens.shape, device=tokens.device),
            position_ids=positions,
            document_borders=document_borders(positions) if config.model.data.inter_document_masking else None,
        )


def _scales(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What FP8 layers keep besides weights."""
    state = {name: each for name, each in chunk.state_dict().items() if name.endswith("_extra_state")}
    return {name: each.clone() for name, each in state.items() if isinstance(each, torch.Tensor)}


@torch.no_grad()
def look(training: Training) -> dict[str, Any]:
    """Logits of the documents, and of them with one changed; process groups are open."""
    tokens, positions = tokens_and_positions(training.config)
    training.trainable.model.eval()
    # The first pass of delayed scaling has other scales than the later ones, and each pass moves its state on.
    compute_logits(training, tokens, positions)
    states = [_scales(chunk) for chunk in training.chunks]
    seen = {"logits": compute_logits(training, tokens, positions)}
    for chunk, state in zip(training.chunks, states, strict=True):
        chunk.load_state_dict(state, strict=False)
    seen["changed"] = compute_logits(training, changed(tokens, training.config), positions)
    training.trainable.model.train()
    return seen


def differences(seen: dict[str, Any], config: Config) -> list[float]:
    """The largest difference between the logits of each document before and after one was changed."""
    return [(seen["logits"][a:b] - seen["changed"][a:b]).abs().max().item() for a, b in borders(config)]


def assert_only_the_changed_one_differs(seen: dict[str, Any], config: Config) -> None:
    """Not in one bit."""
    found = differences(seen, config)
    assert found[CHANGED] > 0.1
    assert [index for index, difference in enumerate(found) if difference] == [CHANGED]


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
