"""Names and layouts of tensors, in a checkpoint of ours and in a model of `transformers`.

The checkpoint's tensors are megatron-core's. All layers are stacked along a first axis. Query, key and value are one
matrix, with the rows of each query group together (q q k v | q q k v | …). A gated MLP's halves are one matrix. The
norm before a linear layer has that layer's name. The vocabulary is padded. Shapes below are of one layer, [out, in].
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from gpt_pretrain.config.choices import Activation
from gpt_pretrain.config.derived import (
    ffn_hidden_size,
    kv_channels,
    moe_ffn_hidden_size,
    num_query_groups,
    padded_vocab_size,
)
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.huggingface.architectures import Architecture

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Splits one tensor of a checkpoint into its parts in `transformers`, and joins them bit for bit."""

    to_hf: Callable[[torch.Tensor], Tensors]
    """Returns views where it can, and takes meta tensors."""
    to_ours: Callable[[Tensors], torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One tensor of a checkpoint and its parts in `transformers`."""

    key: str
    """In the checkpoint."""
    layer: int | None
    """Index among the stacked layers; None outside of the layers."""
    shape: tuple[int, ...]
    """Without the axis of layers."""
    names: tuple[str, ...]
    """In `transformers`, one per part."""
    conversion: Conversion

    def parts(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Each part in `transformers` by name, as a meta tensor."""
        parts = self.conversion.to_hf(torch.empty(self.shape, dtype=dtype, device="meta"))
        return dict(zip(self.names, parts, strict=True))


def differences(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """What tensors `found` lacks, has too many, or has in another shape, as the ends of a sentence."""
    problems = [f"lacks {name}" for name in expected if name not in found]
    problems += [f"has {name}" for name in found if name not in expected]
    return problems + [
        f"has {name} as {list(found[name])} instead of {list(shape)}"
        for name, shape in expected.items()
        if name in found and found[name] != shape
    ]


# Of a tensor in a layer: its key in the checkpoint, its names in `transformers`, and the conversion.
_LayerRule = tuple[str, tuple[str, ...], Conversion]


def _only(tensors: Tensors) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


_SAME = Conversion(to_hf=lambda tensor: [tensor], to_ours=_only)
# GPT-2's Conv1D keeps matrices as [in, out].
_TRANSPOSED = Conversion(to_hf=lambda tensor: [tensor.t()], to_ours=lambda tensors: _only(tensors).t())
_HALVES = Conversion(to_hf=lambda tensor: tensor.chunk(2), to_ours=lambda tensors: torch.cat(list(tensors)))
# All experts of a layer, [experts, out, in]; `transformers` has a tensor per expert.
_EXPERTS = Conversion(to_hf=lambda tensor: tensor.unbind(), to_ours=lambda tensors: torch.stack(list(tensors)))
_EXPERT_HALVES = Conversion(
    to_hf=lambda tensor: [half for expert in tensor for half in expert.chunk(2)],
    to_ours=lambda tensors: torch.stack(
        [torch.cat([gate, up]) for gate, up in zip(tensors[::2], tensors[1::2], strict=True)]
    ),
)
# The embedding, the layers, the last norm and the LM head; other classes have those of Llama's.
_OUTER_NAMES = {
    Architecture.gpt2: ("transformer.wte", "transformer.h", "transformer.ln_f", "lm_head"),
    Architecture.gpt_neox: ("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out"),
}
_LLAMA_NAMES = ("model.embed_tokens", "model.layers", "model.norm", "lm_head")
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_MLP_NORM = "post_attention_layernorm"
# Of classes with LayerNorm: each linear layer's parts, and the norm before it.
_PLAIN_NAMES: dict[Architecture, dict[str, tuple[tuple[str, ...], str | None]]] = {
    Architecture.gpt2: {
        "self_attention.linear_qkv": (("attn.c_attn",), "ln_1"),
        "self_attention.linear_proj": (("attn.c_proj",), None),
        "mlp.linear_fc1": (("mlp.c_fc",), "ln_2"),
        "mlp.linear_fc2": (("mlp.c_proj",), None),
    },
    Architecture.gpt_neox: {
        "self_attention.linear_qkv": (("attention.query_key_value",), "input_layernorm"),
        "self_attention.linear_proj": (("attention.dense",), None),
        "mlp.linear_fc1": (("mlp.dense_h_to_4h",), _MLP_NORM),
        "mlp.linear_fc2": (("mlp.dense_4h_to_h",), None),
    },
    Architecture.starcoder2: {
        "self_attention.linear_qkv": (_QKV, "input_layernorm"),
        "self_attention.linear_proj": (("self_attn.o_proj",), None),
        "mlp.linear_fc1": (("mlp.c_fc",), _MLP_NORM),
        "mlp.linear_fc2": (("mlp.c_proj",), None),
    },
}
# The prefix of a layer's router and experts, then an expert's gate, up and down projection.
_EXPERT_NAMES = {
    Architecture.mixtral: ("block_sparse_moe", "w1", "w3", "w2"),
    Architecture.qwen3_moe: ("mlp", "gate_proj", "up_proj", "down_proj"),
}


def _attention(model: ModelConfig, architecture: Architecture) -> Conversion:
    """Query, key and value: three tensors; in Phi-3's class one, in GPT-2's its transpose, all queries first.

    GPT-NeoX's is ours: query, key and value of each head.
    """
    groups, width = num_query_groups(model), kv_channels(model)

    def split(tensor: torch.Tensor) -> list[torch.Tensor]:
        """[groups · (queries + 2) · width, …] to query, key and value rows."""
        blocks = tensor.unflatten(0, (groups, -1, width))
        return [part.flatten(0, 2) for part in (blocks[:, :-2], blocks[:, -2:-1], blocks[:, -1:])]

    def join(tensors: Tensors) -> torch.Tensor:
        return torch.cat([part.unflatten(0, (groups, -1, width)) for part in tensors], dim=1).flatten(0, 2)

    if architecture is Architecture.gpt_neox:
        return _SAME
    if architecture is Architecture.gpt2:
        # [in, 3 · out]; biases are [3 · out].
        return Conversion(
            to_hf=lambda tensor: [torch.cat(split(tensor)).t().contiguous()],
            to_ours=lambda tensors: join(_only(tensors).t().chunk(3)),
        )
    if architecture is Architecture.phi3:
        rows = [model.num_attention_heads * width, groups * width, groups * width]
        return Conversion(
            to_hf=lambda tensor: [torch.cat(split(tensor))],
            to_ours=lambda tensors: join(_only(tensors).split(rows)),
        )
    return Conversion(to_hf=split, to_ours=join)


def pad_vocabulary(tensors: Tensors, *, num_rows: int) -> torch.Tensor:
    """Adds rows that belong to no token, each the mean of the tokens' rows.

    The softmax includes them. The logit of a mean row is the mean logit, whose exponential is at most the mean of the
    exponentials (Jensen's inequality): n rows beside V tokens raise the loss by at most log(1 + n / V). Rows of zeros
    have no such bound, as GPT-2's logits are far below zero.
    """
    embedding = _only(tensors)
    padding = num_rows - embedding.size(0)
    if padding == 0:
        return embedding
    mean = embedding.mean(0, keepdim=True, dtype=torch.float32).to(embedding)
    return torch.cat([embedding, mean.expand(padding, -1)])


def tensor_rules(model: ModelConfig, architecture: Architecture) -> list[Rule]:
    """Every tensor of a model, layer by layer."""
    vocabulary = Conversion(
        to_hf=lambda tensor: [tensor[: model.vocab_size]],
        to_ours=partial(pad_vocabulary, num_rows=padded_vocab_size(model)),
    )
    embedding, layers, norm, head = _OUTER_NAMES.get(architecture, _LLAMA_NAMES)
    attention, plain = _attention(model, architecture), architecture in _PLAIN_NAMES
    layer_rules = (_plain_layer if plain else _llama_layer)(model, architecture, attention)
    shapes = layer_shapes(model)
    hidden, embedded = model.hidden_size, (padded_vocab_size(model), model.hidden_size)

    def rule(key: str, name: str, shape: tuple[int, ...], conversion: Conversion = _SAME) -> Rule:
        return Rule(key=key, layer=None, shape=shape, names=(name,), conversion=conversion)

    rules = [rule("embedding.word_embeddings.weight", f"{embedding}.weight", embedded, vocabulary)]
    if architecture is Architecture.gpt2:
        positions = (model.max_position_embeddings, hidden)
        rules.append(rule("embedding.position_embeddings.weight", "transformer.wpe.weight", positions))
    rules += [
        Rule(
            key=f"decoder.layers.{key}",
            layer=layer,
            shape=shapes[key],
            names=tuple(f"{layers}.{layer}.{name}" for name in names),
            conversion=conversion,
        )
        for layer in range(model.num_layers)
        for key, names, conversion in layer_rules
    ]
    for part in ("weight", "bias")[: 1 + plain]:
        rules.append(rule(f"decoder.final_layernorm.{part}", f"{norm}.{part}", (hidden,)))
    if not model.share_embeddings_and_output_weights:
        rules.append(rule("output_layer.weight", f"{head}.weight", embedded, vocabulary))
    return rules


def layer_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of a layer's tensors by key."""
    hidden, width = model.hidden_size, kv_channels(model)
    queries, groups, inner = model.num_attention_heads, num_query_groups(model), ffn_hidden_size(model)
    matrices = {
        "self_attention.linear_qkv": ((queries + 2 * groups) * width, hidden),
        "self_attention.linear_proj": (hidden, queries * width),
        "mlp.linear_fc1": (inner * (2 if model.activation is Activation.swiglu else 1), hidden),
        "mlp.linear_fc2": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, (rows, columns) in matrices.items():
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
        shapes |= {f"{name}.layer_norm_{part}": (columns,) for part in ("weight", "bias")}
    shapes |= {f"self_attention.{name}_layernorm.weight": (width,) for name in ("q", "k")}
    if model.num_moe_experts is not None:
        experts, inner = model.num_moe_experts, moe_ffn_hidden_size(model)
        shapes |= {
            "pre_mlp_layernorm.weight": (hidden,),
            "mlp.router.weight": (experts, hidden),
            "mlp.experts.experts.linear_fc1.weight": (experts, 2 * inner, hidden),
            "mlp.experts.experts.linear_fc2.weight": (experts, hidden, inner),
        }
    return shapes


def _plain_layer(model: ModelConfig, architecture: Architecture, attention: Conversion) -> list[_LayerRule]:
    """A layer with LayerNorm, whose norms have biases, and an MLP without a gate."""
    rules: list[_LayerRule] = []
    for layer, (names, norm) in _PLAIN_NAMES[architecture].items():
        matrix = _TRANSPOSED if architecture is Architecture.gpt2 else _SAME
        conversion = attention if layer.endswith("linear_qkv") else matrix
        if norm is not None:
            rules += [(f"{layer}.layer_norm_{part}", (f"{norm}.{part}",), _SAME) for part in ("weight", "bias")]
        # The transpose of a bias is the bias.
        for part in ("weight", "bias")[: 1 + model.bias]:
            rules.append((f"{layer}.{part}", tuple(f"{name}.{part}" for name in names), conversion))
    return rules


def _llama_layer(model: ModelConfig, architecture: Architecture, attention: Conversion) -> list[_LayerRule]:
    """A layer of Llama's family; Phi-3's joins query, key and value, and the halves of a gated MLP."""
    projections: tuple[str, ...] = _QKV
    gate: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    halves = _HALVES
    if architecture is Architecture.phi3:
        projections, gate, halves = ("self_attn.qkv_proj",), ("mlp.gate_up_proj",), _SAME
    rules: list[_LayerRule] = [
        ("self_attention.linear_qkv.layer_norm_weight", ("input_layernorm.weight",), _SAME),
        ("self_attention.linear_qkv.weight", tuple(f"{name}.weight" for name in projections), attention),
        ("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), _SAME),
    ]
    if model.num_moe_experts is not None:
        rules += _experts(model.num_moe_experts, architecture)
    else:
        rules += [
            ("mlp.linear_fc1.layer_norm_weight", (f"{_MLP_NORM}.weight",), _SAME),
            ("mlp.linear_fc1.weight", tuple(f"{name}.weight" for name in gate), halves),
            ("mlp.linear_fc2.weight", ("mlp.down_proj.weight",), _SAME),
        ]
    if model.qk_layernorm:
        rules += [(f"self_attention.{q}_layernorm.weight", (f"self_attn.{q}_norm.weight",), _SAME) for q in "qk"]
    if model.bias or model.qkv_bias:
        rules.append(("self_attention.linear_qkv.bias", tuple(f"{name}.bias" for name in projections), attention))
    if model.bias:
        rules += [
            ("self_attention.linear_proj.bias", ("self_attn.o_proj.bias",), _SAME),
            ("mlp.linear_fc1.bias", ("mlp.gate_proj.bias", "mlp.up_proj.bias"), _HALVES),
            ("mlp.linear_fc2.bias", ("mlp.down_proj.bias",), _SAME),
        ]
    return rules


def _experts(num_experts: int, architecture: Architecture) -> list[_LayerRule]:
    """A layer's router and experts, and the norm before them, a module of its own in our checkpoints."""
    block, gate, up, down = _EXPERT_NAMES[architecture]
    experts = [f"{block}.experts.{expert}" for expert in range(num_experts)]
    halves = tuple(f"{expert}.{name}.weight" for expert in experts for name in (gate, up))
    return [
        ("pre_mlp_layernorm.weight", (f"{_MLP_NORM}.weight",), _SAME),
        ("mlp.router.weight", (f"{block}.gate.weight",), _SAME),
        ("mlp.experts.experts.linear_fc1.weight", halves, _EXPERT_HALVES),
        ("mlp.experts.experts.linear_fc2.weight", tuple(f"{expert}.{down}.weight" for expert in experts), _EXPERTS),
    ]
