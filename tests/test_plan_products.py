"""Every matrix product of a step: shapes after TP, SP, CP and the microbatch, in FP8 or not and why."""

import pytest

from gpt_pretrain.plan.effective import layer_ranges, shape_problem
from tests.planning import plan_of

LLAMA = ("model=llama3_8b", "model.micro_batch_size=2", "fp8=delayed")


def products(*overrides):
    return plan_of(*overrides).products


def shapes(*overrides):
    return {(p.layers, p.module, p.phase): (p.m, p.n, p.k, p.count) for p in products(*overrides)}


def test_shapes_of_llama_3_8b_on_one_gpu():
    # Two samples of 8,192 tokens; 32 heads and 8 key/value heads of 128; gate and up projections of 14,336 together.
    assert shapes(*LLAMA) == {
        ("0–31", "self_attention.linear_qkv", "forward"): (16384, 6144, 4096, 1),
        ("0–31", "self_attention.linear_qkv", "dgrad"): (16384, 4096, 6144, 1),
        ("0–31", "self_attention.linear_qkv", "wgrad"): (6144, 4096, 16384, 1),
        ("0–31", "self_attention.linear_proj", "forward"): (16384, 4096, 4096, 1),
        ("0–31", "self_attention.linear_proj", "dgrad"): (16384, 4096, 4096, 1),
        ("0–31", "self_attention.linear_proj", "wgrad"): (4096, 4096, 16384, 1),
        ("0–31", "mlp.linear_fc1", "forward"): (16384, 28672, 4096, 1),
        ("0–31", "mlp.linear_fc1", "dgrad"): (16384, 4096, 28672, 1),
        ("0–31", "mlp.linear_fc1", "wgrad"): (28672, 4096, 16384, 1),
        ("0–31", "mlp.linear_fc2", "forward"): (16384, 4096, 14336, 1),
        ("0–31", "mlp.linear_fc2", "dgrad"): (16384, 14336, 4096, 1),
        ("0–31", "mlp.linear_fc2", "wgrad"): (4096, 14336, 16384, 1),
        ("0–31", "attention q·kᵀ", "forward"): (8192, 8192, 128, 64),
        ("0–31", "attention p·v", "forward"): (8192, 128, 8192, 64),
        ("0–31", "attention q·kᵀ again, dp", "backward"): (8192, 8192, 128, 128),
        ("0–31", "attention dq", "backward"): (8192, 128, 8192, 64),
        ("0–31", "attention dk, dv", "backward"): (8192, 128, 8192, 128),
        ("", "output_layer", "forward"): (16384, 128256, 4096, 1),
        ("", "output_layer", "dgrad"): (16384, 4096, 128256, 1),
        ("", "output_layer", "wgrad"): (128256, 4096, 16384, 1),
    }


def test_shapes_after_tensor_sequence_and_context_parallelism():
    layout = ("model.tensor_model_parallel_size=4", "model.sequence_parallel=true", "model.context_parallel_size=2")
    found = shapes(*LLAMA, *layout)
    # Products see the gathered sequence: 2 · 8192 / CP tokens.
    assert found["0–31", "self_attention.linear_qkv", "forward"] == (8192, 1536, 4096, 1)
    assert found["0–31", "self_attention.linear_proj", "forward"] == (8192, 4096, 1024, 1)
    assert found["0–31", "mlp.linear_fc2", "wgrad"] == (4096, 3584, 8192, 1)
    assert found["0–31", "attention q·kᵀ", "forward"] == (4096, 8192, 128, 16)
    assert found["", "output_layer", "forward"] == (8192, 32064, 4096, 1)


def runs_in(*overrides):
    return {(p.layers, p.module, p.phase): (p.precision, p.reason) for p in products(*overrides)}


def test_precision_of_each_product_and_why():
    kept = ("model.first_last_layers_bf16=true", "model.num_layers_at_start_in_bf16=2")
    found = runs_in("model=llama3_8b", "fp8=tensorwise", *kept, "model.fp8_exclude=['*.layers.[5-7].mlp.linear_fc2']")
    assert found["0–1", "mlp.linear_fc1", "forward"] == (
        "BF16",
        "first 2 layers (model.num_layers_at_start_in_bf16)",
    )
    assert found["31", "mlp.linear_fc1", "wgrad"] == ("BF16", "last 1 layer (model.num_layers_at_end_in_bf16)")
    assert found["2–30", "mlp.linear_fc1", "forward"] == ("FP8 E4M3·E4M3", "")
    assert found["2–30", "mlp.linear_fc1", "dgrad"] == ("FP8 E5M2·E4M3", "")
    assert found["5–7", "mlp.linear_fc2", "dgrad"] == ("BF16", "model.fp8_exclude")
    assert found["2–4, 8–30", "mlp.linear_fc2", "dgrad"] == ("FP8 E5M2·E4M3", "")
    assert found["0–31", "attention p·v", "forward"] == ("BF16", "model.fp8_dot_product_attention=false")
    assert found["", "output_layer", "forward"] == ("BF16", "the LM head stays out of FP8")


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (("fp8=blockwise",), ("0–3", "mlp.linear_fc1", "dgrad"), ("FP8 E4M3·E4M3", "")),
        ((), ("0–3", "mlp.linear_fc1", "dgrad"), ("BF16", "model.fp8=false")),
        (
            ("trainer.precision=fp32", "model.transformer_engine=false"),
            ("0–3", "mlp.linear_fc1", "dgrad"),
            ("FP32", "model.fp8=false"),
        ),
        (
            ("fp8=delayed", "model.fp8_emulate=true", "model.fp8_wgrad=false"),
            ("0–3", "mlp.linear_fc1", "wgrad"),
            ("BF16", "model.fp8_wgrad=false"),
        ),
        (
            ("fp8=delayed", "model.fp8_dot_product_attention=true"),
            ("0–3", "attention p·v", "forward"),
            ("FP8 E4M3·E4M3", ""),
        ),
    ],
)
def test_precision_of_one_product(overrides, key, expected):
    assert runs_in(*overrides)[key] == expected


def test_a_shape_that_fp8_could_not_take_is_told_with_the_nearest():
    found = {
        (p.module, p.phase): p.shape_problem
        for p in products("model=gpt2_124m", "model.encoder_seq_length=1000", "model.micro_batch_size=1")
    }
    assert found["mlp.linear_fc1", "forward"] == "m=1000 is not ×16: 992 or 1008"
    assert found["mlp.linear_fc1", "wgrad"] == "k=1000 is not ×16: 992 or 1008"
    assert found["output_layer", "forward"] == ""


@pytest.mark.parametrize(
    ("size", "alignment", "problem"),
    [
        ((32, 48, 64), 16, ""),
        ((32, 48, 64), 32, "n=48 is not ×32: 32 or 64"),
        ((8, 16, 17), 16, "m=8 is not ×16: 16; k=17 is not ×16: 16 or 32"),
    ],
)
def test_shape_problem(size, alignment, problem):
    assert shape_problem(*size, alignment) == problem


@pytest.mark.parametrize(("layers", "text"), [([0], "0"), ([0, 1, 2], "0–2"), ([0, 2, 3, 5], "0, 2–3, 5"), ([], "")])
def test_layer_ranges(layers, text):
    assert layer_ranges(layers) == text


def test_operations_add_up_to_the_formulas_flops():
    plan = plan_of("model=llama3_8b")
    # Five products backward: flash attention computes the scores again, which the formula does not count.
    again = sum(p.flops for p in plan.products if "again" in p.module) / 2
    assert (sum(p.flops for p in plan.products) - again) / 8192 == pytest.approx(plan.flops_per_token)


def test_shapes_of_mixtrals_experts():
    """Eight experts of 14,336, two for each of 4,096 tokens: 1,024 rows an expert on one GPU."""
    mixtral = ("model=mixtral_8x7b", "fp8=tensorwise")
    of_experts = {key[1:]: shape for key, shape in shapes(*mixtral).items() if key[1].startswith("mlp.")}
    assert of_experts == {
        ("mlp.router", "forward"): (4096, 8, 4096, 1),
        ("mlp.router", "dgrad"): (4096, 4096, 8, 1),
        ("mlp.router", "wgrad"): (8, 4096, 4096, 1),
        ("mlp.experts.linear_fc1", "forward"): (1024, 28672, 4096, 8),
        ("mlp.experts.linear_fc1", "dgrad"): (1024, 4096, 28672, 8),
        ("mlp.experts.linear_fc1", "wgrad"): (28672, 4096, 1024, 8),
        ("mlp.experts.linear_fc2", "forward"): (1024, 4096, 14336, 8),
        ("mlp.experts.linear_fc2", "dgrad"): (1024, 14336, 4096, 8),
        ("mlp.experts.linear_fc2", "wgrad"): (4096, 14336, 1024, 8),
    }
    precisions = {product.module: product.precision for product in products(*mixtral)}
    assert precisions["mlp.router"] == "BF16"
    assert precisions["mlp.experts.linear_fc2"].startswith("FP8")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Four ranks bring their tokens to two experts each.
        (["parallelism=dp", "model.expert_model_parallel_size=4"], (4096, 28672, 4096, 2)),
        # Of one sequence: two halves come together, and each rank has half of each expert's rows.
        (["parallelism=tp2_sp"], (1024, 14336, 4096, 8)),
        (
            ["parallelism=tp2_sp", "model.expert_model_parallel_size=2", "model.expert_tensor_parallel_size=1"],
            (1024, 28672, 4096, 4),
        ),
    ],
)
def test_experts_over_ranks(overrides, expected):
    found = shapes("model=mixtral_8x7b", "plan.num_gpus=4", *overrides)
    assert found["0–31", "mlp.experts.linear_fc1", "forward"] == expected


def test_a_token_is_computed_by_two_experts_of_eight():
    attention, expert = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336
    weights = 32 * (attention + 8 * 4096 + 2 * expert) + 4096 * 32000
    scores = 32 * 2 * 4096 * 4096
    assert plan_of("model=mixtral_8x7b").flops_per_token == 3 * (2 * weights + scores)
