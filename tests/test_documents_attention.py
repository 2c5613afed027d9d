"""Attention inside documents, on its own: against a softmax by hand, and with the sequence split over ranks."""

from itertools import pairwise

import pytest
import torch

from gpt_pretrain.megatron.documents import without_filling
from gpt_pretrain.megatron.layers import attention_in_documents
from tests.forked_runs import fork_ranks

HEADS, GROUPS, WIDTH = 8, 4, 16
# Documents of one token at the start, inside and at the end, and some whose lengths no number of ranks divides.
BORDERS = [0, 1, 8, 9, 23, 31, 32]
# As loaders hand them over: with empty documents at the end.
GIVEN = [*BORDERS, 32, 32]


def softmax_by_hand(query, key, value, scale):
    """fp64, over a mask of the whole sequence."""
    length = len(query)
    k, v = (each.double().repeat_interleave(HEADS // GROUPS, dim=2) for each in (key, value))
    scores = torch.einsum("qbhw,kbhw->bhqk", query.double(), k) * scale
    of = torch.bucketize(torch.arange(length), torch.tensor(BORDERS), right=True)
    seen = (of.unsqueeze(1) == of.unsqueeze(0)).tril()
    weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.einsum("bhqk,kbhw->qbhw", weights, v).flatten(2)


@pytest.fixture(scope="module")
def inputs():
    generator = torch.Generator().manual_seed(3)
    shapes = {"query": HEADS, "key": GROUPS, "value": GROUPS}
    length = BORDERS[-1]
    given = {name: torch.randn(length, 1, heads, WIDTH, generator=generator) for name, heads in shapes.items()}
    gradient = torch.randn(length, 1, HEADS * WIDTH, generator=generator)
    return {**given, "borders": torch.tensor(GIVEN, dtype=torch.int32), "gradient": gradient}


@pytest.fixture(scope="module")
def expected(inputs):
    leaves = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
    out = softmax_by_hand(*leaves, 0.25)
    out.backward(inputs["gradient"].double())
    return out.detach().float(), [each.grad for each in leaves]


def test_a_function_whose_tensors_are_not_filled_does_all_else_as_before():
    def compute(values):
        values[0].fill_(0)
        values[1].zero_()
        return values * 2

    assert without_filling(compute)(torch.ones(3)).tolist() == [2, 0, 2]
    assert compute(torch.ones(3)).tolist() == [0, 0, 2]


def test_attention_in_documents_is_a_softmax_by_hand(inputs, expected):
    leaves = [inputs[name].clone().requires_grad_() for name in ("query", "key", "value")]
    out = attention_in_documents(*leaves, 0.25, borders=inputs["borders"], longest=BORDERS[-1])
    torch.testing.assert_close(out, expected[0])
    out.backward(inputs["gradient"])
    for leaf, gradient in zip(leaves, expected[1], strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


@pytest.mark.parametrize(("begin", "end"), pairwise(BORDERS))
def test_a_document_sees_no_nan_of_another(inputs, begin, end):
    spoilt = {name: inputs[name].clone() for name in ("query", "key", "value")}
    for each in spoilt.values():
        each[begin:end] = torch.nan
    out = attention_in_documents(*spoilt.values(), 0.25, borders=inputs["borders"], longest=BORDERS[-1])
    assert out.isnan().any(dim=2).flatten().nonzero().flatten().tolist() == list(range(begin, end))


@pytest.fixture(scope="module")
def exchanged(inputs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("exchanged")
    torch.save(inputs, folder / "input.pt")
    done = fork_ranks(4, ["tests/programs/exchanged_documents.py", str(folder), "2", "4"])
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("cp", [2, 4])
def test_ranks_that_share_a_sequence_compute_what_one_does(cp, exchanged, expected):
    for rank in range(4):
        found = torch.load(exchanged / f"{cp}.{rank}.pt")
        places = found["places"]
        torch.testing.assert_close(found["output"], expected[0][places])
        for gradient, whole in zip(found["gradients"], expected[1], strict=True):
            torch.testing.assert_close(gradient, whole[places])
