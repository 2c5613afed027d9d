"""`python -m gpt_pretrain.prepare_data`: what it leaves is what the training's own preparation finds."""

import pytest

from gpt_pretrain.data.corpus import prepare_corpus
from gpt_pretrain.data.datasets import build_datasets
from gpt_pretrain.prepare_data import main
from gpt_pretrain.rules.jobs import load_config
from tests.runs import small_run_arguments
from tests.token_files import counting_documents, write_token_file


@pytest.fixture
def arguments(tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    return small_run_arguments(tmp_path / "run", cache, [])[2:]


def test_training_finds_what_was_prepared_for_it(arguments, tmp_path, capsys):
    # Of a layout that this one process could not train in.
    assert main([*arguments, "parallelism=tp2"]) == 0
    told = capsys.readouterr().out
    prepared = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.*")}
    assert any(path.suffix == ".npy" for path in prepared)
    assert not (tmp_path / "run").exists()

    config = load_config(arguments)
    corpus = prepare_corpus(config, show_progress=False)
    assert f"prepared: {corpus.train.num_tokens:,} tokens to train on" in told
    assert f"    {corpus.files[0]}.bin\n" in told
    build_datasets(config, corpus, num_train_samples=20 * 8)
    after = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*.*")}
    assert {path: after[path] for path in after if path.suffix != ".lock"} == {
        path: prepared[path] for path in prepared if path.suffix != ".lock"
    }


def test_what_training_would_refuse_is_refused(tmp_path, capsys):
    assert main(["data=text", f"model.data.text_files=[{tmp_path}/nothing]"]) == 2
    assert f"model.data.text_files: {tmp_path}/nothing " in capsys.readouterr().err
    assert main(["model.hiden_size=64"]) == 2
    assert "model.hidden_size?" in capsys.readouterr().err


def test_random_tokens_need_no_preparation(capsys):
    assert main(["data=mock"]) == 0
    assert "data=mock" in capsys.readouterr().out


def test_its_help_names_its_own_command(capsys):
    assert main(["--help"]) == 0
    assert "python -m gpt_pretrain.prepare_data data=text" in capsys.readouterr().out


def test_the_epochs_of_each_source_are_told(tmp_path, capsys):
    prefixes = [write_token_file(tmp_path / name, counting_documents(20, 40)) for name in ("web", "code")]
    files = f"model.data.data_prefix=[0.75,{prefixes[0]},0.25,{prefixes[1]}]"
    sizes = ["model.encoder_seq_length=16", "model.global_batch_size=8", "model.micro_batch_size=2"]
    cache = f"model.data.cache_dir={tmp_path / 'cache'}"
    run = ["trainer.max_steps=15", "trainer.limit_val_batches=1", "model.data.splits_string='80,20'"]
    assert main(["data=mmap", files, *sizes, cache, *run]) == 0
    told = capsys.readouterr().out
    # 120 samples of 16 tokens, over 16 documents of 40.
    assert "2.25 epochs in 15 steps\n    web: 2.25 epochs\n    code: 0.75 epochs\n" in told
