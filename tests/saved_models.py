"""Checkpoints of small random models, saved by the application's own code in this process."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.checkpoint.save import CheckpointSaver
from gpt_pretrain.checkpoint.saved_model import CheckpointTensors
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.tokenizer import TOKENIZER_FILE, Tokenizer, train_bpe
from gpt_pretrain.features.resolve import build_run_spec, detect_platform
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.trainable import Trainable
from tests.refusals import compose_quickly

# Presets made small; otherwise they are what conf/model says.
SMALL = (
    "data=mock",
    "model.num_layers=3",
    "model.hidden_size=64",
    "model.num_attention_heads=4",
    "model.vocab_size=300",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=1",
    "trainer.precision=fp32",
    "checkpoint.async_save=false",
)
GROUPED = ("model.ffn_hidden_size=96", "model.num_query_groups=2")
FAMILIES = {
    "gpt2": ("model=gpt2_124m",),
    "gpt2, exact gelu, untied": (
        "model=gpt2_124m",
        "model.activation=gelu",
        "model.share_embeddings_and_output_weights=false",
        "model.ffn_hidden_size=80",
    ),
    "gpt2, squared relu": ("model=gpt2_124m", "model.activation=squared_relu"),
    "llama": ("model=llama3_8b", *GROUPED),
    "llama, tied, biases everywhere, wide heads": (
        "model=llama3_8b",
        *GROUPED,
        "model.share_embeddings_and_output_weights=true",
        "model.bias=true",
        "model.kv_channels=24",
    ),
    "mistral": ("model=mistral_7b", *GROUPED),
    "qwen2": ("model=qwen2_5_7b", *GROUPED),
    "qwen2, yarn": (
        "model=qwen2_5_7b",
        *GROUPED,
        "model.rope_scaling_factor=4",
        "model.yarn_original_max_position_embeddings=16",
    ),
    "mistral, window": ("model=mistral_7b", *GROUPED, "model.window_size=[7,0]"),
    "qwen2, window in some layers": (
        "model=qwen2_5_7b",
        *GROUPED,
        "model.window_size=[7,0]",
        "model.window_attn_skip_freq=[0,1,0]",
    ),
    "smollm3, window in some layers": (
        "model=llama3_8b",
        *GROUPED,
        "model.bias=true",
        "model.window_size=[7,0]",
        "model.window_attn_skip_freq=[1,0,1]",
    ),
    "smollm3": ("model=smollm3_3b", *GROUPED, "model.num_layers=4", "model.no_rope_freq=2"),
    "smollm3, biases everywhere, wide heads": (
        "model=smollm3_3b",
        *GROUPED,
        "model.num_layers=4",
        "model.bias=true",
        "model.kv_channels=24",
    ),
    "starcoder2": ("model=gpt2_124m", "model.position_embedding_type=rope", *GROUPED),
    "starcoder2, exact gelu, no biases, untied": (
        "model=gpt2_124m",
        "model.position_embedding_type=rope",
        *GROUPED,
        "model.activation=gelu",
        "model.bias=false",
        "model.share_embeddings_and_output_weights=false",
    ),
    "gpt_neox": (
        "model=gpt2_124m",
        "model.position_embedding_type=rope",
        "model.rotary_percentage=0.5",
        "model.activation=gelu",
        "model.share_embeddings_and_output_weights=false",
    ),
    "mixtral": ("model=mixtral_8x7b", *GROUPED, "model.num_moe_experts=4"),
    "qwen3_moe": (
        "model=qwen3_30b_a3b",
        *GROUPED,
        "model.num_moe_experts=6",
        "model.moe_router_topk=3",
        "model.moe_ffn_hidden_size=48",
        "model.kv_channels=24",
    ),
}
# A config.json as it is published, in small.
PUBLISHED_LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 64,
    "vocab_size": 320,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "head_dim": 16,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
ARCHITECTURES = {name: name.partition(",")[0] for name in FAMILIES}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A model in this process, and its checkpoint."""

    path: Path
    config: Config
    model: torch.nn.Module

    @torch.no_grad()
    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[b, s, vocab] of the model itself, computed by megatron-core."""
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        logits: torch.Tensor = self.model.eval()(tokens, positions, None)
        return logits[..., : self.config.model.vocab_size]


def small_config(*overrides: str) -> Config:
    # A preset comes first, so that what makes it small wins.
    presets = [override for override in overrides if override.startswith("model=")]
    return compose_quickly([*presets, *SMALL, *(override for override in overrides if override not in presets)])


@torch.no_grad()
def randomize(model: torch.nn.Module) -> None:
    """Every parameter random, norms and biases too: a wrong one would not show; wide enough to show in the logits."""
    generator = torch.Generator().manual_seed(11)
    for parameter in model.parameters():
        # Drawn on the CPU, so that the same come on every device.
        noise = (torch.randn(parameter.shape, generator=generator) * 0.2).to(parameter.device, parameter.dtype)
        if parameter.dim() == 1:
            parameter.add_(noise)
        else:
            parameter.copy_(noise)


def _data(directory: Path, tokenizer: Tokenizer | None) -> dict[str, str]:
    """Fingerprints of a run's data; its tokenizer is put where a run puts it."""
    if tokenizer is None:
        return {}
    tokenizer.save(directory / TOKENIZER_FILE)
    return {"tokenizer": tokenizer.fingerprint}


@contextmanager
def saved_model(directory: Path, *overrides: str, tokenizer: Tokenizer | None = None) -> Iterator[Saved]:
    """Builds and saves a model; `directory` becomes its run's directory."""
    install_cpu_device()
    config, platform = small_config(*overrides), detect_platform()
    with process_groups(config.model, read_launch({}), platform):
        trainable = build_trainable(config)
        randomize(trainable.model.gpt_chunks[0])
        path = save(directory, config, trainable, _data(directory, tokenizer))
        yield Saved(path=path, config=config, model=trainable.model.gpt_chunks[0])


def save_model(directory: Path, *overrides: str, tokenizer: Tokenizer | None = None) -> None:
    """Builds and saves a model with the weights that its seed gives; every rank calls it."""
    install_cpu_device()
    config = small_config(*overrides)
    with process_groups(config.model, read_launch(), detect_platform()):
        save(directory, config, build_trainable(config), _data(directory, tokenizer))


def build_trainable(config: Config) -> Trainable:
    """What a run saves, in open process groups."""
    spec = build_run_spec(config, read_launch(), detect_platform())
    model = build_model(spec, fp8_layers(spec))
    optimizer = build_optimizer(model)
    return Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))


def save(directory: Path, config: Config, trainable: Trainable, data: Mapping[str, str]) -> Path:
    """Saves as a run does, on every rank."""
    progress = TrainingProgress(step=1, consumed_samples=8)
    with CheckpointSaver(directory / "checkpoints", trainable, config, data) as saver:
        (outcome,) = saver.save(progress)
    assert outcome.problem is None
    return outcome.path


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint."""
    tensors = CheckpointTensors(path)
    return {key: tensors.read(key) for key in tensors}


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE with a few merges."""
    return train_bpe(["def function(value):\n    return value + value\n" * 20], 290)


def some_tokens(config: Config) -> torch.Tensor:
    """[2, s]"""
    length = config.model.encoder_seq_length
    return torch.randint(config.model.vocab_size, (2, length), generator=torch.Generator().manual_seed(3))
