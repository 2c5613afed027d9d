"""What a start in a used run directory does and tells: where it goes on from, what changed, what is done already."""

import re
import shutil

import pytest
from megatron.core import dist_checkpointing

from gpt_pretrain.checkpoint.load import load_checkpoint
from gpt_pretrain.checkpoint.save import save_checkpoint
from gpt_pretrain.checkpoint.state import Progress
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.launch import read_launch
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.header import describe_changes
from gpt_pretrain.training.run import train
from tests.emulated_training import TINY, emulated_training
from tests.launching import run_ranks

NEWEST = "step_00000002"
EMULATED = ("fp8=delayed", "model.fp8_emulate=true")


@pytest.fixture
def start(compose_config):
    """Trains a tiny model in this process to step 2, or as far as the overrides say."""

    def run(run_dir, *overrides):
        quick = ("trainer.max_steps=2", "trainer.limit_val_batches=0", "logging.tensorboard=false")
        install_cpu_device()
        return train(compose_config(*TINY, *quick, f"run_dir={run_dir}", *overrides), read_launch({}))

    return run


@pytest.fixture(scope="module")
def kept_run(tmp_path_factory):
    return tmp_path_factory.mktemp("kept") / "run"


@pytest.fixture
def finished(kept_run, start, tmp_path):
    """The directory of a run of two steps; one run serves all tests, each has a copy."""
    if not kept_run.exists():
        start(kept_run)
    return shutil.copytree(kept_run, tmp_path / "run")


@pytest.mark.parametrize("pointer", [None, "\n"], ids=["no latest", "empty latest"])
def test_checkpoints_that_latest_does_not_name_are_not_ignored(finished, start, pointer):
    checkpoints = finished / "checkpoints"
    shutil.copytree(checkpoints / NEWEST, checkpoints / "step_00000001")
    # None of these is complete, or a checkpoint at all.
    for other in ("step_00000009", ".step_00000003.unfinished", "step_x"):
        (checkpoints / other).mkdir()
    (checkpoints / "latest").unlink() if pointer is None else (checkpoints / "latest").write_text(pointer)
    with pytest.raises(UserError) as refused:
        start(finished)
    assert str(refused.value) == (
        f"{checkpoints} holds 2 complete checkpoint(s), and {checkpoints / 'latest'} does not name one of them; the "
        f"newest is {NEWEST}: write its name into that file, or use checkpoint.resume={checkpoints / NEWEST}; "
        "to start anew, give another run_dir"
    )
    with pytest.raises(UserError, match=r"^checkpoint\.resume=never, but run_dir=.* holds the checkpoints of a run"):
        start(finished, "checkpoint.resume=never")


@pytest.mark.parametrize("way_out", ["latest", "checkpoint.resume"])
def test_both_ways_out_of_a_missing_latest_go_on(finished, start, way_out):
    checkpoints = finished / "checkpoints"
    (checkpoints / "latest").unlink()
    override = ()
    if way_out == "latest":
        (checkpoints / "latest").write_text(NEWEST)
    else:
        # Nothing is saved, so `latest` is still missing where the summary looks for the newest checkpoint.
        override = (f"checkpoint.resume={checkpoints / NEWEST}", "checkpoint.save_at_end=false")
    assert start(finished, "trainer.max_steps=3", *override) == 0
    assert [record.step for record in load_metrics(finished).starts] == [0, 2]


def test_a_resume_lists_what_changed_and_logs_in_the_order_of_the_steps(finished, start, capsys):
    capsys.readouterr()
    observed = ("logging.fp8_statistics_interval=1", "trainer.log_every_n_steps=3")
    validated = ("trainer.limit_val_batches=1", "trainer.val_check_interval=4")
    assert start(finished, *EMULATED, *observed, *validated, "trainer.max_steps=5", "plan.num_gpus=8") == 0
    printed = capsys.readouterr().out
    (note,) = [line for line in printed.splitlines() if line.startswith("note: changed since the last start: ")]
    changes = note.removeprefix("note: changed since the last start: ").split(", ")
    assert {"model.fp8: false → true", "model.fp8_emulate: false → true", "trainer.max_steps: 2 → 5"} <= {*changes}
    assert "plan" not in note
    assert "run_dir" not in note
    logged = re.findall(r"^(fp8 worst|fp8|validation)? ?step (\d)/5", printed, flags=re.MULTILINE)
    order = list(dict.fromkeys(logged))
    assert [(kind or "step", int(step)) for kind, step in order if (kind, step) != ("fp8", "")] == [
        ("fp8", 3),
        ("step", 3),
        ("fp8", 4),
        ("validation", 4),
        ("fp8", 5),
        ("step", 5),
        ("validation", 5),
    ]


@pytest.mark.parametrize("max_steps", [1, 2])
def test_a_run_beyond_its_steps_says_that_it_is_done(finished, start, capsys, max_steps):
    capsys.readouterr()
    assert start(finished, f"trainer.max_steps={max_steps}") == 0
    printed = capsys.readouterr().out
    assert f"  steps: 2 done, trainer.max_steps={max_steps}\n" in printed
    assert f"note: the run has done 2 steps, and trainer.max_steps={max_steps}; raise it to go on\n" in printed


def test_the_hint_to_go_on_is_the_whole_command(finished, start, capsys):
    checkpoint = finished / "checkpoints" / NEWEST
    stopped = ("trainer.max_steps=100000", "trainer.max_time='00:00:00:01'", f"checkpoint.resume={checkpoint}")
    assert start(finished, *stopped) == 0
    # Without the last part the same command would start from the old checkpoint again.
    hint = f"go on with: the same command again with run_dir={finished} checkpoint.resume=auto\n"
    assert hint in capsys.readouterr().out


def saved_as(common, tmp_path, **changes):
    """A checkpoint's common part as a checkpoint of its own, with Python's names of values and the changes."""
    of_python = {"null": "None", "true": "True", "false": "False"}
    parts = {
        part: {key: of_python.get(value, value) for key, value in {**common[part], **changes.get(part, {})}.items()}
        for part in ("architecture", "layout")
    }
    path = tmp_path / f"step_{len(list(tmp_path.iterdir())):08d}"
    path.mkdir()
    dist_checkpointing.save(common | parts, str(path))
    return path


def test_differences_from_a_checkpoint_are_told_as_the_user_writes_them(tmp_path):
    """An earlier version's checkpoint holds None, True and False: they are no differences, and are shown translated."""
    with emulated_training("model.bias=true") as training:
        model = training.config.model
        path = save_checkpoint(tmp_path / "own", training.trainable, Progress(step=1, consumed_samples=4), model)
        common = dist_checkpointing.load_common_state_dict(str(path))
        assert {"null", "true", "false"} <= {*common["architecture"].values(), *common["layout"].values()}

        other_model = {"model.bias": "false", "model.num_layers": "3"}
        with pytest.raises(UserError) as refused:
            load_checkpoint(saved_as(common, tmp_path, architecture=other_model), training.trainable, model)
        assert " holds another model: model.num_layers=2 (saved with 3), model.bias=true (saved with false); " in str(
            refused.value
        )

        other_layout = {"model.use_distributed_optimizer": "true", "model.virtual_pipeline_model_parallel_size": "2"}
        del common["layout"]["processes"]
        with pytest.raises(UserError) as refused:
            load_checkpoint(saved_as(common, tmp_path, layout=other_layout), training.trainable, model)
        assert str(refused.value).endswith(
            " was saved by another parallel layout: model.virtual_pipeline_model_parallel_size=null (saved with 2), "
            "model.use_distributed_optimizer=false (saved with true), processes=1 (saved without it); "
            "resume with the saved one"
        )


@pytest.fixture
def changes_since(tmp_path, compose_config):
    """What a start with the overrides says of a run directory whose config.yaml is given as overrides or as text."""

    def changes(saved, *overrides):
        text = saved if isinstance(saved, str) else config_to_yaml(compose_config(*saved))
        (tmp_path / "config.yaml").write_text(text)
        return describe_changes(compose_config(*overrides), tmp_path / "checkpoints" / NEWEST)

    return changes


def test_changes_are_listed_up_to_a_number(changes_since):
    data = ("data=mock", "name='a b '", "model.fp8_exclude=[a,b]")
    assert changes_since(data, *data, "run_dir=x", "plan.gpu=b200", "checkpoint.resume=never") is None
    assert changes_since(data, *data[:1], "trainer.max_time='00:01:00:00'") == (
        'changed since the last start: name: "a b " → gpt, model.fp8_exclude: [a,b] → [], '
        "trainer.max_time: null → 00:01:00:00"
    )
    many = [f"model.{name}=8" for name in ("seed", "num_layers", "vocab_size", "hidden_size", "num_attention_heads")]
    many += [f"trainer.{name}=7" for name in ("gc_interval", "max_steps", "val_check_interval", "limit_val_batches")]
    listed = changes_since(["data=mock"], "data=mock", *many, "sample.prompt=x")
    assert listed.count(" → ") == 8
    assert listed.endswith(", and 2 more")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("name: x\nmodel: {hiden_size: 3}\n", r"run_dir is not in the configuration \(and \d+ more\)$"),
        ("name: [", "cannot be read: "),
        ("- 1\n", "holds no configuration but a list"),
    ],
    ids=["another version's", "torn", "a list"],
)
def test_a_saved_configuration_that_cannot_be_read_is_a_note(changes_since, text, reason):
    assert re.search(f"^what this start changes is not known: .*config.yaml:? ?{reason}", changes_since(text))


def test_a_start_as_a_file_is_told_how_to_start():
    """Python's search path then begins with our own folder, whose megatron/ hides megatron-core's."""
    done = run_ranks(1, ["gpt_pretrain/__main__.py", "experiment=smoke"])
    told = "error: start it as python -m gpt_pretrain …, from outside of the folder gpt_pretrain/\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", told)
