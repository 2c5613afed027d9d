"""Emulated FP8 against Transformer Engine's, on a GPU that has both: one layer step by step, then whole runs."""

import pytest
import torch

from gpt_pretrain.fp8.casts import stateless_cast
from gpt_pretrain.fp8.delayed import DelayedScaling
from gpt_pretrain.fp8.linear_products import LinearProducts
from gpt_pretrain.rules.jobs import load_config
from gpt_pretrain.run.fp8 import resolve_fp8
from tests.runs import SMALL_GPU_RUN, means_of_ten, run_small

pytestmark = pytest.mark.gpu

NUM_STEPS, TOKENS, WIDTH, OUTPUTS = 4, 256, 512, 768


@pytest.fixture
def world():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def tensors():
    """Weight, and for each step an input and an output gradient; outliers move amaxes from step to step."""
    generator = torch.Generator("cuda").manual_seed(7)

    def draw(*shape, std):
        return torch.randn(*shape, device="cuda", generator=generator).mul(std).bfloat16()

    weight = draw(OUTPUTS, WIDTH, std=0.02)
    return weight, [
        (draw(TOKENS, WIDTH, std=1.0 + step % 3), draw(TOKENS, OUTPUTS, std=1e-3 / (1 + step)))
        for step in range(NUM_STEPS)
    ]


def te_recipe(settings):
    from transformer_engine.common import recipe

    given = {"fp8_format": recipe.Format.HYBRID if settings.hybrid else recipe.Format.E4M3}
    if settings.recipe.name == "delayed":
        given |= {
            "margin": settings.margin,
            "amax_history_len": settings.amax_history_len,
            "amax_compute_algo": settings.amax_compute_algo.value,
        }
    names = {"delayed": "DelayedScaling", "tensorwise": "Float8CurrentScaling", "blockwise": "Float8BlockScaling"}
    return getattr(recipe, names[settings.recipe.name])(**given)


def te_steps(settings):
    """y, dx, dw and the scaling state of each step, by Transformer Engine."""
    import transformer_engine.pytorch as te

    weight, steps = tensors()
    layer = te.Linear(WIDTH, OUTPUTS, bias=False, params_dtype=torch.bfloat16)
    with torch.no_grad():
        layer.weight.copy_(weight)
    for x, dy in steps:
        x.requires_grad_()
        layer.weight.grad = None
        with te.fp8_autocast(enabled=True, fp8_recipe=te_recipe(settings)):
            y = layer(x, is_first_microbatch=True)
        y.backward(dy)
        state = {}
        if settings.recipe.name == "delayed":
            forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
            state = {
                "scale of input and weight": forward.scale[:2],
                "history of input and weight": forward.amax_history[:, :2],
                "scale of gradient": backward.scale[:1],
                "history of gradient": backward.amax_history[:, :1],
            }
        yield y.detach(), x.grad, layer.weight.grad, {name: value.clone() for name, value in state.items()}


class Block(torch.nn.Module):
    """Stands for the transformer block, whose passes delayed scaling follows."""

    def __init__(self, products, weight):
        super().__init__()
        self.products = products
        self.weight = torch.nn.Parameter(weight)

    def forward(self, x):
        return self.products(x, self.weight, None, is_first_microbatch=True)


def emulated_steps(settings, world):
    """The same by emulation."""
    weight, steps = tensors()
    scaling = DelayedScaling(settings, world) if settings.recipe.name == "delayed" else None
    cast = stateless_cast(settings) if scaling is None else scaling.new_layer()
    block = Block(LinearProducts(settings, cast), weight)
    if scaling is not None:
        scaling.attach(block)
    for x, dy in steps:
        x.requires_grad_()
        block.weight.grad = None
        y = block(x)
        y.backward(dy)
        state = {}
        if scaling is not None:
            state = {
                "scale of input and weight": cast.forward.scale[:2],
                "history of input and weight": cast.forward.amax_history[:, :2],
                "scale of gradient": cast.backward.scale[:1],
                "history of gradient": cast.backward.amax_history[:, :1],
            }
        yield y.detach(), x.grad, block.weight.grad, {name: value.clone() for name, value in state.items()}


def relative_error(ours, theirs):
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(["fp8=delayed", "model.fp8_amax_history_len=4"], id="delayed"),
        pytest.param(
            [
                "fp8=delayed",
                "model.fp8_amax_history_len=3",
                "model.fp8_amax_compute_algo=most_recent",
                "model.fp8_margin=1",
            ],
            id="delayed most recent",
        ),
        pytest.param(["fp8=delayed", "model.fp8_hybrid=false", "model.fp8_e4m3=true"], id="delayed e4m3"),
        pytest.param(["fp8=tensorwise"], id="tensorwise"),
        pytest.param(["fp8=blockwise"], id="blockwise"),
    ],
)
def test_one_layer_computes_what_transformer_engine_does(overrides, world):
    settings = resolve_fp8(load_config(["data=mock", "model.fp8_emulate=true", *overrides]).model)
    for step, (ours, theirs) in enumerate(zip(emulated_steps(settings, world), te_steps(settings), strict=True)):
        for name, mine in ours[3].items():
            assert torch.equal(mine, theirs[3][name]), f"{name} after step {step}: {mine} and {theirs[3][name]}"
        errors = {name: relative_error(ours[index], theirs[index]) for index, name in enumerate(("y", "dx", "dw"))}
        print(overrides[0], "step", step, {name: f"{error:.1e}" for name, error in errors.items()})
        assert max(errors.values()) < 2e-3, f"step {step}: {errors}"


@pytest.mark.parametrize(
    ("num_gpus", "layout"),
    [
        pytest.param(1, "single", id="one GPU"),
        pytest.param(2, "tp2_sp", id="TP2+SP", marks=pytest.mark.gpu(count=2)),
        pytest.param(2, "dp", id="DP2", marks=pytest.mark.gpu(count=2)),
    ],
)
@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
def test_loss_curves_of_whole_runs_agree(tmp_path, cache_dir, recipe, num_gpus, layout):
    # At the small run's own learning rate rounding decides where it goes: two layouts in plain BF16 end 1% apart.
    calm = [*SMALL_GPU_RUN, f"fp8={recipe}", "trainer.max_steps=200", "model.optim.lr=3e-4", f"parallelism={layout}"]
    calm.append("logging.fp8_statistics_interval=200")
    te = run_small(num_gpus, tmp_path / "te", cache_dir, calm, on_gpus=True)
    emulated = run_small(num_gpus, tmp_path / "emulated", cache_dir, [*calm, "model.fp8_emulate=true"], on_gpus=True)
    ours, theirs = ([record.loss for record in metrics.train] for metrics in (emulated, te))
    print(recipe, "largest difference of 200 losses:", max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)))
    assert means_of_ten(ours) == pytest.approx(means_of_ten(theirs), rel=5e-3)
    assert theirs[-1] < theirs[0] - 1.0
    for metrics in (te, emulated):
        assert len(metrics.fp8[-1].tensors) == 4 * 4 * 3, "four layers of four linear layers of three tensors"
        assert all(tensor.amax > 0 and tensor.scale_max > 0 for tensor in metrics.fp8[-1].tensors)
