"""The model class: megatron-core's GPT with the embedding and the head of this application.

No other file names megatron-core's class, which it deprecated in July 2026 in favour of `HybridModel`. 0.19.2 cannot
replace it with that yet: `HybridModel` has no virtual pipeline.
"""

from typing import Any, override

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from gpt_pretrain.config.choices import LayerName
from gpt_pretrain.config.derived import padded_vocab_size, uses_yarn
from gpt_pretrain.features.mup import output_mult
from gpt_pretrain.megatron.loss import LossHead
from gpt_pretrain.megatron.own_model import mark_replicas, named_layers
from gpt_pretrain.megatron.value_embeddings import ValueEmbeddings
from gpt_pretrain.run.run_spec import RunSpec


class GPT(GPTModel):  # type: ignore[misc]  # megatron-core has no types
    """The part of a run's model on this pipeline rank, or in one of its virtual stages; weights are not drawn yet.

    On the last stage it maps tokens [b, s] to logits [b, s, vocab / TP], or with labels to losses [b, s]; on the others
    to hidden states [s, b, h] (s / TP under sequence parallelism).
    """

    output_layer: Any
    """On the last stage a `LossHead`."""
    value_embeddings: ValueEmbeddings | None
    """None without `value_embedding_freq`."""

    def __init__(
        self, spec: RunSpec, config: TransformerConfig, layers: TransformerBlockSubmodules, vp_stage: int | None
    ) -> None:
        self._spec, model = spec, spec.model
        super().__init__(
            config=config,
            transformer_layer_spec=layers,
            vocab_size=padded_vocab_size(model),
            max_sequence_length=model.max_position_embeddings,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            parallel_output=True,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
            position_embedding_type="yarn" if uses_yarn(model) else model.position_embedding_type.value,
            rotary_percent=model.rotary_percentage,
            rotary_base=model.rotary_base,
            rope_scaling=model.rope_scaling_factor is not None,
            rope_scaling_factor=model.rope_scaling_factor or 1.0,
            vp_stage=vp_stage,
        )
        self.value_embeddings = None if model.value_embedding_freq is None else ValueEmbeddings(model, config)
        if self.value_embeddings is not None:
            self.value_embeddings.attach(self.decoder.layers)

    @override
    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """See the class; the arguments are megatron-core's."""
        with named_layers(self._spec, "a forward pass"):
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]

    @override
    def _preprocess(self, input_ids: Any, position_ids: torch.Tensor | None, *args: Any, **kwargs: Any) -> Any:
        """megatron-core's; where documents do not see each other, queries and keys are rotated by their positions.

        megatron-core rotates by places in the sequence.
        """
        hidden, rotation, *others = super()._preprocess(input_ids, position_ids, *args, **kwargs)
        if self.value_embeddings is not None:
            self.value_embeddings.tokens = input_ids
        if rotation is not None and position_ids is not None and self._spec.model.data.inter_document_masking:
            # Context parallel ranks get their own places' angles; here each looks up its positions among all.
            num_places = position_ids.size(1) * self.config.context_parallel_size
            angles = self.rotary_pos_emb(num_places, packed_seq=True)
            if uses_yarn(self._spec.model):
                # With the factor of cosines and sines, which layers have from their config.
                angles, _ = angles
            # All rows have the same positions: documents come in one row, and generation's rows count alike.
            rotation = angles.index_select(0, position_ids[0])
        return hidden, rotation, *others

    @override
    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """See megatron-core's."""
        state: dict[str, Any] = super().sharded_state_dict(*args, **kwargs)
        if self._spec.model.layer is not LayerName.gpt:
            mark_replicas(state)
        return state

    @override
    def setup_embeddings_and_output_layer(self) -> None:
        """Puts a `LossHead` in place of megatron-core's LM head, and marks the weights; the last call of a build."""
        if self.post_process:
            assert type(self.output_layer) is ColumnParallelLinear, "LossHead was written for this very class"
            weight = self.output_layer.weight
            self.output_layer = LossHead(
                self.config.hidden_size,
                self.vocab_size,
                config=self.config,
                init_method=self.config.init_method,
                bias=False,
                gather_output=not self.parallel_output,
                # Drawing another one would change what dropout draws later.
                skip_weight_param_allocation=True,
                embedding_activation_buffer=self.embedding_activation_buffer,
                grad_output_buffer=self.grad_output_buffer,
                tp_group=self.pg_collection.tp,
            )
            self.output_layer.weight = weight
            self.output_layer.z_loss_coeff = self._spec.model.z_loss_coeff
            self.output_layer.cap = self._spec.model.final_logit_softcapping
            self.output_layer.num_tokens = self._spec.model.vocab_size
            self.output_layer.output_mult = output_mult(self._spec.model)
        super().setup_embeddings_and_output_layer()

    @override
    def _scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """What megatron-core multiplies by muP's multiplier after its head; a `LossHead` has done so."""
        return logits
