"""What all commands share: their arguments, what they load to answer, and how they end."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import import_module

import pytest

from gpt_pretrain.checkpoint.__main__ import CheckpointArguments, Task
from gpt_pretrain.commands.arguments import read_arguments
from gpt_pretrain.commands.command import run_with_arguments
from gpt_pretrain.config.choices import PlanGpu
from gpt_pretrain.config.errors import ConfigError, RunError, UserError
from gpt_pretrain.doctor.__main__ import DoctorArguments
from tests.launching import REPOSITORY, run_ranks

OF_A_RUN = ("gpt_pretrain", "gpt_pretrain.plan", "gpt_pretrain.prepare_data", "gpt_pretrain.benchmark")
OF_THEIR_OWN = (
    "gpt_pretrain.export",
    "gpt_pretrain.import_hf",
    "gpt_pretrain.import_megatron",
    "gpt_pretrain.import_torchtitan",
    "gpt_pretrain.generate",
    "gpt_pretrain.checkpoint",
    "gpt_pretrain.doctor",
)


class Colour(Enum):
    red = "#f00"
    green = "#0f0"


@dataclass(frozen=True, kw_only=True)
class Arguments:
    source: str
    """Where from."""
    max_steps: int = 3
    """How many."""
    colour: Colour | None = None
    """Which."""
    quiet: bool = False
    """Whether."""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["source=a"], {}),
        (["++source=a=b, '${c}'"], {"source": "a=b, '${c}'"}),
        (["source=null", "colour=null"], {"source": "null"}),
        (
            ["source=a", "max_steps=1", "quiet=true", "colour=red"],
            {"max_steps": 1, "quiet": True, "colour": Colour.red},
        ),
        (["--source", "a", "--max-steps", "-1", "--quiet"], {"max_steps": -1, "quiet": True}),
        (["--source=a", "--max_steps=1", "--quiet=false", "--colour", "red"], {"max_steps": 1, "colour": Colour.red}),
        (["--quiet", "source=a"], {"quiet": True}),
    ],
)
def test_a_value_is_given_by_its_key_or_option(arguments, expected):
    assert read_arguments(Arguments, arguments) == Arguments(**{"source": "a", **expected})


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["source "]),
        (["suorce=a"], ["suorce "]),
        (["source"], ["source "]),
        (["source=a", "--source", "b"], ["--source: source "]),
        (["source=a", "max_steps=two", "colour=rot", "quiet=1"], ["max_steps=two ", "colour=rot ", "quiet=1 "]),
    ],
)
def test_every_mistake_is_told_by_its_key(arguments, expected):
    with pytest.raises(ConfigError) as caught:
        read_arguments(Arguments, arguments)
    assert [problem for problem in caught.value.problems if problem.startswith(tuple(expected))] == [
        *caught.value.problems
    ]
    assert len(caught.value.problems) == len(expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["source=a", "elsewhere"], ["elsewhere KEY=elsewhere source max_steps"]),
        (["source=a", "model.fp8=true"], ["model.fp8 train leave out source max_steps"]),
    ],
)
def test_what_is_no_key_is_told_with_the_way_out(arguments, expected):
    with pytest.raises(ConfigError) as caught:
        read_arguments(Arguments, arguments)
    assert len(caught.value.problems) == len(expected)
    for problem, words in zip(caught.value.problems, expected, strict=True):
        assert problem.startswith(words.split()[0])
        assert all(word in problem for word in words.split()), problem


def test_what_was_probably_meant_is_offered():
    with pytest.raises(ConfigError) as caught:
        read_arguments(Arguments, ["source=a", "max_step=1", "colour=#0F0"])
    key, value = caught.value.problems
    assert key.endswith(" max_steps?")
    assert "red, green or null" in value
    assert value.endswith(" green?")


@pytest.mark.parametrize(
    ("kind", "plain", "arguments", "expected"),
    [
        (
            CheckpointArguments,
            ("command", "path"),
            ["list", "runs/model.seed=1"],
            CheckpointArguments(command=Task.list, path="runs/model.seed=1"),
        ),
        (
            CheckpointArguments,
            ("command", "path"),
            ["path=run", "command=verify"],
            CheckpointArguments(command=Task.verify, path="run"),
        ),
        (DoctorArguments, (), ["--assume-gpu", "h200"], DoctorArguments(assume_gpu=PlanGpu.h200)),
        (DoctorArguments, (), ["--assume-gpu=b200"], DoctorArguments(assume_gpu=PlanGpu.b200)),
    ],
)
def test_the_spellings_of_the_doctor_and_of_checkpoint(kind, plain, arguments, expected):
    assert read_arguments(kind, arguments, plain) == expected


def end_by(error):
    if isinstance(error, signal.Signals):
        os.kill(os.getpid(), error)
    elif error is not None:
        raise error
    return 7


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (None, 7, ""),
        (UserError("one\ntwo"), 2, "error: one\n       two\n"),
        (ConfigError(["one", "two"]), 2, "error: one\nerror: two\n"),
        (RunError("one"), 1, "error: one\n"),
        (KeyboardInterrupt(), 130, ""),
        (signal.SIGINT, 130, ""),
    ],
)
def test_a_command_ends_with_its_exit_code_and_its_errors(error, code, told, capsys):
    program = ""
    assert run_with_arguments(program, Arguments, lambda _: end_by(error), ["source=a"]) == code
    assert capsys.readouterr().err == told


@pytest.mark.usefixtures("no_launcher")
@pytest.mark.parametrize(
    "command",
    [
        "gpt_pretrain.__main__ --config-dir={}",
        "gpt_pretrain.__main__ --config-name={}",
        "gpt_pretrain.__main__ run_dir={}",
        "gpt_pretrain.__main__ hydra.run.dir={}",
        "gpt_pretrain.compare.__main__ runs=[{}]",
        "gpt_pretrain.checkpoint.__main__ list {}",
        "gpt_pretrain.import_hf path={} out=out",
        "gpt_pretrain.import_megatron path={} out=out",
        "gpt_pretrain.import_torchtitan path={} out=out overrides=[model=tiny]",
    ],
)
@pytest.mark.parametrize("path", ["x" * 300, "file/x", "circle/x"])
def test_a_path_that_cannot_be_is_told(command, path, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "circle").symlink_to("circle")
    module, *arguments = command.format(path).split()
    assert import_module(module).main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert path in told


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_ends_a_command_to_be_started_again(number):
    with pytest.raises(SystemExit) as ended:
        run_with_arguments("", Arguments, lambda _: end_by(number), ["source=a"])
    assert ended.value.code == 75


def test_an_output_without_a_sign_for_a_character_gets_its_number():
    done = run_ranks(1, ["-m", "gpt_pretrain", "--help"], env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")
    assert r"\xd7" in done.stdout


# What a run loads, and no answer needs.
HEAVY = ("torch", "megatron", "transformer_engine", "numpy")


def load(*commands):
    """Runs commands one after the other as Python's -m does.

    Returns:
        Of each the exit code and what of `HEAVY` has been loaded by then; and how often which YAML was read.
    """
    program = f"""
import collections, json, runpy, sys
opened, ended = collections.Counter(), []
sys.addaudithook(lambda event, args: opened.update([str(args[0])]) if event == "open" else None)
for module, sys.argv[1:] in {commands!r}:
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        ended.append([end.code, [name for name in {HEAVY!r} if name in sys.modules]])
read = {{name: times for name, times in opened.items() if name.endswith(".yaml")}}
print("\\n" + json.dumps([ended, read]))
"""
    done = run_ranks(1, ["-c", program])
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("module", "arguments", "code"),
    [
        *((module, ["--help"], 0) for module in OF_A_RUN),
        *((module, ["model.hiden_size=3"], 2) for module in OF_A_RUN),
        ("gpt_pretrain", ["model.num_attention_heads=7"], 2),
        ("gpt_pretrain", ["--cfg", "job", "model=llama3_8b"], 0),
        ("gpt_pretrain", ["-m", "model.seed=1,2", "model.num_attention_heads=7"], 2),
    ],
)
def test_an_answer_needs_no_torch_and_reads_each_file_once(module, arguments, code):
    ended, read = load((module, arguments))
    assert ended == [[code, []]]
    assert set(read.values()) == {1}


def test_answers_of_other_commands_need_no_torch_and_no_configuration():
    ended, read = load(*((module, [argument]) for module in OF_THEIR_OWN for argument in ("--help", "hiden_size=3")))
    assert ended == [[code, []] for _ in OF_THEIR_OWN for code in (0, 2)]
    assert read == {}


def test_a_plan_needs_no_torch_and_reads_each_file_once(tmp_path):
    arguments = ["model=llama3_8b", "parallelism=tp2_sp_pp2", "fp8=delayed", f"run_dir={tmp_path / 'run'}"]
    ended, read = load(("gpt_pretrain.plan", arguments))
    assert ended == [[0, []]]
    assert set(read.values()) == {1}
    assert str(REPOSITORY / "conf" / "model" / "llama3_8b.yaml") in read
    assert (tmp_path / "run" / "plan.json").is_file()


# Beside what all name: options, and formats of other programs.
NAMED_BY = {
    "gpt_pretrain.translate": ("--from", "--env", "megatron-lm", "nemo", "torchtitan", "automodel", "accelerate")
}


@pytest.mark.parametrize("module", [*OF_THEIR_OWN, *NAMED_BY])
def test_help_of_a_command_names_it_and_its_keys(module, capsys):
    package = module in ("gpt_pretrain.checkpoint", "gpt_pretrain.doctor", "gpt_pretrain.translate")
    assert import_module(f"{module}.__main__" if package else module).main(["-h"]) == 0
    out, err = capsys.readouterr()
    about, _, keys = out.partition("\nKeys")
    assert err == ""
    assert about.startswith(f"{module}: ")
    assert f"  python -m {module} " in about
    assert "   (" in keys or all(word in about for word in NAMED_BY[module])
    assert max(map(len, about.splitlines())) <= 100


@pytest.mark.parametrize(
    ("options", "place", "told"),
    [
        # Without site-packages, as a Python outside of the environment.
        (["-S"], ".", (sys.executable, "make install", ". .venv/bin/activate")),
        ([], "gpt_pretrain", ("from outside of the folder gpt_pretrain/",)),
    ],
)
def test_a_command_where_it_cannot_start_says_how_to(options, place, told):
    done = subprocess.run(
        [sys.executable, *options, "-m", "gpt_pretrain"],
        cwd=REPOSITORY / place,
        env={name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
        | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert line.startswith("error: ")
    assert all(words in line for words in told), line
