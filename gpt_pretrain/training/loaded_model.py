"""The model of a checkpoint for forward passes alone: to generate text and to evaluate, in any layout."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from megatron.core import dist_checkpointing

from gpt_pretrain.checkpoint.saved_model import SavedModel
from gpt_pretrain.checkpoint.state import METADATA, describe_weights, take_extra_states
from gpt_pretrain.config import own
from gpt_pretrain.config.schema import Config
from gpt_pretrain.features.registry import all_features
from gpt_pretrain.features.resolve import build_run_spec, detect_platform
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.megatron.model import Model, build_inference_model
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.pickles import restricted
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.run_spec import RunSpec


def inference_config(saved: SavedModel, layout: Sequence[str] = ()) -> Config:
    """The default configuration with the saved model and own keys: no FP8, its precision, and a layout by overrides."""
    model = saved.config.model
    # Transformer Engine's layers multiply fp32 in TF32. The rest runs on whatever this machine has.
    is_fp32 = saved.manifest.architecture.get("parameters") == "float32"
    precision, transformer_engine = ("fp32", "false") if is_fp32 else ("bf16", "null")
    config = load_config(
        [
            *("model=base", "parallelism=single", "fp8=none"),
            *(f"{key}={value}" for key, value in describe_weights(model).items()),
            f"model.make_vocab_size_divisible_by={model.make_vocab_size_divisible_by}",
            f"model.encoder_seq_length={model.encoder_seq_length}",
            f"trainer.precision={precision}",
            f"model.transformer_engine={transformer_engine}",
            *(f"model.{feature.key}=false" for feature in all_features() if feature.compiles_first),
            # Graphs have the shape of a microbatch.
            "model.cuda_graph_impl=none",
            *layout,
        ]
    )
    for group in own.SECTIONS:
        setattr(config, group, getattr(saved.config, group))
    return config


@contextmanager
def loaded_model(saved: SavedModel, config: Config, launch: Launch) -> Iterator[Model]:
    """The model with the checkpoint's weights; opens process groups, in which every rank calls it."""
    platform = detect_platform()
    with process_groups(config.model, launch, platform):
        yield load_model(saved, build_run_spec(config, launch, platform))


def load_model(saved: SavedModel, spec: RunSpec) -> Model:
    """The model with the checkpoint's weights, in open process groups; every rank calls it."""
    model = build_inference_model(spec)
    (chunk,) = model.gpt_chunks
    wanted = chunk.sharded_state_dict(metadata=dict(METADATA))
    # The saved layers may have FP8 scales; these layers, without FP8, have none.
    extra_states = take_extra_states(wanted)
    with restricted(saved.path):
        state = dist_checkpointing.load({"model": wanted}, str(saved.path))["model"]
        chunk.load_state_dict(state | dict.fromkeys(extra_states))
    return model
