"""The presets are the architectures they name: same weights, same logits and losses as `transformers`.

Each case takes a preset, makes it small, and leaves everything else as `conf/model` has it: norm, activation, rope,
biases, tied embeddings, padding of the vocabulary. The `transformers` model is built from the values that are
published for the architecture, written down here a second time. Nothing is downloaded: its weights are drawn at
random, wide enough that each of these settings shows in the logits.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from megatron.core.models.gpt import GPTModel

from gpt_pretrain.config.launch import read_launch
from gpt_pretrain.config.load import load_config
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.model import build_gpt_chunks
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.platform import detect_platform, plan_kernels
from tests.launching import run_ranks

TOLERANCE = 1e-4
LAYERS, WIDTH, HEADS, LENGTH, BATCH = 2, 64, 4, 32, 2

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A preset, made small, and the `transformers` configuration of the same architecture."""

    preset: str
    architecture: str
    published: dict[str, Any]
    """What the preset must have got right, in the words of the published config.json."""
    vocab_size: int = 256
    groups: int = HEADS
    head_width: int = WIDTH // HEADS
    overrides: list[str] = field(default_factory=list)

    def override_list(self) -> list[str]:
        return [
            f"model={self.preset}",
            "data=mock",
            f"model.num_layers={LAYERS}",
            f"model.hidden_size={WIDTH}",
            f"model.num_attention_heads={HEADS}",
            f"model.vocab_size={self.vocab_size}",
            f"model.encoder_seq_length={LENGTH}",
            f"model.max_position_embeddings={LENGTH}",
            # Layers without Transformer Engine in fp32, also where there is a GPU.
            "model.transformer_engine=false",
            "trainer.precision=fp32",
            *self.overrides,
        ]

    @property
    def is_gpt2(self) -> bool:
        return self.architecture == "GPT2"


def gpt2(preset: str, **kwargs: Any) -> Case:
    published = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
    return Case(preset=preset, architecture="GPT2", published=published, **kwargs)


def llama(preset: str, architecture: str, *, groups: int, theta: float, epsilon: float, **kwargs: Any) -> Case:
    """A model of Llama's family; `groups` below the number of heads is grouped-query attention."""
    published = {
        "hidden_act": "silu",
        "rms_norm_eps": epsilon,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
    }
    overrides = [f"model.num_query_groups={groups}", "model.ffn_hidden_size=96", *kwargs.pop("overrides", [])]
    return Case(
        preset=preset, architecture=architecture, published=published, groups=groups, overrides=overrides, **kwargs
    )


CASES = {
    "gpt2": gpt2("gpt2_124m"),
    # 250 tokens in an embedding of 256 rows.
    "gpt2_padded": gpt2("gpt2_124m", vocab_size=250),
    "llama2": llama("llama2_7b", "Llama", groups=HEADS, theta=1e4, epsilon=1e-5),
    "llama3": llama("llama3_8b", "Llama", groups=2, theta=5e5, epsilon=1e-5),
    "llama3_one_group": llama("llama3_8b", "Llama", groups=1, theta=5e5, epsilon=1e-5),
    "mistral": llama("mistral_7b", "Mistral", groups=2, theta=1e6, epsilon=1e-5),
    "mistral_wide_heads": llama(
        "mistral_7b", "Mistral", groups=2, theta=1e6, epsilon=1e-5, head_width=24, overrides=["model.kv_channels=24"]
    ),
    "qwen2_5": llama("qwen2_5_7b", "Qwen2", groups=2, theta=1e6, epsilon=1e-6),
}


def build_reference(case: Case) -> torch.nn.Module:
    """The `transformers` model, all of its parameters random: norms and biases too, or a wrong one would not show."""
    common = {"vocab_size": case.vocab_size, "bos_token_id": None, "eos_token_id": None, **case.published}
    if case.is_gpt2:
        reference = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(n_layer=LAYERS, n_embd=WIDTH, n_head=HEADS, n_positions=LENGTH, **common)
        )
    else:
        config = getattr(transformers, f"{case.architecture}Config")(
            num_hidden_layers=LAYERS,
            hidden_size=WIDTH,
            intermediate_size=96,
            num_attention_heads=HEADS,
            num_key_value_heads=case.groups,
            head_dim=case.head_width,
            max_position_embeddings=LENGTH,
            **common,
            **({"sliding_window": None} if case.architecture == "Mistral" else {}),
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
                parameter.normal_(0.0, 1.5 / math.sqrt(WIDTH), generator=generator)
    return reference.eval()


def interleave_by_group(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, case: Case) -> torch.Tensor:
    """Rows of three projections as megatron-core has them: q q k v | q q k v | …, one block per query group."""
    blocks = []
    for group in range(case.groups):
        queries = HEADS // case.groups * case.head_width
        blocks.append(q[group * queries : (group + 1) * queries])
        blocks.append(k[group * case.head_width : (group + 1) * case.head_width])
        blocks.append(v[group * case.head_width : (group + 1) * case.head_width])
    return torch.cat(blocks)


def map_gpt2(source: Weights, case: Case) -> Weights:
    """GPT-2's names and layouts to megatron-core's; its Conv1D keeps matrices as [in, out]."""
    ours = {
        "embedding.word_embeddings.weight": source["transformer.wte.weight"],
        "embedding.position_embeddings.weight": source["transformer.wpe.weight"],
        "decoder.final_layernorm.weight": source["transformer.ln_f.weight"],
        "decoder.final_layernorm.bias": source["transformer.ln_f.bias"],
    }
    for layer in range(LAYERS):
        theirs, mine = f"transformer.h.{layer}.", f"decoder.layers.{layer}."
        qkv_weight = source[theirs + "attn.c_attn.weight"].T.split(WIDTH)
        qkv_bias = source[theirs + "attn.c_attn.bias"].split(WIDTH)
        ours[mine + "self_attention.linear_qkv.weight"] = interleave_by_group(*qkv_weight, case)
        ours[mine + "self_attention.linear_qkv.bias"] = interleave_by_group(*qkv_bias, case)
        for there, here in (
            ("attn.c_proj", "self_attention.linear_proj"),
            ("mlp.c_fc", "mlp.linear_fc1"),
            ("mlp.c_proj", "mlp.linear_fc2"),
        ):
            ours[f"{mine}{here}.weight"] = source[f"{theirs}{there}.weight"].T
            ours[f"{mine}{here}.bias"] = source[f"{theirs}{there}.bias"]
        for there, here in (("ln_1", "input_layernorm"), ("ln_2", "pre_mlp_layernorm")):
            for part in ("weight", "bias"):
                ours[f"{mine}{here}.{part}"] = source[f"{theirs}{there}.{part}"]
    return ours


def map_llama(source: Weights, case: Case) -> Weights:
    """Names and layouts of Llama, Mistral and Qwen2 to megatron-core's."""
    ours = {
        "embedding.word_embeddings.weight": source["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": source["model.norm.weight"],
        "output_layer.weight": source["lm_head.weight"],
    }
    for layer in range(LAYERS):
        theirs, mine = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        for part in ("weight", "bias"):
            if f"{theirs}self_attn.q_proj.{part}" in source:
                q, k, v = (source[f"{theirs}self_attn.{name}_proj.{part}"] for name in "qkv")
                ours[f"{mine}self_attention.linear_qkv.{part}"] = interleave_by_group(q, k, v, case)
        ours[mine + "self_attention.linear_proj.weight"] = source[theirs + "self_attn.o_proj.weight"]
        ours[mine + "input_layernorm.weight"] = source[theirs + "input_layernorm.weight"]
        ours[mine + "pre_mlp_layernorm.weight"] = source[theirs + "post_attention_layernorm.weight"]
        gate, up = source[theirs + "mlp.gate_proj.weight"], source[theirs + "mlp.up_proj.weight"]
        ours[mine + "mlp.linear_fc1.weight"] = torch.cat([gate, up])
        ours[mine + "mlp.linear_fc2.weight"] = source[theirs + "mlp.down_proj.weight"]
    return ours


def map_weights(reference: torch.nn.Module, case: Case) -> Weights:
    """Weights of the `transformers` model as ours; rows that pad the vocabulary are zero."""
    source = {name: parameter.detach() for name, parameter in reference.named_parameters()}
    ours = map_gpt2(source, case) if case.is_gpt2 else map_llama(source, case)
    padding = -case.vocab_size % 128
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        if name in ours:
            ours[name] = torch.nn.functional.pad(ours[name], (0, 0, 0, padding))
    return {name: weight.contiguous() for name, weight in ours.items()}


def make_tokens(case: Case) -> torch.Tensor:
    """[b, s], every id of the vocabulary as likely."""
    return torch.randint(case.vocab_size, (BATCH, LENGTH), generator=torch.Generator().manual_seed(6))


def reference_logits(reference: torch.nn.Module, case: Case) -> torch.Tensor:
    """[b, s, vocab], fp32, on the CPU."""
    with torch.no_grad():
        logits: torch.Tensor = reference(input_ids=make_tokens(case)).logits
    return logits


@contextmanager
def built_model(case: Case, weights: Weights, *more_overrides: str) -> Iterator[GPTModel]:
    """Our model in one process, holding `weights`, which must name all of its parameters."""
    install_cpu_device()
    config = load_config([*case.override_list(), *more_overrides])
    platform = detect_platform()
    with process_groups(config.model, read_launch({}), platform):
        (model,) = build_gpt_chunks(config, platform, plan_kernels(config, platform))
        parameters = dict(model.named_parameters())
        assert parameters.keys() == weights.keys()
        with torch.no_grad():
            for name, parameter in parameters.items():
                assert parameter.shape == weights[name].shape, name
                parameter.copy_(weights[name])
        yield model.eval()


@torch.no_grad()
def run_model(model: GPTModel, case: Case, labels: torch.Tensor | None = None) -> torch.Tensor:
    """Logits [b, s, padded vocab], or losses [b, s] with labels."""
    device = next(model.parameters()).device
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH).to(device)
    labels = None if labels is None else labels.to(device)
    output: torch.Tensor = model(make_tokens(case).to(device), positions, None, labels=labels)
    return output.cpu()


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_those_of_transformers(name: str) -> None:
    case = CASES[name]
    reference = build_reference(case)
    expected = reference_logits(reference, case)
    with built_model(case, map_weights(reference, case)) as model:
        logits = run_model(model, case)
    assert logits.shape == (BATCH, LENGTH, 256)
    assert expected.std() > 0.5, "logits this flat would agree whatever the model computes"
    torch.testing.assert_close(logits[..., : case.vocab_size], expected, atol=TOLERANCE, rtol=0.0)
    # Rows that pad the vocabulary are zero here, so that their logits are.
    assert logits[..., case.vocab_size :].abs().sum() == 0.0


@pytest.mark.parametrize("name", [name for name in CASES if name != "gpt2_padded"])
def test_loss_equals_that_of_transformers(name: str) -> None:
    case = CASES[name]
    reference = build_reference(case)
    tokens = make_tokens(case)
    with torch.no_grad():
        # Labels that are the inputs: transformers shifts them by one and leaves the last position out.
        expected = reference(input_ids=tokens, labels=tokens).loss
    with built_model(case, map_weights(reference, case)) as model:
        losses = run_model(model, case, labels=tokens.roll(-1, dims=1))
    torch.testing.assert_close(losses[:, :-1].mean(), expected, atol=TOLERANCE, rtol=0.0)


def test_rows_that_pad_the_vocabulary_take_part_in_the_softmax() -> None:
    """As in Megatron-LM: the model has to learn that they never come."""
    case = CASES["gpt2_padded"]
    reference = build_reference(case)
    labels = make_tokens(case).roll(-1, dims=1)
    logits = torch.nn.functional.pad(reference_logits(reference, case), (0, 6))
    expected = torch.logsumexp(logits, dim=-1) - logits.gather(-1, labels[..., None])[..., 0]
    with built_model(case, map_weights(reference, case)) as model:
        losses = run_model(model, case, labels=labels)
    torch.testing.assert_close(losses, expected, atol=TOLERANCE, rtol=0.0)


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("gpt2", "model.activation=gelu"),
        ("gpt2", "model.layernorm_epsilon=1.0e-6"),
        ("llama3", "model.rotary_base=400000"),
        ("llama3", "model.rotary_percentage=0.5"),
        ("llama3", "model.layernorm_epsilon=1.0e-6"),
        ("qwen2_5", "model.layernorm_epsilon=1.0e-5"),
        ("mistral", "model.rotary_base=10000"),
    ],
)
def test_comparison_sees_a_setting_that_differs(name: str, override: str) -> None:
    case = CASES[name]
    reference = build_reference(case)
    with built_model(case, map_weights(reference, case), override) as model:
        difference = run_model(model, case)[..., : case.vocab_size] - reference_logits(reference, case)
    assert difference.abs().max() > 5 * TOLERANCE


def test_tensor_parallel_logits_equal_those_of_transformers(tmp_path: Path) -> None:
    case = CASES["llama3"]
    reference = build_reference(case)
    torch.save({"weights": map_weights(reference, case), "tokens": make_tokens(case)}, tmp_path / "input.pt")
    result = run_ranks(2, ["tests/programs/tensor_parallel_logits.py", str(tmp_path), *case.override_list()])
    assert result.returncode == 0, result.stderr
    expected = reference_logits(reference, case)
    outputs = torch.load(tmp_path / "output.pt")
    assert outputs.keys() == {"tp2", "tp2_sp"}
    for logits in outputs.values():
        torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0.0)
