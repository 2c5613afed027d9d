"""Rules about CUDA graphs and about communication behind computation: what is refused, why, and what to do."""

import pytest

from tests.refusals import Refused, broken_rules, check_refused, check_told

GRAPHS, OVERLAP = "model.cuda_graph_impl=local", "model.tp_comm_overlap=true"
TP2_SP = "parallelism=tp2_sp model.global_batch_size=16"


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ("model.tensor_model_parallel_size=2", "model.tensor_model_parallel_size=2"),
        ("model.pipeline_model_parallel_size=2", "model.pipeline_model_parallel_size=2"),
        ("model.overlap_grad_reduce=true", "model.overlap_grad_reduce=true"),
        ("model.transformer_engine=false", "model.transformer_engine=false"),
        ("fp8=tensorwise model.fp8_emulate=true", "model.fp8_emulate=true"),
        ("model=moe_small", "model.num_moe_experts=4"),
        ("model.activations_checkpoint_granularity=selective", "model.activations_checkpoint_granularity=selective"),
        ("fp8=delayed", "model.fp8_recipe=delayed"),
        ("fp8=blockwise", "model.fp8_recipe=blockwise"),
        ("model.attention_dropout=0.1", "model.attention_dropout=0.1"),
        ("fp8=tensorwise model.fp8_dot_product_attention=true", "model.fp8_dot_product_attention=true"),
        ("fp8=tensorwise model.fp8_params=true", "model.fp8_params=true"),
        ("fp8=tensorwise logging.fp8_statistics_interval=10", "logging.fp8_statistics_interval=10"),
    ],
)
def test_graphs_are_refused_beside_what_a_replay_cannot_do(overrides, told):
    check_refused(Refused(f"{GRAPHS} {overrides}", told=f"{GRAPHS} {told}"))


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_graphs_go_with_dense_models_that_reduce_gradients_at_the_end(fp8):
    overrides = ["model=gpt2_124m", GRAPHS, f"fp8={fp8}"]
    for layout in ("model.use_distributed_optimizer=true", "model.use_distributed_optimizer=false"):
        assert broken_rules([*overrides, layout], world_size=2) == []


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            "parallelism=dp model.global_batch_size=16",
            "model.tensor_model_parallel_size=1 model.sequence_parallel=false",
        ),
        ("parallelism=tp2", "model.tensor_model_parallel_size=2 model.sequence_parallel=false"),
        (f"{TP2_SP} model.transformer_engine=false", "model.transformer_engine=false"),
        (f"{TP2_SP} fp8=tensorwise model.fp8_emulate=true", "model.fp8_emulate=true"),
        (f"{TP2_SP} model=moe_small", "model.num_moe_experts=4"),
        (f"{TP2_SP} fp8=tensorwise model.fp8_params=true", "model.fp8_params=true model.fp8_recipe=tensorwise"),
        (f"{TP2_SP} fp8=delayed model.fp8_exclude=['decoder.layers.0.*']", "model.fp8_exclude=['decoder.layers.0.*']"),
        (f"{TP2_SP} fp8=tensorwise model.first_last_layers_bf16=true", "model.first_last_layers_bf16=true"),
        (f"{TP2_SP} fp8=tensorwise model.fp8_dot_product_attention=true", "model.fp8_dot_product_attention=true"),
        (
            f"{TP2_SP} model.activations_checkpoint_granularity=selective",
            "model.activations_checkpoint_granularity=selective",
        ),
        (f"{TP2_SP} model.hidden_size=90 model.kv_channels=32", "model.hidden_size=90"),
        (f"{TP2_SP} fp8=blockwise", "model.fp8_recipe=blockwise"),
    ],
)
def test_tensor_parallel_overlap_is_refused_where_nothing_could_do_it(overrides, told):
    check_refused(Refused(f"{OVERLAP} {overrides}", told=f"{OVERLAP} {told}", world_size=2))


def test_tensor_parallel_overlap_goes_with_what_it_has_trained_with():
    overrides = ["fp8=delayed", "model.fp8_params=true", "model.activation_cast_fusion=true"]
    assert broken_rules([OVERLAP, *TP2_SP.split(), *overrides]) == []


@pytest.mark.parametrize("key", ["model.pipeline_model_parallel_size", "model.context_parallel_size"])
def test_tensor_parallel_overlap_beside_other_layouts_is_not_tested(key):
    row = Refused(f"{OVERLAP} {TP2_SP} {key}=2", told=f"{OVERLAP} {key}=2")
    check_refused(row)


def test_tensor_parallel_overlap_stays_within_a_node():
    assert broken_rules([OVERLAP, *TP2_SP.split(), "fp8=delayed"], 4, per_node=2) == []
    (problem,) = broken_rules([OVERLAP, *TP2_SP.split()], 2, per_node=1)
    check_told(problem, [OVERLAP, "1", "model.tensor_model_parallel_size=2"])
