"""Five sources in three stages on two ranks, killed six times at random moments: nothing shows in the run.

    pytest -m slow -s tests/test_data_soak.py                           bytes of Python's sources, minutes
    SOAK_PREFIXES="/data/web /data/code …" SOAK_STEPS=1200 pytest …     five token files of bytes of your own

The first stage has shorter sequences than the others, and the last source, the smallest, is read most often.
"""

import json
import os
import random
import signal
import sysconfig
import time
from pathlib import Path

import numpy
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from gpt_pretrain.config.load import load_saved_config
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.token_files import check_token_file, split_of_documents
from gpt_pretrain.report.metrics_file import load_metrics
from tests.forked_runs import run_parent
from tests.token_files import write_token_file

PACKAGES = ("asyncio", "email", "unittest", "importlib", "json")
NUM_KILLS, NUM_STEPS = 6, int(os.environ.get("SOAK_STEPS", "120"))
LENGTH, BATCH = 256, 16
TOKENS = BATCH * LENGTH
RUN = (
    "data=mmap",
    "model.vocab_size=256",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.hidden_dropout=0.1",
    f"model.encoder_seq_length={LENGTH}",
    "model.micro_batch_size=8",
    f"model.global_batch_size={BATCH}",
    "parallelism=dp",
    f"trainer.max_steps={NUM_STEPS}",
    "trainer.log_every_n_steps=1",
    f"trainer.val_check_interval={NUM_STEPS // 4}",
    "trainer.limit_val_batches=1",
    "checkpoint.save_interval=10",
    "checkpoint.keep_last=2",
    "logging.tensorboard=false",
    "sample.max_new_tokens=0",
)
# The first border lies inside of a step.
STAGES = (
    f"{NUM_STEPS // 3 * TOKENS - LENGTH} seq_length=64 {{0}}=0.5 {{1}}=0.3 {{4}}=0.2",
    f"{NUM_STEPS // 4 * TOKENS} {{2}}=0.3 {{3}}=0.3 {{4}}=0.4",
    "{0}=0.2 {1}=0.2 {2}=0.2 {3}=0.2 {4}=0.2",
)


def library_prefixes(tmp_path):
    """A token file of each of five packages of the standard library; a document is a paragraph."""
    prefixes = []
    for package in PACKAGES:
        modules = sorted((Path(sysconfig.get_path("stdlib")) / package).rglob("*.py"))
        paragraphs = [part for module in modules for part in module.read_bytes().split(b"\n\n") if part.strip()]
        documents = (numpy.frombuffer(part, dtype=numpy.uint8) for part in paragraphs)
        prefixes.append(write_token_file(tmp_path / package, documents, numpy.uint8))
    return prefixes


def last_step(run_dir):
    """The last step that a run has logged; 0 before its first."""
    train = load_metrics(run_dir).train if (run_dir / "metrics.jsonl").exists() else ()
    return train[-1].step if train else 0


def killed_run(parent, arguments, folder):
    """Runs it until it has ended, and kills it at random moments before; what ended each start, after which step."""
    draw, ends = random.Random(47), []
    while True:
        run = parent.start(arguments, folder / f"start{len(ends)}", num_ranks=2)
        try:
            if len(ends) == NUM_KILLS:
                assert run.wait(3600) == [0, 0], run.text()
                return ends
            number = signal.SIGTERM if len(ends) % 2 else signal.SIGKILL
            while last_step(folder / "killed") < len(ends) * NUM_STEPS // (NUM_KILLS + 1):
                assert not run.poll(), run.text()
                time.sleep(0.1)
            time.sleep(draw.uniform(0, 1))
            for rank in range(2):
                run.signal(rank, number)
            codes = run.wait(120)
            # Before the run takes signals, SIGTERM ends it as any other process.
            assert set(codes) <= {-signal.SIGKILL, -signal.SIGTERM, 75, 143}, run.text()
            ends.append((number.name, codes, last_step(folder / "killed")))
        finally:
            run.kill()


def reads_by_document(config, monkeypatch):
    """What the run's samples read, from its token files: for each source the tokens and the ends of each document.

    megatron-core's reader of token files is listened to.
    """
    corpus = prepare_corpus(config, show_progress=False)
    num_samples = NUM_STEPS * BATCH
    train, _ = build_datasets(config, corpus, num_train_samples=num_samples)
    lengths = {source.prefixes[0]: check_token_file(source.prefixes[0]).lengths for source in corpus.training.sources}
    tokens = {prefix: numpy.zeros(len(each), dtype=numpy.int64) for prefix, each in lengths.items()}
    ends = {prefix: numpy.zeros(len(each), dtype=numpy.int64) for prefix, each in lengths.items()}
    parts, get = [], IndexedDataset.get

    def note(self, idx, offset=0, length=None):
        found = get(self, idx, offset, length)
        parts.append((self.path_prefix, idx, offset, len(found)))
        return found

    monkeypatch.setattr(IndexedDataset, "get", note)
    for sample in range(num_samples):
        assert len(train[sample]["tokens"]) == LENGTH
        for index, (prefix, document, offset, count) in enumerate(parts, start=1):
            # The last token is a label alone here, and the first token of the sample after it.
            num_read = count - (index == len(parts))
            tokens[prefix][document] += num_read
            ends[prefix][document] += num_read > 0 and offset + num_read == lengths[prefix][document]
        parts.clear()
    return corpus, lengths, tokens, ends


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_a_run_that_is_killed_six_times_equals_the_uncut_one(tmp_path, monkeypatch):
    prefixes = os.environ.get("SOAK_PREFIXES", "").split() or library_prefixes(tmp_path)
    stages = [stage.format(*(Path(prefix).name for prefix in prefixes)) for stage in STAGES]
    overrides = [
        *RUN,
        f"model.data.data_prefix=[{','.join(prefixes)}]",
        f"model.data.stages={json.dumps(stages)}",
        f"model.data.cache_dir={tmp_path}/cache",
    ]
    with run_parent() as parent:
        began = time.monotonic()
        run = parent.start([*overrides, f"run_dir={tmp_path}/uncut"], tmp_path / "uncut", num_ranks=2)
        assert run.wait(3600) == [0, 0], run.text()
        time_s = time.monotonic() - began
        ends = killed_run(parent, [*overrides, f"run_dir={tmp_path}/killed"], tmp_path)
    uncut, killed = load_metrics(tmp_path / "uncut"), load_metrics(tmp_path / "killed")
    assert len(uncut.train) == NUM_STEPS
    assert [each.loss for each in killed.train] == [each.loss for each in uncut.train]
    assert [each.losses for each in killed.validation] == [each.losses for each in uncut.validation]
    assert killed.sources == uncut.sources

    config = load_saved_config(tmp_path / "killed" / "config.yaml")
    corpus, lengths, tokens, last_tokens = reads_by_document(config, monkeypatch)
    print(f"\nuncut run {time_s:.0f} s; killed: {ends}")
    for source in corpus.training.sources:
        (prefix,) = source.prefixes
        consumed, read, sizes = killed.sources[-1].sources[source.name], tokens[prefix], lengths[prefix]
        trains = split_of_documents(len(sizes), config.model.data.splits_string) == 0
        assert not read[~trains].any()
        read, sizes = read[trains], sizes[trains].astype(numpy.int64)
        # As often as the whole epochs, and once more as far as the last one goes.
        epochs = int(read.sum() // sizes.sum())
        assert ((epochs * sizes <= read) & (read <= (epochs + 1) * sizes)).all(), source.name
        assert consumed.tokens == read.sum()
        assert consumed.documents == last_tokens[prefix].sum()
        assert consumed.epochs == pytest.approx(read.sum() / sizes.sum())
        print(
            f"{source.name}: {lengths[prefix].sum(dtype=int):,} tokens of {len(lengths[prefix]):,} documents; read "
            f"{consumed.tokens:,} tokens, {consumed.documents:,} documents, {consumed.epochs:.4f} epochs"
        )
