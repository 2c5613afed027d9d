"""A tiny GPT in this process: what the application builds, with emulated FP8 or other layers, and batches to learn."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
from torch.distributed import distributed_c10d

from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.checkpoint.save import CheckpointSaver
from gpt_pretrain.config.derived import expert_tensor_parallel_size
from gpt_pretrain.config.errors import RunError
from gpt_pretrain.config.schema import Config, ModelConfig
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.fp8.gemms import Fp8Operand, Phase, Product, Role
from gpt_pretrain.fp8.local_layers import Fp8Layers, Fp8Linear, fp8_layers
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.fp8.te_products import is_te_linear
from gpt_pretrain.fp8.torchao import TorchAO
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import lay_out_ranks, process_groups, seed_dropout, track_random_states
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.training.step import StepResult, compute_gradients, data_iterators, mean_loss, train_step, validate
from tests.platforms import spec_of
from tests.refusals import compose_quickly

# Two layers, four heads of 16; a step is two microbatches of two sequences.
TINY = (
    "data=mock",
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=128",
    "model.num_attention_heads=4",
    "model.vocab_size=128",
    "model.encoder_seq_length=32",
    "model.max_position_embeddings=32",
    "model.micro_batch_size=2",
    "model.global_batch_size=4",
    "model.optim.lr=3e-3",
    "model.optim.sched.name=constant",
    "model.optim.sched.warmup_steps=0",
)
# Each layer's forward pass a second time.
RECOMPUTED = (
    "model.activations_checkpoint_granularity=full",
    "model.activations_checkpoint_method=uniform",
    "model.activations_checkpoint_num_layers=1",
)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A model, its optimizer, and this rank's microbatches."""

    config: Config
    trainable: Trainable

    @property
    def chunks(self) -> Sequence[Any]:
        return self.trainable.model.gpt_chunks

    def layers(self) -> dict[str, torch.nn.Module]:
        """The layers that compute in FP8, emulated or Transformer Engine's, by their names in the whole model."""
        return {
            name: module
            for chunk in self.chunks
            for name, module in whole_model_modules(chunk)
            if isinstance(module, Fp8Linear) or is_te_linear(module)
        }

    def step(self) -> float:
        """One optimizer step on the global batch, the same every time; returns its loss."""
        return mean_loss(self.result().loss_sum_and_tokens)

    def result(self) -> StepResult:
        """Such a step, and all that it leaves."""
        iterators = self.iterators(first_sample=0)
        return train_step(self.trainable, iterators)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Of the step that would come next, by the parameter's name in the chunk, fp64; nothing is updated."""
        compute_gradients(self.trainable, self.iterators(first_sample=0))
        return {
            name: parameter.main_grad.detach().double().clone()
            for chunk in self.chunks
            for name, parameter in chunk.named_parameters()
        }

    def step_beside(
        self, optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor], *, num_steps: int
    ) -> None:
        """Steps, and another optimizer of weights of the same names with the same gradients."""
        for _ in range(num_steps):
            gradients = self.gradients()
            for name, weight in weights.items():
                weight.grad = gradients[name].float()
            self.step()
            optimizer.step()

    def validate(self) -> float:
        """Loss on other samples, without gradients."""
        iterators = self.iterators(first_sample=self.config.model.global_batch_size)
        return validate(self.trainable.model, iterators, 1, on_batch=lambda: None)

    @property
    def _num_microbatches(self) -> int:
        model = self.config.model
        return model.global_batch_size // model.micro_batch_size // parallel_state.get_data_parallel_world_size()

    def iterators(self, first_sample: int) -> list[Iterator[Batch] | None]:
        """This rank's microbatches of the step whose first sample it is."""
        return data_iterators(self.trainable.model, lambda: iter(self._batches(first_sample)))

    def _batches(self, first_sample: int) -> list[Batch]:
        model = self.config.model
        length = model.encoder_seq_length
        # Each sequence is four tokens over and over, so that there is something to learn.
        period = torch.randint(model.vocab_size, (1000, 4), generator=torch.Generator().manual_seed(7))
        device = detect_platform().device
        samples = period.repeat(1, length // 4 + 1)[:, : length + 1].to(device)
        # Microbatch i of data parallel rank r: the ranks' microbatches lie one behind the other.
        ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
        starts = [
            first_sample + (index * ranks + rank) * model.micro_batch_size for index in range(self._num_microbatches)
        ]
        return [
            Batch(
                tokens=part[:, :-1].contiguous(),
                labels=part[:, 1:].contiguous(),
                loss_mask=torch.ones(model.micro_batch_size, length, device=device),
                position_ids=torch.arange(length, device=device).expand(model.micro_batch_size, length),
            )
            for part in (samples[start : start + model.micro_batch_size] for start in starts)
        ]


@cache
def multiplies_fp8() -> bool:
    """Whether PyTorch multiplies FP8 codes on this CPU.

    PyTorch 2.11 asks the processor, and oneDNN also ONEDNN_MAX_CPU_ISA: where that is lowered on a processor with
    AVX512-FP16, the product that PyTorch chooses does not exist.
    """
    # With ATEN_CPU_CAPABILITY lowered, too, PyTorch chooses oneDNN's only after another product in BF16.
    torch.mm(torch.ones(64, 64).bfloat16(), torch.ones(64, 64).bfloat16())
    codes, scale = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    try:
        torch._scaled_mm(codes, codes.t(), scale, scale, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


@contextmanager
def emulated_training(*overrides: str, torchao: Mapping[str, bool] | None = None) -> Iterator[Training]:
    """Builds what `training.run` builds, in this one process; with an own `fp8.torchao.TorchAO` where told how."""
    install_cpu_device()
    config = _tiny_config(*overrides)
    # It counts the layers of the first model in a process.
    destroy_moe_metrics_tracker()
    with process_groups(config.model, read_launch({}), detect_platform()):
        yield build_training_of(config, torchao)


@cache
def _tiny_config(*overrides: str) -> Config:
    return compose_quickly([*TINY, *overrides])


def build_training(*overrides: str) -> Training:
    """Builds it in open process groups."""
    return build_training_of(_tiny_config(*overrides))


def build_training_of(config: Config, torchao: Mapping[str, bool] | None = None) -> Training:
    """The same of a configuration that is loaded already."""
    platform = detect_platform()
    spec = spec_of(config, platform)
    if torchao is None or spec.fp8 is None:
        layers = fp8_layers(spec)
    else:
        in_fp8 = frozenset(linear.module for linear in spec.linears if linear.precision == "fp8")
        emulates = torchao.get("emulate", False) or not multiplies_fp8()
        layers = Fp8Layers(spec.fp8, in_fp8, TorchAO(spec.fp8, compiled=torchao["compiled"], emulate=emulates))
    model = build_model(spec, layers)
    optimizer = build_optimizer(model)
    model.train()
    trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
    return Training(config=config, trainable=trainable)


def emulate(recipe: str, *overrides: str) -> tuple[str, ...]:
    """Overrides of an emulated run."""
    return (f"fp8={recipe}", "model.fp8_emulate=true", *overrides)


def observed_training(training: Training, num_steps: int = 3) -> dict[str, Any]:
    """Trains and notes the losses, and amax and scale of each tensor of each layer whenever a product read it.

    Returns:
        "losses": one per step; "read": (layer, role) to (amax, scale) of its casts in order, forward and dgrad products
        only.
    """
    read: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def listen(name: str, product: Product) -> None:
        if product.phase is Phase.wgrad:
            return
        for operand in product.operands:
            assert isinstance(operand, Fp8Operand)
            assert operand.amax is not None
            # The weight is read in both products.
            if product.phase is Phase.forward or operand.role is Role.output_gradient:
                seen = (operand.amax.item(), operand.scale.double().sum().item())
                read.setdefault((name, operand.role.value), []).append(seen)

    with observe_products(training.chunks, listen):
        losses = [training.step() for _ in range(num_steps)]
    return {"losses": losses, "read": read}


def group_sizes(model: ModelConfig) -> tuple[int, ...]:
    """What process groups follow from."""
    return (
        model.tensor_model_parallel_size,
        model.pipeline_model_parallel_size,
        model.virtual_pipeline_model_parallel_size or 0,
        model.context_parallel_size,
        model.expert_model_parallel_size,
        expert_tensor_parallel_size(model),
        model.num_distributed_optimizer_instances,
    )


# The group of all ranks under which `lay_out_anew` has opened groups, and their sizes.
_laid_out: tuple[Any, tuple[int, ...]] | None = None


def lay_out_anew(config: Config) -> None:
    """Opens the groups of another layout in processes whose groups are open, and closes those of the layout before.

    Groups of the same sizes stay: to open them takes as long as to train a few steps.
    """
    global _laid_out  # noqa: PLW0603 - so are the groups
    # Its cache refers to the last 32 models.
    RotaryEmbedding.forward.cache_clear()
    wanted = torch.distributed.group.WORLD, group_sizes(config.model)
    if _laid_out == wanted:
        track_random_states(in_graphs=False)
        seed_dropout(config.model.seed)
        return
    parallel_state.destroy_model_parallel()
    for group in list(distributed_c10d._world.pg_map):
        if group != torch.distributed.GroupMember.WORLD:
            torch.distributed.destroy_process_group(group)
    lay_out_ranks(config.model)
    _laid_out = wanted


def save_checkpoint(
    directory: Path, trainable: Trainable, progress: TrainingProgress, config: Config, data: Mapping[str, str]
) -> Path:
    """Writes a single checkpoint into a directory of checkpoints and waits for it; every rank calls it.

    The parameters must be gathered (`Model.gathered_parameters`).

    Returns:
        The checkpoint's directory.

    Raises:
        RunError: It could not be written.
    """
    with CheckpointSaver(directory, trainable, config, data) as saver:
        (outcome,) = [*saver.save(progress), *saver.wait()]
    if outcome.problem is not None:
        raise RunError(outcome.problem)
    return outcome.path
