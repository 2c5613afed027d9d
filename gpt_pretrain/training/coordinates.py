"""Sizes of activations as a model of one width trains, for `python -m gpt_pretrain.coordinate_check`.

A model trains at its peak rate from the first step on. Before the first step and after each, one batch that it does not
train on passes through it, and the mean absolute value of each layer's output and of the logits is taken.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from gpt_pretrain.config.choices import ScheduleName
from gpt_pretrain.config.schedule import last_step
from gpt_pretrain.config.schema import Config
from gpt_pretrain.data.batches import BatchIterator, build_batch_iterator
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.megatron.model import Model, build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.rules.machine import check_machine
from gpt_pretrain.run.run_spec import RunSpec
from gpt_pretrain.training.step import data_iterators, train_step


def at_peak_rate(config: Config, steps: int) -> Config:
    """The configuration with that many steps, all of the same batch and at the peak rate."""
    schedule = replace(
        config.model.optim.sched,
        name=ScheduleName.constant,
        warmup_steps=0,
        warmup_tokens=None,
        decay_steps=None,
        decay_tokens=None,
        wsd_decay_steps=None,
        wsd_decay_tokens=None,
    )
    optim = replace(config.model.optim, sched=schedule)
    model = replace(config.model, optim=optim, rampup_batch_size=None, step_batch_size_schedule=None)
    trainer = replace(config.trainer, max_steps=steps, max_tokens=None, limit_val_batches=0)
    return replace(config, model=model, trainer=trainer)


def measure_sizes(spec: RunSpec) -> list[dict[str, float]]:
    """Sizes of the activations by name, before the first step and after each of `trainer.max_steps`; one process.

    Raises:
        UserError: The machine or the data does not allow the run.
    """
    config = spec.config
    check_machine(spec)
    corpus = prepare_corpus(config, show_progress=False)
    num_steps = last_step(config)
    with process_groups(config.model, spec.launch, spec.platform):
        model = build_model(spec, fp8_layers(spec))
        optimizer = build_optimizer(model)
        trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))
        # The last batch stays for `_sizes`.
        samples = (num_steps + 1) * config.model.global_batch_size
        train_data, _ = build_datasets(config, corpus, num_train_samples=samples)

        def batches(consumed_samples: int) -> BatchIterator:
            return build_batch_iterator(
                train_data,
                config=config,
                data_parallel_rank=0,
                data_parallel_size=1,
                device=spec.platform.device,
                consumed_samples=consumed_samples,
            )

        kept = batches(samples - config.model.global_batch_size)
        tokens = next(kept).tokens
        kept.close()
        iterators = data_iterators(model, lambda: batches(0))
        sizes = [_sizes(model, tokens)]
        for _ in range(num_steps):
            train_step(trainable, iterators)
            sizes.append(_sizes(model, tokens))
        for iterator in iterators:
            if iterator is not None:
                iterator.close()
    return sizes


@torch.no_grad()
def _sizes(model: Model, tokens: torch.Tensor) -> dict[str, float]:
    """Mean absolute values of what the layers make of tokens [b, s]."""
    (chunk,) = model.gpt_chunks
    found: dict[str, float] = {}

    def watch(name: str, module: torch.nn.Module) -> Any:
        def note(_: torch.nn.Module, __: Any, output: torch.Tensor | Sequence[torch.Tensor]) -> None:
            hidden = output if isinstance(output, torch.Tensor) else output[0]
            found[name] = hidden.float().abs().mean().item()

        return module.register_forward_hook(note)

    positions = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
    with ExitStack() as hooks, model.gathered_parameters():
        for name, module in watched(chunk).items():
            hooks.callback(watch(name, module).remove)
        model.eval()
        logits = chunk(tokens, positions, None)[..., : model.spec.model.vocab_size]
        model.train()
    return found | {"logits": logits.float().abs().mean().item()}


def watched(chunk: Any) -> Mapping[str, torch.nn.Module]:
    """The modules whose outputs are measured, by name."""
    layers = {f"layer {number}": layer for number, layer in enumerate(chunk.decoder.layers, start=1)}
    return {"embedding": chunk.embedding, **layers}
