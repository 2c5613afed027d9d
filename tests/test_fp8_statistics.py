"""FP8 statistics: what is counted, in hand-made products with numbers worked out by hand."""

import json
import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.utils._python_dispatch import TorchDispatchMode

from gpt_pretrain.fp8.delayed import delayed_state
from gpt_pretrain.fp8.gemms import OPERANDS, Fp8Operand, Operand, Phase, Product, Role
from gpt_pretrain.fp8.statistics import StatisticsCollector, TensorStatistics
from gpt_pretrain.run.products import resolve
from gpt_pretrain.training.watches import Fp8Watch
from tests.forked_runs import fork_ranks
from tests.platforms import spec_of

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
FC1, FC2 = "decoder.layers.0.mlp.linear_fc1", "decoder.layers.1.mlp.linear_fc2"
HIGH = {"format": "bfloat16"}


@pytest.fixture(scope="module")
def single_process():
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def collector(single_process, compose_config):
    run = resolve(compose_config("model.num_layers=2", "fp8=delayed"))
    return StatisticsCollector(run.linears, [], torch.device("cpu"))


def operand(role, code_bytes, scale=1.0, amax=1.0, format="e4m3"):
    return Fp8Operand(
        role=role,
        format=format,
        codes=torch.tensor(code_bytes, dtype=torch.uint8).view(DTYPES[format]),
        scale=torch.tensor(scale).reshape(-1),
        amax=None if amax is None else torch.tensor([amax]),
    )


def observed(collector, *products):
    """Statistics of a step with these (layer, phase, operands), by layer and tensor."""
    with collector.observe(7):
        for layer, phase, operands in products:
            collector.add(layer, Product(phase=phase, operands=operands))
    [statistics] = collector.read()
    assert statistics.step == 7
    return {(each.layer, each.tensor): each for each in statistics.tensors}


# E4M3: 0x7E and 0xFE are ±448, 0x7F NaN, 0x38 is 1. E5M2: 0x7B is 57,344, 0x7C infinity, 0x3C is 1.
EIGHT = [0x7E, 0xFE, 0x7E, 0x38, 0x00, 0x00, 0x80, 0x7D]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        pytest.param(
            {"code_bytes": EIGHT, "scale": 0.5, "amax": 1000.0},
            {"amax": 1000.0, "scale_min": 0.5, "scale_max": 0.5, "saturated": 3 / 8, "flushed": 3 / 8},
            id="saturated: 1000 · 0.5 is beyond 448",
        ),
        pytest.param(
            {"code_bytes": EIGHT, "scale": 0.25, "amax": 1000.0},
            {"amax": 1000.0, "scale_min": 0.25, "scale_max": 0.25, "saturated": 0.0, "flushed": 3 / 8},
            id="values that rounded to 448 are not saturated",
        ),
        pytest.param(
            # In fp32 (448 / 0.9)·0.9 is 448.00003.
            {"code_bytes": [0x7E, 0x38], "scale": 497.77777, "amax": 0.9},
            {"amax": 0.8999999761581421, "scale_min": 497.77777099609375, "saturated": 0.0, "flushed": 0.0},
            id="a scale of the tensor's own amax does not saturate",
        ),
        pytest.param(
            {"code_bytes": [0x7B, 0x7E - 3, 0x3C, 0x7A], "scale": 1.0, "amax": 60000.0, "format": "e5m2"},
            {"amax": 60000.0, "saturated": 2 / 4, "flushed": 0.0},
            id="E5M2 ends at another code",
        ),
        pytest.param(
            {"code_bytes": [0x7E, 0x00, 0x38, 0x38], "amax": None},
            {"amax": None, "scale_min": 1.0, "scale_max": 1.0, "saturated": None, "flushed": 1 / 4},
            id="without amax saturation cannot be told",
        ),
        pytest.param(
            {"code_bytes": [0x7F, 0x38], "amax": 2.0}, {"amax": math.inf, "saturated": 0.0}, id="a NaN among the codes"
        ),
        pytest.param({"code_bytes": [0x7E, 0x38], "amax": math.nan}, {"amax": math.inf}, id="an amax of NaN"),
        pytest.param(
            {"code_bytes": [0x7E, 0x38], "amax": math.inf}, {"amax": math.inf, "saturated": 1 / 2}, id="infinity"
        ),
        pytest.param(
            {"code_bytes": [0x00, 0x80], "amax": 0.0, "scale": math.inf},
            {"amax": 0.0, "scale_min": math.inf, "scale_max": math.inf, "saturated": 0.0, "flushed": 1.0},
            id="an infinite scale",
        ),
        pytest.param(
            {"code_bytes": [0x38], "scale": math.nan}, {"scale_min": math.inf, "scale_max": math.inf}, id="NaN"
        ),
        pytest.param(
            {"code_bytes": [0x7E, 0x7E, 0x38, 0x00], "scale": [[4.0, 2.0], [8.0, math.nan]], "amax": 224.0},
            {"amax": 224.0, "scale_min": 2.0, "scale_max": 8.0, "saturated": 0.0, "flushed": 1 / 4},
            id="block scales: the largest block is 448, padding does not count",
        ),
    ],
)
def test_a_tensor_is_counted_as_by_hand(collector, given, expected):
    found = observed(collector, (FC1, Phase.forward, (operand(Role.input, **given), operand(Role.weight, [0x38]))))
    tensor = found[FC1, "input"]

    assert {name: getattr(tensor, name) for name in expected} == expected


def test_shares_are_means_over_the_values_of_all_microbatches_and_weights_count_once(collector):
    first = (operand(Role.input, [0x7E, 0x00], amax=500.0), operand(Role.weight, [0x00, 0x38, 0x38, 0x38], amax=3.0))
    second = (
        operand(Role.input, [0x38, 0x38, 0x38, 0x38, 0x38, 0x00], scale=2.0, amax=2.0),
        operand(Role.weight, [0x00, 0x00, 0x00, 0x00], amax=9.0),
    )
    gradient = operand(Role.output_gradient, [0x7B, 0x3C, 0x00, 0x00], amax=1e5, format="e5m2")
    products = [
        (FC2, Phase.forward, first),
        (FC2, Phase.dgrad, (gradient, first[1])),
        # Nothing of the second product of a tensor counts again.
        (FC2, Phase.wgrad, (replace(gradient, amax=torch.tensor([1e9])), replace(first[0], amax=torch.tensor([1e9])))),
        (FC2, Phase.forward, second),
        (FC2, Phase.dgrad, (gradient, second[1])),
        (FC1, Phase.forward, (operand(Role.input, [0x38]), operand(Role.weight, [0x38]))),
        ("output_layer", Phase.forward, (Operand(role=Role.input, **HIGH), Operand(role=Role.weight, **HIGH))),
        ("some.other.module", Phase.forward, first),
    ]
    found = observed(collector, *products)

    # In forward order of the model, whatever the order of the calls.
    assert list(found) == [(FC1, "input"), (FC1, "weight"), (FC2, "input"), (FC2, "weight"), (FC2, "output_gradient")]
    whole = {"layer": FC2, "amax_history_used": None, "smallest": 0.0, "lagging": None}
    one_scale = {"scale_min": 1.0, "scale_max": 1.0}
    assert found[FC2, "input"] == TensorStatistics(
        tensor="input", amax=500.0, scale_min=1.0, scale_max=2.0, saturated=1 / 8, flushed=2 / 8, **whole
    )
    assert found[FC2, "weight"] == TensorStatistics(
        tensor="weight", amax=3.0, saturated=0.0, flushed=1 / 4, **one_scale, **whole
    )
    assert found[FC2, "output_gradient"] == TensorStatistics(
        tensor="output_gradient", amax=1e5, saturated=1 / 4, flushed=2 / 4, **one_scale, **whole
    )


def test_a_step_knows_nothing_of_the_one_before_and_is_read_once(collector):
    product = (FC1, Phase.forward, (operand(Role.input, [0x00], amax=9.0), operand(Role.weight, [0x38])))
    observed(collector, product)
    again = (FC1, Phase.forward, (operand(Role.input, [0x38], amax=2.0), operand(Role.weight, [0x38])))
    found = observed(collector, again)

    assert (found[FC1, "input"].amax, found[FC1, "input"].flushed) == (2.0, 0.0)
    assert (FC1, "weight") in found
    assert collector.read() == []


def test_a_step_that_fails_is_not_counted(collector):
    with pytest.raises(RuntimeError), collector.observe(3):
        raise RuntimeError
    assert collector.read() == []


def test_the_history_of_a_layer_of_transformer_engine_is_found():
    forward, backward = torch.arange(12.0).reshape(4, 3), torch.arange(8.0).reshape(4, 2)
    meta = {
        "scaling_fwd": SimpleNamespace(amax_history=forward, scale=torch.ones(3)),
        "scaling_bwd": SimpleNamespace(amax_history=backward, scale=torch.ones(2)),
    }
    layer, plain = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    layer.fp8_meta = meta
    plain.fp8_meta = {"scaling_fwd": SimpleNamespace(scale=torch.ones(3))}

    assert [delayed_state(layer, role)[0][-1].item() for role in Role] == [9.0, 10.0, 6.0]
    assert [delayed_state(module, role) for module in (plain, torch.nn.Linear(1, 1)) for role in Role] == [None] * 6


def test_ranks_join_their_tables_and_one_has_no_fp8(tmp_path):
    done = fork_ranks(2, ["tests/programs/fp8_statistics_of_ranks.py", str(tmp_path)], timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank_{rank}.json").read_text()) for rank in range(2))

    assert first == second, "every rank knows the whole"
    # Layer 0 is on both ranks, with 2 and 6 values; layer 1 on rank 1 alone; step 2 is seen by rank 0 alone.
    shared = {"layer": FC1, "scale_min": 0.5, "scale_max": 2.0, "amax_history_used": None}
    shared |= {"smallest": 0.0, "lagging": None}
    assert first == [
        [
            1,
            [
                {**shared, "tensor": "input", "amax": 1000.0, "saturated": 1 / 8, "flushed": 4 / 8},
                {**shared, "tensor": "weight", "amax": "inf", "saturated": 1 / 8, "flushed": 4 / 8},
                {**shared, "layer": FC2, "tensor": "input", "scale_min": 2.0, "amax": 3.0, "saturated": 0.0,
                 "flushed": 4 / 6},
                {**shared, "layer": FC2, "tensor": "weight", "scale_min": 2.0, "amax": "inf", "saturated": 0.0,
                 "flushed": 4 / 6},
            ],
        ],
        [
            2,
            [
                {**shared, "tensor": "input", "scale_max": 0.5, "amax": 1000.0, "saturated": 1 / 2, "flushed": 0.0},
                {**shared, "tensor": "weight", "scale_max": 0.5, "amax": 1000.0, "saturated": 1 / 2, "flushed": 0.0},
            ],
        ],
    ]  # fmt: skip


@pytest.mark.parametrize("overrides", [[], ["fp8=tensorwise", "model.cuda_graph_impl=local"]])
def test_nothing_is_watched_without_fp8_or_in_graphs(compose_config, overrides):
    config = compose_config(*overrides)
    watch = Fp8Watch(SimpleNamespace(gpt_chunks=[], spec=spec_of(config)))

    assert all(isinstance(watch.step(step), nullcontext) for step in (0, 1, 100))
    assert list(watch.records()) == []


def test_steps_are_observed_at_the_interval_and_become_records(single_process, compose_config):
    config = compose_config("fp8=delayed", "logging.fp8_statistics_interval=3", "trainer.log_every_n_steps=4")
    watch = Fp8Watch(SimpleNamespace(gpt_chunks=[], spec=spec_of(config)))
    observed_steps = []
    for step in range(1, 8):
        context = watch.step(step)
        with context:
            pass
        if not isinstance(context, nullcontext):
            observed_steps.append(step)

    assert observed_steps == [3, 4, 6], "step 4 for its warnings alone, and there are none"
    assert [(record.step, record.tensors, record.warnings) for record in watch.records()] == [(3, (), ()), (6, (), ())]
    assert list(watch.records()) == []


def test_a_sample_is_few_values_of_the_first_microbatch_and_others_each_time(collector):
    """What alarms cost is what they look at."""
    rows, columns = 512, 1024
    codes = torch.full((rows, columns), 0x38, dtype=torch.uint8)
    codes[::4] = 0
    given = operand(Role.input, codes.tolist(), scale=1.0, amax=1.0), operand(Role.weight, codes.tolist(), amax=1.0)
    product = Product(phase=Phase.forward, operands=given)
    flushed = []
    for step in range(4):
        with collector.observe(step, sampled=True):
            for _ in range(3):
                collector.add(FC1, product)
        assert collector._sums[:, 0].tolist().count(128 * 128) == 2, "inputs and weights, of one of three microbatches"
        [statistics] = collector.read()
        flushed.append(statistics.tensors[0].flushed)
    assert sorted(flushed) == [0.0, 0.0, 0.0, 1.0]
    with collector.observe(4):
        for _ in range(3):
            collector.add(FC1, product)
    [statistics] = collector.read()
    assert collector._sums[:, 0].max() == 3 * rows * columns
    assert statistics.tensors[0].flushed == 1 / 4


@pytest.mark.parametrize(("num_layers", "turns"), [(2, 1), (7, 2), (12, 4), (32, 4)])
def test_layers_take_turns_in_samples_and_each_turn_has_all_kinds(single_process, compose_config, num_layers, turns):
    run = resolve(compose_config(f"model.num_layers={num_layers}", "fp8=delayed"))
    collector = StatisticsCollector(run.linears, [], torch.device("cpu"))
    given = operand(Role.input, [[0x38] * 4] * 4), operand(Role.weight, [[0x38] * 4] * 4)
    product = Product(phase=Phase.forward, operands=given)

    def looked_at(*, sampled):
        with collector.observe(1, sampled=sampled):
            for linear in run.linears:
                if not sampled or collector._asks(linear.module, Phase.forward):
                    collector.add(linear.module, product)
        [statistics] = collector.read()
        return [each.layer for each in statistics.tensors if each.tensor == "input"]

    everything = [linear.module for linear in run.linears]
    assert looked_at(sampled=False) == everything
    seen = [looked_at(sampled=True) for _ in range(turns)]
    assert sorted(layer for turn in seen for layer in turn) == sorted(everything)
    assert all(f"linear_{kind}" in " ".join(turn) for turn in seen for kind in ("qkv", "proj", "fc1", "fc2"))
    assert all(abs(len(turn) - len(everything) / turns) < 1 for turn in seen)
    # The second round looks at other rows and columns, not at other layers; a full step comes in between.
    assert looked_at(sampled=False) == everything
    assert looked_at(sampled=True) == seen[0]


class CountsOperations(TorchDispatchMode):
    """Counts what a GPU would be given to compute or copy; views are none of it."""

    num_operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num_operations += not any(result.alias_info for result in func._schema.returns)
        return func(*args, **(kwargs or {}))


def test_a_sample_starts_few_operations_for_a_tensor(collector):
    """The host starts each of them: with thirty a tensor, GPT-2 124M's logged steps took a quarter longer."""
    names = sorted({name for name, _ in collector._rows})
    given = {role: operand(role, [[0x38] * 64] * 64) for role in Role}
    weight = torch.ones(64, 64)

    def operations(layers):
        collector._modules = {name: SimpleNamespace(weight=weight) for name in layers}
        with CountsOperations() as counted, collector.observe(1, sampled=True):
            for name in layers:
                for phase, roles in OPERANDS.items():
                    collector.add(name, Product(phase=phase, operands=tuple(given[role] for role in roles)))
        collector.read()
        return counted.num_operations

    more = operations(names) - operations(names[:1])
    assert more == 7 * (len(names) - 1), "three amaxes, and samples of three tensors and of the weight as it is"


@pytest.mark.parametrize("towards", [0.0, 1.0], ids=["below", "above"])
def test_a_scale_that_is_known_to_its_last_bit_makes_no_weight_lag(collector, towards):
    """As a run of GPT-2 124M reported: its scales are inverses of what Transformer Engine stores."""
    # With this amax, BF16 numbers lie in the middle between each two codes.
    weight = torch.arange(128, 256).clamp(max=224).repeat(128, 1).bfloat16() / 256
    scale = torch.tensor(448.0) / weight.max()
    used = torch.nextafter(scale, scale * 2 * towards)

    def lagging(weight_now):
        collector._modules[FC1] = SimpleNamespace(weight=weight_now)
        codes = (weight.float() * used).to(torch.float8_e4m3fn)
        cast = replace(operand(Role.weight, [[0]]), codes=codes, scale=scale.reshape(1))
        with collector.observe(1, sampled=True):
            collector.add(FC1, Product(phase=Phase.forward, operands=(cast,)))
        [statistics] = collector.read()
        return statistics.tensors[0].lagging

    now = (weight.float() * scale).to(torch.float8_e4m3fn).float()
    middle = now != (weight.float() * used).to(torch.float8_e4m3fn).float()
    assert middle.float().mean() > 1 / 256, "another code, by the last bit of the scale"
    assert lagging(weight) == 0.0
    # One step of Adam further: a hundredth.
    assert lagging(weight * 1.01) > 0.01
