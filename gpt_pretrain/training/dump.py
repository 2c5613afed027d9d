"""What is written when a run gives up on losses or gradients that are not finite: RUN_DIR/dumps/step_00000012.json.

The step's batch is computed once more with every tensor looked at (`first_bad.py`). The file tells which tensor was
the first bad one, of which samples, what FP8 made of the tensors of its layer, and each layer's gradient norm. Nothing
is updated by it, and no checkpoint follows: the newest one is from before.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from gpt_pretrain.checkpoint.state import Trainable
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.fp8.statistics import StatisticsCollector
from gpt_pretrain.megatron.graphs import without_graphs
from gpt_pretrain.megatron.parallel import on_rank_zero
from gpt_pretrain.training.first_bad import BadTensor, FirstBad, named_weights
from gpt_pretrain.training.guards import BadStep
from gpt_pretrain.training.step import compute_gradients, mean_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """Where it is, and the sentence that errors say of it."""

    path: Path
    finding: str


def write_dump(
    directory: Path,
    bad: BadStep,
    *,
    trainable: Trainable,
    config: Config,
    iterators: Sequence[Iterator[Batch] | None],
    num_microbatches: int,
) -> Dump:
    """Computes a step's batch once more and writes what was found; every rank calls it.

    Args:
        directory: `RUN_DIR/dumps`.
        bad: The step.
        trainable: As the step found it; its gradients are overwritten.
        config: The run's configuration.
        iterators: Its batches, from the first sample on.
        num_microbatches: Of this rank.
    """
    chunks = trainable.model.gpt_chunks
    search = FirstBad(chunks)
    spec = trainable.model.spec
    collector = None if spec.fp8 is None else StatisticsCollector(spec.linears, chunks, spec.platform.device)
    observed: AbstractContextManager[None] = nullcontext() if collector is None else collector.observe(bad.step)
    with observed, search.watching(), without_graphs(chunks):
        report = compute_gradients(trainable, iterators, config.model, num_microbatches)
    first = search.agree()
    torch.distributed.all_reduce(report)
    norms = _gradient_norms(trainable, config.model.num_layers)
    fp8 = [] if collector is None or first is None else _fp8_of_layer(collector, first)
    content = {
        "step": bad.step,
        "first_sample": bad.first_sample,
        "num_samples": config.model.global_batch_size,
        "loss": mean_loss(report),
        "first_bad": None if first is None else _describe(first, bad, config),
        "fp8": fp8,
        "gradient_norms": norms,
    }
    path = directory / f"step_{bad.step:08d}.json"
    on_rank_zero(lambda: _write(path, content))
    finding = (
        "all tensors were finite when its batch was computed once more"
        if first is None
        else f"the first bad tensor is {first}"
    )
    return Dump(path=path, finding=finding)


def _describe(first: BadTensor, bad: BadStep, config: Config) -> dict[str, Any]:
    samples = None
    if first.microbatch is not None:
        # As data/batches.py deals them out.
        model = config.model
        ranks = torch.distributed.get_world_size() // (
            model.tensor_model_parallel_size * model.pipeline_model_parallel_size * model.context_parallel_size
        )
        start = bad.first_sample + (first.microbatch * ranks + first.data_parallel_rank) * model.micro_batch_size
        samples = list(range(start, start + model.micro_batch_size))
    return {
        "phase": first.phase,
        "module": first.module,
        "shape": list(first.shape),
        "num_nan": first.num_nan,
        "num_inf": first.num_inf,
        "rank": first.rank,
        "microbatch": first.microbatch,
        "samples": samples,
    }


def _fp8_of_layer(collector: StatisticsCollector, first: BadTensor) -> list[dict[str, Any]]:
    """Amax and scales of the FP8 tensors of the transformer layer that the tensor is in."""
    layer = _layer_of(first.module) + "."
    return [
        asdict(tensor)
        for statistics in collector.read()
        for tensor in statistics.tensors
        if tensor.layer.startswith(layer)
    ]


@torch.no_grad()
def _gradient_norms(trainable: Trainable, num_layers: int) -> dict[str, float]:
    """L2 norm of the gradient before clipping, by layer of the whole model, on every rank the same.

    Gradients are taken where the optimizer takes them, each once among the ranks that hold it.
    """
    optimizer: Any = trainable.optimizer
    optimizer.prepare_grads()
    layers = ["embedding", *(f"decoder.layers.{index}" for index in range(num_layers))]
    layers += ["decoder.final_layernorm", "output_layer"]
    # Experts have an optimizer of their own, and other ranks that share them.
    parts = optimizer.chained_optimizers
    squares = torch.zeros(len(parts), len(layers), dtype=torch.float64, device=torch.cuda.current_device())
    for chunk in trainable.model.gpt_chunks:
        for name, parameter in named_weights(chunk):
            counts = param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
            for part, of_layers in zip(parts, squares, strict=True):
                gradient = _gradient(part, parameter)
                if gradient is not None and counts:
                    of_layers[layers.index(_layer_of(name))] += gradient.double().square().sum()
    for part, of_layers in zip(parts, squares, strict=True):
        torch.distributed.all_reduce(of_layers, group=part.get_grad_stats_parallel_group())
    return dict(zip(layers, squares.sum(dim=0).sqrt().tolist(), strict=True))


def _gradient(part: Any, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """What an optimizer updates a weight by, None if it has not got it; of a distributed one its shard."""
    gradient: torch.Tensor | None
    if not isinstance(part, DistributedOptimizer):
        main = getattr(parameter, "main_param", parameter)
        owned = any(main is own for group in part.optimizer.param_groups for own in group["params"])
        gradient = main.grad if owned else None
        return gradient
    if parameter not in part.model_param_group_index_map:
        return None
    group, index = part.model_param_group_index_map[parameter]
    main = part.optimizer.param_groups[group]["params"][index]
    # Where it has another type than its master it is not called its gradient.
    gradient = getattr(main, "decoupled_grad", main.grad)
    return gradient


def _layer_of(module: str) -> str:
    """decoder.layers.3.mlp.linear_fc1 is in decoder.layers.3, embedding.word_embeddings.weight in embedding."""
    match = re.match(r"decoder\.layers\.\d+|decoder\.\w+|\w+", module)
    return match[0] if match else module


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_name(f".{path.name}.unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        json.dump(_finite_or_named(content), file, indent=2, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _finite_or_named(value: Any) -> Any:
    """JSON has no NaN and no infinity: "nan", "inf" and "-inf" stand for them, as in metrics.jsonl."""
    if isinstance(value, dict):
        return {key: _finite_or_named(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite_or_named(item) for item in value]
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value
