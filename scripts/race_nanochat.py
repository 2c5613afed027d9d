#!/usr/bin/env python3
"""Trains nanochat on the samples of a run of this program: the other side of benchmarks/speedrun_d12_1xh200.md.

    git clone https://github.com/karpathy/nanochat && git -C nanochat checkout 92d63d4
    python scripts/race_nanochat.py nanochat [--fp8] [--matrix-lr 0.02] [--seed 1] experiment=speedrun_d12 data=text …

The arguments after the options are those of `python -m gpt_pretrain`: they say which samples, how many a step, how many
steps, and how large the model is. nanochat's own are its model, optimizer and FP8 code, and the schedules and rates of
its scripts/base_train.py at that commit. It prints a line of JSON every ten steps, and last the validation's loss, in
BF16 as there. Seconds leave out the first ten steps, as there, and the validation.
"""

import argparse
import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gpt_pretrain.commands.command import ALONE, run_with_config
from gpt_pretrain.commands.command_line import Request
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.schedule import num_train_samples
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.text_bytes import count_tokens_and_bytes, token_bytes
from gpt_pretrain.launch.environment import prepare_libraries
from gpt_pretrain.launch.ranks import Launch
from gpt_pretrain.plan.machine import planned_problems
from gpt_pretrain.report.records import validation_record
from gpt_pretrain.rules.jobs import Job

# base_train.py: its batch of reference and the options' defaults.
REFERENCE_TOKENS, EMBEDDING_LR, SCALAR_LR, WEIGHT_DECAY, WARMUP, WARMDOWN, FINAL = 2**19, 0.3, 0.5, 0.28, 40, 0.65, 0.05


def read_samples(data: Any, num_samples: int) -> torch.Tensor:
    """Tokens and the label of the last, [samples, length + 1]; whole, so that no step waits for a disk."""
    return torch.stack(
        [torch.cat([data[i]["tokens"], data[i]["labels"][-1:]]).to(torch.int32) for i in range(num_samples)]
    )


def schedules(step: int, steps: int) -> tuple[float, float, float]:
    """Factor of the rates, Muon's momentum, and factor of its weight decay (base_train.py)."""
    warmdown = round(WARMDOWN * steps)
    begun = (step - (steps - warmdown)) / warmdown
    rate = min((step + 1) / WARMUP, 1.0, 1 - (1 - FINAL) * begun)
    rising = 0.85 + 0.12 * step / 400
    momentum = rising if step < 400 else 0.97 - 0.07 * max(begun, 0.0)
    return rate, momentum, 0.5 * (1 + math.cos(math.pi * step / steps))


def without_fp8(model: torch.nn.Module) -> None:
    """Puts nanochat's own linear layers, with the same weights, in place of those in FP8 (base_train.py)."""
    from nanochat.gpt import Linear

    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Float8Linear":
            parent, _, attribute = name.rpartition(".")
            plain = Linear(module.in_features, module.out_features, bias=False, device="meta")
            plain.weight = module.weight
            setattr(model.get_submodule(parent), attribute, plain)


def build(options: argparse.Namespace, model: Any, device: torch.device) -> Any:
    """A model of nanochat's with as many layers, whose attention sees the whole sequence: torch's has no windows."""
    from nanochat.gpt import GPT, GPTConfig

    torch.manual_seed(options.seed)
    width, heads = model.hidden_size, model.num_attention_heads
    shape = {"n_layer": model.num_layers, "n_head": heads, "n_kv_head": heads, "n_embd": width}
    with torch.device("meta"):
        built = GPT(
            GPTConfig(sequence_len=model.encoder_seq_length, vocab_size=model.vocab_size, window_pattern="L", **shape)
        )
    built.to_empty(device=device)
    built.init_weights()
    if options.fp8:
        from nanochat.fp8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name("tensorwise")
        convert_to_float8_training(
            built,
            config=config,
            module_filter_fn=lambda module, _: (
                module.in_features % 16 == 0
                and module.out_features % 16 == 0
                and min(module.in_features, module.out_features) >= 128
            ),
        )
    return built


def train(options: argparse.Namespace, request: Request, jobs: Sequence[Job], launch: Launch) -> None:
    """Trains and validates once."""
    prepare_libraries()
    config = jobs[0].config
    model, steps = config.model, config.trainer.max_steps
    if model.global_batch_size % options.micro_batch:
        problem = f"--micro-batch {options.micro_batch} does not divide model.global_batch_size"
        raise UserError(f"{problem}={model.global_batch_size}; use {model.global_batch_size} or a divisor of it")
    corpus = prepare_corpus(config, show_progress=True)
    train_data, valid_data = build_datasets(config, corpus, num_train_samples=num_train_samples(config))
    samples = read_samples(train_data, steps * model.global_batch_size)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    # The faster of torch's, where FlashAttention-3 is not there.
    torch.backends.cuda.enable_flash_sdp(False)
    built = build(options, model, device)
    run = torch.compile(built, dynamic=False) if device.type == "cuda" else built
    scale = (model.global_batch_size * model.encoder_seq_length / REFERENCE_TOKENS) ** 0.5
    optimizer = built.setup_optimizer(
        unembedding_lr=options.head_lr * scale,
        embedding_lr=EMBEDDING_LR * scale,
        scalar_lr=SCALAR_LR * scale,
        matrix_lr=options.matrix_lr * scale,
        weight_decay=WEIGHT_DECAY * scale,
    )

    def batch(of: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = of[first : first + options.micro_batch].to(device, torch.int64)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    seconds, per_step = 0.0, model.global_batch_size // options.micro_batch
    for step in range(steps):
        began = time.monotonic()
        for number in range(per_step):
            loss = run(*batch(samples, (step * per_step + number) * options.micro_batch))
            (loss / per_step).backward()
        rate, momentum, decay = schedules(step, steps)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate
            if group["kind"] == "muon":
                group["momentum"], group["weight_decay"] = momentum, WEIGHT_DECAY * scale * decay
        optimizer.step()
        built.zero_grad(set_to_none=True)
        # It waits for the device.
        last = loss.item()
        seconds += time.monotonic() - began if step >= 10 else 0.0
        if step == 0:
            # As base_train.py does.
            gc.collect()
            gc.freeze()
            gc.disable()
        if step % 10 == 9:
            sys.stdout.write(json.dumps({"step": step + 1, "loss": last, "seconds": round(seconds, 3)}) + "\n")
            sys.stdout.flush()
    without_fp8(built)
    built.eval()
    num_samples = config.trainer.limit_val_batches * model.global_batch_size
    held_out = read_samples(valid_data, num_samples)
    with torch.no_grad():
        starts = range(0, num_samples, options.micro_batch)
        mean = math.fsum(float(built(*batch(held_out, first))) for first in starts) / len(starts)
    tokens, num_bytes = count_tokens_and_bytes(valid_data, range(num_samples), token_bytes(corpus.tokenizer))
    record = validation_record(steps, {"": mean}, {"": 1.0}, [num_bytes / tokens], num_samples=num_samples, time_s=0.0)
    ended = {"step": steps, "validation_loss": record.loss, "bits_per_byte": record.bits_per_byte}
    sys.stdout.write(json.dumps(ended | {"seconds": round(seconds, 3)}) + "\n")


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanochat", help="its folder")
    parser.add_argument("--fp8", action="store_true", help="its tensorwise FP8")
    parser.add_argument("--matrix-lr", type=float, default=0.02, help="Muon's rate at 524,288 tokens a step")
    parser.add_argument("--head-lr", type=float, default=0.008, help="the LM head's")
    parser.add_argument("--micro-batch", type=int, default=32, help="samples in memory at once")
    parser.add_argument("--seed", type=int, default=1, help="of its weights")
    options, overrides = parser.parse_known_args()
    if not Path(options.nanochat, "nanochat", "gpt.py").is_file():
        parser.error(f"{options.nanochat} is no checkout of nanochat; clone it as this text's first lines say (--help)")
    sys.path.insert(0, options.nanochat)
    return run_with_config(__doc__, partial(train, options), overrides, launch=ALONE, rules=planned_problems)


if __name__ == "__main__":
    raise SystemExit(main())
