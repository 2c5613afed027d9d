"""Wrong FP8 inputs are refused on a laptop, through the command line: each trap of the stack, its reason, the way out."""

# ruff: noqa: E501 -- a message stays on one line, so that it can be searched for.

import random
import re
from dataclasses import replace

import pytest

from gpt_pretrain.commands.train import main
from gpt_pretrain.config.choices import Activation
from gpt_pretrain.rules.fp8_shapes import fp8_shape_problems
from gpt_pretrain.rules.gate import load_config
from gpt_pretrain.spec.resolved import resolve
from tests.launching import REPOSITORY

DELAYED, TENSORWISE, BLOCKWISE, MXFP8 = "fp8=delayed", "fp8=tensorwise", "fp8=blockwise", "fp8=mxfp8"
EMULATE, PARAMS, ATTENTION = "model.fp8_emulate=true", "model.fp8_params=true", "model.fp8_dot_product_attention=true"
KEPT = "model.first_last_layers_bf16=true"
START, END = "model.num_layers_at_start_in_bf16", "model.num_layers_at_end_in_bf16"
TP2, TP2_SP, CP2, PP2 = "parallelism=tp2", "parallelism=tp2_sp", "parallelism=cp2", "parallelism=pp2"
TP8 = "model.tensor_model_parallel_size=8"

# Command line, the exact messages, a neighbour that is legal.
WRONG = {
    "a setting without FP8": (
        ["model.fp8_margin=1"],
        ["model.fp8_margin=1 has no effect with model.fp8=false; use model.fp8=true, or leave it out (fp8=none)"],
        ["model.fp8=true", "model.fp8_margin=1"],
    ),
    "a whole recipe without FP8": (
        [DELAYED, "model.fp8=false", PARAMS, "model.fp8_exclude=[a,b]"],
        [
            "model.fp8_recipe=delayed, model.fp8_hybrid=true, model.fp8_margin=0, model.fp8_amax_history_len=1024, model.fp8_amax_compute_algo=max, model.fp8_params=true, model.fp8_exclude=[a,b] have no effect with model.fp8=false; use model.fp8=true, or leave them out (fp8=none)"
        ],
        [DELAYED, PARAMS],
    ),
    "emulation of nothing": (
        [EMULATE],
        ["model.fp8_emulate=true has no effect with model.fp8=false; use model.fp8=true, or leave it out (fp8=none)"],
        [DELAYED, EMULATE],
    ),
    "statistics of nothing": (
        ["logging.fp8_statistics_interval=100"],
        [
            "logging.fp8_statistics_interval=100 has nothing to observe with model.fp8=false; use model.fp8=true, or null"
        ],
        [DELAYED, "logging.fp8_statistics_interval=100"],
    ),
    "a reset of nothing": (
        ["checkpoint.reset_fp8_state=true"],
        ["checkpoint.reset_fp8_state=true has nothing to reset with model.fp8=false; use false"],
        [DELAYED, "checkpoint.reset_fp8_state=true"],
    ),
    "a reset of scales that nobody keeps": (
        [BLOCKWISE, "checkpoint.reset_fp8_state=true"],
        [
            "checkpoint.reset_fp8_state=true has nothing to reset with model.fp8_recipe=blockwise: the scale of a block comes from the block itself; use false"
        ],
        [TENSORWISE, ATTENTION, "checkpoint.reset_fp8_state=true"],
    ),
    "statistics at no step": (
        [DELAYED, "logging.fp8_statistics_interval=0"],
        ["logging.fp8_statistics_interval=0 is too small; use 1 or more, or null for no statistics"],
        [DELAYED, "logging.fp8_statistics_interval=1"],
    ),
    "a share above all": (
        [DELAYED, "logging.fp8_saturation_threshold=1.5"],
        ["logging.fp8_saturation_threshold=1.5 is no share of a tensor; use above 0 up to 1"],
        [DELAYED, "logging.fp8_saturation_threshold=1"],
    ),
    "neither format": (
        ["model.fp8=true", "model.fp8_hybrid=false"],
        [
            "model.fp8_hybrid=false with model.fp8_e4m3=null leaves no FP8 format; use fp8_hybrid=true (E4M3 forward, E5M2 for gradients), or fp8_e4m3=true (E4M3 in both)"
        ],
        ["model.fp8=true", "model.fp8_hybrid=false", "model.fp8_e4m3=true"],
    ),
    "E5M2 forward": (
        ["++model.fp8_format=e5m2"],
        [
            "model.fp8_format is not a key: use model.fp8_hybrid=true (E4M3 forward, E5M2 for gradients) or model.fp8_e4m3=true (E4M3 in both); no library multiplies E5M2 in the forward pass"
        ],
        [DELAYED, "model.fp8_e4m3=true"],
    ),
    "a format for the switch": (
        ["model.fp8=hybrid"],
        ["model.fp8='hybrid' is neither true nor false; use model.fp8=true model.fp8_hybrid=true"],
        ["model.fp8=true", "model.fp8_hybrid=true"],
    ),
    "a format for the recipe": (
        ["model.fp8=true", "model.fp8_recipe=e5m2"],
        [
            "model.fp8_recipe='e5m2' is not one of delayed, tensorwise, blockwise, mxfp8 or null; no library multiplies E5M2 in the forward pass; model.fp8_hybrid=true has it for gradients"
        ],
        [TENSORWISE],
    ),
    "a bogus recipe": (
        ["model.fp8=true", "model.fp8_recipe=blokwise"],
        [
            "model.fp8_recipe='blokwise' is not one of delayed, tensorwise, blockwise, mxfp8 or null; did you mean blockwise?"
        ],
        [BLOCKWISE],
    ),
    "keys of other codes": (
        ["++model.fp8_param_gather=true", "++model.reduce_amax=false"],
        [
            "model.fp8_param_gather is not a key; did you mean model.fp8_params?",
            "model.reduce_amax is not a key: amaxes are always reduced over the ranks of a group, which would quantise with different scales otherwise; leave it out",
        ],
        [DELAYED, PARAMS],
    ),
    "a margin below none": (
        [DELAYED, "model.fp8_margin=-1"],
        [
            "model.fp8_margin=-1 is not between 0 and 14: scales leave 2^margin of headroom, less than none saturates the largest values, and more leaves E4M3 no precision; use 0"
        ],
        [DELAYED, "model.fp8_margin=14"],
    ),
    "no history": (
        [DELAYED, "model.fp8_amax_history_len=0"],
        ["model.fp8_amax_history_len=0 is too small; use 1 or more (1024 is Transformer Engine's own)"],
        [DELAYED, "model.fp8_amax_history_len=1"],
    ),
    "a history that no memory holds": (
        [DELAYED, "model.fp8_amax_history_len=100000000"],
        [
            "model.fp8_amax_history_len=100000000 is too long: each linear layer would keep 2,000,000,000 bytes of amaxes (4 for each of 5 tensors and each pass); use 1 to 65536 (1024 is Transformer Engine's own)"
        ],
        [DELAYED, "model.fp8_amax_history_len=65536"],
    ),
    "an interval that TE ignores": (
        [DELAYED, "model.fp8_interval=2"],
        [
            "model.fp8_interval=2 has no effect: Transformer Engine ignores it since 1.8 and computes new scales at every step; use 1, or null"
        ],
        [DELAYED, "model.fp8_interval=1"],
    ),
    "delayed scaling's keys elsewhere": (
        [TENSORWISE, "model.fp8_margin=0", "model.fp8_amax_history_len=16"],
        [
            "model.fp8_margin=0 has no effect with model.fp8_recipe=tensorwise: the scale of a tensor comes from the tensor itself; use null, or fp8=delayed",
            "model.fp8_amax_history_len=16 has no effect with model.fp8_recipe=tensorwise: the scale of a tensor comes from the tensor itself; use null, or fp8=delayed",
        ],
        [DELAYED, "model.fp8_margin=0", "model.fp8_amax_history_len=16"],
    ),
    "an interval under blockwise": (
        [BLOCKWISE, "model.fp8_interval=1"],
        [
            "model.fp8_interval=1 has no effect with model.fp8_recipe=blockwise: the scale of a block comes from the block itself; use null, or fp8=delayed"
        ],
        [BLOCKWISE],
    ),
    "an algorithm under mxfp8": (
        [MXFP8, "model.fp8_amax_compute_algo=max"],
        [
            "model.fp8_amax_compute_algo=max has no effect with model.fp8_recipe=mxfp8: the scale of 32 values comes from those values; use null, or fp8=delayed"
        ],
        [MXFP8],
    ),
    "weight gradients that TE leaves in FP8": (
        [DELAYED, "model.fp8_wgrad=false"],
        [
            "model.fp8_wgrad=false has no effect with model.fp8_recipe=delayed and model.fp8_emulate=false: it belongs to delayed alone, and Transformer Engine 2.12 drops it (override_linear_precision is gone); use null, or fp8=delayed with model.fp8_emulate=true"
        ],
        [DELAYED, EMULATE, "model.fp8_wgrad=false"],
    ),
    "weight gradients under another recipe": (
        [TENSORWISE, EMULATE, "model.fp8_wgrad=false"],
        [
            "model.fp8_wgrad=false has no effect with model.fp8_recipe=tensorwise and model.fp8_emulate=true: it belongs to delayed alone, and Transformer Engine 2.12 drops it (override_linear_precision is gone); use null, or fp8=delayed with model.fp8_emulate=true"
        ],
        [TENSORWISE, EMULATE, "model.fp8_wgrad=true"],
    ),
    "FP8 between projections and attention": (
        [DELAYED, ATTENTION, "model.fp8_multi_head_attention=true"],
        [
            "model.fp8_multi_head_attention=true has no effect: megatron-core 0.19 hands BF16 tensors between the projections and attention, whatever the recipe says; use false"
        ],
        [DELAYED, ATTENTION],
    ),
    "attention in blocks": (
        [BLOCKWISE, ATTENTION],
        [
            "model.fp8_dot_product_attention=true with model.fp8_recipe=blockwise: Transformer Engine's FP8 attention takes scales per tensor only; use false, or fp8=delayed or tensorwise"
        ],
        [TENSORWISE, ATTENTION],
    ),
    "attention recomputed without FP8": (
        [DELAYED, ATTENTION, "model.activations_checkpoint_granularity=selective"],
        [
            "model.activations_checkpoint_granularity=selective recomputes attention without FP8, and model.fp8_dot_product_attention=true; use granularity null or full, or fp8_dot_product_attention=false"
        ],
        [DELAYED, "model.activations_checkpoint_granularity=selective"],
    ),
    "attention that is not deterministic": (
        [DELAYED, ATTENTION, "trainer.deterministic=true"],
        [
            "model.fp8_dot_product_attention=true with trainer.deterministic=true: the only FP8 attention varies from run to run; use fp8_dot_product_attention=false, or deterministic=false"
        ],
        [DELAYED, "trainer.deterministic=true"],
    ),
    "attention emulated": (
        [DELAYED, EMULATE, ATTENTION],
        [
            "model.fp8_dot_product_attention=true with model.fp8_emulate=true: the linear layers are emulated, attention is not; use fp8_dot_product_attention=false"
        ],
        [DELAYED, EMULATE],
    ),
    "FP8 weights that nobody would write": (
        [DELAYED, PARAMS, "model.use_distributed_optimizer=false"],
        [
            "model.fp8_params=true with model.use_distributed_optimizer=false: only the distributed optimizer writes FP8 weights from their masters; use use_distributed_optimizer=null or true, or fp8_params=false"
        ],
        [DELAYED, PARAMS, "model.use_distributed_optimizer=true"],
    ),
    "FP8 weights under SGD": (
        [DELAYED, PARAMS, "model.optim.name=sgd"],
        [
            "model.fp8_params=true needs the distributed optimizer, and model.optim.name=sgd has no distributed form in megatron-core; use adam, or fp8_params=false"
        ],
        [DELAYED, "model.optim.name=sgd"],
    ),
    "FP8 weights emulated": (
        [TENSORWISE, EMULATE, PARAMS],
        [
            "model.fp8_params=true with model.fp8_emulate=true: emulated layers keep high-precision weights and quantise the same values at each product; use fp8_params=false"
        ],
        [TENSORWISE, PARAMS],
    ),
    "local layers, which ignore FP8": (
        [DELAYED, "model.transformer_engine=false"],
        [
            "model.fp8=true with model.transformer_engine=false: megatron-core's local layers know no FP8; use transformer_engine=null or true, or model.fp8_emulate=true"
        ],
        [DELAYED, EMULATE, "model.transformer_engine=false"],
    ),
    "TE layers, which need no emulation": (
        [DELAYED, EMULATE, "model.transformer_engine=true"],
        [
            "model.fp8_emulate=true with model.transformer_engine=true: emulated layers are megatron-core's local ones; use transformer_engine=null or false, or fp8_emulate=false"
        ],
        [DELAYED, "model.transformer_engine=true"],
    ),
    "local layers with weights that emulation has not": (
        [DELAYED, PARAMS, "model.transformer_engine=false"],
        [
            "model.fp8=true with model.transformer_engine=false: megatron-core's local layers know no FP8; use transformer_engine=null or true, or model.fp8_emulate=true with model.fp8_params=false"
        ],
        [DELAYED, EMULATE, "model.transformer_engine=false"],
    ),
    "FP8 around fp32": (
        [DELAYED, "trainer.precision=fp32"],
        [
            "model.fp8=true with trainer.precision=fp32: Transformer Engine's layers would multiply in TF32 what is not FP8; use auto or bf16, or model.fp8_emulate=true"
        ],
        [DELAYED, EMULATE, "trainer.precision=fp32"],
    ),
    "MXFP8 weights": (
        [MXFP8, "model.fp8_params=true"],
        [
            "model.fp8_params=true with model.fp8_recipe=mxfp8: megatron-core gathers these through the gradients' buffer, in BF16, which this application does not do; use fp8_params=false, or fp8=tensorwise"
        ],
        [TENSORWISE, "model.fp8_params=true"],
    ),
    "FP8 attention of split sequences": (
        [DELAYED, ATTENTION, CP2],
        [
            "model.fp8_dot_product_attention=true with model.context_parallel_size=2: that it runs in FP8 cannot be proven there yet; use fp8_dot_product_attention=false, or context_parallel_size=1"
        ],
        [DELAYED, ATTENTION],
    ),
    "FP8 attention beside layers kept out": (
        [TENSORWISE, ATTENTION, KEPT],
        [
            "model.fp8_dot_product_attention=true with model.first_last_layers_bf16=true: whose attention runs in FP8 cannot be proven there yet; use fp8_dot_product_attention=false, or fp8_exclude for the layers' products"
        ],
        [TENSORWISE, KEPT],
    ),
    "emulation around apex's weight gradients": (
        [DELAYED, EMULATE, "model.gradient_accumulation_fusion=true"],
        [
            "model.fp8_emulate=true with model.gradient_accumulation_fusion=true: emulated layers compute weight gradients themselves; use gradient_accumulation_fusion=null or false"
        ],
        [DELAYED, EMULATE, "model.gradient_accumulation_fusion=false"],
    ),
    "layers kept by a count alone": (
        [TENSORWISE, f"{START}=1"],
        [
            "model.num_layers_at_start_in_bf16=1 has no effect with model.first_last_layers_bf16=false; use first_last_layers_bf16=true, or null"
        ],
        [TENSORWISE, KEPT, f"{START}=1"],
    ),
    "layers kept under delayed scaling": (
        [DELAYED, KEPT],
        [
            'model.first_last_layers_bf16=true with model.fp8_recipe=delayed: amaxes are reduced once for all layers, and megatron-core refuses it; use fp8_exclude=["decoder.layers.0.*",…], or fp8=tensorwise'
        ],
        [DELAYED, 'model.fp8_exclude=["decoder.layers.0.*"]'],
    ),
    "more layers kept than there are": (
        [TENSORWISE, KEPT, f"{END}=5"],
        [
            "model.num_layers_at_end_in_bf16=5 is not between 0 and the layers of a pipeline stage (model.num_layers=4 / model.pipeline_model_parallel_size=1); use 0 to 4"
        ],
        [TENSORWISE, KEPT, f"{END}=2"],
    ),
    "no layers kept": (
        [TENSORWISE, KEPT, f"{START}=0", f"{END}=0"],
        [
            "model.first_last_layers_bf16=true has no effect with 0 layers at the start and 0 at the end; use false, or 1 or more for either"
        ],
        [TENSORWISE, KEPT, f"{START}=0"],
    ),
    "all layers kept": (
        [TENSORWISE, KEPT, f"{START}=2", f"{END}=2"],
        [
            "model.fp8=true computes nothing in FP8: model.first_last_layers_bf16 keeps out every linear layer of all 4 layers; leave some in, or use model.fp8=false"
        ],
        [TENSORWISE, KEPT, f"{START}=2", f"{END}=1"],
    ),
    "everything excluded": (
        [DELAYED, "model.fp8_exclude=['*.self_attention.*','*.mlp.*']"],
        [
            "model.fp8=true computes nothing in FP8: model.fp8_exclude keeps out every linear layer of all 4 layers; leave some in, or use model.fp8=false"
        ],
        [DELAYED, "model.fp8_exclude=['*.mlp.*']"],
    ),
    "a pattern of nothing": (
        [DELAYED, "model.fp8_exclude=['decoder.layers.4.*','*.fc1']"],
        [
            "model.fp8_exclude: 'decoder.layers.4.*' matches no linear layer; they are named decoder.layers.0.self_attention.linear_qkv … decoder.layers.3.mlp.linear_fc2, and * stands for anything",
            "model.fp8_exclude: '*.fc1' matches no linear layer; they are named decoder.layers.0.self_attention.linear_qkv … decoder.layers.3.mlp.linear_fc2, and * stands for anything",
        ],
        [DELAYED, "model.fp8_exclude=['decoder.layers.3.*','*.linear_fc1']"],
    ),
    "a pattern where there are no layers": (
        [DELAYED, "model.num_layers=0", "model.fp8_exclude=['*']"],
        ["model.num_layers=0 is not positive; use 1 or more"],
        [DELAYED, "model.num_layers=1"],
    ),
    "a width": (
        [DELAYED, "model.hidden_size=252", "model.kv_channels=32"],
        [
            "model.hidden_size=252: the weight of self_attention.linear_qkv is 256×252, and FP8 products take multiples of 16; use 240 or 256"
        ],
        [DELAYED, "model.hidden_size=240", "model.kv_channels=32"],
    ),
    "a width for MXFP8": (
        [MXFP8, "model.hidden_size=144", "model.kv_channels=32"],
        [
            "model.hidden_size=144: the weight of self_attention.linear_qkv is 256×144, and FP8 products take multiples of 32; use 128 or 160"
        ],
        [MXFP8, "model.hidden_size=160", "model.kv_channels=32"],
    ),
    "heads that follow from a width": (
        [DELAYED, "model.num_query_groups=1", "model.hidden_size=144"],
        [
            "model.hidden_size=144: the weight of self_attention.linear_qkv is 216×144, and FP8 products take multiples of 16; use 128 or 160, or model.kv_channels=40"
        ],
        [DELAYED, "model.num_query_groups=1", "model.hidden_size=144", "model.kv_channels=40"],
    ),
    "an MLP that follows from a width": (
        [
            DELAYED,
            TP8,
            "model.num_query_groups=8",
            "model.num_attention_heads=8",
            "model.hidden_size=144",
            "model.kv_channels=16",
            "model.ffn_hidden_size=null",
        ],
        [
            "model.hidden_size=144: the weight of mlp.linear_fc2 is 144×72 on each tensor parallel rank, and FP8 products take multiples of 16; use 128 or 160, or model.ffn_hidden_size=640"
        ],
        [
            DELAYED,
            TP8,
            "model.num_query_groups=8",
            "model.num_attention_heads=8",
            "model.hidden_size=144",
            "model.kv_channels=16",
            "model.ffn_hidden_size=640",
        ],
    ),
    "a head": (
        [DELAYED, "model.kv_channels=34"],
        [
            "model.kv_channels=34: the weight of self_attention.linear_proj is 128×136, and FP8 products take multiples of 16; use 32 or 36"
        ],
        [DELAYED, "model.kv_channels=36"],
    ),
    "an MLP": (
        [DELAYED, "model.ffn_hidden_size=200"],
        [
            "model.ffn_hidden_size=200: the weight of mlp.linear_fc2 is 128×200, and FP8 products take multiples of 16; use 192 or 208"
        ],
        [DELAYED, "model.ffn_hidden_size=200", "model.fp8_exclude=['*.mlp.*']"],
    ),
    "tokens": (
        [DELAYED, "model.encoder_seq_length=100", "model.micro_batch_size=2"],
        [
            "model.encoder_seq_length=100: with model.micro_batch_size=2 a rank has 200 tokens, and FP8 products take multiples of 16; use 96 or 104, or model.micro_batch_size=4"
        ],
        [DELAYED, "model.encoder_seq_length=100", "model.micro_batch_size=4"],
    ),
    "an MLP over tensor parallel ranks": (
        [DELAYED, TP2, "model.ffn_hidden_size=400"],
        [
            "model.ffn_hidden_size=400: the weight of mlp.linear_fc2 is 128×200 on each tensor parallel rank, and FP8 products take multiples of 16; use 384 or 416"
        ],
        [DELAYED, TP2, "model.ffn_hidden_size=416"],
    ),
    "tokens over context parallel ranks": (
        [DELAYED, CP2, "model.encoder_seq_length=104", "model.micro_batch_size=1"],
        [
            "model.encoder_seq_length=104: with model.micro_batch_size=1 a rank has 52 tokens, and FP8 products take multiples of 16; use 96 or 128, or model.micro_batch_size=4"
        ],
        [DELAYED, CP2, "model.encoder_seq_length=128", "model.micro_batch_size=1"],
    ),
    "tokens gathered in blocks": (
        [BLOCKWISE, TP2_SP, "model.encoder_seq_length=192", "model.micro_batch_size=1"],
        [
            "model.encoder_seq_length=192: with model.micro_batch_size=1 a rank has 96 tokens, and what a rank casts before it is gathered (model.sequence_parallel=true) must be a multiple of 128; use 256, or model.micro_batch_size=4"
        ],
        [BLOCKWISE, TP2, "model.encoder_seq_length=192", "model.micro_batch_size=1"],
    ),
    "a width gathered in blocks": (
        [BLOCKWISE, TP2_SP, "model.hidden_size=192"],
        [
            "model.hidden_size=192: model.fp8_recipe=blockwise with model.sequence_parallel=true gathers blocks of 128×128; use 128 or 256"
        ],
        [BLOCKWISE, TP2, "model.hidden_size=192"],
    ),
    "layers kept beyond a stage": (
        [TENSORWISE, PP2, KEPT, f"{START}=3"],
        [
            "model.num_layers_at_start_in_bf16=3 is not between 0 and the layers of a pipeline stage (model.num_layers=4 / model.pipeline_model_parallel_size=2); use 0 to 2"
        ],
        [TENSORWISE, PP2, KEPT, f"{START}=2"],
    ),
    "sequences split without TE": (
        [DELAYED, CP2, EMULATE],
        [
            "model.fp8_emulate=true with model.context_parallel_size=2: only Transformer Engine's attention splits sequences, and emulated layers go without it; use context_parallel_size=1"
        ],
        [DELAYED, CP2],
    ),
}
WORLD_SIZES = {TP2: 2, TP2_SP: 2, CP2: 2, PP2: 2, TP8: 8}


def world_size(overrides):
    return max(WORLD_SIZES.get(override, 1) for override in overrides)


@pytest.fixture(autouse=True)
def at_the_repository(monkeypatch):
    monkeypatch.chdir(REPOSITORY)


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_fp8_input_is_refused_before_anything_starts(case, capsys, monkeypatch):
    arguments, messages, _ = WRONG[case]
    ranks = world_size(arguments)
    if ranks > 1:
        for name, value in {"RANK": 0, "WORLD_SIZE": ranks, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": ranks}.items():
            monkeypatch.setenv(name, str(value))
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "".join(f"error: {message}\n" for message in messages)


@pytest.mark.parametrize("case", WRONG)
def test_the_legal_neighbour_of_a_wrong_fp8_input_passes(case, broken_rules):
    _, _, legal = WRONG[case]
    assert broken_rules(*legal, "model.global_batch_size=64", world_size=world_size(legal)) == []


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
    for linear in run.linears():
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
                    key, values = re.fullmatch(
                        r"model\.(\w+)=\d+: .*; use ((?:\d+ or )?\d+)(?:, or .*)?", problem
                    ).groups()
                    mended = replace(mended, **{key: int(values.split(" or ")[which])})
            assert takes(replace(config, model=mended)), (model, problems)
    assert 8 < refused < 80
