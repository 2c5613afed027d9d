"""The memory forecast against peaks measured on H200s, and item by item against arithmetic done by hand."""

import re

import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

from gpt_pretrain.plan.memory import GIB
from gpt_pretrain.plan.muon import orthogonalization_bytes
from gpt_pretrain.plan.stages import plan_stages
from tests.planning import EP4, MIXTRAL_TWO_LAYERS, SEPARATE_KERNELS, plan_of

EIGHT_LAYERS = ("model=llama3_8b", "model.num_layers=8", "model.global_batch_size=8", *SEPARATE_KERNELS)
ON_FOUR = ("model.global_batch_size=16", "plan.num_gpus=4")
EIGHT_BILLION = ("model=llama3_8b", "parallelism=dp", *ON_FOUR, *SEPARATE_KERNELS)
ON_TWO = ("model.global_batch_size=16", "plan.num_gpus=2")
FEW_TOKENS = ("model.encoder_seq_length=256", "model.micro_batch_size=1")
FOUR_H100S = ("experiment=llama3_8b_4gpu", "fp8=delayed", "model.fp8_params=true", "plan.gpu=h100")
SMALL_FP8_STATES = (
    "model.optim.use_precision_aware_optimizer=true",
    "model.optim.main_params_dtype=fp16",
    "model.optim.exp_avg_dtype=fp8",
    "model.optim.exp_avg_sq_dtype=fp16",
)
# Peaks of torch's allocator on rank 0. All but the last three are the application's, in benchmarks/*.md; the last three
# a bare megatron-core loop's under the same knobs, before this project existed.
MEASURED = {
    "GPT-2 124M": (("model=gpt2_124m", *SEPARATE_KERNELS), 26.7),
    "Llama 3 8B, 8 layers": (EIGHT_LAYERS, 65.4),
    "GPT-3 1.3B": (("model=gpt3_1_3b", "model.global_batch_size=64", *SEPARATE_KERNELS), 54.0),
    "8 layers, DP 2": ((*EIGHT_LAYERS, "parallelism=dp", *ON_TWO), 49.8),
    "8 layers, TP 2 + SP": ((*EIGHT_LAYERS, "parallelism=tp2_sp"), 32.8),
    "8 layers, PP 2": ((*EIGHT_LAYERS, "parallelism=pp2", *ON_TWO), 32.5),
    "8B, FP8 weights and small states": (("experiment=llama3_8b_1gpu", *SEPARATE_KERNELS), 106.1),
    "GPT-2 124M, delayed, linear loss": (("model=gpt2_124m", "fp8=delayed", "model.global_batch_size=32"), 10.87),
    "8B, the same, delayed, micro batch 2": (
        ("experiment=llama3_8b_1gpu", "fp8=delayed", "model.fp8_params=true", "model.micro_batch_size=2"),
        130.4,
    ),
    "GPT 12.8B, FP8 weights and small states": (("experiment=gpt_12_8b_1gpu",), 130.0),
    "GPT 12.8B, micro batch 1": (("experiment=gpt_12_8b_1gpu", "model.micro_batch_size=1"), 119.7),
    "GPT 15.4B, the same and recomputed": (("experiment=gpt_15_4b_1gpu",), 133.2),
    "GPT 15.4B, micro batch 1": (("experiment=gpt_15_4b_1gpu", "model.micro_batch_size=1"), 131.9),
    "8B, two layers, eight ranks": (
        (
            "experiment=llama3_8b_8gpu",
            "parallelism=tp2_sp",
            "fp8=delayed",
            "model.fp8_params=true",
            "model.num_layers=2",
            "model.global_batch_size=8",
        ),
        8.62,
    ),
    "8B, gradients sharded": ((*FOUR_H100S, "parallelism=zero2", *SMALL_FP8_STATES), 65.83),
    "8B, weights sharded": ((*FOUR_H100S, "parallelism=fsdp"), 67.40),
    "8B, weights sharded, BF16": (("experiment=llama3_8b_4gpu", "parallelism=fsdp", "plan.gpu=h100"), 73.48),
    "8B, DP 4, BF16": (EIGHT_BILLION, 113.0),
    "8B, DP 4, delayed": ((*EIGHT_BILLION, "fp8=delayed"), 121.0),
    "8B, DP 4, tensorwise, FP8 parameters": ((*EIGHT_BILLION, "fp8=tensorwise", "model.fp8_params=true"), 107.0),
}

# Otherwise one BF16 kernel computes experts as small as Qwen3's.
FP8_REACHES_EXPERTS = "model.moe_grouped_kernel=transformer_engine"


@pytest.mark.parametrize(("overrides", "measured_gib"), MEASURED.values(), ids=MEASURED)
def test_peak_is_the_measured_one(overrides, measured_gib):
    # Within 10% is what a forecast has to keep; this one has been within 2%.
    assert plan_of(*overrides).memory.stages[0].peak / GIB == pytest.approx(measured_gib, rel=0.03)


# How busy the busiest expert is was fitted to these four; all else is counted.
EXPERTS = {
    "EP 2, BF16": (MIXTRAL_TWO_LAYERS, 22.4),
    "EP 2, tensorwise": ((*MIXTRAL_TWO_LAYERS, "fp8=tensorwise"), 25.0),
    "EP 4, BF16": ((*MIXTRAL_TWO_LAYERS, EP4), 18.9),
    "EP 4, tensorwise": ((*MIXTRAL_TWO_LAYERS, EP4, "fp8=tensorwise"), 20.1),
}


@pytest.mark.parametrize(("overrides", "measured_gib"), EXPERTS.values(), ids=EXPERTS)
def test_peak_with_experts_is_the_measured_one(overrides, measured_gib):
    # Within 3% is what the forecast has to keep; it is within 0.5%.
    assert plan_of(*overrides).memory.peak_gib == pytest.approx(measured_gib, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "count"),
    [("llama3_8b", 8_030_261_248), ("gpt2_124m", 124_439_808 + 47 * 768), ("qwen2_5_7b", 7_615_616_512)],
)
def test_parameters_are_the_published_ones_with_the_vocabulary_padded(preset, count):
    assert plan_of(f"model={preset}").num_parameters == count


LEAN = ("model.use_distributed_optimizer=true", "model.optim.use_precision_aware_optimizer=true")
BF16_MOMENTS = ("model.optim.exp_avg_dtype=bf16", "model.optim.exp_avg_sq_dtype=bf16")
FP8_MOMENT = ("model.optim.exp_avg_dtype=fp8", "model.optim.exp_avg_sq_dtype=fp16")


@pytest.mark.parametrize(
    ("overrides", "bytes_per_parameter"),
    [
        ((), 2 + 4 + 4 + 8),
        (("model.grad_reduce_in_fp32=false",), 2 + 2 + 4 + 8),
        (("model.use_distributed_optimizer=true", "plan.num_gpus=4"), 2 + 4 + (4 + 8) / 4),
        # Without the distributed optimizer every rank keeps all of it.
        (("plan.num_gpus=4",), 2 + 4 + 4 + 8),
        (("model.optim.name=sgd",), 2 + 4 + 4 + 4),
        (("optimizer=lion",), 2 + 4 + 4 + 4),
        (("model.optim.ema_decay=0.99",), 2 + 4 + 4 + 8 + 4),
        (("model.optim.ema_decay=0.99", "model.use_distributed_optimizer=true", "plan.num_gpus=4"), 2 + 4 + 16 / 4),
        (("optimizer=muon",), 2 + 4 + 4 + 8 - 4 * 32 * 218_103_808 / 8_030_261_248),
        (("trainer.precision=fp32", "model.transformer_engine=false"), 4 + 4 + 8),
        ((*LEAN,), 2 + 4 + 2 + 8),
        ((*LEAN, "model.optim.store_param_remainders=false"), 2 + 4 + 4 + 8),
        ((*LEAN, "model.grad_reduce_in_fp32=false", *BF16_MOMENTS), 2 + 2 + 2 + 4),
        ((*LEAN, "model.optim.main_params_dtype=fp16", *FP8_MOMENT), 2 + 4 + 2 + 3 + 8 / 256),
        ((*LEAN, *BF16_MOMENTS, "plan.num_gpus=4"), 2 + 4 + (2 + 4) / 4),
    ],
)
def test_bytes_per_parameter(overrides, bytes_per_parameter):
    plan = plan_of("model=llama3_8b", *overrides)
    items = plan.memory.worst.items
    held = sum(items.get(name, 0) for name in ("weights", "gradients", "masters", "moments", "averaged weights"))
    assert held == pytest.approx(bytes_per_parameter * plan.num_parameters)


# The four matrices of a layer of Llama 3 8B: 4096 × (6144 + 4096 + 3 · 14336).
LAYER_WEIGHTS = 218_103_808


@pytest.mark.parametrize(
    ("overrides", "name", "bytes_per_weight"),
    [
        (("fp8=delayed",), "FP8 copies of weights", 2),
        (("fp8=delayed", "plan.gpu=b200"), "FP8 copies of weights", 1),
        (("fp8=tensorwise", "model.fp8_params=true"), "FP8 weights", 2),
        (("fp8=torchao_tensorwise", "model.fp8_params=true"), "FP8 weights", 2),
        (("fp8=torchao_tensorwise", "model.fp8_params=true", "plan.gpu=b200"), "FP8 weights", 2),
        (("fp8=blockwise",), "FP8 copies of weights", 2 * (1 + 4 / 128**2)),
        (("fp8=mxfp8", "plan.gpu=b200"), "FP8 copies of weights", 2 * (1 + 1 / 32)),
        (("fp8=delayed", "model.tensor_model_parallel_size=4"), "FP8 copies of weights", 2 / 4),
    ],
)
def test_bytes_per_fp8_weight(overrides, name, bytes_per_weight):
    items = plan_of("model=llama3_8b", *overrides).memory.worst.items
    assert items[name] == 32 * LAYER_WEIGHTS * bytes_per_weight


# The embedding and the LM head of Llama 3 8B each, and a layer with its two norms.
TABLE, LAYER = 128_256 * 4096, LAYER_WEIGHTS + 2 * 4096


@pytest.mark.parametrize(
    ("overrides", "part", "sections"),
    [
        # The largest two that follow each other: the head and the last layer.
        ((), 1 / 4, TABLE + LAYER),
        (("model.grad_reduce_in_fp32=false",), 1 / 8, (TABLE + LAYER) / 2),
        # Two layers each, and four.
        (("model.ddp_bucket_size=300_000_000",), 1 / 4, TABLE + 2 * LAYER),
        (("model.ddp_bucket_size=700_000_000",), 1 / 4, 8 * LAYER),
        # The head is the embedding, which has memory of its own.
        (("model.share_embeddings_and_output_weights=true",), 1 / 4, TABLE + 2 * LAYER),
        (("model.tensor_model_parallel_size=2",), 1 / 2, TABLE / 2 + LAYER_WEIGHTS / 2 + 2 * 4096),
        # Each chunk of a stage has its own.
        (
            ("model.pipeline_model_parallel_size=2", "model.virtual_pipeline_model_parallel_size=2"),
            1 / 2,
            TABLE + LAYER + 2 * LAYER,
        ),
    ],
)
def test_bytes_of_sharded_gradients(overrides, part, sections):
    plan = plan_of("model=llama3_8b", "parallelism=zero2", "plan.num_gpus=4", *overrides)
    items, stage = plan.memory.worst.items, plan_stages(plan.spec)[plan.memory.worst.stage]
    assert items["gradients"] == pytest.approx(4 * part * stage.num_parameters)
    assert items["gradients being reduced"] == 4 * sections


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), {"weights": 2 * (2 * TABLE + 32 * LAYER) / 4, "weights being read": 2 * (TABLE + LAYER)}),
        # A layer's products read transposes too.
        (
            ("fp8=delayed", "model.fp8_params=true"),
            {"FP8 weights": 8 * 4 * LAYER_WEIGHTS / 4, "weights being read": 2 * TABLE + LAYER + LAYER_WEIGHTS},
        ),
        # Casts of BF16 weights are kept for a step.
        (("fp8=delayed",), {"FP8 copies of weights": 2 * 32 * LAYER_WEIGHTS}),
    ],
)
def test_bytes_of_sharded_weights(overrides, expected):
    items = plan_of("model=llama3_8b", "parallelism=fsdp", "plan.num_gpus=4", *overrides).memory.worst.items
    for name, size in expected.items():
        assert items[name] == pytest.approx(size, rel=2e-3), name


def test_a_start_may_need_most_and_never_the_whole_model():
    """Of a model with few tokens, while it draws the first matrix: embedding and head are whole then."""
    run = ("model=llama3_8b", "parallelism=fsdp", "fp8=delayed", "model.fp8_params=true", "plan.num_gpus=64")
    items = plan_of(*run, *FEW_TOKENS).memory.worst.items
    held = items["masters"] + items["moments"]
    assert items["first values"] == pytest.approx(2 * 2 * TABLE + (4 + 2) * TABLE - held)
    assert "activations" not in items


def test_sharded_gradients_are_a_way_out():
    told = ways_out(
        "experiment=llama3_8b_8gpu", "parallelism=dp", "plan.gpu=h100", "fp8=delayed", "model.fp8_params=true"
    )
    assert "model.data_parallel_sharding_strategy=optim_grads" in told


def test_fp8_weights_with_small_states_take_nine_bytes_and_gradients_are_not_copied():
    small = (*LEAN, "model.grad_reduce_in_fp32=false", "model.optim.main_params_dtype=fp16", *FP8_MOMENT)
    items = plan_of("model=llama3_8b", "fp8=delayed", "model.fp8_params=true", *small).memory.worst.items
    held = sum(items[name] for name in ("weights", "FP8 weights", "gradients", "masters", "moments"))
    assert held == pytest.approx(8_030_261_248 * (2 + 2 + 2 + 3 + 8 / 256))
    assert "gradients in fp32" not in items


@pytest.mark.parametrize("recipe", ["delayed", "torchao_tensorwise"])
def test_fp8_parameters_replace_bf16_ones_and_excluded_layers_keep_theirs(recipe):
    kept = ("model.fp8_exclude=['decoder.layers.0.*']",)
    items = plan_of("model=llama3_8b", f"fp8={recipe}", "model.fp8_params=true", *kept).memory.worst.items
    assert items["FP8 weights"] == 31 * LAYER_WEIGHTS * 2
    # Embedding, head, layer 0 and 65 norms of 4096.
    assert items["weights"] == 2 * (2 * 128_256 * 4096 + LAYER_WEIGHTS + 65 * 4096)


# Bytes that a layer of Llama 3 8B keeps per token: layer input, norm, q k v, attention's output, its softmax's 32
# statistics, second residual, norm, gate and up projections, their product; and two norms' statistics.
BF16_LAYER = 2 * (4096 + 4096 + 6144 + 4096 + 4096 + 4096 + 2 * 14336 + 14336) + 4 * 32 + 8
# In FP8 one byte for the norms' outputs and the product, and one more for attention's output.
FP8_LAYER = 2 * (4096 + 6144 + 4096 + 4096 + 2 * 14336) + (4096 + 4096 + 4096 + 14336) + 4 * 32 + 8
LAST_NORM = 2 * (4096 + 4096)


@pytest.mark.parametrize(
    ("overrides", "bytes_per_token"),
    [
        ((), 32 * BF16_LAYER + LAST_NORM),
        (("fp8=delayed",), 32 * FP8_LAYER + LAST_NORM),
        (("fp8=delayed", "model.fp8_exclude=['decoder.layers.3.*']"), 31 * FP8_LAYER + BF16_LAYER + LAST_NORM),
        # Selective: attention's statistics are not kept, and with FP8 its BF16 output neither.
        (
            ("model.activations_checkpoint_granularity=selective", "fp8=delayed"),
            32 * (FP8_LAYER - 4 * 32 - 2 * 4096) + LAST_NORM,
        ),
        (("model.tensor_model_parallel_size=2", "model.sequence_parallel=true"), (32 * BF16_LAYER + LAST_NORM) / 2),
        (("model.context_parallel_size=2",), (32 * BF16_LAYER + LAST_NORM) / 2),
        (
            (
                "model.activations_checkpoint_granularity=full",
                "model.activations_checkpoint_method=uniform",
                "model.activations_checkpoint_num_layers=4",
            ),
            8 * 2 * 4096 + LAST_NORM,
        ),
        (
            (
                "model.activations_checkpoint_granularity=full",
                "model.activations_checkpoint_method=block",
                "model.activations_checkpoint_num_layers=20",
            ),
            20 * 2 * 4096 + 12 * BF16_LAYER + LAST_NORM,
        ),
    ],
)
def test_bytes_of_activations(overrides, bytes_per_token):
    plan = plan_of("model=llama3_8b", *overrides)
    # The two norms' statistics (8 bytes) are whole on each rank of a split sequence's own tokens.
    assert plan.memory.worst.items["activations"] == pytest.approx(8192 * bytes_per_token, rel=1e-3)


def test_references_without_transformer_engine_keep_the_scores():
    without_te, reference = "model.transformer_engine=false", "trainer.deterministic=true"
    local = plan_of("model=gpt2_124m", without_te, reference).memory.worst.items["activations"]
    fused = plan_of("model=gpt2_124m", without_te).memory.worst.items["activations"]
    assert fused == plan_of("model=gpt2_124m").memory.worst.items["activations"]
    # Per layer, head and sample 1024² scores in fp32 and BF16, in place of 1024 statistics.
    assert local - fused == 12 * 32 * 12 * 1024 * (1024 * (4 + 2) - 4)


@pytest.mark.parametrize(("key", "bytes_per_logit"), [("fusion_impl=native", 10), ("loss_fusion=false", 6)])
def test_bytes_of_logits(key, bytes_per_logit):
    items = plan_of("model=gpt2_124m", f"model.cross_entropy_{key}").memory.worst.items
    assert items["logits and loss"] == 32 * 1024 * 50_304 * bytes_per_logit


@pytest.mark.parametrize(
    ("key", "weight_gradient"),
    [
        ("gradient_accumulation_fusion=true", 0),
        ("gradient_accumulation_fusion=false", 4 * 128_256 * 4096),
        ("grad_reduce_in_fp32=false", 4 * 128_256 * 4096),
    ],
)
def test_bytes_of_a_linear_loss(key, weight_gradient):
    """4,096 tokens' logits and all hidden states' gradients in BF16, and the head's in fp32 if it is not main."""
    items = plan_of("model=llama3_8b", f"model.{key}").memory.worst.items
    assert items["logits and loss"] == 2 * (4096 * 128_256 + 8192 * 4096) + weight_gradient


@pytest.mark.parametrize(
    ("pp", "vp", "microbatches"), [(2, None, 8), (4, None, 2), (4, None, 16), (4, 2, 8), (2, 4, 2)]
)
def test_chunks_in_flight_are_those_of_megatrons_schedule(pp, vp, microbatches):
    plan = plan_of(
        "model.num_layers=16",
        f"model.pipeline_model_parallel_size={pp}",
        f"model.virtual_pipeline_model_parallel_size={'null' if vp is None else vp}",
        "model.micro_batch_size=1",
        f"model.global_batch_size={microbatches}",
    )
    expected = []
    try:
        parallel_state.set_pipeline_model_parallel_world_size(pp)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(vp)
        for rank in range(pp):
            parallel_state.set_pipeline_model_parallel_rank(rank)
            total, _, warmup, _ = get_pp_rank_microbatches(microbatches, vp or 1, pp)
            expected.append(min(total, warmup + 1))
    finally:
        parallel_state.set_pipeline_model_parallel_world_size(None)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
        parallel_state.set_pipeline_model_parallel_rank(None)
    assert [stage.chunks_in_flight for stage in plan_stages(plan.spec)] == expected


def test_stages_hold_the_model_once():
    plan = plan_of(
        "model=llama3_8b", "model.pipeline_model_parallel_size=4", "model.virtual_pipeline_model_parallel_size=2"
    )
    stages = plan_stages(plan.spec)
    assert [tuple(stage.layers)[:5] for stage in stages] == [
        (0, 1, 2, 3, 16),
        (4, 5, 6, 7, 20),
        (8, 9, 10, 11, 24),
        (12, 13, 14, 15, 28),
    ]
    assert sorted(layer for stage in stages for layer in stage.layers) == list(range(32))
    assert sum(stage.num_parameters for stage in stages) == 8_030_261_248


def test_a_tied_head_is_a_copy_on_another_stage():
    whole, split = plan_of("model=gpt2_124m"), plan_of("model=gpt2_124m", "model.pipeline_model_parallel_size=2")
    assert sum(stage.num_parameters for stage in plan_stages(split.spec)) == whole.num_parameters + 50_304 * 768


def test_a_run_that_does_not_fit_is_told_the_ways_out():
    plan = plan_of("model=llama3_8b", "plan.gpu=h100")
    assert not plan.fits
    assert (plan.verdicts[0].label, plan.verdicts[0].is_bad) == ("Memory", True)
    told = ways_out("model=gpt3_1_3b", "plan.gpu=h100", "model.micro_batch_size=32")
    assert any("model.activations_checkpoint_granularity=full" in way for way in told)
    assert "model.micro_batch_size=1" in told


def ways_out(*overrides):
    """The ways out of a run that does not fit, and what each needs, checked against its own plan: as told, and less."""
    plan = plan_of(*overrides)
    assert not plan.fits
    told = dict(re.findall(r"((?:[\w.]+=\w+ ?)+) \(([\d.]+) GiB\)", plan.verdicts[0].text))
    for way, gib in told.items():
        planned = plan_of(*overrides, *way.split())
        assert planned.memory.needed_gib == pytest.approx(float(gib), abs=0.06), way
        assert planned.memory.needed_gib < plan.memory.needed_gib
    return told


@pytest.mark.parametrize(
    ("overrides", "values"),
    [
        # A gate and up of 117M values is more than fits at once; smaller ones share a batch.
        (("model=llama3_8b",), 4096 * 28_672),
        (("model=gpt2_124m",), 12 * 768 * 3072),
        (("model=gpt3_1_3b",), 4 * 2048 * 8192),
        (("model=llama3_8b", "parallelism=tp2"), 4096 * 28_672),
        (("model=gpt2_124m", "parallelism=dp", "plan.num_gpus=8"), 2 * 768 * 3072),
    ],
)
def test_muon_holds_a_batch_of_matrices(overrides, values):
    plan = plan_of(*overrides, "optimizer=muon")
    (stage,) = plan_stages(plan.spec)
    assert orthogonalization_bytes(plan.spec, stage) == 16 * values
    adam = plan_of(*overrides)
    assert orthogonalization_bytes(adam.spec, stage) == 0
