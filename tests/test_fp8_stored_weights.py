"""Weights that TorchAO's layers store in FP8: codes of their masters, gathered as bytes, the same in every layout."""

import pytest
import torch
from safetensors.torch import load_file

from gpt_pretrain.checkpoint.load import load_weights, verify_checkpoint
from gpt_pretrain.checkpoint.manifest import TrainingProgress
from gpt_pretrain.export import main as export_main
from gpt_pretrain.megatron.stored_weights import StoredWeight
from tests.emulated_training import TINY, emulate, emulated_training, save_checkpoint
from tests.forked_runs import fork_ranks
from tests.optimizer_states import LEAN, SMALLEST
from tests.refusals import compose_quickly
from tests.rounding import fp8_anew_tolerance
from tests.sabotages import prove
from tests.saved_models import FAMILIES, saved_model
from tests.stored_weights import KEPT_OUT, SABOTAGES, STORED, distributed_optimizer, observed, torchaos_cast

LAYOUTS = ("dp", "tp2", "pp2")
NUM_LAYERS, KINDS = 2, ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    done = fork_ranks(2, ["tests/programs/stored_weights.py", str(folder), *LAYOUTS])
    assert done.returncode == 0, done.stderr[-4000:]
    return {layout: [torch.load(folder / f"{layout}.{rank}.pt") for rank in (0, 1)] for layout in LAYOUTS}


@pytest.fixture(scope="module")
def one_process():
    with emulated_training(*STORED) as training:
        return observed(training)


def assert_same_weights(weights, expected):
    for name, weight in weights.items():
        for what in ("codes", "scale", "amax"):
            assert torch.equal(weight[what], expected[name][what]), (name, what)


def test_codes_and_scale_are_what_torchao_makes_of_the_fp32_master(one_process):
    every = {f"decoder.layers.{layer}.{kind}" for layer in range(NUM_LAYERS) for kind in KINDS}
    assert one_process["weights"].keys() == every - {KEPT_OUT}
    for weight in one_process["weights"].values():
        assert weight["master"].dtype is torch.float32
        codes, scale = torchaos_cast(weight["master"])
        assert torch.equal(weight["codes"].view(-1), codes)
        assert torch.equal(weight["scale"], scale)
        rounded, _ = torchaos_cast(weight["master"].bfloat16())
        assert not torch.equal(codes, rounded), "rounding to BF16 first would not show"


def test_data_parallel_ranks_gather_a_byte_for_each_value(two_ranks):
    for seen in two_ranks["dp"]:
        stored = sum(weight["codes"].numel() for weight in seen["weights"].values())
        # Buffers end where all ranks' parts are equally long and aligned.
        assert seen["gathered"].keys() == {torch.uint8, torch.bfloat16}
        assert stored <= seen["gathered"][torch.uint8] < 1.02 * stored
        assert seen["num_plain"] <= seen["gathered"][torch.bfloat16] < 1.1 * seen["num_plain"]


def test_data_parallel_ranks_have_the_weights_of_one_process_bit_for_bit(two_ranks, one_process):
    first, second = two_ranks["dp"]
    for seen in (first, second):
        assert seen["losses"] == pytest.approx(one_process["losses"], rel=1e-6)
        assert_same_weights(seen["weights"], one_process["weights"])
    parts = [seen["weights"][name]["master"] for seen in (first, second) for name in seen["weights"]]
    held = sum(part.numel() for part in parts if part is not None)
    assert held == sum(weight["codes"].numel() for weight in one_process["weights"].values())
    # Some weight is cast by both ranks, so that its scale needs the amax of both parts.
    assert any(
        first["weights"][name]["master"] is not None and second["weights"][name]["master"] is not None
        for name in first["weights"]
    )


def test_the_share_of_the_models_bytes_is_that_of_one_process(two_ranks, one_process):
    stored = sum(weight["codes"].numel() for weight in one_process["weights"].values())
    share = stored / (stored + 2 * one_process["num_plain"])
    assert [seen["share"] for layout in LAYOUTS for seen in two_ranks[layout]] == [share] * 6
    assert one_process["share"] == share


def test_pipeline_stages_have_the_weights_of_one_process_bit_for_bit(two_ranks, one_process):
    names = [set(seen["weights"]) for seen in two_ranks["pp2"]]
    assert names[0] | names[1] == one_process["weights"].keys()
    assert not names[0] & names[1]
    for seen in two_ranks["pp2"]:
        assert_same_weights(seen["weights"], one_process["weights"])


def test_tensor_parallel_ranks_scale_their_own_parts(two_ranks, one_process):
    """As they do where each microbatch casts BF16 weights: TorchAO's layers know nothing of other ranks."""
    for seen in two_ranks["tp2"]:
        assert seen["losses"] == pytest.approx(
            one_process["losses"], rel=fp8_anew_tolerance(compose_quickly(TINY).model)
        )
        for weight in seen["weights"].values():
            codes, scale = torchaos_cast(weight["master"])
            assert torch.equal(weight["codes"].view(-1), codes)
            assert torch.equal(weight["scale"], scale)
    first, second = (seen["weights"] for seen in two_ranks["tp2"])
    assert any(not torch.equal(first[name]["scale"], second[name]["scale"]) for name in first)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_before_the_first_update_codes_are_those_of_the_layers_own_cast(layout, two_ranks):
    """Masters are BF16 numbers then. Scales of other parts than those of a rank's weight would show in the loss."""
    for seen in two_ranks[layout]:
        assert seen["losses"][0] == seen["without"]


@pytest.mark.parametrize(
    ("sabotage", "told"),
    [("a part that is not cast again", "every code that of its master"), ("stale scales", "scale of the weight")],
)
def test_the_proof_finds_a_rank_whose_weights_do_not_follow_their_masters(sabotage, told, two_ranks):
    for seen in two_ranks["dp"]:
        assert seen["spoilt"].keys() == SABOTAGES.keys()
        rows = [line for line in seen["spoilt"][sabotage].splitlines() if told in line]
        assert rows, seen["spoilt"][sabotage]
        assert all("  1     " in row for row in rows), rows


def test_torchaos_own_products_read_the_codes(one_process):
    """What a GPU runs, compiled: the engine itself, not its emulation."""
    on_hardware = (*STORED, "model.fp8_emulate=false")
    with emulated_training(*on_hardware, torchao={"compiled": False}) as training:
        seen = observed(training)
    # Roundings to BF16 move values of activations to other codes.
    assert seen["losses"] == pytest.approx(one_process["losses"], rel=fp8_anew_tolerance(compose_quickly(TINY).model))


def test_masters_of_fewer_bytes_are_cast_too():
    small = ("model.use_distributed_optimizer=true", "model.bias=true", *LEAN, *SMALLEST)
    with emulated_training(*STORED, *small) as training:
        training.step()
        prove(training, step=2)
        weights, masters, _ = distributed_optimizer(training)._get_fp8_params_and_shard_fp32_from_fp8()
        for weight, master in zip(weights, masters, strict=True):
            assert master.dtype is torch.float16
            codes, scale = torchaos_cast(master.float())
            assert torch.equal(weight.codes.view(-1), codes)
            assert torch.equal(weight.scale, scale)


def test_weights_alone_become_masters_and_codes(tmp_path):
    """A run in FP8 goes on from weights of one in BF16: masters are its weights, and codes are of the masters."""
    with emulated_training("trainer.precision=bf16") as training:
        training.step()
        progress = TrainingProgress(step=1, consumed_samples=4)
        path = save_checkpoint(tmp_path, training.trainable, progress, training.config, {})
        saved = {name: parameter.detach().clone() for name, parameter in training.chunks[0].named_parameters()}
    with emulated_training(*STORED) as training:
        load_weights(verify_checkpoint(path), training.trainable, training.config, {})
        for name, parameter in training.chunks[0].named_parameters():
            if isinstance(parameter, StoredWeight):
                codes, scale = torchaos_cast(saved[name].float())
                assert torch.equal(parameter.codes, codes), name
                assert torch.equal(parameter.scale, scale), name
                assert torch.equal(parameter.main_param, saved[name].float().view(-1)), name
            else:
                assert torch.equal(parameter, saved[name]), name
        prove(training, step=1)


def test_exports_hold_the_values_of_the_codes(tmp_path):
    stored = [each for each in STORED if "fp8_exclude" not in each]
    with saved_model(tmp_path, *FAMILIES["llama"], *stored, "model.vocab_size=304", tokenizer=None) as saved:
        values = saved.model.decoder.layers[1].mlp.linear_fc2.weight.dequantize()
    assert export_main([f"checkpoint={saved.path}", f"out={tmp_path / 'hf'}"]) == 0
    exported = load_file(tmp_path / "hf" / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert exported.dtype is torch.bfloat16
    assert torch.equal(exported, values)


def test_a_skipped_step_leaves_codes_and_scales_as_they_are():
    with emulated_training(*STORED) as training:
        training.step()
        weights, _, _ = distributed_optimizer(training)._get_fp8_params_and_shard_fp32_from_fp8()
        before = [(weight.codes.clone(), weight.scale.clone()) for weight in weights]
        training.chunks[0].decoder.final_layernorm.weight.data[0] = torch.inf
        assert training.result().skipped
        for weight, (codes, scale) in zip(weights, before, strict=True):
            assert torch.equal(weight.codes, codes)
            assert torch.equal(weight.scale, scale)


def test_a_stored_weight_reads_as_its_values_and_takes_values_whole():
    values = torch.randn(32, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
    weight = StoredWeight.in_place_of(torch.nn.Parameter(torch.empty_like(values)), lambda amax: 448 / amax)
    with torch.no_grad():
        weight.copy_(values)
        read = weight.dequantize()
        assert (read.dtype, weight.dtype, weight.shape) == (torch.bfloat16, torch.bfloat16, values.shape)
        # Half of the distance between two codes, and of two BF16 numbers.
        torch.testing.assert_close(read, values, rtol=2**-4 + 2**-8, atol=float(values.abs().max()) / 448 * 2**-10)
        assert torch.equal(weight.float(), read.float())
        assert torch.equal(torch.cat([part.dequantize() for part in weight.chunk(2)]), read)
        assert torch.equal(torch.zeros_like(read).copy_(weight), read)
        for write in (weight.zero_, lambda: weight.add_(1), lambda: weight.mul_(2)):
            with pytest.raises(TypeError, match="stored in FP8"):
                write()
        with pytest.raises(AssertionError, match="part of a weight"):
            weight.chunk(2)[0].copy_(values[:16])


def test_masters_of_fp8_weights_start_unrounded_and_nothing_is_kept_for_them() -> None:
    stored = (*emulate("torchao_tensorwise"), "model.fp8_params=true", "parallelism=dp", "trainer.precision=bf16")
    masters: list[list[float]] = []
    for overrides in ((), stored):
        with emulated_training("parallelism=dp", "trainer.precision=bf16", *overrides) as training:
            (part,) = training.trainable.optimizer.chained_optimizers
            drawn = [master for group in part.shard_fp32_from_float16_groups for master in group]
            # Weights in FP8 and in BF16 lie in other buffers, and so in another order.
            masters.append(sorted(master.double().sum().item() for master in drawn))
            for weight in training.chunks[0].parameters():
                kept = [name for name, value in vars(weight).items() if _bytes_in(value) >= weight.numel()]
                assert set(kept) <= {"main_grad", "main_param", "codes"}
    assert masters[0] == masters[1]


def _bytes_in(value: object) -> int:
    return value.nbytes if isinstance(value, torch.Tensor) else 0
