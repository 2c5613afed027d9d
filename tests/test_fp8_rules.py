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
from tests.refusals import Refused, check_legal, check_offered, check_told, processes

DELAYED, TENSORWISE, BLOCKWISE, MXFP8 = "fp8=delayed", "fp8=tensorwise", "fp8=blockwise", "fp8=mxfp8"
ATTENTION = "model.fp8_dot_product_attention=true"
KEPT = "model.first_last_layers_bf16=true"
EMULATE = "model.fp8_emulate=true"
PARAMS = "model.fp8_params=true"

WRONG = {
    "a setting without FP8": Refused(
        "model.fp8_margin=1", told="model.fp8_margin=1 model.fp8=false", offers="model.fp8=true | ~model.fp8_margin"
    ),
    "a whole recipe without FP8": Refused(
        f"fp8=delayed model.fp8=false {PARAMS} model.fp8_exclude=[a,b]",
        told="model.fp8_recipe=delayed model.fp8_hybrid=true model.fp8_margin=0 "
        f"model.fp8_amax_history_len=1024 model.fp8_amax_compute_algo=max {PARAMS} "
        "model.fp8_exclude=[a,b] model.fp8=false",
        legal=f"fp8=delayed {PARAMS}",
    ),
    "emulation of nothing": Refused(
        EMULATE, told=f"{EMULATE} model.fp8=false", offers="model.fp8=true | ~model.fp8_emulate"
    ),
    "statistics of nothing": Refused(
        "logging.fp8_statistics_interval=100",
        told="logging.fp8_statistics_interval=100 model.fp8=false",
        offers="model.fp8=true | logging.fp8_statistics_interval=null",
    ),
    "a proof at no step": Refused(
        "fp8=delayed logging.fp8_proof_interval=0",
        told="logging.fp8_proof_interval=0",
        offers="logging.fp8_proof_interval=1,null",
    ),
    "statistics at no step": Refused(
        "fp8=delayed logging.fp8_statistics_interval=0",
        told="logging.fp8_statistics_interval=0",
        offers="logging.fp8_statistics_interval=1,null",
    ),
    "a share above all": Refused(
        "fp8=delayed logging.fp8_saturation_threshold=1.5",
        told="logging.fp8_saturation_threshold=1.5",
        offers="logging.fp8_saturation_threshold=1",
    ),
    "neither format": Refused(
        "model.fp8=true model.fp8_hybrid=false",
        told="model.fp8_hybrid=false model.fp8_e4m3=null",
        offers="model.fp8_hybrid=true | model.fp8_e4m3=true",
    ),
    "a margin below none": Refused(
        "fp8=delayed model.fp8_margin=-1",
        told="model.fp8_margin=-1 14",
        offers="model.fp8_margin=0",
        legal="fp8=delayed model.fp8_margin=14",
    ),
    "no history": Refused(
        "fp8=delayed model.fp8_amax_history_len=0",
        told="model.fp8_amax_history_len=0 1024",
        offers="model.fp8_amax_history_len=1",
    ),
    "a history that no memory holds": Refused(
        "fp8=delayed model.fp8_amax_history_len=100000000",
        told="model.fp8_amax_history_len=100000000 2,000,000,000 1024",
        offers="model.fp8_amax_history_len=1,65536",
    ),
    "an interval that TE ignores": Refused(
        "fp8=delayed model.fp8_interval=2", told="model.fp8_interval=2 1.8", offers="model.fp8_interval=1,null"
    ),
    "a history of which the newest amax counts": Refused(
        "fp8=delayed model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=most_recent",
        told="model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=most_recent",
        offers="model.fp8_amax_history_len=null | model.fp8_amax_compute_algo=max",
    ),
    "delayed scaling's keys elsewhere": Refused(
        "fp8=tensorwise model.fp8_margin=0 model.fp8_amax_history_len=16",
        told="model.fp8_margin=0 model.fp8_amax_history_len=16 model.fp8_recipe=tensorwise",
        offers="model.fp8_margin=null model.fp8_amax_history_len=null | fp8=delayed",
    ),
    "an interval under blockwise": Refused(
        "fp8=blockwise model.fp8_interval=1",
        told="model.fp8_interval=1 model.fp8_recipe=blockwise",
        offers="model.fp8_interval=null | fp8=delayed",
    ),
    "an algorithm under mxfp8": Refused(
        "fp8=mxfp8 model.fp8_amax_compute_algo=max",
        told="model.fp8_amax_compute_algo=max model.fp8_recipe=mxfp8",
        offers="model.fp8_amax_compute_algo=null | fp8=delayed",
    ),
    "weight gradients that TE leaves in FP8": Refused(
        "fp8=delayed model.fp8_wgrad=false",
        told="model.fp8_wgrad=false model.fp8_emulate=false override_linear_precision",
        offers=f"model.fp8_wgrad=null | fp8=delayed {EMULATE}",
    ),
    "weight gradients under another recipe": Refused(
        f"fp8=tensorwise {EMULATE} model.fp8_wgrad=false",
        told="model.fp8_wgrad=false model.fp8_recipe=tensorwise delayed",
        offers=f"model.fp8_wgrad=null | fp8=delayed {EMULATE}",
        legal=f"fp8=tensorwise {EMULATE} model.fp8_wgrad=true",
    ),
    "attention in blocks": Refused(
        f"fp8=blockwise {ATTENTION}",
        told=f"{ATTENTION} model.fp8_recipe=blockwise",
        offers="model.fp8_dot_product_attention=false | fp8=delayed,tensorwise",
    ),
    "attention recomputed without FP8": Refused(
        f"fp8=delayed {ATTENTION} model.activations_checkpoint_granularity=selective",
        told=f"{ATTENTION} model.activations_checkpoint_granularity=selective",
        offers="model.activations_checkpoint_granularity=null | model.fp8_dot_product_attention=false",
    ),
    "attention that is not deterministic": Refused(
        f"fp8=delayed {ATTENTION} trainer.deterministic=true",
        told=f"{ATTENTION} trainer.deterministic=true",
        offers="model.fp8_dot_product_attention=false | trainer.deterministic=false",
    ),
    "attention emulated": Refused(
        f"fp8=delayed {EMULATE} {ATTENTION}",
        told=f"{ATTENTION} {EMULATE}",
        offers="model.fp8_dot_product_attention=false",
    ),
    "FP8 weights that nobody would write": Refused(
        f"fp8=delayed {PARAMS} model.use_distributed_optimizer=false",
        told=f"{PARAMS} model.use_distributed_optimizer=false",
        offers="model.use_distributed_optimizer=null,true | model.fp8_params=false",
    ),
    "FP8 weights under SGD": Refused(
        f"fp8=delayed {PARAMS} model.optim.name=sgd",
        told=f"{PARAMS} model.optim.name=sgd",
        offers="model.optim.name=adam | model.fp8_params=false",
    ),
    "FP8 weights emulated": Refused(
        f"fp8=tensorwise {EMULATE} {PARAMS}",
        told=f"{PARAMS} {EMULATE}",
        offers="model.fp8_params=false",
        legal=f"fp8=tensorwise {PARAMS}",
    ),
    "local layers, which ignore FP8": Refused(
        "fp8=delayed model.transformer_engine=false",
        told="model.fp8=true model.transformer_engine=false",
        offers=f"model.transformer_engine=null,true | {EMULATE}",
    ),
    "TE layers, which need no emulation": Refused(
        f"fp8=delayed {EMULATE} model.transformer_engine=true",
        told=f"{EMULATE} model.transformer_engine=true",
        offers="model.transformer_engine=null,false | model.fp8_emulate=false",
    ),
    "local layers with weights that emulation has not": Refused(
        f"fp8=delayed {PARAMS} model.transformer_engine=false",
        told="model.fp8=true model.transformer_engine=false",
        offers=f"model.transformer_engine=null,true | {EMULATE} model.fp8_params=false",
    ),
    "FP8 around fp32": Refused(
        "fp8=delayed trainer.precision=fp32",
        told="model.fp8=true trainer.precision=fp32",
        offers=f"trainer.precision=auto,bf16 | {EMULATE}",
    ),
    "MXFP8 weights": Refused(
        f"fp8=mxfp8 {PARAMS}",
        told=f"{PARAMS} model.fp8_recipe=mxfp8",
        offers="model.fp8_params=false | fp8=delayed,tensorwise,blockwise",
    ),
    "FP8 attention of split sequences": Refused(
        f"fp8=delayed {ATTENTION} parallelism=cp2",
        told=f"{ATTENTION} model.context_parallel_size=2",
        offers="model.fp8_dot_product_attention=false | model.context_parallel_size=1",
    ),
    "FP8 attention beside layers kept out": Refused(
        f"fp8=tensorwise {ATTENTION} {KEPT}",
        told=f"{ATTENTION} {KEPT} fp8_exclude",
        offers="model.fp8_dot_product_attention=false",
    ),
    "layers kept by a count alone": Refused(
        "fp8=tensorwise model.num_layers_at_start_in_bf16=1",
        told="model.num_layers_at_start_in_bf16=1 model.first_last_layers_bf16=false",
        offers=f"{KEPT} | model.num_layers_at_start_in_bf16=null",
    ),
    "layers kept under delayed scaling": Refused(
        f"fp8=delayed {KEPT}",
        told=f"{KEPT} model.fp8_recipe=delayed fp8_exclude",
        offers="fp8=tensorwise,blockwise,mxfp8",
        legal='fp8=delayed model.fp8_exclude=["decoder.layers.0.*"]',
    ),
    "more layers kept than there are": Refused(
        f"fp8=tensorwise {KEPT} model.num_layers_at_end_in_bf16=5",
        told="model.num_layers_at_end_in_bf16=5 model.num_layers=4 model.pipeline_model_parallel_size=1",
        offers="model.num_layers_at_end_in_bf16=0",
        legal=f"fp8=tensorwise {KEPT} model.num_layers_at_end_in_bf16=2",
    ),
    "no layers kept": Refused(
        f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=0 model.num_layers_at_end_in_bf16=0",
        told=f"{KEPT} 0 1",
        legal=f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=0",
    ),
    "all layers kept": Refused(
        f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=2 model.num_layers_at_end_in_bf16=2",
        told="model.fp8=true model.first_last_layers_bf16 4 fp8=none",
        legal=f"fp8=tensorwise {KEPT} model.num_layers_at_start_in_bf16=2 model.num_layers_at_end_in_bf16=1",
    ),
    "everything excluded": Refused(
        "fp8=delayed model.fp8_exclude=['*.self_attention.*','*.mlp.*']",
        told="model.fp8=true model.fp8_exclude 4 fp8=none",
        legal="fp8=delayed model.fp8_exclude=['*.mlp.*']",
    ),
    "a pattern of nothing": Refused(
        "fp8=delayed model.fp8_exclude=['decoder.layers.4.*','*.linear_fc1']",
        told="model.fp8_exclude 'decoder.layers.4.*' decoder.layers.0.self_attention.linear_qkv "
        "decoder.layers.3.mlp.linear_fc2",
        legal="fp8=delayed model.fp8_exclude=['decoder.layers.3.*','*.linear_fc1']",
    ),
    "a pattern of no name": Refused(
        "fp8=delayed model.fp8_exclude=['*.fc1']",
        told="model.fp8_exclude '*.fc1' decoder.layers.0.self_attention.linear_qkv",
        legal="fp8=delayed model.fp8_exclude=['*.linear_fc1']",
    ),
    "a pattern of layers that are out already": Refused(
        f"fp8=tensorwise {KEPT} model.fp8_exclude=['*.linear_fc1','decoder.layers.3.*']",
        told=f"model.fp8_exclude 'decoder.layers.3.*' {KEPT} decoder.layers.3.self_attention.linear_qkv 3",
        offers="model.first_last_layers_bf16=false",
        legal=f"fp8=tensorwise {KEPT} model.fp8_exclude=['*.linear_fc1','decoder.layers.2.*']",
    ),
    "a pattern where there are no layers": Refused(
        "fp8=delayed model.num_layers=0 model.fp8_exclude=['*']",
        told="model.num_layers=0",
        legal="fp8=delayed model.num_layers=1",
    ),
    "a width": Refused(
        "fp8=delayed model.hidden_size=252 model.kv_channels=32",
        told="model.hidden_size=252 256×252 16",
        offers="model.hidden_size=240,256",
    ),
    "a width for MXFP8": Refused(
        "fp8=mxfp8 model.hidden_size=144 model.kv_channels=32",
        told="model.hidden_size=144 256×144 32",
        offers="model.hidden_size=128,160",
    ),
    "heads that follow from a width": Refused(
        "fp8=delayed model.num_query_groups=1 model.hidden_size=144",
        told="model.hidden_size=144 216×144 16",
        offers="model.hidden_size=128,160",
    ),
    "an MLP that follows from a width": Refused(
        "fp8=delayed model.tensor_model_parallel_size=8 model.num_query_groups=8 "
        "model.num_attention_heads=8 model.hidden_size=144 model.kv_channels=16 "
        "model.ffn_hidden_size=null",
        told="model.hidden_size=144 144×72 16",
        offers="model.hidden_size=128,160",
    ),
    "a head": Refused(
        "fp8=delayed model.kv_channels=34", told="model.kv_channels=34 128×136 16", offers="model.kv_channels=32,36"
    ),
    "an MLP": Refused(
        "fp8=delayed model.ffn_hidden_size=200",
        told="model.ffn_hidden_size=200 128×200 16",
        offers="model.ffn_hidden_size=192,208",
        legal="fp8=delayed model.ffn_hidden_size=200 model.fp8_exclude=['*.mlp.*']",
    ),
    "tokens": Refused(
        "fp8=delayed model.encoder_seq_length=100 model.micro_batch_size=2",
        told="model.encoder_seq_length=100 model.micro_batch_size=2 200 16",
        offers="model.encoder_seq_length=96,104",
    ),
    "an MLP over tensor parallel ranks": Refused(
        "fp8=delayed parallelism=tp2 model.ffn_hidden_size=400",
        told="model.ffn_hidden_size=400 128×200 16",
        offers="model.ffn_hidden_size=384,416",
    ),
    "tokens over context parallel ranks": Refused(
        "fp8=delayed parallelism=cp2 model.encoder_seq_length=104 model.micro_batch_size=1",
        told="model.encoder_seq_length=104 model.micro_batch_size=1 52 16",
        offers="model.encoder_seq_length=96,128",
    ),
    "tokens gathered in blocks": Refused(
        "fp8=blockwise parallelism=tp2_sp model.encoder_seq_length=192 model.micro_batch_size=1",
        told="model.encoder_seq_length=192 model.micro_batch_size=1 model.sequence_parallel=true 96 128",
        offers="model.encoder_seq_length=256",
        legal="fp8=blockwise parallelism=tp2 model.encoder_seq_length=192 model.micro_batch_size=1",
    ),
    "a width gathered in blocks": Refused(
        "fp8=blockwise parallelism=tp2_sp model.hidden_size=192",
        told="model.hidden_size=192 model.fp8_recipe=blockwise model.sequence_parallel=true 128×128",
        offers="model.hidden_size=128,256",
        legal="fp8=blockwise parallelism=tp2 model.hidden_size=192",
    ),
    "layers kept beyond a stage": Refused(
        f"fp8=tensorwise parallelism=pp2 {KEPT} model.num_layers_at_start_in_bf16=3",
        told="model.num_layers_at_start_in_bf16=3 model.num_layers=4 model.pipeline_model_parallel_size=2",
        offers="model.num_layers_at_start_in_bf16=0,2",
    ),
    "sequences split without TE": Refused(
        f"fp8=delayed parallelism=cp2 {EMULATE}",
        told=f"{EMULATE} model.context_parallel_size=2",
        offers="model.context_parallel_size=1",
        legal="fp8=delayed parallelism=cp2",
    ),
}
# Its way out uncovers another mistake.
TWO_MISTAKES = ("a whole recipe without FP8", "a pattern where there are no layers")
# Refused before the rules.
UNREADABLE = {
    "E5M2 forward": Refused(
        "++model.fp8_format=e5m2",
        told="model.fp8_format model.fp8_hybrid=true model.fp8_e4m3=true",
        legal="fp8=delayed model.fp8_e4m3=true",
    ),
    "a format for the switch": Refused(
        "model.fp8=hybrid",
        told="model.fp8='hybrid' model.fp8=true model.fp8_hybrid=true",
        legal="model.fp8=true model.fp8_hybrid=true",
    ),
    "a bogus recipe": Refused(
        "model.fp8=true model.fp8_recipe=blokwise",
        told="model.fp8_recipe='blokwise' delayed tensorwise blockwise mxfp8 null",
        legal="fp8=blockwise",
    ),
    "a key of megatron-core": Refused(
        "++model.fp8_param_gather=true", told="model.fp8_param_gather model.fp8_params", legal=f"fp8=delayed {PARAMS}"
    ),
    "a key of Transformer Engine": Refused(
        "++model.reduce_amax=false", told="model.reduce_amax leave", legal="fp8=delayed"
    ),
}


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("case", {**WRONG, **UNREADABLE})
def test_a_wrong_fp8_input_is_refused_before_anything_starts(case, capsys, monkeypatch):
    row = {**WRONG, **UNREADABLE}[case]
    ranks = 1 if case in UNREADABLE else processes(row.command)
    if ranks > 1:
        for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, str(value))
    assert main(row.command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    message = line.removeprefix("error: ")
    check_told(message, row.settings, row.ways)
    if case not in (*UNREADABLE, *TWO_MISTAKES):
        check_offered(message, row)


@pytest.mark.parametrize("case", {**WRONG, **UNREADABLE})
def test_what_is_offered_instead_of_a_wrong_fp8_input_passes(case):
    check_legal({**WRONG, **UNREADABLE}[case])


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
