"""Layers too small to gain by FP8 (`model.fp8_exclude=auto`): which they are, and that all know of the same."""

import io

import pytest
import torch
from rich.console import Console
from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

from gpt_pretrain.config.load import config_to_yaml, load_saved_config
from gpt_pretrain.config.recipes import RECIPES
from gpt_pretrain.fp8.proof import ProofError
from gpt_pretrain.plan.document import print_plan
from gpt_pretrain.run.products import resolve
from gpt_pretrain.training.header import describe_fp8
from tests import sabotages
from tests.emulated_training import emulate, emulated_training
from tests.planning import plan_of
from tests.platforms import spec_of
from tests.refusals import compose_quickly
from tests.runs import run_small

AUTO = "model.fp8_exclude=auto"
TENSORWISE = "fp8=torchao_tensorwise"
# On one rank the first projection of the MLP has 2·1040 rows and 64 columns, which tensorwise gains by.
WIDE = ("model.hidden_size=64", "model.ffn_hidden_size=1040")
OUT = ["self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc2"]


@pytest.mark.parametrize("name", ["tensorwise", "rowwise"])
def test_a_weight_is_small_where_torchaos_filter_says_so(name):
    recipe, is_large = RECIPES[f"torchao_{name}"], _auto_filter_for_recipe(name, [])
    sizes = sorted({size + step for size in (1024, 2048, 4096, 8192) for step in (-16, 0, 16)})
    for rows in sizes:
        for columns in sizes:
            weight = torch.nn.Linear(columns, rows, device="meta")
            assert recipe.is_small(rows, columns) == (not is_large(weight, "layer")), (rows, columns)


def test_torchao_has_no_filter_for_the_recipes_that_refuse_it():
    with pytest.raises(NotImplementedError):
        _auto_filter_for_recipe("rowwise_with_gw_hp", [])
    assert [preset for preset, recipe in RECIPES.items() if recipe.small] == [TENSORWISE[4:], "torchao_rowwise"]


# Llama 3 8B: 6144×4096, 4096×4096, 28672×4096 and 4096×14336 on one rank; rows of the first and third and columns of
# the others are divided by TP.
@pytest.mark.parametrize(
    ("recipe", "tp", "out"),
    [
        ("tensorwise", 1, []),
        ("tensorwise", 4, []),
        # 768×4096 has few rows and no more than 4096 columns; 4096×512 has many rows.
        ("tensorwise", 8, ["linear_qkv"]),
        ("rowwise", 1, []),
        # 3072×4096 has enough columns; 4096×2048 has not.
        ("rowwise", 2, ["linear_proj"]),
        # 1536 rows, and 1024 columns; 4096×3584.
        ("rowwise", 4, ["linear_qkv", "linear_proj"]),
        # 4096×1792.
        ("rowwise", 8, ["linear_qkv", "linear_proj", "linear_fc2"]),
    ],
)
def test_sizes_are_those_of_a_ranks_weight(recipe, tp, out):
    overrides = [f"fp8=torchao_{recipe}", "model=llama3_8b", f"model.tensor_model_parallel_size={tp}"]
    run = resolve(compose_quickly([*overrides, "model.num_layers=2", AUTO]))
    found = [linear.module for linear in run.kept_out]
    assert found == [name for name in (x.module for x in run.linears) if name.rpartition(".")[2] in out]
    assert {linear.reason for linear in run.kept_out} <= {"too small to gain (model.fp8_exclude=auto)"}


def test_patterns_stand_beside_it_and_a_saved_run_says_the_same(tmp_path):
    command = [TENSORWISE, *WIDE, "model.num_layers=2", "model.fp8_exclude=[auto,'decoder.layers.1.mlp.*']"]
    config = compose_quickly(command)
    reasons = {linear.module: linear.reason for linear in resolve(config).kept_out}
    assert reasons["decoder.layers.1.mlp.linear_fc1"] == "model.fp8_exclude"
    assert len(reasons) == 7
    for written, expected in ((config, config), (compose_quickly([TENSORWISE, *WIDE, AUTO]), None)):
        path = tmp_path / "config.yaml"
        path.write_text(config_to_yaml(written))
        assert load_saved_config(path) == (expected or written)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ((*WIDE, AUTO), ["6 linear", "self_attention.linear_qkv 128×64", "mlp.linear_fc2 64×1040", "too small", AUTO]),
        ((*WIDE, "model.hidden_size=8192", AUTO), ["no linear layer too small", AUTO]),
    ],
)
def test_header_and_plan_name_what_is_left_out_and_why(overrides, told):
    overrides = (TENSORWISE, "model.num_layers=2", *overrides)
    output = io.StringIO()
    plan = plan_of(*overrides)
    # Wide enough that nothing is broken over lines.
    print_plan(plan, Console(file=output, width=400, highlight=False))
    for text in (describe_fp8(spec_of(compose_quickly(list(overrides)))), " ".join(output.getvalue().split())):
        assert [word for word in told if word not in text.replace("│", "").replace("  ", "")] == []


@pytest.mark.parametrize(
    ("built", "planned", "what"),
    [((), (AUTO,), "bfloat16 × bfloat16"), ((AUTO,), (), "e4m3 × e4m3")],
    ids=["in FP8 against the plan", "left out against the plan"],
)
def test_the_proof_names_layers_that_are_not_where_the_plan_has_them(built, planned, what):
    bf16 = ("trainer.precision=bf16", *WIDE)
    with emulated_training(*emulate("torchao_tensorwise", *bf16, *built)) as training:
        sabotages.prove(training, step=1)
        with pytest.raises(ProofError) as error:
            sabotages.prove(training, step=2, planned=emulate("torchao_tensorwise", *bf16, *planned))
    differences = [each for each in error.value.differences if each.what == "forward"]
    assert {each.module for each in differences} == {
        f"decoder.layers.{layer}.{kind}" for layer in (0, 1) for kind in OUT
    }
    assert {each.planned for each in differences} == {what}


@pytest.mark.parametrize("tp", [1, 2])
def test_a_run_proves_which_layers_stayed_out(tp, tmp_path, cache_dir):
    overrides = [TENSORWISE, "model.fp8_emulate=true", AUTO, *WIDE, "model.num_layers=2"]
    layout = ["parallelism=tp2_sp"] if tp == 2 else []
    steps = ["trainer.max_steps=1", "trainer.limit_val_batches=0", "checkpoint.save_at_end=false"]
    metrics = run_small(tp, tmp_path / "run", cache_dir, [*overrides, *layout, *steps])
    assert metrics.fp8_coverage.layers_kept_out == tuple(
        f"decoder.layers.{layer}.{kind}" for layer in (0, 1) for kind in OUT
    )
    # Weights of a layer: 64·128 + 64·64 + 3·64·1040 = 211,968, of them 2·64·1040 = 133,120 in FP8; attention and LM
    # head as in tests/test_fp8_proof.py.
    share = 2 * 133_120 / (2 * (211_968 + 4_096) + 24_576)
    assert metrics.fp8_coverage.gemm_flops_share == pytest.approx(share, rel=1e-3)
