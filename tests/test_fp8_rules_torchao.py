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
FIRST = "fp8=torchao_tensorwise model.fp8_recipe=tensorwise"

WRONG = {
    "no engine for anything": Refused(
        "model.fp8_backend=torchao", told="model.fp8_backend=torchao model.fp8=false", offers="model.fp8_backend=null"
    ),
    **{
        f"{name} of TorchAO": Refused(
            f"fp8=torchao_rowwise {EMULATE} model.fp8_recipe={name}",
            told=f"model.fp8_recipe={name} model.fp8_backend=torchao tensorwise rowwise rowwise_with_gw_hp",
            offers=f"{FIRST} | fp8={name} {OTHER_ENGINE}",
        )
        for name in ("delayed", "blockwise", "mxfp8")
    },
    "delayed with the other engine": Refused(
        f"fp8=delayed {EMULATE} model.fp8_backend=torchao",
        told="model.fp8_recipe=delayed model.fp8_backend=torchao",
        offers=f"{FIRST} | fp8=delayed {OTHER_ENGINE}",
    ),
    **{
        f"{name} of Transformer Engine": Refused(
            f"fp8=tensorwise model.fp8_recipe={name}",
            told=f"model.fp8_recipe={name} {OTHER_ENGINE} delayed tensorwise blockwise mxfp8",
            offers=f"fp8=delayed model.fp8_recipe=delayed | fp8=torchao_{name} model.fp8_backend=torchao",
        )
        for name in ("rowwise", "rowwise_with_gw_hp")
    },
    "E5M2 gradients of rows": Refused(
        f"{ROWWISE} model.fp8_hybrid=true",
        told="model.fp8_hybrid=true model.fp8_backend=torchao rowwise",
        offers="model.fp8_hybrid=null,false",
    ),
    "not E4M3 gradients of rows": Refused(
        f"{ROWWISE} model.fp8_e4m3=false",
        told="model.fp8_e4m3=false model.fp8_backend=torchao rowwise",
        offers="model.fp8_e4m3=null,true",
    ),
    "E4M3 gradients of tensors": Refused(
        f"{TENSORWISE} model.fp8_e4m3=true",
        told="model.fp8_e4m3=true model.fp8_backend=torchao tensorwise",
        offers="model.fp8_e4m3=null,false",
    ),
    "not E5M2 gradients of tensors": Refused(
        f"{TENSORWISE} model.fp8_hybrid=false",
        told="model.fp8_hybrid=false model.fp8_backend=torchao tensorwise",
        offers="model.fp8_hybrid=null,true",
    ),
    "weight gradients where the recipe has none": Refused(
        f"{GW_HP} model.fp8_wgrad=true",
        told="model.fp8_wgrad=true model.fp8_recipe=rowwise_with_gw_hp",
        offers="model.fp8_wgrad=null,false | model.fp8_recipe=tensorwise,rowwise",
    ),
    "no weight gradients where the recipe has them": Refused(
        f"{ROWWISE} model.fp8_wgrad=false",
        told="model.fp8_wgrad=false model.fp8_recipe=rowwise",
        offers=f"model.fp8_wgrad=null | fp8=delayed {EMULATE} | fp8=torchao_rowwise_with_gw_hp {EMULATE}",
    ),
    "a margin": Refused(
        f"{ROWWISE} model.fp8_margin=0",
        told="model.fp8_margin=0 model.fp8_recipe=rowwise",
        offers="model.fp8_margin=null | fp8=delayed",
    ),
    "a history": Refused(
        f"{TENSORWISE} model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=max",
        told="model.fp8_amax_history_len=16 model.fp8_amax_compute_algo=max model.fp8_recipe=tensorwise",
        offers="model.fp8_amax_history_len=null model.fp8_amax_compute_algo=null",
    ),
    "an interval": Refused(
        f"{TENSORWISE} model.fp8_interval=1",
        told="model.fp8_interval=1 model.fp8_recipe=tensorwise",
        offers="model.fp8_interval=null | fp8=delayed",
    ),
    "stored weights": Refused(
        f"{ROWWISE} model.fp8_params=true",
        told="model.fp8_params=true model.fp8_recipe=rowwise",
        offers="model.fp8_params=false | fp8=torchao_tensorwise",
    ),
    "stored weights of rows, weight gradients in high precision": Refused(
        f"{GW_HP} model.fp8_params=true",
        told="model.fp8_params=true model.fp8_recipe=rowwise_with_gw_hp",
        offers="model.fp8_params=false | fp8=torchao_tensorwise",
    ),
    "stored weights without masters": Refused(
        f"{TENSORWISE} model.fp8_params=true trainer.precision=fp32",
        told="model.fp8_params=true trainer.precision=fp32",
        offers="model.fp8_params=false | trainer.precision=bf16",
    ),
    "stored weights without the optimizer that casts them": Refused(
        f"{TENSORWISE} model.fp8_params=true model.use_distributed_optimizer=false",
        told="model.fp8_params=true model.use_distributed_optimizer=false",
        offers="model.fp8_params=false | model.use_distributed_optimizer=null,true",
    ),
    "attention": Refused(
        f"{TENSORWISE} model.fp8_dot_product_attention=true",
        told="model.fp8_dot_product_attention=true model.fp8_recipe=tensorwise",
        offers="model.fp8_dot_product_attention=false",
    ),
    "layers of Transformer Engine, on hardware": Refused(
        "fp8=torchao_rowwise model.transformer_engine=true",
        told="model.fp8_backend=torchao model.transformer_engine=true",
        offers="model.transformer_engine=null,false",
    ),
    "FP32 on hardware": Refused(
        "fp8=torchao_rowwise trainer.precision=fp32",
        told="model.fp8_backend=torchao trainer.precision=fp32",
        offers=f"trainer.precision=auto,bf16 | {EMULATE}",
    ),
    "split sequences on hardware": Refused(
        "fp8=torchao_rowwise parallelism=cp2",
        told="model.fp8_backend=torchao model.context_parallel_size=2",
        offers="model.context_parallel_size=1",
    ),
    "experts on hardware": Refused(
        "fp8=torchao_tensorwise model=moe_small",
        told="model.fp8_backend=torchao model.num_moe_experts TorchAO",
        offers="fp8=tensorwise,blockwise,mxfp8",
        legal="fp8=torchao_tensorwise",
    ),
    "experts and an engine of one's own": Refused(
        "fp8=tensorwise model.fp8_backend=torchao model=moe_small",
        told="model.fp8_backend=torchao model.num_moe_experts",
        offers="fp8=tensorwise model.fp8_backend=null",
    ),
    "stored weights on hardware": Refused(
        "fp8=torchao_rowwise model.fp8_params=true",
        told="model.fp8_params=true model.fp8_recipe=rowwise",
        offers="model.fp8_params=false | fp8=torchao_tensorwise",
    ),
    "attention on hardware": Refused(
        "fp8=torchao_tensorwise model.fp8_dot_product_attention=true",
        told="model.fp8_dot_product_attention=true model.fp8_recipe=tensorwise",
        offers="model.fp8_dot_product_attention=false | fp8=delayed,tensorwise",
    ),
    "FlashAttention-4": Refused(
        "fp8=torchao_rowwise model.use_flash_attention=true",
        told="model.use_flash_attention=true model.fp8_backend=torchao",
        offers="model.use_flash_attention=null,false",
    ),
    "layers of Transformer Engine": Refused(
        f"{ROWWISE} model.transformer_engine=true",
        told=f"{EMULATE} model.transformer_engine=true",
        offers="model.transformer_engine=null,false",
    ),
    "split sequences": Refused(
        f"{ROWWISE} parallelism=cp2",
        told=f"{EMULATE} model.context_parallel_size=2",
        offers="model.context_parallel_size=1",
    ),
    "experts": Refused(
        f"{ROWWISE} model.num_moe_experts=4",
        told="model.fp8_backend=torchao model.num_moe_experts",
        legal=ROWWISE,
    ),
    "user buffers": Refused(
        f"{ROWWISE} parallelism=tp2_sp model.tp_comm_overlap=true",
        told=f"model.tp_comm_overlap=true {EMULATE}",
        offers="model.tp_comm_overlap=false",
    ),
    "an activation with its cast": Refused(
        f"{ROWWISE} model.activation_cast_fusion=true",
        told=f"model.activation_cast_fusion=true {EMULATE}",
        offers="model.activation_cast_fusion=false,null",
    ),
    "graphs": Refused(
        f"{ROWWISE} model.cuda_graph_impl=local",
        told=f"model.cuda_graph_impl=local {EMULATE}",
        offers="model.cuda_graph_impl=null,none",
    ),
    "a shape that no product takes": Refused(
        f"{ROWWISE} model.ffn_hidden_size=200",
        told="model.ffn_hidden_size=200 16",
        offers="model.ffn_hidden_size=192,208",
    ),
    "small layers of a recipe without a measured size": Refused(
        f"{GW_HP} model.ffn_hidden_size=1040 {AUTO}",
        told="model.fp8_exclude=[auto] model.fp8_recipe=rowwise_with_gw_hp torchao_rowwise_with_gw_hp",
        offers="model.fp8_exclude=[] | fp8=torchao_tensorwise",
    ),
    "small layers of Transformer Engine": Refused(
        "fp8=delayed model.ffn_hidden_size=1040 model.fp8_exclude=[auto,'*.linear_fc2']",
        told="model.fp8_exclude=[auto,*.linear_fc2] model.fp8_recipe=delayed",
        offers="model.fp8_exclude=['*.linear_fc2'] | fp8=torchao_tensorwise",
    ),
    "small layers alone": Refused(
        f"{ROWWISE} {AUTO}",
        told="model.fp8=true model.fp8_exclude=[auto] 4 self_attention.linear_qkv 256×128 mlp.linear_fc2 128×384",
        offers="model.fp8_exclude=[]",
    ),
    "small layers where there is no FP8": Refused(
        "model.fp8_exclude=[auto]", told="model.fp8_exclude=[auto] model.fp8=false", offers="model.fp8_exclude=[]"
    ),
    "torchtitan's word for small layers": Refused(
        f"{TENSORWISE} model.fp8_exclude=[auto_filter_small_kn]",
        told="model.fp8_exclude 'auto_filter_small_kn' auto",
        legal=f"{TENSORWISE} model.ffn_hidden_size=1040 {AUTO}",
    ),
    "a filter that matches nothing": Refused(
        f"{ROWWISE} model.fp8_exclude=['lm_head']",
        told="model.fp8_exclude 'lm_head' linear_qkv",
        legal=f"{ROWWISE} model.fp8_exclude=['*.linear_qkv']",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_input_is_refused_and_what_is_offered_passes(case):
    check_refused(WRONG[case])


def test_an_engine_that_does_not_exist_is_answered_with_those_that_do():
    with pytest.raises(ConfigError) as refused:
        load_config(["model.fp8=true", "model.fp8_backend=torch_ao"])
    (problem,) = refused.value.problems
    check_told(problem, ["model.fp8_backend='torch_ao'", "transformer_engine", "torchao", "null"])


# Keys of torchtitan, and what the answer names.
FOREIGN = {
    "++fp8.filter_fqns=[lm_head]": "model.fp8_exclude",
    "++fp8.enable_fsdp_float8_all_gather=true": "model.fp8_params",
    "++fp8.precompute_float8_dynamic_scale_for_fsdp=true": "model.fp8_params=true",
}


@pytest.mark.parametrize("override", FOREIGN)
def test_keys_of_torchaos_users_are_answered_with_the_key_they_mean(override):
    with pytest.raises(ConfigError) as refused:
        load_config([override])
    (problem,) = refused.value.problems
    check_told(problem, [override.removeprefix("++").partition("=")[0], FOREIGN[override]])
