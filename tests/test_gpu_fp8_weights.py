"""FP8 weights cast from their masters: to the bit as Transformer Engine's own function casts them."""

import pytest
import torch
from megatron.core.fp8_utils import post_all_gather_processing, quantize_param_shard
from torch._C._distributed_c10d import HashStore

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.model import build_model
from gpt_pretrain.megatron.optimizer import build_optimizer
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.megatron.stored_weights import cast_masters, install_weight_cast
from tests.platforms import spec_of

pytestmark = pytest.mark.gpu

SHAPES = [(384, 256), (256, 512), (48, 16)]
# Each weight's part that a rank has, as its bounds in the flat weight; none of them starts where a vector would.
WHOLE = [(0, 384 * 256), (0, 256 * 512), (0, 48 * 16)]
FIRST_PART, SECOND_PART = [(0, 31_337), (0, 256 * 512), None], [(31_337, 384 * 256), None, (0, 48 * 16)]


@pytest.fixture
def group():
    torch.cuda.set_device(0)
    torch.distributed.init_process_group("nccl", store=HashStore(), rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    torch.distributed.destroy_process_group()


def trained_weights(recipe):
    """FP8 weights of layers that have run twice, so that scales, amaxes and transposes are those of a training."""
    import transformer_engine.pytorch as te

    torch.manual_seed(1)
    with te.fp8_model_init(recipe=recipe):
        layers = [te.Linear(k, n, bias=False, params_dtype=torch.bfloat16, device="cuda") for n, k in SHAPES]
    for _ in range(2):
        for layer in layers:
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                out = layer(torch.randn(32, layer.in_features, dtype=torch.bfloat16, device="cuda"))
            out.sum().backward()
    return [layer.weight for layer in layers]


def state(weight):
    quantizer = weight._get_quantizer()
    tensors = {"codes": weight._data, "inverse": weight._scale_inv, "transpose": weight._transpose}
    return {
        name: tensor.clone() for name, tensor in {**tensors, "scale": quantizer.scale, "amax": quantizer.amax}.items()
    }


@pytest.mark.parametrize("name", ["DelayedScaling", "Float8CurrentScaling"])
def test_masters_are_cast_to_the_bit_as_transformer_engine_casts_them(group, name):
    from transformer_engine.common import recipe as recipes

    install_weight_cast(of_te=True)
    states = []
    for function in (quantize_param_shard, cast_masters):
        weights = trained_weights(getattr(recipes, name)())
        torch.manual_seed(2)
        after = []
        # The parts of two ranks one behind the other, as one rank would see both.
        for bounds in (WHOLE, FIRST_PART, SECOND_PART):
            masters = [0.02 * torch.randn(weight.numel(), device="cuda") for weight in weights]
            parts = [
                None if part is None else master[slice(*part)] for master, part in zip(masters, bounds, strict=True)
            ]
            starts = [None if part is None else part[0] for part in bounds]
            function(weights, parts, starts, group)
            post_all_gather_processing(weights)
            after += [state(weight) for weight in weights]
        states.append(after)
    theirs, ours = states
    assert not torch.equal(theirs[0]["codes"], theirs[3]["codes"])
    for before, now in zip(theirs, ours, strict=True):
        assert {key: torch.equal(before[key], now[key]) for key in before} == dict.fromkeys(before, True)


def test_blocks_are_left_to_transformer_engine(group):
    from transformer_engine.common.recipe import Float8BlockScaling

    states = []
    for function in (quantize_param_shard, cast_masters):
        weights = trained_weights(Float8BlockScaling())
        function(weights, [torch.full((weight.numel(),), 0.5, device="cuda") for weight in weights], [0, 0, 0], group)
        states.append([weight._rowwise_data.clone() for weight in weights])
    assert all(torch.equal(before, now) for before, now in zip(*states, strict=True))


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_masters_start_as_they_were_drawn_and_nothing_goes_over_the_host(recipe, compose_config, monkeypatch):
    copy = torch.Tensor.cpu

    def refuse_weights(tensor):
        assert tensor.dim() < 2, f"a weight of {tuple(tensor.shape)} was copied to the host"
        return copy(tensor)

    masters = []
    for overrides in ([], [f"fp8={recipe}", "model.fp8_params=true"]):
        config = compose_config("model=tiny", "data=mock", "model.use_distributed_optimizer=true", *overrides)
        platform = detect_platform()
        with process_groups(config.model, read_launch({}), platform), monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, "cpu", refuse_weights)
            model = build_model(spec_of(config, platform))
            optimizer = build_optimizer(model)
            (distributed,) = optimizer.chained_optimizers
            drawn = [master for group in distributed.shard_fp32_from_float16_groups for master in group]
            # In FP8 and in BF16 weights lie in other buffers, and so in another order.
            masters.append(sorted((master.numel(), master.double().sum().item()) for master in drawn))
            weights = list(model.chunks[0].parameters())
    assert masters[0] == masters[1]
    stored = [weight for weight in weights if hasattr(weight, "get_high_precision_init_val")]
    assert len(stored) == 4 * config.model.num_layers
    # They are drawn again for the masters: nothing is kept.
    for weight in stored:
        tensors = {name for name, value in vars(weight).items() if isinstance(value, torch.Tensor) and value.dim() > 1}
        assert tensors <= {"_data", "_transpose", "main_grad"}
