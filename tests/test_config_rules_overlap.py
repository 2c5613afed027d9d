"""Rules about CUDA graphs and about communication behind computation: what is refused, why, and what to do."""

import pytest

TP2_SP = ("parallelism=tp2_sp", "model.global_batch_size=16")
OVERLAP = "model.tp_comm_overlap=true"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("model.tensor_model_parallel_size=2",),
            "model.tensor_model_parallel_size=2: graphs are for models that fit one GPU, and untried across several",
        ),
        (
            ("model.pipeline_model_parallel_size=2",),
            "model.pipeline_model_parallel_size=2: graphs are for models that fit one GPU, and untried across several",
        ),
        (
            ("model.overlap_grad_reduce=true",),
            "model.overlap_grad_reduce=true: gradients that are reduced behind replays are untried",
        ),
        (
            ("model.transformer_engine=false",),
            "model.transformer_engine=false: graphs hold Transformer Engine's layers",
        ),
        (
            ("fp8=tensorwise", "model.fp8_emulate=true"),
            "model.fp8_emulate=true: emulated layers decide in Python what a replay would not decide again",
        ),
        (
            ("model=moe_small",),
            "model.num_moe_experts=4: a router gives each expert another number of tokens, and a graph has one shape",
        ),
        (
            ("model.activations_checkpoint_granularity=selective",),
            "model.activations_checkpoint_granularity=selective: a graph keeps what its backward pass needs",
        ),
        (
            ("fp8=delayed",),
            "model.fp8_recipe=delayed: megatron-core 0.19 moves the amax history of gradients on at every layer and "
            "not at every pass",
        ),
        (("fp8=blockwise",), "model.fp8_recipe=blockwise: of FP8 only tensorwise scaling was tried"),
        (
            ("model.attention_dropout=0.1",),
            "model.attention_dropout=0.1: random numbers that are drawn in replays are untried",
        ),
        (
            ("fp8=tensorwise", "model.fp8_dot_product_attention=true"),
            "model.fp8_dot_product_attention=true: attention's own products have delayed scales, which replays do not "
            "move on",
        ),
        (
            ("fp8=tensorwise", "model.fp8_params=true"),
            "model.fp8_params=true: a graph reads weights where they were recorded, and transposes of FP8 weights move",
        ),
        (
            ("fp8=tensorwise", "logging.fp8_statistics_interval=10"),
            "logging.fp8_statistics_interval=10: a replay computes its products without telling of them",
        ),
    ],
)
def test_graphs_are_refused_beside_what_a_replay_cannot_do(broken_rules, overrides, message):
    world_size = 2 if "parallel_size=2" in overrides[0] else 1
    asked = "model.cuda_graph_impl=local"
    assert broken_rules(asked, *overrides, world_size=world_size) == [
        f"{asked} does not go with {message}; use null or none"
    ]
    for other in ("null", "none"):
        assert broken_rules(f"model.cuda_graph_impl={other}", *overrides, world_size=world_size) == []


@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
def test_graphs_go_with_dense_models_that_reduce_gradients_at_the_end(broken_rules, fp8):
    overrides = ("model=gpt2_124m", "model.cuda_graph_impl=local")
    for layout in ("model.use_distributed_optimizer=true", "model.use_distributed_optimizer=false"):
        assert broken_rules(*overrides, f"fp8={fp8}", layout, world_size=2) == []


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ("parallelism=dp", "model.global_batch_size=16"),
            "overlaps exchanges along the sequence, and model.tensor_model_parallel_size=1 with "
            "model.sequence_parallel=false has none; use parallelism=tp2_sp, or false",
        ),
        (
            ("parallelism=tp2",),
            "overlaps exchanges along the sequence, and model.tensor_model_parallel_size=2 with "
            "model.sequence_parallel=false has none; use parallelism=tp2_sp, or false",
        ),
        (
            (*TP2_SP, "model.transformer_engine=false"),
            "is done by Transformer Engine's linear layers, and model.transformer_engine=false excludes them; use "
            "false",
        ),
        (
            (*TP2_SP, "fp8=tensorwise", "model.fp8_emulate=true"),
            "is done by Transformer Engine's linear layers, and model.fp8_emulate=true excludes them; use false",
        ),
        (
            (*TP2_SP, "model=moe_small"),
            "has no buffers for experts, and model.num_moe_experts=4; use false",
        ),
        (
            (*TP2_SP, "fp8=tensorwise", "model.fp8_params=true"),
            "is untried with model.fp8_params=true and model.fp8_recipe=tensorwise; use false",
        ),
        (
            (*TP2_SP, "fp8=delayed", "model.fp8_exclude=['decoder.layers.0.*']"),
            "is untried with model.fp8_exclude=['decoder.layers.0.*']; use false",
        ),
        (
            (*TP2_SP, "fp8=tensorwise", "model.first_last_layers_bf16=true"),
            "is untried with model.first_last_layers_bf16=true; use false",
        ),
        (
            (*TP2_SP, "fp8=tensorwise", "model.fp8_dot_product_attention=true"),
            "is untried with model.fp8_dot_product_attention=true; use false",
        ),
        (
            (*TP2_SP, "model.activations_checkpoint_granularity=selective"),
            "is untried with model.activations_checkpoint_granularity=selective; use false",
        ),
        (
            (*TP2_SP, "model.hidden_size=90", "model.kv_channels=32"),
            "cuts what a layer puts out into four pieces, and model.hidden_size=90 is not divisible by 4; use 88, "
            "92 or false",
        ),
        (
            (*TP2_SP, "fp8=blockwise"),
            "exchanges tensors with one scale, and model.fp8_recipe=blockwise has one for each block; use false, "
            "fp8=delayed or fp8=tensorwise",
        ),
    ],
)
def test_tensor_parallel_overlap_is_refused_where_nothing_could_do_it(broken_rules, overrides, message):
    assert broken_rules(OVERLAP, *overrides, world_size=2) == [f"{OVERLAP} {message}"]
    assert broken_rules(*overrides, world_size=2) == []


def test_tensor_parallel_overlap_goes_with_what_it_has_trained_with(broken_rules):
    overrides = ("fp8=delayed", "model.fp8_params=true", "model.activation_cast_fusion=true")
    assert broken_rules(OVERLAP, *TP2_SP, *overrides, world_size=2) == []


@pytest.mark.parametrize("key", ["model.pipeline_model_parallel_size", "model.context_parallel_size"])
def test_tensor_parallel_overlap_beside_other_layouts_is_untried(broken_rules, key):
    assert broken_rules(OVERLAP, *TP2_SP, f"{key}=2", world_size=4) == [f"{OVERLAP} is untried with {key}=2; use false"]


def test_tensor_parallel_overlap_stays_within_a_node(broken_rules):
    assert broken_rules(OVERLAP, *TP2_SP, "fp8=delayed", world_size=4, local_world_size=2) == []
    assert broken_rules(OVERLAP, *TP2_SP, world_size=2, local_world_size=1) == [
        f"{OVERLAP} reaches the GPUs of one node, and the 1 of a node do not hold whole groups of "
        "model.tensor_model_parallel_size=2; use false"
    ]


def test_registered_buffers_of_nccl_are_refused_with_the_reason(broken_rules):
    (problem,) = broken_rules("model.nccl_ub=true", "parallelism=dp", "model.global_batch_size=16", world_size=2)
    assert problem.startswith("model.nccl_ub=true is refused: megatron-core 0.19 sets NCCL_NVLS_ENABLE=1 for it")
    assert problem.endswith("; use false")
