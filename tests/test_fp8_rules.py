"""Wrong FP8 inputs are refused on a laptop, through the command line: each trap of the stack and the way out."""

import random
import re
from dataclasses import replace

import pytest

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.choices import Activation
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.rules.shapes import fp8_shape_problems
from gpt_pretrain.run.products import resolve
from tests.launching import REPOSITORY
from tests.refusals import Refused, broken_rules, check_refused, check_told

DELAYED, TENSORWISE, BLOCKWISE, MXFP8 = "fp8=delayed", "fp8=tensorwise", "fp8=blockwise", "fp8=mxfp8"
ATTENTION = "model.fp8_dot_product_attention=true"
KEPT = "model.first_last_layers_bf16=true"
EMULATE = "model.fp8_emulate=true"
PARAMS = "model.fp8_params=true"

WRONG = [
    Refused(
        f"fp8=delayed model.fp8=false {PARAMS} model.fp8_exclude=[*.mlp.*]",
        "model.fp8_recipe=delayed model.fp8_hybrid=true model.fp8_margin=0 model.fp8_amax_history_len=1024 "
        f"model.fp8_amax_compute_algo=max {PARAMS} model.fp8_exclude=[*.mlp.*] model.fp8=false",
    ),
    Refused("model.fp8=true model.fp8_hybrid=false", "model.fp8_hybrid=false model.fp8_e4m3=null"),
    Refused(
        "fp8=delayed model.fp8_amax_history_len=100000000", "model.fp8_amax_history_len=100000000 2,000,000,000 1024"
    ),
    Refused("fp8=delayed model.fp8_interval=2", "model.fp8_interval=2 1.8"),
    Refused(
        "fp8=delayed model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=most_recent",
        "model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=most_recent",
    ),
    Refused(
        "fp8=tensorwise model.fp8_margin=0 model.fp8_amax_history_len=16",
        "model.fp8_margin=0 model.fp8_amax_history_len=16 model.fp8_recipe=tensorwise",
    ),
    Refused("fp8=blockwise model.fp8_interval=1", "model.fp8_interval=1 model.fp8_recipe=blockwise"),
    Refused("fp8=mxfp8 model.fp8_amax_compute_algo=max", "model.fp8_amax_compute_algo=max model.fp8_recipe=mxfp8"),
    Refused(
        "fp8=delayed model.fp8_wgrad=false", "model.fp8_wgrad=false model.fp8_emulate=false override_linear_precision"
    ),
    Refused(
        f"fp8=tensorwise {EMULATE} model.fp8_wgrad=false", "model.fp8_wgrad=false model.fp8_recipe=tensorwise delayed"
    ),
    Refused(f"fp8=blockwise {ATTENTION}", f"{ATTENTION} model.fp8_recipe=blockwise"),
    Refused(
        f"fp8=delayed {ATTENTION} model.activations_checkpoint_granularity=selective",
        f"{ATTENTION} model.activations_checkpoint_granularity=selective",
    ),
    Refused(f"fp8=delayed {ATTENTION} trainer.deterministic=true", f"{ATTENTION} trainer.deterministic=true"),
    Refused(f"fp8=delayed {EMULATE} {ATTENTION}", f"{ATTENTION} {EMULATE}"),
    Refused(
        f"fp8=delayed {PARAMS} model.use_distributed_optimizer=false", f"{PARAMS} model.use_distributed_optimizer=false"
    ),
    Refused(f"fp8=delayed {PARAMS} model.optim.ema_decay=0.9", f"{PARAMS} model.optim.ema_decay=0.9 delayed"),
    Refused(f"fp8=delayed {PARAMS} model.optim.name=sgd", f"{PARAMS} model.optim.name=sgd"),
    Refused(f"fp8=tensorwise {EMULATE} {PARAMS}", f"{PARAMS} {EMULATE}"),
    Refused("fp8=delayed model.transformer_engine=false", "model.fp8=true model.transformer_engine=false"),
    Refused(f"fp8=delayed {EMULATE} model.transformer_engine=true", f"{EMULATE} model.transformer_engine=true"),
    Refused(f"fp8=delayed {PARAMS} model.transformer_engine=false", "model.fp8=true model.transformer_engine=false"),
    Refused("fp8=delayed trainer.precision=fp32", "model.fp8=true trainer.precision=fp32"),
    Refused(f"fp8=mxfp8 {PARAMS}", f"{PARAMS} model.fp8_recipe=mxfp8"),
    Refused(f"fp8=delayed {ATTENTION} parallelism=cp2", f"{ATTENTION} model.context_parallel_size=2"),
    Refused(f"fp8=tensorwise {ATTENTION} {KEPT}", f"{ATTENTION} {KEPT} fp8_exclude"),
    Refused(
        "fp8=tensorwise model.num_layers_at_start_in_bf16=1",
        "model.num_layers_at_start_in_bf16=1 model.first_last_layers_bf16=false",
    ),
    Refused(f"fp8=delayed {KEPT}", f"{KEPT} model.fp8_recipe=delayed fp8_exclude"),
    Refused(
        f"fp8=tensorwise {KEPT} model.num_layers_at_end_in_bf16=5",
        "model.num_layers_at_end_in_bf16=5 model.num_layers=4 model.pipeline_model_parallel_size=1",
    ),
    Refused(
        f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=0 model.num_layers_at_end_in_bf16=0",
        f"{KEPT} 0 1",
        legal=f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=0",
    ),
    Refused(
        f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=2 model.num_layers_at_end_in_bf16=2",
        "model.fp8=true model.first_last_layers_bf16 4 fp8=none",
        legal=f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=2 model.num_layers_at_end_in_bf16=1",
    ),
    Refused(
        "fp8=delayed model.fp8_exclude=['*.self_attention.*','*.mlp.*']",
        "model.fp8=true model.fp8_exclude 4 fp8=none",
        legal="fp8=delayed model.fp8_exclude=['*.mlp.*']",
    ),
    Refused(
        "fp8=delayed model.fp8_exclude=['decoder.layers.4.*','*.linear_fc1']",
        "model.fp8_exclude 'decoder.layers.4.*' decoder.layers.0.self_attention.linear_qkv "
        "decoder.layers.3.mlp.linear_fc2",
        legal="fp8=delayed model.fp8_exclude=['decoder.layers.3.*','*.linear_fc1']",
    ),
    Refused(
        "fp8=delayed model.fp8_exclude=['*.fc1']",
        "model.fp8_exclude '*.fc1' decoder.layers.0.self_attention.linear_qkv",
        legal="fp8=delayed model.fp8_exclude=['*.linear_fc1']",
    ),
    Refused("fp8=delayed model.hidden_size=252 model.kv_channels=32", "model.hidden_size=252 256×252 16"),
    Refused("fp8=mxfp8 model.hidden_size=144 model.kv_channels=32", "model.hidden_size=144 256×144 32"),
    Refused("fp8=delayed model.num_query_groups=1 model.hidden_size=144", "model.hidden_size=144 216×144 16"),
    Refused(
        "fp8=delayed model.tensor_model_parallel_size=8 model.num_query_groups=8 "
        "model.num_attention_heads=8 model.hidden_size=144 model.kv_channels=16 "
        "model.ffn_hidden_size=null",
        "model.hidden_size=144 144×72 16",
    ),
    Refused("fp8=delayed model.kv_channels=34", "model.kv_channels=34 128×136 16"),
    Refused("fp8=delayed model.ffn_hidden_size=200", "model.ffn_hidden_size=200 128×200 16"),
    Refused(
        "fp8=delayed model.encoder_seq_length=100 model.micro_batch_size=2",
        "model.encoder_seq_length=100 model.micro_batch_size=2 200 16",
    ),
    Refused("fp8=delayed parallelism=tp2 model.ffn_hidden_size=400", "model.ffn_hidden_size=400 128×200 16"),
    Refused(
        "fp8=delayed parallelism=cp2 model.encoder_seq_length=104 model.micro_batch_size=1",
        "model.encoder_seq_length=104 model.micro_batch_size=1 52 16",
    ),
    Refused(
        "fp8=blockwise parallelism=tp2_sp model.encoder_seq_length=192 model.micro_batch_size=1",
        "model.encoder_seq_length=192 model.micro_batch_size=1 model.sequence_parallel=true 96 128",
    ),
    Refused(
        "fp8=blockwise parallelism=tp2_sp model.hidden_size=192",
        "model.hidden_size=192 model.fp8_recipe=blockwise model.sequence_parallel=true 128×128",
    ),
    Refused(
        f"fp8=tensorwise parallelism=pp2 {KEPT} model.num_layers_at_start_in_bf16=3",
        "model.num_layers_at_start_in_bf16=3 model.num_layers=4 model.pipeline_model_parallel_size=2",
    ),
    Refused(f"fp8=delayed parallelism=cp2 {EMULATE}", f"{EMULATE} model.context_parallel_size=2"),
]
# Refused before the rules.
UNREADABLE = [
    Refused(
        "++model.fp8_format=e5m2",
        "model.fp8_format model.fp8_hybrid=true model.fp8_e4m3=true",
        legal="fp8=delayed model.fp8_e4m3=true",
    ),
    Refused(
        "model.fp8=hybrid",
        "model.fp8='hybrid' model.fp8=true model.fp8_hybrid=true",
        legal="model.fp8=true model.fp8_hybrid=true",
    ),
    Refused(
        "model.fp8=true model.fp8_recipe=blokwise",
        "model.fp8_recipe='blokwise' delayed tensorwise blockwise mxfp8 null",
        legal="fp8=blockwise",
    ),
    Refused("++model.fp8_param_gather=true", "model.fp8_param_gather model.fp8_params", legal=f"fp8=delayed {PARAMS}"),
    Refused("++model.reduce_amax=false", "model.reduce_amax leave", legal="fp8=delayed"),
]


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.parametrize("row", WRONG, ids=str)
def test_a_wrong_fp8_input_is_refused_and_what_is_offered_passes(row):
    check_refused(row)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("row", UNREADABLE, ids=str)
def test_an_fp8_input_that_is_no_value_is_refused_before_anything_starts(row, capsys):
    assert main(row.command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    check_told(line.removeprefix("error: "), row.settings)
    assert broken_rules(row.legal.split()) == []


PRESETS = ("tiny", "gpt2_1_5b", "gpt3_1_3b", "llama3_8b", "qwen2_5_7b")


@pytest.mark.parametrize("recipe", [DELAYED, TENSORWISE, BLOCKWISE, MXFP8])
@pytest.mark.parametrize("model", PRESETS)
def test_every_preset_can_be_trained_in_every_recipe(recipe, model, broken_rules):
    stored = "model.fp8_params=false" if recipe == MXFP8 else PARAMS
    assert broken_rules(f"model={model}", recipe, stored) == []


@pytest.mark.parametrize("recipe", [DELAYED, BLOCKWISE])
@pytest.mark.parametrize("layout", ["dp", "pp2_vp2", "tp2_sp_pp2", "tp8_sp", "cp2"])
def test_every_layout_can_be_trained_per_tensor_and_in_blocks(recipe, layout, broken_rules):
    assert broken_rules("model=llama3_8b", recipe, f"parallelism={layout}", PARAMS, world_size=8) == []


def takes(config):
    """Whether FP8 products take all shapes, from the shapes themselves."""
    model, run = config.model, resolve(config)
    settings = run.fp8
    for linear in run.linears:
        if linear.precision != "fp8":
            continue
        sides = [linear.out_features, linear.in_features, linear.tokens]
        if any(side % settings.recipe.alignment for side in sides):
            return False
        if model.sequence_parallel and linear.kind in ("self_attention.linear_qkv", "mlp.linear_fc1"):
            cast = {"delayed": (8, 16), "tensorwise": (8, 16), "blockwise": (128, 128), "mxfp8": (32, 32)}
            rows, columns = cast[settings.recipe.name]
            if linear.local_tokens % rows or linear.in_features % columns:
                return False
    return True


@pytest.mark.parametrize("exclude", [[], ["*.linear_qkv"], ["*.self_attention.*"], ["*.linear_fc2"], ["*.mlp.*"]])
@pytest.mark.parametrize("recipe", ["delayed", "blockwise", "mxfp8"])
@pytest.mark.parametrize("layout", ["single", "tp2", "tp2_sp", "cp2"])
def test_shapes_are_refused_exactly_where_products_do_not_take_them(layout, recipe, exclude):
    """The rules reason in keys and steps; here every shape is looked at. What is offered instead is taken."""
    config = load_config([f"parallelism={layout}", f"fp8={recipe}"])
    base = config.model
    draw = random.Random(f"{layout} {recipe} {exclude}")
    refused = 0

    def problems_of(model):
        return list(fp8_shape_problems(resolve(replace(config, model=model))))

    for _ in range(80):
        tp = base.tensor_model_parallel_size
        heads = tp * draw.choice([1, 2, 3, 4, 8])
        model = replace(
            base,
            fp8_exclude=exclude,
            num_attention_heads=heads,
            num_query_groups=draw.choice([heads, tp]),
            hidden_size=heads * draw.choice([4, 8, 24, 32, 36, 64, 128]),
            kv_channels=draw.choice([None, None, 8, 12, 16, 64]),
            ffn_hidden_size=draw.choice([None, tp * 8, tp * 24, tp * 48, tp * 64]),
            activation=draw.choice([Activation.swiglu, Activation.gelu]),
            micro_batch_size=draw.choice([1, 2, 3, 4, 8]),
            encoder_seq_length=draw.choice([16, 24, 36, 64, 128, 256, 512]),
        )
        problems = problems_of(model)
        assert bool(problems) != takes(replace(config, model=model)), (model, problems)
        refused += bool(problems)
        for which in (0, -1):
            mended = model
            # A width may also make the MLP's; one round for each key.
            for _ in range(3):
                for problem in problems_of(mended):
                    key, values = re.fullmatch(r"model\.(\w+)=\d+: .*; use ((?:\d+ or )?\d+)", problem).groups()
                    mended = replace(mended, **{key: int(values.split(" or ")[which])})
            assert takes(replace(config, model=mended)), (model, problems)
    assert 8 < refused < 80
