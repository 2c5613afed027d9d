"""All ranks run the same code of extensions, and a resume says what has changed of it, or what it goes on without."""

import json
import shutil

import pytest

from gpt_pretrain.config.errors import UserError
from gpt_pretrain.extend import code
from tests.extensions import TINY, run_extended, write_module
from tests.launching import run_ranks
from tests.test_extensions_data import ON_TEXT

CALLBACK = """
    from gpt_pretrain import extend

    @extend.callback("{name}")
    class Own(extend.Callback):
        def end(self, run):
            from lab import lazy
"""
DESCENT = """
    from gpt_pretrain import extend

    @extend.optimizer("own", states=[], elementwise=True)
    def build(params, config):
        import torch

        return torch.optim.SGD(params, lr=config.model.optim.lr)
"""
SOURCE = """
    from pathlib import Path
    from gpt_pretrain import extend

    @extend.data_source("own")
    class Own:
        def __init__(self, config):
            self.files = [Path(__file__)]

        def documents(self, path):
            for number in range(300):
                yield " ".join(str(number * k) for k in range(20))

        def identity(self):
            return None
"""
KEYS = """
    from dataclasses import dataclass
    from gpt_pretrain import extend

    @extend.keys("group")
    @dataclass
    class Group:
        \"\"\"`group`: of a lab.\"\"\"

        width: int = 1
        \"\"\"A width.\"\"\"
"""
LAYER = """
    @extend.layer("own")
    def layer(run, layer):
        if (width := extend.own_keys(run.config, Group).width) != 7:
            raise extend.UserError(f"group.width={width} is not what it was trained with; use 7")
        return layer
"""


def write_package(folder, **sources):
    """A package `lab` of modules, one of which is imported only later."""
    package = folder / "lab"
    package.mkdir(parents=True, exist_ok=True)
    for name, source in {"__init__": "", "lazy": "", **sources}.items():
        write_module(package, source, name)
    return package


def train(folder, *arguments, steps=1, **more):
    return run_extended(folder, *TINY, f"trainer.max_steps={steps}", f"run_dir={folder / 'run'}", *arguments, **more)


def refused(done, *parts):
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for part in parts:
        assert part in done.stderr


def test_ranks_whose_code_differs_in_a_module_that_is_imported_later_do_not_train_together(tmp_path):
    folders = [write_package(tmp_path / rank, own=CALLBACK.format(name="a")) for rank in "01"]
    (folders[1] / "lazy.py").write_text("SIGN = -1\n")
    write_module(
        tmp_path,
        f"import os, sys\nif 'RANK' in os.environ: sys.path.insert(0, '{tmp_path}/' + os.environ['RANK'])",
        "sitecustomize",
    )
    done = train(tmp_path, "parallelism=dp", "extensions=[lab.own]", num_ranks=2)
    assert done.returncode != 0, done.stdout
    for part in ("lab/lazy.py", *(str(folder / "lazy.py") for folder in folders), "rank 0", "rank 1", "same version"):
        assert part in done.stderr
    assert "command line" not in done.stderr
    assert "lab/own.py" not in done.stderr

    # Where the files lie does not matter.
    shutil.copy(folders[0] / "lazy.py", folders[1] / "lazy.py")
    done = train(tmp_path, "parallelism=dp", "extensions=[lab.own]", num_ranks=2)
    assert done.returncode == 0, done.stderr


def test_a_package_too_large_to_compare_is_refused(tmp_path, monkeypatch):
    for number in range(4):
        (tmp_path / f"module_{number}.py").touch()
    assert len(code._read("many", (str(tmp_path),))) == 4
    code._read.cache_clear()
    monkeypatch.setattr(code, "_MOST_FILES", 3)
    with pytest.raises(UserError, match=r"many .* more than 3 \.py files"):
        code._read("many", (str(tmp_path),))


def test_a_resume_says_that_an_extensions_code_has_changed(tmp_path):
    package = write_package(tmp_path, own=CALLBACK.format(name="a"))
    assert "the code of" not in train(tmp_path, "extensions=[lab.own]").stdout
    assert "the code of" not in train(tmp_path, "extensions=[lab.own]", steps=2).stdout
    (package / "lazy.py").write_text("SIGN = -1\n")
    done = train(tmp_path, "extensions=[lab.own]", steps=3)
    assert done.returncode == 0, done.stderr
    assert "the code of the extension lab has changed since step_00000002" in done.stdout


@pytest.fixture(scope="module")
def trained_with_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    write_package(folder, first=KEYS + CALLBACK.format(name="a"), second=CALLBACK.format(name="b"), optimizer=DESCENT)
    done = train(folder, "extensions=[lab.first,lab.second,lab.optimizer]", "model.optim.name=own", "group.width=2")
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def two(trained_with_two, tmp_path):
    shutil.copytree(trained_with_two, tmp_path, dirs_exist_ok=True)
    return tmp_path


def test_a_resume_that_names_some_of_its_extensions_is_refused_with_the_others(two):
    done = train(two, "extensions=[lab.second,lab.optimizer]", "model.optim.name=own", steps=2)
    refused(done, "step_00000001", "lab.first is needed", "extensions=[lab.second,lab.optimizer,lab.first]")
    assert "extensions=[lab.second,lab.optimizer,-lab.first]" in done.stderr


def test_a_resume_without_extensions_is_told_the_names_before_their_keys_are_unknown(two):
    arguments = "model.optim.name=own", "group.width=2"
    done = train(two, *arguments, steps=2)
    refused(done, f"run_dir={two / 'run'}", "extensions=[lab.first,lab.second,lab.optimizer]")
    assert "group.width" not in done.stderr
    # Another command line's directory is none of its business.
    done = run_extended(two, *TINY, "trainer.max_steps=1", f"run_dir={two / 'other'}")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "given", "warns"),
    [
        (KEYS + CALLBACK.format(name="a"), "group.width=2", True),
        (KEYS + CALLBACK.format(name="a"), "group.width=1", False),
        (KEYS + LAYER, "group.width=7", False),
    ],
    ids=["nobody reads it", "as it is by default", "read"],
)
def test_a_key_that_no_code_of_an_extension_reads_is_told(source, given, warns, tmp_path):
    write_package(tmp_path, own=source)
    done = train(tmp_path, "extensions=[lab.own]", given)
    assert done.returncode == 0, done.stderr
    assert ("group.width=2 changes nothing" in " ".join(done.stdout.split())) == warns


def test_a_resume_drops_the_extensions_that_the_command_line_says_and_notes_them(two):
    arguments = "extensions=[lab.second,lab.optimizer,-lab.first]", "model.optim.name=own"
    for steps, noted in ((2, True), (3, False)):
        done = train(two, *arguments, steps=steps)
        assert done.returncode == 0, done.stderr
        assert ("without the extension lab.first" in done.stdout) == noted
    config = json.loads((two / "run/checkpoints/step_00000003/manifest.json").read_text())["config"]
    assert config["extensions"] == ["lab.second", "lab.optimizer", "-lab.first"]
    assert "group" not in config


def test_a_module_that_is_named_twice_is_refused(two):
    for given in ("[lab.first,lab.first]", "[lab.first,-lab.first]"):
        refused(run_extended(two, "--cfg", "job", f"extensions={given}"), "lab.first", "more than once")


def test_a_saved_configuration_is_used_without_its_extensions_where_nothing_else_names_them(two):
    source = ["--config-dir", str(two / "run"), "--config-name", "config", f"run_dir={two / 'adam'}"]
    refused(run_extended(two, *source, "extensions=[]"), "model.optim.name='own'", "extensions=[MODULE]")
    done = run_extended(two, *source, "extensions=[]", "optimizer=adam")
    assert done.returncode == 0, done.stderr
    source[-1] = f"run_dir={two / 'own'}"
    refused(run_extended(two, *source, "extensions=[lab.optimizer]"), "lab.first, lab.second are needed")
    done = run_extended(two, *source, "extensions=[lab.optimizer,-lab.first,-lab.second]")
    assert done.returncode == 0, done.stderr


def test_generation_and_export_need_no_extension_that_the_model_does_not_need(tmp_path):
    write_package(tmp_path, first=KEYS + CALLBACK.format(name="a"), optimizer=DESCENT, source=SOURCE)
    done = run_extended(
        tmp_path,
        *ON_TEXT,
        "model.data.data_impl=own",
        f"model.data.cache_dir={tmp_path / 'cache'}",
        "extensions=[lab.first,lab.optimizer,lab.source]",
        "model.optim.name=own",
        "trainer.max_steps=1",
        f"run_dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    checkpoint = f"checkpoint={tmp_path / 'run/checkpoints/step_00000001'}"
    for extensions in ([], ["extensions=[]"], ["extensions=[lab.first]"]):
        done = run_extended(
            tmp_path, checkpoint, "prompt=1 2 3", "max_new_tokens=2", *extensions, module="gpt_pretrain.generate"
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("1 2 3")
    done = run_extended(tmp_path, checkpoint, f"out={tmp_path / 'hf'}", module="gpt_pretrain.export")
    assert done.returncode == 0, done.stderr


def test_generation_computes_a_layer_with_the_keys_that_it_was_trained_with(tmp_path):
    write_package(tmp_path, own=KEYS + LAYER)
    (tmp_path / "text.txt").write_text("\n".join(" ".join(str(n * k) for k in range(20)) for n in range(900)))
    done = run_extended(
        tmp_path,
        *(
            each
            for each in ON_TEXT
            if not each.startswith(("model.data.splits_string", "trainer.val_check", "trainer.limit"))
        ),
        "data=text",
        f"model.data.text_files=[{tmp_path / 'text.txt'}]",
        "model.data.splits_string='1,0,0'",
        "trainer.limit_val_batches=0",
        f"model.data.cache_dir={tmp_path / 'cache'}",
        "extensions=[lab.own]",
        "model.layer=own",
        "group.width=7",
        "trainer.max_steps=1",
        f"run_dir={tmp_path / 'run'}",
    )
    assert done.returncode == 0, done.stderr
    asked = [f"checkpoint={tmp_path / 'run/checkpoints/step_00000001'}", "prompt=def", "max_new_tokens=2"]
    refused(run_extended(tmp_path, *asked, module="gpt_pretrain.generate"), "model.layer='own'", "lab.own")
    done = run_extended(tmp_path, *asked, "extensions=[lab.own]", module="gpt_pretrain.generate")
    assert done.returncode == 0, done.stderr


def test_a_group_of_keys_checks_its_values_before_torch_is_loaded(tmp_path):
    checked = (
        "\n        def __post_init__(self):\n            if self.width < 1:\n                raise extend.UserError"
    )
    write_package(tmp_path, own=f"{KEYS}{checked}(f'group.width={{self.width}} is not positive; use 1')\n")
    write_module(
        tmp_path, "import sys, atexit\natexit.register(lambda: print('torch' in sys.modules))", "sitecustomize"
    )
    done = run_extended(tmp_path, "--cfg", "job", "extensions=[lab.own]", "group.width=0", start=run_ranks)
    refused(done, "group.width=0 is not positive; use 1")
    assert done.stdout.endswith("False\n")
