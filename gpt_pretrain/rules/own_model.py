"""Rules about layers, losses and features of extensions: what is written for the program's own excludes them."""

from collections.abc import Iterator

from gpt_pretrain.config.choices import LayerName, LossName
from gpt_pretrain.config.errors import one_of, refusal, show, written
from gpt_pretrain.config.keys import did_you_mean, nearest_name
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.extend.registry import registered

# `model.compile` and `model.cuda_graph_impl` have rules of their own.
_NOT_WITH_LAYER = {
    "overlap_moe_expert_parallel_comm": "megatron-core takes its own layer apart to overlap it",
    "tp_comm_overlap": "user buffers belong to the linear layers of the program's own layer",
}


def own_model_problems(model: ModelConfig) -> Iterator[str]:
    """Features that nobody has registered, and settings that exclude the run's layer or its loss."""
    names = [each.name for each in registered("feature")]
    for name in model.features:
        if name not in names:
            way = "; name the extension that registers it in extensions=[…]"
            if names:
                way = did_you_mean(nearest_name(name, names)) or f"; use {one_of(names)}"
            yield f"model.features={written(model.features)}: there is no feature {show(name)}{way}"
    if model.layer is not LayerName.gpt:
        for key, why in _NOT_WITH_LAYER.items():
            if getattr(model, key):
                yield refusal(f"model.layer={model.layer.name}", f"model.{key}=true", why, "gpt", f"model.{key}=false")
    if model.loss is not LossName.cross_entropy:
        for key in ("cross_entropy_loss_fusion", "cross_entropy_fusion_impl"):
            if value := getattr(model, key):
                asked, why = f"model.loss={model.loss.name}", "kernels fuse the cross entropy alone"
                yield refusal(asked, f"model.{key}={show(value)}", why, "cross_entropy", f"model.{key}=null")
