"""`model.data.inter_document_masking`: attention inside documents (`megatron.documents`, `data.documents`)."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import LayerName, MoeLoadBalancing
from gpt_pretrain.config.derived import num_query_groups
from gpt_pretrain.features.feature import Feature, Lack, Obstacle, Resolved, RunSpec
from gpt_pretrain.run.platform import CONSUMER_BLACKWELL, HOPPER


class DocumentMasking(Feature):
    """Documents that do not see each other."""

    key = "data.inter_document_masking"
    off = "model.data.inter_document_masking=false"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        if model.layer is not LayerName.gpt:
            yield f"model.layer={model.layer.name}", "layers of extensions are not tested with borders of documents"
        if model.fp8_dot_product_attention:
            # nvte_get_fused_attn_backend (Transformer Engine 2.12): FP8 takes the formats bshd and sbhd.
            off = "model.fp8_dot_product_attention=false"
            yield "model.fp8_dot_product_attention=true", "cuDNN's FP8 attention takes no packed documents", off
        if model.masked_softmax_fusion:
            why = "apex's softmax has one mask for all sequences"
            yield "model.masked_softmax_fusion=true", why, "model.masked_softmax_fusion=null"
        if model.overlap_moe_expert_parallel_comm:
            off = "model.overlap_moe_expert_parallel_comm=false"
            yield "model.overlap_moe_expert_parallel_comm=true", "not tested", off
        if model.moe_router_load_balancing_type is MoeLoadBalancing.seq_aux_loss and model.micro_batch_size > 1:
            balance = "model.moe_router_load_balancing_type=seq_aux_loss"
            why = "it balances each sample, and the samples of a microbatch are one sequence here"
            yield f"{balance} with model.micro_batch_size={model.micro_batch_size}", why, "model.micro_batch_size=1"
        ranks = model.tensor_model_parallel_size * model.context_parallel_size
        groups = num_query_groups(model)
        if sizes_known and model.context_parallel_size > 1 and groups % ranks:
            why = (
                f"context parallel ranks exchange heads, and model.num_query_groups={groups} is not divisible by "
                f"{ranks} (tensor_model_parallel_size × context_parallel_size)"
            )
            yield f"model.context_parallel_size={model.context_parallel_size}", why, "model.context_parallel_size=1"

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        capability = spec.platform.compute_capability
        if capability is None or not spec.kernels.transformer_engine:
            return
        # Elsewhere Transformer Engine would write the scores of all documents, each padded to a whole sample.
        if not HOPPER <= capability < CONSUMER_BLACKWELL:
            yield "compute capability 9.x or 10.x in Transformer Engine's layers", f"this is {spec.platform.gpu}"
