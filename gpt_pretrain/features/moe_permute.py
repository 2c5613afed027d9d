"""`model.moe_permute_fusion`: Transformer Engine's kernels that gather the experts' rows of tokens and add them up."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import MoeTokenDispatcher
from gpt_pretrain.config.facts import Facts
from gpt_pretrain.config.schema_model import WITHOUT_EXPERTS
from gpt_pretrain.features.feature import FusedKernel, Kernels, Obstacle, Platform, Resolved


class MoePermute(FusedKernel):
    """Sort tokens by expert, and back, in TE's kernels; null: on with TE layers, unless EP ranks gather all tokens."""

    key = "moe_permute_fusion"
    after = "moe_grouped_kernel"
    facts = Facts(unread=[WITHOUT_EXPERTS], idle=[None, False])
    changes_te_layers = True
    core_field = "moe_permute_fusion"

    @override
    def own_obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model, ep = run.model, run.model.expert_model_parallel_size
        if model.num_moe_experts is None:
            # `rules.no_effect` refuses it.
            return
        if model.fp8 and model.fp8_emulate:
            why = "each emulated expert is a local layer with products of its own"
            yield "model.fp8_emulate=true", why, "model.fp8_emulate=false"
        if model.moe_token_dispatcher_type is MoeTokenDispatcher.allgather and ep > 1:
            setting = f"model.moe_token_dispatcher_type=allgather and model.expert_model_parallel_size={ep}"
            why = "Transformer Engine 2.12 returns no tokens at all on a rank whose experts got none, and the run would"
            yield setting, f"{why} end"

    @override
    def gains(self, run: Resolved, platform: Platform, kernels: Kernels) -> bool:
        return kernels.transformer_engine and run.model.num_moe_experts is not None

    @override
    def permutation_passes(self, choices: int, separate: float) -> float:
        # One kernel gathers all rows of a token and reads it once, another adds them up and writes the sum once.
        return 4 + 4 / choices
