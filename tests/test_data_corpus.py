from pkgutil import iter_modules

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

from gpt_pretrain.config.choices import DataImpl
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.data import sources
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.tokenizer import train_bpe
from tests.token_files import counting_documents, data_config, write_token_file

DOCUMENTS = counting_documents(20, 40)


def mmap_corpus(tmp_path, *overrides, prefix=None):
    prefix = prefix or write_token_file(tmp_path / "web", DOCUMENTS)
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{prefix}]", *overrides)
    return prepare_corpus(config, show_progress=False)


def test_indexed_files_need_no_tokenizer(tmp_path):
    corpus = mmap_corpus(tmp_path)
    assert corpus.tokenizer is None
    assert (corpus.train.num_documents, corpus.train.num_tokens) == (18, 720)
    assert (corpus.valid.num_documents, corpus.valid.num_tokens) == (1, 40)


@pytest.mark.parametrize("path", ["~nobody_here", "~nobody_here/x"])
@pytest.mark.parametrize(
    ("key", "overrides"),
    [
        ("model.data.data_prefix", ["data=mmap", "model.data.data_prefix=['{}']"]),
        ("model.data.text_files", ["data=text", "model.data.text_files=['{}']"]),
        ("model.data.cache_dir", ["model.data.cache_dir='{}'"]),
        ("model.tokenizer.model", ["model.tokenizer.library=file", "model.tokenizer.model='{}'"]),
    ],
)
def test_the_home_of_nobody_is_told_with_its_key(key, overrides, path, tmp_path):
    config = data_config(tmp_path / "cache", *(override.format(path) for override in overrides))
    with pytest.raises(UserError) as refused:
        prepare_corpus(config, show_progress=False)
    assert str(refused.value).startswith(f"{key}={path}: ")
    assert "~nobody_here;" in str(refused.value)


def test_the_fingerprints_survive_a_copy_and_a_restart_and_tell_what_has_changed(tmp_path):
    corpus = mmap_corpus(tmp_path)

    def changes(*overrides, prefix=None):
        other = mmap_corpus(tmp_path, *overrides, prefix=prefix).fingerprints
        assert other.keys() == corpus.fingerprints.keys()
        return [name for name in other if other[name] != corpus.fingerprints[name]]

    assert changes() == []
    (tmp_path / "elsewhere").mkdir()
    copy = write_token_file(tmp_path / "elsewhere" / "copy", DOCUMENTS)
    assert changes(prefix=copy) == []
    assert mmap_corpus(tmp_path, prefix=copy).files_key != corpus.files_key
    assert changes("model.data.splits_string='800,100,100'") == ["splits"]
    assert changes("model.data.splits_string='90,5,5'") == []
    assert changes(prefix=write_token_file(tmp_path / "changed", DOCUMENTS[::-1])) == ["tokens"]


def test_files_without_weights_count_by_their_tokens(tmp_path):
    small = write_token_file(tmp_path / "small", DOCUMENTS)
    large = write_token_file(tmp_path / "large", [document * 3 for document in DOCUMENTS])
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{small},{large}]")
    training = prepare_corpus(config, show_progress=False).training
    assert training.file_weights(training.stages[0]) == pytest.approx([0.25, 0.75])


@pytest.mark.parametrize(("per_document", "warns"), [(2, True), (1, False)])
def test_an_index_of_sentences_is_told(per_document, warns, tmp_path, capsys):
    """As Megatron-LM's preprocess_data.py --split-sentences writes it: several sequences a document."""
    builder = IndexedDatasetBuilder(str(tmp_path / "web.bin"), dtype=numpy.int32)
    for document in DOCUMENTS:
        sentences = numpy.split(numpy.array(document), per_document)
        builder.add_document(numpy.concatenate(sentences), [len(sentence) for sentence in sentences])
    builder.finalize(str(tmp_path / "web.idx"))
    config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{tmp_path}/web]")
    prepare_corpus(config, show_progress=True)
    told = f"warning: {tmp_path}/web has 20 documents that were split into 40 sentences"
    assert (told in capsys.readouterr().err) is warns


def test_text_brings_its_tokenizer(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some words and some more, and numbers: 12345"}\n' * 200)
    config = data_config(
        tmp_path / "cache",
        "data=text",
        f"model.data.text_files=['{tmp_path}/*.jsonl']",
        "model.tokenizer.vocab_size=270",
    )
    corpus = prepare_corpus(config, show_progress=False)
    assert corpus.tokenizer is not None
    assert corpus.tokenizer.vocab_size <= 270
    assert corpus.train.num_documents == 180
    again = prepare_corpus(config, show_progress=False)
    assert again.fingerprints == corpus.fingerprints
    assert again.fingerprints["tokenizer"] == corpus.tokenizer.fingerprint


def test_every_kind_of_text_has_a_source():
    modules = {module.name for module in iter_modules(sources.__path__)}
    assert modules == {kind.name for kind in DataImpl if not kind.has_tokens}


def test_mock_data_touches_no_cache(tmp_path):
    config = data_config(tmp_path / "cache", "data=mock")
    assert prepare_corpus(config, show_progress=False).is_mock
    assert not (tmp_path / "cache").exists()


def test_tokens_of_another_vocabulary_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"\b700 .*\b700 .*\b17\b.*model\.vocab_size=700;.* 800$"):
        mmap_corpus(tmp_path, "model.vocab_size=700")


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    (tmp_path / "x.txt").write_text("abc")
    train_bpe(["some words and more words, to be merged"] * 9, 290).save(tmp_path / "tokenizer.json")
    config = data_config(
        tmp_path / "cache",
        "data=text",
        f"model.data.text_files=[{tmp_path}/x.txt]",
        "model.tokenizer.library=file",
        f"model.tokenizer.model={tmp_path}/tokenizer.json",
        "model.vocab_size=260",
    )
    with pytest.raises(UserError, match=r"model\.vocab_size=260 .*; set model\.vocab_size=2[6-9]\d "):
        prepare_corpus(config, show_progress=False)


def test_leaving_out_the_end_of_documents_needs_a_tokenizer(tmp_path):
    with pytest.raises(UserError, match=r"model\.data\.eod_mask_loss=true .*model\.tokenizer\.model=PATH"):
        mmap_corpus(tmp_path, "model.data.eod_mask_loss=true")


def test_a_cache_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    config = data_config(tmp_path / "file" / "cache", "data=mmap", "model.data.data_prefix=[x]")
    with pytest.raises(UserError, match=r"file/cache .*; set model\.data\.cache_dir"):
        prepare_corpus(config, show_progress=False)
