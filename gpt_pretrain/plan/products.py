"""Every matrix product of a step on one GPU, equal layers together, and whether FP8 could take its shape."""

from collections.abc import Iterator
from dataclasses import dataclass

from gpt_pretrain.config.choices import Precision
from gpt_pretrain.config.derived import kv_channels
from gpt_pretrain.config.errors import multiples_near, one_of
from gpt_pretrain.config.schema import ModelConfig
from gpt_pretrain.spec.fp8 import Fp8Settings
from gpt_pretrain.spec.products import EXPERT_FC1, EXPERT_FC2, ROUTER, Gemm, Linear, gemms
from gpt_pretrain.spec.run_spec import RunSpec

# Both dimensions of an FP8 product's operands are multiples of this in recipes with one scale per tensor, which count
# where no recipe is chosen.
ALIGNMENT = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Product:
    """One product [m, k] · [k, n] of one GPU and microbatch, in one or more layers."""

    layers: str
    """"0–31", "0, 5–9"; empty outside of the layers."""
    module: str
    phase: str
    """"forward", "dgrad", "wgrad"; of attention "forward" and "backward"."""
    m: int
    n: int
    k: int
    count: int
    """How often it is computed in a layer: batch · heads for attention's, once for each of the GPU's experts."""
    precision: str
    """"FP8" with its formats, "BF16" or "FP32"."""
    reason: str
    """Why it is not in FP8; empty where it is."""
    shape_problem: str
    """Which dimension FP8 cannot take, with the nearest values that it can; empty where it takes all."""
    flops: int
    """Of all its layers together; causal attention counts half of its shape's."""


def layer_ranges(layers: list[int]) -> str:
    """Indices as a person writes them: [0, 1, 2, 5] gives "0–2, 5"."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)


def shape_problem(m: int, n: int, k: int, alignment: int) -> str:
    """Which of a product's dimensions is no multiple, and the multiples around it."""
    wrong = []
    for name, value in (("m", m), ("n", n), ("k", k)):
        if value % alignment:
            wrong.append(f"{name}={value} is not ×{alignment}: {one_of(multiples_near(value, alignment))}")
    return "; ".join(wrong)


def _shape_problem(gemm: Gemm, alignment: int) -> str:
    """The problem of a product that may run in FP8: the LM head and routers never do, rows of experts are padded."""
    kind = gemm.linear.kind
    if gemm.linear.layer < 0 or kind == ROUTER:
        return ""
    m, n, k = gemm.m, gemm.n, gemm.k
    if kind in (EXPERT_FC1, EXPERT_FC2):
        m, k = (m, alignment) if gemm.phase == "wgrad" else (alignment, k)
    return shape_problem(m, n, k, alignment)


def _formats(settings: Fp8Settings, phase: str) -> str:
    forward, gradient = settings.forward_format.upper(), settings.gradient_format.upper()
    return f"FP8 {forward}·{forward}" if phase == "forward" else f"FP8 {gradient}·{forward}"


def _linear_products(settings: Fp8Settings | None, same: list[Linear], high: str) -> Iterator[Product]:
    first = same[0]
    alignment = ALIGNMENT if settings is None else settings.recipe.alignment
    in_layers = first.layer >= 0
    for gemm in gemms(first):
        why = first.reason
        if not why and not gemm.fp8:
            why = "model.fp8_wgrad=false"
        yield Product(
            layers=layer_ranges([linear.layer for linear in same]) if in_layers else "",
            module=first.kind,
            phase=gemm.phase,
            m=gemm.m,
            n=gemm.n,
            k=gemm.k,
            count=first.count,
            precision=_formats(settings, gemm.phase) if gemm.fp8 and settings is not None else high,
            reason=why,
            shape_problem=_shape_problem(gemm, alignment),
            flops=gemm.flops * len(same),
        )


def _attention_products(model: ModelConfig, settings: Fp8Settings | None, high: str) -> Iterator[Product]:
    """q·kᵀ and p·v forward; the gradients of q, k, v, p and the scores once more backward. Causal: half is computed."""
    sequence, cp = model.encoder_seq_length, model.context_parallel_size
    width = kv_channels(model)
    heads = model.num_attention_heads // model.tensor_model_parallel_size
    in_fp8 = settings is not None and settings.dot_product_attention
    shapes = {
        ("q·kᵀ", "forward"): (sequence // cp, sequence, width, 1),
        ("p·v", "forward"): (sequence // cp, width, sequence, 1),
        ("q·kᵀ again, dp", "backward"): (sequence // cp, sequence, width, 2),
        ("dq", "backward"): (sequence // cp, width, sequence, 1),
        ("dk, dv", "backward"): (sequence, width, sequence // cp, 2),
    }
    for (name, phase), (m, n, k, times) in shapes.items():
        count = model.micro_batch_size * heads * times
        yield Product(
            layers=layer_ranges(list(range(model.num_layers))),
            module=f"attention {name}",
            phase=phase,
            m=m,
            n=n,
            k=k,
            count=count,
            precision=_formats(settings, phase) if in_fp8 and settings is not None else high,
            reason="" if in_fp8 else "model.fp8=false" if settings is None else "model.fp8_dot_product_attention=false",
            shape_problem="",
            flops=m * n * k * count * model.num_layers,
        )


def plan_products(spec: RunSpec) -> list[Product]:
    """The products of a checked configuration: linear layers in forward order, attention, the LM head."""
    model, settings = spec.model, spec.fp8
    high_precision = "FP32" if spec.config.trainer.precision is Precision.fp32 else "BF16"
    *in_layers, head = spec.linears
    groups: dict[tuple[object, ...], list[Linear]] = {}
    for linear in in_layers:
        shape = (linear.out_features, linear.in_features, linear.tokens)
        key = (linear.kind, *shape, linear.precision, linear.wgrad_precision, linear.reason)
        groups.setdefault(key, []).append(linear)
    # Layers with the same reasons stay together, in the order in which they first appear.
    products = [product for same in groups.values() for product in _linear_products(settings, same, high_precision)]
    products += _attention_products(model, settings, high_precision)
    products += _linear_products(settings, [head], high_precision)
    return products
