"""What a user's own modules register joins the run, is checked like ours, and its errors say whose they are."""

import json
import re
import shutil
import tomllib

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.extensions import TINY, run_extended, write_module
from tests.forked_runs import fork_ranks
from tests.launching import REPOSITORY, run_ranks

EXAMPLE = REPOSITORY / "examples" / "my_lab"

RECORDER = """
    import json
    from gpt_pretrain import extend

    class Recorder(extend.Callback):
        def note(self, hook, run):
            saved = run.checkpoint and run.checkpoint.name
            told = [hook, run.step, run.metrics.get("train/loss"), saved, run.end_reason]
            if hook == "after_step":
                told[2] = [run.metrics["train/loss"], run.read_loss()]
            with (run.run_dir / "told.jsonl").open("a") as file:
                file.write(json.dumps([*told, sum(p.numel() for p in run.model[0].parameters())]) + "\\n")

    for hook in ("start", "after_step", "validation", "save", "end"):
        setattr(Recorder, hook, lambda self, run, hook=hook: self.note(hook, run))
    extend.callback("recorder")(Recorder)
"""

SINK = """
    import json
    from gpt_pretrain import extend

    @extend.sink("lines")
    class Lines:
        def __init__(self, run_dir, config, start_step):
            self.file = (run_dir / "lines.jsonl").open("a")
            self.file.write(json.dumps(["opened", start_step, config.trainer.max_steps]) + "\\n")

        def write(self, step, values):
            self.file.write(json.dumps([step, dict(values)]) + "\\n")

        def close(self):
            self.file.write(json.dumps(["closed"]) + "\\n")
            self.file.close()
"""

CALLBACK = """
    from gpt_pretrain import extend

    @extend.callback("{name}")
    class Own(extend.Callback):
        def {hook}(self, run):
            {body}
"""

KEYS = """
    from dataclasses import dataclass, field
    from gpt_pretrain import extend

    @extend.keys("{group}")
    @dataclass
    class Own:
        \"\"\"`{group}`: of a lab.\"\"\"
{fields}
"""


@pytest.fixture
def lab(tmp_path):
    """The example as a lab has it: in a folder of its own, outside the checkout."""
    shutil.copytree(EXAMPLE, tmp_path / "my_lab")
    return tmp_path / "my_lab"


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def refused(done):
    """The message of a command that ends with a user's mistake, before it makes anything."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def test_the_example_can_be_installed_as_a_package_of_its_name():
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())
    assert (EXAMPLE / project["project"]["name"] / "__init__.py").exists()


def test_the_manual_names_every_module_of_the_example_and_shows_some_as_they_are():
    page = (REPOSITORY / "docs/bring_your_own.md").read_text()
    shown = dict(re.findall(r"^```python\n# my_lab/(\w+\.py)\n(.*?)^```", page, flags=re.M | re.S))
    modules = {path.name: path.read_text() for path in (EXAMPLE / "my_lab").glob("*.py") if path.stem != "__init__"}
    assert {"settings.py", "callbacks.py"} <= shown.keys()
    assert shown.items() <= modules.items()
    assert set(re.findall(r"\(\.\./examples/my_lab/my_lab/(\w+\.py)\)", page)) == modules.keys()
    assert {name: len(text.splitlines()) for name, text in modules.items() if len(text.splitlines()) > 30} == {}


def test_the_examples_sink_writes_the_losses(lab, tmp_path):
    arguments = ["extensions=[my_lab.sinks]", "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}"]
    done = run_extended(lab, *TINY, *arguments, start=run_ranks)
    assert done.returncode == 0, done.stderr
    rows = [line.split(",") for line in (tmp_path / "run/metrics.csv").read_text().splitlines()]
    losses = [record.loss for record in load_metrics(tmp_path / "run").train]
    assert [float(value) for _, name, value in rows if name == "train/loss"] == losses


def test_the_examples_callback_smooths_the_loss_also_across_a_resume(lab, tmp_path):
    arguments = [*TINY, "extensions=[my_lab.callbacks]", "my_lab.beta=0.5", f"run_dir={tmp_path / 'run'}"]
    for steps in (3, 5):
        done = run_extended(lab, *arguments, f"trainer.max_steps={steps}")
        assert done.returncode == 0, done.stderr
    assert "smoothed_loss (my_lab.callbacks)" in done.stdout

    mean, expected = None, []
    for record in load_metrics(tmp_path / "run").train:
        mean = record.loss if mean is None else 0.5 * mean + 0.5 * record.loss
        expected.append((record.step, mean))
    written = [line.split() for line in (tmp_path / "run/smoothed_loss.txt").read_text().splitlines()]
    assert [(int(step), pytest.approx(float(value), rel=1e-6)) for step, value in written] == expected
    assert len(expected) == 5


def test_a_callback_is_called_at_each_point_of_the_run(tmp_path):
    write_module(tmp_path, RECORDER)
    done = run_extended(
        tmp_path,
        *TINY,
        "extensions=[lab]",
        "trainer.max_steps=3",
        "checkpoint.save_interval=2",
        "checkpoint.async_save=false",
        f"run_dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr

    losses = {record.step: record.loss for record in load_metrics(tmp_path / "run").train}
    told = read_lines(tmp_path / "run/told.jsonl")
    second, third = "step_00000002", "step_00000003"
    assert [each[:2] for each in told] == [
        ["start", 0],
        ["validation", 0],
        ["after_step", 1],
        ["validation", 2],
        ["save", 2],
        ["after_step", 2],
        ["after_step", 3],
        ["validation", 3],
        ["save", 3],
        ["end", 3],
    ]
    assert [each[2] for each in told if each[0] == "after_step"] == [
        [losses[step], pytest.approx(losses[step])] for step in (1, 2, 3)
    ]
    assert [each[3] for each in told] == [None] * 4 + [second] * 4 + [third] * 2
    assert [each[4] for each in told] == [None] * 9 + ["max_steps"]
    # The embedding alone has 64 × 32.
    assert all(each[5] > 64 * 32 for each in told)


def test_a_sink_gets_what_the_run_logs(tmp_path):
    write_module(tmp_path, SINK)
    done = run_extended(tmp_path, *TINY, "extensions=[lab]", "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 0, done.stderr

    opened, *written, closed = read_lines(tmp_path / "run/lines.jsonl")
    metrics = load_metrics(tmp_path / "run")
    assert (opened, closed) == (["opened", 0, 2], ["closed"])
    for name, records in (("train/loss", metrics.train), ("validation/loss", metrics.validation)):
        assert [[step, values[name]] for step, values in written if name in values] == [
            [record.step, record.loss] for record in records
        ]


@pytest.mark.parametrize("hook", ["start", "after_step", "validation", "save", "end"])
def test_an_exception_in_a_callback_names_the_extension_and_its_line(hook, tmp_path):
    path = write_module(tmp_path, CALLBACK.format(name="faulty", hook=hook, body="self.missing += 1"))
    done = run_extended(tmp_path, *TINY, "extensions=[lab]", "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}")

    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error")]
    for part in ("faulty", "lab", str(path), hook, "line 7", "AttributeError", "missing"):
        assert part in line


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_callback_ends_the_run_with_a_checkpoint_as_if_it_was_done(num_ranks, tmp_path):
    """On two ranks the last one asks alone, and both end after the same step."""
    ask = f"run.step == 3 and run.rank == {num_ranks - 1} and run.stop('the loss is low')"
    write_module(tmp_path, CALLBACK.format(name="early", hook="after_step", body=ask))
    layout = ["parallelism=dp"] if num_ranks == 2 else []
    arguments = [*TINY, *layout, "extensions=[lab]", f"run_dir={tmp_path / 'run'}", "checkpoint.save_at_end=true"]
    for end in (9, 12):
        done = run_extended(tmp_path, *arguments, f"trainer.max_steps={end}", num_ranks=num_ranks)
        assert done.returncode == 0, done.stderr
        metrics = load_metrics(tmp_path / "run")
        if end == 9:
            # Ranks agree within the next step.
            assert metrics.train[-1].step == 2 + num_ranks
            assert (metrics.summary.end_reason, metrics.summary.exit_code) == ("callback", 0)
            assert metrics.summary.checkpoint.endswith(f"step_{2 + num_ranks:08d}")
            assert ("callback 'early' of lab" in done.stderr and "the loss is low" in done.stderr) is (num_ranks == 1)
    assert metrics.train[-1].step == 12, "repeated, it goes on"


def test_a_mistake_that_a_callback_finds_is_the_users(lab, tmp_path):
    arguments = ["extensions=[my_lab.callbacks]", "my_lab.beta=1.5", f"run_dir={tmp_path / 'run'}"]
    told = refused(run_extended(lab, *TINY, "trainer.max_steps=1", *arguments))
    assert "my_lab.beta=1.5" in told
    assert "my_lab.callbacks" in told


def test_an_exception_in_a_sink_names_the_extension(tmp_path):
    path = write_module(tmp_path, SINK.replace("[step, dict(values)]", "step / 0"))
    done = run_extended(tmp_path, *TINY, "extensions=[lab]", "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    for part in ("'lines'", str(path), "write", "ZeroDivisionError"):
        assert part in done.stderr


@pytest.mark.parametrize(
    ("source", "extensions", "parts"),
    [
        ("", "lab", ["lab", "registers nothing"]),
        ("", "labb", ["labb", "lab?"]),
        ("", "lab.missing", ["lab.missing"]),
        ("", "lab/py", ["'lab/py'", "not the name of a module"]),
        ("def f(:", "lab", ["lab.py", "line 1"]),
        ("\nimport nowhere", "lab", ["lab.py", "line 2", "nowhere"]),
        ("raise SystemExit(3)", "lab", ["lab.py", "line 1", "SystemExit"]),
        ("import torch", "lab", ["lab.py", "torch"]),
        (CALLBACK.format(name="a", hook="finish", body="pass"), "lab", ["'a'", "Own", "after_step"]),
        (2 * CALLBACK.format(name="a", hook="end", body="pass"), "lab", ["'a'", "lab.py", "already"]),
        (KEYS.format(group="model", fields="        a: int = 1"), "lab", ["'model'"]),
        (KEYS.format(group="fp8", fields="        a: int = 1"), "lab", ["'fp8'"]),
        (KEYS.format(group="mine", fields="        a: int = 1"), "lab", ["mine.a", "help"]),
        (KEYS.format(group="mine", fields="        a: int\n        'x.'"), "lab", ["mine.a", "default"]),
        (KEYS.format(group="mine", fields="        a: set = 1\n        'x.'"), "lab", ["mine.a", "set"]),
        (KEYS.format(group="mine", fields="        a: int = 1.5\n        'x.'"), "lab", ["mine.a", "1.5", "integer"]),
    ],
)
def test_a_module_that_cannot_extend_is_refused_with_its_reason(source, extensions, parts, tmp_path):
    write_module(tmp_path, source)
    # A fork has torch already.
    start = run_ranks if "torch" in parts else fork_ranks
    told = refused(run_extended(tmp_path, "--cfg", "job", f"extensions=[{extensions}]", start=start))
    for part in [f"extensions=[{extensions}]", *parts]:
        assert part in told


def test_a_name_that_two_modules_register_is_refused_with_both(tmp_path):
    paths = [
        write_module(tmp_path, CALLBACK.format(name="a", hook="end", body="pass"), name) for name in ("one", "two")
    ]
    told = refused(run_extended(tmp_path, "--cfg", "job", "extensions=[one,two]"))
    assert all(str(path) in told for path in paths)


def test_what_a_group_of_keys_finds_itself_is_the_users(tmp_path):
    check = """        beta: float = 0.5
        \"\"\"Of nothing.\"\"\"

        def __post_init__(self):
            if self.beta > 1:
                raise ValueError("beta is a share")
"""
    write_module(tmp_path, KEYS.format(group="lab_keys", fields=check))
    assert run_extended(tmp_path, "--cfg", "job", "extensions=[lab]", "lab_keys.beta=0.7").returncode == 0
    told = refused(run_extended(tmp_path, *TINY, "extensions=[lab]", "lab_keys.beta=1.5", f"run_dir={tmp_path}/run"))
    assert all(part in told for part in ("lab_keys", "lab.Own", "beta is a share"))


@pytest.mark.parametrize(
    "given", ["extensions=my_lab.callbacks", "extensions=[1]", "extensions.0=a", "extensions=null"]
)
def test_extensions_that_are_no_list_of_names_are_refused(given, lab):
    assert given in refused(run_extended(lab, "--cfg", "job", given))


def test_one_module_without_brackets_is_answered_with_its_own_name(lab):
    told = refused(run_extended(lab, "--cfg", "job", "extensions=my_lab.sinks"))
    assert "extensions=[my_lab.sinks]" in told


def test_help_shows_keys_of_an_extension_without_loading_torch(lab):
    write_module(lab, "import sys, atexit\natexit.register(lambda: print('torch' in sys.modules))", "sitecustomize")
    done = run_extended(lab, "--help", "extensions=[my_lab.callbacks]", "my_lab.beta=0.25", start=run_ranks)
    assert done.returncode == 0
    assert "my_lab.beta = 0.25   (number)" in done.stdout
    assert done.stdout.endswith("False\n")


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("my_lab.betta=0.5", ["my_lab.betta", "my_lab.beta?"]),
        ("my_lab.beta=much", ["my_lab.beta='much'", "number"]),
        ("my_lab=1", ["my_lab=1", "beta"]),
        ("my_lab.beta=null", ["my_lab.beta=null"]),
    ],
)
def test_keys_of_an_extension_are_checked_like_ours(given, parts, lab):
    told = refused(run_extended(lab, "--cfg", "job", "extensions=[my_lab.callbacks]", given))
    assert all(part in told for part in parts)


def test_a_key_of_an_extension_that_is_not_named_says_so(lab):
    told = refused(run_extended(lab, "--cfg", "job", "my_lab.beta=0.5"))
    assert all(part in told for part in ("my_lab.beta", "extensions=["))


def test_ranks_that_register_other_things_do_not_train_together(tmp_path):
    source = CALLBACK.format(name="a", hook="end", body="pass").replace('"a"', '"a" + os.environ["RANK"]')
    write_module(tmp_path, f"    import os\n{source}")
    done = run_extended(
        tmp_path, *TINY, "parallelism=dp", "extensions=[lab]", "trainer.max_steps=1", f"run_dir={tmp_path / 'run'}",
        num_ranks=2,
    )  # fmt: skip
    assert done.returncode != 0
    assert "callback 'a0' of lab" in done.stderr
    assert not (tmp_path / "run/checkpoints").exists()
