"""What extensions are called with: wrong signatures, numbers that are not logged yet, weights that are not whole."""

import pytest

from gpt_pretrain.report.metrics_file import load_metrics
from tests.extensions import TINY, run_extended, write_module
from tests.test_extensions import CALLBACK, SINK, refused

CALLBACK_OF = """
    from gpt_pretrain import extend

    @extend.callback("own")
    class Own(extend.Callback):
        def end(self, run):
            pass

        def {method}:
            pass
"""
FUNCTION = """
    from gpt_pretrain import extend

    @extend.{kind}("own"{more})
    def made({arguments}):
        pass
"""
# The step that it is called after, what it reads, and whether the loss is fresh.
READER = """
    import json
    from gpt_pretrain import extend

    @extend.callback("reader")
    class Reader(extend.Callback):
        def after_step(self, run):
            told = [run.step, run.read_grad_norm(), run.metrics["train/grad_norm"]]
            with (run.run_dir / "told.jsonl").open("a") as file:
                file.write(json.dumps(told) + "\\n")
"""


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("after_step(self)", ["after_step(self)", "def after_step(self, run)"]),
        ("save(self, run, path)", ["save(self, run, path)", "def save(self, run)"]),
        ("on_validation(self, model)", ["Own.on_validation", "validation"]),
        ("after_steps(self, run)", ["Own.after_steps", "after_step"]),
    ],
)
def test_a_method_that_would_fail_or_never_be_called_is_refused(method, parts, tmp_path):
    write_module(tmp_path, CALLBACK_OF.format(method=method))
    told = refused(run_extended(tmp_path, "--cfg", "job", "extensions=[lab]"))
    assert all(part in told for part in ["extensions=[lab]", "'own'", *parts])


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        (CALLBACK_OF.format(method="_own(self)").replace('("own")', ""), ['@extend.callback("NAME") above Own']),
        (SINK.replace('("lines")', ""), ['@extend.sink("NAME") above Lines']),
        (FUNCTION.format(kind="loss", more="", arguments="a, b, c").replace('("own")', ""), ['@extend.loss("NAME")']),
        (CALLBACK_OF.format(method="__init__(self, path)"), ["'own'", "__init__(self)", "path"]),
    ],
)
def test_a_decorator_without_a_name_and_an_object_that_needs_arguments_are_refused(source, parts, tmp_path):
    write_module(tmp_path, source)
    told = refused(run_extended(tmp_path, "--cfg", "job", "extensions=[lab]"))
    assert all(part in told for part in ["extensions=[lab]", *parts])


@pytest.mark.parametrize("method", ["_note(self, run)", "note(self, run, hook)"])
def test_methods_for_its_own_use_are_left_alone(method, tmp_path):
    write_module(tmp_path, CALLBACK_OF.format(method=method))
    assert run_extended(tmp_path, "--cfg", "job", "extensions=[lab]").returncode == 0


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (FUNCTION.format(kind="validation_task", more="", arguments="run"), "(run, evaluate)"),
        (FUNCTION.format(kind="tokenizer", more="", arguments=""), "(config)"),
        (FUNCTION.format(kind="loss", more="", arguments="logits, labels"), "(logits, labels, config)"),
        (FUNCTION.format(kind="layer", more="", arguments="layer"), "(run, layer)"),
        (
            FUNCTION.format(kind="optimizer", more=", states=[], elementwise=True", arguments="params"),
            "(params, config)",
        ),
        (SINK.replace("def write(self, step, values)", "def write(self, values)"), "write(self, step, values)"),
    ],
)
def test_what_a_run_could_not_call_is_refused_with_the_signature(source, expected, tmp_path):
    write_module(tmp_path, source)
    told = refused(run_extended(tmp_path, "--cfg", "job", "extensions=[lab]"))
    assert all(part in told for part in ["extensions=[lab]", expected])


def test_a_number_that_is_not_logged_yet_says_when_it_comes(tmp_path):
    write_module(tmp_path, READER)
    done = run_extended(
        tmp_path, *TINY, "extensions=[lab]", "trainer.log_every_n_steps=2", "trainer.max_steps=3",
        f"run_dir={tmp_path / 'run'}",
    )  # fmt: skip
    assert done.returncode == 1
    for part in ("'train/grad_norm'", "at step 1", "every 2 steps", "trainer.log_every_n_steps", "lab.py"):
        assert part in done.stderr


def test_the_gradient_norm_of_the_newest_step_can_be_read(tmp_path):
    write_module(tmp_path, READER)
    done = run_extended(
        tmp_path, *TINY, "extensions=[lab]", "trainer.max_steps=2", f"run_dir={tmp_path / 'run'}",
        "trainer.gradient_clip_val=1e-3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [line.strip("[]").split(", ") for line in (tmp_path / "run/told.jsonl").read_text().splitlines()]
    logged = [(record.step, record.grad_norm) for record in load_metrics(tmp_path / "run").train]
    assert [(int(step), float(read)) for step, read, _ in told] == logged
    # Before clipping.
    assert min(float(read) for _, read, _ in told) > 1e-2


def test_weights_that_are_not_whole_after_a_step_are_refused_and_not_read(tmp_path):
    body = "sum(float(p.sum()) for p in run.model[0].parameters())"
    write_module(tmp_path, CALLBACK.format(name="a", hook="{hook}", body=body).replace("{hook}", "after_step"))
    arguments = [*TINY, "parallelism=fsdp", "trainer.precision=bf16", "extensions=[lab]", "trainer.max_steps=1"]
    done = run_extended(tmp_path, *arguments, f"run_dir={tmp_path / 'run'}", num_ranks=2)
    assert done.returncode != 0
    for part in ("'a'", "run.model", "after_step", "optim_grads_params", "parallelism=zero2"):
        assert part in done.stderr
    write_module(tmp_path, CALLBACK.format(name="a", hook="end", body=body))
    done = run_extended(tmp_path, *arguments, f"run_dir={tmp_path / 'ended'}", num_ranks=2)
    assert done.returncode == 0, done.stderr
