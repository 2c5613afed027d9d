"""`model.use_mup`: hyperparameters tuned on a narrow model serve a wide one (muP, Yang et al. 2022, arXiv 2203.03466).

Table 8 of the paper, which also fits tied embeddings. m = hidden_size / mup_base_hidden_size, s = init_method_std:

                     embedding      LM head     matrices of the layers    norms and biases
    initial std      s              s           s / √m                    as without muP
    multiplier       1              1 / m       1                         1
    Adam's rate      lr             lr          lr / m                    lr
    Adam's epsilon   eps            eps         eps / m (appendix B.3)    eps
    attention        q · k / d instead of q · k / √d, d being kv_channels

The MLP's width and the heads' width or number have to grow as hidden_size does: there is one m. Keys, and the factors
that they add (`mup_embedding_mult`, …), are megatron-core's, which sets attention's scale and multiplies embeddings.
The rest is in `megatron.weights`, `megatron.loss.LossHead` and `width_overrides`.

Muon's updates need no rate by width: with a scale of √(out / in), or √max(1, out / in), their spectral norm depends on
the shape of a matrix alone, which is muP's condition (Yang et al. 2023, arXiv 2310.17813). Its other scale,
√max(out, in), makes updates as large as Adam's, and would need 1 / √m.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, override

from gpt_pretrain.config.choices import LayerName, MuonScaleMode, OptimizerName
from gpt_pretrain.config.derived import kv_channels, num_query_groups
from gpt_pretrain.config.errors import one_of, refusal, show
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.features.feature import Feature, Obstacle, Resolved

if TYPE_CHECKING:
    import torch
    from megatron.core.optimizer import OptimizerConfig

# Marks the groups of parameters whose rate and epsilon depend on the width.
SCALED_BY_WIDTH = "scaled_by_width"
_TRANSFERRING = (MuonScaleMode.unit_rms_norm, MuonScaleMode.shape_scaling)
_NOT_HIDDEN = ("embedding.", "output_layer.")


class Mup(Feature):
    """Maximal update parametrization."""

    key = "use_mup"
    off = "model.use_mup=false with model.mup_base_hidden_size=null"

    @override
    def problems(self, run: Resolved, *, sizes_known: bool) -> Iterator[str]:
        yield from super().problems(run, sizes_known=sizes_known)
        model, sched = run.model, run.model.optim.sched
        if model.mup_base_hidden_size is None:
            yield (
                "model.use_mup=true needs model.mup_base_hidden_size, the width at which the rate was found; use "
                f"model.mup_base_hidden_size={model.hidden_size} for that model itself, or model.use_mup=false"
            )
        elif not sizes_known:
            return
        elif model.mup_output_mult == 1.0 and width_mult(model) != 1.0:
            # TransformerConfig.__post_init__
            yield refusal(
                "model.mup_output_mult=1.0",
                f"model.mup_base_hidden_size={model.mup_base_hidden_size}",
                f"megatron-core reads 1.0 as not given at model.hidden_size={model.hidden_size}",
                "null, which is 1 by their ratio",
                f"model.mup_base_hidden_size={model.hidden_size}",
            )
        elif _rates_by_width(model) and sched.init_lr > (lowest := model.optim.lr / width_mult(model)):
            yield (
                f"model.optim.sched.init_lr={sched.init_lr} is above the peak rate of the layers' matrices, {lowest:g} "
                f"(model.optim.lr={model.optim.lr} by model.hidden_size={model.hidden_size} / "
                f"model.mup_base_hidden_size={model.mup_base_hidden_size}); use 0 to {lowest:g}"
            )

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model, optim = run.model, run.model.optim
        if model.num_moe_experts is not None:
            why = "a router's logits neither grow in number with the width nor have the LM head's multiplier"
            yield f"model.num_moe_experts={model.num_moe_experts}", why, "model.num_moe_experts=null"
        if model.layer is not LayerName.gpt:
            why = "which of its weights grow with the width is known of the program's own layer alone"
            yield f"model.layer={model.layer.name}", why, "model.layer=gpt"
        if optim.name is OptimizerName.muon and optim.muon_scale_mode not in _TRANSFERRING:
            why = "the spectral norm of its updates grows with the width"
            scales = f"model.optim.muon_scale_mode={one_of([mode.name for mode in _TRANSFERRING])}"
            yield f"model.optim.muon_scale_mode={optim.muon_scale_mode.name}", why, scales
        elif optim.name not in (OptimizerName.adam, OptimizerName.muon):
            why = "rates by width are Adam's and Muon's"
            yield f"model.optim.name={optim.name.name}", why, "model.optim.name=adam"


def width_mult(model: ModelConfig) -> float:
    """How many times wider than its base a model is; 1 without muP."""
    if not model.use_mup or model.mup_base_hidden_size is None:
        return 1.0
    return model.hidden_size / model.mup_base_hidden_size


def output_mult(model: ModelConfig) -> float:
    """What logits are multiplied by; 1 without muP."""
    if not model.use_mup or model.mup_output_mult is None:
        return 1 / width_mult(model)
    return model.mup_output_mult


def initial_std(model: ModelConfig, name: str) -> float:
    """The standard deviation of a weight matrix before its scale by depth; `name` is its name in the whole model."""
    return model.init_method_std / (1.0 if name.startswith(_NOT_HIDDEN) else math.sqrt(width_mult(model)))


def _rates_by_width(model: ModelConfig) -> bool:
    return model.use_mup and model.optim.name is OptimizerName.adam


def width_overrides(model: ModelConfig, options: "OptimizerConfig") -> dict[Any, dict[str, Any]]:
    """Rate and epsilon of the layers' matrices, by megatron-core's `ParamKey`; empty without muP, and with Muon."""
    if not _rates_by_width(model):
        return {}
    from megatron.core.optimizer import ParamKey, ParamPredicate

    mult = width_mult(model)
    # LanguageModule.setup_embeddings_and_output_layer marks embeddings and LM head, tied copies as well.
    hidden = ParamPredicate(
        name="hidden", fn=lambda weight: weight.dim() > 1 and not getattr(weight, "is_embedding_parameter", False)
    )
    values = {"max_lr": options.lr, "min_lr": options.min_lr, "eps": options.adam_eps}
    return {ParamKey(predicate=hidden): {SCALED_BY_WIDTH: True} | {name: of / mult for name, of in values.items()}}


def without_multipliers(model: ModelConfig, name: str, tensor: "torch.Tensor") -> "torch.Tensor":
    """A tensor of a checkpoint, by its name, for a model that computes the same without any of muP's multipliers.

    Each multiplier moves into weights beside it: the embedding's into the embedding, attention's scale into queries,
    the output's into the last norm, which a tied LM head does not share. fp32, exact in powers of two.
    """
    if not model.use_mup:
        return tensor
    queries = math.sqrt(kv_channels(model)) * _softmax_scale(model)
    whole = tensor.float()
    if name.startswith("embedding."):
        whole = whole * model.mup_embedding_mult
    elif name.startswith("decoder.final_layernorm."):
        tied = model.share_embeddings_and_output_weights
        whole = whole * (output_mult(model) / (model.mup_embedding_mult if tied else 1.0))
    elif ".q_layernorm." in name:
        whole = whole * queries
    elif ".linear_qkv." in name and ".layer_norm_" not in name and not model.qk_layernorm:
        # Of each group the queries, one key and one value.
        blocks = whole.unflatten(0, (num_query_groups(model), -1, kv_channels(model))).clone()
        blocks[:, :-2] *= queries
        whole = blocks.flatten(0, 2)
    else:
        return tensor
    return whole


def _softmax_scale(model: ModelConfig) -> float:
    """megatron-core's (TransformerConfig.__post_init__)."""
    base = 1.0 if model.mup_base_head_dim is None else math.sqrt(model.mup_base_head_dim)
    return float(base / kv_channels(model) ** model.mup_attn_scale_power)


def describe_mup(model: ModelConfig) -> str:
    """A run's muP in one line."""
    return (
        f"{width_mult(model):g} times the width {show(model.mup_base_hidden_size)}, logits × {output_mult(model):g}, "
        f"attention × {_softmax_scale(model):.4g}"
    )
