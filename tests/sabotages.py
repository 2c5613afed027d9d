"""Ways in which live emulated layers can be wrong, and say nothing: what the proof has to find.

Each changes a training in this process: a cast, a state, a product of one layer, or what it was built from.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from gpt_pretrain.fp8.casts import (
    Directions,
    Quantized,
    cast_blocks,
    cast_tensor,
    power_of_two_scale,
    scale_from_amax,
    stateless_cast,
)
from gpt_pretrain.fp8.gemms import Phase, Role
from gpt_pretrain.fp8.proof import Proof, ProofError, Proven
from tests.emulated_training import TINY, Training
from tests.platforms import spec_of
from tests.refusals import compose_quickly

# Step 1 of one process multiplies the products of the second layer's second microbatch again; step 2 those of the
# first layer's first.
LAYER = "decoder.layers.1"
OTHER = "decoder.layers.0"


def prove(training: Training, *, step: int, planned: tuple[str, ...] | None = None) -> Proven:
    """Trains a step and proves it, by another plan than the layers were built from where one is given.

    Raises:
        ProofError: A difference was found.
    """
    trainable = training.trainable
    model = trainable.model
    if planned is not None:
        model = replace(model, spec=spec_of(compose_quickly([*TINY, *planned])))
    proof = Proof(model, trainable.optimizer, step)
    with proof.watching():
        training.step()
    return proof.judge()


def told_by_proof(training: Training, *, step: int) -> list[str]:
    """What the proof of a step tells, whether it stops a run or warns."""
    try:
        return list(prove(training, step=step).warnings)
    except ProofError as error:
        return list(error.rows)


def prove_steps(training: Training, steps: Iterable[int], planned: tuple[str, ...] | None = None) -> None:
    """Trains and proves these steps.

    Raises:
        ProofError: A difference was found, after which there is no other step.
    """
    for step in steps:
        prove(training, step=step, planned=planned)


def layer_of(training: Training, kind: str, layer: str = LAYER) -> Any:
    return training.layers()[f"{layer}.{kind}"]


def change_cast(module: Any, role: Role, change: Callable[[torch.Tensor, Directions], Directions]) -> None:
    """Lets a layer's cast of one tensor return something else."""
    products = module._products
    cast = products.cast
    products.cast = lambda x, of: change(x, cast(x, of)) if of is role else cast(x, of)


def in_both_ways(change: Callable[[Quantized], Quantized]) -> Callable[[torch.Tensor, Directions], Directions]:
    def changed(x: torch.Tensor, directions: Directions) -> Directions:
        return Directions(change(directions.along_rows), change(directions.along_columns))

    return changed


def with_codes(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor, Directions], Directions]:
    return in_both_ways(lambda quantized: replace(quantized, codes=change(quantized.codes)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Pretended(Quantized):
    """Codes that are shown, while products read something else."""

    read: torch.Tensor

    def values(self) -> torch.Tensor:
        return self.read


def pretend(quantized: Quantized, read: torch.Tensor) -> Pretended:
    return Pretended(read=read, **{field.name: getattr(quantized, field.name) for field in fields(Quantized)})


def other_format(x: torch.Tensor, directions: Directions) -> Directions:
    amax = directions.along_rows.amax
    quantized = cast_tensor(x, "e5m2", scale_from_amax(amax, "e5m2"), amax)
    return Directions(quantized, quantized)


def smaller_blocks(x: torch.Tensor, directions: Directions) -> Directions:
    return Directions(
        cast_blocks(x, "e4m3", (1, 32), power_of_two_scale), cast_blocks(x, "e4m3", (32, 1), power_of_two_scale)
    )


def any_scales(x: torch.Tensor, directions: Directions) -> Directions:
    def rule(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
        return scale_from_amax(amax, format)

    return Directions(cast_blocks(x, "e4m3", (1, 128), rule), cast_blocks(x, "e4m3", (128, 1), rule))


def twice_the_scale(x: torch.Tensor, directions: Directions) -> Directions:
    one = directions.along_rows
    quantized = cast_tensor(x, one.format, 2 * one.scale, one.amax)
    return Directions(quantized, quantized)


def scale_of_a_part(x: torch.Tensor, directions: Directions) -> Directions:
    format, amax = directions.along_rows.format, x[:1].abs().max().view(1)
    quantized = cast_tensor(x, format, scale_from_amax(amax, format), amax)
    return Directions(quantized, quantized)


def rounded_towards_zero(x: torch.Tensor, directions: Directions) -> Directions:
    one = directions.along_rows
    values = (x.float() * one.scale).clamp(-448, 448)
    nearest = values.to(one.codes.dtype)
    too_large = nearest.float().abs() > values.abs()
    codes = (nearest.view(torch.uint8) - too_large.to(torch.uint8)).view(one.codes.dtype)
    return Directions(replace(one, codes=codes), replace(one, codes=codes))


def half_the_amax(quantized: Quantized) -> Quantized:
    return replace(quantized, amax=quantized.amax / 2)


def other_dimension(x: torch.Tensor, directions: Directions) -> Directions:
    return Directions(directions.along_rows, directions.along_rows)


def scales_of_rows(factor: float, *, powers_of_two: bool) -> Callable[[torch.Tensor, Directions], Directions]:
    """One scale for each row and column, and a multiple of what it should be."""

    def rule(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
        scale = power_of_two_scale(amax, format, dtype) if powers_of_two else scale_from_amax(amax, format)
        return scale * factor

    def changed(x: torch.Tensor, directions: Directions) -> Directions:
        rows, columns = x.shape
        return Directions(cast_blocks(x, "e4m3", (1, columns), rule), cast_blocks(x, "e4m3", (rows, 1), rule))

    return changed


def half_the_blocks_scales(x: torch.Tensor, directions: Directions) -> Directions:
    def rule(amax: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
        return power_of_two_scale(amax, format, dtype) / 2

    return Directions(cast_blocks(x, "e4m3", (1, 128), rule), cast_blocks(x, "e4m3", (128, 1), rule))


def round_nothing(module: Any, roles: tuple[Role, ...] = tuple(Role)) -> None:
    """A layer that reports codes and multiplies values."""
    for role in roles:
        change_cast(
            module,
            role,
            lambda x, directions: Directions(
                pretend(directions.along_rows, x.float()), pretend(directions.along_columns, x.float())
            ),
        )


def round_nothing_for_wgrad(module: Any) -> None:
    for role in (Role.input, Role.output_gradient):
        change_cast(
            module,
            role,
            lambda x, directions: Directions(directions.along_rows, pretend(directions.along_columns, x.float())),
        )


def round_beforehand(module: Any) -> None:
    """Values that are codes already, so that their cast is right and changes none of them."""
    products = module._products

    def given(x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        amax = x.detach().abs().max().view(1)
        rounded = cast_tensor(x.detach().reshape(-1, x.shape[-1]), "e4m3", scale_from_amax(amax, "e4m3"), amax)
        result: torch.Tensor = products(x + (rounded.values().view_as(x) - x).detach(), *more, **named)
        return result

    module._products = given


def scale_products(module: Any) -> None:
    """An engine's products that are off by 3%."""
    products = module._products
    multiply = products.multiply
    products.multiply = lambda *given, **more: multiply(*given, **more) * 1.03


def drop_products(module: Any, phase: Phase) -> None:
    """Results that are never written."""
    multiply = module._products.multiply

    def dropped(of: Phase, *given: Any, **more: Any) -> torch.Tensor:
        y: torch.Tensor = multiply(of, *given, **more)
        return y.zero_() if of is phase else y

    module._products.multiply = dropped


def to_tensorwise(module: Any) -> None:
    """One layer on the engine's recipe of whole tensors."""
    own_recipe(module, ("fp8=torchao_tensorwise",))


def record_nothing(module: Any) -> None:
    module._scaling.forward.record = lambda column, amax: None


def record_twice(module: Any) -> None:
    record = module._scaling.forward.record
    module._scaling.forward.record = lambda column, amax: record(column, 2 * amax)


def quantize_wgrad(module: Any) -> None:
    """The weight's gradient comes from the codes."""
    module._products.settings = replace(module._products.settings, wgrad=True)


def round_input_of_wgrad(module: Any) -> None:
    """What is multiplied for the weight's gradient is not what the forward pass was given."""
    products = module._products

    class Rounding(torch.autograd.Function):
        """Rounds what the product has kept before it is read again."""

        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
            ctx.kept = kept
            return y.view_as(y)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            amax = ctx.kept.abs().max().view(1)
            codes = cast_tensor(ctx.kept, "e4m3", scale_from_amax(amax, "e4m3"), amax)
            ctx.kept.copy_(codes.values())
            return gradients[0], None

    def given(x: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        own = x.clone()
        # A change of data is none that autograd would refuse.
        kept = own.data.view(-1, x.shape[-1])
        result: torch.Tensor = Rounding.apply(products(own, *more, **named), kept)
        return result

    module._products = given


def shift_products(module: Any) -> None:
    change_cast(module, Role.weight, in_both_ways(lambda quantized: pretend(quantized, quantized.values() * 1.01)))


def blur_products(module: Any, error: float) -> None:
    """Each result is as far from the product of its codes as sums of fewer bits leave it, and no further.

    Args:
        module: The layer.
        error: Relative 2-norm.
    """
    multiply = module._products.multiply
    generator = torch.Generator().manual_seed(3)

    def blurred(*given: Any, **more: Any) -> torch.Tensor:
        y: torch.Tensor = multiply(*given, **more)
        noise = torch.randn(y.shape, generator=generator) * y.float().square().mean().sqrt()
        return (y.float() + error * noise).to(y.dtype)

    module._products.multiply = blurred


def keep_codes(module: Any) -> None:
    """The weight is cast in the first step alone."""

    def forget(*_: Any) -> None:
        module.is_first_microbatch = False

    module.register_forward_pre_hook(forget)


def skip_microbatch(module: Any) -> None:
    """Every second forward pass is computed without FP8."""
    emulated, calls = module._forward_impl, []

    def compute(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, **more: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 2:
            result: torch.Tensor = emulated(input, weight, bias, **more)
            return result
        return torch.nn.functional.linear(input.to(weight.dtype), weight, bias)

    module._forward_impl = compute


def leave_fp8(module: Any) -> None:
    module._forward_impl = lambda input, weight, bias, **_: torch.nn.functional.linear(input, weight, bias)


def add_to_output(module: Any) -> None:
    products = module._products
    module._products = lambda *given, **more: products(*given, **more) * 1.01


def after_updates(scaling: Any, change: Callable[[Any], None]) -> None:
    """Changes the state of all layers after each update of delayed scaling."""
    update = scaling.update

    def changed() -> None:
        update()
        change(scaling)

    scaling.update = changed


def state_of(module: Any) -> Any:
    """The state of all layers of the process, of which the module's is a part."""
    return module._scaling._all


def own_recipe(module: Any, overrides: tuple[str, ...]) -> None:
    """One layer on another recipe."""
    settings = spec_of(compose_quickly([*TINY, *overrides])).fp8
    assert settings is not None
    module._products.cast = stateless_cast(settings)
