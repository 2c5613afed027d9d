"""The LM head and its cross entropy in one give the losses and gradients of head, logits and loss one by one."""

import json

import pytest
import torch
from megatron.core import parallel_state

from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.kernels.cross_entropy import accumulate_weight_gradient, linear_cross_entropy, score_labels
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.megatron.parallel import process_groups
from gpt_pretrain.run.products import chunk_tokens
from tests.emulated_training import RECOMPUTED, TINY, build_training_of
from tests.forked_runs import fork_ranks, interpret_kernels
from tests.linear_loss_training import compare_variants, differences
from tests.programs.z_loss_layouts import Z_LOSS
from tests.refusals import compose_quickly

TOKENS, WIDTH, VOCABULARY = 50, 24, 96
# Four chunks, the last of them smaller.
CHUNK = 16
TIED = "model.share_embeddings_and_output_weights=true"
PER_TOKEN = "model.data.eod_mask_loss=true"
# Below the largest logits of these models, so that it bends them.
CAPPED = "model.final_logit_softcapping=0.2"
BF16 = "trainer.precision=bf16"


@pytest.fixture(scope="module")
def one_rank():
    install_cpu_device()
    with process_groups(compose_quickly([*TINY]).model, read_launch({}), detect_platform()):
        yield parallel_state.get_tensor_model_parallel_group()


@pytest.fixture
def head():
    """Hidden states, weight, labels and the gradient of each token's loss."""
    generator = torch.Generator().manual_seed(3)
    return (
        torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_(),
        torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH, generator=generator)),
        torch.randint(VOCABULARY, (TOKENS,), generator=generator),
        torch.rand(TOKENS, generator=generator) * (torch.rand(TOKENS, generator=generator) > 0.3),
    )


def reference(hidden, weight, labels, loss_gradient, *, z_loss=0.0, cap=None):
    """Losses without the penalty and both gradients with it, in fp64."""
    hidden, weight = (tensor.detach().double().requires_grad_() for tensor in (hidden, weight))
    logits = hidden @ weight.t()
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    (losses + z_loss * logits.logsumexp(1).square()).backward(loss_gradient.double())
    return losses.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("cap", [None, 2.0, 15.0])
@pytest.mark.parametrize("z_loss", [0.0, 1e-4, 0.02])
def test_losses_and_gradients_are_those_of_fp64(z_loss, cap, one_rank, head):
    hidden, weight, labels, loss_gradient = head
    losses = linear_cross_entropy(
        hidden, weight, labels, loss_gradient, one_rank, chunk=CHUNK, accumulate=True, z_loss=z_loss, cap=cap
    )
    losses.backward(loss_gradient)
    for ours, expected in zip(
        (losses, hidden.grad, weight.grad), reference(*head, z_loss=z_loss, cap=cap), strict=True
    ):
        assert torch.allclose(ours.detach().double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cap", [None, 2.0])
def test_ranks_that_share_the_vocabulary_share_the_penalty(cap, head, tmp_path):
    torch.save([tensor.detach() for tensor in head], tmp_path / "head.pt")
    done = fork_ranks(2, ["tests/programs/z_loss_layouts.py", str(tmp_path), str(cap or 0.0)])
    assert done.returncode == 0, done.stderr[-4000:]
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    # megatron-core sums the hidden states' gradients over the ranks.
    found = ranks[0][0], ranks[0][1] + ranks[1][1], torch.cat([ranks[0][2], ranks[1][2]])
    for ours, expected in zip(found, reference(*head, z_loss=Z_LOSS, cap=cap), strict=True):
        assert torch.allclose(ours.double(), expected, rtol=1e-5, atol=1e-6)


def test_the_penalty_reaches_the_head_of_a_run(one_rank):
    """A step changes gradients by it, and leaves it out of the loss."""
    losses, gradients = [], []
    for weight in (0.0, 0.1):
        training = build_training_of(compose_quickly([*TINY, f"model.z_loss_coeff={weight}"]))
        losses.append(training.step())
        head = next(chunk.output_layer for chunk in training.trainable.model.gpt_chunks)
        gradients.append(head.weight.main_grad.clone())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    assert (gradients[1] - gradients[0]).norm() > 0.1 * gradients[0].norm()


@pytest.mark.parametrize("cap", [None, 2.0])
def test_scores_are_those_of_the_capped_vocabulary_without_its_padding(cap, one_rank, head):
    hidden, weight, labels, _ = (tensor.detach() for tensor in head)
    num_tokens = VOCABULARY - 30
    labels = labels % num_tokens
    scores = score_labels(hidden, weight, labels, one_rank, chunk=CHUNK, num_tokens=num_tokens, cap=cap)
    expected, _, _ = reference(hidden, weight[:num_tokens], labels, torch.ones(TOKENS), cap=cap)
    assert torch.allclose(scores[:, 0].double(), expected, rtol=1e-5, atol=1e-6)
    likeliest = (hidden.double() @ weight[:num_tokens].double().t()).argmax(dim=1)
    assert torch.equal(scores[:, 1], (likeliest != labels).float())


def test_a_run_caps_its_logits_after_mups_multiplier(one_rank):
    """In training and wherever logits are asked for; BF16 rounds them once more."""
    multiplied = ["model.use_mup=true", "model.mup_base_hidden_size=32", "model.mup_output_mult=20"]
    found = {}
    for cap in ("null", "0.5"):
        training = build_training_of(compose_quickly([*TINY, *multiplied, f"model.final_logit_softcapping={cap}"]))
        (chunk,) = training.trainable.model.gpt_chunks
        width = chunk.config.hidden_size
        hidden = torch.randn(8, 2, width, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            found[cap], _ = chunk.output_layer(hidden, torch.ones_like(chunk.output_layer.weight) / width**0.5)
    expected = 0.5 * torch.tanh(found["null"].double() / 0.5)
    assert found["null"].abs().max() > 1
    torch.testing.assert_close(found["0.5"].double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tied", [False, True])
def test_the_main_gradient_grows_once_for_each_backward_pass(tied, one_rank, head):
    """Data parallelism is told that it has; what autograd gets beside is added where an embedding shares the weight."""
    hidden, weight, labels, loss_gradient = head
    weight.main_grad = torch.ones(VOCABULARY, WIDTH)
    weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, tied
    for _ in range(2):
        losses = linear_cross_entropy(hidden, weight, labels, loss_gradient, one_rank, chunk=CHUNK, accumulate=True)
        losses.backward(loss_gradient)
    with torch.no_grad():
        without = linear_cross_entropy(hidden, weight, labels, loss_gradient, one_rank, chunk=CHUNK, accumulate=True)
    expected = 1 + 2 * reference(*head)[2]
    assert torch.allclose(weight.main_grad.double(), expected, rtol=1e-5, atol=1e-6)
    assert weight.grad_added_to_main_grad
    assert torch.equal(without, losses)
    if tied:
        assert weight.grad.abs().max() == 0


@pytest.mark.parametrize("chunk", [TOKENS, CHUNK])
def test_a_main_gradient_in_bf16_is_rounded_once_for_each_backward_pass(chunk, one_rank, head):
    hidden, weight, labels, loss_gradient = head
    hidden = hidden.detach().bfloat16().requires_grad_()
    weight = torch.nn.Parameter(weight.detach().bfloat16())
    sums = {}
    for dtype in (torch.float32, torch.bfloat16):
        # So large that what single chunks add would be lost.
        weight.main_grad = torch.full((VOCABULARY, WIDTH), 64.0, dtype=dtype)
        losses = linear_cross_entropy(hidden, weight, labels, loss_gradient, one_rank, chunk=chunk, accumulate=True)
        losses.backward(loss_gradient)
        sums[dtype] = weight.main_grad
    assert torch.equal(sums[torch.bfloat16], sums[torch.float32].bfloat16())


def test_another_gradient_than_was_told_is_an_error(one_rank, head):
    hidden, weight, labels, loss_gradient = head
    losses = linear_cross_entropy(hidden, weight, labels, loss_gradient, one_rank, chunk=CHUNK, accumulate=True)
    with pytest.raises(RuntimeError, match="differs from the one that the LM head was given"):
        losses.backward(loss_gradient * 1.001)


@pytest.mark.parametrize(
    ("num_tokens", "num_columns", "expected"),
    [(32_768, 50_304, 8192), (8192, 128_256, 4096), (300, 128_256, 300), (10, 2**40, 1)],
)
def test_chunks_are_powers_of_two(num_tokens, num_columns, expected):
    assert chunk_tokens(num_tokens, num_columns) == expected


@pytest.mark.parametrize(
    ("factors", "total"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)],
)
def test_weight_gradients_are_added_in_the_type_of_the_main_gradient(factors, total):
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(40, width, generator=generator).to(factors) for width in (8, 12))
    main_grad = torch.full((12, 8), 3.0, dtype=total)
    accumulate_weight_gradient(x, dy, main_grad)
    expected = 3.0 + dy.double().t() @ x.double()
    assert main_grad.dtype is total
    assert torch.allclose(main_grad.double(), expected, rtol=2**-8 if total is torch.bfloat16 else 1e-5, atol=1e-4)


def assert_small(found, *, losses=1e-5, gradients=1e-5):
    for variant, difference in found.items():
        assert difference["losses"] <= losses, (variant, found)
        assert difference["gradients"] <= gradients, (variant, found)


@pytest.mark.parametrize(
    ("masked", "overrides", "tolerance"),
    [
        pytest.param(True, [TIED, PER_TOKEN], {}, id="tied, mean over the step's tokens"),
        pytest.param(False, [CAPPED], {}, id="capped"),
        # The gradient of the logits is rounded to BF16 either way, the weights' no longer for each microbatch.
        pytest.param(True, [BF16, *RECOMPUTED], {"losses": 2e-3, "gradients": 1e-2}, id="bf16, recomputed"),
    ],
)
def test_training_is_that_with_megatrons_head_and_loss(masked, overrides, tolerance, one_rank):
    config = compose_quickly([*TINY, *overrides])
    assert_small(differences(compare_variants(config, masked=masked)), **tolerance)


def test_two_ranks_train_as_with_megatrons_head_and_loss(tmp_path):
    cases = [
        "parallelism=tp2,masked",
        f"parallelism=tp2,{CAPPED}",
        f"parallelism=pp2,{CAPPED}",
        f"parallelism=tp2_sp,{TIED}",
        f"parallelism=pp2,{TIED},{PER_TOKEN},masked",
        "parallelism=pp2_vp2,model.num_layers=4",
        # Gradients are reduced while the backward pass runs.
        "parallelism=dp",
    ]
    done = fork_ranks(2, ["tests/programs/linear_loss_layouts.py", str(tmp_path), *cases])
    assert done.returncode == 0, done.stderr[-4000:]
    for rank in (0, 1):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert list(found) == cases
        for differences_of_case in found.values():
            assert_small(differences_of_case)


INTERPRETED = """
import torch
from gpt_pretrain.kernels.cross_entropy import merge_statistics, row_statistics, turn_into_gradient
from gpt_pretrain.kernels.layers_triton import launch_gradient, launch_statistics

generator = torch.Generator().manual_seed(0)
labels = torch.tensor([0, 10_006, -5, 20_000])
for dtype, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 2**-7)):
    for cap in (None, 5.0):
        logits = (3 * torch.randn(4, 10_007, generator=generator)).to(dtype)
        # Where tanh is 1 in fp32, and where its exponential is beyond fp32.
        logits[0, :4] = torch.tensor([80.0, -80.0, 1000.0, -1000.0]) if cap else 0.0
        statistics = row_statistics(logits, labels, cap)
        torch.testing.assert_close(launch_statistics(logits, labels, cap), statistics, rtol=1e-5, atol=1e-5)
        losses, log_sum = merge_statistics(statistics[None])
        assert losses.isinf().tolist() == [False, False, True, True]
        ours, expected, factor = logits.clone(), logits.clone(), torch.rand(4, generator=generator)
        launch_gradient(ours, labels, log_sum, factor, cap)
        turn_into_gradient(expected, labels, log_sum, factor, cap)
        torch.testing.assert_close(ours, expected, rtol=tolerance, atol=1e-6)
"""


def test_triton_kernels_compute_what_torch_does():
    """Interpreted on the CPU; the last block of columns is not full, and labels are on other ranks."""
    interpret_kernels(INTERPRETED)
