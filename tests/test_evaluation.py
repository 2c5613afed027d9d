"""Evaluations: scores of small tasks by `transformers`, in every layout, from checkpoints and during runs."""

import importlib.metadata
import json
from pathlib import Path

import pytest

from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.evaluate import folder_of_reports, main
from gpt_pretrain.export import main as export_main
from gpt_pretrain.report.sinks import scalars
from gpt_pretrain.rules.jobs import load_config
from tests.emulated_training import emulate
from tests.evaluation_tasks import TASKS, Reference, write_tasks
from tests.forked_runs import fork_ranks
from tests.runs import SAVED, run_small
from tests.saved_models import FAMILIES, saved_model, small_tokenizer

ALL = f"tasks=[{','.join(TASKS)}]"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Data of tasks are copied into the cache of Hugging Face's libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf_home")))
        yield


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """The folder of the tasks' files."""
    return write_tasks(tmp_path_factory.mktemp("tasks"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Path of a checkpoint of a run with a tokenizer; the vocabulary of 300 is padded to 384."""
    two_layers = (*FAMILIES["llama"], "model.num_layers=2")
    with saved_model(tmp_path_factory.mktemp("run"), *two_layers, tokenizer=small_tokenizer()) as saved:
        return saved.path


@pytest.fixture(scope="module")
def expected(llama, tmp_path_factory):
    """What the tasks measure, computed by `transformers`."""
    hf = tmp_path_factory.mktemp("hf") / "model"
    assert export_main([f"checkpoint={llama}", f"out={hf}"]) == 0
    return Reference(hf, 32).scores()


def numbers(report):
    """By task and metric, without standard errors."""
    return {
        f"{task}/{name.removesuffix(',none')}": value
        for task, values in report["results"].items()
        for name, value in values.items()
        if name.endswith(",none") and "_stderr" not in name
    }


def evaluated(path, tasks, out, *arguments, num_ranks=1):
    given = [f"checkpoint={path}", f"include_path={tasks}", f"out={out}", *arguments]
    done = fork_ranks(num_ranks, ["-m", "gpt_pretrain.evaluate", *given], timeout_s=120)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return json.loads(out.read_text()), done.stdout


@pytest.mark.parametrize(
    "layout",
    [
        [],
        ["tensor_model_parallel_size=2"],
        ["pipeline_model_parallel_size=2"],
        # Two ranks share the documents, several at once.
        ["micro_batch_size=3"],
    ],
)
def test_scores_are_those_of_transformers(layout, llama, tasks, expected, tmp_path):
    num_ranks = 2 if layout else 1
    report, printed = evaluated(llama, tasks, tmp_path / "report.json", ALL, *layout, num_ranks=num_ranks)
    assert numbers(report) == pytest.approx(expected, rel=1e-5)
    # Some are right and some the likeliest, so that a constant would not pass.
    assert {name: value for name, value in expected.items() if "/acc" in name and value not in (0, 1)} == {
        "lab_choice/acc": 0.5,
        "lab_choice/acc_norm": 0.5,
        "lab_cloze/acc": 0.2,
    }
    acc, error = (report["results"]["lab_choice"][name] for name in ("acc,none", "acc_stderr,none"))
    # Of a mean of ones and zeros, with Bessel's correction.
    assert error == pytest.approx((acc * (1 - acc) / (10 - 1)) ** 0.5)
    assert report["results"]["lab_cloze"]["perplexity_stderr,none"] > 0
    assert f"{acc:.4f}" in printed
    assert f"{error:.4f}" in printed
    assert report["checkpoint"] == str(llama)
    assert "texts are longer than the model's context (32 tokens)" in printed


def test_examples_and_limit(llama, tasks, tmp_path):
    few = ("tasks=[lab_choice]", "num_fewshot=2", "limit=5")
    report, printed = evaluated(llama, tasks, tmp_path / "report.json", *few)
    assert report["n-shot"] == {"lab_choice": 2}
    assert report["n-samples"]["lab_choice"] == {"original": 10, "effective": 5}
    assert [row for row in printed.splitlines() if "lab_choice" in row and " 2 " in row and " 5 " in row]
    again, _ = evaluated(llama, tasks, tmp_path / "again.json", *few)
    assert again["results"] == report["results"]


def test_the_layout_of_the_run_is_the_default(tasks, tmp_path):
    layout = [*FAMILIES["llama"], "parallelism=tp2_sp"]
    done = fork_ranks(2, ["tests/programs/save_layout.py", str(tmp_path), "tokenizer", *layout], timeout_s=60)
    assert done.returncode == 0, done.stderr[-4000:]
    path = tmp_path / "checkpoints" / "step_00000001"
    two, _ = evaluated(path, tasks, tmp_path / "two.json", ALL, num_ranks=2)
    one, _ = evaluated(path, tasks, tmp_path / "one.json", ALL)
    assert numbers(two) == pytest.approx(numbers(one), rel=1e-5)
    three = fork_ranks(3, ["-m", "gpt_pretrain.evaluate", f"checkpoint={path}", f"include_path={tasks}", ALL])
    assert three.returncode != 0
    assert "model.tensor_model_parallel_size=2" in three.stderr


@pytest.mark.parametrize("place", ["run/checkpoints/step_00000300", "start"])
def test_reports_stay_where_the_user_works(place):
    """Of an imported checkpoint, start, they were written to the folder above."""
    run_dir = "run" if place.startswith("run") else ""
    assert folder_of_reports(Path("/home") / place) == Path("/home", run_dir, "evaluations")


DROPOUT = ("model.hidden_dropout=0.1", "model.attention_dropout=0.1")


def test_training_does_not_notice_evaluations(tasks, tmp_path):
    """Losses to the last bit: dropout, order of data and scales of FP8, on two ranks and after a resume."""
    run = (*emulate("delayed"), *DROPOUT, "trainer.max_steps=6", "trainer.limit_val_batches=0")
    evaluating = (ALL.replace("tasks", "evaluation.tasks"), "evaluation.interval=2", f"evaluation.include_path={tasks}")
    plain = run_small(2, tmp_path / "plain", tmp_path, run)
    stopped = (*run, *evaluating, "checkpoint.save_interval=4", "checkpoint.save_at_end=false")
    observed = run_small(2, tmp_path / "observed", tmp_path, stopped)
    assert [record.loss for record in observed.train] == [record.loss for record in plain.train]
    assert [record.step for record in observed.evaluations] == [2, 4, 6]
    # As if it had been killed in step 5 and started again.
    resumed = run_small(2, tmp_path / "observed", tmp_path, stopped)
    assert [record.loss for record in resumed.train] == [record.loss for record in plain.train]
    assert [record.numbers for record in resumed.evaluations] == [record.numbers for record in observed.evaluations]


def test_a_run_logs_what_the_command_finds_in_its_checkpoint(tasks, tmp_path):
    run = (*SAVED, "parallelism=tp2_sp", ALL.replace("tasks", "evaluation.tasks"), f"evaluation.include_path={tasks}")
    metrics = run_small(2, tmp_path / "run", tmp_path, [*run, "trainer.precision=fp32", "logging.tensorboard=true"])
    (record,) = metrics.evaluations
    report, _ = evaluated(tmp_path / "run" / "checkpoints" / "step_00000002", tasks, tmp_path / "report.json", ALL)
    assert record.step == 2
    assert record.numbers == pytest.approx(numbers(report), rel=1e-4)
    assert record.standard_errors["lab_choice/acc"] == pytest.approx(report["results"]["lab_choice"]["acc_stderr,none"])
    plots = scalars(record)
    assert plots["evaluation/lab_choice/acc"] == record.numbers["lab_choice/acc"]
    assert plots["evaluation/lab_choice/acc_stderr"] == record.standard_errors["lab_choice/acc"]
    written = json.loads((tmp_path / "run" / "evaluations" / "step_00000002.json").read_text())
    assert written["step"] == 2
    assert numbers(written) == record.numbers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tasks=[]"], "tasks=[] names nothing"),
        (["tasks=[lab_choice,lab_choice]"], "lab_choice is named more than once"),
        (["tasks=[lab_chioce]"], "did you mean lab_choice?"),
        (["tasks=[arc_eazy]"], "did you mean arc_easy?"),
        (["tasks=[lab_written]"], "lab_written asks for text to be generated"),
        (["tasks=[lab_choice]", "num_fewshot=-1"], "num_fewshot=-1 is too small; use 0 or more"),
        (["tasks=[lab_choice]", "limit=0"], "limit=0 is too small; use 1 or more"),
        (["tasks=[lab_choice]", "include_path=nowhere"], "include_path='nowhere' is no folder"),
        (["tasks=[lab_choice]", "tensor_model_parallel_size=2"], "model.tensor_model_parallel_size=2"),
        (["task=[lab_choice]"], "did you mean tasks?"),
    ],
)
def test_mistakes_are_told(arguments, message, llama, tasks, capsys):
    included = [] if "include_path=nowhere" in arguments else [f"include_path={tasks}"]
    assert main([f"checkpoint={llama}", *included, *arguments]) == 2
    assert message in capsys.readouterr().err


def test_data_that_are_not_there(llama, capsys, monkeypatch):
    done = fork_ranks(
        1, ["-m", "gpt_pretrain.evaluate", f"checkpoint={llama}", "tasks=[arc_easy]"], env={"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 2, done.stderr
    assert "tasks=[arc_easy]: arc_easy cannot be loaded" in done.stderr
    assert "HF_HUB_OFFLINE=1" in done.stderr


def test_model_of_token_ids_has_no_text(tasks, tmp_path, capsys):
    with saved_model(tmp_path, *FAMILIES["llama"]) as saved:
        pass
    assert main([f"checkpoint={saved.path}", f"include_path={tasks}", "tasks=[lab_choice]"]) == 2
    assert "is of a model without a tokenizer" in capsys.readouterr().err


def test_missing_library_is_told_with_its_command(llama, capsys, monkeypatch):
    version = importlib.metadata.version

    def without_lm_eval(name):
        if name == "lm_eval":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_lm_eval)
    assert main([f"checkpoint={llama}", "tasks=[arc_easy]"]) == 2
    assert "pip install -c constraints.txt -e '.[evaluate]'" in capsys.readouterr().err


def test_a_file_cannot_name_code_to_run(tmp_path):
    from gpt_pretrain.config.source import Source

    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "foreign.yaml").write_text(
        "# @package _global_\nevaluation:\n  tasks: [lab_choice]\n  include_path: /tmp\n"
    )
    with pytest.raises(ConfigError) as refused:
        load_config(["experiment=foreign"], Source(config_dir=tmp_path))
    (problem,) = refused.value.problems
    assert "evaluation.include_path='/tmp'" in problem
    config = load_config(["experiment=foreign", "evaluation.include_path=/tmp"], Source(config_dir=tmp_path))
    assert config.evaluation.include_path == "/tmp"
