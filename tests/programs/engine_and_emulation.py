"""Trains a GPT of four layers by Transformer Engine and emulated, each linear layer given the same tensors: OVERRIDE…

One JSON line of rank 0: per linear layer and result (output y, gradients dx and dw), the largest relative error over
microbatches, layers and ranks. Ends with an assertion where a cast differs: codes, scales, or the amax of all ranks.
"""

import json
import sys
from functools import partial

import torch
from megatron.core import parallel_state

from gpt_pretrain.data.batches import Batch
from gpt_pretrain.features.resolve import build_run_spec, detect_platform
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.launch.environment import set_environment
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import data_parallel_rank, process_groups
from gpt_pretrain.megatron.trainable import Trainable
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.training.step import data_iterators, train_step

LENGTH, SAMPLES, MICROBATCHES, STEPS = 128, 2, 2, 2
MODEL = (
    "data=mock",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.vocab_size=512",
    f"model.encoder_seq_length={LENGTH}",
    f"model.max_position_embeddings={LENGTH}",
    f"model.micro_batch_size={SAMPLES}",
    "trainer.precision=bf16",
    # An activation that is computed with its cast leaves no input in BF16 to give to the other layer.
    "model.activation_cast_fusion=false",
    # The second step has the first one's amaxes and, so far below a BF16 number's distance to the next, its weights.
    "model.optim.lr=1e-12",
)
# Of a linear layer that Transformer Engine computes together with the norm before it: where its input comes in here.
NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
LINEARS = (*NORMS, "self_attention.linear_proj", "mlp.linear_fc2")


class Tape:
    """What each linear layer was given and computed: lists with an entry for each microbatch of each step."""

    def __init__(self):
        self.entries = {}

    def add(self, name, what, value):
        self.entries.setdefault((name, what), []).append(value)

    def __getitem__(self, key):
        return self.entries.get(key, [])


class Forced(torch.autograd.Function):
    """Hands on other values in place of its input's, and tells of the gradient that comes back."""

    @staticmethod
    def forward(ctx, x, values, tell):
        ctx.tell = tell
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.tell(gradient.detach().clone())
        return gradient, None, None


def batches():
    """This rank's microbatches of a step: others on each data-parallel rank."""
    generator = torch.Generator().manual_seed(3 + data_parallel_rank())
    tokens = torch.randint(512, (SAMPLES * MICROBATCHES, LENGTH + 1), generator=generator).to(
        torch.cuda.current_device()
    )
    for part in tokens.split(SAMPLES):
        yield Batch(
            tokens=part[:, :-1].contiguous(),
            labels=part[:, 1:].contiguous(),
            loss_mask=torch.ones(SAMPLES, LENGTH, device=part.device),
            position_ids=torch.arange(LENGTH, device=part.device).expand(SAMPLES, LENGTH),
        )


def train(config, launch, platform, given=None):
    """Trains; with a tape, each linear layer gets the inputs and output gradients that are on it."""
    spec, tape = build_run_spec(config, launch, platform), Tape()
    model = build_model(spec, fp8_layers(spec))
    optimizer = build_optimizer(model)
    trainable = Trainable(model=model, optimizer=optimizer, scheduler=build_scheduler(config, optimizer))

    def take_input(name, _, args):
        values = args[0].detach() if given is None else given[name, "x"][len(tape[name, "x"])]
        tape.add(name, "x", values.clone())
        return Forced.apply(args[0], values, partial(tape.add, name, "dx")), *args[1:]

    def take_output(name, _, args, outputs):
        index = len(tape[name, "y"])
        tape.add(name, "y", outputs[0].detach().clone())
        if given is None:
            outputs[0].register_hook(lambda gradient: tape.add(name, "dy", gradient.detach().clone()))
        else:
            outputs[0].register_hook(lambda _: given[name, "dy"][index].clone())

    def take_product(name, product):
        for operand in product.operands:
            # Where it was cast; the other product reads the same codes, or those cast along its other axis.
            if product.phase is (Phase.dgrad if operand.role is Role.output_gradient else Phase.forward):
                codes = operand.codes.view(torch.uint8).flatten()
                amax = None if operand.amax is None else operand.amax.clone()
                tape.add(name, operand.role, (codes.clone(), operand.scale.clone(), amax))

    modules = dict(whole_model_modules(model.gpt_chunks[0]))
    names = [name for name in modules if name.endswith(LINEARS)]
    assert len(names) == 16
    for name in names:
        part = name.split(".", 3)[3]
        entry = name.replace(part, NORMS.get(part, part)) if config.model.fp8_emulate else name
        modules[entry].register_forward_pre_hook(partial(take_input, name))
        modules[name].register_forward_hook(partial(take_output, name))
    model.train()
    for _ in range(STEPS):
        with observe_products(model.gpt_chunks, take_product):
            train_step(trainable, data_iterators(model, batches))
        gather_gradients(model.chunks[0])
        for name in names:
            tape.add(name, "dw", modules[name].weight.main_grad.clone())
    return tape


def gather_gradients(chunk):
    """Behind a distributed optimizer's step a rank has the sum over ranks only in its own part of each bucket."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for bucket in (bucket for buffer in chunk.buffers for bucket in buffer.buckets):
        own = bucket.grad_data.chunk(group.size())[group.rank()].clone()
        torch.distributed.all_gather_into_tensor(bucket.grad_data, own, group=group)


def compare(ours, theirs):
    """Asserts that casts are the same; returns the largest relative error of each linear layer's results."""
    errors = {}
    for (name, what), values in theirs.entries.items():
        linear = name.rpartition(".")[2]
        for index, (value, mine) in enumerate(zip(values, ours[name, what], strict=what != "dy")):
            if isinstance(what, Role):
                compare_casts(mine, value, what, linear, f"{name}, {what.value}, number {index}")
            elif what in ("y", "dx", "dw"):
                key = f"{linear} {what}"
                errors[key] = max(errors.get(key, 0.0), relative_error(mine, value))
    return errors


def compare_casts(ours, theirs, role, linear, at):
    (my_codes, my_scale, my_amax), (codes, scale, amax) = ours, theirs
    # What comes out of a norm is a sum that two kernels add up in different orders; the rest is the same to the bit.
    computed = role is Role.input and linear in ("linear_qkv", "linear_fc1")
    assert float((my_codes != codes).float().mean()) <= (1e-4 if computed else 0.0), at
    # Transformer Engine tells of the inverse.
    my_scale, scale = 1 / my_scale, 1 / scale
    torch.testing.assert_close(my_scale, scale, rtol=1e-6 if computed else 2.0**-23, atol=0.0, msg=at)
    if amax is not None:
        # Sequence parallelism: Transformer Engine casts a rank's part of the sequence, the emulation the whole of it.
        mine, its = highest(my_amax), highest(amax)
        # A weight keeps none in the second microbatch, which reads the codes of the first.
        if not (role is Role.weight and its == 0):
            torch.testing.assert_close(mine, its, rtol=1e-6 if computed else 0.0, atol=0.0, msg=at)


def highest(value):
    """The largest of the ranks' values."""
    value = value.detach().clone()
    torch.distributed.all_reduce(value, torch.distributed.ReduceOp.MAX)
    return value


def relative_error(ours, theirs):
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def main(*overrides):
    launch = read_launch()
    engine, emulated = (
        load_config(
            [*MODEL, f"model.global_batch_size={SAMPLES * MICROBATCHES}", *overrides, f"model.fp8_emulate={on}"]
        )
        for on in ("false", "true")
    )
    set_environment(engine)

    platform = detect_platform()
    with process_groups(engine.model, launch, platform):
        theirs = train(engine, launch, platform)
        ours = train(emulated, launch, platform, given=theirs)
        errors = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(errors, compare(ours, theirs))
    if launch.is_rank_zero:
        print(json.dumps({key: max(each[key] for each in errors) for key in errors[0]}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
