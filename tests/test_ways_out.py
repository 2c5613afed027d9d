"""What a refusal of a checkpoint offers works when it is typed: each way out is taken from the message and run."""

import re
import shutil

import pytest

from gpt_pretrain.__main__ import main
from gpt_pretrain.report.metrics_file import load_metrics
from tests.checkpoint_files import flip
from tests.emulated_training import TINY
from tests.runs import small_run_arguments

pytestmark = [pytest.mark.usefixtures("no_launcher"), pytest.mark.timeout(300)]
QUICK = (*TINY, "trainer.limit_val_batches=0", "logging.tensorboard=false", "sample.max_new_tokens=0")


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """A run with checkpoints of steps 1 and 2."""
    run_dir = tmp_path_factory.mktemp("saved") / "run"
    assert main([*QUICK, "trainer.max_steps=2", "checkpoint.save_interval=1", f"run_dir={run_dir}"]) == 0
    return run_dir


@pytest.fixture
def run(saved_run, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(saved_run, tmp_path / "run")


@pytest.fixture
def refused(capsys):
    def told(*overrides):
        capsys.readouterr()
        assert main([*QUICK, "trainer.max_steps=3", *overrides]) == 2
        return capsys.readouterr().err

    return told


def started_at(run_dir, *overrides):
    assert main([*QUICK, "trainer.max_steps=3", *overrides, f"run_dir={run_dir}"]) == 0
    return load_metrics(run_dir).starts[-1].step


def newest(run):
    return run / "checkpoints" / "step_00000002"


@pytest.mark.parametrize("damage", ["tensors", "manifest.json"])
@pytest.mark.parametrize("how", ["auto", "path"])
def test_a_damaged_checkpoint(damage, how, run, refused, tmp_path):
    flip(next(newest(run).glob("*.distcp")) if damage == "tensors" else newest(run) / damage, 0.5)
    asked = [] if how == "auto" else [f"checkpoint.resume={newest(run)}"]
    said = refused(f"run_dir={run}", *asked)
    offered = re.findall(r"checkpoint\.\w+=\w+", said.partition("Put the files back")[2])
    assert offered == ["checkpoint.fall_back=true"] + ([] if how == "auto" else ["checkpoint.resume=auto"])
    assert "another run_dir" in said
    afresh = [each for each in offered if "resume" in each]
    assert started_at(tmp_path / "new", *(afresh or asked)) == 0
    assert started_at(run, *asked, offered[0]) == 1


@pytest.mark.parametrize("how", ["auto", "path"])
def test_another_model(how, run, refused, tmp_path):
    asked = [] if how == "auto" else [f"checkpoint.resume={newest(run)}"]
    said = refused(f"run_dir={run}", "model.num_layers=3", *asked)
    assert "model.num_layers=3 (saved with 2)" in said
    assert "another run_dir" in said
    afresh = re.findall(r"checkpoint\.resume=auto", said)
    assert started_at(tmp_path / "new", "model.num_layers=3", *(afresh or asked)) == 0
    assert started_at(run, "model.num_layers=2", *asked) == 2


def test_a_run_that_should_not_be_resumed(run, refused, tmp_path):
    said = refused(f"run_dir={run}", "checkpoint.resume=never")
    assert {"run_dir", "checkpoint.resume=auto"} <= set(re.findall(r"checkpoint\.resume=auto|run_dir", said))
    assert started_at(tmp_path / "new", "checkpoint.resume=never") == 0
    assert started_at(run, "checkpoint.resume=auto") == 2


@pytest.mark.parametrize("named", ["run", "run/checkpoints"])
@pytest.mark.parametrize("key", ["resume", "init_from"])
def test_a_directory_above_the_checkpoint(named, key, run, refused, tmp_path):
    said = refused(f"run_dir={tmp_path / 'new'}", f"checkpoint.{key}={tmp_path / named}")
    (offered,) = re.findall(rf"{run}/checkpoints/step_\d+", said)
    assert started_at(tmp_path / "new", f"checkpoint.{key}={offered}") == (2 if key == "resume" else 0)


def test_a_file_that_the_manifest_does_not_know(run, refused):
    (newest(run) / "common.pt").touch()
    said = refused(f"run_dir={run}")
    assert f"{newest(run) / 'common.pt'} is unknown" in said
    (newest(run) / "common.pt").rename(run / "common.pt")
    assert started_at(run) == 2


def test_what_is_left_of_checkpoints(run, refused, tmp_path):
    moved = [path.rename(tmp_path / path.name) for path in (run / "checkpoints").glob("step_*")]
    said = refused(f"run_dir={run}")
    assert "another run_dir" in said
    assert started_at(tmp_path / "new") == 0
    for path in moved:
        path.rename(run / "checkpoints" / path.name)
    assert started_at(run) == 2


def test_other_data_and_another_tokenizer(tmp_path, cache_dir, refused, capsys):
    def small(name, *overrides):
        quick = ["model.num_layers=1", "trainer.limit_val_batches=0", "trainer.max_steps=1", *overrides]
        arguments = small_run_arguments(tmp_path / name, cache_dir, quick)[2:]
        if "model.tokenizer.library=file" in overrides:
            # The size of one to be trained.
            arguments.remove("model.tokenizer.vocab_size=320")
        return main(arguments)

    assert small("run") == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    other = cache_dir / "other.jsonl"
    other.write_text(('{"text": "' + "another text of other words " * 2000 + '"}\n') * 40)
    # A tokenizer is trained on the corpus unless it is given.
    others = f"model.data.text_files=[{other}]", "model.data.splits_string='1,0,0'"
    capsys.readouterr()
    for allow in ("false", "true"):
        weights = f"checkpoint.init_from={checkpoint}", f"checkpoint.allow_data_change={allow}"
        assert small("weights", *others, *weights) == 2
        said = capsys.readouterr().err
        assert "allow_data_change" not in said
    offered = re.findall(r"model\.tokenizer\.\w+=[^\s;]+", said)
    assert offered == ["model.tokenizer.library=file", f"model.tokenizer.model={tmp_path}/run/tokenizer.json"]
    assert small("weights", *others, *offered, f"checkpoint.init_from={checkpoint}") == 0
    capsys.readouterr()
    assert small("run", *others, "trainer.max_steps=2") == 2
    (allowed,) = re.findall(r"checkpoint\.\w+=true", capsys.readouterr().err)
    assert small("run", *others, "trainer.max_steps=2", allowed) == 0
    assert "tokenizer" in capsys.readouterr().out.partition("note: ")[2]
