"""Where documents begin in what loaders hand to training, against a count by hand."""

from itertools import accumulate

import pytest
import torch

from gpt_pretrain.checkpoint.data_changes import compare_data
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data.batches import build_batch_iterator
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.documents import document_borders
from tests.token_files import SEQUENCE_LENGTH, data_config, write_token_file

MASKED = "model.data.inter_document_masking=true"
EOD = 0
# Of one token; as long as a sample, one longer, and longer than two.
LENGTHS = (1, 5, 1, 1, SEQUENCE_LENGTH, SEQUENCE_LENGTH + 1, 3, 2 * SEQUENCE_LENGTH + 7, 2, 30)
# Every other token is one of a kind, and tells its document.
BEGINS = [1, *accumulate(LENGTHS, initial=1)][1:]


def documents():
    """The end-of-document token stands at a start, inside and at an end, and borders do not go by it."""
    found = [list(range(begin, begin + length)) for begin, length in zip(BEGINS, LENGTHS, strict=False)]
    found[1][0] = found[4][7] = found[6][-1] = EOD
    return found


def masked_config(tmp_path, *overrides):
    prefix = write_token_file(tmp_path / "tokens", documents())
    files = ["data=mmap", f"model.data.data_prefix=[{prefix}]", "model.data.splits_string='100,0,0'"]
    return data_config(tmp_path / "cache", *files, "trainer.limit_val_batches=0", MASKED, *overrides)


def first_batches(config, num, **arguments):
    corpus = prepare_corpus(config, show_progress=False)
    train, _ = build_datasets(config, corpus, num_train_samples=24)
    share = {"config": config, "data_parallel_rank": 0, "data_parallel_size": 1, "device": torch.device("cpu")}
    batches = build_batch_iterator(train, **share, **arguments)
    found = [next(batches) for _ in range(num)]
    batches.close()
    return found


def places_by_hand(tokens):
    """The place of each token in its document, as far as the sample shows it, from what the tokens are."""
    whole = [token for document in documents() for token in document]
    of = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    places = []
    for sample in tokens.tolist():
        found, before = [], None
        for token in sample:
            # An end-of-document token follows one that is known, or, where a document begins, comes before one.
            at = whole.index(token) if token != EOD else None
            if at is None:
                at = next(
                    place
                    for place, each in enumerate(whole)
                    if each == EOD
                    and (
                        (before is not None and place == before + 1)
                        or whole[place + 1 : place + 2] == sample[len(found) + 1 : len(found) + 2]
                    )
                )
            continues = before is not None and of[at] == of[before] and at == before + 1
            found.append(found[-1] + 1 if continues else 0)
            before = at
        places.append(found)
    return torch.tensor(places)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_positions_restart_and_borders_stand_where_documents_begin(tmp_path, num_workers):
    config = masked_config(tmp_path, f"model.data.num_workers={num_workers}")
    num_borders = set()
    for batch in first_batches(config, 8):
        expected = places_by_hand(batch.tokens)
        assert batch.position_ids.tolist() == expected.tolist()
        packed = batch.sequences()
        assert sorted(packed) == ["labels", "loss_mask", "position_ids", "tokens"]
        assert {each.shape for each in packed.values()} == {(1, 2 * SEQUENCE_LENGTH)}
        starts = [at for at, place in enumerate(expected.flatten().tolist()) if place == 0]
        assert batch.document_borders.tolist() == starts + [2 * SEQUENCE_LENGTH] * (33 - len(starts))
        assert batch.document_borders.dtype is torch.int32
        # The next tokens are labels across borders, too.
        assert torch.equal(batch.tokens[:, 1:], batch.labels[:, :-1])
        num_borders.add(len(starts))
    assert len(num_borders) > 1


def test_samples_of_one_document_have_their_own_ends_for_borders():
    positions = torch.arange(SEQUENCE_LENGTH).repeat(3, 1)
    assert document_borders(positions).tolist() == [0, 16, 32, *[48] * 30]


@pytest.mark.parametrize(("num", "expected"), [(1, 32), (32, 32), (33, 64), (64, 64), (1000, 1024), (1025, 2048)])
def test_empty_documents_at_the_end_make_few_numbers_of_documents(num, expected):
    """Each number is a plan of cuDNN's."""
    borders = document_borders(torch.arange(2).repeat(1, num))
    assert borders.tolist() == [min(2 * begin, 2 * num) for begin in range(expected + 1)]


def test_without_masking_batches_are_as_they_were(tmp_path):
    (batch,) = first_batches(masked_config(tmp_path, "model.data.inter_document_masking=false"), 1)
    assert batch.document_borders is None
    assert batch.position_ids.tolist() == [list(range(SEQUENCE_LENGTH))] * 2
    assert batch.sequences()["tokens"] is batch.tokens


@pytest.mark.parametrize("was_masked", [True, False])
def test_masking_that_changes_on_resume_is_told_as_other_data_are(tmp_path, was_masked):
    masked = prepare_corpus(masked_config(tmp_path), show_progress=False).fingerprints
    open_config = masked_config(tmp_path, "model.data.inter_document_masking=false")
    unmasked = prepare_corpus(open_config, show_progress=False).fingerprints
    # Checkpoints of runs without it, earlier versions' included, are as they were.
    assert not any("inter_document_masking" in name for name in unmasked)
    current, saved = (unmasked, masked) if was_masked else (masked, unmasked)
    with pytest.raises(UserError, match=r"model\.data\.inter_document_masking.* changed; .*allow_data_change=true"):
        compare_data(tmp_path, current, saved, allowed=False)
    (note,) = compare_data(tmp_path, current, saved, allowed=True)
    assert "model.data.inter_document_masking" in note
