"""Our model beside the one of `transformers`: same architecture, same weights, same tokens.

A case takes a preset, makes it small, and leaves everything else as `conf/model` has it: norm, activation, rope,
biases, tied embeddings, padding of the vocabulary. The `transformers` model is built from the values that are
published for the architecture, written down here a second time. Nothing is downloaded: its weights are drawn at
random, wide enough that each of these settings shows in the logits.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module

from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.huggingface.architectures import Architecture
from gpt_pretrain.huggingface.tensors import Rule, tensor_rules
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_gpt_chunks, build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.training.step import StepResult, mean_loss, train_step
from tests.platforms import spec_of
from tests.refusals import compose_quickly

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A preset, made small, and the `transformers` configuration of the same architecture."""

    preset: str
    architecture: str
    published: dict[str, Any]
    """What the preset must have got right, in the words of the published config.json."""
    layers: int = 2
    width: int = 64
    heads: int = 4
    groups: int = 4
    head_width: int = 16
    inner_width: int = 96
    """Of Llama's MLP; GPT-2's is 4 × width."""
    length: int = 32
    batch: int = 2
    vocab_size: int = 256
    weight_scale: float = 1.5
    """Standard deviation of the layers' matrices in units of 1/√width: how strongly a setting shows in the logits."""
    overrides: list[str] = field(default_factory=list)

    def override_list(self) -> list[str]:
        llama = [f"model.num_query_groups={self.groups}", f"model.ffn_hidden_size={self.inner_width}"]
        return [
            f"model={self.preset}",
            "data=mock",
            f"model.num_layers={self.layers}",
            f"model.hidden_size={self.width}",
            f"model.num_attention_heads={self.heads}",
            f"model.vocab_size={self.vocab_size}",
            f"model.encoder_seq_length={self.length}",
            f"model.max_position_embeddings={self.length}",
            f"model.micro_batch_size={self.batch}",
            # Layers without Transformer Engine in fp32, also where there is a GPU.
            "model.transformer_engine=false",
            "trainer.precision=fp32",
            *([] if self.is_gpt2 else llama),
            *self.overrides,
        ]

    @property
    def is_gpt2(self) -> bool:
        return self.architecture == "GPT2"


def gpt2(preset: str, **kwargs: Any) -> Case:
    published = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    return Case(preset=preset, architecture="GPT2", published=published, **kwargs)


# Of Llama 3.1.
RESCALED_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def llama(
    preset: str,
    architecture: str,
    *,
    theta: float,
    epsilon: float,
    rope: Mapping[str, Any] | None = None,
    experts: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Case:
    """A model of Llama's family; `groups` below the number of heads is grouped-query attention."""
    published = {
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta, **(rope or {})},
        "tie_word_embeddings": False,
        **(experts or {}),
    }
    return Case(preset=preset, architecture=architecture, published=published, **kwargs)


def smollm3(**kwargs: Any) -> Case:
    """Layers with and without rope."""
    untied = ["model.share_embeddings_and_output_weights=false"]
    return llama("smollm3_3b", "SmolLM3", layers=4, groups=2, theta=5e6, epsilon=1e-6, overrides=untied, **kwargs)


def windowed(window: int, **kwargs: Any) -> Case:
    """Layers of which all but the first have a sliding window."""
    published = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 1}
    ours = [f"model.window_size=[{window - 1},0]", "model.window_attn_skip_freq=[0,1,1]"]
    kwargs = {"layers": 3, "groups": 2, "overrides": ours, **kwargs}
    return llama("qwen2_5_7b", "Qwen2", theta=1e6, epsilon=1e-6, experts=published, **kwargs)


def yarn(**kwargs: Any) -> Case:
    """Rope that YaRN stretches, in all parts of its ramp."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    ours = ["model.rope_scaling_factor=4", "model.yarn_original_max_position_embeddings=256", "model.rotary_base=100"]
    return llama("qwen2_5_7b", "Qwen2", groups=2, theta=1e2, epsilon=1e-6, rope=rope, overrides=ours, **kwargs)


def build_reference(case: Case) -> torch.nn.Module:
    """The `transformers` model, all of its parameters random: norms and biases too, or a wrong one would not show."""
    common = {"vocab_size": case.vocab_size, "bos_token_id": None, "eos_token_id": None, **case.published}
    if case.is_gpt2:
        reference = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                n_layer=case.layers, n_embd=case.width, n_head=case.heads, n_positions=case.length, **common
            )
        )
    else:
        is_neox = case.architecture == "GPTNeoX"
        config = getattr(transformers, f"{case.architecture}Config")(
            num_hidden_layers=case.layers,
            hidden_size=case.width,
            intermediate_size=case.inner_width,
            num_attention_heads=case.heads,
            max_position_embeddings=case.length,
            **common,
            # Its class has as many as heads, of one width.
            **({} if is_neox else {"num_key_value_heads": case.groups, "head_dim": case.head_width}),
            **({"sliding_window": None} if case.architecture == "Mistral" and "sliding_window" not in common else {}),
            # Its own default is beyond these vocabularies.
            **({"pad_token_id": None} if case.architecture in ("Phi3", "SmolLM3") else {}),
        )
        reference = getattr(transformers, f"{case.architecture}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                center = 1.0 if name.endswith("weight") else 0.0
                parameter.normal_(center, 0.2, generator=generator)
            elif "embed_tokens" in name or "wpe" in name:
                # So small that the norms' epsilon matters.
                parameter.normal_(0.0, 0.02, generator=generator)
            elif "wte" in name:
                # The LM head too: so large that the logits differ.
                parameter.normal_(0.0, 0.1, generator=generator)
            else:
                parameter.normal_(0.0, case.weight_scale / math.sqrt(case.width), generator=generator)
    return reference.eval()


def round_to_bf16(reference: torch.nn.Module) -> None:
    """Leaves the model in fp32 with weights that bf16 can hold."""
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.bfloat16())


# The norm before a linear layer: its name in Transformer Engine's layers, which hold it, and in local ones.
_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}


def whole_model_name(rule: Rule) -> str:
    """A tensor's name in the whole model of Transformer Engine's layers, where a checkpoint stacks its layers."""
    return rule.key if rule.layer is None else rule.key.replace("decoder.layers.", f"decoder.layers.{rule.layer}.")


def _renamed(weights: Weights, names: Mapping[str, str]) -> Weights:
    found = {name: next((norm for norm in names if norm in name), None) for name in weights}
    return {name if norm is None else name.replace(norm, names[norm]): weights[name] for name, norm in found.items()}


def te_names(weights: Weights) -> Weights:
    """The same weights by the names of Transformer Engine's layers."""
    return _renamed(weights, {local: fused for fused, local in _NORMS.items()})


def local_names(weights: Weights) -> Weights:
    """The same weights by the names of local layers."""
    return _renamed(weights, _NORMS)


def map_weights(reference: torch.nn.Module, case: Case) -> Weights:
    """Weights of the `transformers` model as local layers have them; rows that pad the vocabulary are zero."""
    source = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    model = compose_quickly(case.override_list()).model
    architecture = next(known for known in Architecture if known.value == type(reference).__name__)
    ours = {}
    for rule in tensor_rules(model, architecture):
        weight = rule.conversion.to_ours([source[name] for name in rule.names])
        weight = weight.clone(memory_format=torch.contiguous_format)
        if rule.key in ("embedding.word_embeddings.weight", "output_layer.weight"):
            weight[case.vocab_size :] = 0.0
        ours[whole_model_name(rule)] = weight
    return local_names(ours)


def make_tokens(case: Case) -> torch.Tensor:
    """[b, s], every id of the vocabulary as likely."""
    return torch.randint(case.vocab_size, (case.batch, case.length), generator=torch.Generator().manual_seed(6))


def reference_logits(reference: torch.nn.Module, case: Case) -> torch.Tensor:
    """[b, s, vocab], fp32, on the CPU."""
    with torch.no_grad():
        logits: torch.Tensor = reference(input_ids=make_tokens(case)).logits
    return logits


def load_weights(model: GPTModel, weights: Weights) -> None:
    """Copies `weights`, which must name all parameters of the model, into it."""
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            assert parameter.shape == weights[name].shape, name
            parameter.copy_(weights[name])


@contextmanager
def built_model(case: Case, weights: Weights, *more_overrides: str) -> Iterator[torch.nn.Module]:
    """Our model in one process, holding `weights`; in bf16 wrapped as for training."""
    install_cpu_device()
    config = compose_quickly([*case.override_list(), *more_overrides])
    platform = detect_platform()
    with process_groups(config.model, read_launch({}), platform):
        (model,) = build_gpt_chunks(spec_of(config, platform))
        load_weights(model, weights)
        yield (Float16Module(model.config, model) if model.config.bf16 else model).eval()


@torch.no_grad()
def run_model(model: torch.nn.Module, case: Case, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [b, s, padded vocab], or losses [b, s] with labels."""
    device = next(model.parameters()).device
    positions = torch.arange(case.length).expand(case.batch, case.length).to(device)
    labels = None if labels is None else labels.to(device)
    output: torch.Tensor = model(make_tokens(case).to(device), positions, None, labels=labels)
    return output.cpu()


@dataclass(frozen=True, kw_only=True)
class Training:
    """Our model, its optimizer and schedule in one process, and the microbatches of one global batch, on the device."""

    config: Config
    trainable: Trainable
    batches: list[Batch]

    def step(self) -> StepResult:
        """One optimizer step on the global batch, the same every time."""
        return train_step(self.trainable, [iter(self.batches)])


@contextmanager
def built_training(case: Case, weights: Weights, *more_overrides: str) -> Iterator[Training]:
    """What `training.run` builds, the model holding `weights`; two microbatches make a step."""
    install_cpu_device()
    constant = ["model.optim.sched.name=constant", "model.optim.sched.warmup_steps=0"]
    overrides = [*case.override_list(), f"model.global_batch_size={2 * case.batch}", *constant, *more_overrides]
    config = compose_quickly(overrides)
    platform = detect_platform()
    with process_groups(config.model, read_launch({}), platform):
        model = build_model(spec_of(config, platform))
        # Before the optimizer, which copies its fp32 masters from them.
        load_weights(model.gpt_chunks[0], weights)
        optimizer = build_optimizer(model)
        trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
        model.train()
        positions = torch.arange(case.length, device=platform.device).expand(case.batch, case.length)
        batches = [
            Batch(
                tokens=samples[:, :-1].contiguous(),
                labels=samples[:, 1:].contiguous(),
                loss_mask=torch.ones_like(positions, dtype=torch.float32),
                position_ids=positions,
            )
            for samples in make_samples(case).to(platform.device).split(case.batch)
        ]
        yield Training(config=config, trainable=trainable, batches=batches)


def make_samples(case: Case) -> torch.Tensor:
    """[2b, s + 1] tokens; each sequence is four tokens over and over, so that there is something to learn."""
    period = torch.randint(case.vocab_size, (2 * case.batch, 4), generator=torch.Generator().manual_seed(7))
    return period.repeat(1, case.length // 4 + 1)[:, : case.length + 1]


def train_ours(training: Training, num_steps: int) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of `num_steps` steps, each before its update."""
    losses, norms = [], []
    for _ in range(num_steps):
        result = training.step()
        assert result.grad_norm is not None
        losses.append(mean_loss(result.loss_sum_and_tokens))
        norms.append(float(result.grad_norm))
    return losses, norms


def train_reference(
    reference: torch.nn.Module, case: Case, config: Config, num_steps: int
) -> tuple[list[float], list[float]]:
    """The same losses and gradient norms from `transformers` and `torch.optim`, in fp32 on the CPU."""
    optim = config.model.optim
    parameters = list(reference.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
    )
    samples = make_samples(case)
    losses, norms = [], []
    for _ in range(num_steps):
        optimizer.zero_grad()
        logits = reference(input_ids=samples[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), samples[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, config.trainer.gradient_clip_val)
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm.item())
    return losses, norms
