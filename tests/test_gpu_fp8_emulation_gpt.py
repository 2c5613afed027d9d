"""Emulated FP8 against Transformer Engine's in a GPT of four layers, each linear layer given the same tensors."""

from functools import partial

import pytest
import torch

from gpt_pretrain.checkpoint.state import Trainable
from gpt_pretrain.data.batches import Batch
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.local_layers import fp8_layers
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.layers import whole_model_modules
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer, build_scheduler
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.rules.gate import load_config
from gpt_pretrain.spec.platform import detect_platform
from gpt_pretrain.training.step import data_iterators, train_step
from tests.platforms import spec_of

pytestmark = pytest.mark.gpu

LENGTH, MICROBATCHES = 128, 2
FOUR_LAYERS = (
    "data=mock",
    "model.num_layers=4",
    "model.hidden_size=256",
    "model.ffn_hidden_size=512",
    "model.num_attention_heads=4",
    "model.vocab_size=512",
    f"model.encoder_seq_length={LENGTH}",
    f"model.max_position_embeddings={LENGTH}",
    "model.micro_batch_size=2",
    f"model.global_batch_size={2 * MICROBATCHES}",
    "trainer.precision=bf16",
    # An activation that is computed with its cast leaves no input in BF16 to give to the other layer.
    "model.activation_cast_fusion=false",
)
# Of a linear layer that Transformer Engine computes together with the norm before it: where its input comes in here.
NORMS = {"self_attention.linear_qkv": "input_layernorm", "mlp.linear_fc1": "pre_mlp_layernorm"}
LINEARS = (*NORMS, "self_attention.linear_proj", "mlp.linear_fc2")


class Tape:
    """What each linear layer was given and computed: lists with an entry for each microbatch."""

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


def batches(config):
    tokens = torch.randint(512, (2 * MICROBATCHES, LENGTH + 1), generator=torch.Generator().manual_seed(3)).cuda()
    for part in tokens.split(2):
        yield Batch(
            tokens=part[:, :-1].contiguous(),
            labels=part[:, 1:].contiguous(),
            loss_mask=torch.ones(2, LENGTH, device=part.device),
            position_ids=torch.arange(LENGTH, device=part.device).expand(2, LENGTH),
        )


def one_step(config, given=None):
    """Trains one step; with a tape, each linear layer gets the inputs and output gradients that are on it."""
    platform, tape = detect_platform(), Tape()
    spec = spec_of(config, platform)
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
    with observe_products(model.gpt_chunks, take_product):
        train_step(trainable, data_iterators(model, lambda: batches(config)))
    for name in names:
        tape.add(name, "dw", modules[name].weight.main_grad.clone())
    return tape


def relative_error(ours, theirs):
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_linear_layers_of_a_gpt_cast_and_compute_what_transformer_engine_does(recipe):
    te = load_config([*FOUR_LAYERS, f"fp8={recipe}"])
    emulated = load_config([*FOUR_LAYERS, f"fp8={recipe}", "model.fp8_emulate=true"])
    with process_groups(te.model, read_launch({}), detect_platform()):
        theirs = one_step(te)
        ours = one_step(emulated, given=theirs)
    errors = {}
    for (name, what), values in theirs.entries.items():
        linear = name.rpartition(".")[2]
        for index, (value, mine) in enumerate(zip(values, ours[name, what], strict=what != "dy")):
            if isinstance(what, Role):
                compare_casts(mine, value, what, linear, f"{name}, {what.value}, microbatch {index}")
            elif what in ("y", "dx", "dw"):
                errors[linear, what] = max(errors.get((linear, what), 0.0), relative_error(mine, value))
    print(recipe, {" ".join(key): f"{error:.1e}" for key, error in errors.items()})
    assert len(errors) == 4 * 3
    assert max(errors.values()) < 2e-3


def compare_casts(ours, theirs, role, linear, at):
    (my_codes, my_scale, my_amax), (codes, scale, amax) = ours, theirs
    # What comes out of a norm is a sum that two kernels add up in different orders; the rest is the same to the bit.
    computed = role is Role.input and linear in ("linear_qkv", "linear_fc1")
    assert float((my_codes != codes).float().mean()) <= (1e-4 if computed else 0.0), at
    # Transformer Engine tells of the inverse.
    my_scale, scale = 1 / my_scale, 1 / scale
    torch.testing.assert_close(my_scale, scale, rtol=1e-6 if computed else 2.0**-23, atol=0.0, msg=at)
    # A weight keeps none in the second microbatch, which reads the codes of the first.
    if amax is not None and not (role is Role.weight and amax == 0):
        torch.testing.assert_close(my_amax, amax, rtol=1e-6 if computed else 0.0, atol=0.0, msg=at)
