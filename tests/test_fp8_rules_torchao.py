"""Wrong inputs of the TorchAO engine: each is refused with key, value, rule and a way out that the rules let pass."""

import pytest

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.rules.jobs import load_config
from tests.refusals import Refused, check_refused, check_told

EMULATE = "model.fp8_emulate=true"
TENSORWISE, ROWWISE, GW_HP = (
    f"fp8=torchao_{name} {EMULATE}" for name in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
)
AUTO = "model.fp8_exclude=auto"
OTHER_ENGINE = "model.fp8_backend=transformer_engine"

WRONG = [
    Refused(
        f"fp8=torchao_rowwise {EMULATE} model.fp8_recipe=delayed",
        "model.fp8_recipe=delayed model.fp8_backend=torchao tensorwise rowwise rowwise_with_gw_hp",
    ),
    Refused(
        f"fp8=torchao_rowwise {EMULATE} model.fp8_recipe=blockwise",
        "model.fp8_recipe=blockwise model.fp8_backend=torchao tensorwise rowwise rowwise_with_gw_hp",
    ),
    Refused(
        f"fp8=torchao_rowwise {EMULATE} model.fp8_recipe=mxfp8",
        "model.fp8_recipe=mxfp8 model.fp8_backend=torchao tensorwise rowwise rowwise_with_gw_hp",
    ),
    Refused(f"fp8=delayed {EMULATE} model.fp8_backend=torchao", "model.fp8_recipe=delayed model.fp8_backend=torchao"),
    Refused(
        "fp8=tensorwise model.fp8_recipe=rowwise",
        f"model.fp8_recipe=rowwise {OTHER_ENGINE} delayed tensorwise blockwise mxfp8",
    ),
    Refused(
        "fp8=tensorwise model.fp8_recipe=rowwise_with_gw_hp",
        f"model.fp8_recipe=rowwise_with_gw_hp {OTHER_ENGINE} delayed tensorwise blockwise mxfp8",
    ),
    Refused(f"{ROWWISE} model.fp8_hybrid=true", "model.fp8_hybrid=true model.fp8_backend=torchao rowwise"),
    Refused(f"{ROWWISE} model.fp8_e4m3=false", "model.fp8_e4m3=false model.fp8_backend=torchao rowwise"),
    Refused(f"{TENSORWISE} model.fp8_e4m3=true", "model.fp8_e4m3=true model.fp8_backend=torchao tensorwise"),
    Refused(f"{TENSORWISE} model.fp8_hybrid=false", "model.fp8_hybrid=false model.fp8_backend=torchao tensorwise"),
    Refused(f"{GW_HP} model.fp8_wgrad=true", "model.fp8_wgrad=true model.fp8_recipe=rowwise_with_gw_hp"),
    Refused(f"{ROWWISE} model.fp8_wgrad=false", "model.fp8_wgrad=false model.fp8_recipe=rowwise"),
    Refused(f"{ROWWISE} model.fp8_margin=0", "model.fp8_margin=0 model.fp8_recipe=rowwise"),
    Refused(
        f"{TENSORWISE} model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=max",
        "model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=max model.fp8_recipe=tensorwise",
    ),
    Refused(f"{TENSORWISE} model.fp8_interval=1", "model.fp8_interval=1 model.fp8_recipe=tensorwise"),
    Refused(f"{ROWWISE} model.fp8_params=true", "model.fp8_params=true model.fp8_recipe=rowwise"),
    Refused(f"{GW_HP} model.fp8_params=true", "model.fp8_params=true model.fp8_recipe=rowwise_with_gw_hp"),
    Refused(
        f"{TENSORWISE} model.fp8_params=true trainer.precision=fp32", "model.fp8_params=true trainer.precision=fp32"
    ),
    Refused(
        f"{TENSORWISE} model.fp8_params=true model.use_distributed_optimizer=false",
        "model.fp8_params=true model.use_distributed_optimizer=false",
    ),
    Refused(
        f"{TENSORWISE} model.fp8_dot_product_attention=true",
        "model.fp8_dot_product_attention=true model.fp8_recipe=tensorwise",
    ),
    Refused(
        "fp8=torchao_rowwise model.transformer_engine=true", "model.fp8_backend=torchao model.transformer_engine=true"
    ),
    Refused("fp8=torchao_rowwise trainer.precision=fp32", "model.fp8_backend=torchao trainer.precision=fp32"),
    Refused("fp8=torchao_rowwise parallelism=cp2", "model.fp8_backend=torchao model.context_parallel_size=2"),
    Refused("fp8=torchao_tensorwise model=moe_small", "model.fp8_backend=torchao model.num_moe_experts TorchAO"),
    Refused(
        "fp8=tensorwise model.fp8_backend=torchao model=moe_small", "model.fp8_backend=torchao model.num_moe_experts"
    ),
    Refused("fp8=torchao_rowwise model.fp8_params=true", "model.fp8_params=true model.fp8_recipe=rowwise"),
    Refused(
        "fp8=torchao_tensorwise model.fp8_dot_product_attention=true",
        "model.fp8_dot_product_attention=true model.fp8_recipe=tensorwise",
    ),
    Refused(
        "fp8=torchao_rowwise model.use_flash_attention=true", "model.use_flash_attention=true model.fp8_backend=torchao"
    ),
    Refused(f"{ROWWISE} model.transformer_engine=true", f"{EMULATE} model.transformer_engine=true"),
    Refused(f"{ROWWISE} parallelism=cp2", f"{EMULATE} model.context_parallel_size=2"),
    Refused(f"{ROWWISE} model.num_moe_experts=4", "model.fp8_backend=torchao model.num_moe_experts"),
    Refused(f"{ROWWISE} parallelism=tp2_sp model.tp_comm_overlap=true", f"model.tp_comm_overlap=true {EMULATE}"),
    Refused(f"{ROWWISE} model.activation_cast_fusion=true", f"model.activation_cast_fusion=true {EMULATE}"),
    Refused(f"{ROWWISE} model.cuda_graph_impl=local", f"model.cuda_graph_impl=local {EMULATE}"),
    Refused(f"{ROWWISE} model.ffn_hidden_size=200", "model.ffn_hidden_size=200 16"),
    Refused(
        f"{GW_HP} model.ffn_hidden_size=1040 {AUTO}",
        "model.fp8_exclude=[auto] model.fp8_recipe=rowwise_with_gw_hp torchao_rowwise_with_gw_hp",
    ),
    Refused(
        "fp8=delayed model.ffn_hidden_size=1040 model.fp8_exclude=[auto,'*.linear_fc2']",
        "model.fp8_exclude=[auto,*.linear_fc2] model.fp8_recipe=delayed",
    ),
    Refused(
        f"{ROWWISE} {AUTO}",
        "model.fp8=true model.fp8_exclude=[auto] 4 self_attention.linear_qkv 256×128 mlp.linear_fc2 128×384",
    ),
    Refused(
        f"{TENSORWISE} model.fp8_exclude=[auto_filter_small_kn]",
        "model.fp8_exclude 'auto_filter_small_kn' auto",
        legal=f"{TENSORWISE} model.ffn_hidden_size=1040 {AUTO}",
    ),
    Refused(
        f"{ROWWISE} model.fp8_exclude=['lm_head']",
        "model.fp8_exclude 'lm_head' linear_qkv",
        legal=f"{ROWWISE} model.fp8_exclude=['*.linear_qkv']",
    ),
]


@pytest.mark.parametrize("row", WRONG, ids=str)
def test_a_wrong_input_is_refused_and_what_is_offered_passes(row):
    check_refused(row)


def test_an_engine_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ConfigError) as refused:
        load_config(["model.fp8=true", "model.fp8_backend=torch_ao"])
    (problem,) = refused.value.problems
    check_told(problem, ["model.fp8_backend='torch_ao'", "transformer_engine", "torchao", "null"])


# Keys of torchtitan, and what the answer names.
FOREIGN = {
    "++fp8.filter_fqns=[lm_head]": "model.fp8_exclude",
    "++fp8.enable_fsdp_float8_all_gather=true": "model.fp8_params",
}


@pytest.mark.parametrize("override", FOREIGN)
def test_keys_of_torchaos_users_are_answered_with_the_key_they_mean(override):
    with pytest.raises(ConfigError) as refused:
        load_config([override])
    (problem,) = refused.value.problems
    check_told(problem, [override.removeprefix("++").partition("=")[0], FOREIGN[override]])
