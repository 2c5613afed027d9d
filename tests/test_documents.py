"""Documents of one sample do not see each other (`model.data.inter_document_masking`), in every layout."""

import pytest
import torch

from gpt_pretrain.megatron import layers
from gpt_pretrain.megatron.gpt import GPT
from tests.document_training import (
    CHANGED,
    LENGTHS,
    assert_only_the_changed_one_differs,
    batches_of,
    borders,
    compute_logits,
    config_of,
    differences,
    look,
    one_process,
    tokens_and_positions,
    train_and_look,
)
from tests.emulated_training import build_training_of
from tests.forked_runs import fork_ranks

# On two ranks, then on four.
TWO = (
    "rope.dp",
    "rope.tp2",
    "rope.tp2_sp",
    "rope.pp2",
    "deep.pp2_vp2",
    "learned.tp2_sp",
    "recomputed.pp2",
    "experts.ep2",
    "delayed.tp2_sp",
    "blockwise.pp2",
)
FOUR = ("deep.tp2_sp_pp2",)
# All documents share one scale, so that a change in one rounds the others in another way.
ONE_SCALE = "tensorwise"


@pytest.mark.parametrize(
    "case",
    [
        "rope",
        "heads",
        "learned",
        "recomputed",
        "selective",
        "bf16",
        "experts",
        "delayed",
        "blockwise",
        "mxfp8",
        "torchao_rowwise",
    ],
)
def test_a_changed_document_changes_no_bit_of_another(case):
    config = config_of(case)
    with one_process(config):
        assert_only_the_changed_one_differs(look(build_training_of(config)), config)


def test_with_one_scale_for_a_tensor_a_change_rounds_other_documents_anew():
    config = config_of(ONE_SCALE)
    with one_process(config):
        found = differences(look(build_training_of(config)), config)
    own = found.pop(CHANGED)
    assert 0 < max(found) < own / 4


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    folder = tmp_path_factory.mktemp("documents")
    for num_ranks, cases in ((2, TWO), (4, FOUR)):
        done = fork_ranks(num_ranks, ["tests/programs/document_layouts.py", str(folder), *cases])
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


@pytest.mark.parametrize("case", [*TWO, *FOUR])
def test_a_layout_keeps_documents_apart_and_trains_as_one_process(case, launched):
    ranks = [torch.load(path) for path in sorted(launched.glob(f"{case}.*.pt"))]
    config = config_of(case.partition(".")[0])
    with one_process(config):
        alone = train_and_look(config)
    with_logits = [seen for seen in ranks if seen["logits"] is not None]
    assert with_logits
    for seen in with_logits:
        assert_only_the_changed_one_differs(seen, config)
    in_fp8 = config.model.fp8
    for seen in ranks:
        # Samples of the whole step: two of 32 tokens, twice.
        assert seen["squared_lengths"] == 2 * sum(length**2 for sample in LENGTHS[32] for length in sample)
        assert seen["losses"] == pytest.approx(alone["losses"], rel=2e-2 if in_fp8 else 1e-5)
        assert seen["norms"] == pytest.approx(alone["norms"], rel=5e-2 if in_fp8 else 1e-4)


@pytest.mark.parametrize("case", ["rope", "yarn", "heads", "learned", "experts"])
def test_documents_of_a_batch_equal_the_same_documents_alone(case):
    """Without the code for documents: each goes through the model as a sequence of its own."""
    config = config_of(case)
    with one_process(config):
        training = build_training_of(config)
        (chunk,) = training.chunks
        chunk.eval()
        tokens, positions = tokens_and_positions(config)
        together = compute_logits(training, tokens, positions)
        for begin, end in borders(config):
            of_document = tokens.view(1, -1)[:, begin:end]
            alone = chunk(of_document, torch.arange(end - begin).unsqueeze(0), None)[0]
            torch.testing.assert_close(together[begin:end], alone, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("case", ["rope", "heads", "learned"])
def test_gradients_of_a_batch_are_those_of_its_documents_alone(case):
    config = config_of(case)
    with one_process(config):
        training = build_training_of(config)
        (chunk,), (wrapped,) = training.chunks, training.trainable.model.chunks
        wrapped.zero_grad_buffer()
        tokens, positions = tokens_and_positions(config)
        (batch, *_) = batches_of(config, tokens, positions)
        packed = batch.sequences()
        labels = packed["labels"]
        chunk(packed["tokens"], packed["position_ids"], batch.document_borders, labels=labels).sum().backward()
        together = {name: each.main_grad.clone() for name, each in chunk.named_parameters()}
        wrapped.zero_grad_buffer()
        for begin, end in borders(config):
            places = torch.arange(end - begin).unsqueeze(0)
            chunk(packed["tokens"][:, begin:end], places, None, labels=labels[:, begin:end]).sum().backward()
        for name, each in chunk.named_parameters():
            assert each.main_grad.any(), name
            torch.testing.assert_close(together[name], each.main_grad, rtol=1e-4, atol=1e-4, msg=name)


def test_rotation_follows_positions():
    """Relative positions hide where rotation begins from logits, but not from the angles."""
    config = config_of("rope")
    with one_process(config):
        (chunk,) = build_training_of(config).chunks
        _, positions = tokens_and_positions(config)
        packed = positions.view(1, -1)
        rotation = chunk._preprocess(packed, packed)[1].flatten(1)
    pairs = rotation.size(1) // 2
    frequencies = config.model.rotary_base ** (-torch.arange(pairs) / pairs)
    expected = torch.outer(packed[0].float(), frequencies).repeat(1, 2)
    torch.testing.assert_close(rotation.cpu(), expected, rtol=1e-5, atol=1e-5)


def with_one_border_moved(spec, attention, real=layers.document_attention):
    built = real(spec, attention)

    class Moved(built):
        def forward(self, query, key, value, attention_mask, **others):
            moved = attention_mask.clone()
            moved[CHANGED + 1] += 1
            return super().forward(query, key, value, moved, **others)

    return Moved


def test_the_check_finds_one_token_that_sees_another_document(monkeypatch):
    monkeypatch.setattr(layers, "document_attention", with_one_border_moved)
    config = config_of("rope")
    with one_process(config):
        training = build_training_of(config)
        with pytest.raises(AssertionError):
            assert_only_the_changed_one_differs(look(training), config)


def test_the_check_finds_borders_that_do_not_arrive(monkeypatch):
    forward = GPT.forward
    monkeypatch.setattr(GPT, "forward", lambda self, tokens, places, borders: forward(self, tokens, places, None))
    config = config_of("rope")
    with one_process(config):
        training = build_training_of(config)
        with pytest.raises(AssertionError):
            assert_only_the_changed_one_differs(look(training), config)
