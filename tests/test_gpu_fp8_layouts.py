"""FP8 on two GPUs: layouts are proven and train as one GPU does, ranks agree on scales, FP8 weights are gathered."""

import functools
import json

import pytest

from tests.launching import gpu_environment, run_ranks
from tests.runs import SMALL_GPU_RUN, means_of_ten, run_small

pytestmark = pytest.mark.gpu(count=2)

SHORT = (*SMALL_GPU_RUN, "trainer.max_steps=10")
STORED = "model.fp8_params=true"


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory, cache_dir):
    """Losses of one GPU with a recipe."""

    @functools.cache
    def trained(recipe):
        run_dir = tmp_path_factory.mktemp(recipe) / "run"
        return losses(run_small(1, run_dir, cache_dir, [*SHORT, f"fp8={recipe}"], on_gpus=True))

    return trained


def losses(metrics):
    return [record.loss for record in metrics.train]


@pytest.mark.parametrize(
    ("recipe", "layout"),
    [
        pytest.param("delayed", ["parallelism=dp"], id="delayed DP2"),
        pytest.param("delayed", ["parallelism=dp", STORED], id="delayed DP2 stored"),
        pytest.param("delayed", ["parallelism=zero2"], id="delayed, sharded gradients"),
        pytest.param("delayed", ["parallelism=zero2", STORED], id="delayed, sharded gradients, stored"),
        pytest.param("tensorwise", ["parallelism=zero2", STORED], id="tensorwise, sharded gradients, stored"),
        pytest.param("blockwise", ["parallelism=zero2", STORED], id="blockwise, sharded gradients, stored"),
        pytest.param("delayed", ["parallelism=fsdp"], id="delayed, sharded weights"),
        pytest.param("delayed", ["parallelism=fsdp", STORED], id="delayed, sharded weights, stored"),
        pytest.param("tensorwise", ["parallelism=fsdp", STORED], id="tensorwise, sharded weights, stored"),
        pytest.param("blockwise", ["parallelism=fsdp", STORED], id="blockwise, sharded weights, stored"),
        pytest.param("torchao_tensorwise", ["parallelism=fsdp", STORED], id="TorchAO, sharded weights, stored"),
        pytest.param("delayed", ["parallelism=tp2_sp", STORED], id="delayed TP2+SP stored"),
        pytest.param("delayed", ["parallelism=pp2"], id="delayed PP2"),
        pytest.param(
            "delayed", ["parallelism=pp2_vp2", "model.fp8_exclude=['decoder.layers.3.*']"], id="delayed PP2×2"
        ),
        pytest.param("delayed", ["parallelism=cp2"], id="delayed CP2"),
        pytest.param("tensorwise", ["parallelism=dp", STORED], id="tensorwise DP2 stored"),
        pytest.param("tensorwise", ["parallelism=tp2_sp"], id="tensorwise TP2+SP"),
        pytest.param("blockwise", ["parallelism=dp"], id="blockwise DP2"),
        pytest.param("blockwise", ["parallelism=dp", STORED], id="blockwise DP2 stored"),
        pytest.param("blockwise", ["parallelism=pp2"], id="blockwise PP2"),
        pytest.param("torchao_tensorwise", ["parallelism=dp", STORED], id="TorchAO tensorwise DP2 stored"),
        pytest.param("torchao_rowwise", ["parallelism=tp2_sp"], id="TorchAO rowwise TP2+SP"),
    ],
)
def test_layout_is_proven_and_trains_as_one_gpu(recipe, layout, tmp_path, cache_dir, one_gpu):
    # The state of a later step tells more than the first one's.
    overrides = [*SHORT, f"fp8={recipe}", *layout, "logging.fp8_proof_interval=5"]
    metrics = run_small(2, tmp_path / "run", cache_dir, overrides, on_gpus=True)
    assert metrics.fp8_coverage.time_s < 1.0
    assert (metrics.fp8_coverage.parameter_bytes_share > 0) == (STORED in layout)
    assert (metrics.fp8_coverage.first_scale_passes > 0) == (recipe == "delayed")
    assert losses(metrics) == pytest.approx(one_gpu(recipe), rel=2e-2)


@pytest.mark.gpu(count=4)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallelism=cp2"], id="CP2·DP2"),
        pytest.param(["parallelism=tp2_sp", "model.context_parallel_size=2"], id="TP2+SP·CP2"),
        pytest.param(["parallelism=pp2", "model.context_parallel_size=2"], id="PP2·CP2"),
    ],
)
@pytest.mark.parametrize("recipe", ["none", "delayed"])
def test_context_parallel_ranks_beside_others_see_the_whole_sequence(recipe, layout, tmp_path, cache_dir, one_gpu):
    trained = losses(run_small(4, tmp_path / "run", cache_dir, [*SHORT, f"fp8={recipe}", *layout], on_gpus=True))
    # Before anything is learnt, half of the tokens have another loss.
    assert trained[0] == pytest.approx(one_gpu(recipe)[0], rel=5e-4)
    assert trained == pytest.approx(one_gpu(recipe), rel=2e-2)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "torchao_tensorwise"])
def test_fp8_weights_train_as_bf16_weights_do(recipe, tmp_path, cache_dir):
    # Calm enough that rounding does not decide where the run goes.
    calm = [*SMALL_GPU_RUN, f"fp8={recipe}", "parallelism=dp", "trainer.max_steps=100", "model.optim.lr=3e-4"]
    without = losses(run_small(2, tmp_path / "bf16", cache_dir, calm, on_gpus=True))
    stored = losses(run_small(2, tmp_path / "fp8", cache_dir, [*calm, STORED], on_gpus=True))
    print(
        recipe, "largest difference of 100 losses:", max(abs(a / b - 1) for a, b in zip(stored, without, strict=True))
    )
    assert means_of_ten(stored) == pytest.approx(means_of_ten(without), rel=5e-3)
    assert without[-1] < without[0] - 1.0


@pytest.mark.parametrize("layout", ["dp", "tp2_sp"])
def test_ranks_agree_on_delayed_scales(layout, tmp_path, cache_dir):
    """Scales are those of all ranks and, with one microbatch, of one moment: smallest and largest are the same."""
    batch = 4 if layout == "dp" else 2
    overrides = [*SHORT, "fp8=delayed", f"parallelism={layout}", "logging.fp8_statistics_interval=5"]
    metrics = run_small(2, tmp_path / "run", cache_dir, [*overrides, f"model.global_batch_size={batch}"], on_gpus=True)
    assert len(metrics.fp8[-1].tensors) == 4 * 4 * 3
    assert [tensor for tensor in metrics.fp8[-1].tensors if tensor.scale_min != tensor.scale_max] == []


def test_fp8_weights_are_gathered_in_half_the_bytes():
    def gathered(*overrides):
        arguments = ["model=llama3_8b", "model.num_layers=2", "data=mock", "parallelism=dp", *overrides]
        done = run_ranks(2, ["tests/programs/gather_bytes.py", *arguments], env=gpu_environment(2))
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    # Weights of linear layers: 2·(4096·6144 + 4096² + 3·4096·14336). Embedding, LM head and norms stay in BF16.
    weights, others = 436_207_616, 2 * 128_256 * 4096 + 5 * 4096
    assert gathered() == {"torch.bfloat16": pytest.approx(2 * (weights + others), rel=1e-3)}
    stored = {"torch.uint8": pytest.approx(weights, rel=1e-3), "torch.bfloat16": pytest.approx(2 * others, rel=1e-3)}
    assert gathered("fp8=delayed", STORED) == stored
    assert gathered("fp8=tensorwise", STORED) == stored
    assert gathered("fp8=torchao_tensorwise", STORED) == stored
