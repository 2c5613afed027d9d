"""What the FP8 keys add up to: the recipe, the products on one rank, and what megatron-core is told."""

from dataclasses import astuple, fields

import pytest

from gpt_pretrain.config.choices import AmaxComputeAlgo, Fp8Backend
from gpt_pretrain.config.recipes import RECIPES, recipes_of
from gpt_pretrain.megatron.model import translate_ddp, translate_optimizer, translate_transformer
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.run.fp8 import resolve_fp8
from gpt_pretrain.run.products import gemms, resolve
from tests.nemo import NEMO_FP8, NEMO_FP8_WITH_TE
from tests.platforms import H200, spec_of
from tests.refusals import compose_quickly

# Learned positions: the fused rope of TE layers can be told only where TE is installed.
GPT3 = ["model=gpt3_1_3b", "data=mock"]


def settings_of(*overrides):
    return resolve_fp8(compose_quickly(overrides).model)


@pytest.mark.parametrize("nemo", [NEMO_FP8, NEMO_FP8_WITH_TE])
@pytest.mark.parametrize("model", ["tiny", "gpt3_1_3b", "llama3_8b"])
def test_nemos_override_string_breaks_no_rule(nemo, model, broken_rules):
    assert broken_rules(f"model={model}", *nemo) == []


@pytest.mark.parametrize("nemo", [NEMO_FP8, NEMO_FP8_WITH_TE])
def test_nemos_override_string_reaches_every_field_of_megatron_core(nemo, no_launcher):
    config = compose_quickly([*GPT3, *nemo])
    check_machine(spec_of(config, H200))
    transformer = translate_transformer(spec_of(config, H200))
    fp8 = {f.name: getattr(transformer, f.name) for f in fields(transformer) if f.name.startswith("fp8")}
    assert fp8 == {
        "fp8": "hybrid",
        "fp8_recipe": "delayed",
        "fp8_param": True,
        "fp8_margin": 0,
        "fp8_interval": 1,
        "fp8_amax_history_len": 1024,
        "fp8_amax_compute_algo": "max",
        "fp8_wgrad": True,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
        # What this application never uses: recipes of one's own, an FP8 LM head.
        "fp8_quantizer_factory": None,
        "fp8_output_proj": False,
    }
    assert transformer.transformer_impl == "transformer_engine"
    assert not transformer.first_last_layers_bf16
    assert transformer.bf16
    ddp, optimizer = translate_ddp(spec_of(config, H200, shards=2)), translate_optimizer(spec_of(config, H200))
    assert ddp.use_distributed_optimizer
    assert ddp.fp8_param_gather
    assert optimizer.use_distributed_optimizer
    assert optimizer.fp8_recipe == "delayed"
    assert optimizer.bf16


@pytest.mark.parametrize("recipe", recipes_of(Fp8Backend.transformer_engine), ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize("emulate", [True, False])
def test_fp8_weights_and_their_gather_are_told_together_or_not_at_all(recipe, params, emulate):
    """One without the other trains weights that never change, or gathers BF16 silently."""
    overrides = [f"model.fp8_params={params}", f"model.fp8_emulate={emulate}"]
    config = compose_quickly([*GPT3, f"fp8={recipe.name}", *overrides])
    transformer = translate_transformer(spec_of(config, H200))
    ddp, optimizer = translate_ddp(spec_of(config, H200, shards=2)), translate_optimizer(spec_of(config, H200))
    told = params and not emulate
    assert (transformer.fp8_param, ddp.fp8_param_gather) == (told, told)
    assert optimizer.fp8_recipe == (None if emulate else recipe.name)
    if told:
        assert ddp.use_distributed_optimizer
        assert optimizer.use_distributed_optimizer


def test_without_fp8_there_is_none():
    assert settings_of("fp8=none") is None


def test_the_one_switch_alone_is_te_s_own_delayed_scaling():
    """TE 2.12's DelayedScaling(): HYBRID, margin 0, history 1024, max."""
    settings = settings_of("model.fp8=true")
    assert settings == settings_of("fp8=delayed")
    assert settings.recipe is RECIPES["delayed"]
    assert (settings.forward_format, settings.gradient_format) == ("e4m3", "e5m2")
    assert (settings.margin, settings.amax_history_len) == (0, 1024)
    assert settings.amax_compute_algo is AmaxComputeAlgo.max
    assert settings.wgrad
    assert not settings.params
    assert settings.exclude == ()


@pytest.mark.parametrize(
    ("overrides", "gradient_format"),
    [
        ([], "e5m2"),
        (["model.fp8_hybrid=true"], "e5m2"),
        (["model.fp8_hybrid=true", "model.fp8_e4m3=false"], "e5m2"),
        (["model.fp8_e4m3=false"], "e5m2"),
        (["model.fp8_e4m3=true"], "e4m3"),
        # NeMo's rule.
        (["model.fp8_hybrid=true", "model.fp8_e4m3=true"], "e4m3"),
        (["model.fp8_hybrid=false", "model.fp8_e4m3=true"], "e4m3"),
        (["model.fp8_recipe=tensorwise"], "e5m2"),
        (["model.fp8_recipe=blockwise"], "e4m3"),
        (["model.fp8_recipe=mxfp8"], "e4m3"),
        (["model.fp8_recipe=blockwise", "model.fp8_hybrid=true"], "e5m2"),
        # The group leaves the format open, so that one switch changes it.
        (["fp8=blockwise", "model.fp8_hybrid=true"], "e5m2"),
        (["fp8=mxfp8", "model.fp8_hybrid=true"], "e5m2"),
        (["model.fp8_recipe=mxfp8", "model.fp8_e4m3=true", "model.fp8_hybrid=true"], "e4m3"),
    ],
)
def test_format_of_gradients(overrides, gradient_format):
    settings = settings_of("model.fp8=true", *overrides)
    assert settings.forward_format == "e4m3"
    assert settings.gradient_format == gradient_format
    assert settings.hybrid == (gradient_format == "e5m2")


@pytest.mark.parametrize("group", RECIPES)
def test_each_group_is_the_recipe_of_its_name(group):
    settings = settings_of(f"fp8={group}")
    assert settings.recipe is RECIPES[group]
    assert settings.recipe.alignment == (32 if group == "mxfp8" else 16)
    # The group states what null means.
    engine = f"model.fp8_backend={settings.recipe.backend.name}"
    assert settings == settings_of("model.fp8=true", engine, f"model.fp8_recipe={settings.recipe.name}")


def test_without_a_recipe_each_engine_has_its_usual_one():
    assert settings_of("model.fp8=true", "model.fp8_backend=torchao").recipe is RECIPES["torchao_tensorwise"]
    assert settings_of("model.fp8=true", "model.fp8_backend=transformer_engine").recipe is RECIPES["delayed"]


@pytest.mark.parametrize(
    ("overrides", "start", "end"),
    [
        ([], 0, 0),
        (["model.first_last_layers_bf16=true"], 1, 1),
        (["model.first_last_layers_bf16=true", "model.num_layers_at_start_in_bf16=2"], 2, 1),
        (["model.first_last_layers_bf16=true", "model.num_layers_at_end_in_bf16=0"], 1, 0),
    ],
)
def test_layers_kept_out_at_both_ends(overrides, start, end):
    config = compose_quickly(["fp8=tensorwise", *overrides])
    run = resolve(config)
    settings = run.fp8
    assert (settings.num_layers_at_start_in_bf16, settings.num_layers_at_end_in_bf16) == (start, end)
    out = {linear.layer for linear in run.linears if linear.precision == "high" and linear.layer >= 0}
    assert out == {*range(start), *range(4 - end, 4)}


@pytest.mark.parametrize(
    ("patterns", "out"),
    [
        ("[]", set()),
        ("[decoder.layers.0.*]", {(0, "qkv"), (0, "proj"), (0, "fc1"), (0, "fc2")}),
        ("['*.linear_fc2']", {(layer, "fc2") for layer in range(4)}),
        ("['decoder.layers.[12].mlp.*']", {(1, "fc1"), (1, "fc2"), (2, "fc1"), (2, "fc2")}),
        (
            "['decoder.layers.?.self_attention.linear_qkv', '*.3.mlp.linear_fc1']",
            {(n, "qkv") for n in range(4)} | {(3, "fc1")},
        ),
    ],
)
def test_patterns_keep_linear_layers_out(patterns, out):
    config = compose_quickly(["fp8=delayed", f"model.fp8_exclude={patterns}"])
    found = {
        (x.layer, x.kind.rpartition("_")[2]) for x in resolve(config).linears if x.precision == "high" and x.layer >= 0
    }
    assert found == out


def test_shapes_on_one_rank_of_a_grouped_query_model_under_tensor_sequence_and_context_parallelism():
    """By hand: 8 query heads and 4 groups of 32 channels, width 256, SwiGLU of 384; TP 2, CP 2, 2 samples of 512."""
    config = compose_quickly(
        [
            "fp8=delayed",
            "parallelism=tp2_sp",
            "model.context_parallel_size=2",
            "model.num_layers=2",
            "model.hidden_size=256",
            "model.num_attention_heads=8",
            "model.num_query_groups=4",
            "model.ffn_hidden_size=384",
            "model.encoder_seq_length=512",
            "model.micro_batch_size=2",
            "model.vocab_size=1000",
            "model.fp8_exclude=['decoder.layers.1.mlp.*']",
        ]
    )
    tokens = 2 * 512 // 2
    expected = [
        # Rows: (8 + 2·4) · 32 / 2. Its input is split along the sequence over the two tensor parallel ranks.
        ("qkv", 256, 256, tokens, tokens // 2),
        # Columns: 8 · 32 / 2.
        ("proj", 256, 128, tokens, tokens),
        # Rows: gate and up projection, 2 · 384 / 2.
        ("fc1", 384, 256, tokens, tokens // 2),
        ("fc2", 256, 192, tokens, tokens),
    ]
    found = resolve(config).linears
    shapes = [(x.kind.rpartition("_")[2], x.out_features, x.in_features, x.tokens, x.local_tokens) for x in found]
    # 1,000 tokens are padded to 1,024 rows.
    assert shapes == [*expected, *expected, ("layer", 512, 256, tokens, tokens // 2)]
    assert [x.precision for x in found] == ["fp8"] * 6 + ["high"] * 3
    assert [x.reason for x in found] == [""] * 6 + ["model.fp8_exclude"] * 2 + ["the LM head stays out of FP8"]
    assert [x.module for x in found][-2:] == ["decoder.layers.1.mlp.linear_fc2", "output_layer"]


def test_three_products_of_a_linear_layer():
    """y [t, out] = x [t, in] · wᵀ; dx [t, in] = dy [t, out] · w; dw [out, in] = dyᵀ [out, t] · x."""
    config = compose_quickly(["fp8=delayed", "model.fp8_wgrad=false", "model.fp8_emulate=true"])
    fc2 = next(linear for linear in resolve(config).linears if linear.kind == "mlp.linear_fc2")
    tokens = 8 * 256
    assert [(gemm.phase, *astuple(gemm)[2:]) for gemm in gemms(fc2)] == [
        ("forward", tokens, 128, 384, True),
        ("dgrad", tokens, 384, 128, True),
        ("wgrad", 128, 384, tokens, False),
    ]
    assert {gemm.flops for gemm in gemms(fc2)} == {2 * tokens * 128 * 384}
