"""Plans for tests, in this process: from overrides to what `python -m gpt_pretrain.plan` computes."""

from functools import cache

from gpt_pretrain.plan.forecast import Plan, build_plan
from tests.refusals import compose_quickly

# What ran by default up to 2026-11-21: measurements of those days are of it.
SEPARATE_KERNELS = (
    "model.cross_entropy_fusion_impl=native",
    "model.gradient_accumulation_fusion=false",
    "model.activation_cast_fusion=false",
)

# benchmarks/mixtral_8x7b_2layers_4xh200.md: two layers of Mixtral 8x7B on four H200s.
MIXTRAL_TWO_LAYERS = (
    "model=mixtral_8x7b",
    "model.num_layers=2",
    "parallelism=ep2",
    "model.global_batch_size=8",
    "plan.num_gpus=4",
    "model.moe_permute_fusion=false",
)
EP4 = "model.expert_model_parallel_size=4"


@cache
def plan_of(*overrides: str) -> Plan:
    """The plan of a run; the rules are not asked. Tests share plans and change none."""
    config = compose_quickly(["data=mock", *overrides])
    return build_plan(config)
