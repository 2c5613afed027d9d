"""Requested → effective: the table of fields against translations that differ in one key; what is inert, and why."""

from collections import defaultdict
from dataclasses import replace

import pytest

from gpt_pretrain.config.derived import model_parallel_size
from gpt_pretrain.config.keys import schema_keys
from gpt_pretrain.launch.ranks import rank_zero_of
from gpt_pretrain.megatron.core_fields import HighPrecision
from gpt_pretrain.megatron.model import _live, translate_ddp, translate_optimizer, translate_transformer
from gpt_pretrain.plan.effective import fields_by_class, is_fp8_key, planned_keys
from tests.nemo import NEMO_FP8_WITH_TE
from tests.planning import plan_of
from tests.platforms import H200, spec_of
from tests.refusals import compose_quickly

FP8 = ("fp8=delayed", "model.use_distributed_optimizer=true")
TENSORWISE = ("fp8=tensorwise", "model.use_distributed_optimizer=true")
LEAN = ("model.use_distributed_optimizer=true", "model.optim.use_precision_aware_optimizer=true")
PP2 = "model.pipeline_model_parallel_size=2"
TP2 = "model.tensor_model_parallel_size=2"
FULL = "model.activations_checkpoint_granularity=full"
UNIFORM, ONE = "model.activations_checkpoint_method=uniform", "model.activations_checkpoint_num_layers=1"
# What a key is changed to, and beside which other settings; together they reach every field of the table.
CHANGES = [
    ("trainer.precision=fp32", ("model.transformer_engine=false", "model.cross_entropy_loss_fusion=false")),
    ("model.transformer_engine=false", ()),
    ("model.fp8=true", ("model.fp8_recipe=null",)),
    ("model.fp8_recipe=tensorwise", FP8),
    ("model.fp8_hybrid=true", ("fp8=blockwise", "model.fp8_e4m3=null")),
    ("model.fp8_e4m3=true", FP8),
    ("model.fp8_margin=2", FP8),
    ("model.fp8_amax_history_len=16", FP8),
    ("model.fp8_amax_compute_algo=most_recent", FP8),
    ("model.fp8_wgrad=false", FP8),
    ("model.fp8_params=true", FP8),
    ("model.fp8_dot_product_attention=true", FP8),
    ("model.num_layers_at_start_in_bf16=2", (*TENSORWISE, "model.first_last_layers_bf16=true")),
    ("model.num_layers_at_end_in_bf16=2", (*TENSORWISE, "model.first_last_layers_bf16=true")),
    ("model.fp8_exclude=['*.linear_fc2']", FP8),
    ("model.tensor_model_parallel_size=2", ()),
    (PP2, ()),
    ("model.virtual_pipeline_model_parallel_size=2", (PP2, "parallelism=dp")),
    ("model.context_parallel_size=2", ()),
    ("model.expert_model_parallel_size=2", ("model=moe_small",)),
    ("model.expert_tensor_parallel_size=2", ("model=moe_small",)),
    ("model.sequence_parallel=true", (TP2,)),
    ("model.use_distributed_optimizer=true", ()),
    ("model.overlap_grad_reduce=true", ()),
    ("model.overlap_param_gather=true", ("model.use_distributed_optimizer=true", "model.overlap_grad_reduce=true")),
    (
        "model.data_parallel_sharding_strategy=optim_grads",
        ("model=llama3_8b", "model.use_distributed_optimizer=true", "model.overlap_grad_reduce=true"),
    ),
    ("model.num_distributed_optimizer_instances=2", ("model=llama3_8b", "parallelism=fsdp", "plan.num_gpus=4")),
    ("model.ddp_bucket_size=5000000", ("model.overlap_grad_reduce=true",)),
    (
        "model.overlap_moe_expert_parallel_comm=true",
        ("model=moe_small", "model.expert_model_parallel_size=2", "trainer.precision=bf16", "plan.num_gpus=2"),
    ),
    ("model.tp_comm_overlap=true", (TP2, "model.sequence_parallel=true")),
    ("model.grad_reduce_in_fp32=false", ()),
    ("model.optim.use_precision_aware_optimizer=true", ()),
    ("model.optim.main_params_dtype=fp16", LEAN),
    ("model.optim.store_param_remainders=false", LEAN),
    ("model.optim.exp_avg_dtype=fp8", LEAN),
    ("model.optim.exp_avg_sq_dtype=bf16", LEAN),
    ("model.activations_checkpoint_granularity=selective", ()),
    ("model.activations_checkpoint_method=block", (FULL, UNIFORM, ONE)),
    ("model.activations_checkpoint_num_layers=2", (FULL, UNIFORM, ONE)),
]
FP8_KEYS = [key for key in planned_keys() if is_fp8_key(key)]
# These change several fields that belong to the keys beside them: margins and counts that FP8 or a switch turns on.
TOGETHER = {
    "model.fp8": {*FP8_KEYS, "model.fp8"},
    "model.fp8_recipe": {"model.fp8_recipe"},
    "model.fp8_emulate": {*FP8_KEYS, "model.fp8"},
    "model.first_last_layers_bf16": {key for key in planned_keys() if key.endswith("_bf16")},
}
# What megatron-core's own __post_init__ copies from another field.
COPIED = {
    "TransformerConfig.autocast_dtype",
    "TransformerConfig.expert_tensor_parallel_size",
    "TransformerConfig.microbatch_group_size_per_vp_stage",
}


def spec_for(*overrides):
    """A run on two data-parallel ranks of H200s."""
    config = compose_quickly(overrides)
    size = 2 * model_parallel_size(config.model)
    spec = spec_of(config, H200, rank_zero_of(size, local_world_size=size, launcher="torchrun"))
    # megatron-core refuses these fusions where Transformer Engine does not import.
    features = {**spec.kernels.features, "moe_permute_fusion": False}
    return replace(spec, kernels=replace(spec.kernels, apply_rope_fusion=False, features=features))


def built_fields(spec):
    """Every field of megatron-core's configs as training builds them."""
    built = translate_transformer(spec), translate_ddp(spec), translate_optimizer(spec)
    return {f"{type(each).__name__}.{name}": value for each in built for name, value in vars(each).items()}


def stated_fields(*overrides):
    """Key → fields, as `megatron.core_fields` states it for a run."""
    stated = defaultdict(set)
    for class_name, fields in fields_by_class(spec_for("data=mock", *overrides)).items():
        for field in fields:
            for key in field.keys:
                stated[key].add(f"{class_name}.{field.name}")
    return stated


def changed_fields(override, context):
    # What null comes to among the kernels depends on many keys, and is told beside the table.
    context = ["data=mock", "model.cuda_graph_impl=none", "model.fused_single_qkv_rope=false", *context]
    before, after = built_fields(spec_for(*context)), built_fields(spec_for(*context, override))
    changed = {name for name in before if before[name] != after[name]}
    copied = COPIED - stated_fields(*context, override)[override.partition("=")[0]]
    # Initialisers are new functions each time.
    return {name for name in changed if not name.endswith("init_method")} - copied


def key_of(override):
    return override.partition("=")[0]


@pytest.mark.parametrize(("override", "context"), CHANGES)
def test_a_key_changes_the_fields_that_the_table_says(override, context):
    key = key_of(override)
    before, after = stated_fields(*context), stated_fields(*context, override)
    allowed = {field for each in TOGETHER.get(key, {key}) for field in before[each] | after[each]}
    changed = changed_fields(override, context)
    assert changed, "it changes nothing"
    assert changed <= allowed


@pytest.mark.parametrize("key", sorted({key_of(override) for override, _ in CHANGES}))
def test_every_field_of_the_table_is_reached(key):
    changes = [(override, context) for override, context in CHANGES if key_of(override) == key]
    changed = set().union(*(changed_fields(override, context) for override, context in changes))
    assert set().union(*(stated_fields(*context, override)[key] for override, context in changes)) <= changed


@pytest.mark.parametrize(
    "overrides", [(), FP8, TENSORWISE, (*FP8, "model.fp8_emulate=true"), LEAN, ("model=moe_small",), (TP2, PP2)]
)
def test_megatron_core_keeps_every_field_as_it_is_stated(overrides):
    """Its own __post_init__ changes none of them."""
    spec = spec_for("data=mock", *overrides)
    built = built_fields(spec)
    states = {f"OptimizerConfig.{name}" for name in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")}
    for class_name, fields in fields_by_class(spec).items():
        for field in fields:
            name = f"{class_name}.{field.name}"
            if isinstance(field.value, HighPrecision) or name == f"{class_name}.store_param_remainders":
                continue
            assert built[name] == _live(field.value) or (name in states and overrides != LEAN), name


def test_every_fp8_and_parallelism_key_is_in_the_table():
    # Samples per batch become a number of microbatches, which the schedule is called with.
    expected = {
        key
        for key in schema_keys()
        if key.startswith(("model.fp8", "model.overlap_", "model.activations_checkpoint"))
        or key.endswith(("_parallel_size", "_bf16", "sequence_parallel"))
    }
    expected |= {"trainer.precision", "model.transformer_engine", "model.use_distributed_optimizer"}
    expected |= {"model.data_parallel_sharding_strategy", "model.num_distributed_optimizer_instances"}
    expected |= {key for key in schema_keys() if key.startswith("model.optim.") and key.endswith("_dtype")}
    expected |= {"model.optim.use_precision_aware_optimizer", "model.optim.store_param_remainders"}
    expected |= {"model.grad_reduce_in_fp32", "model.tp_comm_overlap", "model.ddp_bucket_size"}
    assert set(planned_keys()) == expected


TC, DDP, OPT = "TransformerConfig", "DistributedDataParallelConfig", "OptimizerConfig"


def test_nemos_override_string_lands_where_it_should():
    settings = {setting.key: setting for setting in plan_of(*NEMO_FP8_WITH_TE).settings}
    shown = {
        "model.transformer_engine": ("true", {f"{TC}.transformer_impl": "transformer_engine"}),
        "model.fp8": ("true", {f"{TC}.fp8": "hybrid"}),
        "model.fp8_recipe": ("null", {f"{TC}.fp8_recipe": "delayed", f"{OPT}.fp8_recipe": "delayed"}),
        "model.fp8_hybrid": ("true", {f"{TC}.fp8": "hybrid"}),
        "model.fp8_e4m3": ("false", {f"{TC}.fp8": "hybrid"}),
        "model.fp8_margin": ("0", {f"{TC}.fp8_margin": "0"}),
        "model.fp8_amax_history_len": ("1024", {f"{TC}.fp8_amax_history_len": "1024"}),
        "model.fp8_amax_compute_algo": ("max", {f"{TC}.fp8_amax_compute_algo": "max"}),
        "model.fp8_params": ("true", {f"{TC}.fp8_param": "true", f"{DDP}.fp8_param_gather": "true"}),
        "model.use_distributed_optimizer": (
            "null",
            {f"{DDP}.use_distributed_optimizer": "true", f"{OPT}.use_distributed_optimizer": "true"},
        ),
    }
    for key, expected in shown.items():
        assert (settings[key].requested, settings[key].effective) == expected
        assert settings[key].inert == ""


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        ((), "model.fp8_margin", "model.fp8=false"),
        ((), "model.fp8_exclude", "model.fp8=false"),
        (("fp8=delayed", "model.fp8_e4m3=true"), "model.fp8_hybrid", "model.fp8_e4m3=true, which overrules it"),
        (
            ("fp8=tensorwise",),
            "model.fp8_margin",
            "model.fp8_recipe=tensorwise: the scale of a tensor comes from the tensor itself",
        ),
        (
            ("fp8=blockwise",),
            "model.fp8_amax_compute_algo",
            "model.fp8_recipe=blockwise: the scale of a block comes from the block itself",
        ),
        (
            ("fp8=delayed",),
            "model.fp8_interval",
            "Transformer Engine ignores it and computes new scales at every step (since 1.8)",
        ),
        (("fp8=delayed",), "model.num_layers_at_end_in_bf16", "model.first_last_layers_bf16=false"),
        (("fp8=delayed",), "model.fp8_margin", ""),
        (("fp8=tensorwise", "model.first_last_layers_bf16=true"), "model.num_layers_at_end_in_bf16", ""),
        ((), "model.tensor_model_parallel_size", ""),
        ((), "model.fp8", ""),
        ((), "model.expert_model_parallel_size", "model.num_moe_experts=null"),
        ((), "model.optim.exp_avg_dtype", "model.optim.use_precision_aware_optimizer=false"),
        (LEAN, "model.optim.store_param_remainders", ""),
        (
            (*LEAN, "model.optim.main_params_dtype=fp16"),
            "model.optim.store_param_remainders",
            "model.optim.main_params_dtype=fp16, which is stored whole",
        ),
    ],
)
def test_inert_keys_are_named_with_the_reason(overrides, key, why):
    (setting,) = [setting for setting in plan_of(*overrides).settings if setting.key == key]
    assert setting.inert == why


def test_emulated_layers_get_what_megatron_core_is_not_told():
    plan = plan_of("fp8=delayed", "model.fp8_emulate=true", "model.fp8_margin=3", "model.fp8_exclude=['*.linear_fc2']")
    settings = {setting.key: setting.effective for setting in plan.settings}
    assert settings["model.fp8"] == {f"{TC}.fp8": "null"}
    assert settings["model.fp8_margin"] == {"local layers": "3"}
    assert settings["model.fp8_exclude"] == {"local layers": "[*.linear_fc2]"}
    assert settings["model.fp8_emulate"] == {f"{TC}.transformer_impl": "local", "local layers": "true"}
