"""What a start in a used run directory does and tells: where it goes on from, what changed, what is done already."""

import re
import shutil

import pytest

from gpt_pretrain.__main__ import main
from gpt_pretrain.config.errors import UserError
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.features.resolve import detect_platform
from gpt_pretrain.megatron.cpu import install_cpu_device
from gpt_pretrain.report.metrics_file import load_metrics
from gpt_pretrain.training.header import describe_changes
from gpt_pretrain.training.run import train
from gpt_pretrain.training.stop import EXIT_CODES
from tests.emulated_training import TINY
from tests.launching import run_ranks
from tests.platforms import spec_of

NEWEST = "step_00000002"
EMULATED = ("fp8=delayed", "model.fp8_emulate=true")


@pytest.fixture
def start(compose_config):
    """Trains a tiny model in this process to step 2, or as far as the overrides say."""

    def run(run_dir, *overrides):
        quick = ("trainer.max_steps=2", "trainer.limit_val_batches=0", "logging.tensorboard=false")
        install_cpu_device()
        config = compose_config(*TINY, *quick, f"run_dir={run_dir}", *overrides)
        return EXIT_CODES[train(spec_of(config, detect_platform()))]

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


RESET = "checkpoint.reset_fp8_state=true"


def test_fp8_scales_are_dropped_only_where_there_are_some_and_only_on_purpose(finished, start, tmp_path, capsys):
    run = tmp_path / "fp8"
    weights = f"checkpoint.init_from={finished / 'checkpoints' / NEWEST}"
    for fresh in ((run, *EMULATED), (run, *EMULATED, weights), (run,)):
        with pytest.raises(UserError, match=r"^checkpoint\.reset_fp8_state=true .*; use reset_fp8_state=false$"):
            start(*fresh, RESET)
    assert not (run / "checkpoints").exists()
    # BF16 and fp32 have no scales to drop.
    assert start(run, *EMULATED, f"checkpoint.resume={finished / 'checkpoints' / NEWEST}", "trainer.max_steps=3") == 0
    to_tensorwise = (run, "fp8=tensorwise", "model.fp8_emulate=true")
    told = r"model\.fp8_recipe=tensorwise \(saved with delayed\).*; .*checkpoint\.reset_fp8_state=true$"
    with pytest.raises(UserError, match=told):
        start(*to_tensorwise, "trainer.max_steps=4")
    assert start(*to_tensorwise, "trainer.max_steps=4", RESET) == 0
    assert f"warning: FP8 scales and amax histories of the checkpoint are dropped: {RESET}\n" in capsys.readouterr().out
    # Queued again, the same command goes on.
    assert start(*to_tensorwise, "trainer.max_steps=5", RESET) == 0
    assert f"note: {RESET} is ignored" in capsys.readouterr().out
    assert [record.step for record in load_metrics(run).starts] == [2, 3, 4]


def test_fp8_scales_are_dropped_once_however_often_the_command_is_repeated(start, tmp_path, capsys):
    run = tmp_path / "run"
    start(run, *EMULATED)

    def warned(max_steps, *overrides):
        capsys.readouterr()
        assert start(run, *EMULATED, f"trainer.max_steps={max_steps}", *overrides) == 0
        return "warning: FP8 scales" in capsys.readouterr().out

    assert warned(3, RESET)
    assert not warned(4, RESET), "a requeued run keeps those that it has collected"
    assert warned(5, RESET, "model.fp8_amax_history_len=16"), "those do not fit"
    assert not warned(6, "model.fp8_amax_history_len=16")
    assert warned(7, RESET, "model.fp8_amax_history_len=16"), "meant anew"


@pytest.mark.parametrize("pointer", [None, b"\n", b"step_00000007\n", b"\xff\x00step"])
def test_a_run_whose_latest_names_nothing_goes_on_and_says_where(finished, start, capsys, pointer):
    checkpoints = finished / "checkpoints"
    # None of these is complete, or a checkpoint at all.
    for other in ("step_00000009", ".step_00000003.unfinished", "step_x"):
        (checkpoints / other).mkdir()
    (checkpoints / "latest").unlink()
    if pointer is not None:
        (checkpoints / "latest").write_bytes(pointer)
    with pytest.raises(UserError, match=r"^checkpoint\.resume=never, but run_dir=.* holds the checkpoints of a run"):
        start(finished, "checkpoint.resume=never")
    capsys.readouterr()
    assert start(finished, "trainer.max_steps=3") == 0
    problem = "is missing" if pointer is None else "names no existing checkpoint"
    warning = f"{checkpoints / 'latest'} {problem}; continuing from {NEWEST}, the newest one that verifies\n"
    assert f"warning: {warning}" in capsys.readouterr().out
    assert [record.step for record in load_metrics(finished).starts] == [0, 2]


def test_weights_of_another_run_start_a_run_of_its_own(finished, start, tmp_path, capsys):
    weights = f"checkpoint.init_from={finished / 'checkpoints' / NEWEST}"
    capsys.readouterr()
    assert start(tmp_path / "new", weights) == 0
    assert f"  weights from: {finished / 'checkpoints' / NEWEST}\n" in capsys.readouterr().out
    first, own = load_metrics(finished), load_metrics(tmp_path / "new")
    assert [record.step for record in own.starts] == [0]
    assert [record.consumed_samples for record in own.train] == [record.consumed_samples for record in first.train]
    # Queued again, the same command goes on with the run's own checkpoint.
    assert start(tmp_path / "new", weights, "trainer.max_steps=3") == 0
    printed = capsys.readouterr().out
    assert f"note: {weights} is ignored: this run has checkpoints of its own\n" in printed
    assert [record.step for record in load_metrics(tmp_path / "new").starts] == [0, 2]


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
    assert f"note: the run has done 2 steps, and trainer.max_steps={max_steps}; raise it to continue\n" in printed


def test_the_hint_to_go_on_is_the_whole_command(finished, start, capsys):
    checkpoint = finished / "checkpoints" / NEWEST
    stopped = ("trainer.max_steps=100000", "trainer.max_time='00:00:00:01'", f"checkpoint.resume={checkpoint}")
    assert start(finished, *stopped) == 75
    # Without the last part the same command would start from the old checkpoint again.
    hint = f"continue with: the same command again with run_dir={finished} checkpoint.resume=auto\n"
    assert hint in capsys.readouterr().out


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
    assert re.search(f"^cannot tell what this start changes: .*config.yaml:? ?{reason}", changes_since(text))


def test_a_start_as_a_file_is_told_how_to_start():
    """Python's search path then begins with our own folder, whose megatron/ hides megatron-core's."""
    done = run_ranks(1, ["gpt_pretrain/__main__.py", "experiment=smoke"])
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"error: .*python -m gpt_pretrain.*\n", done.stderr)


@pytest.mark.usefixtures("no_launcher")
def test_a_sweep_with_a_job_that_the_machine_refuses_trains_nothing(tmp_path, capsys):
    refused = "model.masked_softmax_fusion=true"
    sweep = ["-m", "data=mock", "model.masked_softmax_fusion=null,true", f"run_dir='{tmp_path}/${{hydra:job.num}}'"]
    assert main(sweep) == 2
    told = capsys.readouterr().err
    assert f"{refused} has no effect" in told
    assert "[model.masked_softmax_fusion=True]" in told
    assert list(tmp_path.iterdir()) == []
