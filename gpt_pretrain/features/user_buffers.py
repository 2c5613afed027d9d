"""`model.tp_comm_overlap`: linear layers exchange activations during products, in buffers of `megatron.parallel`."""

from collections.abc import Iterator
from typing import override

from gpt_pretrain.config.errors import multiples_near, one_of, show
from gpt_pretrain.config.recipes import Use, recipes_for
from gpt_pretrain.features.feature import Feature, Lack, Obstacle, Resolved, RunSpec
from gpt_pretrain.run.fp8 import local_layers
from gpt_pretrain.run.platform import MULTICAST_OFF, NO_MULTICAST, USER_BUFFERS_WITHOUT


class UserBuffers(Feature):
    """Exchanges between tensor parallel ranks during products."""

    key = "tp_comm_overlap"
    off = "model.tp_comm_overlap=false"
    changes_te_layers = True
    not_forecast = "memory and speed are those without overlapped exchanges"

    @override
    def obstacles(self, run: Resolved, *, sizes_known: bool) -> Iterator[Obstacle]:
        """What `initialize_ub` of TE 2.12 and the linear layers that use the buffers need."""
        if not sizes_known:
            return
        model, tp, launch = run.model, run.model.tensor_model_parallel_size, run.launch
        if tp == 1 or not model.sequence_parallel:
            sequence = f"model.sequence_parallel={show(model.sequence_parallel)}"
            layout = f"model.tensor_model_parallel_size={tp} and {sequence}"
            yield layout, "it overlaps exchanges along the sequence, and there are none", "parallelism=tp2_sp"
        local = local_layers(model) or ("model.transformer_engine=false" if model.transformer_engine is False else "")
        if local:
            yield local, "it needs Transformer Engine's linear layers"
        yield from self.needs(model, "it has no buffers for experts", num_moe_experts=None)
        untested = "not tested"
        yield from self.needs(model, untested, pipeline_model_parallel_size=1, context_parallel_size=1)
        yield from self.needs(model, untested, activations_checkpoint_granularity=None)
        if run.fp8 is not None and run.fp8.params and run.fp8.recipe.why_not(Use.fp8_params_and_tp_comm_overlap):
            yield f"model.fp8_params=true and model.fp8_recipe={run.fp8.recipe.name}", untested
        yield from self.needs(model, untested, fp8_dot_product_attention=False, first_last_layers_bf16=False)
        yield from self.needs(model, untested, fp8_exclude=[])
        if model.hidden_size % 4:
            near = one_of(multiples_near(model.hidden_size, 4))
            in_four = "it splits a layer's output in four"
            yield f"model.hidden_size={model.hidden_size}", in_four, f"model.hidden_size={near}"
        if run.fp8 is not None and (why := run.fp8.recipe.why_not(Use.tp_comm_overlap)) is not None:
            why = f"{why}, and only tensors with one scale are exchanged"
            yield f"model.fp8_recipe={run.fp8.recipe.name}", why, f"fp8={recipes_for(Use.tp_comm_overlap)}"
        if launch is not None and launch.world_size > 1 and launch.local_world_size % tp:
            whole = f"{launch.local_world_size} processes do not hold whole groups of this size"
            yield f"model.tensor_model_parallel_size={tp}", f"it works within a node, and {whole}"

    @override
    def lacks(self, spec: RunSpec) -> Iterator[Lack]:
        yield from super().lacks(spec)
        variables, off = spec.platform.multicast_variables, MULTICAST_OFF
        has_none = variables.get(NO_MULTICAST) == off[NO_MULTICAST]
        if has_none and variables.get(USER_BUFFERS_WITHOUT) != off[USER_BUFFERS_WITHOUT]:
            why = f"{NO_MULTICAST}={off[NO_MULTICAST]} in the environment says that this host has none"
            way = f"export {USER_BUFFERS_WITHOUT}={off[USER_BUFFERS_WITHOUT]} for buffers without it"
            yield "NVLink multicast for its user buffers", why, way
