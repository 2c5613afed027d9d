"""The checks of a command line in process: what is collected into one error, and which Hydra features work."""

import dataclasses
import os
import re
import shlex
from pathlib import Path

import pytest
import yaml

from gpt_pretrain.__main__ import main
from gpt_pretrain.commands.command_line import check_request, hydra_settings, parse_command_line, record_sweep
from gpt_pretrain.config.errors import ConfigError
from gpt_pretrain.config.load import config_to_yaml, load_saved_config
from gpt_pretrain.config.source import Source
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.rules.jobs import load_config
from tests.forked_runs import fork_ranks
from tests.launching import REPOSITORY, run_ranks

pytestmark = pytest.mark.usefixtures("no_launcher")


def jobs(*arguments):
    return check_request(parse_command_line(arguments), read_launch())


def problems(*arguments):
    with pytest.raises(ConfigError) as caught:
        jobs(*arguments)
    return caught.value.problems


def assert_names(found, *expected):
    """Each problem has the words expected of it, in their order."""
    assert len(found) == len(expected), found
    for problem, words in zip(found, expected, strict=True):
        rest = problem
        for word in words.split():
            _, there, rest = rest.partition(word)
            assert there, (problem, word)


@pytest.fixture
def my_conf(tmp_path):
    """Writes YAML files into a user's configuration folder."""

    def write(**files):
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("command", "key", "readers"),
    [
        ("train", "benchmark.rounds", ["benchmark"]),
        ("train", "plan.num_gpus", ["plan", "benchmark"]),
        ("plan", "benchmark.rounds", ["benchmark"]),
        ("compare", "plan.num_gpus", ["plan", "benchmark"]),
        ("train", "coordinate_check.steps", ["coordinate_check"]),
    ],
)
def test_a_key_that_only_other_commands_read_is_refused(command, key, readers):
    for written in (f"{key}=2", f"++{key}=2", "{}={{{}: 2}}".format(*key.split("."))):
        with pytest.raises(ConfigError) as caught:
            check_request(parse_command_line([written]), read_launch(), command=command)
        (problem,) = caught.value.problems
        assert problem.startswith(f"{key} ")
        assert re.findall(r"python -m gpt_pretrain\.(\w+)", problem) == readers
        assert "leave it out" in problem


@pytest.mark.parametrize(("command", "other"), [("benchmark", "compare"), ("compare", "benchmark")])
def test_the_variants_of_another_command_are_offered_as_ones_own(command, other):
    with pytest.raises(ConfigError) as caught:
        check_request(parse_command_line([f"{other}.variants=[bf16,fp8_delayed]"]), read_launch(), command=command)
    assert_names(caught.value.problems, f"{other}.variants {other} {command}.variants")


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        ("benchmark", "plan.gpu=h100"),
        ("benchmark", "+benchmark.overrides.mine='model.seed=2'"),
        ("compare", "compare.seeds=2"),
        (None, "compare.seeds=2"),
    ],
)
def test_a_key_that_the_command_reads_passes(command, argument):
    (job,) = check_request(parse_command_line([argument]), read_launch(), command=command)
    assert job.config


def test_a_file_may_set_what_other_commands_read(my_conf):
    folder = my_conf(run=RUN + "compare:\n  seeds: 2\n")
    request = parse_command_line([f"--config-dir={folder}", "--config-name=run"])
    (job,) = check_request(request, read_launch(), command="train")
    assert job.config.compare.seeds == 2


@pytest.mark.parametrize("option", ["--help", "--cfg=job"])
def test_what_is_only_shown_may_have_keys_of_all_commands(option):
    check_request(parse_command_line([option, "compare.seeds=2"]), read_launch(), command="train")


RUN = "defaults:\n  - config\n  - _self_\n"


def test_everything_wrong_is_told_in_one_error():
    found = problems(
        "model.hiden_size=3",
        "+trainer.max_step=3",
        "++modle.fp8=True",
        "~model.seed",
        "model=tny",
        "paralelism=dp",
        "model.num_layers=two",
        "model.activation=gelo",
        "model.optim=3",
        "model.seed=1,2",
        "x[",
    )
    assert len(found) == 11
    assert len(set(found)) == 11


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
def test_an_unknown_key_is_refused_behind_every_prefix(prefix):
    override = f"{prefix}model.hiden_size" + ("" if prefix == "~" else "=3")
    assert_names(problems(override), "model.hiden_size model.hidden_size?")


def test_unknown_keys_in_a_mapping_are_refused():
    assert_names(problems("model={num_layers: 2, optim: {lrr: 1}}"), "model.optim.lrr model.optim.lr?")


@pytest.mark.parametrize(
    "override",
    [
        "++model.num_layers=2",
        "+model.num_layers=2",
        "+benchmark.overrides.mine='fp8=delayed'",
        "model={num_layers: 2}",
        "model.optim.betas.0=0.5",
        "~experiment",
        "logging={wandb: false}",
        "hydra.job.name=mine",
        "model.data.text_files=[]",
        # Empty, and meant: no value follows in an argument of its own.
        "logging.wandb_project=",
    ],
)
def test_what_hydra_allows_and_the_schema_knows_passes(override):
    assert len(jobs(override)) == 1


def test_an_element_of_a_list_is_set():
    assert load_config(["model.optim.betas.0=0.5"]).model.optim.betas[0] == 0.5


def test_keys_of_a_users_file_are_checked_and_the_file_is_named(my_conf):
    folder = my_conf(
        my_run=f"{RUN}model:\n  hiden_size: 3\n  num_layers: two\nfoo: 1\n",
        model__mine="# @package model\ndefaults: [tiny]\nnum_layer: 3\n",
    )
    found = problems("--config-dir", str(folder), "--config-name", "my_run", "model=mine")
    assert_names(
        found,
        f"{folder}/model/mine.yaml: model.num_layer model.num_layers?",
        f"{folder}/my_run.yaml: model.hiden_size model.hidden_size?",
        f"{folder}/my_run.yaml: foo",
        f"model.num_layers='two' integer {folder}/my_run.yaml",
    )


def test_a_users_folder_adds_options_and_primary_files(my_conf):
    folder = my_conf(
        my_run=f"{RUN}trainer:\n  max_steps: 77\n", model__mine="# @package model\ndefaults: [tiny]\nnum_layers: 2\n"
    )
    (job,) = jobs("--config-dir", str(folder), "--config-name", "my_run", "model=mine")
    assert (job.config.trainer.max_steps, job.config.model.num_layers) == (77, 2)


def test_a_users_own_group_is_added_with_a_plus_sign(my_conf):
    (job,) = jobs("--config-dir", str(my_conf(size__mine="# @package model\nnum_layers: 2\n")), "+size=mine")
    assert job.config.model.num_layers == 2


def test_a_file_that_was_changed_is_read_anew(my_conf):
    text = "# @package _global_\nmodel:\n  num_layers: 2\ntrainer:\n  max_steps: 5\n"
    seen = []
    for steps in ("5", "6"):
        folder = my_conf(experiment__mine=text.replace("max_steps: 5", f"max_steps: {steps}"))
        # What a composition does with the values it was given is not seen by the next.
        for override in ([], ["model.num_layers=3"], []):
            config = load_config(["experiment=mine", *override], Source(config_dir=folder))
            seen.append((config.trainer.max_steps, config.model.num_layers))
    assert seen == [(5, 2), (5, 3), (5, 2), (6, 2), (6, 3), (6, 2)]


@pytest.mark.parametrize("plus", ["", "+", "++"])
@pytest.mark.parametrize("typed", ["1e3", "1_000", "-7", "0.50", "007"])
def test_a_path_that_looks_like_a_number_is_taken_as_typed(plus, typed):
    assert load_config([f"{plus}run_dir={typed}"]).run_dir == typed


def test_an_experiment_overrides_several_groups(my_conf):
    text = "# @package _global_\ndefaults:\n  - override /parallelism: dp\ntrainer:\n  max_steps: 5\n"
    (job,) = jobs("--config-dir", str(my_conf(experiment__mine=text)), "experiment=mine")
    assert (job.config.model.use_distributed_optimizer, job.config.trainer.max_steps) == (True, 5)


def test_a_file_hidden_by_one_of_ours_is_refused(my_conf):
    folder = my_conf(model__tiny="num_layers: 2\n")
    (found,) = problems("--config-dir", str(folder))
    assert found.startswith(f"{folder}/model/tiny.yaml ")
    assert "conf/model/tiny.yaml" in found.removeprefix(f"{folder}/model/tiny.yaml")


SAVED = ("model=gpt2_124m", "fp8=delayed", "model.fp8_emulate=true", "optimizer=adam_wsd", "model.optim.lr=0.003")
SAVED_TEXTS = (r"sample.prompt='a \${b} \\'", "model.data.data_prefix=[0.7,web,0.3,'2024']", "data=mmap")


@pytest.fixture
def repeated(tmp_path):
    """What a command line composes from the directory of a run of the overrides."""

    def compose(saved, *arguments):
        (tmp_path / "config.yaml").write_text(saved if isinstance(saved, str) else config_to_yaml(load_config(saved)))
        return load_config(arguments, Source(config_dir=tmp_path))

    return compose


@pytest.mark.parametrize(
    "saved",
    [(), SAVED, ("experiment=gpt2_124m_1gpu", *SAVED_TEXTS), ("benchmark.overrides={app: 'model.seed=2'}",)],
    ids=["nothing", "options", "texts", "a mapping"],
)
def test_a_run_is_repeated_from_its_directory(saved, repeated):
    assert repeated(saved) == load_config(saved)
    changed = repeated(saved, "trainer.max_steps=7", "model.optim.weight_decay=0.5", "run_dir=again")
    assert changed == load_config([*saved, "trainer.max_steps=7", "model.optim.weight_decay=0.5", "run_dir=again"])


@pytest.mark.parametrize(
    ("chosen", "differs"),
    [
        ("fp8=none", "fp8"),
        ("fp8=tensorwise", "fp8"),
        ("optimizer=adam", "optim"),
        ("model={num_layers: 2}", "num_layers"),
        ("parallelism=single", None),
    ],
)
def test_an_option_that_is_chosen_comes_over_a_saved_run(chosen, differs, repeated):
    """Also one that conf/ chooses by default."""
    before, after = (dataclasses.asdict(repeated(SAVED, *overrides).model) for overrides in ([], [chosen]))
    changed = {name for name, value in after.items() if value != before[name]}
    assert {name[: len(differs or "")] for name in changed} == set(filter(None, [differs]))
    fp8 = {"fp8=none": (False, None), "fp8=tensorwise": (True, "tensorwise")}.get(chosen, (True, "delayed"))
    assert (after["fp8"], after["fp8_recipe"] and after["fp8_recipe"].name) == fp8


def test_an_experiment_that_is_chosen_comes_over_a_saved_run_with_its_options(repeated):
    config, smoke = repeated(SAVED, "experiment=smoke"), load_config(["experiment=smoke"])
    assert (config.trainer, config.checkpoint, config.model.data) == (smoke.trainer, smoke.checkpoint, smoke.model.data)
    assert config.model.hidden_size == smoke.model.hidden_size
    assert config.model.fp8, "of which it says nothing"


def test_a_configuration_of_an_earlier_version_is_repeated(repeated):
    """Keys that it lacks get the values that keep its model (config.load)."""
    path = REPOSITORY / "tests" / "saved_config.yaml"
    assert repeated(path.read_text()) == load_saved_config(path)


def test_a_saved_run_passes_the_same_checks(tmp_path):
    saved = config_to_yaml(load_config([]))
    arguments = ("--config-dir", str(tmp_path), "--config-name", "config")
    (tmp_path / "config.yaml").write_text(saved)
    assert [job.config for job in jobs(*arguments)] == [load_config([])]
    assert_names(problems(*arguments, "model.num_layers=0"), "model.num_layers=0")
    (tmp_path / "config.yaml").write_text(saved.replace("max_steps: 500", "max_steps: 5.5\n  max_stepps: 5"))
    found = problems(*arguments, "model.hiden_size=4")
    assert_names(
        found,
        "model.hiden_size model.hidden_size?",
        f"{tmp_path}/config.yaml: trainer.max_stepps trainer.max_steps?",
        f"trainer.max_steps=5.5 {tmp_path}/config.yaml",
    )


@pytest.mark.parametrize("text", ["model:\n  num_layers: 2\n", f"{RUN}model:\n  num_layers: 2\n"])
def test_a_users_file_of_that_name_is_still_hidden(text, my_conf):
    (found,) = problems("--config-dir", str(my_conf(config=text)))
    assert "config.yaml is hidden by " in found


def test_config_path_replaces_conf(my_conf):
    folder = my_conf(config="name: alone\n")
    found = problems("--config-path", str(folder))
    sections = (
        "run_dir",
        "extensions",
        "model",
        "trainer",
        "checkpoint",
        "logging",
        "sample",
        "evaluation",
        "plan",
        "benchmark",
        "compare",
        "coordinate_check",
    )
    assert_names(found, *sections)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("model: [", "my_run.yaml"),
        ("- a\n", "'my_run' DictConfig"),
        ("defaults:\n  - config\n  - model: tny\n", "'model/tny' tiny?"),
        (f"{RUN}model:\n  seed: ${{nowhere}}\n", "model.seed=${nowhere}"),
        (f"{RUN}model:\n  seed: null\n", "model.seed=null integer my_run.yaml"),
    ],
)
def test_broken_files_are_told_without_a_traceback(my_conf, text, named):
    folder = my_conf(my_run=text)
    assert_names(problems("--config-dir", str(folder), "--config-name", "my_run"), named)


def test_open_values_are_told_with_their_meaning():
    found = problems("model=base")
    assert len(found) == 5
    assert_names(found[:1], "model.num_layers model.num_layers=… integer, 1 or more: Transformer layers.")


def test_a_sweep_is_checked_job_by_job_before_the_first_starts():
    found = problems("-m", "model.num_query_groups=1,2,3", "model.seed=1,2", "trainer.max_steps=0")
    assert_names(
        sorted(found),
        "model.num_attention_heads=4 model.num_query_groups=3; model.num_query_groups=1, 2 or 4 "
        "[model.num_query_groups=3 model.seed=1; model.num_query_groups=3 model.seed=2]",
        "trainer.max_steps=0 1",
    )
    assert "[" not in sorted(found)[1]


NOTHING = ("range(1,1)", "range(3,1)", "shuffle(range(2,2))", "glob(nothing*)", "interval(1,2)", "choice()", "sort()")


@pytest.mark.parametrize("values", NOTHING)
@pytest.mark.parametrize("key", ["model.optim.lr", "model"])
def test_a_sweep_over_nothing_is_refused(key, values):
    (found,) = problems("-m", f"{key}={values}", "trainer.max_steps=1,2")
    assert f"{key}={values}" in found


def test_a_file_sweeps_over_nothing_no_less(my_conf):
    folder = my_conf(
        my_run="defaults:\n  - config\n  - _self_\nhydra:\n  sweeper:\n    params: {model.seed: 'range(1,1)'}\n"
    )
    (found,) = problems("-m", "--config-dir", str(folder), "--config-name", "my_run")
    assert_names([found], "model.seed=range(1,1)")


def test_parameters_of_the_sweeper_that_the_command_line_cannot_set_are_told():
    (found,) = problems("-m", "hydra.sweeper.params={model.seed: '1,2'}")
    assert_names([found], "hydra.sweeper.params")


def test_a_sweep_over_the_options_that_a_pattern_names():
    swept = jobs("-m", "model=glob(gpt2_1*)", "fp8=none")
    assert [job.name for job in swept] == ["model=gpt2_124m", "model=gpt2_1_5b"]


def test_jobs_of_a_sweep_have_their_own_run_directories():
    run_dirs = [job.config.run_dir for job in jobs("-m", "model.seed=1,2", "model=tiny,gpt2_124m")]
    assert [path[-2:] for path in run_dirs] == ["/0", "/1", "/2", "/3"]


def test_a_sweep_with_a_run_directory_per_job_is_its_own():
    swept = jobs("-m", "model.seed=1,2", "run_dir='runs/${hydra:job.num}'")
    assert [job.config.run_dir for job in swept] == ["runs/0", "runs/1"]


def test_a_sweep_into_one_run_directory_is_refused():
    (found,) = problems("-m", "model.seed=1,2", "run_dir=same")
    assert_names([found], "run_dir='same' 2 ${hydra:job.num}")


def test_a_sweep_under_a_launcher_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    (found,) = problems("-m", "model.seed=1,2")
    assert_names([found], "-m torchrun")


def test_options_and_overrides_may_be_mixed():
    assert len(jobs("model=tiny", "-m", "model.seed=1,2")) == 2


def test_showing_the_configuration_asks_for_no_processes_and_no_values(capsys):
    assert main(["--cfg", "job", "parallelism=tp8_sp", "model=base"]) == 0
    assert "tensor_model_parallel_size: 8" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--cfg", "job", "-p", "model.optim"], "# @package model.optim\nname: adam"),
        (["--cfg", "hydra", "-p", "hydra.job"], "name: gpt_pretrain"),
        (["--cfg", "job", "--resolve"], "max_position_embeddings: 256"),
    ],
)
def test_hydras_own_options_work(arguments, expected, capsys):
    assert main(arguments) == 0
    assert expected in "".join(capsys.readouterr())


def test_hydras_own_option_that_sets_up_its_logging_works():
    done = run_ranks(1, ["-m", "gpt_pretrain", "--info", "defaults"])
    assert done.returncode == 0
    assert "parallelism/single" in done.stdout


@pytest.mark.parametrize("option", ["--experimental-rerun=x", "--hydra-help", "--shell-completion"])
def test_options_of_hydra_without_a_use_here_are_refused(option):
    assert_names(problems(option), f"{option.partition('=')[0]} not supported")


def test_help_shows_groups_keys_values_and_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["--help", "model=llama3_8b", "model.seed=7"]) == 0
    text = capsys.readouterr().out
    assert "llama3_8b*" in text
    assert "  model.num_layers = 32   (integer, 1 or more)\n      Transformer layers.\n" in text
    assert "  model.seed = 7   (integer, 0 or more)" in text
    keys = [line for line in text.splitlines() if " = " in line and "(" in line]
    assert len(keys) > 90
    assert [line for line in text.splitlines() if len(line) > 80 and line not in keys] == []
    monkeypatch.setenv("COLUMNS", "10")
    assert main(["--help"]) == 0


def test_other_ranks_show_nothing(monkeypatch, capsys):
    """Errors are told by the first rank that meets them (tests/test_told_once.py)."""
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert main(["--cfg", "job"]) == 0
    assert "".join(capsys.readouterr()) == ""


def test_a_failed_job_does_not_stop_a_sweep_and_is_counted_at_its_end(tmp_path):
    missing = [f"[{tmp_path}/a.txt]", f"[{tmp_path}/b.txt]"]
    sweep = [f"model.data.text_files=choice({','.join(missing)})", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", "-m", "data=text", *sweep])
    assert done.returncode == 2
    assert "run 2 of 2: model.data.text_files=" in done.stdout
    assert "error: 2 of 2 runs of the sweep failed" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_sweep_ends_with_the_command_that_compares_its_runs(tmp_path):
    small = ["data=mock", "model.num_layers=1", "trainer.max_steps=1", "trainer.limit_val_batches=0"]
    ends = ["sample.max_new_tokens=0", "checkpoint.save_at_end=false", f"hydra.sweep.dir={tmp_path}/sweep"]
    done = fork_ranks(1, ["-m", "gpt_pretrain", "-m", "model.seed=1,2", *small, *ends])
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.splitlines()[-1].partition(": ")[2])
    assert command[:3] == ["python", "-m", "gpt_pretrain.compare"]
    assert command[3:] == [f"runs=[{tmp_path}/sweep/0,{tmp_path}/sweep/1]"]
    assert all((tmp_path / "sweep" / name / "metrics.jsonl").is_file() for name in "01")


def test_a_sweep_records_what_it_sweeps_over(tmp_path):
    request = parse_command_line(["-m", "model.seed=1,2", f"hydra.sweep.dir={tmp_path}/sweep"])
    check_request(request, read_launch())
    record_sweep(request)
    recorded = yaml.safe_load((tmp_path / "sweep" / "multirun.yaml").read_text())
    assert recorded["hydra"]["overrides"]["task"] == ["model.seed=1,2"]


def test_hydras_own_settings_of_a_job_hold_while_it_runs(tmp_path, monkeypatch):
    monkeypatch.delenv("OF_A_JOB", raising=False)
    settings = ["hydra.output_subdir=.hydra", "hydra.job.chdir=true", "+hydra.job.env_set.OF_A_JOB=${hydra:job.name}"]
    (job,) = jobs("model.seed=7", f"hydra.run.dir={tmp_path}/hydra", *settings)
    before = Path.cwd()
    with hydra_settings(job):
        assert (Path.cwd(), os.environ["OF_A_JOB"]) == (tmp_path / "hydra", "gpt_pretrain")
    assert (Path.cwd(), os.environ.get("OF_A_JOB")) == (before, None)
    written = {path.stem: yaml.safe_load(path.read_text()) for path in (tmp_path / "hydra/.hydra").iterdir()}
    assert written["config"]["model"]["seed"] == 7
    assert written["hydra"]["hydra"]["job"]["chdir"] is True
    assert written["overrides"] == ["model.seed=7"]


def test_callbacks_of_hydra_are_refused():
    (found,) = problems("+hydra.callbacks.mine._target_=hydra.experimental.callbacks.LogJobReturnCallback")
    assert_names([found], "hydra.callbacks 'mine' docs/bring_your_own.md")
