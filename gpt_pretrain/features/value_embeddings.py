"""`model.value_embedding_freq`: what value embeddings exclude. `megatron.value_embeddings` adds them."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.choices import CudaGraphImpl, LayerName
from gpt_pretrain.config.derived import shards_gradients
from gpt_pretrain.config.errors import show
from gpt_pretrain.features.feature import Feature, Obstacle, Resolved

_UNTESTED = "not tested"


class ValueEmbeddings(Feature):
    """Learned vectors of tokens beside attention's values."""

    key = "value_embedding_freq"
    asked = None
    off = "model.value_embedding_freq=null"
    not_forecast = "lookups of value embeddings"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        model = run.model
        if model.layer is not LayerName.gpt:
            yield f"model.layer={model.layer.name}", "it adds to the values of the program's own layer"
        why = "other stages than the first have no tokens"
        yield from self.needs(model, why, pipeline_model_parallel_size=1)
        why = "the microbatches of a pair would read each other's tokens"
        yield from self.needs(model, why, overlap_moe_expert_parallel_comm=False)
        yield from self.needs(model, "a graph of a whole layer has no place for it", compile=False)
        if model.cuda_graph_impl is CudaGraphImpl.local:
            yield "model.cuda_graph_impl=local", "a replay takes no tokens"
        yield from self.needs(model, _UNTESTED, context_parallel_size=1, use_mup=False)
        if shards_gradients(model):
            sharded = f"model.data_parallel_sharding_strategy={show(model.data_parallel_sharding_strategy)}"
            yield sharded, _UNTESTED, "parallelism=dp"
