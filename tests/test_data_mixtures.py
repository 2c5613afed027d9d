"""Sources, weights and stages: counted from the tokens of samples, and by hand."""

import json
import math
import re
import shutil
from collections import Counter

import numpy
import pytest

from gpt_pretrain.checkpoint.manifest import read_manifest
from gpt_pretrain.compare.event_files import find_event_files, read_event_files
from gpt_pretrain.config.derived import flops_per_token
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.config.mixtures import read_entries, source_names
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.rules.check import config_problems
from tests.forked_runs import fork_ranks
from tests.runs import run_small, small_run_arguments
from tests.token_files import SEQUENCE_LENGTH, data_config, write_token_file

# Sources of this many documents; a document's tokens are its number, and each source has numbers of its own.
SIZES = {"web": 60, "code": 30, "math": 12}
FIRST = {"web": 1000, "code": 2000, "math": 3000}
# 20 and 40 samples of 16 tokens.
STAGES = '["320 web=0.75 code=0.25","640 web=50 math=50","math=0.1 code=0.9"]'


def documents_of(name, seed=0):
    lengths = numpy.random.default_rng([seed, FIRST[name]]).integers(1, 60, SIZES[name])
    return [[FIRST[name] + number] * int(length) for number, length in enumerate(lengths)]


def mixture(tmp_path, num_samples, *overrides, weights=None):
    """Training set, validation set and corpus of the three sources, with all documents for training."""
    paths = {name: write_token_file(tmp_path / name, documents_of(name)) for name in SIZES}
    entries = [each for name, path in paths.items() for each in ([weights[name], path] if weights else [path])]
    config = data_config(
        tmp_path / "cache",
        "data=mmap",
        f"model.data.data_prefix=[{','.join(map(str, entries))}]",
        "model.vocab_size=4000",
        *overrides,
    )
    corpus = prepare_corpus(config, show_progress=False)
    return *build_datasets(config, corpus, num_train_samples=num_samples), corpus


ALL = "model.data.splits_string='1'", "trainer.limit_val_batches=0"


def tokens_of(dataset, num_samples):
    return numpy.stack([dataset[index]["tokens"].numpy() for index in range(num_samples)])


def sources_of(tokens):
    """The source of each sample, by its tokens, which must all be of one."""
    assert (tokens // 1000 == tokens[:, :1] // 1000).all()
    return [{FIRST[name] // 1000: name for name in FIRST}[number] for number in (tokens[:, 0] // 1000).tolist()]


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["/data/web_text_document", "/data/code"], ["web_text_document", "code"]),
        (["a/web/*.jsonl", "b/code.parquet", "notes.txt"], ["web", "code", "notes"]),
        (["a/train", "b/train"], ["a/train", "b/train"]),
        (["web/**/data-*.arrow", "x/v1.5"], ["web", "v1.5"]),
        (["web/*.jsonl", "web/*.parquet"], ["web/*.jsonl", "web/*.parquet"]),
        (["*.jsonl"], ["*"]),
        (["web.jsonl.zst", "notes.txt.gz", "odd.gz"], ["web", "notes", "odd.gz"]),
    ],
)
def test_a_source_has_the_name_of_its_files(paths, names):
    assert source_names(paths) == names


@pytest.mark.parametrize(
    ("entries", "paths", "weights"),
    [
        (["/a"], ["/a"], None),
        (["/a", "/b"], ["/a", "/b"], None),
        ([0.7, "/a", 0.3, "/b"], ["/a", "/b"], [0.7, 0.3]),
        (["70", "/a", 30, "/b"], ["/a", "/b"], [0.7, 0.3]),
        ([0.3333, "/a", 0.3333, "/b", 0.3333, "/c"], ["/a", "/b", "/c"], [1 / 3, 1 / 3, 1 / 3]),
    ],
)
def test_paths_come_alone_or_with_shares(entries, paths, weights):
    assert read_entries(entries, "k") == (paths, None if weights is None else pytest.approx(weights))


@pytest.mark.parametrize(
    ("entries", "total", "offered"),
    [
        ([0.7, "/a", 0.2, "/b"], "0.9", "0.7778,/a,0.2222,/b"),
        ([3, "/a", 1, "/b"], "4", "0.75,/a,0.25,/b"),
        ([70, "/a", 29, "/b"], "99", "0.7071,/a,0.2929,/b"),
    ],
)
def test_weights_that_do_not_sum_are_refused_with_the_ones_that_do(entries, total, offered):
    with pytest.raises(UserError) as caught:
        read_entries(entries, "model.data.data_prefix")
    problem = str(caught.value)
    assert f" {total};" in problem
    assert problem.endswith(f"model.data.data_prefix=[{offered}]")


PATHS = "model.data.data_prefix=[/d/web,/d/code]"


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ([PATHS, 'model.data.stages=["1e3 web=1","lab=1"]'], "'lab'.* web, code"),
        ([PATHS, 'model.data.stages=["1e3 web=1","web=1"]'], "reads the source 'code'"),
        ([PATHS, 'model.data.stages=["web=1","code=1"]'], "'web=1' must begin with its tokens"),
        ([PATHS, 'model.data.stages=["1e3 web=1","1e3 code=1"]'], "'1e3 code=1' must have weights by source alone"),
        ([PATHS, 'model.data.stages=["1e3","code=1"]'], "'1e3' must begin with its tokens, and weights"),
        ([PATHS, 'model.data.stages=["1e3 seq_length=4","code=1"]'], "'1e3 seq_length=4' must .* weights by source"),
        (
            [PATHS, 'model.data.stages=["1e3 web=1 seq_len=4 seq_length=8","code=1"]'],
            "seq_length=8' must begin with its tokens",
        ),
        ([PATHS, 'model.data.stages=["0.5 web=1","code=1"]'], "0.5 tokens"),
        ([PATHS, 'model.data.stages=["1e3 web=-1 code=2","code=1"]'], "'1e3 web=-1 code=2'"),
        ([PATHS, 'model.data.stages=["1e3 seq_length=0 web=1","code=1"]'], "'seq_length=0' is no number"),
        ([PATHS, 'model.data.stages=["1e3 seq_length=4.5 web=1","code=1"]'], "'seq_length=4.5' is no number"),
        ([PATHS, f'model.data.stages=["1e3 seq_length={"9" * 5000} web=1","code=1"]'], "9' is no number"),
        (
            [PATHS, 'model.data.stages=["1e3 seq_length=3 web=1","code=1"]'],
            "seq_length=3 .*encoder_seq_length=16; .*2 or 4",
        ),
        (
            [PATHS, 'model.data.stages=["1e3 seq_length=32 web=1","code=1"]'],
            "seq_length=32 .*encoder_seq_length=16; .*8",
        ),
        (
            [PATHS, 'model.data.stages=["1e3 seq_length=2 web=1","code=1"]', "model.context_parallel_size=2"],
            "seq_length=2 .* multiples of 4, which ranks split; use seq_length=4 or 8, or no",
        ),
        (
            [PATHS, 'model.data.stages=["1e3 seq_length=4 web=1","code=1"]', "model.compile=true"],
            "model.compile=true cannot be combined with model.data.stages with seq_length=4",
        ),
        ([PATHS, 'model.data.stages=["1e3 web=0.5 code=0.2","code=1"]'], "the sum 0.7.*web=0.7143 code=0.2857"),
        (
            ["model.data.data_prefix=[0.5,/d/web,0.5,/d/code]", "model.data.temperature=2"],
            "model.data.temperature=2.0 cannot be combined with the weights in model.data.data_prefix",
        ),
        (
            [PATHS, "model.data.temperature=2", 'model.data.stages=["1e3 web=1","code=1"]'],
            "model.data.temperature=2.0 cannot be combined with model.data.stages",
        ),
        (["model.data.data_prefix=[0.5,/d/web,0.5,/d/web]"], "model.data.data_prefix names /d/web twice"),
        ([PATHS, "model.data.temperature=0"], "model.data.temperature=0.0 is not positive"),
    ],
)
def test_wrong_mixtures_are_refused_before_any_file_is_read(overrides, named, tmp_path):
    (problem,) = config_problems(data_config(tmp_path, "data=mmap", *overrides), None)
    assert re.search(named, problem)


@pytest.mark.parametrize("temperature", [1.0, 2.0, 100.0])
def test_a_temperature_flattens_the_shares_of_sizes(temperature, tmp_path):
    train, _, corpus = mixture(tmp_path, 1000, *ALL, f"model.data.temperature={temperature}")
    powers = {name: sum(map(len, documents_of(name))) ** (1 / temperature) for name in SIZES}
    shares = {name: power / sum(powers.values()) for name, power in powers.items()}
    assert corpus.training.stages[0].weights == pytest.approx(shares)
    counts = Counter(sources_of(tokens_of(train, 1000)))
    assert {name: counts[name] / 1000 for name in SIZES} == pytest.approx(shares, abs=0.002)


def check_times_read(tokens, documents, num_samples):
    """That samples are whole epochs of documents and a part of one: each token as often as any other, or once more."""
    sizes = Counter(token for document in documents for token in document)
    read = Counter(tokens.flatten().tolist())
    total = sum(sizes.values())
    whole = num_samples * SEQUENCE_LENGTH // total
    for token, size in sizes.items():
        assert whole * size <= read[token] <= (whole + 1) * size, token


def test_stages_have_their_shares_and_read_each_document_once_before_any_twice(tmp_path):
    train, _, _ = mixture(tmp_path, 400, *ALL, f"model.data.stages={STAGES}")
    tokens = tokens_of(train, 400)
    names = sources_of(tokens)
    assert Counter(names[:20]) == {"web": 15, "code": 5}
    assert Counter(names[20:60]) == {"web": 20, "math": 20}
    assert Counter(names[60:]) == {"math": 34, "code": 306}
    for end in (20, 37, 60, 61, 200, 400):
        for name in SIZES:
            of_source = tokens[:end][[each == name for each in names[:end]]]
            check_times_read(of_source, documents_of(name), len(of_source))


def test_the_order_of_stages_does_not_depend_on_where_the_run_ends(tmp_path):
    stages = f"model.data.stages={STAGES}"
    longest = tokens_of(mixture(tmp_path, 300, *ALL, stages)[0], 300)
    for num_samples in (1, 19, 20, 21, 59, 60, 61, 299):
        assert numpy.array_equal(
            tokens_of(mixture(tmp_path, num_samples, *ALL, stages)[0], num_samples), longest[:num_samples]
        )


def test_what_was_read_of_each_source_is_counted(tmp_path):
    train, _, _ = mixture(tmp_path, 400, *ALL, f"model.data.stages={STAGES}")
    tokens = tokens_of(train, 400)
    names = sources_of(tokens)
    assert train.epochs == pytest.approx({name: each.epochs for name, each in train.consumed(400).items()})
    # Forwards, and back to an earlier step, as after a rewind.
    for end in (1, 20, 61, 400, 100, 0):
        consumed = train.consumed(end)
        for name in SIZES:
            count = names[:end].count(name)
            num_tokens = sum(map(len, documents_of(name)))
            assert consumed[name].tokens == count * SEQUENCE_LENGTH
            assert consumed[name].epochs == pytest.approx(count * SEQUENCE_LENGTH / num_tokens)


def test_documents_are_counted_when_their_last_token_was_read(tmp_path):
    """Tokens of a document count upwards, so that its last one shows."""
    ends, documents = set(), []
    for length in numpy.random.default_rng(3).integers(1, 60, 40).tolist():
        first = documents[-1][-1] + 1 if documents else 0
        documents.append(list(range(first, first + length)))
        ends.add(documents[-1][-1])
    prefix = write_token_file(tmp_path / "a", documents)
    keys = "data=mmap", f"model.data.data_prefix=[{prefix}]", "model.vocab_size=4000"
    config = data_config(tmp_path / "cache", *keys, *ALL)
    train, _ = build_datasets(config, prepare_corpus(config, show_progress=False), num_train_samples=200)
    for num_samples in (3, 50, 51, 200, 7):
        read = tokens_of(train, num_samples).flatten().tolist()
        assert train.consumed(num_samples)["mmap"].documents == sum(token in ends for token in read)


def test_a_source_that_would_be_read_too_often_is_refused(tmp_path):
    epochs = mixture(tmp_path, 400, *ALL, f"model.data.stages={STAGES}")[0].epochs
    most = max(epochs, key=epochs.get)
    bound = f"model.data.max_epochs={epochs[most] - 0.01}"
    with pytest.raises(UserError, match=rf"max_epochs=.* {most} is read {epochs[most]:.2f} times") as refused:
        mixture(tmp_path, 400, *ALL, f"model.data.stages={STAGES}", bound)
    assert str(refused.value).endswith(f"model.data.max_epochs={int(epochs[most]) + 1}")
    mixture(tmp_path, 400, *ALL, f"model.data.stages={STAGES}", f"model.data.max_epochs={epochs[most] + 0.01}")


def test_each_validation_set_is_a_sample_of_its_source(tmp_path):
    weights = {"web": 0.5, "code": 0.3, "math": 0.2}
    overrides = "model.data.splits_string='80,20'", "trainer.limit_val_batches=6"
    train, valid, corpus = mixture(tmp_path, 500, *overrides, weights=weights)
    assert corpus.validation_weights == pytest.approx(weights)
    assert len(valid) == 3 * 48
    tokens = tokens_of(valid, len(valid))
    assert sources_of(tokens) == ["web"] * 48 + ["code"] * 48 + ["math"] * 48
    trained = set(tokens_of(train, 500).flatten().tolist())
    assert not trained & set(tokens.flatten().tolist())
    for number, name in enumerate(SIZES):
        documents = {token - FIRST[name] for token in tokens[48 * number : 48 * number + 48].flatten().tolist()}
        # A fifth of them, not the last ones.
        assert len(documents) == pytest.approx(SIZES[name] / 5, abs=1)
        assert min(documents) < SIZES[name] / 3
        assert max(documents) - min(documents) > SIZES[name] / 3


def test_validation_sets_keep_their_names_when_a_stage_has_another_order(tmp_path):
    overrides = "model.data.splits_string='80,20'", 'model.data.stages=["math=0.2 web=0.5 code=0.3"]'
    _, valid, corpus = mixture(tmp_path, 10, *overrides)
    assert list(corpus.validation_weights.items()) == [("web", 0.5), ("code", 0.3), ("math", 0.2)]
    assert sources_of(tokens_of(valid, 24)) == ["web"] * 8 + ["code"] * 8 + ["math"] * 8


def write_text(path, words, num_documents):
    path.parent.mkdir(exist_ok=True)
    rows = [json.dumps({"text": " ".join([words] * (5 + number % 7))}) for number in range(num_documents)]
    path.write_text("\n".join(rows), encoding="utf-8")


def text_overrides(tmp_path):
    for part in "ab":
        write_text(tmp_path / "web" / f"{part}.jsonl", "the quick brown fox", 60)
    write_text(tmp_path / "code" / "all.jsonl", "def f ( x ) : return x", 80)
    files = f'[0.75,"{tmp_path}/web/*.jsonl",0.25,"{tmp_path}/code/all.jsonl"]'
    return [f"model.data.text_files={files}", "model.data.splits_string='80,20'"]


def test_text_takes_weights_and_one_tokenizer_for_all_sources(tmp_path):
    overrides = [*text_overrides(tmp_path), "model.tokenizer.vocab_size=290"]
    config = data_config(tmp_path / "cache", "data=text", *overrides)
    corpus = prepare_corpus(config, show_progress=False)
    assert [source.name for source in corpus.training.sources] == ["web", "all"]
    assert [source.size.num_documents for source in corpus.training.sources] == [96, 64]
    train, valid = build_datasets(config, corpus, num_train_samples=200)

    def is_code(dataset, index):
        return any(word in corpus.tokenizer.decode(dataset[index]["tokens"].tolist()) for word in ("def", "return"))

    assert sum(is_code(train, index) for index in range(200)) == 50
    assert [is_code(valid, index) for index in range(16)] == [False] * 8 + [True] * 8
    # Again from the cache alone.
    shutil.rmtree(tmp_path / "cache" / "index")
    again = prepare_corpus(config, show_progress=False)
    assert again.fingerprints == corpus.fingerprints
    # Fewer merges than it would take had it seen only one of them.
    for text in ("the quick brown fox", "def f ( x ) : return x"):
        assert len(corpus.tokenizer.encode(text)) < len(text) / 2


SHORT = (
    "model.encoder_seq_length=32",
    "trainer.val_check_interval=4",
    "trainer.limit_val_batches=1",
    "model.optim.sched.decay_steps=20",
    "model.hidden_dropout=0.1",
)


def test_runs_that_are_cut_around_the_border_of_stages_equal_the_uncut_one(tmp_path, cache_dir):
    """The border, of sequence lengths too, is inside of step 3; losses, validations and counts by source."""
    files = text_overrides(tmp_path)
    plain = files[0].replace("0.75,", "").replace("0.25,", "")
    stages = 'model.data.stages=["640 web=1 seq_len=8","web=0.25 all=0.75"]'
    overrides = [*SHORT, plain, files[1], stages, "parallelism=dp"]
    uncut = run_small(2, tmp_path / "uncut", cache_dir, [*overrides, "trainer.max_steps=5"])
    for max_steps in (2, 3, 5):
        cut = run_small(2, tmp_path / "cut", cache_dir, [*overrides, f"trainer.max_steps={max_steps}"])
    assert [record.loss for record in cut.train] == [record.loss for record in uncut.train]
    assert cut.validation[-1].losses == uncut.validation[-1].losses
    assert list(uncut.validation[-1].losses) == ["web", "all"]
    assert cut.sources == uncut.sources
    consumed = uncut.sources[-1].sources
    # 20 samples of web, then 15 more of the 20 are of the other source.
    assert [consumed[name].tokens for name in ("web", "all")] == [25 * 32, 15 * 32]
    assert read_manifest(tmp_path / "cut" / "checkpoints" / "step_00000005").sources == consumed
    # On one rank the same samples, whose losses are summed in another order.
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_00000005")
    one = run_small(1, tmp_path / "cut", cache_dir, [*overrides[:-1], "trainer.max_steps=5", "model.hidden_dropout=0"])
    assert one.sources[-1].sources == consumed


def short_sequences(tmp_path, *overrides):
    """Three steps of samples in pieces of 8 tokens, then whole ones of 32."""
    files = text_overrides(tmp_path)
    plain = files[0].replace("0.75,", "").replace("0.25,", "")
    stages = 'model.data.stages=["640 seq_length=8 web=0.5 all=0.5","web=0.25 all=0.75"]'
    return [*SHORT, plain, files[1], stages, "model.hidden_dropout=0", "trainer.max_steps=5", *overrides]


@pytest.mark.parametrize(
    ("num_ranks", "overrides"),
    [
        (2, ["parallelism=pp2"]),
        (2, ["parallelism=tp2_sp", "model.data.num_workers=1"]),
        (2, ["parallelism=pp2", "model.data.inter_document_masking=true"]),
    ],
    ids=str,
)
def test_a_stage_with_a_sequence_length_trains_alike_in_all_layouts(num_ranks, overrides, tmp_path, cache_dir):
    split = run_small(num_ranks, tmp_path / "split", cache_dir, short_sequences(tmp_path, *overrides))
    masked = [each for each in overrides if "masking" in each]
    one = run_small(1, tmp_path / "one", cache_dir, short_sequences(tmp_path, *masked))
    whole = [each.replace("seq_length=8 ", "") for each in short_sequences(tmp_path, *masked)]
    uncut = run_small(1, tmp_path / "uncut", cache_dir, whole)
    assert [each.loss for each in split.train] == pytest.approx([each.loss for each in one.train], rel=1e-5)
    assert one.train[0].loss != pytest.approx(uncut.train[0].loss, rel=1e-5)
    assert one.sources == uncut.sources
    assert [each.consumed_tokens for each in one.train] == [each.consumed_tokens for each in uncut.train]
    if not masked:
        config = load_saved_config(tmp_path / "one" / "config.yaml")
        for metrics in (split, one):
            for record in metrics.train:
                attended = 8 if record.step <= 3 else 32
                flops = flops_per_token(config.model) - 3 * 4 * 2 * 64 * (32 - attended)
                gpus = num_ranks if metrics is split else 1
                assert gpus * record.tflops_per_gpu * 1e12 / record.tokens_per_s == pytest.approx(flops)


def test_fp8_is_proven_in_each_step_of_stages_with_other_sequence_lengths(tmp_path, cache_dir):
    overrides = ["fp8=delayed", "model.fp8_emulate=true", "logging.fp8_proof_interval=1", "trainer.precision=bf16"]
    arguments = small_run_arguments(tmp_path / "run", cache_dir, short_sequences(tmp_path, *overrides))
    done = fork_ranks(1, arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "8, 32 from 640 tokens on" in " ".join(done.stdout.split())
    proofs = load_metrics(tmp_path / "run").fp8_proofs
    assert [(each.step, each.warnings) for each in proofs] == [(step, ()) for step in range(1, 6)]


def test_validation_has_a_loss_for_each_source_with_its_name(tmp_path, cache_dir):
    overrides = [*SHORT, *text_overrides(tmp_path), "trainer.max_steps=2", "logging.tensorboard=true"]
    done = fork_ranks(1, small_run_arguments(tmp_path / "run", cache_dir, overrides))
    assert done.returncode == 0, done.stderr[-4000:]
    metrics = load_metrics(tmp_path / "run")
    for record in metrics.validation:
        assert list(record.losses) == ["web", "all"]
        assert record.num_samples == 16
        assert record.loss == pytest.approx(0.75 * record.losses["web"] + 0.25 * record.losses["all"])
    last = metrics.validation[-1]
    assert last.losses["web"] != last.losses["all"]
    config = load_saved_config(tmp_path / "run" / "config.yaml")
    corpus = prepare_corpus(config, show_progress=False)
    _, valid = build_datasets(config, corpus, num_train_samples=8)
    for source, share in zip(corpus.training.sources, (0.75, 0.25), strict=True):
        epochs = 2 * 8 * share * 32 / source.size.num_tokens
        assert f"source {source.name}: {source.size.num_tokens:,} tokens in " in done.stdout
        assert f" {source.size.num_documents:,} documents, {epochs:.2f} epochs" in done.stdout
    size = {}
    for number, name in enumerate(last.losses):
        labels = [label for index in range(8 * number, 8 * number + 8) for label in valid[index]["labels"].tolist()]
        text = corpus.tokenizer.decode([label for label in labels if label != corpus.tokenizer.eod])
        size[name] = len(text.encode()) / len(labels)
        assert last.set_bits_per_byte[name] == pytest.approx(last.losses[name] / math.log(2) / size[name])
    assert last.bits_per_byte == pytest.approx(last.loss / math.log(2) / (0.75 * size["web"] + 0.25 * size["all"]))
    events = read_event_files(tmp_path / "run" / "tensorboard", find_event_files(tmp_path / "run" / "tensorboard"))
    assert events[0].validation[2] == pytest.approx(last.loss)
