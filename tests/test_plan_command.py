"""`python -m gpt_pretrain.plan`: exit codes, plan.json, and what the terminal shows."""

import io
import json
import time

import pytest
from rich.console import Console

from gpt_pretrain.__main__ import main as train
from gpt_pretrain.compare.__main__ import main as compare
from gpt_pretrain.plan.__main__ import main
from gpt_pretrain.plan.document import WIDTH, plan_document, print_plan
from tests.checkpoint_files import file_size_limit
from tests.launching import run_ranks
from tests.nemo import NEMO_FP8
from tests.planning import plan_of

CONFIGURATIONS = [
    ("model=llama3_8b", "parallelism=dp", "fp8=delayed", "model.fp8_params=true", "plan.num_gpus=8"),
    ("model=llama3_70b", "parallelism=tp8_sp", "model.pipeline_model_parallel_size=8", "fp8=blockwise"),
    ("model=gpt2_124m",),
]


@pytest.mark.parametrize("overrides", CONFIGURATIONS)
def test_the_document_is_json_and_has_what_the_tables_show(overrides):
    plan = plan_of(*overrides)
    document = json.loads(json.dumps(plan_document(plan), allow_nan=False))
    assert document["version"] == 2
    assert document["memory"]["needed_gib"] == plan.memory.needed_gib
    assert document["speed"]["run"]["tokens_per_s_per_gpu"] == plan.speed.run.tokens_per_s_per_gpu
    assert document["settings"][0]["key"] == "trainer.precision"
    assert [each["module"] for each in document["linear_layers"]][-1] == "output_layer"


def test_without_a_prediction_speed_is_null():
    assert plan_document(plan_of("fp8=delayed", "model.fp8_emulate=true"))["speed"] is None


def printed(*overrides):
    output = io.StringIO()
    print_plan(plan_of(*overrides), Console(file=output, width=WIDTH, highlight=False))
    return output.getvalue()


@pytest.mark.parametrize("overrides", [*CONFIGURATIONS, ("fp8=delayed", "model.fp8_emulate=true")])
def test_tables_are_readable_at_100_columns(overrides):
    text = printed(*overrides)
    lines = text.splitlines()
    assert max(map(len, lines)) <= WIDTH
    # A key that is cut or folded cannot be searched for.
    for setting in plan_of(*overrides).settings:
        assert setting.inert or any(f" {setting.key.removeprefix('model.')} " in line for line in lines), setting.key
    assert "Keys without a dot are model.KEY" in text
    assert "…\n" not in text
    for verdict in plan_of(*overrides).verdicts:
        assert str(verdict) in " ".join(text.split())


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("model=gpt2_124m", "model.cuda_graph_impl=local"), "; memory is that without CUDA graphs."),
        (
            ("model=llama3_8b", "parallelism=tp2_sp", "plan.num_gpus=2", "model.tp_comm_overlap=true"),
            "; memory and speed are those without overlapped exchanges.",
        ),
        (("model=gpt2_124m",), "calibrated on an H200."),
    ],
)
def test_what_the_forecast_does_not_know_is_said(overrides, told):
    assert told in " ".join(printed(*overrides).split())


def test_what_null_came_to_among_the_kernels_is_shown():
    text = printed("model=gpt2_124m", "model.cuda_graph_impl=local")
    (fused,) = [line for line in text.splitlines() if line.startswith("│ fused ")]
    shown = " ".join(text.replace("│", " ").split())
    assert "bias_activation_fusion" in fused
    assert "cross_entropy_fusion_impl (linear), cuda_graph_impl (local)" in shown


def run_plan(capsys, *arguments):
    code = main([*arguments])
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_a_plan_leaves_plan_json_in_the_run_directory_and_nothing_else(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run_plan(capsys, "model=gpt2_124m", "name=small", "data=mock")
    (file,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (code, err) == (0, "")
    assert file.relative_to(tmp_path).match("outputs/*/*_small/plan.json")
    assert f"written: {file}" in out
    assert json.loads(file.read_text())["name"] == "small"

    again = tmp_path / "again"
    assert run_plan(capsys, "model=gpt2_124m", "name=small", "data=mock", f"run_dir={again}")[0] == 0
    assert [path.name for path in again.iterdir()] == ["plan.json"]
    assert (again / "plan.json").read_text() == file.read_text()


REFUSED = {
    "typo": ["model.fp8_marginn=3"],
    "rules of the layers": ["fp8=tensorwise", "model.fp8_margin=1", "model.hidden_size=200", "model.optim.lr=-1"],
    "an option": ["model=llama3_8"],
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_what_training_refuses_the_plan_refuses_with_the_same_words(capsys, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    code, _, told = run_plan(capsys, *arguments)
    assert train(arguments) == code == 2
    assert told == capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "beginning"),
    [
        (["fp8=mxfp8"], "error: model.fp8_recipe=mxfp8 needs compute capability 10.x"),
        (["plan.num_gpus=8", "trainer.num_nodes=3"], "error: plan.num_gpus=8 does not make trainer.num_nodes=3 nodes"),
        (["plan.num_gpus=0"], "error: plan.num_gpus=0 is not positive; use 1 or more"),
        (["plan.num_gpus=6", "trainer.devices=4"], "error: plan.num_gpus=6 is not a multiple of trainer.devices=4"),
        (["parallelism=tp2", "plan.num_gpus=3"], "error: model.tensor_model_parallel_size=2 × "),
        (["plan.gpu=a100"], "error: plan.gpu='a100' is not one of h100, h200, b200"),
    ],
)
def test_what_the_planned_machine_cannot_do_is_refused(capsys, arguments, beginning):
    code, _, told = run_plan(capsys, *arguments)
    assert code == 2
    assert told.startswith(beginning)


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (
            ["model=llama3_70b", "parallelism=tp8_sp", "plan.num_gpus=4"],
            "; plan it with plan.num_gpus=8, or choose a layout whose product divides 4\n",
        ),
        (["plan.gpu=h100", "fp8=mxfp8"], "; or plan.gpu=b200\n"),
    ],
)
def test_the_way_out_of_a_plan_is_another_plan(capsys, arguments, end):
    code, _, told = run_plan(capsys, *arguments)
    assert code == 2
    assert told.endswith(end)
    assert "torchrun" not in told


@pytest.mark.parametrize("module", ["plan", "compare"])
def test_a_full_disk_is_told_with_the_file_that_it_has_no_room_for(module, capsys, tmp_path):
    main_of, file_name = (main, "plan.json") if module == "plan" else (compare, "task.json")
    variants = ["compare.variants=[bf16,'model.optim.lr=1e-4']"] if module == "compare" else []
    with file_size_limit(300):
        assert main_of([*variants, "data=mock", f"run_dir={tmp_path / 'run'}"]) == 1
    told = capsys.readouterr().err
    assert told.count("error: ") == 1
    assert f"{tmp_path / 'run'}/" in told
    assert file_name in told


@pytest.mark.parametrize("gpu", ["h100", "h200", "b200"])
@pytest.mark.parametrize(("asked", "has_it"), [("true", True), ("false", False), ("null", False)])
def test_the_planned_machine_has_flash_attention_where_it_is_asked_for(capsys, tmp_path, gpu, asked, has_it):
    arguments = ["model=llama3_8b", "data=mock", f"plan.gpu={gpu}", f"model.use_flash_attention={asked}"]
    code, out, err = run_plan(capsys, *arguments, f"run_dir={tmp_path / 'run'}")
    assert (code, err) == (0, "")
    assert ("use_flash_attention" in out) is has_it
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["kernels"]["use_flash_attention"] is has_it


@pytest.mark.parametrize(
    ("overrides", "num_gpus", "per_node"),
    [
        ((), 1, 1),
        (("parallelism=tp2_sp_pp2",), 4, 4),
        (("model=llama3_70b", "parallelism=tp8_sp", "model.pipeline_model_parallel_size=2"), 16, 8),
        (("experiment=llama3_8b_4gpu",), 4, 4),
        (("model=moe_small", "parallelism=ep2"), 2, 2),
        (("experiment=llama3_8b_4gpu", "plan.num_gpus=8"), 8, 4),
        (("parallelism=tp2", "trainer.devices=2", "trainer.num_nodes=3"), 6, 2),
        (("plan.num_gpus=12", "model.global_batch_size=96"), 12, 6),
    ],
)
def test_the_planned_processes(overrides, num_gpus, per_node):
    launch = plan_of(*overrides).spec.launch
    assert (launch.world_size, launch.local_world_size) == (num_gpus, per_node)


def test_a_sweep_is_planned_job_by_job(capsys, tmp_path):
    code, out, _ = run_plan(capsys, "-m", "fp8=none,delayed", f"hydra.sweep.dir={tmp_path}", "data=mock")
    assert code == 0
    assert "run 1 of 2: fp8=none" in out
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.json")) == [
        "0/plan.json",
        "1/plan.json",
    ]


def test_a_process_plans_the_nemo_command_line_in_seconds(tmp_path):
    began = time.monotonic()
    done = run_ranks(1, ["-m", "gpt_pretrain.plan", *NEMO_FP8, "model=gpt3_1_3b", f"run_dir={tmp_path / 'run'}"])
    # 10 s where nothing else runs; tests share the machine.
    assert time.monotonic() - began < 40
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["fp8_flops_share"] > 0.5
