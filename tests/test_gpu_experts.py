"""A mixture of experts on Transformer Engine's grouped products: as local layers do, proven in FP8, over two GPUs."""

import pytest
import torch

from gpt_pretrain.fp8.gemms import Phase
from gpt_pretrain.fp8.observer import observe_products
from gpt_pretrain.kernels.grouped_products_triton import GroupedWeights, RowPlaces, multiply_by_experts
from tests import grouped_products
from tests.emulated_training import emulated_training
from tests.runs import SMALL_GPU_RUN, means_of_ten, run_small

EXPERTS = (
    "model.num_moe_experts=4",
    "model.moe_ffn_hidden_size=256",
    # Tokens near the border of two experts fall to either side; small scores would be all border.
    "model.init_method_std=0.05",
)
# Errors of BF16 products' sums in tensor cores, in those of fp32 that rounds: what is cut off is not rounded.
OF_TENSOR_CORES = 16.0
SHORT = (*SMALL_GPU_RUN, *EXPERTS)
# Enough of them for one kernel.
MANY = (*SHORT, "model.num_moe_experts=16", "model.moe_router_topk=4")
ONE_KERNEL, OF_TE = (f"model.moe_grouped_kernel={name}" for name in ("triton", "transformer_engine"))
PADDED = "model.moe_router_padding_for_quantization=true"


def losses(metrics):
    return [record.loss for record in metrics.train]


@pytest.fixture(scope="module")
def one_gpu(tmp_path_factory, cache_dir):
    return run_small(1, tmp_path_factory.mktemp("one") / "run", cache_dir, SHORT, on_gpus=True)


@pytest.mark.gpu
def test_grouped_products_train_as_single_ones_of_local_layers(tmp_path, cache_dir, one_gpu):
    local = [*SHORT, "model.transformer_engine=false"]
    metrics = run_small(1, tmp_path / "run", cache_dir, local, on_gpus=True)
    assert losses(one_gpu)[-1] < losses(one_gpu)[0] - 0.5
    assert means_of_ten(losses(metrics)) == pytest.approx(means_of_ten(losses(one_gpu)), rel=1e-2)
    assert [record.busiest_expert for record in metrics.experts[:5]] == pytest.approx(
        [record.busiest_expert for record in one_gpu.experts[:5]], rel=0.1
    )


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [[], [PADDED]], ids=["padded inputs", "padded routes"])
def test_fp8_reaches_the_experts_and_is_proven(padding, tmp_path, cache_dir, one_gpu):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    metrics = run_small(1, tmp_path / "run", cache_dir, [*SHORT, "fp8=tensorwise", *padding], on_gpus=True)
    # Without the experts' products it would be below a third.
    assert metrics.fp8_coverage.gemm_flops_share > 0.6
    assert means_of_ten(losses(metrics)) == pytest.approx(means_of_ten(losses(one_gpu)), rel=3e-2)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tokens",
    [("alltoall",), ("allgather",), ("alltoall", "fp8=tensorwise", PADDED)],
    ids=["all to all", "all-gather", "padded routes in FP8"],
)
def test_fused_permutation_trains_as_separate_operations(tokens, tmp_path, cache_dir):
    dispatcher, *fp8 = tokens
    if fp8 and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    short = [*SHORT, *fp8, f"model.moe_token_dispatcher_type={dispatcher}", "trainer.max_steps=10"]
    fused, separate = (
        run_small(1, tmp_path / value, cache_dir, [*short, f"model.moe_permute_fusion={value}"], on_gpus=True)
        for value in ("true", "false")
    )
    assert losses(fused) == pytest.approx(losses(separate), rel=3e-2 if fp8 else 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [grouped_products.UNEVEN, grouped_products.ONE_HAS_ALL], ids=["uneven", "one"])
@pytest.mark.parametrize("widths", [(96, 80), (256, 128), (1536, 2048), (52, 36)], ids=str)
def test_one_kernel_computes_what_single_products_do(counts, widths):
    out_features, in_features = widths
    grouped_products.check_products(
        "cuda", counts, out_features=out_features, in_features=in_features, sum_error=OF_TENSOR_CORES
    )


@pytest.mark.gpu
def test_one_kernel_is_checked_and_finds_moved_weights_and_no_rows():
    grouped_products.check_sabotages_are_caught("cuda")
    grouped_products.check_moved_tensors_are_found("cuda")
    grouped_products.check_no_rows("cuda")
    grouped_products.check_frozen_weights("cuda")
    grouped_products.check_weights_are_trained_on_inputs_that_are_not("cuda")
    grouped_products.check_rows_are_placed_once("cuda")


@pytest.mark.gpu
def test_one_kernel_computes_what_transformer_engine_does_and_repeats_to_the_bit():
    import transformer_engine.pytorch as te

    counts, out_features, in_features = [0, 300, 1, 128, 77, 518], 768, 512
    layer = te.GroupedLinear(
        len(counts),
        in_features,
        out_features,
        bias=False,
        params_dtype=torch.bfloat16,
        fuse_wgrad_accumulation=True,
        device="cuda",
    )
    weights = list(layer.parameters())
    rows = torch.randn(sum(counts), in_features, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    gradient = torch.randn(sum(counts), out_features, dtype=torch.bfloat16, device="cuda")

    def results(multiply):
        for weight in weights:
            weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight, dtype=torch.float32), False
        rows.grad = None
        product = multiply()
        product.backward(gradient)
        return [product.detach(), rows.grad, *(weight.main_grad for weight in weights)]

    kept = GroupedWeights(RowPlaces())
    of_te = results(lambda: layer(rows, counts))
    own, again = (results(lambda: multiply_by_experts(rows, counts, weights, kept)) for _ in range(2))
    assert all(map(torch.equal, own, again))
    for each, expected in zip(own, of_te, strict=True):
        # Both are rounded to BF16, or summed in fp32 in another order.
        rounding = 2.0**-7 if each.dtype is torch.bfloat16 else 2.0**-16
        assert each.dtype is expected.dtype
        assert (each - expected).abs().max() <= rounding * expected.abs().max()


@pytest.mark.gpu
def test_one_kernel_trains_and_resumes_as_transformer_engine_does(tmp_path, cache_dir):
    saved = ("trainer.max_steps=10", "checkpoint.save_at_end=true", "model.optim.sched.decay_steps=20")
    one, of_te = tmp_path / "one", tmp_path / "te"
    both = [
        run_small(1, run_dir, cache_dir, [*MANY, *saved, kernel], on_gpus=True)
        for run_dir, kernel in ((one, ONE_KERNEL), (of_te, OF_TE))
    ]
    assert losses(both[0]) == pytest.approx(losses(both[1]), rel=1e-2)
    # Checkpoints are the same, so that either goes on with the other's.
    resumed = [
        run_small(1, run_dir, cache_dir, [*MANY, *saved, kernel, "trainer.max_steps=14"], on_gpus=True)
        for run_dir, kernel in ((one, OF_TE), (of_te, ONE_KERNEL))
    ]
    assert losses(resumed[0]) == pytest.approx(losses(resumed[1]), rel=1e-2)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("layout", ["dp", "ep2"])
def test_gradients_of_one_kernel_are_exchanged_behind_the_backward_pass(layout, tmp_path, cache_dir):
    short = [*MANY, "trainer.max_steps=10", f"parallelism={layout}"]
    one, of_te = (
        run_small(2, tmp_path / name, cache_dir, [*short, kernel], on_gpus=True)
        for name, kernel in (("one", ONE_KERNEL), ("te", OF_TE))
    )
    assert losses(one) == pytest.approx(losses(of_te), rel=1e-2)
    assert [record.grad_norm for record in one.train[:3]] == pytest.approx(
        [record.grad_norm for record in of_te.train[:3]], rel=3e-2
    )


@pytest.mark.gpu
def test_fp8_leaves_out_experts_of_one_kernel_and_says_so(tmp_path, cache_dir):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no FP8")
    metrics = run_small(1, tmp_path / "run", cache_dir, [*MANY, "fp8=tensorwise", "trainer.max_steps=4"], on_gpus=True)
    coverage = metrics.fp8_coverage
    assert {name.partition("mlp.")[2] for name in coverage.layers_kept_out} == {
        "experts.linear_fc1",
        "experts.linear_fc2",
    }
    assert 0 < coverage.gemm_flops_share < 0.5


@pytest.mark.gpu
@pytest.mark.parametrize(("m_splits", "computed", "idle"), [([16, 32], 2, 0), ([0, 48], 1, 0), ([0, 0], 0, 1)])
def test_grouped_products_are_called_for_no_rows_too(m_splits, computed, idle):
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    seen, idles = [], []
    with emulated_training() as training:
        experts = te.GroupedLinear(2, 32, 64, bias=False, params_dtype=torch.bfloat16, device="cuda")
        training.chunks[0].decoder.layers[1].mlp.linear_fc1 = experts
        rows = torch.randn(sum(m_splits), 32, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        with observe_products(
            training.chunks,
            lambda name, product: seen.append(product.phase),
            idle_listener=lambda name, phase: idles.append(phase),
        ):
            with te.fp8_autocast(enabled=True, fp8_recipe=Float8CurrentScaling()):
                out = experts(rows, m_splits)
            out.sum().backward()
    assert [seen.count(phase) for phase in Phase] == [computed] * 3
    assert [idles.count(phase) for phase in Phase] == [idle] * 3


@pytest.mark.gpu
def test_experts_resume_and_are_the_same_run(tmp_path, cache_dir):
    run_dir = tmp_path / "run"
    half = [*SHORT, "checkpoint.save_at_end=true", "trainer.max_steps=10", "model.optim.sched.decay_steps=20"]
    whole = [*half, "model.optim.sched.warmup_steps=2"]
    run_small(1, run_dir, cache_dir, whole, on_gpus=True)
    resumed = run_small(1, run_dir, cache_dir, [*whole, "trainer.max_steps=20"], on_gpus=True)
    uncut = run_small(1, tmp_path / "uncut", cache_dir, [*whole, "trainer.max_steps=20"], on_gpus=True)
    assert losses(resumed) == pytest.approx(losses(uncut), rel=5e-3)


@pytest.mark.gpu(count=2)
@pytest.mark.parametrize("fp8", ["none", "tensorwise"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["parallelism=ep2"], id="EP2"),
        pytest.param(["parallelism=ep2", "model.moe_token_dispatcher_type=allgather"], id="EP2 all-gather"),
        pytest.param(["parallelism=ep2", "model.overlap_moe_expert_parallel_comm=true"], id="EP2 overlapped"),
        pytest.param(
            ["parallelism=tp2_sp", "model.expert_model_parallel_size=2", "model.expert_tensor_parallel_size=1"],
            id="TP2+SP EP2",
        ),
    ],
)
def test_layout_trains_as_one_gpu(layout, fp8, tmp_path, cache_dir, one_gpu):
    if fp8 != "none" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("these GPUs have no FP8")
    metrics = run_small(2, tmp_path / "run", cache_dir, [*SHORT, f"fp8={fp8}", *layout], on_gpus=True)
    near = 1e-2 if fp8 == "none" else 3e-2
    assert means_of_ten(losses(metrics)) == pytest.approx(means_of_ten(losses(one_gpu)), rel=near)
