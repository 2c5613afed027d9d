"""FP8 by TorchAO's float8 training, as torchtitan, NeMo-Automodel and Accelerate configure it."""

from typing import Any

from gpt_pretrain.translate.translation import Source, Translation

# Parts of torchtitan's and transformers' names of linear layers, and megatron-core's for the layer that holds them.
_LAYERS = {
    **dict.fromkeys(("wq", "wk", "wv", "q_proj", "k_proj", "v_proj", "qkv_proj"), "*.linear_qkv"),
    **dict.fromkeys(("wo", "o_proj"), "*.linear_proj"),
    **dict.fromkeys(("w1", "w3", "gate_proj", "up_proj", "gate_up_proj"), "*.linear_fc1"),
    **dict.fromkeys(("w2", "down_proj"), "*.linear_fc2"),
}
_NEVER_FP8 = ("output", "lm_head", "router.gate", "embed_tokens")
_AUTO = ("auto_filter_small_kn", "auto")


def set_torchao(source: Source, translation: Translation, section: str, *because: str) -> None:
    """TorchAO's FP8, which `because` turned on, with the options of `section`."""

    def named(*names: str) -> str:
        """The first of an option's names that has a value."""
        return next((f"{section}.{name}" for name in names if f"{section}.{name}" in source.values), "")

    translation.derive("model.fp8", True, *because)
    translation.derive("model.fp8_backend", "torchao", *because)
    recipe = f"{section}.recipe_name"
    translation.derive("model.fp8_recipe", source.get(recipe) or "tensorwise", recipe, *because)
    gather = named("enable_fsdp_float8_all_gather", "enable_fsdp_fp8_all_gather")
    translation.derive("model.fp8_params", bool(source.get(gather)), gather or because[0])
    emulate = f"{section}.emulate"
    translation.derive("model.fp8_emulate", bool(source.get(emulate)), emulate, *because)
    for name in (
        "precompute_float8_dynamic_scale_for_fsdp",
        "precompute_fp8_dynamic_scale_for_fsdp",
        "force_recompute_fp8_weight_in_bwd",
    ):
        if f"{section}.{name}" in source.given:
            why = (
                "scales of all weights are computed at once"
                if name.startswith("pre")
                else "no FP8 weight is kept twice"
            )
            translation.not_needed.append((source.given[f"{section}.{name}"], why))
    _exclude(source, translation, f"{section}.filter_fqns", because[0])


def _exclude(source: Source, translation: Translation, name: str, because: str) -> None:
    """Layers that stay out of FP8."""
    value: Any = source.get(name) or []
    patterns: list[str] = []
    for part in value.split(",") if isinstance(value, str) else value:
        layer = _LAYERS.get(str(part).rpartition(".")[2])
        if part in _AUTO:
            patterns.append("auto")
        elif layer is not None:
            patterns += [layer] if layer not in patterns else []
        elif part in _NEVER_FP8:
            translation.not_needed.append((f"{source.shown(name)} ({part})", "it never multiplies in FP8 here"))
        elif part:
            translation.lose(f"{source.shown(name)} ({part})", "it stayed out of FP8", "no layer has that name")
    translation.derive("model.fp8_exclude", patterns, name if name in source.given else because)
    if "*.linear_qkv" in patterns or "*.linear_fc1" in patterns:
        translation.notes.append("queries, keys and values are one layer here, and so are the MLP's gate and input")
