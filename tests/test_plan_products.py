"""Every linear layer of a step: sizes after TP, SP, CP and the microbatch, in FP8 or not and why."""

import pytest

from gpt_pretrain.plan.effective import layer_ranges
from tests.planning import plan_of

LLAMA = ("model=llama3_8b", "model.micro_batch_size=2", "fp8=delayed")
QKV, PROJ, FC1, FC2 = "self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"
ROUTER, EXPERT_FC1, EXPERT_FC2 = "mlp.router", "mlp.experts.linear_fc1", "mlp.experts.linear_fc2"


def sizes(*overrides):
    """Rows, inputs and outputs, and how many a layer has."""
    linears = plan_of(*overrides).linears
    return {(each.layers, each.module): (each.rows, each.inputs, each.outputs, each.count) for each in linears}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Two samples of 8,192 tokens; 8 key/value heads of 128; gate and up projections of 14,336 together.
        (
            LLAMA,
            {
                ("0–31", QKV): (16384, 4096, 6144, 1),
                ("0–31", PROJ): (16384, 4096, 4096, 1),
                ("0–31", FC1): (16384, 4096, 28672, 1),
                ("0–31", FC2): (16384, 14336, 4096, 1),
                ("", "output_layer"): (16384, 4096, 128256, 1),
            },
        ),
        # Products see the gathered sequence: 2 · 8192 / CP tokens.
        (
            (*LLAMA, "parallelism=tp4_sp", "model.context_parallel_size=2"),
            {
                ("0–31", QKV): (8192, 4096, 1536, 1),
                ("0–31", PROJ): (8192, 1024, 4096, 1),
                ("0–31", FC1): (8192, 4096, 7168, 1),
                ("0–31", FC2): (8192, 3584, 4096, 1),
                ("", "output_layer"): (8192, 4096, 32064, 1),
            },
        ),
        # Eight experts of 14,336, two for each of 4,096 tokens: 1,024 rows an expert on one GPU.
        (
            ("model=mixtral_8x7b", "fp8=tensorwise"),
            {
                ("0–31", QKV): (4096, 4096, 6144, 1),
                ("0–31", PROJ): (4096, 4096, 4096, 1),
                ("0–31", ROUTER): (4096, 4096, 8, 1),
                ("0–31", EXPERT_FC1): (1024, 4096, 28672, 8),
                ("0–31", EXPERT_FC2): (1024, 14336, 4096, 8),
                ("", "output_layer"): (4096, 4096, 32000, 1),
            },
        ),
    ],
)
def test_sizes_of_linear_layers(overrides, expected):
    assert sizes(*overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        # Four ranks bring their tokens to two experts each.
        (["parallelism=dp", "model.expert_model_parallel_size=4"], (4096, 4096, 28672, 2)),
        # Of one sequence: two halves come together, and each rank has half of each expert's rows.
        (["parallelism=tp2_sp"], (1024, 4096, 14336, 8)),
        (
            ["parallelism=tp2_sp", "model.expert_model_parallel_size=2", "model.expert_tensor_parallel_size=1"],
            (1024, 4096, 28672, 4),
        ),
    ],
)
def test_experts_over_ranks(overrides, expected):
    found = sizes("model=mixtral_8x7b", "plan.num_gpus=4", *overrides)
    assert found["0–31", "mlp.experts.linear_fc1"] == expected


KEPT = ("model.first_last_layers_bf16=true", "model.num_layers_at_start_in_bf16=2")


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (("fp8=blockwise",), ("0–3", FC1), ("FP8", "")),
        ((), ("0–3", FC1), ("BF16", "model.fp8=false")),
        (("trainer.precision=fp32", "model.transformer_engine=false"), ("0–3", FC1), ("FP32", "model.fp8=false")),
        (
            ("fp8=delayed", "model.fp8_emulate=true", "model.fp8_wgrad=false"),
            ("0–3", FC1),
            ("FP8", "gradients of weights in BF16"),
        ),
        (
            ("model=llama3_8b", "fp8=tensorwise", *KEPT),
            ("0–1", FC1),
            ("BF16", "first 2 layers (model.num_layers_at_start_in_bf16)"),
        ),
        (
            ("model=llama3_8b", "fp8=tensorwise", *KEPT),
            ("31", FC1),
            ("BF16", "last 1 layer (model.num_layers_at_end_in_bf16)"),
        ),
        (
            ("model=llama3_8b", "fp8=tensorwise", "model.fp8_exclude=['*.layers.[5-7].mlp.linear_fc2']"),
            ("5–7", FC2),
            ("BF16", "model.fp8_exclude"),
        ),
        (
            ("model=llama3_8b", "fp8=tensorwise", "model.fp8_exclude=['*.layers.[5-7].mlp.linear_fc2']"),
            ("0–4, 8–31", FC2),
            ("FP8", ""),
        ),
        (LLAMA, ("", "output_layer"), ("BF16", "the LM head stays out of FP8")),
    ],
)
def test_precision_of_a_linear_layer_and_why(overrides, key, expected):
    runs_in = {(each.layers, each.module): (each.precision, each.reason) for each in plan_of(*overrides).linears}
    assert runs_in[key] == expected


@pytest.mark.parametrize(("layers", "text"), [([0], "0"), ([0, 1, 2], "0–2"), ([0, 2, 3, 5], "0, 2–3, 5"), ([], "")])
def test_layer_ranges(layers, text):
    assert layer_ranges(layers) == text


def test_a_token_is_computed_by_two_experts_of_eight():
    attention, expert = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336
    weights = 32 * (attention + 8 * 4096 + 2 * expert) + 4096 * 32000
    scores = 32 * 2 * 4096 * 4096
    assert plan_of("model=mixtral_8x7b").flops_per_token == 3 * (2 * weights + scores)
