import itertools
import os
import pickle
import signal
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gpt_pretrain.data.batches import Batch, build_batch_iterator, microbatches, tell_of_defects
from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.data.documents import document_borders
from gpt_pretrain.training.step import train_step
from tests.emulated_training import emulate, emulated_training
from tests.forked_runs import Run
from tests.token_files import SEQUENCE_LENGTH, counting_documents, data_config, write_token_file

GLOBAL_BATCH_SIZE = 8
MICRO_BATCH_SIZE = 2
CPU = torch.device("cpu")


def sampler(rank, size, *, num_samples=40, consumed_samples=0, repeat=False):
    return microbatches(
        num_samples=num_samples,
        consumed_samples=consumed_samples,
        micro_batch_size=MICRO_BATCH_SIZE,
        data_parallel_rank=rank,
        data_parallel_size=size,
        repeat=repeat,
    )


def global_batches(size, **arguments):
    """Samples of each global batch, microbatch by microbatch and rank by rank."""
    ranks = [list(sampler(rank, size, **arguments)) for rank in range(size)]
    samples = list(itertools.chain.from_iterable(itertools.chain.from_iterable(zip(*ranks, strict=True))))
    return [samples[i : i + GLOBAL_BATCH_SIZE] for i in range(0, len(samples), GLOBAL_BATCH_SIZE)]


def test_cut_samples_begin_positions_and_documents_anew():
    """Two samples of six tokens, of documents of 4 and 2, and of 1 and 5, in pieces of three."""
    positions = torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]])
    tokens = torch.arange(12).view(2, 6)
    mask = torch.tensor([[1.0, 1, 1, 1, 0, 1], [1, 0, 1, 1, 1, 1]])
    batch = Batch(tokens, tokens + 1, mask, positions, document_borders(positions))
    cut = batch.cut(3)
    assert cut.tokens.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert cut.labels.tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    assert cut.loss_mask.tolist() == [[1, 1, 1], [1, 0, 1], [1, 0, 1], [1, 1, 1]]
    assert cut.position_ids.tolist() == [[0, 1, 2], [0, 0, 1], [0, 0, 1], [0, 1, 2]]
    assert cut.document_borders.tolist() == [0, 3, 4, 6, 7, 9, *[12] * 27]
    assert batch.cut(6) is batch
    whole = Batch(tokens, tokens + 1, mask, torch.arange(6).expand(2, 6)).cut(3)
    assert whole.position_ids.tolist() == [[0, 1, 2]] * 4
    assert whole.document_borders is None


STAGES = ("data=mmap", "model.data.data_prefix=[/d/web]", 'model.data.stages=["1e3 seq_length=8 web=1","web=1"]')


@pytest.mark.parametrize(
    "overrides",
    [(), ("model.position_embedding_type=learned_absolute",), emulate("delayed", "trainer.precision=bf16")],
    ids=["rope", "learned", "delayed"],
)
def test_a_step_of_cut_samples_equals_one_of_a_model_with_short_samples(overrides):
    with emulated_training(*overrides, *STAGES) as training:
        given = list(training.iterators(0)[0])
        cut = [train_step(training.trainable, [iter(given)], None, 8) for _ in range(2)]
    short = ("model.encoder_seq_length=8", "model.micro_batch_size=8", "model.global_batch_size=16")
    with emulated_training(*overrides, *short) as training:
        places = torch.arange(8).expand(8, 8)
        pieces = [
            Batch(*(each.reshape(8, 8) for each in (batch.tokens, batch.labels, batch.loss_mask)), places)
            for batch in given
        ]
        expected = [train_step(training.trainable, [iter(pieces)]) for _ in range(2)]
    for one, other in zip(cut, expected, strict=True):
        assert one.loss_sum_and_tokens.tolist() == other.loss_sum_and_tokens.tolist()
        assert float(one.grad_norm) == float(other.grad_norm)
        assert one.squared_lengths.item() == 16 * 8**2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_global_batch_holds_the_same_samples_in_order_at_every_data_parallel_size(size):
    assert global_batches(size) == [list(range(k * 8, k * 8 + 8)) for k in range(5)]


def test_the_ranks_of_a_microbatch_read_neighbouring_samples():
    assert list(sampler(0, 2, num_samples=16)) == [[0, 1], [4, 5], [8, 9], [12, 13]]
    assert list(sampler(1, 2, num_samples=16)) == [[2, 3], [6, 7], [10, 11], [14, 15]]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_run_goes_on_where_it_was_also_at_another_size(size, steps):
    assert global_batches(size, consumed_samples=steps * GLOBAL_BATCH_SIZE) == global_batches(1)[steps:]


def test_samples_that_leave_a_rank_without_a_microbatch_are_not_read():
    assert list(itertools.chain(*global_batches(2, num_samples=39))) == list(range(36))


def test_repetition_starts_over_at_the_first_sample():
    batches = itertools.islice(sampler(1, 2, num_samples=8, repeat=True), 6)
    assert list(batches) == [[2, 3], [6, 7]] * 3


@pytest.fixture
def datasets(tmp_path):
    prefix = write_token_file(tmp_path / "web", counting_documents(20, 40))

    def build(*overrides):
        config = data_config(tmp_path / "cache", "data=mmap", f"model.data.data_prefix=[{prefix}]", *overrides)
        corpus = prepare_corpus(config, show_progress=False)
        return config, *build_datasets(config, corpus, num_train_samples=40)

    return build


def train_batches(config, dataset, *, rank=0, size=1, consumed_samples=0):
    return build_batch_iterator(
        dataset,
        config=config,
        consumed_samples=consumed_samples,
        data_parallel_rank=rank,
        data_parallel_size=size,
        device=CPU,
    )


def test_a_batch_stacks_the_samples_of_a_microbatch(datasets):
    config, train, _ = datasets()
    batch = next(train_batches(config, train, rank=1, size=2))
    for name, dtype in {
        "tokens": torch.int64,
        "labels": torch.int64,
        "loss_mask": torch.float32,
        "position_ids": torch.int64,
    }.items():
        value = getattr(batch, name)
        assert (value.dtype, value.shape) == (dtype, (MICRO_BATCH_SIZE, SEQUENCE_LENGTH))
        assert torch.equal(value, torch.stack([train[2][name], train[3][name]]))


def test_what_was_peeked_at_is_read_once_and_comes_next(datasets):
    config, train, _ = datasets()
    expected = [batch.tokens for batch in train_batches(config, train)]
    iterator = train_batches(config, train)
    seen = [[batch.tokens for batch in iterator.peek(number)] for number in (2, 3, 1)]
    assert [len(tokens) for tokens in seen] == [2, 3, 1]
    assert all(torch.equal(torch.cat(tokens), torch.cat(expected[: len(tokens)])) for tokens in seen)
    assert torch.equal(torch.cat([batch.tokens for batch in iterator]), torch.cat(expected))

    iterator = train_batches(config, train)
    iterator.peek(1)
    iterator.close()
    assert list(iterator) == []
    with pytest.raises(StopIteration):
        iterator.peek(1)


def test_training_ends_after_the_samples_it_was_built_for(datasets):
    config, train, _ = datasets()
    assert len(list(train_batches(config, train))) == len(train) // MICRO_BATCH_SIZE
    assert len(list(train_batches(config, train, consumed_samples=32))) == (len(train) - 32) // MICRO_BATCH_SIZE


def test_every_validation_sees_the_same_samples(datasets):
    config, _, valid = datasets()
    iterator = build_batch_iterator(
        valid, config=config, data_parallel_rank=0, data_parallel_size=1, device=CPU, is_validation=True
    )
    first, second, third = ([next(iterator).tokens for _ in range(4)] for _ in range(3))
    assert torch.equal(torch.cat(first), torch.cat(second))
    assert torch.equal(torch.cat(first), torch.cat(third))
    assert torch.equal(torch.cat(first), torch.stack([valid[i]["tokens"] for i in range(8)]))


def test_processes_deliver_the_same_batches_in_the_same_order(datasets):
    config, train, _ = datasets()
    expected = [batch.tokens for batch in train_batches(config, train)]
    iterator = train_batches(datasets("model.data.num_workers=2")[0], train)
    assert torch.equal(torch.cat([batch.tokens for batch in iterator]), torch.cat(expected))


def test_a_data_loading_process_opens_the_files_without_a_warning(datasets, monkeypatch):
    train = datasets()[1]
    # It has no process group, and a single process no launcher's variables either.
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pickle.loads(pickle.dumps(train))


LOADING_PROGRAM = """
import signal, sys, time
import torch
from gpt_pretrain.data.batches import build_batch_iterator
from gpt_pretrain.data.datasets import RandomTokens
from tests.token_files import data_config

if __name__ == "__main__":
    config = data_config(sys.argv[1], "data=mock", "model.data.num_workers=2")
    asked_to_stop = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: asked_to_stop.append(1))
    iterator = build_batch_iterator(
        RandomTokens(10**6, 16, 100, (0,)),
        config=config,
        consumed_samples=0,
        data_parallel_rank=0,
        data_parallel_size=1,
        device=torch.device("cpu"),
    )
    next(iterator)
    print("started", flush=True)
    while len(asked_to_stop) < 2:
        next(iterator)
    for _ in range(200):
        next(iterator)
        time.sleep(0.005)
    print("still loading", flush=True)
"""


@dataclass
class Loading:
    """A process that loads batches, and what it says."""

    run: Run
    out: Path
    err: Path

    @property
    def pid(self):
        return self.run.pids[0]


@pytest.fixture
def loading(parent, tmp_path):
    program, out, err = (tmp_path / name for name in ("program.py", "out", "err"))
    program.write_text(LOADING_PROGRAM)
    run = parent.start_program([str(program), str(tmp_path / "cache")], [(out, err)], {}, {})
    while not out.exists() or out.read_text() != "started\n":
        assert not run.poll(), run.text()
        time.sleep(0.02)
    yield Loading(run, out, err)
    run.kill()


def members(session):
    """Processes of a session that still run."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            _, rest = path.read_text().rsplit(")", 1)
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, _, process_session, *_ = rest.split()
        if int(process_session) == session and state != "Z":
            found.append(path.parent.name)
    return found


def test_signals_to_all_processes_leave_the_rank_its_batches(loading):
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.killpg(loading.pid, number)
    assert loading.run.wait(60) == [0], loading.err.read_text()
    assert loading.out.read_text() == "started\nstill loading\n"


def test_an_interrupt_of_all_processes_ends_them_with_one_traceback(loading):
    assert len(members(loading.pid)) >= 4
    os.killpg(loading.pid, signal.SIGINT)
    loading.run.wait(30)
    err = loading.err.read_text()
    assert err.count("Traceback (most recent call last)") == 1, err
    # A queue's thread may be between unlinking a semaphore and telling Python's tracker so when the process ends; the
    # tracker then warns of it (Python 3.12).
    told = [line for line in err.splitlines() if "resource_tracker" not in line]
    assert told[-1] == "KeyboardInterrupt", err


@pytest.mark.parametrize(
    ("error", "told"), [(ConnectionResetError("gone"), ""), (EOFError(), ""), (ValueError("odd"), "ValueError: odd\n")]
)
def test_a_rank_that_goes_away_is_no_defect_of_its_data_loaders(error, told, capsys):
    tell_of_defects(type(error), error, None)
    assert capsys.readouterr().err == told


def test_a_killed_rank_leaves_no_process_behind(loading):
    os.kill(loading.pid, signal.SIGKILL)
    assert loading.run.wait(30) == [-signal.SIGKILL]
    # torch's workers look for their parent every 5 s.
    deadline = time.monotonic() + 30
    while members(loading.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert members(loading.pid) == []
