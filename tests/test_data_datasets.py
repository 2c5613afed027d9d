import pickle
import shutil

import numpy
import pytest
import torch

from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.token_files import split_of_documents
from gpt_pretrain.launch import environment
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.rules.no_effect import given_without_effect
from tests.forked_runs import fork_ranks
from tests.runs import SMALL_RUN
from tests.token_files import SEQUENCE_LENGTH, counting_documents, data_config, write_token_file

# 20 documents of 40 tokens; with 900,50,50 the training split has 18 of them (720 tokens), the validation split one.
DOCUMENTS = counting_documents(20, 40)


def build(tmp_path, *overrides, data="data=mmap", prefix=None, num_train=16):
    overrides = list(overrides)
    if data == "data=mmap":
        prefix = prefix or write_token_file(tmp_path / "web", DOCUMENTS)
        overrides.append(f"model.data.data_prefix=[{prefix}]")
    config = data_config(tmp_path / "cache", data, *overrides)
    corpus = prepare_corpus(config, show_progress=False)
    return build_datasets(config, corpus, num_train_samples=num_train)


def tokens_of(dataset, num=None):
    return torch.stack([dataset[i]["tokens"] for i in range(len(dataset) if num is None else num)])


def test_labels_are_the_next_tokens_and_all_of_them_count(tmp_path):
    train, _ = build(tmp_path)
    for index in range(len(train)):
        sample = train[index]
        assert sorted(sample) == ["labels", "loss_mask", "position_ids", "tokens"]
        assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])
        assert torch.equal(sample["loss_mask"], torch.ones(SEQUENCE_LENGTH))
        assert torch.equal(sample["position_ids"], torch.arange(SEQUENCE_LENGTH))


def test_training_and_validation_read_their_own_documents(tmp_path):
    train, valid = build(tmp_path)
    split = split_of_documents(20, "900,50,50")
    (of_valid,) = numpy.flatnonzero(split == 1)
    assert set(tokens_of(train).flatten().tolist()) <= {t for n in numpy.flatnonzero(split == 0) for t in DOCUMENTS[n]}
    assert set(tokens_of(valid).flatten().tolist()) <= set(DOCUMENTS[of_valid])


def test_a_complete_cache_is_only_read(tmp_path):
    prefix = write_token_file(tmp_path / "web", DOCUMENTS)
    build(tmp_path, prefix=prefix)
    before = {path: path.lstat().st_ctime_ns for path in (tmp_path / "cache").rglob("*")}
    build(tmp_path, prefix=prefix)
    assert {path: path.lstat().st_ctime_ns for path in (tmp_path / "cache").rglob("*")} == before


def test_an_index_that_no_memory_holds_is_refused_before_it_is_built(tmp_path):
    with pytest.raises(UserError, match=r"^trainer\.max_steps=\d+ with model\.global_batch_size=\d+: "):
        build(tmp_path, num_train=10**12)
    assert not (tmp_path / "cache" / "index").exists()


def test_an_index_beyond_the_memory_of_a_container_is_refused(tmp_path, monkeypatch):
    own, limit = tmp_path / "own", tmp_path / "memory.max"
    own.write_text("0::/\n")
    limit.write_text("100000\n")
    monkeypatch.setattr(environment, "_OWN_GROUPS", own)
    monkeypatch.setattr(environment, "_GROUPS", tmp_path)
    build(tmp_path, num_train=1000)
    with pytest.raises(UserError, match=r"^trainer\.max_steps=\d+ .* 10,000 .* control group "):
        build(tmp_path, num_train=10_000)


def test_no_validation_builds_no_validation_split(tmp_path):
    assert build(tmp_path, "trainer.limit_val_batches=0", "model.data.splits_string='1'")[1] is None


def test_one_epoch_shows_every_training_token_at_most_once(tmp_path):
    train, _ = build(tmp_path, num_train=40)
    tokens = tokens_of(train).flatten()
    assert len(train) == (720 - 1) // SEQUENCE_LENGTH
    assert len(tokens.unique()) == len(tokens)
    assert train.num_epochs == pytest.approx(40 * 16 / 720)


def test_exhausted_data_begins_another_epoch_in_another_order(tmp_path):
    train, valid = build(tmp_path, num_train=100)
    assert len(train) >= 100
    assert train.num_epochs == pytest.approx(100 * 16 / 720)
    assert valid.num_epochs == pytest.approx(8 * 16 / 40)
    tokens = tokens_of(train).flatten()
    assert len(tokens.unique()) == 720
    _, counts = numpy.unique(tokens.numpy(), return_counts=True)
    assert set(counts.tolist()) <= {1, 2, 3}
    first, second = tokens[:720], tokens[720:1440]
    assert not torch.equal(first, second)


def test_the_order_follows_from_the_seed(tmp_path):
    first, second = build(tmp_path)[0], build(tmp_path)[0]
    assert torch.equal(tokens_of(first), tokens_of(second))
    other = build(tmp_path, "model.seed=4321")[0]
    assert not torch.equal(tokens_of(first), tokens_of(other))


def test_weights_are_the_shares_of_the_samples(tmp_path):
    low = write_token_file(tmp_path / "low", counting_documents(20, 40))
    high = write_token_file(tmp_path / "high", counting_documents(20, 40, start=1000))
    train, valid = build(tmp_path, "trainer.limit_val_batches=5", prefix=f"75,{low},25,{high}", num_train=200)
    is_high = (tokens_of(train, 200) >= 1000).float()
    assert is_high.mean() == pytest.approx(0.25, abs=0.01)
    assert torch.equal(is_high.amin(dim=1), is_high.amax(dim=1)), "a sample comes from one file"
    # One set after the other, however much either weighs in training.
    assert len(valid) == 2 * 40
    assert tokens_of(valid, 80)[:40].max() < 1000 <= tokens_of(valid, 80)[40:].min()


def test_the_first_token_of_a_document_can_be_left_out_of_the_loss(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some words"}\n' * 400)
    train, _ = build(
        tmp_path,
        f"model.data.text_files=[{tmp_path}/x.jsonl]",
        "model.tokenizer.vocab_size=270",
        "model.data.eod_mask_loss=true",
        data="data=text",
    )
    ends, masked = 0, 0
    for sample in map(train.__getitem__, range(8)):
        tokens, labels, counts = (sample[name].tolist() for name in ("tokens", "labels", "loss_mask"))
        for token, label, count in zip(tokens, labels, counts, strict=True):
            # The BPE's first token is the end of a document. Megatron-LM leaves out what is predicted from it.
            assert count == (0 if token == 0 else 1)
            masked += token == 0
            if label == 0:
                assert count == 1
                ends += 1
    assert ends > 10
    assert masked > 10


def test_the_ends_of_documents_can_be_left_out_of_the_loss(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "some words"}\n' * 400)
    text = f"model.data.text_files=[{tmp_path}/x.jsonl]"
    for overrides in ([], ["model.data.eod_mask_loss=true"]):
        train, _ = build(
            tmp_path,
            text,
            "model.tokenizer.vocab_size=270",
            "model.data.eod_mask_labels=true",
            *overrides,
            data="data=text",
        )
        sample = pickle.loads(pickle.dumps(train))[3]
        left_out = sample["labels"] == 0
        left_out |= (sample["tokens"] == 0) if overrides else False
        assert left_out.sum() > 2
        assert torch.equal(sample["loss_mask"], (~left_out).float())


def test_random_tokens_are_the_same_for_the_same_seed_index_and_split(tmp_path):
    train, valid = build(tmp_path, data="data=mock", num_train=50)
    again, _ = build(tmp_path, data="data=mock", num_train=50)
    other, _ = build(tmp_path, "model.seed=4321", data="data=mock", num_train=50)
    assert (len(train), len(valid)) == (50, 8)
    assert torch.equal(tokens_of(train), tokens_of(again))
    assert (
        len({tuple(row.tolist()) for row in torch.cat([tokens_of(train), tokens_of(valid), tokens_of(other)])}) == 108
    )
    assert tokens_of(train).min() >= 0
    assert tokens_of(train).max() < 2048
    sample = train[3]
    assert torch.equal(sample["tokens"][1:], sample["labels"][:-1])


def test_a_pickled_dataset_carries_no_index_and_reads_the_same(tmp_path):
    train, _ = build(tmp_path, num_train=20_000)
    pickled = pickle.dumps(train)
    assert len(pickled) < 20_000, "the index of 20,000 samples has 4 bytes a sample and more"
    assert torch.equal(tokens_of(pickle.loads(pickled), 50), tokens_of(train, 50))


def test_an_index_that_a_killed_process_left_is_built_again(tmp_path):
    prefix = write_token_file(tmp_path / "web", DOCUMENTS)
    expected = tokens_of(build(tmp_path, prefix=prefix)[0])
    (index,) = [path for path in (tmp_path / "cache" / "index").iterdir() if path.is_dir()]
    (index / "COMPLETE").unlink()
    for path in index.glob("*shuffle_index.npy"):
        path.write_bytes(path.read_bytes()[:100])
    assert torch.equal(tokens_of(build(tmp_path, prefix=prefix)[0]), expected)


def test_two_ranks_build_the_datasets_of_one_cache_at_once(tmp_path):
    prefix = write_token_file(tmp_path / "web", DOCUMENTS)
    other = write_token_file(tmp_path / "code", counting_documents(20, 40, start=1000))
    blends = {"one": prefix, "two": f"0.5,{prefix},0.5,{other}"}
    built = {}
    for name, blend in blends.items():
        built[name] = built_by_ranks(2, tmp_path, name, blend)
        assert len(built[name]) == 2
        assert built[name][0] == built[name][1]
    assert built["one"] != built["two"]
    shutil.rmtree(tmp_path / "cache")
    assert built_by_ranks(1, tmp_path, "alone", prefix, env=single_rank()) == built["one"][:1]


def built_by_ranks(num_ranks, tmp_path, name, blend, env=None):
    """What each rank built: lengths and digest of its samples, in the order of the ranks."""
    out = tmp_path / name
    out.mkdir()
    program = ["tests/programs/build_datasets.py", str(tmp_path / "cache"), str(out), "data=mmap"]
    result = fork_ranks(num_ranks, [*program, f"model.data.data_prefix=[{blend}]"], env=env)
    assert result.returncode == 0, result.stderr
    return [path.read_text(encoding="utf-8") for path in sorted(out.iterdir())]


def single_rank():
    return {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


FORMS = {
    "two keys": ["model.data.data_prefix=[{train}]", "model.data.validation_prefix=[{valid}]"],
    "NeMo's": ["model.data.data_prefix={{train: [{train}], validation: [{valid}]}}"],
    "NeMo's, added": ["++model.data.data_prefix={{train: [{train}], validation: [{valid}]}}"],
    "NeMo's, quoted": ["++model.data.data_prefix={{validation:['{valid}'],train:[\"{train}\"]}}"],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_files_of_their_own_to_validate_on_are_read_whole(form, tmp_path):
    train_prefix = write_token_file(tmp_path / "train it", DOCUMENTS[:12])
    valid_prefix = write_token_file(tmp_path / "valid", DOCUMENTS[12:])
    config = data_config(
        tmp_path / "cache", "data=mmap", *(key.format(train=train_prefix, valid=valid_prefix) for key in form)
    )
    corpus = prepare_corpus(config, show_progress=False)
    assert (corpus.train.num_documents, corpus.train.num_tokens) == (12, 480)
    assert (corpus.valid.num_documents, corpus.valid.num_tokens) == (8, 320)
    train, valid = build_datasets(config, corpus, num_train_samples=40)
    assert sorted(tokens_of(train).flatten().tolist()[:480]) == list(range(480))
    assert set(tokens_of(valid).flatten().tolist()) <= set(range(480, 800))
    assert (train.num_epochs, valid.num_epochs) == pytest.approx((40 * 16 / 480, 8 * 16 / 320))


def test_files_to_validate_on_with_weights_are_sets_of_their_own(tmp_path):
    names = {name: write_token_file(tmp_path / name, DOCUMENTS[4 * i : 4 * i + 4]) for i, name in enumerate("abcd")}
    keys = "model.data.data_prefix=[{a},{b}]", "model.data.validation_prefix=[0.25,{c},0.75,{d}]"
    overrides = ["data=mmap", "trainer.limit_val_batches=5", *(key.format(**names) for key in keys)]
    config = data_config(tmp_path / "cache", *overrides)
    corpus = prepare_corpus(config, show_progress=False)
    assert (corpus.train.num_tokens, corpus.valid.num_tokens) == (320, 320)
    train, valid = build_datasets(config, corpus, num_train_samples=200)
    assert set(tokens_of(train).flatten().tolist()) == set(range(320))
    assert corpus.validation_weights == {"c": 0.25, "d": 0.75}
    assert set(tokens_of(valid)[:40].flatten().tolist()) <= set(range(320, 480))
    assert set(tokens_of(valid)[40:].flatten().tolist()) <= set(range(480, 640))
    assert valid.epochs == pytest.approx({"c": 40 * 16 / 160, "d": 40 * 16 / 160})


def test_files_to_validate_on_are_part_of_what_a_checkpoint_compares(tmp_path):
    train, one, other = (write_token_file(tmp_path / name, DOCUMENTS[:n]) for name, n in (("t", 9), ("o", 8), ("p", 7)))

    def fingerprints(*validation):
        config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{train}]", *validation)
        return prepare_corpus(config, show_progress=False).fingerprints["splits"]

    splits = [fingerprints(), *(fingerprints(f"model.data.validation_prefix=[{each}]") for each in (one, other))]
    assert len(set(splits)) == 3


@pytest.mark.parametrize(
    ("documents", "named"),
    [(None, r"model\.data\.validation_prefix: .*valid\.bin does not exist"), ([[1] * 16], "1 documents .* 16 .* 17")],
)
def test_files_to_validate_on_are_checked(documents, named, tmp_path):
    prefix = str(tmp_path / "valid") if documents is None else write_token_file(tmp_path / "valid", documents)
    with pytest.raises(UserError, match=named):
        build(tmp_path, f"model.data.validation_prefix=[{prefix}]")


@pytest.mark.parametrize("value", ["{train: [a], test: [b]}", "{validation: [b]}", "{train: a, validation: [b]}", "{}"])
def test_other_splits_of_data_prefix_are_refused_with_the_form(value, tmp_path):
    with pytest.raises(ConfigError) as refused:
        data_config(tmp_path, "data=mmap", f"model.data.data_prefix={value}")
    assert f"model.data.data_prefix={value}: " in str(refused.value)
    assert "model.data.data_prefix={train: […], validation: […]}" in str(refused.value)


def test_shares_of_files_that_are_read_whole_are_refused(tmp_path):
    files = "model.data.data_prefix={train: [a], validation: [b]}"
    config = data_config(tmp_path, "data=mmap", files, "model.data.splits_string='8,2,0'")
    (told,) = given_without_effect(config, frozenset(["model.data.splits_string"]))
    assert told.startswith("model.data.splits_string='8,2,0' has no effect with model.data.validation_prefix")


def test_a_run_takes_nemos_form_of_data_prefix(tmp_path):
    train, valid = (write_token_file(tmp_path / name, DOCUMENTS) for name in ("train", "valid"))
    form = f"++model.data.data_prefix={{train: [{train}], validation: [{valid}]}}"
    sizes = [each for each in SMALL_RUN if not each.startswith(("data=", "model.data.", "model.tokenizer"))]
    places = [f"run_dir={tmp_path}/run", f"model.data.cache_dir={tmp_path}/cache"]
    changed = ["model.vocab_size=1024", "trainer.max_steps=1", "trainer.limit_val_batches=1"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", "data=mmap", *sizes, *places, *changed, form])
    assert done.returncode == 0, done.stderr[-4000:]
    config = load_saved_config(tmp_path / "run" / "config.yaml")
    assert (config.model.data.data_prefix, config.model.data.validation_prefix) == ([train], [valid])
    assert [record.step for record in load_metrics(tmp_path / "run").validation] == [0, 1]
