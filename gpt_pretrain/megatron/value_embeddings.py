"""Value embeddings: a learned vector of each token, added to attention's values in every n-th layer from the last.

Zhou et al. 2024 (arXiv 2410.17897) add the first layer's values to later ones; a table of its own for a layer, as in
modded-nanogpt and nanochat, costs nothing but memory and a lookup. Adam trains the tables, with the embeddings' rate.
"""

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from gpt_pretrain.config.derived import kv_channels, layers_with_value_embeddings, num_query_groups, padded_vocab_size
from gpt_pretrain.config.schema import ModelConfig


class ValueEmbeddings(torch.nn.Module):
    """The tables of a model's layers, [vocabulary, groups / TP · width] each, in `tables` by the layer's number."""

    tokens: torch.Tensor | None = None
    """The microbatch's, [b, s]; the model sets them before its layers run."""

    def __init__(self, model: ModelConfig, config: TransformerConfig) -> None:
        super().__init__()
        self._mult = model.value_embedding_mult
        groups = num_query_groups(model) // parallel_state.get_tensor_model_parallel_world_size()
        shape = padded_vocab_size(model), groups * kv_channels(model)
        self.tables = torch.nn.ParameterDict()
        for layer in layers_with_value_embeddings(model):
            table: Any = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype, device=torch.cuda.current_device())
            )
            # megatron-core's marks: how ranks cut it, and whose rate it has.
            table.tensor_model_parallel, table.partition_dim, table.partition_stride = True, 1, 1
            table.is_embedding_parameter = table.is_embedding_or_output_parameter = True
            self.tables[str(layer)] = table

    def attach(self, layers: torch.nn.ModuleList) -> None:
        """Has the attention of each layer with a table add to its values."""
        for number in self.tables:
            attention: Any = layers[int(number)]
            attention.self_attention.core_attention.register_forward_pre_hook(partial(self._add, number))

    def _add(self, number: str, attention: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Before attention: values [s, b, groups, width], or packed [s, groups, width], with the tokens' vectors."""
        query, key, value, *others = inputs
        assert self.tokens is not None, "the model sets them"
        vectors = torch.nn.functional.embedding(self.tokens.t(), self.tables[number])
        return query, key, torch.add(value, vectors.view_as(value), alpha=self._mult), *others

    def sharded_state_dict(self, prefix: str, sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """The tables for megatron-core's checkpoints: tensor parallel ranks have the columns of their heads."""
        state = self.state_dict(prefix="", keep_vars=True)
        result: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            state, prefix, dict.fromkeys(state, 1), sharded_offsets
        )
        return result
