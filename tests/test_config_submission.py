"""A sweep whose runs are jobs of Slurm: what each job is given, and what is refused before Slurm hears of it."""

import sys

import pytest

from gpt_pretrain.__main__ import main
from gpt_pretrain.commands.command_line import check_request, parse_command_line
from gpt_pretrain.config.errors import ConfigError, UserError
from gpt_pretrain.config.load import config_to_yaml
from gpt_pretrain.launch.ranks import read_launch
from gpt_pretrain.launch.slurm import submit
from gpt_pretrain.rules.jobs import load_config
from tests.launching import REPOSITORY


@pytest.fixture(autouse=True)
def checkout(monkeypatch, no_launcher):
    monkeypatch.chdir(REPOSITORY)


def jobs(*arguments):
    request = parse_command_line(["-m", "hydra/launcher=slurm", *arguments])
    return check_request(request, read_launch())


def test_a_job_is_given_what_its_run_was_composed_from(tmp_path):
    sweep = jobs(
        "model=gpt2_124m",
        "model.global_batch_size=512",
        "model.seed=1,2",
        "sample.prompt='two words'",
        f"hydra.sweep.dir={tmp_path}",
        "hydra.launcher.nodes=2",
        "hydra.launcher.gpus_per_node=8",
        'hydra.launcher.sbatch=["--time=600"]',
    )
    for number, job in enumerate(sweep):
        assert job.submission.options == ["--nodes=2", "--gpus-per-node=8", "--time=600"]
        assert job.submission.launch.world_size == 16
        assert job.arguments == (
            "model=gpt2_124m",
            "model.global_batch_size=512",
            f"model.seed={number + 1}",
            "sample.prompt='two words'",
            # The batch script's default is FP8; what was checked here is not.
            "fp8=none",
            f"run_dir={tmp_path}/{number}",
        )


def test_a_job_is_not_given_what_only_the_submitting_command_reads():
    (job,) = jobs("compare.seeds=2", "compare={min_speedup: 1}", "+benchmark.overrides.mine='model.seed=2'")
    assert [argument.partition("=")[0] for argument in job.arguments] == ["fp8", "run_dir"]
    assert job.config.compare.seeds == 2


def test_jobs_of_a_run_that_is_repeated_keep_its_fp8_settings(tmp_path):
    """The batch script adds none where there is a saved configuration."""
    (tmp_path / "config.yaml").write_text(config_to_yaml(load_config(["model=gpt2_124m", "fp8=tensorwise"])))
    source = (f"--config-dir={tmp_path}", "--config-name=config")
    (job,) = jobs(*source, "model.seed=2")
    assert [argument.partition("=")[0] for argument in job.arguments] == ["model.seed", "run_dir"]
    assert job.config.model.fp8
    assert parse_command_line(source).source_options == [source[1], source[0]]


def test_an_experiments_choice_of_fp8_and_a_directory_of_the_users_own_go_along(tmp_path):
    sweep = jobs("fp8=delayed,tensorwise", "model=gpt2_124m", f"run_dir={tmp_path}/run_${{hydra:job.num}}")
    assert [job.arguments[-2:] for job in sweep] == [
        ("fp8=delayed", f"run_dir={tmp_path}/run_0"),
        ("fp8=tensorwise", f"run_dir={tmp_path}/run_1"),
    ]


def test_the_rules_are_asked_about_the_ranks_that_a_job_will_have():
    eight = ["parallelism=tp2", "model.global_batch_size=64", "model.seed=1,2", "hydra.launcher.gpus_per_node=8"]
    assert [job.submission.launch.world_size for job in jobs(*eight)] == [8, 8]
    with pytest.raises(ConfigError, match=r"give its job 2 tasks: hydra\.launcher\.nodes × hydra\.launcher\.gpus_per"):
        jobs("parallelism=tp2", "model.seed=1,2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hydra.launcher.nodes=0"], "hydra.launcher.nodes=0 is too small; use 1 or more"),
        (["hydra.launcher.nodes=many"], "hydra.launcher: Value 'many' of type 'str' could not be converted to Integer"),
        (["++hydra.launcher.node=2"], "hydra.launcher: Key 'node' not in 'Submission'"),
        *(
            (
                [f'hydra.launcher.sbatch=["{option}"]'],
                f"hydra.launcher.sbatch: {option} changes how many tasks a job has",
            )
            for option in ("--nodes=2", "-N2", "--gpus=8", "--gpus-per-task=2", "--gres=gpu:2", "--ntasks-per-node=3")
        ),
        (
            [r"run_dir='/tmp/\'b\'${hydra:job.num}'"],
            "run_dir=\"/tmp/'b'0\" has characters that a job of Slurm cannot be given",
        ),
        (["hydra.sweep.dir='/tmp/a\tb'"], r"run_dir='/tmp/a\tb/1' has characters that a job of Slurm cannot be given"),
        (["hydra.launcher.script=none.sbatch"], "hydra.launcher.script=none.sbatch is not a file; start in"),
        (["name=${hydra:job.num}"], "${hydra:…} is of this sweep, and Slurm's job of one run does not know it"),
        (["model.hiden_size=64"], "model.hiden_size is not a key; did you mean model.hidden_size?"),
    ],
)
def test_a_wrong_submission_is_refused_before_slurm_is_asked(arguments, message, capsys):
    assert main(["-m", "hydra/launcher=slurm", "model.seed=1,2", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_job_has_this_python_and_no_variable_that_changes_how_many_tasks_it_has(tmp_path, monkeypatch):
    options = '["--time=20","--nodelist=gpu1","--gpu-bind=none","--gres=lustre:1"]'
    (job, _) = jobs("model.seed=1,2", f"hydra.sweep.dir={tmp_path}", f"hydra.launcher.sbatch={options}")
    recording = tmp_path / "sbatch"
    recording.write_text(f"#!/bin/bash\nenv >{tmp_path}/environment\necho '7;tests'\n")
    recording.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("SBATCH_GPUS_PER_NODE", "8")
    monkeypatch.setenv("SBATCH_PARTITION", "gpu")
    monkeypatch.delenv("VENV", raising=False)
    for expected in (sys.prefix, "/mine"):
        assert submit(job.submission, tmp_path / "run", job.arguments) == "7"
        environment = (tmp_path / "environment").read_text().splitlines()
        assert {f"VENV={expected}", "SBATCH_PARTITION=gpu"} <= set(environment)
        assert not [line for line in environment if line.startswith("SBATCH_GPUS")]
        monkeypatch.setenv("VENV", "/mine")


def test_another_launcher_of_hydra_is_refused_with_those_that_there_are(capsys):
    assert main(["-m", "hydra.launcher._target_=somebody.elses.Launcher", "model.seed=1,2"]) == 2
    assert "hydra/launcher=basic, one after another, or as jobs of Slurm, =slurm" in capsys.readouterr().err


def test_without_slurm_the_message_says_what_is_missing(tmp_path, monkeypatch):
    (job, _) = jobs("model.seed=1,2", f"hydra.sweep.dir={tmp_path}")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="needs Slurm's sbatch, which is not on this machine's PATH"):
        submit(job.submission, tmp_path / "run", job.arguments)


def test_what_slurm_refuses_is_told_in_its_words(tmp_path, monkeypatch):
    (job, _) = jobs("model.seed=1,2", f"hydra.sweep.dir={tmp_path}")
    refusing = tmp_path / "sbatch"
    refusing.write_text("#!/bin/bash\necho 'sbatch: error: invalid partition specified: x' >&2\nexit 1\n")
    refusing.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError, match=r"sbatch refuses the run of .*: sbatch: error: invalid partition"):
        submit(job.submission, tmp_path / "run", job.arguments)
