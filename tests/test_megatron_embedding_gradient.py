"""Gradients of looked up embeddings, added to rows of the main gradient; layouts: test_megatron_linear_loss.py."""

import pytest
import torch

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.features.embedding_gradient import embedding_class
from gpt_pretrain.rules.machine import check_machine
from tests.emulated_training import emulated_training
from tests.forked_runs import interpret_kernels
from tests.platforms import CPU, H200, spec_of
from tests.refusals import compose_quickly
from tests.test_megatron_platform import launched

ACCUMULATED = "model.gradient_accumulation_fusion=true"
ASKED = "model.embedding_gradient_fusion=true"
TIED, UNTIED = (f"model.share_embeddings_and_output_weights={tied}" for tied in ("true", "false"))
BF16, IN_BF16 = "trainer.precision=bf16", "model.grad_reduce_in_fp32=false"

INTERPRETED = """
from tests.embedding_gradients import check_rows_are_added
check_rows_are_added("cpu")
"""


def test_the_kernel_interpreted_computes_what_torch_does():
    interpret_kernels(INTERPRETED)


def test_a_row_of_a_bf16_main_gradient_is_rounded_once():
    with emulated_training(ACCUMULATED, ASKED, UNTIED, BF16, IN_BF16) as training:
        embedding = training.chunks[0].embedding.word_embeddings
        weight = embedding.weight
        assert weight.main_grad.dtype is torch.bfloat16
        weight.main_grad.fill_(256.0)
        # Each by itself is less than half of what the next number above 256 is apart.
        embedding(torch.full((1, 5), 7)).backward(torch.full((1, 5, weight.size(1)), 0.75, dtype=torch.bfloat16))
        assert weight.main_grad[7].unique().tolist() == [260.0]
        assert weight.main_grad[:7].unique().tolist() == [256.0]


@pytest.mark.parametrize("tied", [TIED, UNTIED])
def test_rows_of_tokens_grow_and_no_others(tied):
    """A token that occurs twice is added twice, on top of what is there."""
    with emulated_training(ACCUMULATED, ASKED, tied) as training:
        embedding = training.chunks[0].embedding.word_embeddings
        assert isinstance(embedding, embedding_class())
        weight = embedding.weight
        weight.main_grad.fill_(3.0)
        weight.grad_added_to_main_grad = False
        tokens = torch.tensor([[5, 7], [7, 9]])
        given = torch.arange(2 * 2 * weight.size(1), dtype=torch.float32).view(2, 2, -1)
        embedded = embedding(tokens)
        assert torch.equal(embedded, weight[tokens])
        embedded.backward(given)
        expected = torch.full_like(weight, 3.0)
        for token, gradient in zip(tokens.flatten(), given.flatten(0, 1), strict=True):
            expected[token] += gradient
        assert torch.equal(weight.main_grad, expected)
        with torch.no_grad():
            assert torch.equal(embedding(tokens), weight[tokens])
        with pytest.raises(IndexError):
            embedding(torch.tensor([[-1, 7]]))


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (("model.gradient_accumulation_fusion=false",), "model.gradient_accumulation_fusion=false"),
        (("model=gpt2_124m", "model.cuda_graph_impl=local"), "model.cuda_graph_impl=local"),
    ],
)
def test_refused_beside_what_it_does_not_go_with(broken_rules, overrides, named):
    (message,) = broken_rules(ASKED, *overrides)
    assert message.startswith("model.embedding_gradient_fusion=true ")
    assert f" {named}: " in message
    assert message.endswith("use null or false")
    assert broken_rules(*overrides) == []


def test_needs_gradients_added_in_products():
    asked = compose_quickly(["data=mock", ASKED])
    assert spec_of(asked, H200).kernels.features["embedding_gradient_fusion"]
    check_machine(spec_of(asked, H200, launched()))
    check_machine(spec_of(compose_quickly(["data=mock", ASKED, ACCUMULATED]), CPU, launched()))
    with pytest.raises(ConfigError) as refused:
        check_machine(spec_of(asked, CPU, launched()))
    message = str(refused.value)
    assert message.startswith("model.embedding_gradient_fusion=true ")
    assert "model.gradient_accumulation_fusion=true" in message
    assert message.endswith("use null or false")
